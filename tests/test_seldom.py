"""Log lines that repeat: few are written, and none is left out unsaid."""

import logging
import time

from hstransport.seldom import Seldom

logger = logging.getLogger("seldom")


def test_lines_alike_come_once_in_a_while_and_say_how_many_were_left_out(caplog):
    seldom = Seldom(logger, every_s=0.2)
    for i in range(5):
        seldom.warning("disk %d is full", i)
        seldom.error("ring %d: %s", i, "gone", key="gone")
    assert caplog.messages == ["disk 0 is full", "ring 0: gone"]
    time.sleep(0.2)
    seldom.warning("disk %d is full", 9)
    assert caplog.messages[2:] == ["disk 9 is full (4 more like this were left out)"]


def test_what_nothing_followed_is_said_at_the_end(caplog):
    seldom = Seldom(logger)
    for i in range(3):
        seldom.warning("record %d is bad", i)
    seldom.warning("once")
    seldom.close()
    assert caplog.messages[2:] == ["record %d is bad (2 more like this were left out)"]
    seldom.close()
    assert len(caplog.messages) == 3

"""Where rings lie: private directories only, and names that cannot lead elsewhere."""

import os
import re
from collections import Counter
from pathlib import Path

import pytest
from hstransport_consumer.stream import Streams
from rig.producer import Producer

from hstransport.errors import ConfigError
from hstransport.session import (
    check_session_name,
    find_rings,
    find_sessions,
    ring_path,
    session_directory,
)


def test_directories_are_made_private(tmp_path):
    old = os.umask(0)
    try:
        directory = session_directory(tmp_path / "root", "s")
    finally:
        os.umask(old)
    assert directory.stat().st_mode & 0o777 == 0o700
    assert directory.parent.stat().st_mode & 0o777 == 0o700


def test_directory_that_others_can_enter_is_refused(tmp_path):
    directory = session_directory(tmp_path / "root", "s")
    directory.chmod(0o755)
    with pytest.raises(PermissionError, match="0755"):
        session_directory(tmp_path / "root", "s")
    with pytest.raises(PermissionError):
        find_rings(tmp_path / "root", "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a directory away")
def test_directory_of_another_user_is_refused(tmp_path):
    directory = session_directory(tmp_path / "root", "s")
    os.chown(directory, 12345, -1)
    with pytest.raises(PermissionError, match="12345"):
        find_rings(tmp_path / "root", "s")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a socket away")
def test_ring_with_a_socket_of_another_user_is_left_alone(ring_dir, caplog):
    producer = Producer(ring_dir, publish=True)
    os.chown(producer.place.socket, 12345, -1)
    streams = Streams(ring_dir, "s")
    assert not streams.discover(lambda info: None)
    assert "sock belongs to user id 12345, not to 0" in caplog.text
    streams.close()
    producer.close()


def test_the_wall_clock_decides_nothing():
    """It jumps. These say when something was, put rings in an order, or tell files apart; beside
    them a ring that nobody creates must be old before it is removed."""
    root = Path(__file__).resolve().parents[1]
    uses = re.compile(r"time\.time\(|st_[mc]time|datetime\.now|system_clock|CLOCK_REALTIME")
    files = [p for d in ("hstransport", "consumer", "csrc") for p in (root / d).rglob("*.*")]
    found = Counter(
        p.name
        for p in files
        if p.suffix in {".py", ".h", ".cpp", ".cu", ".cuh"}
        for line in p.read_text().splitlines()
        if uses.search(line)
    )
    assert found == {
        "server.py": 1,  # SessionInfo.created
        "exporter.py": 1,  # Start.time
        "follower.py": 1,
        "watch.py": 1,  # View.time
        "session.py": 1,  # the order of rings
        "stored.py": 1,  # whether a shard was read before
        "stale.py": 1,
    }


def test_rings_are_found_oldest_first_and_strangers_ignored(tmp_path):
    root = tmp_path / "r"
    first = ring_path(root, "s", "0" * 12, 0).path
    first.touch()
    os.utime(first)
    second = ring_path(root, "s", "1" * 12, 1).path
    second.touch()
    (first.parent / "notes.txt").touch()
    (first.parent / "XYZ-0.ring").touch()
    assert [(r.run[0], r.rank) for r in find_rings(root, "s")] == [("0", 0), ("1", 1)]
    assert find_sessions(root) == ["s"]
    assert find_sessions(tmp_path / "absent") == []


def test_too_long_socket_path_says_what_to_do(tmp_path):
    with pytest.raises(ConfigError, match="shorter HSTRANSPORT_DIR"):
        ring_path(tmp_path / ("x" * 100), "s", "0" * 12, 0)


@pytest.mark.parametrize("name", ["", ".", "../x", "a b", "é", "x" * 65])
def test_session_names_that_could_lead_elsewhere_are_refused(name):
    with pytest.raises(ConfigError):
        check_session_name(name)

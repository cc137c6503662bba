"""Have every prompt of a file captured whole: ask, wait for the consumer, ask again what is not."""

from __future__ import annotations

import signal
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

from .ask import Asker, Job
from .progress import Progress
from .prompts import Prompt
from .stored import PREFIX_MISSING, WHOLE, Stored
from .target import Target

_SILENCE_S = 60.0
"""Answers without anything in the directory for this long are worth a word."""


@dataclass(frozen=True)
class Settings:
    """How to ask; see ``hstransport extract --help``."""

    out: Path
    concurrency: int = 32
    max_new_tokens: int = 1
    retries: int = 2
    settle_timeout_s: float = 30.0


@dataclass
class Outcome:
    """What has become of the prompts."""

    whole: int = 0
    already_whole: int = 0
    not_whole: list[Job] = field(default_factory=list)
    requests: int = 0
    prompt_tokens: int = 0
    seconds: float = 0.0
    interrupted: bool = False
    server_lost: str | None = None
    nothing_arrived: bool = False
    """Requests were answered and none of their samples came into the directory."""

    def as_dict(self) -> dict[str, Any]:
        """For ``--json``."""
        return {
            "whole": self.whole,
            "already_whole": self.already_whole,
            "not_whole": [
                {
                    "id": job.prompt.id,
                    "line": job.prompt.line,
                    "state": job.state,
                    "reason": job.detail,
                    "requests": job.requests,
                }
                for job in self.not_whole
            ],
            "states": dict(Counter(job.state for job in self.not_whole)),
            "requests": self.requests,
            "prompt_tokens": self.prompt_tokens,
            "seconds": round(self.seconds, 3),
            "interrupted": self.interrupted,
            "server_lost": self.server_lost,
            "nothing_arrived": self.nothing_arrived,
        }


def extract(
    target: Target, prompts: Sequence[Prompt], settings: Settings, progress: Progress
) -> Outcome:
    """Run to the end, or until SIGINT or SIGTERM, which let the requests under way finish.

    ``target`` is entered when there is something to ask. Raises what that raises.
    """
    return _Extraction(target, prompts, settings, progress).run()


class _Extraction:
    def __init__(
        self, target: Target, prompts: Sequence[Prompt], settings: Settings, progress: Progress
    ) -> None:
        self._settings = settings
        self._target = target
        self._progress = progress
        self._stored = Stored(settings.out)
        self._outcome = Outcome()
        self._jobs = [Job(p) for p in prompts]
        self._leave_out_the_whole()
        self._asker = Asker(
            target,
            concurrency=settings.concurrency,
            retries=settings.retries,
            max_new_tokens=settings.max_new_tokens,
        )
        self._arrived = False
        self._first_answer: float | None = None
        self._warned = False

    def run(self) -> Outcome:
        started = time.monotonic()
        if self._jobs:
            with self._target:
                # A consumer that begins stores what a killed one left in the ring.
                self._leave_out_the_whole()
                with self._stop_on_signal(), self._progress:
                    self._ask_until_whole()
            # Leaving an engine, the consumer stores all that is left in the ring.
            self._stored.look(now=True)
            for job in self._jobs:
                if job.state == "not_stored":
                    self._is_stored(job)
        self._sum_up(time.monotonic() - started)
        return self._outcome

    def _leave_out_the_whole(self) -> None:
        self._stored.look(now=True)
        found = [(job, self._stored.find(job.prompt.id)) for job in self._jobs]
        self._jobs = [job for job, f in found if f is None or f.state != WHOLE]
        self._outcome.already_whole += len(found) - len(self._jobs)

    def _ask_until_whole(self) -> None:
        open_jobs = self._jobs
        for round_number in range(1 + self._settings.retries):
            self._ask(open_jobs, again=round_number > 0)
            self._settle(open_jobs)
            # What a retry of the request cannot change is not tried again.
            open_jobs = [j for j in open_jobs if j.state not in (WHOLE, "refused", "failed")]
            for job in open_jobs:
                job.past_cache |= job.state == PREFIX_MISSING
            # Nor is what nobody stores.
            if not open_jobs or self._asker.stopped or not self._arrived:
                break

    def _ask(self, jobs: Sequence[Job], again: bool) -> None:
        if not jobs:
            return
        self._progress.phase("asking again" if again else "asking", len(jobs))
        for job in self._asker.ask(jobs):
            if job is not None:
                self._progress.advance(job.prompt_tokens)
                if job.state == "answered" and self._first_answer is None:
                    self._first_answer = time.monotonic()
            self._arrived |= self._stored.look()
            self._warn_of_silence()

    def _settle(self, jobs: Sequence[Job]) -> None:
        """Wait until each answered job's sample is stored, or nothing has moved for a while."""
        waiting = [j for j in jobs if j.state == "answered"]
        if not waiting:
            return
        self._progress.phase("waiting for the consumer", len(waiting))
        moved = time.monotonic()
        while waiting:
            if self._stored.look():
                self._arrived = True
                moved = time.monotonic()
            left = [j for j in waiting if not self._is_stored(j)]
            self._progress.advance(0, len(waiting) - len(left))
            waiting = left
            if self._target.failure:
                self._asker.lose(self._target.failure)
                break
            if time.monotonic() - moved > self._settings.settle_timeout_s:
                break
            if waiting:
                time.sleep(0.1)
        for job in waiting:
            job.state = "not_stored"
            job.detail = self._target.failure or (
                f"answered, and not in {self._settings.out} "
                f"{self._settings.settle_timeout_s:g} s after the last that came"
            )

    def _is_stored(self, job: Job) -> bool:
        found = self._stored.find(job.prompt.id)
        if found is None or (found.state != WHOLE and found.rid != job.rid):
            return False  # not there, or what an earlier request left
        job.state, job.detail = found.state, found.detail
        return True

    def _warn_of_silence(self) -> None:
        if self._warned or self._arrived or self._first_answer is None:
            return
        if time.monotonic() - self._first_answer > _SILENCE_S:
            self._warned = True
            self._progress.note(
                f"the server answers, but nothing has come into {self._settings.out}: is "
                f"`hstransport-consumer --out {self._settings.out}` running?"
            )

    def _sum_up(self, seconds: float) -> None:
        o = self._outcome
        o.whole = sum(j.state == WHOLE for j in self._jobs)
        o.not_whole = [j for j in self._jobs if j.state != WHOLE]
        o.requests = sum(j.requests for j in self._jobs)
        o.prompt_tokens = sum(j.prompt_tokens for j in self._jobs)
        o.seconds = seconds
        asked = [j for j in self._jobs if j.requests]
        if asked and all(j.state == "failed" for j in asked):
            self._asker.lost = self._asker.lost or asked[-1].detail
        if self._target.failure:
            self._asker.lose(self._target.failure)
        o.server_lost = self._asker.lost
        o.interrupted = self._asker.stopped and self._asker.lost is None
        stored_none = any(j.state == "not_stored" for j in self._jobs)
        o.nothing_arrived = stored_none and not self._arrived

    @contextmanager
    def _stop_on_signal(self) -> Iterator[None]:
        """The first signal stops asking; the second is Python's own KeyboardInterrupt."""
        numbers = (signal.SIGINT, signal.SIGTERM)

        def stop(number: int, frame: FrameType | None) -> None:
            for n in numbers:
                signal.signal(n, signal.default_int_handler)
            self._asker.stop()
            self._progress.note("stopping: waiting for the requests under way (again: at once)")

        before = [signal.signal(n, stop) for n in numbers]
        try:
            yield
        finally:
            for n, handler in zip(numbers, before, strict=True):
                signal.signal(n, handler)

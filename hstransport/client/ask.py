"""Asking for many prompts at once: bounded concurrency, retries, an end on demand."""

from __future__ import annotations

import itertools
import queue
import random
import threading
import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from .prompts import Prompt
from .target import Refused, Target, Unreachable

_BACKOFF_S = 0.5
_MAX_BACKOFF_S = 30.0


@dataclass
class Job:
    """A prompt on its way to being a whole sample."""

    prompt: Prompt
    state: str = "not_asked"
    """``not_asked``, ``refused``, ``failed``, ``answered``, or the stored sample's state."""
    detail: str = ""
    rid: str = ""
    """SGLang's id of the last request."""
    requests: int = 0
    prompt_tokens: int = 0
    past_cache: bool = False
    """Its first rows were in the server's radix cache, and stored nowhere."""


def payload(
    prompt: Prompt, rid: str, max_new_tokens: int, *, past_cache: bool = False
) -> dict[str, Any]:
    """The body of POST /generate. ``past_cache``: every row is to be computed."""
    tags: dict[str, Any] = {"hstransport_id": prompt.id}
    if prompt.labels:
        tags["hstransport_labels"] = prompt.labels
    if prompt.loss_mask is not None:
        tags["hstransport_loss_mask"] = list(prompt.loss_mask)
    body: dict[str, Any] = {
        "rid": rid,
        "sampling_params": {
            "temperature": 0,
            "max_new_tokens": max_new_tokens,
            "custom_params": tags,
        },
    }
    if past_cache:
        body["extra_key"] = rid  # the radix cache holds prefixes by key: nobody has this one
    if prompt.tokens is not None:
        body["input_ids"] = prompt.tokens.tolist()
    else:
        body["text"] = prompt.text
    return body


class Asker:
    """Threads that ask one job after another; each job comes back once, answered or not."""

    def __init__(
        self, target: Target, *, concurrency: int, retries: int, max_new_tokens: int
    ) -> None:
        self._target = target
        self._concurrency = concurrency
        self._retries = retries
        self._max_new_tokens = max_new_tokens
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._failed_in_row = 0
        self.lost: str | None = None
        """Why the target is believed to be gone, or None."""

    @property
    def stopped(self) -> bool:
        return self._stop.is_set()

    def stop(self) -> None:
        """Ask for no more jobs; those that are being asked come back."""
        self._stop.set()

    def ask(self, jobs: Sequence[Job]) -> Iterator[Job | None]:
        """Yield each job that was asked, as it comes back, and None when 0.2 s pass without one."""
        waiting = iter(jobs)
        back: queue.SimpleQueue[Job | BaseException | None] = queue.SimpleQueue()
        threads = min(self._concurrency, len(jobs))
        for _ in range(threads):
            # Daemons: a second Ctrl-C must not wait for answers.
            threading.Thread(target=self._work, args=(waiting, back), daemon=True).start()
        while threads:
            try:
                item = back.get(timeout=0.2)
            except queue.Empty:
                yield None
                continue
            if isinstance(item, BaseException):
                self.stop()
                raise item
            if item is None:
                threads -= 1
            else:
                yield item

    def _work(
        self, waiting: Iterator[Job], back: queue.SimpleQueue[Job | BaseException | None]
    ) -> None:
        try:
            while not self._stop.is_set():
                with self._lock:
                    job = next(waiting, None)
                if job is None:
                    break
                self._one(job)
                back.put(job)
            back.put(None)
        except BaseException as e:
            back.put(e)

    def _one(self, job: Job) -> None:
        for attempt in itertools.count():
            job.rid = f"hst-{uuid.uuid4().hex}"
            job.requests += 1
            try:
                answer = self._target.generate(self._body(job))
            except Refused as e:
                job.state, job.detail = "refused", str(e)
                self._failed_in_row = 0
                return
            except Unreachable as e:
                job.state, job.detail = "failed", str(e)
                if self._target.failure:
                    self.lose(self._target.failure)
                    return
                if attempt >= self._retries or self._stop.wait(_backoff_s(attempt)):
                    self._failed(str(e))
                    return
            else:
                self._failed_in_row = 0
                job.state, job.detail = "answered", ""
                meta = answer.get("meta_info") or {}
                job.prompt_tokens = int(meta.get("prompt_tokens") or 0)
                return

    def lose(self, words: str) -> None:
        """The target is gone: ask for no more."""
        with self._lock:
            self.lost = self.lost or words
        self.stop()

    def _body(self, job: Job) -> dict[str, Any]:
        return payload(job.prompt, job.rid, self._max_new_tokens, past_cache=job.past_cache)

    def _failed(self, words: str) -> None:
        """After as many prompts in a row as are asked at once, the server is taken for gone."""
        with self._lock:
            self._failed_in_row += 1
            many = self._failed_in_row >= max(self._concurrency, 4)
        if many and not self.stopped:
            self.lose(words)


def _backoff_s(attempt: int) -> float:
    return min(_BACKOFF_S * 2.0**attempt, _MAX_BACKOFF_S) * random.uniform(0.75, 1.25)

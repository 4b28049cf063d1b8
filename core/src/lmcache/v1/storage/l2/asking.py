"""Whether tiers hold objects: from memory where an engine is our own, by asking where it is shared."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence

from lmcache.v1.storage.l2.adapter import Call
from lmcache.v1.storage.l2.tier import Tier
from lmcache.v1.storage.l2.workers import Job

__all__ = ["holds"]


class _Answers:
    """What shared tiers said so far of ``keys``."""

    def __init__(self, keys: Sequence[bytes], known: list[bool]) -> None:
        self.keys = keys
        self.known = known
        self._changed = threading.Condition()
        self._open = 0

    def ask(self, tier: Tier, at: Sequence[int], seconds: float) -> Job:
        """A call that asks for the keys at these places; ``end`` is called in any case."""

        def run(call: Call) -> list[bool]:
            return tier.contains([self.keys[i] for i in at], call)

        def end(answers: list[bool] | None) -> None:
            with self._changed:
                for i, has in zip(at, answers or (), strict=False):
                    self.known[i] = self.known[i] or has
                self._open -= 1
                self._changed.notify_all()

        with self._changed:
            self._open += 1
        return Job("ask", seconds, run, end)

    def refused(self) -> None:
        """A call that was not taken."""
        with self._changed:
            self._open -= 1

    def wait(self, until: float) -> list[bool]:
        """What is known by then, or once all have answered."""
        with self._changed:
            while self._open and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return list(self.known)


def holds(tiers: Sequence[Tier], keys: Sequence[bytes], seconds: float) -> list[bool]:
    """Whether one of the tiers says that it holds each key, as far as that is known within ``seconds``."""
    until = time.monotonic() + seconds
    usable = [tier for tier in tiers if tier.may_read]
    known = [any(tier.may_hold(key) for tier in usable) for key in keys]
    open_places = [i for i, has in enumerate(known) if not has]
    answers = _Answers(keys, known)
    for tier in usable:
        if tier.index is not None:
            continue
        for at in range(0, len(open_places), tier.batch):
            job = answers.ask(tier, open_places[at : at + tier.batch], seconds)
            if not tier.workers.submit(job):
                answers.refused()
    return answers.wait(until)

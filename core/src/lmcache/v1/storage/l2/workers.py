"""The threads of a tier: they alone call its adapter, each call has a deadline, and one that hangs costs a thread.

A call that is not back in time is *overdue*: who waits is told at once, the breaker opens, and another thread takes
the place of the one that hangs, up to as many again as the adapter has. When all of them hang the tier is stuck and
refuses everything until a call returns.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from lmcache.logging import init_logger
from lmcache.v1.storage.l2.adapter import Call
from lmcache.v1.storage.l2.breaker import CLOSED, OPEN, Breaker
from lmcache.v1.storage.l2.clock import Alarm, Clock
from lmcache.v1.storage.l2.remote import reason

__all__ = ["Job", "Workers"]

logger = init_logger(__name__)

_PROBE_SECONDS = 2.0
_LOOK_SECONDS = 0.1
"""How often the end looks whether a call hangs by now."""
_GRACE = 0.2
"""Seconds that an adapter may take to notice that its time is over."""

Kind = Literal["read", "ask", "write", "probe"]
"""``ask`` comes after ``read``: what is known to be there is not to wait for what may be."""


def _nothing() -> None:
    return None


def _ready() -> bool:
    return True


@dataclass(eq=False, slots=True)
class Job:
    """One call of an adapter, and what surrounds it. Everything but ``run`` must return at once; all is called
    without any lock, from any thread.

    ``start`` comes first, where the call is about to be made; False: there is nothing left to do. ``run`` blocks
    in the adapter. ``end`` gets its result, or None if it raised, is overdue or is never made; called once.
    ``let_go`` comes when the adapter touches no memory of the call any more: right after ``end``, except for an
    overdue call; called once.
    """

    kind: Kind
    seconds: float
    run: Callable[[Call], Any]
    end: Callable[[Any], None]
    start: Callable[[], bool] = _ready
    let_go: Callable[[], None] = _nothing
    state: str = "new"
    call: Call | None = None

    @property
    def returned(self) -> bool:
        """In ``end``: whether the adapter touches no memory of the call any more."""
        return self.state == "over"


@dataclass(slots=True)
class Counts:
    """Since the start."""

    calls: int = 0
    errors: int = 0
    overdue: int = 0
    last_error: str = ""


@dataclass(slots=True)
class _Queues:
    read: deque[Job] = field(default_factory=deque)
    ask: deque[Job] = field(default_factory=deque)
    write: deque[Job] = field(default_factory=deque)


class Workers:
    """Threads, queues, deadlines and breakers around one adapter.

    Args:
        name: the tier's, for threads and the log.
        threads: calls at once; all but one of them may be writes, so that a read need not wait for those.
        probe: a cheap call of the adapter that tells whether it is well again.
        failures, seconds: a breaker opens after so many failures in a row, and is probed after so long.
        on_state: told of every change of state. Called without a lock.
    """

    def __init__(
        self,
        name: str,
        threads: int,
        clock: Clock,
        probe: Callable[[Call], Any],
        failures: int,
        seconds: float,
        on_state: Callable[[str], None],
    ) -> None:
        self.name = name
        self.counts = Counts()
        self._threads = max(1, threads)
        self._writers = max(1, self._threads - 1)
        self._clock = clock
        self._probe = probe
        self._probe_after = seconds
        self._on_state = on_state
        reads, writes = Breaker(failures), Breaker(failures)
        self._breakers = {"read": reads, "write": writes}
        self._breaker_of = {"read": reads, "ask": reads, "write": writes}
        self._queues = _Queues()
        self._mutex = threading.Lock()
        self._work = threading.Condition(self._mutex)
        self._alive: dict[threading.Thread, Job | None] = {}
        """Every thread, and what it does now."""
        self._idle = self._hung = self._writing = 0
        self._probing: Job | None = None
        self._probe_due = False
        self._closed = False

    # ---- for callers

    def usable(self, kind: Literal["read", "ask", "write"]) -> bool:
        """Whether a job of this kind would be taken now."""
        return self._breaker_of[kind].state is CLOSED and not self._stuck and not self._closed

    def submit(self, job: Job) -> bool:
        """Queue a job; False: refused, and none of its functions is called."""
        with self._mutex:
            if job.kind == "probe" or not self.usable(job.kind):
                return False
            job.state = "queued"
            getattr(self._queues, job.kind).append(job)
            self._wake()
        return True

    def cancel(self, job: Job) -> bool:
        """Take a job back; True: it never begins, and none of its functions is called. False: it is under way,
        and knows now that nobody waits; or it is over."""
        with self._mutex:
            if job.state == "queued":
                getattr(self._queues, job.kind).remove(job)
                job.state = "over"
                return True
            if job.call is not None:
                job.call.cancel()
            return False

    @property
    def state(self) -> str:
        """For people: up, open (a breaker is), probing, stuck (every thread hangs) or closed."""
        if self._closed:
            return "closed"
        if self._stuck:
            return "stuck"
        if all(breaker.state is CLOSED for breaker in self._breakers.values()):
            return "up"
        return "probing" if self._probing else "open"

    def figures(self) -> dict[str, Any]:
        """For status."""
        return {
            "calls": self.counts.calls,
            "errors": self.counts.errors,
            "overdue": self.counts.overdue,
            "hung": self._hung,
            "breaker_opened": sum(breaker.opened for breaker in self._breakers.values()),
            "last_error": self.counts.last_error,
        }

    def close(self, seconds: float) -> bool:
        """Refuse what waits, and wait for the threads, but not for those that hang; whether all ended."""
        with self._mutex:
            self._closed = True
            waiting = self._flush("read", "ask", "write")
            threads = list(self._alive)
            self._work.notify_all()
        self._refuse(waiting)
        until = Call(seconds)
        for thread in threads:
            while thread.is_alive() and not self._hangs(thread) and until.remaining:
                thread.join(min(until.remaining, _LOOK_SECONDS))
        return not any(thread.is_alive() for thread in threads)

    # ---- threads

    def _hangs(self, thread: threading.Thread) -> bool:
        with self._mutex:
            job = self._alive.get(thread)
            return job is not None and job.state == "overdue"

    @property
    def _stuck(self) -> bool:
        return self._hung >= 2 * self._threads

    def _wake(self) -> None:
        """Mutex held: see to it that somebody takes what was queued."""
        if self._idle:
            self._work.notify()
        queues = self._queues
        if self._idle < len(queues.read) + len(queues.ask) + len(queues.write):
            self._spawn()

    def _spawn(self) -> None:
        """Mutex held: one thread more, as long as fewer are free than the adapter takes calls."""
        if len(self._alive) < min(2 * self._threads, self._threads + self._hung):
            thread = threading.Thread(target=self._work_on, name=f"lmcache-tier-{self.name}", daemon=True)
            self._alive[thread] = None
            thread.start()

    def _take(self) -> Job | None:
        """Mutex held: the next job that may begin now. Reads first; but one write at a time gets its turn."""
        if self._probing is not None and self._probing.state == "queued":
            return self._probing
        reads, writes = self._queues.read or self._queues.ask, self._queues.write
        if writes and self._writing < self._writers:
            turn = self._writing == 0 and (self._threads > 1 or self.counts.calls % 4 == 0)
            if turn or not reads:
                self._writing += 1
                return writes.popleft()
        return reads.popleft() if reads else None

    def _work_on(self) -> None:
        me = threading.current_thread()
        while True:
            with self._mutex:
                job = self._alive[me] = None
                while not self._surplus() and (job := self._take()) is None and not self._closed:
                    self._idle += 1
                    self._work.wait()
                    self._idle -= 1
                if job is None:
                    del self._alive[me]
                    return
                job.state = "running"
                self._alive[me] = job
                job.call = Call(job.seconds)
                self.counts.calls += 1
            self._do(job, job.call)
            del job  # and with it whatever its functions hold, while we wait

    def _surplus(self) -> bool:
        return len(self._alive) > self._threads + self._hung

    def _do(self, job: Job, call: Call) -> None:
        try:
            wanted = job.start()
        except Exception:
            logger.exception("tier %s: a job could not start", self.name)
            wanted = False
        alarm: Alarm | None = None
        result, error = None, ""
        if wanted:
            call.deadline = Call(job.seconds).deadline  # start() may have waited for a lock
            alarm = self._clock.after(job.seconds + _GRACE, lambda: self._overdue(job))
            try:
                result = job.run(call)
            except BaseException as exc:  # an engine's client may raise anything; it costs this call only
                error = reason(f"{type(exc).__name__}: {exc}")
            alarm.cancel()
        changed = False
        flushed: list[Job] = []
        with self._mutex:
            late = job.state == "overdue"
            job.state = "over"
            self._hung -= late
            self._writing -= job.kind == "write" and not late
            if wanted and not late:
                changed, flushed = self._judge(job, error)
            if self._probing is job:
                self._probing = None
                self._probe_later()
            if late:
                self._wake()
        if not late:
            self._guarded(job.end, result)
        self._guarded(job.let_go)
        self._refuse(flushed)
        if changed or late:
            self._on_state(self.state)

    def _overdue(self, job: Job) -> None:
        """From the clock: a call is not back."""
        with self._mutex:
            if job.state != "running":
                return
            job.state = "overdue"
            if job.call is not None:
                job.call.cancel()
            self._hung += 1
            self._writing -= job.kind == "write"
            self.counts.overdue += 1
            _, flushed = self._judge(job, f"no answer for {job.seconds:g} s", at_once=True)
            if self._probing is job:
                self._probing = None
            self._probe_later()
            if self._stuck:
                flushed += self._flush("read", "ask", "write")
            self._wake()
        self._guarded(job.end, None)
        self._refuse(flushed)
        self._on_state(self.state)

    # ---- breakers

    def _judge(self, job: Job, error: str, at_once: bool = False) -> tuple[bool, list[Job]]:
        """Mutex held: tell the breakers how a call went; whether one changed, and what can wait no longer."""
        if error:
            self.counts.errors += 1
            self.counts.last_error = error
        if job.kind == "probe":
            closed = [not error and b.success() for b in self._breakers.values() if b.state is OPEN]
            return any(closed), []
        breaker = self._breaker_of[job.kind]
        if not error:
            return breaker.success(), []
        if not breaker.failure(at_once):
            return False, []
        self._probe_later()
        return True, self._flush(*("read", "ask") if breaker is self._breakers["read"] else ("write",))

    def _flush(self, *kinds: str) -> list[Job]:
        """Mutex held: take out what waits; :meth:`_refuse` follows, without it."""
        waiting: list[Job] = []
        for kind in kinds:
            queue: deque[Job] = getattr(self._queues, kind)
            waiting += queue
            queue.clear()
        for job in waiting:
            job.state = "over"
        return waiting

    def _refuse(self, jobs: list[Job]) -> None:
        for job in jobs:
            self._guarded(job.end, None)
            self._guarded(job.let_go)

    def _guarded(self, function: Callable[..., None], *arguments: Any) -> None:
        try:
            function(*arguments)
        except Exception:  # a fault of ours in one job must not end the thread that serves the others
            logger.exception("tier %s: the end of a job failed", self.name)

    def _probe_later(self) -> None:
        """Mutex held: as long as a breaker is open somebody looks now and then whether the engine is back."""
        if self._closed or self._probe_due or all(b.state is CLOSED for b in self._breakers.values()):
            return
        self._probe_due = True
        self._clock.after(self._probe_after, self._probe_now)

    def _probe_now(self) -> None:
        with self._mutex:
            self._probe_due = False
            if self._closed or self._probing or all(b.state is CLOSED for b in self._breakers.values()):
                return
            if self._stuck:
                self._probe_later()
                return
            self._probing = Job("probe", _PROBE_SECONDS, self._probe, lambda _: None, state="queued")
            if self._idle:
                self._work.notify_all()
            else:
                self._spawn()

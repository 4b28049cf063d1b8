"""The parts of a tier: clock, breaker, index, threads. What each promises by itself."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from helpers.tiers import until
from lmcache.v1.storage.eviction import LRU
from lmcache.v1.storage.l2 import workers as workers_module
from lmcache.v1.storage.l2.adapter import Call, Held
from lmcache.v1.storage.l2.breaker import CLOSED, OPEN, Breaker
from lmcache.v1.storage.l2.clock import Clock
from lmcache.v1.storage.l2.tier_index import Item, TierIndex
from lmcache.v1.storage.l2.workers import Job, Workers

# ------------------------------------------------------------------------------------------------------- clock


@pytest.fixture
def clock() -> Iterator[Clock]:
    made = Clock()
    yield made
    made.close()


def test_alarms_go_off_in_order_and_not_before_their_time(clock: Clock) -> None:
    seen, done = list[tuple[float, float]](), threading.Event()

    def note(due: float) -> None:
        seen.append((due, time.monotonic()))
        if len(seen) == 3:
            done.set()

    for delay in (0.03, 0.01, 0.02):
        due = time.monotonic() + delay
        clock.after(delay, partial(note, due))
    assert done.wait(10.0)
    assert sorted(seen) == seen
    assert all(at >= due for due, at in seen)


def test_a_cancelled_alarm_never_goes_off_and_one_that_raises_costs_no_other(clock: Clock) -> None:
    seen, done = list[str](), threading.Event()
    for seconds in [0.2] * 5 + [60.0] * 600:
        clock.after(seconds, lambda: seen.append("cancelled")).cancel()
    clock.after(0.21, lambda: 1 // 0)
    clock.after(0.22, done.set)
    assert done.wait(10.0)
    assert not seen


def test_a_closed_clock_has_done_what_was_due_and_does_nothing_more(clock: Clock) -> None:
    seen = list[str]()
    clock.after(60.0, lambda: seen.append("late"))
    clock.after(0.0, lambda: seen.append("due"))
    clock.close()
    clock.after(0.0, lambda: seen.append("after"))
    assert seen == ["due"]


# ----------------------------------------------------------------------------------------------------- breaker


@given(most=st.integers(1, 4), story=st.lists(st.booleans(), max_size=30))
def test_a_breaker_opens_after_so_many_failures_in_a_row_and_closes_with_a_success(
    most: int, story: list[bool]
) -> None:
    breaker, row, is_open, opened = Breaker(most), 0, False, 0
    for good in story:
        changed = breaker.success() if good else breaker.failure()
        row = 0 if good else row + 1
        was, is_open = is_open, not good and (is_open or row >= most)
        opened += is_open and not was
        assert changed == (is_open != was)
        assert (breaker.state, breaker.opened) == (OPEN if is_open else CLOSED, opened)
    assert breaker.failure(at_once=True) == (breaker.opened == opened + 1)
    assert breaker.state is OPEN


# ------------------------------------------------------------------------------------------------------- index


def test_an_index_gives_up_first_what_was_used_longest_ago_before_it_was_built() -> None:
    index = TierIndex(LRU(), [Held(b"new", 10, 3.0), Held(b"old", 10, 1.0), Held(b"mid", 10, 2.0)])
    assert index.victims(15, ()) == [b"old", b"mid"]
    index.touch([b"old", b"not here"])
    assert index.victims(1, ()) == [b"mid"]
    assert index.victims(1000, {b"new"}) == [b"mid", b"old"]
    assert index.victims(0, ()) == []


def test_a_policy_that_names_keys_twice_hides_nothing_of_an_account() -> None:
    class Stutters(LRU):
        def victims(self) -> Iterator[bytes]:
            for key in super().victims():
                yield from (key, key, b"unknown")

    index = TierIndex(
        Stutters(), [Held(name, 10, float(i), "x") for i, name in enumerate([b"a", b"b", b"c"])]
    )
    index.add(b"d", Item(10, "y"))
    assert index.victims(15, {b"a"}, "x") == [b"b", b"c"]
    assert index.victims(1000, (), "y") == [b"d"]


@given(
    story=st.lists(
        st.tuples(st.sampled_from(["add", "remove", "touch"]), st.integers(0, 5), st.integers(1, 9)),
        max_size=40,
    )
)
def test_an_index_holds_what_was_added_and_not_removed(story: list[tuple[str, int, int]]) -> None:
    index, model = TierIndex(LRU(), []), dict[bytes, int]()
    for what, number, size in story:
        key = bytes([number])
        if what == "add":
            index.add(key, Item(size))
            model[key] = size
        elif what == "remove":
            removed = {key: Item(model.pop(key))} if key in model else {}
            assert index.remove([key, key]) == removed
        else:
            index.touch([key])
        assert dict(index.items()) == {key: Item(size) for key, size in model.items()}
        assert sorted(index.keys()) == sorted(model)
        assert (len(index), key in index) == (len(model), key in model)
        assert set(index.victims(1 << 20, ())) == set(model)


# ----------------------------------------------------------------------------------------------------- threads


class Threads(Workers):
    """Workers whose probe does what ``self.probe`` says, and which remember their states."""

    def __init__(self, threads: int = 2, failures: int = 2, seconds: float = 0.02) -> None:
        self.clock = Clock()
        self.probe: Callable[[], object] = lambda: None
        self.states: list[str] = []
        super().__init__(
            "test", threads, self.clock, lambda call: self.probe(), failures, seconds, self.states.append
        )

    def run(
        self, run: Callable[[Call], Any], kind: str = "read", seconds: float = 5.0, **more: Any
    ) -> tuple[Job, list[Any]]:
        """Submit; the list gets the results, and "let go" behind them."""
        said: list[Any] = []
        job = Job(kind, seconds, run, said.append, let_go=lambda: said.append("let go"), **more)  # type: ignore[arg-type]
        assert self.submit(job)
        return job, said


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[Threads]:
    monkeypatch.setattr(workers_module, "_GRACE", 0.0)
    monkeypatch.setattr(workers_module, "_PROBE_SECONDS", 0.1)
    made = Threads()
    yield made
    made.close(5.0)
    made.clock.close()


def fail(call: Call) -> None:
    raise RuntimeError("broken\nin two lines")


def test_a_job_ends_once_with_its_result_or_none(threads: Threads) -> None:
    _, good = threads.run(lambda call: 7)
    _, bad = threads.run(fail)
    _, skipped = threads.run(lambda call: pytest.fail("ran"), start=lambda: False)
    assert until(lambda: (good, bad, skipped) == ([7, "let go"], [None, "let go"], [None, "let go"]))
    assert threads.figures()["last_error"] == "RuntimeError: broken in two lines"
    assert threads.state == "up", "one failure is none, and a job that did not run is no failure"


def test_an_overdue_call_ends_in_time_and_lets_go_when_it_returns(threads: Threads) -> None:
    hold = threading.Event()
    began = time.monotonic()
    job, said = threads.run(lambda call: hold.wait(20), seconds=0.05)
    assert until(lambda: said == [None])
    assert time.monotonic() - began < 5.0
    assert job.call is not None
    assert job.call.over
    assert "open" in threads.states
    assert threads.figures()["hung"] == 1
    hold.set()
    assert until(lambda: said == [None, "let go"])
    assert until(lambda: threads.state == "up")
    assert threads.figures()["hung"] == 0


def test_threads_that_hang_are_replaced_up_to_a_bound_and_then_the_tier_is_stuck(threads: Threads) -> None:
    hold = threading.Event()
    threads.probe = lambda: hold.wait(20)
    for _ in range(2):
        threads.run(lambda call: hold.wait(20), seconds=0.02)
    assert until(lambda: threads.figures()["hung"] == 2)
    assert not threads.usable("read")
    assert threads.usable("write"), "what hangs are reads"
    for _ in range(2):
        threads.run(lambda call: hold.wait(20), kind="write", seconds=0.02)
    assert until(lambda: threads.state == "stuck")
    assert not threads.submit(Job("write", 1.0, lambda call: 1, lambda result: None))
    assert len(threads._alive) == 4
    hold.set()
    assert until(lambda: threads.state == "up")
    assert until(lambda: len(threads._alive) <= 2), "those too many end"
    _, said = threads.run(lambda call: 1)
    assert until(lambda: said == [1, "let go"])


def test_what_waits_when_the_breaker_opens_ends_at_once_and_the_other_kind_goes_on(threads: Threads) -> None:
    gate = threading.Event()

    def fail_later(call: Call) -> None:
        gate.wait(20)
        fail(call)

    threads.probe = lambda: 1 // 0
    under_way = [threads.run(fail_later, kind="read")[1] for _ in range(2)]
    waiting = [threads.run(lambda call: pytest.fail("ran"), kind="read")[1] for _ in range(5)]
    gate.set()
    assert until(lambda: all(said == [None, "let go"] for said in under_way + waiting))
    assert not threads.usable("read")
    _, said = threads.run(lambda call: 1, kind="write")
    assert until(lambda: said == [1, "let go"])
    assert threads.state in ("open", "probing")
    threads.probe = lambda: None
    assert until(lambda: threads.state == "up")


def test_a_job_taken_back_before_it_began_is_never_heard_of_and_one_under_way_is_told(
    threads: Threads,
) -> None:
    gate = threading.Event()
    running = [threads.run(lambda call: gate.wait(20) and call.over) for _ in range(2)]
    assert until(lambda: all(job.state == "running" for job, _ in running))
    job, said = threads.run(lambda call: pytest.fail("ran"))
    assert threads.cancel(job)
    assert not threads.cancel(job)
    assert not threads.cancel(running[0][0])
    gate.set()
    assert until(lambda: running[0][1] == [True, "let go"] and running[1][1] == [False, "let go"])
    assert said == []


def test_reads_overtake_writes_and_writes_never_take_every_thread(threads: Threads) -> None:
    gate, order = threading.Event(), list[str]()
    job, first = threads.run(lambda call: gate.wait(20), kind="write")
    assert until(lambda: job.state == "running")
    writes = [threads.run(lambda call: order.append("write"), kind="write")[1] for _ in range(3)]
    _, read = threads.run(lambda call: order.append("read"))
    assert until(lambda: bool(read)), "a thread was left for it"
    assert order == ["read"]
    gate.set()
    assert until(lambda: bool(first) and all(writes))


@pytest.fixture
def one() -> Iterator[Threads]:
    """A single thread."""
    made = Threads(threads=1)
    yield made
    made.close(5.0)
    made.clock.close()


def test_one_thread_serves_reads_first_but_starves_no_write(one: Threads) -> None:
    gate, order = threading.Event(), list[str]()
    first, _ = one.run(lambda call: gate.wait(20))
    assert until(lambda: first.state == "running")
    _, write = one.run(lambda call: order.append("write"), kind="write")
    reads = [one.run(lambda call: order.append("read"))[1] for _ in range(12)]
    gate.set()
    assert until(lambda: bool(write) and all(reads))
    assert 0 < order.index("write") <= 4


def test_close_ends_what_waits_and_all_threads(one: Threads) -> None:
    gate = threading.Event()
    job, under_way = one.run(lambda call: gate.wait(20))
    assert until(lambda: job.state == "running")
    _, waiting = one.run(lambda call: pytest.fail("ran"))
    assert not one.close(0.01)
    assert waiting == [None, "let go"]
    assert one.state == "closed"
    assert not one.submit(Job("read", 1.0, lambda call: 1, lambda result: None))
    gate.set()
    assert one.close(5.0)
    assert under_way == [True, "let go"]
    assert not one._alive

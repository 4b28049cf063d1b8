"""What every storage adapter must do, as tests that need nothing but an open adapter."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

from lmcache.testing.adapters.objects import Target, expect, new_key, new_object, read, same, write
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, StorageAdapter, Usage
from lmcache.v1.storage.l2.envelope import check

__all__ = ["AdapterConformance"]

_SIZES = (0, 1, 7, 511, 4095, 4096, 4097, 65_537, 1 << 20)
_ROUNDS = 6


class AdapterConformance:
    """Derive a class named ``Test…`` in a test module, and say how your adapter is opened."""

    persistent: bool = False
    """Whether what was stored is there when the adapter was closed and opened again."""
    seconds: float = 20.0
    """That a call may take here; beyond it, it counts as hung."""
    late_seconds: float = 2.0
    """In which a call whose time is over returns, at most."""
    largest: int = 5_000_000
    """Bytes of the largest object that is tried."""

    def make(self) -> StorageAdapter:
        """Open the adapter. What was stored before may or may not be there."""
        raise NotImplementedError(
            f"{type(self).__name__} derives from AdapterConformance: expected to define make()"
        )

    @contextmanager
    def opened(self) -> Iterator[StorageAdapter]:
        """An adapter for one test; what the test stored in it is removed as far as the engine allows."""
        adapter = self.make()
        try:
            yield adapter
        finally:
            adapter.close()

    # ---- bytes

    def test_what_was_stored_is_loaded_as_it_was(self) -> None:
        """From none to the largest, several in a batch."""
        with self.opened() as adapter:
            objects = [new_object(size) for size in (*_SIZES, self.largest)]
            write(adapter, objects, self.seconds)
            for put in objects:
                found = read(adapter, put.key, len(put.payload), self.seconds)
                expect(found is not None, f"object of {len(put.payload)} bytes: stored, and not found")
                expect(same(found, put), f"object of {len(put.payload)} bytes: loaded other bytes")

    def test_payloads_may_begin_at_any_address(self) -> None:
        """Nobody promises that buffers are aligned, nor that a size is a multiple of anything."""
        with self.opened() as adapter:
            for shift in (0, 1, 3, 511):
                put = new_object(10_007, shift=shift)
                write(adapter, [put], self.seconds)
                found = read(adapter, put.key, 10_007, self.seconds, shift=shift)
                expect(same(found, put), f"payload {shift} bytes off: loaded other bytes")

    def test_a_batch_is_answered_in_its_order_with_gaps(self) -> None:
        """What is there among what is not."""
        with self.opened() as adapter:
            there = [new_object(1000 + i) for i in range(5)]
            write(adapter, there, self.seconds)
            targets = [Target.of(put.key, len(put.payload)) for put in there]
            gaps = [Target.of(new_key(), 1000) for _ in range(5)]
            mixed = [target for pair in zip(targets, gaps, strict=True) for target in pair]
            keys = [target.want.key for target in mixed]
            held = adapter.contains(keys, Call(self.seconds))
            expect(held == [True, False] * 5, f"contains answered {held}")
            headers = adapter.load([target.want for target in mixed], Call(self.seconds))
            expect([h is not None for h in headers] == [True, False] * 5, f"load found {headers}")
            for put, target, header in zip(there, targets, headers[::2], strict=True):
                check(header or b"", put.key, target.want.payload)
                expect(target.untouched_around(), "load wrote beside a payload")

    def test_an_empty_batch_is_answered(self) -> None:
        """By an empty list."""
        with self.opened() as adapter:
            call = Call(self.seconds)
            for answer in (adapter.contains([], call), adapter.store([], call), adapter.load([], call)):
                expect(answer == [], f"an empty batch was answered {answer}")
            expect(adapter.delete([], call) == [], "an empty batch of keys to delete was answered otherwise")

    def test_storing_again_leaves_one_of_the_two_in_full(self) -> None:
        """Which one is the engine's choice; header and payload belong together."""
        with self.opened() as adapter:
            first = new_object(70_000)
            second = new_object(70_000, first.key)
            write(adapter, [first], self.seconds)
            write(adapter, [second], self.seconds)
            found = read(adapter, first.key, 70_000, self.seconds)
            expect(found in (bytes(first.payload), bytes(second.payload)), "neither of the two was loaded")

    def test_a_payload_of_another_length_is_a_miss(self) -> None:
        """Too short and too long."""
        with self.opened() as adapter:
            put = new_object(5000)
            write(adapter, [put], self.seconds)
            for size in (1, 4999, 5001, 9000):
                target = Target.of(put.key, size)
                (header,) = adapter.load([target.want], Call(self.seconds))
                expect(header is None, f"an object of 5000 bytes was loaded as one of {size}")
                expect(target.untouched_around(), "load wrote beside the payload")
            expect(same(read(adapter, put.key, 5000, self.seconds), put), "it is not there any more")

    def test_the_source_may_change_once_store_has_returned(self) -> None:
        """The caller gives the memory to somebody else."""
        with self.opened() as adapter:
            put = new_object(300_000)
            before = bytes(put.payload)
            write(adapter, [put], self.seconds)
            put.payload[:] = bytes(len(put.payload))
            expect(read(adapter, put.key, len(before), self.seconds) == before, "loaded what came after")

    def test_nothing_writes_to_the_target_once_load_has_returned(self) -> None:
        """Nor after it has given up."""
        with self.opened() as adapter:
            puts = [new_object(500_000) for _ in range(4)]
            write(adapter, puts, self.seconds)
            targets = [Target.of(put.key, 500_000) for put in puts]
            for seconds in (self.seconds, 0.0, 0.002):
                with _lenient():
                    adapter.load([target.want for target in targets], Call(seconds))
                for target in targets:
                    target.want.payload[:] = bytes(500_000)
                expect(same(read(adapter, puts[0].key, 500_000, self.seconds), puts[0]), "not loaded")
                written = [target for target in targets if any(target.want.payload)]
                expect(not written, "a payload was written after load had returned")

    # ---- what is there

    def test_contains_tells_what_is_there(self) -> None:
        """Before, after a store, and after a removal."""
        with self.opened() as adapter:
            put = new_object(3000)
            seen = [adapter.contains([put.key], Call(self.seconds))]
            write(adapter, [put], self.seconds)
            seen.append(adapter.contains([put.key, put.key], Call(self.seconds)))
            adapter.delete([put.key], Call(self.seconds))
            seen.append(adapter.contains([put.key], Call(self.seconds)))
            expect(seen == [[False], [True, True], [False]], f"contains answered {seen}")

    def test_what_was_deleted_is_gone_and_may_be_stored_again(self) -> None:
        """Deleting what is not there succeeds."""
        with self.opened() as adapter:
            puts = [new_object(2000) for _ in range(3)]
            write(adapter, puts, self.seconds)
            read(adapter, puts[0].key, 2000, self.seconds)
            gone = adapter.delete([puts[0].key, new_key(), puts[1].key], Call(self.seconds))
            expect(gone == [True] * 3, f"delete answered {gone}")
            found = [read(adapter, put.key, 2000, self.seconds) is not None for put in puts]
            expect(found == [False, False, True], f"after the removal of two of three, load found {found}")
            write(adapter, puts, self.seconds)
            expect(same(read(adapter, puts[0].key, 2000, self.seconds), puts[0]), "not there again")

    def test_headers_are_told_or_none(self) -> None:
        """Engines that cannot do it cheaply say None."""
        with self.opened() as adapter:
            put = new_object(2000)
            write(adapter, [put], self.seconds)
            told = adapter.headers([put.key, new_key()], Call(self.seconds))
            expect(told[0] in (put.header, None) and told[1] is None, f"headers answered {told}")

    def test_scan_and_usage_agree_with_what_was_stored(self) -> None:
        """A shared engine need not scan; its usage may be unknown."""
        with self.opened() as adapter:
            adapter.clear(Call(self.seconds))
            puts = [new_object(size) for size in (1, 5000, 70_000)]
            write(adapter, puts, self.seconds)
            usage, sizes = adapter.usage(), {p.key: len(p.header) + len(p.payload) for p in puts}
            expect(isinstance(usage, Usage) and min(usage) >= -1, f"usage answered {usage}")
            held = {held.key: held.size for held in adapter.scan()}
            if not adapter.shared or held:
                expect(
                    held == sizes, f"scan told {len(held)} objects of {held.values()}, not {sizes.values()}"
                )
            if not adapter.shared:
                expect(
                    usage.objects == len(puts), f"usage tells {usage.objects} objects: expected {len(puts)}"
                )
                expect(usage.used_bytes >= sum(sizes.values()), f"usage tells {usage.used_bytes} bytes")
            adapter.delete([puts[0].key], Call(self.seconds))
            if not adapter.shared:
                expect(
                    adapter.usage().objects == 2,
                    f"after one of three was removed, usage is {adapter.usage()}",
                )
                expect(
                    {h.key for h in adapter.scan()} == {p.key for p in puts[1:]}, "scan tells a removed one"
                )

    def test_books_add_up_and_no_account_goes_beyond_its_quota(self) -> None:
        """Where an adapter keeps books; they promise nothing where it keeps none."""
        with self.opened() as adapter:
            adapter.clear(Call(self.seconds))
            puts = [new_object(size, account=name) for size, name in ((1, ""), (5000, "a"), (70_000, "a"))]
            write(adapter, puts, self.seconds)
            books = adapter.accounts()
            if books is None:
                return
            told = {name: has.objects for name, has in books.usage().items()}
            expect(told == {"": 1, "a": 2}, f"accounts tells of objects {told}: expected {{'': 1, 'a': 2}}")
            used = sum(has.used_bytes for has in books.usage().values())
            expect(
                used == adapter.usage().used_bytes,
                f"accounts have {used} bytes, and usage is {adapter.usage()}",
            )
            held = {held.key: held.account for held in adapter.scan()}
            expect(
                held == {put.key: name for put, name in zip(puts, ("", "a", "a"), strict=True)},
                f"scan tells accounts {sorted(map(str, held.values()))}: expected those of the headers",
            )
            books.set_quota("a", books.used("a"))
            answers = adapter.store(
                [new_object(9, account="a"), new_object(9, account="b")], Call(self.seconds)
            )
            expect(
                answers == [False, True], f"store of one beyond its quota and one without answered {answers}"
            )
            adapter.delete([puts[1].key], Call(self.seconds))
            write(adapter, [new_object(9, account="a")], self.seconds)
            expect(
                books.objects("a") == 2, f"after all that an account has {books.objects('a')} objects, not 2"
            )

    def test_clear_leaves_nothing_that_is_ours(self) -> None:
        """It tells how many, or -1."""
        with self.opened() as adapter:
            adapter.clear(Call(self.seconds))
            puts = [new_object(2000) for _ in range(5)]
            write(adapter, puts, self.seconds)
            count = adapter.clear(Call(self.seconds))
            expect(count in (5, -1), f"clear told {count}: expected 5, or -1 where that is not known")
            held = adapter.contains([put.key for put in puts], Call(self.seconds))
            expect(not any(held), f"after clear, contains answered {held}")

    def test_what_was_stored_is_there_after_the_engine_was_opened_again(self) -> None:
        """Only engines that say that they are ``persistent``."""
        put = new_object(100_000)
        with self.opened() as adapter:
            write(adapter, [put], self.seconds)
        with self.opened() as adapter:
            found = read(adapter, put.key, 100_000, self.seconds)
            held = adapter.contains([put.key], Call(self.seconds))
            expect(held == [found is not None], "contains and load do not agree")
            expect(
                found in ((bytes(put.payload),) if self.persistent else (bytes(put.payload), None)), "lost"
            )

    def test_it_says_in_one_line_where_it_is(self) -> None:
        """At any time, without a wait."""
        with self.opened() as adapter:
            text, _, seconds = _timed(lambda: (adapter.describe(), adapter.usage()))
            expect(text[0] and "\n" not in text[0], f"describe answered {text[0]!r}: expected one line")
            expect(seconds < self.late_seconds, f"describe and usage took {seconds:.1f} s")
            expect(adapter.threads >= 1 and adapter.batch >= 1, "threads and batch are at least 1")

    # ---- time

    def test_a_call_that_is_over_returns_soon(self) -> None:
        """Too late, or cancelled. What it answers as done is done."""
        with self.opened() as adapter:
            puts = [new_object(200_000) for _ in range(8)]
            cancelled = Call(self.seconds)
            cancelled.cancel()
            for call in (Call(0.0), cancelled):
                for ask in _every_method(adapter, puts, call):
                    _, _, seconds = _timed(ask)
                    expect(seconds < self.late_seconds, f"a call that was over took {seconds:.1f} s")
            self._nothing_is_there_in_part(adapter, puts)

    def test_a_store_that_is_cancelled_leaves_nothing_in_part(self) -> None:
        """And one that runs out of time."""
        with self.opened() as adapter:
            for seconds, cancel_after in ((self.seconds, 0.0), (self.seconds, 0.01), (0.01, self.seconds)):
                puts, call = [new_object(self.largest // 2) for _ in range(8)], Call(seconds)
                timer = threading.Timer(cancel_after, call.cancel)
                timer.start()
                answers, _, took = _timed(partial(adapter.store, puts, call))
                timer.cancel()
                timer.join()
                expect(
                    took < self.seconds + self.late_seconds, f"a store that was cancelled took {took:.1f} s"
                )
                done = [put for put, stored in zip(puts, answers or [], strict=False) if stored]
                there = self._nothing_is_there_in_part(adapter, puts)
                expect({put.key for put in done} <= there, "told as stored, and not found")
                adapter.delete([put.key for put in puts], Call(self.seconds))

    # ---- many at once

    def test_callers_do_not_disturb_each_other(self) -> None:
        """Each with objects of its own, all with one in common, which has several versions.

        An engine may refuse a store of what somebody else is storing just now; what it accepts must be found.
        """
        with self.opened() as adapter:
            common = new_key()
            versions = [new_object(60_000, common) for _ in range(4)]
            known = [None, *(bytes(version.payload) for version in versions)]

            def work(number: int) -> None:
                for round_ in range(_ROUNDS):
                    own = new_object(30_000 + 1000 * number + round_)
                    stored = adapter.store([own, versions[(number + round_) % 4]], Call(self.seconds))
                    expect(len(stored) == 2 and stored[0] is True, f"store of a new object answered {stored}")
                    found = read(adapter, own.key, len(own.payload), self.seconds)
                    expect(same(found, own), "an object of one caller was not found, or is another's")
                    shared = read(adapter, common, 60_000, self.seconds)
                    expect(shared in known[stored[1] :], "the common object is none of its versions")
                    expect(
                        adapter.delete([own.key], Call(self.seconds)) == [True], "delete answered otherwise"
                    )
                    expect(
                        adapter.contains([own.key], Call(self.seconds)) == [False], "a removed one is there"
                    )

            _together(work, adapter.threads + 2, self.seconds * 4)

    # ----

    def _nothing_is_there_in_part(self, adapter: StorageAdapter, puts: Sequence[Put]) -> set[bytes]:
        """The keys of what is there, in full; fails for one that is there and not as it was stored."""
        there = set()
        for put in puts:
            found = read(adapter, put.key, len(put.payload), self.seconds)
            expect(found is None or same(found, put), "a part of an object can be found")
            if found is not None:
                there.add(put.key)
        return there


@contextmanager
def _lenient() -> Iterator[None]:
    """Within it an adapter may raise what it is allowed to raise."""
    try:
        yield
    except AdapterError as exc:
        expect("\n" not in str(exc), f"AdapterError {str(exc)!r}: expected one line")


def _timed(ask: Callable[[], Any]) -> tuple[Any, bool, float]:
    """The answer, whether there was one, and the seconds that it took."""
    start, answer, answered = time.monotonic(), None, False
    with _lenient():
        answer, answered = ask(), True
    return answer, answered, time.monotonic() - start


def _every_method(adapter: StorageAdapter, puts: Sequence[Put], call: Call) -> Iterator[Callable[[], Any]]:
    keys = [put.key for put in puts]
    wants = [Target.of(put.key, len(put.payload)).want for put in puts]
    yield lambda: adapter.store(puts, call)
    yield lambda: adapter.contains(keys, call)
    yield lambda: adapter.load(wants, call)
    yield lambda: adapter.headers(keys, call)
    yield lambda: adapter.delete(keys, call)


def _together(work: Callable[[int], None], count: int, seconds: float) -> None:
    """Run ``work(number)`` in ``count`` threads; the first fault of any is raised."""
    faults: list[BaseException] = []

    def guarded(number: int) -> None:
        try:
            work(number)
        except BaseException as exc:
            faults.append(exc)

    threads = [threading.Thread(target=guarded, args=(n,), daemon=True) for n in range(count)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + seconds
    for thread in threads:
        thread.join(max(0.0, deadline - time.monotonic()))
    expect(not any(thread.is_alive() for thread in threads), f"a caller did not return within {seconds:g} s")
    if faults:
        raise faults[0]

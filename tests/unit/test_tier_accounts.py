"""Accounts in tiers of our own: who has how much there, what a quota costs whom, and what is refused."""

from __future__ import annotations

import shutil
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from helpers.stored import (
    blocks_below,
    call,
    disk,
    key_of,
    memory,
    objects_below,
    put_of,
    shared_fs,
    the_file,
)
from helpers.tiers import Store, until
from helpers.tiers import memory as fault_tier
from lmcache.errors import ConfigError
from lmcache.v1.multiprocess.peer import adapter as peer
from lmcache.v1.storage.l2 import s3_options
from lmcache.v1.storage.l2 import shared_fs as shared_fs_module
from lmcache.v1.storage.l2.adapter import AdapterError, Held, StorageAdapter, Want
from lmcache.v1.storage.l2.clock import Clock
from lmcache.v1.storage.l2.index import Index
from lmcache.v1.storage.l2.options import read_options
from lmcache.v1.storage.l2.tier import Tier

PAGE = 4096
SIZE = 3 * PAGE
TAKEN = SIZE + PAGE
"""With the page of its header."""
GIB = 1 << 30
ACCOUNTS = ["", "0" * 16, "1" * 16]


class Shelf:
    """A tier over an adapter, called in this thread."""

    def __init__(self, adapter: StorageAdapter) -> None:
        self.clock = Clock()
        self.adapter = adapter
        self.tier = Tier("disk", adapter, self.clock, 5.0, 30.0, 1, 0.05, lambda *_: None)

    def put(self, account: str, *numbers: int) -> list[bool]:
        return self.tier.store([put_of(number, SIZE, account) for number in numbers], call())

    def get(self, number: int) -> bool:
        return self.tier.load([Want(key_of(number), memory(SIZE))], call())[0] is not None

    def there(self, *numbers: int) -> list[int]:
        return [n for n in numbers if self.adapter.contains([key_of(n)], call())[0]]

    def used(self) -> dict[str, int]:
        return {name: has.used_bytes // TAKEN for name, has in self.tier.accounts().items()}

    def close(self) -> None:
        self.tier.close(5.0)
        self.clock.close()


@contextmanager
def shelf(path: Path, **options: Any) -> Iterator[Shelf]:
    made = Shelf(disk(path, **options))
    try:
        yield made
    finally:
        made.close()


def test_what_each_account_has_is_known_and_known_again_after_a_restart(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("a", 1, 2)
        tier.put("", 3)
        assert tier.used() == {"": 1, "a": 2}
        before = tier.tier.accounts()
    with shelf(tmp_path) as tier:
        assert tier.tier.accounts() == before
        tier.tier.delete([key_of(1)], call())
        assert tier.used() == {"": 1, "a": 1}
        tier.tier.clear(call())
        assert tier.used() == {}


def test_over_its_quota_an_account_s_oldest_objects_go_and_nobody_else_s(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("other", 100, 101)
        tier.tier.set_quota("mine", 4 * TAKEN)
        tier.put("mine", 1)
        tier.put("mine", 2)
        tier.put("mine", 3, 4)
        assert tier.get(1), "just used"
        assert tier.put("mine", 5) == [True]
        assert tier.there(100, 101) == [100, 101]
        left = tier.there(1, 2, 3, 4, 5)
        assert 2 not in left, "the one that was used longest ago"
        assert {1, 5} <= set(left)
        assert tier.used()["mine"] <= 4
        assert tier.tier.counters.over_quota == 0


def test_what_does_not_fit_a_quota_is_refused_counted_and_costs_nothing(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("mine", 1)
        tier.tier.set_quota("mine", 2 * TAKEN)
        big = put_of(9, 4 * SIZE, "mine")
        assert tier.tier.store([big], call()) == [False]
        assert tier.there(1, 9) == [1]
        assert tier.put("mine", 2, 3, 4)[0], "the first of a batch, which are the first chunks of a prefix"
        assert tier.used()["mine"] <= 2
        tier.tier.set_quota("nothing", 0)
        assert tier.put("nothing", 50) == [False]
        counters = tier.tier.counters
        assert (counters.over_quota, counters.failed) == (1 + 1 + 1, 0)
        assert counters.stored == 1 + 2


def test_a_batch_of_several_accounts_is_answered_for_each(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.tier.set_quota("none", 0)
        tier.tier.set_quota("one", TAKEN)
        accounts = ["none", "free", "one", "none", "one", "free"]
        puts = [put_of(i, SIZE, account) for i, account in enumerate(accounts)]
        assert tier.tier.store(puts, call()) == [False, True, True, False, False, True]
        assert tier.used() == {"free": 2, "none": 0, "one": 1}


def test_what_is_there_already_makes_no_room_in_the_tier(tmp_path: Path) -> None:
    with shelf(tmp_path, max_gb=10 * TAKEN / GIB) as tier:
        tier.put("", *range(9))
        assert tier.put("", *range(5)) == [True] * 5
        assert tier.there(*range(9)) == list(range(9))


def test_of_a_batch_the_first_chunks_are_the_last_to_go(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("mine", 1, 2, 3, 4)
        tier.tier.set_quota("mine", 3 * TAKEN)
        assert until(lambda: tier.there(1, 2, 3, 4) == [1, 2, 3])


def test_what_is_there_already_is_no_reason_to_evict_or_refuse(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("mine", 1, 2)
        tier.tier.set_quota("mine", 2 * TAKEN)
        assert tier.put("mine", 1, 2) == [True, True]
        assert tier.there(1, 2) == [1, 2]


def test_a_quota_below_what_there_is_is_kept_soon_also_after_a_restart(tmp_path: Path) -> None:
    account = "0123456789abcdef"
    with shelf(tmp_path) as tier:
        for number in range(6):
            tier.put(account, number)
        tier.put("", 10, 11)
        tier.tier.set_quota(account, 4 * TAKEN)
        assert until(lambda: tier.used()[account] <= 4)
        assert tier.there(*range(6), 10, 11) == [2, 3, 4, 5, 10, 11], "the oldest went"
    with shelf(tmp_path, quotas_gb={account: 2 * TAKEN / GIB, "": 1.0}) as tier:
        assert until(lambda: tier.used()[account] <= 2)
        assert tier.used() == {"": 2, account: 2}
        assert tier.tier.accounts()[account].quota_bytes == 2 * TAKEN
        tier.tier.set_quota(account, None)
        assert all(tier.put(account, n) == [True] for n in range(6))
    with shelf(tmp_path) as tier:
        assert tier.used() == {"": 2, account: 6}, "no quota outlives its server"


def test_a_quota_holds_for_the_directory_that_comes_in_the_place_of_another(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.tier.set_quota("mine", 2 * TAKEN)
        tier.put("mine", 1, 2)
        (tmp_path / "disk-1").rename(tmp_path / "away")
        assert tier.put("mine", 3) == [True]
        assert tier.used() == {"mine": 1}
        assert tier.put("mine", 4, 5).count(True) >= 1
        assert tier.used()["mine"] <= 2
        (tmp_path / "disk-1").rename(tmp_path / "small")
        (tmp_path / "away").rename(tmp_path / "disk-1")
        tier.tier.set_quota("mine", TAKEN)
        assert tier.there(1, 2)
        assert tier.get(1) or tier.get(2)
        assert until(lambda: tier.used() == {"mine": 1}), "what it holds is too much by now"


def test_accounts_are_right_after_damage_and_after_files_that_others_removed(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("a", 1, 2, 3)
        with the_file(tmp_path, 1).open("r+b") as f:
            f.seek(PAGE)
            f.write(b"damage")
        the_file(tmp_path, 2).unlink()
        assert not tier.get(1)
        assert not tier.get(2)
        assert until(lambda: tier.used() == {"a": 1})
        assert tier.tier.counters.quarantined == 1


def test_an_eviction_that_fails_costs_the_store_and_no_quota(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.put("mine", 1, 2)
        tier.put("other", 3)
        tier.tier.set_quota("mine", 2 * TAKEN)
        tier.adapter.delete = lambda keys, call: [False] * len(keys)  # type: ignore[method-assign]
        assert tier.put("mine", 4) == [False]
        assert tier.used() == {"mine": 2, "other": 1}
        assert tier.tier.counters.over_quota == 1
        del tier.adapter.delete
        assert tier.put("mine", 4) == [True], "what could not go is known, and goes another time"


def test_what_could_not_go_while_the_disk_was_away_goes_when_it_is_back(tmp_path: Path) -> None:
    def fail(keys: Any, call: Any) -> list[bool]:
        raise AdapterError("away")

    with shelf(tmp_path) as tier:
        tier.put("mine", 1, 2, 3)
        tier.adapter.delete = tier.adapter.contains = fail  # type: ignore[method-assign]
        tier.tier.set_quota("mine", TAKEN)
        assert until(lambda: tier.tier.workers.state == "open")
        assert tier.used() == {"mine": 3}
        del tier.adapter.delete, tier.adapter.contains
        assert until(lambda: tier.used() == {"mine": 1})


def test_a_quota_below_what_one_call_can_remove_is_kept_all_the_same(tmp_path: Path) -> None:
    """Else what is too much would stay until the account stores again."""
    with shelf(tmp_path) as tier:
        tier.put("mine", *range(6))
        tier.put("theirs", *range(10, 14))
        delete, fresh = tier.adapter.delete, call

        def slow(keys: Any, call: Any) -> list[bool]:
            call.cancel()  # as if its time were over by then
            return delete(keys[:1], fresh()) + [False] * (len(keys) - 1)

        tier.adapter.delete = slow  # type: ignore[method-assign]
        tier.tier.set_quota("mine", TAKEN)
        tier.tier.set_quota("theirs", 2 * TAKEN)
        assert until(lambda: tier.used() == {"mine": 1, "theirs": 2})


@given(
    story=st.lists(
        st.tuples(
            st.sampled_from(["expect", "settle", "arrive", "add", "drop", "correct"]),
            st.integers(0, 5),
            st.integers(0, 9),
        ),
        max_size=40,
    )
)
def test_the_books_of_a_disk_add_up_to_what_is_used(story: list[tuple[str, int, int]]) -> None:
    index, expected, before = Index({"2": 12}), list[tuple[int, str]](), list[Held]()
    for what, number, nbytes in story:
        key, account = bytes([number] * 64), str(number % 3)
        if what == "expect" and index.expect(nbytes + 1, 30, account):
            expected.append((nbytes + 1, account))
            assert index.used <= 30
            assert account != "2" or index.accounts.used("2") <= 12
        elif what == "settle" and expected:
            index.settle(*expected.pop(number % len(expected)))
        elif what == "add" and index.used + nbytes <= 30 and account != "2":
            index.add(Held(key, nbytes, 0.0, account), nbytes)  # also over one of that key
        elif what == "arrive" and expected:
            size, whose = expected.pop(number % len(expected))
            used = index.accounts.used(whose)
            index.add(Held(bytes([3 * nbytes + int(whose)] * 64), size, 0.0, whose), size, size)
            assert index.accounts.used(whose) <= used
        elif what == "correct" and account != "2":
            index.correct(key, min(nbytes, 30 - index.used))
        elif what == "drop":
            assert index.drop(key) == (key in {held.key for held in before})
        before = index.held()
        usage = index.accounts.usage()
        assert sum(has.used_bytes for has in usage.values()) == index.used
        assert Counter({name: has.objects for name, has in usage.items()}) == Counter(
            h.account for h in before
        )
        coming = Counter[str]()
        for size, whose in expected:
            coming[whose] += size
        taken = Counter[str]()
        for held in before:
            taken[str(held.account)] += held.taken
        assert Counter({name: has.used_bytes for name, has in usage.items()}) == coming + taken


def test_many_threads_never_bring_an_account_above_its_quota(tmp_path: Path) -> None:
    with shelf(tmp_path) as tier:
        tier.tier.set_quota("a", 5 * TAKEN)
        tier.tier.set_quota("b", 3 * TAKEN)
        most: Counter[str] = Counter()
        done = threading.Event()

        def watch() -> None:
            while not done.is_set():
                for name, used in tier.used().items():
                    most[name] = max(most[name], used)

        def work(thread: int) -> None:
            for number in range(40):
                account = "abc"[number % 3]
                tier.put(account, thread * 1000 + number, thread * 1000 + 500 + number)

        watcher = threading.Thread(target=watch)
        watcher.start()
        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        done.set()
        watcher.join(10)
        assert most["a"] <= 5
        assert most["b"] <= 3
        used = tier.tier.accounts()
        assert used["c"].objects == 4 * 26, "who has no quota loses nothing"
        assert sum(has.used_bytes for has in used.values()) == tier.adapter.usage().used_bytes
        assert blocks_below(tmp_path) == tier.adapter.usage().used_bytes
        counters = tier.tier.counters
        assert counters.stored + counters.over_quota + counters.failed == 4 * 80


def test_a_tier_that_cannot_count_accounts_says_so_in_one_line(tmp_path: Path) -> None:
    store = Store(fault_tier(), shared_fs(tmp_path))
    try:
        with store.lock:
            with pytest.raises(
                ValueError, match=r"tier 't0': its engine does not say .*; limit accounts in l1"
            ):
                store.set_quota("a", 1, "t0")
            with pytest.raises(ValueError, match=r"tier 't1': others store there, too, .*type disk$"):
                store.set_quota("a", 1, "t1")
            with pytest.raises(KeyError, match="expected one of l1, t0, t1"):
                store.set_quota("a", 1, "t2")
            assert [row["accounts"] for row in store.status()] == [None, None]
            store.set_quota("a", 1)
            assert [(tier, name) for tier, name, _ in store.accounts()] == [("l1", "a")]
    finally:
        store.close(5)


@pytest.mark.parametrize(
    ("kind", "options"),
    [
        ("shared_fs", shared_fs_module.SharedOptions),
        ("s3", s3_options.Options),
        ("peer", peer.Options),
    ],
)
def test_a_shared_engine_that_is_given_quotas_says_why_it_has_none(kind: str, options: Any) -> None:
    with pytest.raises(ConfigError) as told:
        read_options(kind, options, {"quotas_gb": {"": 1}})
    assert str(told.value) == (
        f"--l2-adapter {kind}: quotas_gb: nobody counts here what one account has; limit accounts in l1 or in type disk"
    )


@pytest.mark.parametrize(
    ("quotas", "says"),
    [
        ({"salt": 1}, "quotas_gb 'salt': expected an account's id of 16 hex digits"),
        ({"": -1}, "quotas_gb '': -1: expected a number of GiB from 0 on"),
        ({"": float("nan")}, "quotas_gb '': nan: expected"),
        ({"": "x"}, "quotas_gb={'': 'x'}: expected a number"),
        (7, "quotas_gb=7: expected a map"),
    ],
)
def test_wrong_quotas_are_refused_in_one_line(quotas: object, says: str, tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as told:
        disk(tmp_path, quotas_gb=quotas)
    assert says in str(told.value)
    assert len(str(told.value).splitlines()) == 1


class AccountHistory(RuleBasedStateMachine):
    """Whatever happens, the accounts' bytes are the tier's, and the disk's; and nobody is above a quota for long."""

    numbers = st.lists(st.integers(0, 30), min_size=1, max_size=4, unique=True)
    accounts = st.sampled_from(ACCOUNTS)
    quotas = st.dictionaries(accounts, st.integers(0, 6).map(lambda n: n * TAKEN), max_size=3)

    @initialize(quotas=quotas)
    def begin(self, quotas: dict[str, int]) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.open(quotas)

    def open(self, quotas: dict[str, int]) -> None:
        self.quotas = dict(quotas)
        in_gib = {account: nbytes / GIB for account, nbytes in quotas.items()}
        self.shelf = Shelf(disk(self.path, max_gb=16 * TAKEN / GIB, quotas_gb=in_gib))

    @rule(whose=st.integers(0, 2), numbers=numbers)
    def store(self, whose: int, numbers: list[int]) -> None:
        alone = [n for n in numbers if n % 3 == whose]  # a key has one account
        others = [n for n in self.shelf.there(*range(31)) if n % 3 != whose]
        room = 16 * TAKEN * 0.95 - self.shelf.adapter.usage().used_bytes
        self.shelf.put(ACCOUNTS[whose], *alone)
        if len(alone) * TAKEN <= room:  # the whole tier has room, so nobody else is concerned
            assert self.shelf.there(*others) == others

    @rule(numbers=numbers)
    def load(self, numbers: list[int]) -> None:
        there = self.shelf.there(*numbers)
        assert [n for n in numbers if self.shelf.get(n)] == there

    @rule(numbers=numbers)
    def delete(self, numbers: list[int]) -> None:
        self.shelf.tier.delete([key_of(n) for n in numbers], call())
        assert self.shelf.there(*numbers) == []

    @rule()
    def clear(self) -> None:
        self.shelf.tier.clear(call())
        assert self.shelf.used() == dict.fromkeys(self.quotas, 0)

    @rule(number=st.integers(0, 30), cut=st.booleans())
    def harm(self, number: int, cut: bool) -> None:
        if self.shelf.there(number):
            file = the_file(self.path, number)
            if cut:
                file.unlink()
            else:
                file.write_bytes(b"x" * SIZE)
            deleted = self.shelf.tier.counters.deleted
            assert not self.shelf.get(number)
            assert until(lambda: self.shelf.tier.counters.deleted > deleted), "in a thread of the tier"

    @rule(account=accounts, nbytes=st.none() | st.integers(0, 6).map(lambda n: n * TAKEN))
    def limit(self, account: str, nbytes: int | None) -> None:
        self.shelf.tier.set_quota(account, nbytes)
        self.quotas = {**self.quotas, account: nbytes} if nbytes is not None else self.quotas
        if nbytes is None:
            self.quotas.pop(account, None)

    @rule(quotas=quotas)
    def restart(self, quotas: dict[str, int]) -> None:
        self.shelf.close()
        self.open(quotas)

    @invariant()
    def adds_up(self) -> None:
        if not hasattr(self, "shelf"):
            return
        tier = self.shelf.tier
        assert until(
            lambda: (
                not tier.accounts()
                or all(
                    has.quota_bytes is None or has.used_bytes <= has.quota_bytes
                    for has in tier.accounts().values()
                )
            )
        )
        accounts, usage = tier.accounts(), self.shelf.adapter.usage()
        assert sum(has.used_bytes for has in accounts.values()) == usage.used_bytes == blocks_below(self.path)
        assert sum(has.objects for has in accounts.values()) == usage.objects == len(objects_below(self.path))
        assert {
            name: has.quota_bytes for name, has in accounts.items() if has.quota_bytes is not None
        } == self.quotas

    def teardown(self) -> None:
        if hasattr(self, "shelf"):
            self.shelf.close()
            shutil.rmtree(self.path)


TestAccountHistory = AccountHistory.TestCase
TestAccountHistory.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)

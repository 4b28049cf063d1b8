"""Objects in files: what is stored is what is loaded, of any size, in both kinds of directory."""

from __future__ import annotations

import os
import shutil
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.stored import (
    blocks_below,
    call,
    disk,
    is_right,
    key_of,
    load,
    memory,
    objects_below,
    payload_of,
    put_of,
    shared_fs,
    store,
    temps_below,
    the_file,
)
from lmcache.v1.storage.l2 import envelope, file_io
from lmcache.v1.storage.l2.adapter import Call, Put, StorageAdapter, Want

SIZES = st.one_of(
    st.integers(0, 3),
    st.integers(-2, 2).map(lambda by: 4096 + by),
    st.integers(0, 70_000),
    st.sampled_from([1 << 18, (1 << 18) + 1, 300_000, 1 << 20, (1 << 20) - 1]),
)
Make = Callable[..., StorageAdapter]
both = pytest.mark.parametrize("make", [disk, shared_fs])


@pytest.fixture(scope="module")
def place() -> Iterator[Path]:
    """A directory on the disk, not in memory."""
    path = Path(tempfile.mkdtemp(prefix="lmcache-objects-"))
    yield path
    shutil.rmtree(path)


@both
@pytest.mark.parametrize("direct", ["auto", "off"])
@pytest.mark.parametrize("fsync", ["none", "data", "full"])
def test_every_size_comes_back_as_it_was(make: Make, direct: str, fsync: str, tmp_path: Path) -> None:
    sizes = [0, 1, 4095, 4096, 4097, 100_000, 1 << 18, (1 << 18) + 1, (1 << 20) - 1, 3 << 20]
    adapter = make(tmp_path, direct=direct, fsync=fsync)
    assert adapter.store([put_of(i, size) for i, size in enumerate(sizes)], call()) == [True] * len(sizes)
    assert all(is_right(adapter, i, size) for i, size in enumerate(sizes))
    assert temps_below(tmp_path) == []
    adapter.close()
    again = make(tmp_path)
    assert all(is_right(again, i, size) for i, size in enumerate(sizes))
    again.close()


@both
@settings(max_examples=40)
@given(size=SIZES, header=st.integers(0, 20_000), shift=st.integers(0, 9))
def test_long_headers_and_memory_that_is_not_aligned(
    make: Make, place: Path, size: int, header: int, shift: int
) -> None:
    path = place / "odd"
    adapter = make(path)
    payload = payload_of(1, size)
    info = envelope.ObjectInfo(key_of(1), size, envelope.checksum(payload), account="a" * header)
    at = memory(size + shift)[shift:]
    at[:] = payload
    assert adapter.store([Put(info.key, envelope.pack(info), at.toreadonly())], call()) == [True]
    into = memory(size + 2 * shift + 1)
    window = into[shift : shift + size]
    [found] = adapter.load([Want(info.key, window)], call())
    assert found == envelope.pack(info)
    assert envelope.check(found, info.key, window) == info
    assert not any(into[:shift])
    assert not any(into[shift + size :])
    assert adapter.headers([info.key, key_of(2)], call()) == [found, None]
    assert adapter.delete([info.key], call()) == [True]
    adapter.close()


@both
@settings(max_examples=60)
@given(size=SIZES, place_of_bit=st.floats(0, 1, exclude_max=True), bit=st.integers(0, 7))
def test_a_flipped_bit_is_found_wherever_it_is(
    make: Make, place: Path, size: int, place_of_bit: float, bit: int
) -> None:
    path = place / f"flip-{make.__name__}"
    adapter = make(path)
    assert store(adapter, 1, size)
    file = the_file(path, 1)
    length = file.stat().st_size
    at = int(place_of_bit * 2 * 240) if place_of_bit < 0.5 else int(place_of_bit * length)
    with file.open("r+b") as f:
        f.seek(at)
        byte = f.read(1)[0]
        f.seek(at)
        f.write(bytes([byte ^ 1 << bit]))
    try:
        found = load(adapter, 1, size)
    except envelope.EnvelopeError:
        found = None
    used = len(put_of(1, size).header)
    if used <= at < file_io.PAGE:
        assert found == bytes(payload_of(1, size))  # between header and payload: nobody reads it
    else:
        assert found is None
    adapter.delete([key_of(1)], call())
    adapter.close()


@both
@pytest.mark.parametrize("cut", [0, 1, 23, 100, 4095, 4096, 4097, 8192, 69_999 + 4096, -1, 1 << 20])
def test_files_cut_or_lengthened_are_misses_and_make_room(make: Make, cut: int, tmp_path: Path) -> None:
    adapter = make(tmp_path)
    assert store(adapter, 1, 70_000)
    file = the_file(tmp_path, 1)
    os.truncate(file, cut if 0 <= cut < 70_000 + 4096 else file.stat().st_size + abs(cut))
    assert load(adapter, 1, 70_000) is None
    assert not file.exists()
    assert adapter.contains([key_of(1)], call()) == [False]
    assert store(adapter, 1, 70_000)
    assert is_right(adapter, 1, 70_000)
    adapter.close()


@both
def test_between_header_and_payload_nothing_of_other_objects_is_written(make: Make, tmp_path: Path) -> None:
    adapter = make(tmp_path)
    info = envelope.ObjectInfo(key_of(1), 3, 0, account="secret" * 300)
    assert (
        adapter.store([Put(info.key, envelope.pack(info), memory(3)), put_of(2, 300_000)], call())
        == [True] * 2
    )
    begin = the_file(tmp_path, 2).read_bytes()[: file_io.PAGE]
    assert begin == put_of(2, 300_000).header.ljust(file_io.PAGE, b"\0")
    adapter.close()


def test_a_store_over_a_shared_file_of_another_length_mends_it(tmp_path: Path) -> None:
    """As after a power failure of a server: nobody has looked at it since."""
    adapter = shared_fs(tmp_path)
    assert store(adapter, 1, 70_000)
    os.truncate(the_file(tmp_path, 1), 4096)
    assert store(adapter, 1, 70_000)
    assert is_right(adapter, 1, 70_000)
    adapter.close()


@both
def test_another_objects_bytes_under_a_name_are_found(make: Make, tmp_path: Path) -> None:
    adapter = make(tmp_path)
    assert store(adapter, 1, 5000)
    assert store(adapter, 2, 5000)
    shutil.copyfile(the_file(tmp_path, 2), the_file(tmp_path, 1))
    with pytest.raises(envelope.EnvelopeError, match="expected"):
        load(adapter, 1, 5000)
    adapter.close()


@both
def test_a_payload_of_another_length_is_a_miss_and_harms_nothing(make: Make, tmp_path: Path) -> None:
    adapter = make(tmp_path)
    assert store(adapter, 1, 70_000)
    for other in (0, 69_999, 70_001, 70_000 - 4096, 70_000 + 4096, 1 << 20):
        assert load(adapter, 1, other) is None
    assert is_right(adapter, 1, 70_000)
    adapter.close()


@both
def test_a_call_that_is_over_touches_nothing(make: Make, tmp_path: Path) -> None:
    adapter = make(tmp_path)
    assert store(adapter, 1, 10)
    over = Call(60)
    over.cancel()
    assert adapter.store([put_of(2, 10)], over) == [False]
    assert adapter.load([Want(key_of(1), memory(10))], over) == [None]
    assert adapter.delete([key_of(1)], over) == [False]
    assert [f.name for f in objects_below(tmp_path)] == [f"{key_of(1).hex()}.kv"]
    adapter.close()


@both
def test_many_threads_with_the_same_few_keys(make: Make, tmp_path: Path) -> None:
    """Whoever stores, loads and deletes at once: a load is right or a miss, and in the end the account is right."""
    adapter = make(tmp_path)
    wrong: list[Any] = []

    def work(seed: int) -> None:
        try:
            for i in range(60):
                number = (seed * 7 + i * 3) % 4
                if not store(adapter, number, 300_000 + number):
                    wrong.append(("store", number))
                if load(adapter, number, 300_000 + number) not in (
                    None,
                    bytes(payload_of(number, 300_000 + number)),
                ):
                    wrong.append(("load", number))
                if i % 3 == 0 and adapter.delete([key_of(number)], call()) != [True]:
                    wrong.append(("delete", number))
        except Exception as exc:
            wrong.append(exc)

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert wrong == []
    assert temps_below(tmp_path) == []
    there = [bool(found) for found in adapter.contains([key_of(i) for i in range(4)], call())]
    assert there == [is_right(adapter, i, 300_000 + i) for i in range(4)]
    if not adapter.shared:
        assert adapter.usage()[:2] == (blocks_below(tmp_path), sum(there))
    adapter.close()


class DiskHistory(RuleBasedStateMachine):
    """Any history of one directory, with restarts and with others' hands in it."""

    CAPACITY = 3 << 20

    @initialize()
    def start(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="lmcache-history-"))
        self.model: dict[int, int] = {}
        self.adapter = self.open()

    def open(self) -> StorageAdapter:
        return disk(self.path, max_gb=self.CAPACITY / 2**30)

    @rule(
        batch=st.lists(st.tuples(st.integers(0, 7), SIZES), min_size=1, max_size=3, unique_by=lambda x: x[0])
    )
    def store(self, batch: list[tuple[int, int]]) -> None:
        before = self.adapter.usage().used_bytes
        new = [pair for pair in batch if pair[0] not in self.model]
        answers = self.adapter.store([put_of(*pair) for pair in batch], call())
        for (number, size), stored in zip(batch, answers, strict=True):
            if stored:
                self.model.setdefault(number, size)
        if before + sum(file_io.padded(size) + file_io.PAGE for _, size in new) <= self.CAPACITY:
            assert all(answers)

    @rule(number=st.integers(0, 7), size=SIZES)
    def load(self, number: int, size: int) -> None:
        size = self.model.get(number, size)
        expected = bytes(payload_of(number, size)) if number in self.model else None
        assert load(self.adapter, number, size) == expected

    @rule(numbers=st.sets(st.integers(0, 7), min_size=1))
    def delete(self, numbers: set[int]) -> None:
        assert all(self.adapter.delete([key_of(n) for n in numbers], call()))
        for number in numbers:
            self.model.pop(number, None)

    @rule()
    def clear(self) -> None:
        assert self.adapter.clear(call()) == len(self.model)
        self.model.clear()

    @rule(damage=st.booleans())
    def restart(self, damage: bool) -> None:
        self.adapter.close()
        (self.path / "disk-1/tmp/17-00ff.tmp").write_bytes(b"cut short")
        if damage and self.model:
            number = next(iter(self.model))
            del self.model[number]
            os.truncate(the_file(self.path, number), 50)
        self.adapter = self.open()

    @precondition(lambda self: self.model)
    @rule()
    def somebody_removes_a_file(self) -> None:
        number = next(iter(self.model))
        the_file(self.path, number).unlink()
        assert load(self.adapter, number, self.model.pop(number)) is None

    @invariant()
    def the_account_is_right(self) -> None:
        usage = self.adapter.usage()
        assert usage == (blocks_below(self.path), len(self.model), self.CAPACITY)
        assert usage.used_bytes <= self.CAPACITY
        keys = [key_of(n) for n in range(8)]
        assert self.adapter.contains(keys, call()) == [n in self.model for n in range(8)]
        held = {h.key: h.size for h in self.adapter.scan()}
        assert held == {key_of(n): len(put_of(n, size).header) + size for n, size in self.model.items()}
        assert temps_below(self.path) == []

    def teardown(self) -> None:
        self.adapter.close()
        shutil.rmtree(self.path)


TestDiskHistory = DiskHistory.TestCase
TestDiskHistory.settings = settings(max_examples=25, stateful_step_count=20)

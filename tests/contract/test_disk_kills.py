"""Rounds of kill -9 of a process that stores and deletes: what is there is right, and what was acknowledged is there.

LMCACHE_DISK_ROUNDS sets their number, LMCACHE_KILL_SEED the seed.
"""

from __future__ import annotations

import os
import random
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.disk_writer import MAKERS, Writer, size_of
from helpers.stored import blocks_below, call, is_right, key_of, temps_below
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.l2.files import key_of as key_of_name

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("LMCACHE_DISK_ROUNDS", "100"))
SEED = int(os.environ.get("LMCACHE_KILL_SEED", "5"))
NUMBERS = 10_000
"""Of each round; more than a writer gets to."""
LATEST = 0.06
"""Seconds by which a writer is killed, from its first store on; in every fourth round from its start."""


@pytest.fixture
def place() -> Iterator[Path]:
    path = Path(tempfile.mkdtemp(prefix="lmcache-kills-"))
    yield path
    shutil.rmtree(path)


class Known:
    """What must be there, and what may."""

    def __init__(self) -> None:
        self.surely: set[int] = set()
        self.perhaps: set[int] = set()
        self.stored = 0

    def learn(self, did: dict[str, set[int]]) -> None:
        self.stored += len(did["stored"])
        self.surely |= did["stored"] - did["deleting"]
        self.perhaps |= did["storing"] - did["deleted"]

    def check(self, adapter: StorageAdapter, there: set[bytes]) -> None:
        """Every object that is there is right and one that somebody stored; none that was acknowledged is missing."""
        by_key = {key_of(number): number for number in self.perhaps}
        assert there <= by_key.keys()
        found = {by_key[key] for key in there}
        assert found >= self.surely
        assert all(is_right(adapter, number, size_of(number)) for number in found)
        assert adapter.contains(list(by_key), call()) == [number in found for number in by_key.values()]
        self.surely, self.perhaps = found, set(found)

    def thin_out(self, adapter: StorageAdapter, rng: random.Random) -> None:
        for number in rng.sample(sorted(self.surely), max(0, len(self.surely) - 12)):
            assert adapter.delete([key_of(number)], call()) == [True]
            self.surely.remove(number)
        self.perhaps = set(self.surely)


def test_a_directory_outlives_its_server(place: Path) -> None:
    rng, known = random.Random(SEED), Known()
    temps = 0
    for round_ in range(ROUNDS):
        writer = Writer("disk", place, round_ * NUMBERS, SEED + round_)
        if round_ % 4:
            writer.wait_until_it_stores()
        writer.process.join(rng.uniform(0, LATEST))  # the instant of its death
        known.learn(writer.end(kill=True))
        temps += len(temps_below(place))
        adapter = MAKERS["disk"](place)
        held = {h.key for h in adapter.scan()}
        assert temps_below(place) == []
        assert adapter.usage()[:2] == (blocks_below(place), len(held))
        books = adapter.accounts()
        assert books is not None
        assert (books.used(""), books.objects("")) == adapter.usage()[:2]
        known.check(adapter, held)
        known.thin_out(adapter, rng)
        assert adapter.usage()[:2] == (blocks_below(place), len(known.surely))
        adapter.close()
    assert known.stored > 3 * ROUNDS
    assert temps > ROUNDS / 4  # it was hit in the middle of writing, not beside it


def test_a_shared_directory_outlives_one_of_its_servers(place: Path) -> None:
    rng, known = random.Random(SEED), Known()
    for round_ in range(ROUNDS // 4):
        writers = [Writer("shared_fs", place, (2 * round_ + i) * NUMBERS, SEED + i) for i in range(2)]
        writers[0].wait_until_it_stores()
        writers[0].process.join(rng.uniform(0, LATEST))
        for writer, kill in zip(writers, (True, False), strict=True):
            known.learn(writer.end(kill))
        adapter = MAKERS["shared_fs"](place, sweep_hours=1e-9)
        assert temps_below(place) == []
        there = {key_of_name(f.name) for f in place.rglob("*.kv")}
        known.check(adapter, {key for key in there if key})
        known.thin_out(adapter, rng)
        adapter.close()
    assert known.stored > ROUNDS

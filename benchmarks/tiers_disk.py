"""The disk tier's adapter beside ``os.pwritev`` and ``os.preadv`` of the same sizes, policy and number of threads.

Both sides make new files and read them back, on the same file system; the bare side opens, moves the bytes in one
call, syncs as the policy says, and closes. What is read is not in the page cache before. Beside the adapter alone it
is measured with what the tier does around it: the checksum before a store, and the verification after a load, each
in the thread that moves the object, while others move theirs.
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import count
from pathlib import Path
from typing import NamedTuple

from harness import MIB, Buffer, Report, median, table, timed

from lmcache.v1.storage.l2 import envelope
from lmcache.v1.storage.l2.adapter import Call, Put, Want
from lmcache.v1.storage.l2.disk import DiskAdapter, DiskOptions

TOTAL = 64 * MIB
"""Moved per measurement, in objects of one size."""
SIZES = (1, 4, 16)
GOAL, VERIFY_GOAL = 0.7, 1.15
WHERE = os.environ.get("LMCACHE_BENCH_DIR")
"""A directory on the disk to measure, which must not be in memory; the system's for temporary files if not set."""

Way = Callable[[Sequence[int]], None]


class Policy(NamedTuple):
    direct: str
    fsync: str
    threads: int


POLICIES = (
    Policy("on", "none", 4),
    Policy("on", "none", 1),
    Policy("off", "none", 4),
    Policy("on", "data", 4),
)


class Disk:
    """One policy and size: memory in the place of L1, a directory, and the ways to move objects."""

    def __init__(self, policy: Policy, mib: int, source: Buffer, target: Buffer) -> None:
        self.policy, self.size = policy, mib * MIB
        self.number = TOTAL // self.size
        self._at = [slice(i * self.size, (i + 1) * self.size) for i in range(self.number)]
        self._source, self._target = source, target
        self._root = Path(tempfile.mkdtemp(prefix="lmcache-bench-", dir=WHERE))
        options = DiskOptions(
            path=str(self._root / "tier"), max_gb=1, direct=policy.direct, fsync=policy.fsync
        )
        self._adapter = DiskAdapter(options)
        self._bare = self._root / "bare"
        self._bare.mkdir()
        self._pool = ThreadPoolExecutor(policy.threads)
        self._rounds = count()
        self._keys: list[bytes] = []
        self._flag = os.O_DIRECT if policy.direct == "on" else 0
        self._headers: list[bytes] = []
        self.new_round()

    def new_round(self) -> None:
        """Nothing is stored, and keys are new."""
        self._adapter.clear(Call(60))
        for file in self._bare.iterdir():
            file.unlink()
        round_ = next(self._rounds)
        self._keys = [b"%064d" % (round_ * self.number + i) for i in range(self.number)]
        digests = [envelope.checksum(self._source.view[at]) for at in self._at]
        infos = map(envelope.ObjectInfo, self._keys, [self.size] * self.number, digests)
        self._headers = [envelope.pack(info) for info in infos]

    def forget_cached(self) -> None:
        """Take what was written out of the page cache, so that a load reads the disk."""
        for at, _, names in os.walk(self._root):
            for name in names:
                fd = os.open(os.path.join(at, name), os.O_RDONLY)
                os.fsync(fd)
                os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(fd)

    def seconds(self, way: Way) -> float:
        """Of a way to move all objects, shared out between the threads."""
        threads = self.policy.threads
        shares = [range(i, self.number, threads) for i in range(threads)]
        return timed(lambda: list(self._pool.map(way, shares)))

    # ---- the ways

    def bare_store(self, share: Sequence[int]) -> None:
        for i in share:
            fd = os.open(self._bare / str(i), os.O_WRONLY | os.O_CREAT | os.O_EXCL | self._flag, 0o600)
            assert os.pwritev(fd, [self._source.view[self._at[i]]], 0) == self.size
            if self.policy.fsync == "data":
                os.fdatasync(fd)
            os.close(fd)

    def bare_load(self, share: Sequence[int]) -> None:
        for i in share:
            fd = os.open(self._bare / str(i), os.O_RDONLY | self._flag)
            assert os.preadv(fd, [self._target.view[self._at[i]]], 0) == self.size
            os.close(fd)

    def store(self, share: Sequence[int]) -> None:
        puts = [Put(self._keys[i], self._headers[i], self._source.view[self._at[i]]) for i in share]
        assert all(self._adapter.store(puts, Call(60)))

    def store_with_checksum(self, share: Sequence[int]) -> None:
        for i in share:
            view = self._source.view[self._at[i]]
            info = envelope.ObjectInfo(self._keys[i], self.size, envelope.checksum(view))
            assert self._adapter.store([Put(info.key, envelope.pack(info), view)], Call(60)) == [True]

    def load(self, share: Sequence[int]) -> None:
        wants = [Want(self._keys[i], self._target.view[self._at[i]]) for i in share]
        assert all(self._adapter.load(wants, Call(60)))

    def load_each(self, share: Sequence[int]) -> None:
        for i in share:
            self.load([i])

    def load_verified(self, share: Sequence[int]) -> None:
        for i in share:
            view = self._target.view[self._at[i]]
            header = self._adapter.load([Want(self._keys[i], view)], Call(60))[0]
            assert header is not None
            envelope.check(header, self._keys[i], view)

    def close(self) -> None:
        self._pool.shutdown()
        self._adapter.close()
        shutil.rmtree(self._root)


def _run(disk: Disk, repeats: int) -> dict[str, list[float]]:
    """Seconds of every way. The ways take turns, in another order each time."""
    stores: dict[str, Way] = {
        "bare store": disk.bare_store,
        "store": disk.store,
        "store with checksum": disk.store_with_checksum,
    }
    loads: dict[str, Way] = {
        "bare load": disk.bare_load,
        "load": disk.load,
        "load each": disk.load_each,
        "load verified": disk.load_verified,
    }
    seconds: dict[str, list[float]] = {name: [] for name in [*stores, *loads]}
    for turn in range(repeats):
        for name in _turned(stores, turn):
            disk.new_round()
            seconds[name].append(disk.seconds(stores[name]))
        disk.new_round()
        disk.seconds(disk.bare_store)
        disk.seconds(disk.store)
        for name in _turned(loads, turn):
            disk.forget_cached()
            seconds[name].append(disk.seconds(loads[name]))
    return seconds


def _turned(names: Sequence[str] | dict[str, Way], by: int) -> list[str]:
    listed = list(names)
    by %= len(listed)
    return listed[by:] + listed[:by]


def measure(report: Report, repeats: int) -> None:
    source, target = Buffer(TOTAL), Buffer(TOTAL)
    cases, rows = [], []
    for policy in POLICIES:
        for mib in SIZES:
            disk = Disk(policy, mib, source, target)
            try:
                seconds = _run(disk, repeats)
            finally:
                disk.close()
            middle = {name: median(values) for name, values in seconds.items()}
            ratios = {
                "store": middle["bare store"] / middle["store"],
                "store with checksum": middle["bare store"] / middle["store with checksum"],
                "load": middle["bare load"] / middle["load"],
                "load verified": middle["bare load"] / middle["load verified"],
                "verify cost": middle["load verified"] / middle["load each"],
            }
            mb_per_s = {name: round(TOTAL / 1e6 / value) for name, value in middle.items()}
            cases.append(
                {
                    "policy": policy._asdict(),
                    "mib": mib,
                    "ratios": ratios,
                    "mb_per_s": mb_per_s,
                    "seconds": seconds,
                }
            )
            rows.append(
                [policy.direct, policy.fsync, str(policy.threads), f"{mib} MiB"]
                + [str(mb_per_s[name]) for name in ("bare store", "store", "bare load", "load")]
                + [f"{ratio:.2f}" for ratio in ratios.values()]
            )
    head = ["direct", "fsync", "threads", "object", "bare MB/s", "store", "bare MB/s", "load"]
    table([*head, "store", "+sum", "load", "+verify", "cost"], rows)
    every = {name: [case["ratios"][name] for case in cases] for name in cases[0]["ratios"]}
    usual = [c["ratios"] for c in cases if c["policy"]["direct"] == "on" and c["policy"]["threads"] > 1]
    for name in ("store", "load"):
        report.goal(f"disk: {name} / bare, worst of {len(cases)} cases", min(every[name]), ">=", GOAL)
    for name in ("store with checksum", "load verified"):
        worst = min(ratios[name] for ratios in usual)
        report.goal(f"disk: {name} / bare, O_DIRECT, worst of {len(usual)} cases", worst, ">=", GOAL)
    worst = max(ratios["verify cost"] for ratios in usual)
    report.goal(
        f"disk: verified load / load, O_DIRECT, worst of {len(usual)} cases", worst, "<=", VERIFY_GOAL
    )
    report.data["disk"] = {"total_mib": TOTAL // MIB, "cases": cases}

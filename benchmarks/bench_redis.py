"""The Redis adapter beside redis-py that moves the same bytes bare, to the same real server on this host.

* store: `adapter.store` of one object beside `client.set` of a value of the same length
* load: `adapter.load` into memory that is there beside `client.get`, which makes new bytes
* both also as one batch of `--batch` objects beside as many single commands

Bare redis-py is what `pip install redis` gives; with hiredis installed it reads with that.
"""

from __future__ import annotations

import os
import sys
from typing import Any

import redis
from harness import MIB, Report, alternate, median, numbers, parser, table

from helpers.redis_server import redis_server
from lmcache.v1.storage.l2.adapter import Call, Put, Want
from lmcache.v1.storage.l2.envelope import ObjectInfo, checksum, pack
from lmcache.v1.storage.l2.registry import build

GOAL = 0.8
SECONDS = 60.0


def objects(size: int, count: int) -> list[Put]:
    """Objects of random bytes."""
    payload = memoryview(bytearray(os.urandom(size)))
    digest = checksum(payload)
    keys = [os.urandom(64) for _ in range(count)]
    return [Put(key, pack(ObjectInfo(key, size, digest)), payload) for key in keys]


def expect(condition: bool, text: str) -> None:
    """End the script if a side did not do its work."""
    if not condition:
        raise SystemExit(f"bench_redis: {text}")


def measure(url: str, size: int, batch: int, rounds: int) -> dict[str, float]:
    """Median seconds of every side."""
    adapter = build({"type": "redis", "url": url, "threads": 1})
    client = redis.Redis.from_url(url, protocol=2)
    puts = objects(size, batch)
    values = {b"bare:" + put.key: bytes(put.header) + bytes(put.payload) for put in puts}
    targets = [memoryview(bytearray(size)) for _ in puts]
    wants = [Want(put.key, target) for put, target in zip(puts, targets, strict=True)]
    first = next(iter(values))

    def bare_set_all() -> None:
        for key, value in values.items():
            client.set(key, value)

    def bare_get_all() -> list[Any]:
        return [client.get(key) for key in values]

    sides = {
        "bare set": lambda: client.set(first, values[first]),
        "store": lambda: expect(adapter.store(puts[:1], Call(SECONDS)) == [True], "not stored"),
        "bare get": lambda: client.get(first),
        "load": lambda: expect(adapter.load(wants[:1], Call(SECONDS))[0] is not None, "not loaded"),
        "bare set, batch": bare_set_all,
        "store, batch": lambda: expect(all(adapter.store(puts, Call(SECONDS))), "not stored"),
        "bare get, batch": bare_get_all,
        "load, batch": lambda: expect(None not in adapter.load(wants, Call(SECONDS)), "not loaded"),
    }
    for warm in sides.values():
        warm()
    seconds = alternate(sides, rounds)
    expect(all(target == put.payload for target, put in zip(targets, puts, strict=True)), "other bytes")
    adapter.close()
    client.close()
    return {name: median(found) for name, found in seconds.items()}


def main() -> int:
    made = parser(__doc__, repeats=25)
    made.add_argument("--sizes", type=numbers, default=[1, 4, 16], help="MiB of a payload (1,4,16)")
    made.add_argument("--batch", type=int, default=4, help="objects of a batch (4)")
    args = made.parse_args()
    report, rows = Report(args), []
    with redis_server() as server:
        for mib in args.sizes:
            found = measure(server.url, mib * MIB, args.batch, args.repeats)
            server.tell("FLUSHALL")
            report.data[f"{mib} MiB"] = {name: round(value * 1e3, 3) for name, value in found.items()}
            for verb, bare in (("store", "set"), ("load", "get")):
                for suffix, bound in (("", GOAL), (", batch", GOAL)):
                    ratio = found[f"bare {bare}{suffix}"] / found[verb + suffix]
                    speed = mib * (args.batch if suffix else 1) / found[verb + suffix] / 1024
                    rows.append((f"{mib} MiB", verb + suffix, f"{found[verb + suffix] * 1e3:.2f} ms",
                                 f"{speed:.2f} GiB/s", f"{ratio:.2f}"))  # fmt: skip
                    report.goal(f"{verb}{suffix}, {mib} MiB, beside redis-py", ratio, ">=", bound)
    report.data["redis-py"] = redis.__version__
    table(("payload", "side", "time", "speed", "× redis-py"), rows)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

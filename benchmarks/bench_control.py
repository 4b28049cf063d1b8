"""What a request costs before any payload moves: lookups, round trips, and the server's own footprint.

* lookup of 512 chained chunks, with hashing, from a list of 131,072 token ids: all stored, and none
* a round trip (Ping) through the client, beside a bare ZeroMQ DEALER and ROUTER in two processes with frames
  of the same sizes
* the server's memory without L1, its time from spawn to ready without that of reserving L1, and
  `lmcache --help`
"""

from __future__ import annotations

import random
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import zmq
from harness import HERE, Report, alternate, median, parser, process_memory, table, timed

from helpers.server import COMMAND, RunningServer, running_server
from lmcache.v1.keys import Namespace, Scope, chunk_hashes
from lmcache.v1.multiprocess.client import CacheClient, ClientOptions
from lmcache.v1.protocol import messages as m

CHUNK = 256
CHUNKS = 512
VOCABULARY = 150_000
BATCH = 100
LAYOUT = Namespace(
    model="bench", revision="1", engine="bench", format="opaque", dtype="bfloat16", block_size=128,
    chunk_size=CHUNK, kv_heads=1, head_size=8, page_bytes=(64,) * 8,
)  # fmt: skip


@contextmanager
def clients(address: str) -> Iterator[tuple[CacheClient, CacheClient]]:
    """An engine's worker, whose pages are tiny and travel in frames, and its scheduler."""

    def register(client: CacheClient) -> None:
        client.register(m.Register(session=client.session, namespaces=[LAYOUT], mapped=True))

    worker = CacheClient(address, "worker", "bench", options=ClientOptions(shm="require"), on_open=register)
    scheduler = CacheClient(address, "scheduler", "bench")
    try:
        for client in (worker, scheduler):
            if not client.start(10):
                raise SystemExit(f"no session: {client.reason}")
        yield worker, scheduler
    finally:
        scheduler.close()
        worker.close()


# ------------------------------------------------------------------------------------------------- lookups


class Lookups:
    """Looks up one long prompt, as a scheduler does for a new request."""

    def __init__(self, worker: CacheClient, scheduler: CacheClient, tokens: list[int]) -> None:
        self._client, self._tokens, self._count = scheduler, tokens, 0
        self._stored, self._absent = (Scope(chunk_size=CHUNK, salt=salt) for salt in ("stored", "absent"))
        lease, hashes = worker.new_lease(), b"".join(chunk_hashes(tokens, self._stored))
        worker.call(m.Reserve(session=worker.session, lease=lease, hashes=[hashes]))
        worker.call(m.Commit(session=worker.session, lease=lease, indexes=list(range(CHUNKS))))

    def hash(self) -> None:
        chunk_hashes(self._tokens, self._absent)

    def hit(self) -> float:
        return self._look_up(self._stored, CHUNKS)

    def miss(self) -> float:
        return self._look_up(self._absent, 0)

    def _look_up(self, scope: Scope, expected: int) -> float:
        client, answers = self._client, []
        self._count += 1
        name, lease = f"request-{self._count}", client.new_lease()

        def work() -> None:
            hashes = b"".join(chunk_hashes(self._tokens, scope))
            message = m.Lookup(session=client.session, request=name, lease=lease, hashes=hashes)
            answers.append(client.call(message)[0])

        seconds = timed(work)
        if not isinstance(answers[0], m.Found) or answers[0].chunks != expected:
            raise SystemExit(
                f"lookup of {CHUNKS} chunks: expected {expected}, the server answers {answers[0]}"
            )
        client.call(m.EndRequest(session=client.session, requests=[name]))
        return seconds


def bench_lookups(worker: CacheClient, scheduler: CacheClient, repeats: int, report: Report) -> None:
    tokens = random.Random(1).choices(range(VOCABULARY), k=CHUNKS * CHUNK)
    lookups = Lookups(worker, scheduler, tokens)
    for call in (lookups.hit, lookups.miss):
        call()
    # One by one and in turns: the calls time themselves, without the clean-up that follows.
    seconds: dict[str, list[float]] = {"hit": [], "miss": [], "hash": []}
    for _ in range(repeats):
        seconds["hit"].append(lookups.hit())
        seconds["miss"].append(lookups.miss())
        seconds["hash"].append(timed(lookups.hash))
    names = {"hit": "lookup, all stored", "miss": "lookup, none stored", "hash": "of that hashing"}
    rows = [(text, *_spread(seconds[name])) for name, text in names.items()]
    table(("512 chunks, 131,072 tokens", "median ms", "least ms"), rows)
    report.data["lookup_seconds"] = seconds
    for name in ("hit", "miss"):
        report.goal(f"{names[name]}, with hashing", median(seconds[name]) * 1e3, "<=", 2, "ms")


def _spread(values: list[float], scale: float = 1e3) -> tuple[str, str]:
    return f"{median(values) * scale:.3f}", f"{min(values) * scale:.3f}"


# --------------------------------------------------------------------------------------------- round trips


@contextmanager
def echo(reply_bytes: int) -> Iterator[zmq.Socket[bytes]]:
    """A plain DEALER socket with a plain ROUTER process behind it."""
    command = [sys.executable, str(HERE / "echo_server.py"), str(reply_bytes)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdin is not None
        with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
            socket.linger = 0
            socket.rcvtimeo = 10_000
            socket.connect(f"tcp://127.0.0.1:{int(process.stdout.readline())}")
            yield socket
        process.stdin.close()


def bench_round_trip(client: CacheClient, repeats: int, report: Report) -> None:
    request = m.Ping(session=client.session)
    reply, _ = client.call(request)
    ident, body, sizes = bytes(8), m.encode(request), (len(m.encode(request)), len(m.encode(reply)))
    with echo(sizes[1]) as socket:

        def bare() -> None:
            socket.send_multipart([ident, body])
            socket.recv_multipart()

        sides = {"bare ZeroMQ": bare, "Ping through the client": lambda: client.call(request)}
        alternate(sides, 1, BATCH)
        seconds = alternate(sides, repeats, BATCH)
    rows = [(name, *_spread(values, 1e6)) for name, values in seconds.items()]
    print()
    table((f"round trip, frames 8+{sizes[0]} and 8+{sizes[1]} bytes", "median us", "least us"), rows)
    report.data["round_trip"] = {
        name: {"median": median(values), "least": min(values), "count": len(values)}
        for name, values in seconds.items()
    }
    bare_median, ours = (median(values) for values in seconds.values())
    report.goal("round trip / bare ZeroMQ", ours / bare_median, "<=", 1.5)


# ------------------------------------------------------------------------------------------------ footprint


def without_l1(server: RunningServer) -> float:
    """Resident MB of a server, its shared memory apart."""
    memory = process_memory(server.pid)
    return (memory["VmRSS"] - memory["RssShmem"]) / 1e6


def bench_start(repeats: int, report: Report) -> None:
    starts = []
    for _ in range(repeats):
        entered: dict[str, Any] = {}

        def start(entered: dict[str, Any] = entered) -> None:
            entered["context"] = running_server(l1_gb=2)
            entered["server"] = entered["context"].__enter__()

        whole = timed(start)
        starts.append((whole, float(entered["server"].ready["reserve_seconds"])))
        entered["context"].__exit__(None, None, None)
    helps = [
        timed(lambda: subprocess.run([*COMMAND, "--help"], capture_output=True, check=True)) for _ in range(5)
    ]
    bare = [timed(lambda: subprocess.run([sys.executable, "-c", ""], check=True)) for _ in range(5)]
    own = median(whole - reserve for whole, reserve in starts)
    print(
        f"\nserver with 2 GB of L1: ready after {median(s[0] for s in starts):.2f} s, of which"
        f" {median(s[1] for s in starts):.2f} s to reserve L1"
        f"\nlmcache --help: {median(helps):.3f} s; a Python that does nothing: {median(bare):.3f} s"
    )
    report.data["start_seconds"] = [{"whole": whole, "reserve": reserve} for whole, reserve in starts]
    report.data["help_seconds"] = helps
    report.goal("spawn to ready without reserving 2 GB", own, "<=", 1, "s")
    report.goal("lmcache --help", median(helps), "<=", 0.3, "s")


def main() -> int:
    args = parser(__doc__, repeats=31).parse_args()
    report = Report(args)
    with running_server(l1_gb=0.1) as server:
        fresh = without_l1(server)
        with clients(server.address) as (worker, scheduler):
            bench_lookups(worker, scheduler, args.repeats, report)
            bench_round_trip(scheduler, args.repeats, report)
            used = without_l1(server)
            requests = int(server.metrics()["lmcache_mp_requests_total"])
    print(f"\nserver's memory without L1: {fresh:.1f} MB at start, {used:.1f} MB after {requests} requests")
    report.data["resident_mb"] = {"start": fresh, "used": used, "requests": requests}
    report.goal("resident memory without L1", max(fresh, used), "<=", 80, "MB")
    bench_start(min(5, args.repeats), report)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

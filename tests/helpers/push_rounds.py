"""Rounds of kill -9, of who pushes or of whom it pushes to, at a random instant: nothing phantom, nothing wrong."""

from __future__ import annotations

import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from helpers.netns import Host
from helpers.push_loop import KEPT, size_of
from helpers.pusher import key_of, payload_of, put_of
from helpers.server import RunningServer, wait_for
from lmcache.v1.storage.l2.adapter import AdapterError, Call, StorageAdapter, Want
from lmcache.v1.storage.l2.envelope import check
from lmcache.v1.storage.l2.registry import build

SEED = int(os.environ.get("LMCACHE_KILL_SEED", "5"))
START_SECONDS = 60.0
_TESTS = Path(__file__).parents[1]


def idle(server: RunningServer, seconds: float = 20.0) -> None:
    """Nothing that a peer began is left."""

    def left() -> dict[str, Any]:
        state = server.state()
        held = {
            name: state["peers"][name] for name in ("open", "waiting", "limbo", "reserved_bytes", "pulls")
        }
        leases = {name: state["l1"][name] for name in ("write_leases", "read_leases", "reserved_bytes")}
        return {name: n for name, n in (held | leases).items() if n}

    wait_for(lambda: not left(), seconds, "what peers held is given back")


@contextmanager
def adapter_on(address: str, **options: Any) -> Iterator[StorageAdapter]:
    adapter = build({"type": "peer", "address": address, "transport": "frames", **options})
    try:
        yield adapter
    finally:
        adapter.close()


@contextmanager
def pushing(host: Host, address: str, transport: str, tag: str) -> Iterator[subprocess.Popen[str]]:
    """A process on ``host`` that pushes, and has done so at least once."""
    path = os.pathsep.join([str(_TESTS), os.environ.get("PYTHONPATH", "")])
    process = subprocess.Popen(
        [*host.prefix, sys.executable, "-m", "helpers.push_loop", address, transport, tag],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        try:
            readable, _, _ = select.select([process.stdout], [], [], START_SECONDS)
            assert readable
            assert process.stdout.readline() == "go\n"
            yield process
        finally:
            process.kill()
            process.wait()


def check_all(adapter: StorageAdapter, tag: str) -> int:
    """Everything of a round's that is there is right; how many objects that are."""
    names = [(tag, number) for number in range(KEPT)]
    wants = [Want(key_of(n), memoryview(bytearray(size_of(tag, n[1])))) for n in names]
    names += [(tag, KEPT + number) for number in range(200)]
    wants += [Want(key_of(n), memoryview(bytearray(5000))) for n in names[KEPT:]]
    found = 0
    for at in range(0, len(wants), 32):
        part = wants[at : at + 32]
        for name, want, header in zip(names[at : at + 32], part, adapter.load(part, Call(20)), strict=True):
            if header is not None:
                check(header, want.key, want.payload)
                assert bytes(want.payload) == payload_of(name, len(want.payload))
                found += 1
    return found


def kill_pushers(
    hosts: tuple[Host, Host], server: RunningServer, port: int, transport: str, rounds: int
) -> None:
    """Kill who pushes, ``rounds`` times."""
    chance = random.Random(SEED)
    with adapter_on(server.address) as reader:
        for number in range(rounds):
            tag = f"{transport} {number}"
            with pushing(hosts[0], f"{hosts[1].far}:{port}", transport, tag) as process:
                time.sleep(chance.random() * 0.2)  # the instant is what is random
                process.send_signal(signal.SIGKILL)
                process.wait()
            assert check_all(reader, tag) >= 3
    idle(server)


def kill_receivers(host: Host, port: int, transport: str, rounds: int, start: Callable[[], Any]) -> None:
    """Kill whom we push to, ``rounds`` times; ``start`` gives a server at the port of ``host`` in a context."""
    chance = random.Random(SEED)
    with adapter_on(f"{host.near}:{port}", transport=transport, timeout_seconds=1.0) as adapter:
        for number in range(rounds):
            with start() as server:
                known: list[Any] = []
                numbers = iter(range(1000))

                def push(number: int = number, known: list[Any] = known, numbers: Any = numbers) -> bool:
                    name = (number, next(numbers))
                    try:
                        stored = adapter.store([put_of(name, 3 << 20)], Call(5))[0]
                    except AdapterError:
                        return False
                    known += [name] if stored else []
                    return stored

                wait_for(push, 20, "the new server is found")
                for _ in range(3):
                    assert push()
                for name in known:
                    want = Want(key_of(name), memoryview(bytearray(3 << 20)))
                    header = adapter.load([want], Call(5))[0]
                    assert header is not None
                    check(header, want.key, want.payload)
                    assert want.payload == payload_of(name, 3 << 20)
                idle(server)
                end = time.monotonic() + chance.random() * 0.2
                victim = subprocess.Popen(
                    ["sh", "-c", f"sleep {chance.random() * 0.2:.3f}; kill -9 {server.pid}"]
                )
                began = time.monotonic()
                while push():
                    assert time.monotonic() < end + 30
                assert time.monotonic() - began < 10  # one call ends within its deadline, about
                victim.wait()
                server.process.wait()

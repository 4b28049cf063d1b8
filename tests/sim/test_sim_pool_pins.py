"""A worker that copies itself has its own mapping of the pool page-locked for its device."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

from helpers.pages import GARBAGE, layout  # noqa: E402
from helpers.server import running_server, wait_for  # noqa: E402
from lmcache.v1.multiprocess.client import ClientOptions  # noqa: E402
from lmcache.v1.multiprocess.server.config import ServerConfig  # noqa: E402
from lmcache.v1.multiprocess.server.embedded import EmbeddedServer  # noqa: E402
from lmcache.v1.multiprocess.transfer_context.pages import KVGroupPages  # noqa: E402
from lmcache.v1.multiprocess.transfer_context.worker_transfer import (  # noqa: E402
    EngineDrivenTransferContext,
    StoreItem,
)
from lmcache.v1.platform import get_device_spec  # noqa: E402

BLOCK, CHUNK, PAGE, BLOCKS = 16, 32, 1024, 8


@contextmanager
def separate() -> Iterator[str]:
    with running_server("--chunk-size", str(CHUNK)) as server:
        yield server.address


@contextmanager
def embedded() -> Iterator[str]:
    server = EmbeddedServer(ServerConfig(l1_size_gb=0.01, chunk_size=CHUNK), f"pins-{uuid.uuid4()}")
    try:
        yield server.address
    finally:
        server.close()


def worker(address: str, device: str, **options: Any) -> EngineDrivenTransferContext:
    tensor = torch.full((BLOCKS, PAGE), GARBAGE, dtype=torch.uint8, device=device)
    namespace = layout(str(uuid.uuid4()), BLOCK, (PAGE,))
    pages = KVGroupPages(namespace, BLOCKS, [tensor.data_ptr()], [PAGE], 0, tensor.device.type, [tensor])
    context = EngineDrivenTransferContext(address, "engine", [pages], options=ClientOptions(**options))
    assert context.start(wait=10)
    return context


def is_mapped(address: int) -> bool:
    ranges = (line.split()[0].split("-") for line in Path("/proc/self/maps").read_text().splitlines())
    return any(int(low, 16) <= address < int(high, 16) for low, high in ranges)


def ended() -> None:
    """Wait for what is locked in the background."""
    for thread in threading.enumerate():
        if thread.name == "lmcache-pin":
            thread.join(10)
            assert not thread.is_alive()


@pytest.fixture
def unlocked(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, bool]]:
    """What was unlocked, and whether it was mapped then."""
    spec, seen = get_device_spec("sim"), []
    assert spec is not None
    unpin = spec.unpin_memory

    def unpinning(address: int) -> bool:
        seen.append((address, is_mapped(address)))
        return unpin(address)

    monkeypatch.setattr(spec, "unpin_memory", unpinning)
    return seen


def is_locked(context: EngineDrivenTransferContext) -> bool:
    pool = context.bound.pool
    assert pool is not None
    return bool(torch.frombuffer(pool.data[:4096], dtype=torch.uint8).is_pinned())


@pytest.mark.parametrize("serve", [separate, embedded])
def test_its_mapping_is_locked_until_just_before_it_is_unmapped(
    sim: Any, unlocked: list[tuple[int, bool]], serve: Callable[[], Any]
) -> None:
    with serve() as address:
        context = worker(address, "sim:0")
        wait_for(lambda: is_locked(context), 10, "the mapping is page-locked")
        ended()  # what has locked it holds it, too
        assert context.store([StoreItem(CHUNK, [b"k" * 32], [[1, 2]])]) == 1
        where = context.bound.pool.address  # type: ignore[union-attr]
        held = context.bound  # as a copy under way holds it
        context.close()
        assert unlocked == []
        del held
        assert unlocked == [(where, True)]
        assert not is_mapped(where)


def test_what_cannot_be_locked_is_said_once_and_the_worker_works(
    sim: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, unlocked: list[Any]
) -> None:
    spec, asked = get_device_spec("sim"), []
    assert spec is not None
    monkeypatch.setattr(spec, "pin_memory", lambda *a, **k: asked.append(a))
    with embedded() as address:
        for count in (1, 2):
            context = worker(address, "sim:0")
            wait_for(lambda count=count: len(asked) == count, 10, "asked")
            assert context.store([StoreItem(CHUNK, [b"k" * 32], [[1, 2]])]) == 1
            ended()
            context.close()
    said = [r.getMessage() for r in caplog.records if "page-locked" in r.getMessage()]
    assert len(said) == 1
    assert "cannot be page-locked in this worker" in said[0]
    assert unlocked == []


def test_pages_in_host_memory_and_payload_in_frames_lock_nothing(
    sim: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec, asked = get_device_spec("sim"), []
    assert spec is not None
    monkeypatch.setattr(spec, "pin_memory", lambda *a, **k: asked.append(a))
    with embedded() as address:
        for device, options in (("cpu", {}), ("sim:0", {"shm": "off"})):
            context = worker(address, device, **options)
            ended()
            context.close()
    assert asked == []

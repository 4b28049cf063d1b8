"""A store in lmcache-driven mode: pages are the engine's own again once the server's copy has ended, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from helpers.pages import layout
from lmcache.v1.multiprocess.transfer_context import lmcache_driven
from lmcache.v1.multiprocess.transfer_context.base import Binding, StoreItem, TransferCounters
from lmcache.v1.multiprocess.transfer_context.lmcache_driven import LMCacheDrivenTransferContext
from lmcache.v1.protocol import messages as m

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

CHUNK = 8
NAMESPACE = layout(chunk_size=CHUNK)
GROUP = SimpleNamespace(namespace=NAMESPACE, null_block=0, device="cpu")
ITEM = StoreItem(CHUNK, [bytes(32)], [[1, 2]])


class Server:
    """What a worker sees of one: its answers, whether it lives, and events that pass after some questions."""

    def __init__(self, asked_until_done: int = 0) -> None:
        self.left = asked_until_done
        self.asked: list[m.Request] = []
        self.posted: list[Any] = []
        self.up = True
        self.attachment = SimpleNamespace(ended=False)
        self.fault: Exception | None = None
        self.at_query: Any = lambda: None

    # --- a client

    def call(self, request: m.Request, nbytes: int = 0) -> tuple[m.Reply, list[bytes]]:
        self.asked.append(request)
        return (m.Moved(count=1, event=b"e") if isinstance(request, m.DeviceStore) else m.Ok(count=1)), []

    def post(self, gift: Any) -> None:
        self.posted.append(gift)

    def new_lease(self) -> int:
        return 7

    # --- an event backend

    def create_event(self, device: str) -> str:
        return "ours"

    def record_event(self, event: str, stream: Any) -> None:
        assert (event, stream) == ("ours", "the engine's stream")

    def export_event(self, event: str, device: str) -> bytes:
        return b"ours"

    def import_event(self, handle: bytes, device: str) -> str:
        assert handle == b"e"
        return "theirs"

    def query_event(self, event: str) -> bool:
        assert event == "theirs"
        assert [type(request) for request in self.asked] == [m.DeviceStore], (
            "no commit before the copy is done"
        )
        if self.fault is not None:
            raise self.fault
        self.at_query()
        self.left -= 1
        return self.left < 0


def worker(server: Server) -> LMCacheDrivenTransferContext:
    made = object.__new__(LMCacheDrivenTransferContext)
    made._bound = Binding("session", "epoch", [GROUP], None)  # type: ignore[list-item]
    made._stores, made.counters = True, TransferCounters()
    made.client = made._events = server  # type: ignore[assignment]
    made._device = "cpu"
    made._spec = SimpleNamespace(current_stream=lambda device: "the engine's stream")  # type: ignore[assignment]
    return made


def dropped(server: Server, engine: LMCacheDrivenTransferContext) -> bool:
    """Whether a store comes to nothing: not committed, given back, counted."""
    assert engine.store([ITEM]) == 0
    assert [type(request) for request in server.asked] == [m.DeviceStore]
    assert [(gift.session, gift.leases) for gift in server.posted] == [("session", [7])]
    return engine.counters.dropped_stores == 1


@pytest.mark.parametrize("asked", [0, 1, 50])
def test_a_store_is_committed_once_its_event_has_passed(asked: int) -> None:
    server = Server(asked)
    engine = worker(server)
    assert engine.store([ITEM]) == 1
    assert [type(request) for request in server.asked] == [m.DeviceStore, m.Commit]
    assert server.left == -1
    assert (engine.counters.stored_chunks, server.posted) == (1, [])


@pytest.mark.parametrize("what", ["attachment", "session"])
def test_a_store_whose_server_ends_is_given_up_at_once(what: str) -> None:
    server = Server(1 << 30)

    def end() -> None:
        server.attachment.ended, server.up = what == "attachment", what != "session"

    server.at_query = end
    engine = worker(server)
    assert dropped(server, engine)
    assert server.left == (1 << 30) - 1, "it was asked once"


def test_a_store_that_is_not_done_in_time_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lmcache_driven, "_STORE_SECONDS", 0.05)
    server = Server(1 << 30)
    assert dropped(server, worker(server))
    assert server.left < (1 << 30) - 2, "it was asked more than once"


@pytest.mark.parametrize(
    "fault", [RuntimeError("the recorder died"), TimeoutError("late"), ValueError("no event")], ids=repr
)
def test_a_store_whose_event_fails_is_given_up(fault: Exception) -> None:
    server = Server()
    server.fault = fault
    assert dropped(server, worker(server))

"""The adapter ``peer`` before a server that lies: bounded time, one printable line, no byte beyond an object's."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import msgspec
import pytest
import zmq

from helpers.local import LocalServer
from helpers.pusher import PAYLOAD, key_of, put_of
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Want
from lmcache.v1.storage.l2.envelope import EnvelopeError, check
from lmcache.v1.storage.l2.registry import build

N = 3
SOON = 8.0


def honest(asked: Any, service: LocalServer) -> Any:
    """What a server would say that has everything and takes everything."""
    if isinstance(asked, m.Hello):
        return service.ask(asked)[0]
    if isinstance(asked, p.PeerOpen):
        return p.PeerReady(epoch="e")
    if isinstance(asked, p.PushReserve):
        return m.Reserved(epoch="e", slots=[[0, PAYLOAD] * len(asked.sizes)])
    if isinstance(asked, p.PushCommit):
        return p.Pushed(results=[1] * len(asked.indexes))
    if isinstance(asked, p.PeerFind):
        return p.PeerFound(held=[True] * N)
    if isinstance(asked, p.PullOpen):
        return p.Pulled(sizes=[PAYLOAD] * N, checksums=[1] * N)
    if isinstance(asked, p.PullRead):
        return m.Ok(), b"x" * asked.length
    return m.Ok()


def _request(frames: list[bytes]) -> tuple[int, Any]:
    """Which frame is the request, and the request."""
    for index, frame in enumerate(frames[1:], 1):
        try:
            return index, m.request_decoder.decode(frame)
        except msgspec.DecodeError:
            continue
    raise AssertionError(frames)


@contextmanager
def lying(lies: Mapping[type, Any]) -> Iterator[str]:
    """The address of a server that answers messages of these kinds by these: a reply, one with frames, bytes, None."""
    service, end = LocalServer(pages=4), threading.Event()

    def serve() -> None:
        while not end.is_set():
            if not socket.poll(20):
                continue
            frames = socket.recv_multipart()
            index, asked = _request(frames)
            said = lies[type(asked)] if type(asked) in lies else honest(asked, service)
            if said is None:
                continue
            reply, *payload = said if isinstance(said, tuple) else (said,)
            head = reply if isinstance(reply, bytes) else m.encode(reply)
            socket.send_multipart([*frames[:index], head, *payload])

    with zmq.Context() as context, context.socket(zmq.ROUTER) as socket:
        socket.linger = 0
        port = socket.bind_to_random_port("tcp://127.0.0.1")
        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"127.0.0.1:{port}"
        finally:
            end.set()
            thread.join(SOON)
            service.close()


LIES: list[Mapping[type, Any]] = [
    {m.Hello: b"\xff\x00garbage"},
    {m.Hello: None},
    {m.Hello: m.Ok()},
    {m.Hello: m.Error(code="x", message="\x1b[31m" + "E" * 100_000)},
    {p.PeerOpen: p.PeerReady(epoch="e", region=p.Region(agent=b"\x80\x04", base=0, length=1 << 60))},
    {p.PushReserve: m.Reserved(epoch="e", slots=[[0]])},
    {p.PushReserve: m.Reserved(epoch="e", slots=[])},
    {p.PushReserve: m.Reserved(epoch="e", slots=[[-99, -99] * N])},
    {p.PushWrite: m.Error(code="bad_request", message="no\n\nno")},
    {p.PushWrite: None},
    {p.PushCommit: p.Pushed(results=[])},
    {p.PushCommit: m.Ok()},
    {p.PeerFind: p.PeerFound(held=[])},
    {p.PullOpen: p.Pulled(sizes=[PAYLOAD] * N, checksums=[])},
    {p.PullOpen: p.Pulled(sizes=[1 << 60] * N, checksums=[-1] * N)},
    {p.PullRead: (m.Ok(), b"x" * (PAYLOAD + 1))},
    {p.PullRead: m.Ok()},
    dict.fromkeys((p.PushReserve, p.PeerFind, p.PullOpen), m.Error(code="unknown_session", message="no")),
]


@pytest.mark.parametrize("lies", LIES, ids=lambda lies: f"{next(iter(lies)).__name__}")
def test_a_peer_that_lies_costs_a_call_its_time_and_one_line(lies: Mapping[type, Any]) -> None:
    keys, told = [key_of(i) for i in range(N)], list[str]()
    memory = bytearray(N * PAYLOAD + 100)
    wants = [Want(k, memoryview(memory)[i * PAYLOAD : (i + 1) * PAYLOAD]) for i, k in enumerate(keys)]
    with lying(lies) as address:
        adapter = build({"type": "peer", "address": address, "timeout_seconds": 0.3, "transport": "frames"})
        for verb in (
            lambda call: adapter.store([put_of(i) for i in range(N)], call),
            lambda call: adapter.contains(keys, call),
            lambda call: adapter.load(wants, call),
        ):
            start = time.monotonic()
            try:
                answers = verb(Call(0.5))
            except AdapterError as exc:
                told.append(str(exc))
            else:
                assert len(answers) == N
                for key, want, header in zip(keys, wants, answers, strict=True):
                    if isinstance(header, bytes):  # its bytes are none that anybody stored
                        with pytest.raises(EnvelopeError):
                            check(header, key, want.payload)
            assert time.monotonic() - start < SOON
        adapter.close()
    assert all(line.isprintable() and len(line) < 500 for line in told)
    assert not any(memory[-100:])

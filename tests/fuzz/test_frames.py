"""Whatever arrives on the request port: the decoder refuses it, the server counts it and goes on serving."""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
from hypothesis import given, settings
from hypothesis import strategies as st

from helpers.server import CALL_SECONDS, RunningServer, Worker, channel_to, hello, namespace, running_server
from helpers.wire import frames, messages, plain, requests_of
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel, RequestFailed

fuzz = settings(max_examples=3 * settings().max_examples)

TIERS = (
    "--l2-adapter", '{"type": "fault", "error": 0.05, "lost": 0.1, "wrong_bytes": 0.1}', "--l2-prefetch-seconds", "1",
)  # fmt: skip
"""So that lookups may be pending, and find what is not there."""

REFUSED = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)
"""What the server's loop catches."""


def is_request(data: bytes) -> bool:
    try:
        m.request_decoder.decode(data)
    except REFUSED:
        return False
    return True


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server(*TIERS) as running:
        yield running
        assert "Traceback" not in running.errors()
        assert running.end() == 0


@pytest.fixture(scope="module")
def good(server: RunningServer) -> Iterator[Channel]:
    """A client that does everything right, all the while."""
    with channel_to(server.address) as channel:
        hello(channel)
        yield channel


@contextmanager
def raw(server: RunningServer) -> Iterator[zmq.Socket[bytes]]:
    """A socket on which frames are sent as they are."""
    context = zmq.Context()
    socket = context.socket(zmq.DEALER)
    try:
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.RCVTIMEO, int(CALL_SECONDS * 1000))
        socket.connect(server.address)
        yield socket
    finally:
        socket.close()
        context.term()


def malformed(server: RunningServer) -> dict[str, float]:
    found = server.metrics()
    return {
        fault: found[f'lmcache_mp_malformed_frames_total{{fault="{fault}"}}']
        for fault in ("frames", "message")
    }


def answers(channel: Channel) -> None:
    reply, _ = channel.call(m.Ping(), CALL_SECONDS)
    assert isinstance(reply, m.Pong)


@fuzz
@given(messages)
def test_the_decoder_gives_a_request_or_refuses(data: bytes) -> None:
    try:
        request = m.request_decoder.decode(data)
    except REFUSED:
        return
    assert isinstance(request, m.Message)


@fuzz
@given(plain, requests_of("s"))
def test_unknown_fields_are_ignored(extra: Any, request: m.Request) -> None:
    fields = msgspec.msgpack.decode(m.encode(request))
    assert m.request_decoder.decode(msgspec.msgpack.encode(fields | {"not yet invented": extra})) == request


def test_a_live_server_counts_each_malformed_message_and_serves_on(
    server: RunningServer, good: Channel
) -> None:
    expected = malformed(server)
    with raw(server) as socket:

        @fuzz
        @given(frames)
        def send(sent: list[bytes]) -> None:
            addressed = len(sent) > 1 and len(sent[0]) == 8
            if not addressed:
                expected["frames"] += 1
            elif not is_request(sent[1]):
                expected["message"] += 1
            socket.send_multipart(sent)
            if addressed and any(sent[0]):
                ident, reply, *_ = socket.recv_multipart()
                assert ident == sent[0]
                answer = m.reply_decoder.decode(reply)
                assert is_request(sent[1]) or (isinstance(answer, m.Error) and answer.code == "malformed")
            answers(good)

        send()
        socket.send_multipart([b"\2" * 8, m.encode(m.Ping())])
        assert socket.recv_multipart()[0] == b"\2" * 8  # all before it has been seen
    assert malformed(server) == expected


def test_no_value_in_a_message_is_a_fault_of_the_server(server: RunningServer, good: Channel) -> None:
    payloads = st.lists(st.binary(max_size=70), max_size=2)

    @fuzz
    @given(st.data(), payloads)
    def send(data: st.DataObject, payload: list[bytes]) -> None:
        with Worker(server.address, [namespace()]) as worker:
            worker.store(list(range(600)))
            for request in data.draw(st.lists(requests_of(worker.session), min_size=1, max_size=8)):
                fault = failure(worker.channel, request, payload)
                assert not fault.startswith("internal"), (request, fault)
        answers(good)

    send()
    assert server.metrics()['lmcache_mp_errors_total{code="internal"}'] == 0


def failure(channel: Channel, request: m.Request, payload: Sequence[bytes]) -> str:
    """Code and text with which the request failed, or nothing."""
    try:
        channel.call(request, CALL_SECONDS, payload)
    except RequestFailed as exc:
        return f"{exc.code}: {exc}"
    return ""


class Trap:
    """Unpickling it creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return Path.touch, (self.path,)


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_pickle_is_never_executed(
    server: RunningServer, good: Channel, tmp_path: Path, protocol: int
) -> None:
    trap = tmp_path / "sprung"
    payload = pickle.dumps(Trap(trap), protocol)
    pickle.loads(payload)
    assert trap.exists(), "the trap must work"
    trap.unlink()
    before = malformed(server)
    with raw(server) as socket:
        for frames in ([payload], [payload, payload], [bytes(8), payload], [b"\1" * 8, payload, payload]):
            socket.send_multipart(frames)
        reply = m.reply_decoder.decode(socket.recv_multipart()[1])
        assert isinstance(reply, m.Error)
        assert reply.code == "malformed"
        socket.send_multipart([b"\1" * 8, m.encode(m.Write(session="", lease=1, index=0)), payload])
        assert isinstance(m.reply_decoder.decode(socket.recv_multipart()[1]), m.Error)
    answers(good)
    assert malformed(server) == {"frames": before["frames"] + 2, "message": before["message"] + 2}
    assert not trap.exists()


def test_a_frame_above_the_limit_ends_its_sender_s_connection_only(
    server: RunningServer, good: Channel
) -> None:
    with raw(server) as socket, socket.get_monitor_socket(zmq.EVENT_DISCONNECTED) as monitor:
        monitor.setsockopt(zmq.RCVTIMEO, int(CALL_SECONDS * 1000))
        socket.send_multipart([bytes(8), bytes(m.MAX_FRAME_BYTES + 1)])
        assert monitor.recv_multipart()
        answers(good)
        socket.disable_monitor()

"""What a command may meet instead of what it looks for: a scripted engine, a server that answers wrongly."""

from __future__ import annotations

import json
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import zmq


class StubEngine:
    """An OpenAI-compatible engine whose answers a test sets: path to (status, content type, chunks).

    Each chunk is sent on its own; a number among them is a pause in seconds. ``requests`` is what was asked.
    """

    def __init__(self, url: str) -> None:
        self.url = url
        self.answers: dict[str, tuple[int, str, list[Any]]] = {}
        self.requests: list[tuple[str, str, dict[str, str], Any]] = []

    def set_json(self, path: str, value: object, status: int = 200) -> None:
        self.answers[path] = (status, "application/json", [json.dumps(value)])

    def set_events(self, path: str, *events: Any) -> None:
        """Events of a stream: an object, a number (a pause), or text that is sent as it is."""
        chunks = [
            e if isinstance(e, str | int | float) else f"data: {json.dumps(e)}\n\n"
            for e in (*events, "data: [DONE]\n\n")
        ]
        self.answers[path] = (200, "text/event-stream; charset=utf-8", chunks)


@contextmanager
def stub_engine() -> Iterator[StubEngine]:
    """A :class:`StubEngine` that serves the model "stub"."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            engine.requests.append((self.command, self.path, dict(self.headers), json.loads(body or b"null")))
            status, kind, chunks = engine.answers.get(
                self.path, (404, "application/json", ['{"detail": "Not Found"}'])
            )
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            try:
                for chunk in chunks:
                    if isinstance(chunk, str):
                        data = chunk.encode()
                        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))
                    else:
                        time.sleep(chunk)
                self.wfile.write(b"0\r\n\r\n")
            except OSError:
                self.close_connection = True  # the client has left

        do_GET = do_POST = _answer

        def log_message(self, *_: object) -> None:
            pass

    class Server(ThreadingHTTPServer):
        def handle_error(self, *_: object) -> None:
            if not isinstance(sys.exc_info()[1], ConnectionError):  # the client has left
                raise

    with Server(("127.0.0.1", 0), Handler) as http:
        engine = StubEngine(f"http://127.0.0.1:{http.server_address[1]}")
        engine.set_json("/v1/models", {"data": [{"id": "stub"}]})
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield engine
        finally:
            http.shutdown()
            thread.join(10)


@contextmanager
def stub_server(answer: Callable[[bytes], bytes | None]) -> Iterator[str]:
    """The address of a ZeroMQ server that answers each message with ``answer(message)``, or not at all."""
    stop = threading.Event()
    context = zmq.Context()
    router = context.socket(zmq.ROUTER)
    router.setsockopt(zmq.LINGER, 0)
    router.setsockopt(zmq.RCVTIMEO, 50)
    port = router.bind_to_random_port("tcp://127.0.0.1")

    def serve() -> None:
        while not stop.is_set():
            try:
                peer, ident, message, *_ = router.recv_multipart()
            except zmq.Again:
                continue
            reply = answer(message)
            if reply is not None:
                router.send_multipart([peer, ident, reply])

    thread = threading.Thread(target=serve)
    thread.start()
    try:
        yield f"tcp://127.0.0.1:{port}"
    finally:
        stop.set()
        thread.join(10)
        router.close()
        context.term()

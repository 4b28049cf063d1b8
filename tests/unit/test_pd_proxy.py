"""``examples/pd_proxy.py`` between two engines that only write down what they are asked."""

from __future__ import annotations

import importlib.util
import json
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

from helpers.server import dead_port, wait_for

SCRIPT = Path(__file__).parents[2] / "examples" / "pd_proxy.py"


def script() -> Any:
    spec = importlib.util.spec_from_file_location("pd_proxy", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@contextmanager
def serving(server: ThreadingHTTPServer) -> Iterator[str]:
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


class Bench:
    """Two engines and the proxy. ``asked`` has who was asked what, in order."""

    def __init__(self, end: ExitStack) -> None:
        self.asked: list[tuple[str, dict[str, Any]]] = []
        self.status = {"prefill": 200, "decode": 200}
        self.first_piece_read = threading.Event()
        self.left = threading.Event()
        """Whoever asked an engine for an answer without end is gone."""
        urls = [end.enter_context(serving(self._engine(name))) for name in ("prefill", "decode")]
        self.proxy = script().Proxy(0, *urls, 20.0)
        self.url = end.enter_context(serving(self.proxy))

    def _engine(self, name: str) -> ThreadingHTTPServer:
        bench = self

        class Engine(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                bench.asked.append((name, body))
                self.send_response(bench.status[name])
                self.send_header("Content-Type", f"text/{name}")
                self.end_headers()
                self.wfile.write(b"first ")
                self.wfile.flush()
                if body["stream"]:
                    bench.first_piece_read.wait(20)
                    if "endless" in body:
                        self.go_on()
                        return
                self.wfile.write(b"last")

            def go_on(self) -> None:
                try:
                    for _ in range(2000):
                        self.wfile.write(b"more ")
                        time.sleep(0.01)
                except OSError:
                    bench.left.set()

            def log_message(self, *_: Any) -> None:
                return None

        return ThreadingHTTPServer(("127.0.0.1", 0), Engine)

    def post(self, body: dict[str, Any], path: str = "/v1/completions") -> Any:
        request = urllib.request.Request(self.url + path, json.dumps(body).encode())
        return urllib.request.urlopen(request, timeout=20)


@pytest.fixture
def bench() -> Iterator[Bench]:
    with ExitStack() as end:
        yield Bench(end)


BODY = {"model": "m", "prompt": [1, 2], "cache_salt": "s", "stream": False}


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_prefill_gets_the_prompt_for_one_token_and_then_decode_the_request_as_it_is(
    bench: Bench, path: str
) -> None:
    body = BODY | {"max_tokens": 9, "max_completion_tokens": 9, "min_tokens": 5, "n": 2}
    with bench.post(body, path) as answer:
        assert answer.read() == b"first last"
        assert answer.headers["Content-Type"] == "text/decode"
    assert bench.asked == [("prefill", BODY | {"max_tokens": 1}), ("decode", body)]


def test_what_decode_streams_arrives_as_it_comes(bench: Bench) -> None:
    with bench.post(BODY | {"stream": True, "stream_options": {"include_usage": True}}) as answer:
        assert answer.read1(100) == b"first "
        bench.first_piece_read.set()
        assert answer.read() == b"last"
    assert bench.asked[0] == ("prefill", BODY | {"max_tokens": 1})


def test_a_client_that_leaves_ends_the_request_to_decode_in_one_line(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    said: list[str] = []

    def told() -> str:
        said.append(capsys.readouterr().err)
        return "".join(said)

    with bench.post(BODY | {"stream": True, "endless": True}) as answer:
        assert answer.read1(100) == b"first "
    bench.first_piece_read.set()
    assert bench.left.wait(20)
    wait_for(lambda: "the answer ended early: " in told(), what="a line")
    assert "Traceback" not in told()


@pytest.mark.parametrize("dead", [True, False])
def test_a_prefill_that_fails_costs_the_client_nothing_but_time(bench: Bench, dead: bool) -> None:
    bench.status["prefill"] = 500
    if dead:
        bench.proxy.prefill = f"http://127.0.0.1:{dead_port()}"
    with bench.post(BODY) as answer:
        assert answer.read() == b"first last"
    assert bench.asked[-1] == ("decode", BODY)


def test_what_decode_refuses_the_client_sees(bench: Bench) -> None:
    bench.status["decode"] = 400
    with pytest.raises(urllib.error.HTTPError, match="400") as caught:
        bench.post(BODY)
    assert caught.value.read() == b"first last"
    caught.value.close()
    bench.proxy.decode = f"http://127.0.0.1:{dead_port()}"
    with pytest.raises(urllib.error.HTTPError, match="502") as caught:
        bench.post(BODY)
    caught.value.close()

"""The order of requests for prefill and decode apart, as a proxy: to prefill for one token, then to decode.

    python pd_proxy.py --port 8000 --prefill http://prefill-host:8100 --decode http://decode-host:8200

A sample, without authentication and with one engine on each side. What prefill answers is not looked at: when it fails,
decode computes the whole prompt.
"""

from __future__ import annotations

import argparse
import http.client
import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import urlsplit

GENERATES = ("/v1/completions", "/v1/chat/completions")
ONLY_DECODE = ("max_completion_tokens", "min_tokens", "stream_options", "best_of", "n")


def for_prefill(body: dict[str, Any]) -> dict[str, Any]:
    """The same prompt, salt and adapter; one token, in one piece."""
    kept = {name: value for name, value in body.items() if name not in ONLY_DECODE}
    return kept | {"max_tokens": 1, "stream": False}


def ask(
    base: str, method: str, path: str, body: bytes, headers: dict[str, str], seconds: float
) -> http.client.HTTPResponse:
    """The answer of an engine, whose body is yet to be read."""
    to = urlsplit(base)
    kind = http.client.HTTPSConnection if to.scheme == "https" else http.client.HTTPConnection
    connection = kind(to.netloc, timeout=seconds)
    connection.request(method, path, body or None, headers)
    return connection.getresponse()


class Proxy(ThreadingHTTPServer):
    """Where to forward to, and how long to wait."""

    daemon_threads = True

    def __init__(self, port: int, prefill: str, decode: str, seconds: float) -> None:
        super().__init__(("127.0.0.1", port), Handler)
        self.prefill, self.decode, self.seconds = prefill, decode, seconds


class Handler(BaseHTTPRequestHandler):
    """One request of a client."""

    server: Proxy

    def do_GET(self) -> None:
        self.to_decode(b"")

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        if self.path.partition("?")[0] in GENERATES:
            self.to_prefill(body)
        self.to_decode(body)

    def to_prefill(self, body: bytes) -> None:
        try:
            short = json.dumps(for_prefill(json.loads(body))).encode()
            answer = ask(self.server.prefill, "POST", self.path, short, self.passed_on(), self.server.seconds)
            answer.read()
            if answer.status != 200:
                self.log_error("prefill: status %d; decode computes all", answer.status)
        except (OSError, http.client.HTTPException, ValueError, AttributeError) as exc:
            self.log_error("prefill: %s; decode computes all", exc)

    def to_decode(self, body: bytes) -> None:
        try:
            answer = ask(
                self.server.decode, self.command, self.path, body, self.passed_on(), self.server.seconds
            )
        except (OSError, http.client.HTTPException) as exc:
            self.send_error(502, f"decode: {exc}")
            return
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.getheader("Content-Type", "application/json"))
        try:
            with answer:  # closed, decode computes no more for a client that has left
                self.end_headers()  # HTTP/1.0: the answer ends with the connection
                while piece := answer.read1(1 << 16):
                    self.wfile.write(piece)
                    self.wfile.flush()
        except (OSError, http.client.HTTPException) as exc:
            self.log_error("the answer ended early: %s", exc)

    def passed_on(self) -> dict[str, str]:
        names = ("Authorization", "Content-Type", "X-Request-Id")
        given = {name: self.headers[name] for name in names if name in self.headers}
        return given | {"Connection": "close"}


def main() -> None:
    parser = argparse.ArgumentParser(description="prefill for one token, then decode")
    parser.add_argument("--port", type=int, default=8000)
    parser.add_argument("--prefill", required=True, metavar="URL")
    parser.add_argument("--decode", required=True, metavar="URL")
    parser.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="between two pieces (600)"
    )
    args = parser.parse_args()
    with Proxy(args.port, args.prefill, args.decode, args.timeout) as proxy:
        print(f"listening on http://127.0.0.1:{proxy.server_port}", file=sys.stderr, flush=True)
        proxy.serve_forever()


if __name__ == "__main__":
    main()

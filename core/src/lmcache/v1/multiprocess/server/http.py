"""HTTP for people and monitors: /healthcheck, /status, /metrics. Runs in its own thread."""

from __future__ import annotations

import socket
import threading
import time
from typing import Any

import uvicorn
from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from lmcache.errors import LMCacheError, StartupError
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol.channel import Channel

_ASK_SECONDS = 1.0


def claim(host: str, port: int) -> socket.socket:
    """Bind and listen, before anything else is started.

    Raises:
        StartupError: if the port is in use or the address cannot be bound.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        sock.bind((host, port))
        sock.listen(128)
    except OSError as exc:
        sock.close()
        raise StartupError(
            f"--http-port {port}: cannot bind {host}:{port} ({exc.strerror or exc});"
            " choose another --http-host or --http-port"
        ) from None
    return sock


class HttpServer:
    """Serves on a socket claimed before. Asks the request loop itself, so its health is the loop's health."""

    def __init__(self, sock: socket.socket, loop_address: str, registry: CollectorRegistry) -> None:
        self._sock = sock
        self._registry = registry
        self._channel = Channel(loop_address)
        self.port = int(sock.getsockname()[1])
        app = Starlette(
            routes=[
                Route("/healthcheck", self._health),
                Route("/status", self._status),
                Route("/metrics", self._metrics),
            ]
        )
        config = uvicorn.Config(
            app, log_level="warning", access_log=False, lifespan="off", ws="none", loop="asyncio"
        )
        self._server = uvicorn.Server(config)
        self._thread = threading.Thread(target=self._run, name="lmcache-http", daemon=True)

    def start(self) -> None:
        self._thread.start()
        while not self._server.started and self._thread.is_alive():
            time.sleep(0.005)

    def close(self) -> None:
        self._server.should_exit = True
        if self._thread.is_alive():
            self._thread.join(5)
        self._channel.close()
        self._sock.close()

    def _run(self) -> None:
        self._server.run(sockets=[self._sock])

    def _ask(self, message: m.Request) -> m.Reply:
        return self._channel.call(message, _ASK_SECONDS)[0]

    def _health(self, _: Request) -> Response:
        try:
            self._ask(m.Ping())
        except LMCacheError as exc:
            self._channel.reset()
            return JSONResponse({"healthy": False, "reason": str(exc)}, status_code=503)
        return JSONResponse({"healthy": True})

    def _status(self, _: Request) -> Response:
        try:
            state: Any = self._ask(m.Status())
        except LMCacheError as exc:
            self._channel.reset()
            return JSONResponse({"error": str(exc)}, status_code=503)
        return JSONResponse(state.fields)

    def _metrics(self, _: Request) -> Response:
        return Response(generate_latest(self._registry), media_type=CONTENT_TYPE_LATEST)

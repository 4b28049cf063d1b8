"""The ways to the connector, and what an operator reads when a setting cannot be met."""

from __future__ import annotations

import socket
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e.conftest import tokens
from e2e.engine import EngineFailed, EngineProcess, connector, engine
from helpers.server import Server

pytestmark = pytest.mark.vllm

PROMPT = tokens(1, 600)


def hits(process: EngineProcess) -> list[int]:
    return [process.generate([PROMPT])[0]["cached"] for _ in range(2)]


def test_by_module_path(model_dir: Callable[[str], Path], log: Path) -> None:
    with Server() as server:
        transfer = connector(server.port) | {
            "kv_connector_module_path": "lmcache.integration.vllm.lmcache_mp_connector"
        }
        with engine(model_dir("gqa"), log, transfer) as process:
            assert hits(process) == [0, 512]


def _default_port_is_free() -> bool:
    with socket.socket() as sock:
        return sock.connect_ex(("127.0.0.1", 5555)) != 0


@pytest.mark.long
@pytest.mark.skipif(
    not _default_port_is_free(), reason="vLLM offers no way to move it from port 5555, which is in use"
)
def test_by_the_offloading_backend(model_dir: Callable[[str], Path], log: Path) -> None:
    server = Server(port=5555)
    with (
        server,
        engine(
            model_dir("gqa"), log, None, kv_offloading_size=1.0, kv_offloading_backend="lmcache"
        ) as process,
    ):
        assert hits(process) == [0, 512]


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        ({"lmcache.mp.hots": "tcp://localhost"}, "did you mean lmcache.mp.host?"),
        ({"lmcache.mp.mp_transfer_mode": "pull"}, "expected one of auto, engine_driven, lmcache_driven"),
    ],
)
def test_a_setting_that_cannot_be_met_is_an_error_at_start(
    model_dir: Callable[[str], Path], log: Path, extra: dict[str, str], words: str
) -> None:
    with pytest.raises(EngineFailed), engine(model_dir("gqa"), log, connector(1, **extra)):
        raise AssertionError("the engine started")
    assert words in log.read_text()

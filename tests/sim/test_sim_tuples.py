"""Layers whose caches are tuples on the simulated device, whose memory the host cannot touch: both transfer modes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.server import RunningServer, running_server
from lmcache.testing.engine import CHUNK

pytest.importorskip("torch")
pytestmark = pytest.mark.sim

from helpers.vllm_caches import TUPLES, check_comes_back, check_no_crossing, making  # noqa: E402


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
@pytest.mark.parametrize("form", TUPLES)
def test_what_was_stored_comes_back_into_zeroed_pages_and_nothing_else_moves(
    sim: Any, server: RunningServer, form: str, mode: str
) -> None:
    sim.set_delay(400)
    with making(server, "sim", mode) as make:
        check_comes_back(make, form, 1000 + 100 * TUPLES.index(form) + len(mode))


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_no_layout_is_given_what_another_stored(sim: Any, server: RunningServer, mode: str) -> None:
    with making(server, "sim", mode) as make:
        check_no_crossing(make, 2000 + len(mode))

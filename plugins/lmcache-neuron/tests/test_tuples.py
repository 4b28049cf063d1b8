"""An engine whose layers are K/V tuples, beside a real server, with the plugin serving its device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_neuron._native")

from neuron_on_sim import distribution

from helpers.devices import sim_served_by
from helpers.server import RunningServer, running_server
from helpers.vllm_caches import TUPLES, Make, check_comes_back, making
from lmcache.testing.engine import CHUNK

pytestmark = [pytest.mark.torch, pytest.mark.sim]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.fixture
def make(sim: Any, server: RunningServer, tmp_path: Path) -> Iterator[Make]:
    """The simulated device is the plugin's in this process."""
    with (
        sim_served_by("neuron-on-sim", tmp_path, distribution(tmp_path)),
        making(server, "sim", "auto") as one,
    ):
        yield one


@pytest.mark.parametrize("form", TUPLES)
def test_tuples_come_back_and_nothing_else_moves(make: Make, form: str) -> None:
    check_comes_back(make, form, 1000 + 100 * TUPLES.index(form))

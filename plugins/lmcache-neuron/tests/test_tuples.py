"""An engine whose layers are K/V tuples, beside a real server, with the plugin serving its device."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_neuron._native")

from neuron_on_sim import distribution

from helpers.server import RunningServer, running_server
from helpers.vllm_caches import TUPLES, Make, check_comes_back, making
from lmcache.testing.engine import CHUNK
from lmcache.v1.platform import _device_detect, get_device_spec

pytestmark = [pytest.mark.torch, pytest.mark.sim]


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.fixture
def make(sim: Any, server: RunningServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Make]:
    """The simulated device is the plugin's in this process."""
    for name, value in distribution(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(tmp_path))
    _device_detect.reset()
    spec = get_device_spec("sim")
    assert spec is not None
    assert spec.backend_name == "neuron-on-sim"
    with making(server, "sim", "auto") as one:
        yield one
    _device_detect.reset()


@pytest.mark.parametrize("form", TUPLES)
def test_tuples_come_back_and_nothing_else_moves(make: Make, form: str) -> None:
    check_comes_back(make, form, 1000 + 100 * TUPLES.index(form))

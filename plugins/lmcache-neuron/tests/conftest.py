"""Helpers of these tests are imported by their names, wherever the tests are started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def sim(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """``torch.sim``, by which the plugin reaches its device as long as the test runs."""
    pytest.importorskip("torch")
    pytest.importorskip("lmcache_sim", reason="needs the simulated accelerator: ./dev neuron")
    import torch

    from lmcache_neuron import runtime

    monkeypatch.setattr(runtime, "TORCH_MODULE", "sim")
    runtime.mover.cache_clear()
    yield torch.sim
    runtime.mover.cache_clear()
    torch.sim.check_guards(0)

"""The plugin on the simulated accelerator: the same code, with the name of torch's module swapped."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

from lmcache_hpu.spec import HpuDeviceSpec

__all__ = ["HpuOnSimSpec", "distribution"]


class HpuOnSimSpec(HpuDeviceSpec):
    """What is not overridden here is the wheel's."""

    @property
    def device_type(self) -> str:
        return "sim"

    @property
    def backend_name(self) -> str:
        return "hpu-on-sim"

    @property
    def torch_module_name(self) -> str:
        return "sim"

    def is_available(self) -> bool:
        try:
            return bool(self._module().is_available())
        except ImportError:
            return False

    def _module(self) -> Any:
        import lmcache_sim  # noqa: F401 -- makes torch.sim
        import torch

        return torch.sim

    @property
    def ops_cls(self) -> Any:
        from lmcache_hpu import runtime

        runtime.TORCH_MODULE = "sim"
        return super().ops_cls

    @property
    def page_mover(self) -> Any:
        from lmcache_hpu import runtime

        runtime.TORCH_MODULE = "sim"
        return super().page_mover

    def conformance_stall(self, stream: Any, seconds: float) -> None:
        import torch

        torch.sim.Stream.of(stream).sleep(int(seconds * 1e6))


def distribution(folder: Path) -> dict[str, str]:
    """Make it installed for processes with these variables, and the simulation's own plugin not be used."""
    info = folder / "lmcache_hpu_on_sim-1.0.0.dist-info"
    info.mkdir()
    text = "Metadata-Version: 2.1\nName: lmcache-hpu-on-sim\nVersion: 1.0.0\nRequires-Dist: lmcache>=1.0,<2\n"
    (info / "METADATA").write_text(text)
    (info / "RECORD").write_text("hpu_on_sim.py,,\n")
    (info / "WHEEL").write_text(
        "Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
    )
    (info / "entry_points.txt").write_text("[lmcache.device_plugins]\nhpu-on-sim = hpu_on_sim:HpuOnSimSpec\n")
    (folder / "hpu_on_sim.py").write_text(Path(__file__).read_text(encoding="utf-8"), encoding="utf-8")
    path = ":".join([str(folder), *filter(None, sys.path)])
    return {"PYTHONPATH": path, "LMCACHE_DISABLE_PLUGINS": "sim"}

"""In lazy mode nothing runs before a step is ended: who ends it, and where nothing needs to be."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import pytest

from lmcache.errors import ConfigError, DeviceError
from lmcache_hpu import runtime


def habana(monkeypatch: pytest.MonkeyPatch, lazy: bool | None, marks: list[str]) -> None:
    """Gaudi's software, as far as it is asked; ``lazy`` None: a release that does not say it."""
    for name in ("habana_frameworks", "habana_frameworks.torch", "habana_frameworks.torch.utils"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    core = ModuleType("habana_frameworks.torch.core")
    vars(core)["mark_step"] = lambda: marks.append("mark")
    monkeypatch.setitem(sys.modules, core.__name__, core)
    internal = ModuleType("habana_frameworks.torch.utils.internal")
    if lazy is not None:
        vars(internal)["is_lazy"] = lambda: lazy
    monkeypatch.setitem(sys.modules, internal.__name__, internal)
    runtime._marker.cache_clear()


@pytest.fixture(autouse=True)
def asked_anew() -> Any:
    runtime._marker.cache_clear()
    yield
    runtime._marker.cache_clear()


@pytest.mark.parametrize(
    ("setting", "variable", "lazy", "marks"),
    [
        ("auto", "", True, 1),
        ("auto", "1", False, 0),
        ("auto", "1", None, 1),
        ("auto", "0", None, 0),
        ("on", "0", False, 1),
        ("off", "1", True, 0),
    ],
)
def test_a_step_is_marked_where_gaudi_s_software_is_lazy_or_as_the_setting_says(
    monkeypatch: pytest.MonkeyPatch, setting: str, variable: str, lazy: bool | None, marks: int
) -> None:
    monkeypatch.setenv("LMCACHE_HPU_STEP_MARKS", setting)
    monkeypatch.setenv("PT_HPU_LAZY_MODE", variable)
    made: list[str] = []
    habana(monkeypatch, lazy, made)
    runtime.end_step()
    assert len(made) == marks


def test_marks_that_are_asked_for_and_cannot_be_had_are_an_error_with_the_remedy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("LMCACHE_HPU_STEP_MARKS", "on")
    monkeypatch.setitem(sys.modules, "habana_frameworks", None)
    with pytest.raises(DeviceError, match=r"mark_step: .*; set LMCACHE_HPU_STEP_MARKS=off") as caught:
        runtime.end_step()
    assert "\n" not in str(caught.value)


def test_a_setting_that_is_none_is_refused_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_HPU_STEP_MARKS", "sometimes")
    with pytest.raises(
        ConfigError, match="LMCACHE_HPU_STEP_MARKS='sometimes': expected one of auto, on, off"
    ):
        runtime.end_step()


# ------------------------------------------------------------------------------------- on the simulated device


def slots(ops: Any, torch: Any) -> None:
    pages, chunk = torch.zeros(2, 4, 4, 1, 8, device="sim"), torch.ones(2, 3, 8, device="sim")
    ops.single_layer_kv_transfer(chunk, pages, torch.tensor([1, 5, 9]), 0, 1)


def blocks(ops: Any, torch: Any) -> None:
    from lmcache.v1.platform.ops_types import PageBufferShapeDesc

    desc = PageBufferShapeDesc(kv_size=2, nl=1, nb=4, bs=4, nh=1, hs=8, element_size=4)
    pages, chunk = [torch.zeros(2, 4, 4, 1, 8, device="sim")], torch.ones(2, 1, 8, 8, device="sim")
    ops.multi_layer_block_kv_transfer(pages, [chunk], [3, 1], torch.device("sim"), 0, desc, 8, 1, 0)


def memcpy(ops: Any, torch: Any) -> None:
    ops.lmcache_memcpy_async(torch.zeros(8, device="sim"), torch.ones(8), 32, 0, 0, 1)


@pytest.mark.torch
@pytest.mark.sim
@pytest.mark.parametrize(("op", "ended"), [(slots, 1), (blocks, 2), (memcpy, 1)])
def test_every_op_that_queues_ends_its_step_and_blocks_the_engine_s_before(
    sim: Any, monkeypatch: pytest.MonkeyPatch, op: Callable[[Any, Any], None], ended: int
) -> None:
    import torch

    pytest.importorskip("lmcache_hpu._native")
    from lmcache_hpu.ops import HpuDeviceOps

    marks: list[str] = []
    habana(monkeypatch, True, marks)
    op(HpuDeviceOps(), torch)
    assert marks == ["mark"] * ended


@pytest.mark.torch
@pytest.mark.sim
def test_pages_are_marked_before_they_are_waited_for(sim: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    pytest.importorskip("lmcache_hpu._native")
    order: list[str] = []
    habana(monkeypatch, True, order)
    wait = sim.synchronize
    monkeypatch.setattr(sim, "synchronize", lambda *device: (order.append("wait"), wait(*device)))
    pages, host = torch.zeros(8, 16, device="sim"), torch.zeros(8, 16)
    for to_host in (True, False):
        order.clear()
        runtime.mover().move_pages([pages], [2, 3], [[host[at].data_ptr() for at in (0, 1)]], to_host)
        assert order[0] == "mark"
        assert order[-1] == "wait"
        assert order.index("wait") > order.index("mark")


def test_an_event_and_the_wait_for_a_stream_come_after_what_was_called_before(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not marked is on no stream yet: an event there would be passed too early."""
    from types import SimpleNamespace

    from lmcache_hpu.spec import HpuDeviceSpec

    order: list[str] = []
    habana(monkeypatch, True, order)
    stream = SimpleNamespace(synchronize=lambda: order.append("wait"))
    event = SimpleNamespace(record=lambda where: order.append("record") if where is stream else None)
    HpuDeviceSpec().record_stream_event(event, stream)
    HpuDeviceSpec().synchronize_stream(stream)
    assert order == ["mark", "record", "mark", "wait"]

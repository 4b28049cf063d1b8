"""Connectors on the simulated device: its memory is out of the host's reach, its streams run by themselves."""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

from helpers.connector_cases import (  # noqa: E402
    ALL,
    PAIRS,
    Model,
    Store,
    Transfer,
    check_round_trip,
    objects_for,
    sizes,
    transfers,
    whole,
)
from helpers.slot_cases import Case, build  # noqa: E402
from lmcache.utils import EngineType  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import (  # noqa: E402
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemLayerwiseGPUConnector,
)

SECONDS = 60.0
CASE = Case(nl=4, nb=4, bs=8, nh=2, hs=32)
SPANS = ([1, 12], [12, 30])


class Rig:
    """A connector over noise on the device, and objects for two chunks."""

    def __init__(self, kind: Any, fmt: int, use_gpu: bool, case: Case = CASE, spans: Any = SPANS) -> None:
        model = Model(fmt, case)
        self.connector, self.spans = whole(kind, model, use_gpu), spans
        self.pages = [tensor.nan_to_num(1.0).to("sim") for tensor in build(fmt, case)]
        self.connector.initialize_kvcaches_ptr(kvcaches=self.pages)
        self.store, self.slots = Store(), torch.arange(case.slots)
        transfer = Transfer(self.slots.tolist(), *spans, 0)
        self.objects = objects_for(self.connector, model, transfer, self.store)

    def lane(self, name: str) -> Any:
        return self.connector.lane(name).stream

    def saving(self, sync: bool = True) -> Any:
        return self.connector.batched_from_gpu(
            self.objects, *self.spans, kvcaches=self.pages, slot_mapping=self.slots, sync=sync
        )

    def loading(self) -> Any:
        return self.connector.batched_to_gpu(
            *self.spans, kvcaches=self.pages, slot_mapping=self.slots, sync=True
        )

    def load_all(self) -> None:
        running = self.loading()
        next(running)
        for layer in self.objects:
            running.send(layer)
        next(running)

    def give_back(self) -> None:
        self.store.give_back()
        assert self.store.allocator.live == 0


@pytest.fixture(scope="module")
def device() -> Any:
    import lmcache_sim  # noqa: F401

    return torch.sim


@pytest.mark.parametrize(("name", "fmt"), PAIRS)
@settings(max_examples=6)
@given(data=st.data())
def test_what_is_stored_comes_back_to_the_slots_named_and_no_others(
    device: Any, name: str, fmt: int, data: Any
) -> None:
    case = data.draw(sizes(fmt))
    check_round_trip(
        ALL[name],
        Model(fmt, case),
        data.draw(transfers(case.slots)),
        device="sim",
        use_gpu=data.draw(st.booleans()),
        slots_on_device=data.draw(st.booleans()),
        settle=lambda: device.current_stream().synchronize(),
    )
    device.check_guards()


# --- streams -----------------------------------------------------------------------------------------------


def test_the_router_gives_the_cores_connectors_for_this_device(device: Any) -> None:
    from lmcache.v1.gpu_connector import CreateGPUConnector

    config = SimpleNamespace(use_layerwise=True, enable_blending=False, enable_pd=False, extra_config={})
    found = CreateGPUConnector(config, Model(1, CASE).metadata, EngineType.VLLM, {"kv_layout": "NHD"})
    assert type(found) is VLLMPagedMemLayerwiseGPUConnector
    assert found.device == torch.device("sim", 0)
    config.extra_config = {"cpu_connector": True}
    with pytest.raises(ValueError, match="the device backend is not the CPU's"):
        CreateGPUConnector(config, Model(1, CASE).metadata, EngineType.VLLM)


@pytest.mark.parametrize("use_gpu", [False, True])
@pytest.mark.parametrize("fmt", [1, 12])
def test_a_store_takes_what_the_engine_has_queued_and_is_done_on_return(
    sim: Any, fmt: int, use_gpu: bool
) -> None:
    rig = Rig(VLLMPagedMemGPUConnectorV2, fmt, use_gpu)
    sim.current_stream().sleep(30_000)
    for tensor in rig.pages:
        tensor.fill_(3)
    rig.connector.batched_from_gpu(rig.objects, *SPANS, kvcaches=rig.pages, slot_mapping=rig.slots)
    assert all((obj.tensor == 3).all() for obj in rig.objects)


@pytest.mark.parametrize("use_gpu", [False, True])
def test_a_load_follows_what_the_engine_has_queued(sim: Any, use_gpu: bool) -> None:
    rig = Rig(VLLMPagedMemGPUConnectorV2, 1, use_gpu)
    rig.connector.batched_from_gpu(rig.objects, *SPANS, kvcaches=rig.pages, slot_mapping=rig.slots)
    held = [tensor.cpu() for tensor in rig.pages]
    sim.current_stream().sleep(30_000)
    for tensor in rig.pages:
        tensor.zero_()
    rig.connector.batched_to_gpu(rig.objects, *SPANS, kvcaches=rig.pages, slot_mapping=rig.slots)
    found = [tensor.clone() for tensor in rig.pages]
    for old, new in zip(held, found, strict=True):
        assert new.cpu().view(2, -1, 64)[:, 1:30].equal(old.view(2, -1, 64)[:, 1:30])


def test_neither_waits_for_other_streams_of_the_device(sim: Any) -> None:
    rig = Rig(VLLMPagedMemGPUConnectorV2, 1, use_gpu=True)
    other = sim.Stream()
    busy = torch.zeros(8, device="sim")
    sim.synchronize()

    def both_ways() -> None:
        kwargs = {"kvcaches": rig.pages, "slot_mapping": rig.slots}
        rig.connector.batched_from_gpu(rig.objects, *SPANS, **kwargs)
        rig.connector.batched_to_gpu(rig.objects, *SPANS, **kwargs)
        for layerwise in (VLLMPagedMemLayerwiseGPUConnector, VLLMBufferLayerwiseGPUConnector):
            steps = Rig(layerwise, 1, use_gpu=True)
            for _ in steps.saving():
                pass
            steps.load_all()

    with other.held():
        with sim.stream(other):
            busy.fill_(1)
        thread = threading.Thread(target=both_ways, daemon=True)
        thread.start()
        thread.join(SECONDS)
        assert not thread.is_alive(), "a transfer waited for a stream that is none of its business"
        assert not other.query()


# --- layer by layer ----------------------------------------------------------------------------------------

KINDS = pytest.mark.parametrize(
    "kind", [VLLMPagedMemLayerwiseGPUConnector, VLLMBufferLayerwiseGPUConnector], ids=["paged", "buffer"]
)


@KINDS
def test_a_store_does_not_delay_the_step(sim: Any, kind: Any) -> None:
    """The store's own stream stands still; the engine computes all layers, then waits for the store alone."""
    rig = Rig(kind, 1, use_gpu=True)
    lane = rig.lane("store")
    running = rig.saving(sync=False)
    with lane.held():
        for layer in range(CASE.nl):
            rig.pages[layer].fill_(layer + 1)  # the step computes this layer
            next(running)
        done = sim.current_stream().record_event()
        done.synchronize()
        assert not lane.query(), "the store is done, so nothing was shown"
    next(running)
    for layer, objects in enumerate(rig.objects):
        assert all((obj.tensor == layer + 1).all() for obj in objects)
    rig.give_back()


@KINDS
def test_a_layers_store_takes_what_the_step_has_queued_for_it(sim: Any, kind: Any) -> None:
    rig = Rig(kind, 1, use_gpu=True)
    running = rig.saving(sync=False)
    for layer in range(CASE.nl):
        sim.current_stream().sleep(10_000)
        rig.pages[layer].fill_(layer + 1)
        next(running)
    next(running)
    for layer, objects in enumerate(rig.objects):
        assert all((obj.tensor == layer + 1).all() for obj in objects), f"layer {layer} was stored too early"
    rig.give_back()


@KINDS
def test_the_engine_waits_for_a_layer_before_it_uses_it(sim: Any, kind: Any) -> None:
    rig = Rig(kind, 1, use_gpu=True)
    for _ in rig.saving():
        pass
    held = [tensor.clone() for tensor in rig.pages]
    for tensor in rig.pages:
        tensor.zero_()
    rig.lane("load").set_delay(5_000)
    running, used = rig.loading(), []
    next(running)
    for layer in range(CASE.nl):
        running.send(rig.objects[layer])
        if kind is VLLMBufferLayerwiseGPUConnector:
            used.append(rig.connector.get_kv(layer)[0].clone())
        elif layer:
            used.append(rig.pages[layer - 1].clone())  # as the step would, without asking anybody
    next(running)
    for layer, found in enumerate(used):
        old = held[layer].cpu().view(2, -1, 64)
        keys = (
            found.cpu() if kind is VLLMBufferLayerwiseGPUConnector else found.cpu().view(2, -1, 64)[0, 1:30]
        )
        assert keys.equal(old[0, 1:30]), f"layer {layer} was used before it was there"
    rig.lane("load").set_delay(0)
    rig.give_back()


def test_a_buffer_takes_no_layer_before_the_pages_have_the_one_before(sim: Any) -> None:
    """The engine is slow, so that what goes out of a buffer lags behind what could come in."""
    rig = Rig(VLLMBufferLayerwiseGPUConnector, 1, use_gpu=True)
    for _ in rig.saving():
        pass
    held = [tensor.cpu() for tensor in rig.pages]
    for tensor in rig.pages:
        tensor.zero_()
    sim.synchronize()
    running = rig.loading()
    next(running)
    for layer in range(CASE.nl):
        sim.current_stream().sleep(20_000)
        running.send(rig.objects[layer])
    next(running)
    for layer, (old, new) in enumerate(zip(held, rig.pages, strict=True)):
        found = new.cpu().view(2, -1, 64)[:, 1:30]
        assert found.equal(old.view(2, -1, 64)[:, 1:30]), f"layer {layer} was overwritten in its buffer"
    rig.give_back()


def test_layer_i_plus_1_is_copied_while_layer_i_computes(sim: Any) -> None:
    """Layers take 20 ms over the link and 30 ms to compute; times are those at which the streams got there.
    That no layer is used too early is shown by contents, above."""
    case = replace(CASE, nl=6, nb=32, bs=16, nh=4, hs=32)
    rig = Rig(VLLMPagedMemLayerwiseGPUConnector, 1, True, case, ([0], [512]))
    for _ in rig.saving():
        pass
    layer_bytes = rig.objects[0][0].get_size()
    sim.set_link(gigabytes_per_second=layer_bytes / 0.02 / 1e9)
    engine, lane = sim.current_stream(), rig.lane("load")
    times: dict[tuple[str, int], float] = {}

    def note(stream: Any, what: str, layer: int) -> None:
        stream.launch_host_func(lambda: times.__setitem__((what, layer), time.monotonic()))

    def compute(layer: int) -> None:
        note(engine, "begins", layer)
        engine.sleep(30_000)
        note(engine, "ends", layer)

    running = rig.loading()
    next(running)
    began = time.monotonic()
    for layer in range(case.nl):
        note(lane, "copied from", layer)
        running.send(rig.objects[layer])
        note(lane, "copied until", layer)
        if layer:
            compute(layer - 1)
    next(running)
    compute(case.nl - 1)
    engine.synchronize()
    lane.synchronize()
    took = time.monotonic() - began
    for layer in range(case.nl - 1):
        assert times["copied from", layer + 1] < times["ends", layer], "copies wait for the compute"
    assert times["copied until", case.nl - 1] < times["ends", case.nl - 3], "copies do not run ahead"
    assert took < case.nl * 0.05, f"{took:.3f} s: no better than one after the other"
    print(f"load and compute of {case.nl} layers: {took:.3f} s, one after the other {case.nl * 0.05:.3f} s")
    rig.give_back()


@KINDS
@pytest.mark.parametrize("steps", range(CASE.nl + 2))
@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
def test_a_transfer_that_is_given_up_waits_for_what_is_in_flight(
    sim: Any, kind: Any, load: bool, steps: int
) -> None:
    rig = Rig(kind, 1, use_gpu=True)
    for _ in rig.saving():
        pass
    held = [tensor.cpu() for tensor in rig.pages]
    for tensor in rig.pages:
        tensor.zero_() if load else tensor.fill_(5)
    lane = rig.lane("load" if load else "store")
    lane.set_delay(2_000)
    running = rig.loading() if load else rig.saving(sync=False)
    for step in range(min(steps, CASE.nl + 1)):
        if load and 1 <= step <= CASE.nl:
            running.send(rig.objects[step - 1])
        else:
            next(running)
    memory = [obj.raw_tensor for obj in rig.store.given]
    for obj in rig.store.given:
        obj.ref_count_down()  # the engine has given up, the copies have not
    running.close()
    assert rig.store.allocator.live == 0
    for raw in memory:
        raw.fill_(0xEE)  # somebody else's by now
    sim.synchronize()
    assert all((raw == 0xEE).all() for raw in memory), "a copy came after it was given up"
    for old, new in zip(held, rig.pages, strict=True):
        found = new.cpu().view(2, -1, 64)[:, 1:30]
        if load and found.any():
            assert found.equal(old.view(2, -1, 64)[:, 1:30]), "a copy read what was given up"
    lane.set_delay(0)

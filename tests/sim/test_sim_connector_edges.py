"""Connectors on the simulated device with what is nearly right: nothing moves, or exactly what is named does."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

from helpers.connector_cases import (  # noqa: E402
    ALL,
    LAYERWISE,
    Model,
    Store,
    Transfer,
    check_mixed,
    load,
    objects_for,
    on,
    save,
    whole,
)
from helpers.slot_cases import Case, build, content, zeroed  # noqa: E402
from lmcache.errors import LayoutError  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import (  # noqa: E402
    VLLMBufferLayerwiseGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache.v1.gpu_connector.pages import PagedLayers  # noqa: E402
from lmcache.v1.memory_management import AdHocMemoryAllocator, MemoryFormat  # noqa: E402

SLOTS = torch.arange(16)
FORMATS = pytest.mark.parametrize("fmt", [1, 2, 12])
BUFFERS = pytest.mark.parametrize("use_gpu", [False, True])
KINDS = pytest.mark.parametrize("kind", LAYERWISE.values(), ids=LAYERWISE.keys())


def pages_of(fmt: int) -> Any:
    return build(fmt, Case(nl=3, nb=4, bs=4, nh=2, hs=16 if fmt == 12 else 8))


def make(kind: Any, fmt: int, use_gpu: bool) -> Any:
    return kind(
        16, 3, use_gpu or kind is VLLMBufferLayerwiseGPUConnector, layout_hints={"engine_kv_format": fmt}
    )


def an_object(shape: Any, fmt: MemoryFormat = MemoryFormat.KV_2LTD, dtype: Any = torch.float32) -> Any:
    obj = AdHocMemoryAllocator().allocate(tuple(shape), dtype, fmt)
    obj.raw_tensor.fill_(7)
    return obj


def layers(connector: Any, tokens: int, dtype: Any = torch.float32) -> list[list[Any]]:
    return [[an_object(connector.get_shape(tokens), connector.memory_format, dtype)] for _ in range(3)]


@FORMATS
@BUFFERS
def test_rows_of_an_object_beyond_its_tokens_stay(sim: Any, fmt: int, use_gpu: bool) -> None:
    obj = an_object((2, 3, 12, 16))
    make(VLLMPagedMemGPUConnectorV2, fmt, use_gpu).from_gpu(
        obj, 0, 8, kvcaches=on("sim", pages_of(fmt)), slot_mapping=SLOTS
    )
    assert (obj.tensor[:, :, 8:].contiguous().view(torch.uint8) == 7).all()


@FORMATS
@BUFFERS
def test_a_slot_of_the_host_beyond_the_pages_is_refused_and_one_of_the_device_is_padding(
    sim: Any, fmt: int, use_gpu: bool
) -> None:
    pages = on("sim", pages_of(fmt))
    v2, obj = make(VLLMPagedMemGPUConnectorV2, fmt, use_gpu), an_object((2, 3, 8, 16))
    paged = make(VLLMPagedMemLayerwiseGPUConnector, fmt, use_gpu)
    objects = layers(paged, 8)
    for call in (v2.from_gpu, v2.to_gpu):
        with pytest.raises(ValueError, match="slot 17 of token 7: expected less than 16"):
            call(obj, 0, 8, kvcaches=pages, slot_mapping=SLOTS + 10)
    with pytest.raises(ValueError, match="slot 17 of token 7: expected less than 16"):
        paged.batched_from_gpu(objects, [0], [8], kvcaches=pages, slot_mapping=SLOTS + 10, sync=False)
    assert (obj.raw_tensor == 7).all()
    there = (SLOTS + 10).to("sim")
    v2.from_gpu(obj, 0, 8, kvcaches=pages, slot_mapping=there)
    for _ in paged.batched_from_gpu(objects, [0], [8], kvcaches=pages, slot_mapping=there, sync=False):
        pass
    assert (obj.tensor[:, :, 6:].contiguous().view(torch.uint8) == 7).all()
    assert all((one.tensor[6:].contiguous().view(torch.uint8) == 7).all() for (one,) in objects)


@pytest.mark.parametrize(
    ("fmt", "op"),
    [(fmt, "multi_layer_kv_transfer") for fmt in (4, 9, 16)]
    + [(fmt, "multi_layer_kv_transfer_unilateral") for fmt in (4, 9)],
)
@pytest.mark.parametrize("padded", [0, 1], ids=["K", "V"])
def test_addresses_are_not_taken_of_k_or_v_whose_blocks_lie_apart(
    sim: Any, fmt: int, op: str, padded: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They would be read as tight."""
    monkeypatch.setattr(PagedLayers, "_serves", lambda _, name: name == op)
    pages = on("sim", pages_of(fmt))
    places = [(pages[padded], at) for at in range(3)] if fmt != 16 else [(layer, padded) for layer in pages]
    for parts, at in places:
        parts[at] = torch.cat([parts[at], parts[at]], 1)[:, : parts[at].shape[1]]
    obj, v2 = an_object((2, 3, 8, 16)), make(VLLMPagedMemGPUConnectorV2, fmt, False)
    for call in (v2.from_gpu, v2.to_gpu):
        with pytest.raises(LayoutError, match="its outermost axis is padded"):
            call(obj, 0, 8, kvcaches=pages, slot_mapping=SLOTS)
    assert (obj.raw_tensor == 7).all()


@FORMATS
@BUFFERS
@pytest.mark.parametrize(
    "slots", [SLOTS.int(), SLOTS.short(), torch.stack([SLOTS, SLOTS + 99], 1)], ids=["32", "16", "apart"]
)
@pytest.mark.parametrize(
    "kind", [VLLMPagedMemGPUConnectorV2, *LAYERWISE.values()], ids=lambda kind: kind.__name__
)
def test_slots_of_the_device_may_be_narrow_or_lie_apart(
    sim: Any, kind: Any, fmt: int, use_gpu: bool, slots: Any
) -> None:
    source = pages_of(fmt)
    there = slots.to("sim") if slots.dim() == 1 else slots.to("sim")[:, 0]
    connector, target = make(kind, fmt, use_gpu), on("sim", zeroed(source))
    common: dict[str, Any] = {"slot_mapping": there}
    if connector.is_layerwise:
        common["sync"] = True
        objects = layers(connector, 8)
        for _ in connector.batched_from_gpu(objects, [2], [10], kvcaches=on("sim", source), **common):
            pass
        steps = connector.batched_to_gpu([2], [10], kvcaches=target, vllm_cached_tokens=4, **common)
        next(steps)
        for layer in objects:
            steps.send(layer)
        next(steps)
    else:
        obj = an_object((2, 3, 8, 16))
        connector.from_gpu(obj, 2, 10, kvcaches=on("sim", source), **common)
        connector.to_gpu(obj, 2, 10, kvcaches=target, vllm_cached_tokens=4, **common)
    sim.synchronize()
    found, held = content(fmt, on("cpu", target)), content(fmt, source)
    assert (found[:, :, 4:10] == held[:, :, 4:10]).all()
    assert not found[:, :, :4].any()
    assert not found[:, :, 10:].any()


@FORMATS
@BUFFERS
@pytest.mark.parametrize("dtype", [torch.int32, torch.float16, torch.bfloat16])
def test_an_object_of_other_elements_is_neither_filled_nor_converted(
    sim: Any, fmt: int, use_gpu: bool, dtype: Any
) -> None:
    pages = on("sim", pages_of(fmt))
    obj = an_object((2, 3, 8, 16), dtype=dtype)
    v2 = make(VLLMPagedMemGPUConnectorV2, fmt, use_gpu)
    for call in (v2.from_gpu, v2.to_gpu):
        with pytest.raises(LayoutError, match=r"memory object of torch\.\w+: expected torch.float32"):
            call(obj, 0, 8, kvcaches=pages, slot_mapping=SLOTS)
    paged = make(VLLMPagedMemLayerwiseGPUConnector, fmt, use_gpu)
    objects = layers(paged, 8, dtype)
    steps = paged.batched_from_gpu(objects, [0], [8], kvcaches=pages, slot_mapping=SLOTS, sync=False)
    with pytest.raises(LayoutError, match=r"memory object of torch\.\w+: expected torch.float32"):
        next(steps)
    sim.synchronize()
    assert all((one.raw_tensor == 7).all() and one.get_ref_count() == 1 for one in (obj, objects[0][0]))


@KINDS
@pytest.mark.parametrize("load", [False, True], ids=["store", "load"])
def test_a_device_that_fails_in_the_middle_keeps_no_object(
    sim: Any, kernels: Any, kind: Any, load: bool
) -> None:
    pages = on("sim", pages_of(1))
    connector = make(kind, 1, use_gpu=True)
    objects = layers(connector, 8)
    common = {"kvcaches": pages, "slot_mapping": SLOTS, "sync": True}
    steps = (
        connector.batched_to_gpu([0], [8], **common)
        if load
        else connector.batched_from_gpu(objects, [0], [8], **common)
    )
    next(steps)

    def drive() -> None:
        kernels.poke(connector.lane("load" if load else "store").stream.sim_stream, 8)
        for layer in range(3):
            steps.send(objects[layer] if load else None)
        next(steps)

    with pytest.raises(RuntimeError, match=r"illegal address|before the event failed"):
        drive()
    steps.close()
    sim.clear_error()
    assert {obj.get_ref_count() for (obj,) in objects} == {1}
    assert getattr(connector, "_pass", None) is None


@settings(max_examples=15)
@given(data=st.data())
def test_layers_that_differ_in_blocks_heads_and_dtype_come_back_to_their_own_slots(data: Any) -> None:
    import lmcache_sim  # noqa: F401

    check_mixed(data, "sim", data.draw(st.booleans()), torch.sim.synchronize)
    torch.sim.check_guards()


@pytest.mark.parametrize("kind", [kind for kind in ALL.values() if "SGLang" not in kind.__name__])
def test_threads_that_share_connectors_store_and_load_their_own(sim: Any, kind: Any) -> None:
    """Each from a stream of its own; buffers and lanes are the connector's."""
    case = Case(nl=3, nb=8, bs=8, nh=2, hs=32)
    model, source = Model(1, case), build(1, case)
    pages, target = on("sim", source), on("sim", zeroed(source))
    storing, loading = whole(kind, model, True), whole(kind, model, True)
    storing.initialize_kvcaches_ptr(kvcaches=pages)
    loading.initialize_kvcaches_ptr(kvcaches=target)
    sim.synchronize()
    faults: list[BaseException] = []

    def work(part: int) -> None:
        store, slots = Store(), torch.arange(16) + 16 * part
        transfer = Transfer(slots.tolist(), [0, 5], [5, 16], 0)
        try:
            with sim.stream(sim.Stream()):
                for round_ in range(4):
                    objects = objects_for(storing, model, transfer, store)
                    save(storing, objects, transfer, slot_mapping=slots, sync=bool(round_ % 2))
                    load(loading, objects, transfer, slot_mapping=slots, sync=bool(round_ % 2))
                    store.give_back()
                sim.current_stream().synchronize()
        except BaseException as fault:
            faults.append(fault)

    threads = [threading.Thread(target=work, args=(part,), daemon=True) for part in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
        assert not thread.is_alive()
    assert not faults, faults[0]
    sim.synchronize()
    assert (content(1, on("cpu", target)) == content(1, source)).all()

"""Connectors of whole chunks: shapes, caches that change, layers that differ, and what is refused."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import LayoutError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.slot_cases import Case, build, content, zeroed  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import (  # noqa: E402
    SGLangGPUConnector,
    VLLMPagedMemGPUConnectorV2,
    VLLMPagedMemGPUConnectorV3,
    VLLMPagedMemLayerwiseGPUConnector,
)
from lmcache.v1.kv_layer_groups import EngineGroupInfo, KVLayerGroupsManager  # noqa: E402
from lmcache.v1.memory_management import AdHocMemoryAllocator, MemoryFormat  # noqa: E402

CASE = Case(nl=3, nb=4, bs=4, nh=2, hs=8)
SLOTS = torch.arange(16)


def v2(fmt: int = 1, mla: bool = False, **more: Any) -> VLLMPagedMemGPUConnectorV2:
    hints = {"engine_kv_format": fmt}
    return VLLMPagedMemGPUConnectorV2(8 if mla else 16, 3, use_mla=mla, layout_hints=hints, **more)


def an_object(shape: Any, fmt: MemoryFormat = MemoryFormat.KV_2LTD, dtype: Any = torch.float32) -> Any:
    return AdHocMemoryAllocator().allocate(tuple(shape), dtype, fmt)


def test_an_object_means_the_same_whatever_the_pages_layout_is() -> None:
    """One layout fills it, another is filled from it: K and V are where the object's format says."""
    flat = torch.randn(2, 3, 16, 2, 8)
    forms = {
        1: lambda part: part.reshape(2, 4, 4, 2, 8),
        2: lambda part: part.reshape(2, 4, 4, 2, 8).transpose(0, 1).contiguous(),
        7: lambda part: part.reshape(2, 4, 4, 2, 8).permute(1, 0, 3, 2, 4).contiguous(),
        12: lambda part: torch.cat([*part.reshape(2, 4, 4, 2, 8).transpose(2, 3)], dim=-1).contiguous(),
        13: lambda part: torch.cat([*part.reshape(2, 4, 4, 2, 8)], dim=-1).contiguous(),
        16: lambda part: [plane.reshape(4, 4, 2, 8).clone() for plane in part],
    }
    pages = {fmt: [form(flat[:, layer]) for layer in range(3)] for fmt, form in forms.items()}
    for fmt, cache in pages.items():
        connector = v2(fmt)
        obj = an_object(connector.get_shape(16))
        connector.from_gpu(obj, 0, 16, kvcaches=cache, slot_mapping=SLOTS)
        assert obj.tensor.equal(flat.flatten(3)), f"format {fmt}"


def test_shapes_are_those_of_the_formats() -> None:
    assert v2().get_shape(5) == (2, 3, 5, 16)
    assert v2(3, mla=True).get_shape(5) == (1, 3, 5, 8)
    assert VLLMPagedMemLayerwiseGPUConnector(16, 3).get_shape(5) == (5, 2, 16)
    assert VLLMPagedMemLayerwiseGPUConnector(8, 3, use_mla=True).get_shape(5) == (1, 1, 5, 8)


def test_a_store_says_what_it_stored_and_a_load_asks_for_it() -> None:
    connector, pages = v2(3, mla=True), build(3, CASE)
    obj = an_object(connector.get_shape(4), MemoryFormat.UNDEFINED)
    connector.from_gpu(obj, 0, 4, kvcaches=pages, slot_mapping=SLOTS)
    assert obj.metadata.fmt is MemoryFormat.KV_MLA_FMT
    obj.metadata.fmt = MemoryFormat.UNDEFINED
    with pytest.raises(LayoutError, match="format UNDEFINED: expected KV_MLA_FMT"):
        connector.to_gpu(obj, 0, 4, slot_mapping=SLOTS)


def test_another_cache_is_noticed() -> None:
    """Also one in the same list, as an engine that wakes up hands over."""
    connector, first, second = v2(), build(1, CASE), build(1, CASE)
    obj, listed = an_object(connector.get_shape(16)), list(first)
    connector.from_gpu(obj, 0, 16, kvcaches=listed, slot_mapping=SLOTS)
    listed[:] = second
    connector.from_gpu(obj, 0, 16, kvcaches=listed, slot_mapping=SLOTS)
    target = zeroed(second)
    connector.to_gpu(obj, 0, 16, kvcaches={f"layer {i}": t for i, t in enumerate(target)}, slot_mapping=SLOTS)
    assert (content(1, target) == content(1, second)).all()


def test_sglang_may_begin_its_slots_at_a_token() -> None:
    pages = build(4, CASE)
    connector = SGLangGPUConnector(16, 3)
    obj = an_object(connector.get_shape(4))
    connector.from_gpu(obj, 8, 12, kvcaches=pages, slot_mapping=SLOTS)
    target = zeroed(pages)
    connector.to_gpu(obj, 8, 12, kvcaches=target, slot_mapping=SLOTS[8:12], offset=8)
    assert (content(4, target)[:, :, 8:12] == content(4, pages)[:, :, 8:12]).all()
    assert not content(4, target)[:, :, :8].any()


@pytest.mark.parametrize(
    ("fmt", "given", "text"),
    [
        (14, {}, "its pages can only be taken whole, so tokens cannot be moved one by one"),
        (3, {}, "with use_mla=False: expected a cache of K and V"),
        (1, {"num_layers": 4}, "with 3 layers of 16 elements per token: expected 4 of 16"),
        (1, {"hidden_dim_size": 24}, "expected 3 of 24"),
        (1, {"dtype": torch.float16}, "pages of torch.float32: expected torch.float16"),
    ],
)
def test_a_cache_that_is_not_the_models_is_refused(fmt: int, given: dict[str, Any], text: str) -> None:
    sizes = {"hidden_dim_size": 16, "num_layers": 3, **given}
    case = Case(nl=3, nb=4, bs=4, nh=2, hs=132, dtype=torch.uint8) if fmt == 14 else CASE
    connector = VLLMPagedMemGPUConnectorV2(**sizes, layout_hints={"engine_kv_format": fmt})
    with pytest.raises(LayoutError, match=text) as caught:
        connector.initialize_kvcaches_ptr(kvcaches=build(fmt, case))
    assert "\n" not in str(caught.value)


def test_calls_that_do_not_fit_are_refused_in_one_line() -> None:
    connector, pages = v2(), build(1, CASE)
    obj = an_object(connector.get_shape(4))
    with pytest.raises(LayoutError, match="kvcaches: expected them with the first call"):
        connector.from_gpu(obj, 0, 4, slot_mapping=SLOTS)
    with pytest.raises(LayoutError, match="1 memory objects, 2 starts, 1 ends: expected as many of each"):
        connector.batched_from_gpu([obj], [0, 4], [4], kvcaches=pages, slot_mapping=SLOTS)
    with pytest.raises(LayoutError, match=r"expected \(2, 3, 8, 16\), or more tokens"):
        connector.from_gpu(obj, 0, 8, kvcaches=pages, slot_mapping=SLOTS)
    with pytest.raises(ValueError, match="slot 16 of token 3: expected less than 16"):
        connector.from_gpu(obj, 0, 4, kvcaches=pages, slot_mapping=SLOTS + 13)
    with pytest.raises(LayoutError, match="expected a tensor of integers with one axis"):
        connector.from_gpu(obj, 0, 4, kvcaches=pages, slot_mapping=SLOTS.float())
    obj.set_used_size(8)
    with pytest.raises(LayoutError, match="serialised bytes"):
        connector.from_gpu(obj, 0, 4, kvcaches=pages, slot_mapping=SLOTS)


# --- layers that differ ------------------------------------------------------------------------------------


def mixed() -> list[Any]:
    """Heads, head size, block size and dtype differ from layer to layer."""
    wide = Case(nl=2, nb=4, bs=4, nh=2, hs=8, dtype=torch.bfloat16)
    narrow = Case(nl=2, nb=8, bs=2, nh=1, hs=4, dtype=torch.float32)
    first, second = build(1, wide), build(1, narrow)
    return [first[0], second[0], first[1], second[1]]


def metadata(**given: Any) -> Any:
    known = {
        "kv_shape": (4, 2, 8, 2, 8),
        "use_mla": False,
        "kv_dtype": torch.bfloat16,
        "kv_layer_groups_manager": None,
    }
    return SimpleNamespace(**{**known, **given})


def check_groups(connector: Any, pages: list[Any], slots: Any) -> None:
    shapes = connector.get_shapes(6)
    obj = AdHocMemoryAllocator().allocate(
        [tuple(shape) for shape in shapes], connector.get_dtypes(), MemoryFormat.KV_2LTD
    )
    connector.from_gpu(obj, 2, 8, kvcaches=pages, slot_mapping=slots)
    target = zeroed(pages)
    connector.to_gpu(obj, 2, 8, kvcaches=target, slot_mapping=slots, vllm_cached_tokens=4)
    for layer, (old, new) in enumerate(zip(pages, target, strict=True)):
        of_group = slots[layer % 2] if isinstance(slots, list) else slots
        held, found = content(1, [old]), content(1, [new])
        named = [int(of_group[token]) for token in range(4, 8)]
        assert (found[:, :, named] == held[:, :, named]).all()
        rest = [slot for slot in range(16) if slot not in named]
        assert not found[:, :, rest].any()


def test_v3_moves_layers_that_differ_and_finds_their_groups_once() -> None:
    model, pages = metadata(), mixed()
    connector = VLLMPagedMemGPUConnectorV3(model, torch.device("cpu"), layout_hints={"engine_kv_format": 1})
    connector.initialize_kvcaches_ptr(kvcaches=pages)
    assert [group.layer_indices for group in model.kv_layer_groups_manager.kernel_groups] == [[0, 2], [1, 3]]
    assert [tuple(shape) for shape in connector.get_shapes(6)] == [(2, 2, 6, 16), (2, 2, 6, 4)]
    with pytest.raises(LayoutError, match="get_shape: 2 kernel groups: expected one; use get_shapes"):
        connector.get_shape(6)
    check_groups(connector, pages, torch.arange(15, -1, -1))
    with pytest.raises(LayoutError, match="memory object of 1 tensors: expected 2, one per kernel group"):
        connector.from_gpu(an_object((2, 4, 6, 16)), 0, 6, slot_mapping=SLOTS)


def test_v3_takes_the_engines_groups_and_a_slot_mapping_for_each() -> None:
    pages = mixed()
    infos = [EngineGroupInfo(0, (0, 2)), EngineGroupInfo(1, (1, 3))]
    model = metadata(kv_layer_groups_manager=KVLayerGroupsManager(pages, [1] * 4, infos, 8))
    connector = VLLMPagedMemGPUConnectorV3(model, None, True, {"engine_kv_format": 1})
    check_groups(connector, pages, [torch.arange(16), torch.arange(15, -1, -1)])


def test_v3_refuses_slots_that_are_not_tokens() -> None:
    pages = mixed()
    infos = [EngineGroupInfo(0, (0, 2)), EngineGroupInfo(1, (1, 3), tokens_per_block=4)]
    model = metadata(kv_layer_groups_manager=KVLayerGroupsManager(pages, [1] * 4, infos, 8))
    connector = VLLMPagedMemGPUConnectorV3(model, layout_hints={"engine_kv_format": 1})
    with pytest.raises(LayoutError, match=r"layers \[1, 3\]: a slot stands for several tokens"):
        connector.initialize_kvcaches_ptr(kvcaches=pages)


def test_v2_refuses_layers_that_differ_and_says_what_serves_them() -> None:
    connector = VLLMPagedMemGPUConnectorV2(16, 4, layout_hints={"engine_kv_format": 1})
    with pytest.raises(LayoutError, match="use_gpu_connector_v3=true"):
        connector.initialize_kvcaches_ptr(kvcaches=mixed())


def test_v3_keeps_k_and_v_apart_also_where_pages_pack_them() -> None:
    model = metadata(kv_shape=(3, 2, 8, 2, 8), kv_dtype="float32")
    connector = VLLMPagedMemGPUConnectorV3(model, layout_hints={"engine_kv_format": 12})
    case = Case(nl=3, nb=4, bs=4, nh=2, hs=16)
    pages = build(12, case)
    assert connector.get_dtypes() == [torch.float32]
    connector.initialize_kvcaches_ptr(kvcaches=pages)
    assert [tuple(shape) for shape in connector.get_shapes(8)] == [(2, 3, 8, 16)]
    assert connector.memory_format is MemoryFormat.KV_2LTD
    one, other = an_object((2, 3, 8, 16)), an_object((2, 3, 8, 16))
    connector.from_gpu(one, 0, 8, slot_mapping=SLOTS)
    v2(12).from_gpu(other, 0, 8, kvcaches=pages, slot_mapping=SLOTS)
    assert one.raw_tensor.equal(other.raw_tensor)


def test_v3_calls_objects_whose_groups_differ_in_planes_of_no_known_format() -> None:
    latent = build(3, Case(nl=1, nb=4, bs=4, nh=1, hs=8))
    both = build(1, Case(nl=1, nb=4, bs=4, nh=2, hs=8))
    pages, model = [*both, *latent], metadata(kv_shape=(2, 2, 8, 2, 8))
    model.kv_layer_groups_manager = KVLayerGroupsManager(pages, [1, 3], (), 8)
    connector = VLLMPagedMemGPUConnectorV3(model, layout_hints={"kv_layout": "NHD"})
    connector.initialize_kvcaches_ptr(kvcaches=[tensor.clone() for tensor in pages])
    assert connector.memory_format is MemoryFormat.UNDEFINED
    obj = an_object([tuple(shape) for shape in connector.get_shapes(8)], connector.memory_format)
    connector.from_gpu(obj, 0, 8, slot_mapping=SLOTS)
    connector.to_gpu(obj, 0, 8, slot_mapping=SLOTS)


@pytest.mark.parametrize("fmt", [1, 2, 3, 4, 7, 12, 13])
@pytest.mark.parametrize("order", ["a run", "blocks", "anywhere", "padding between"])
def test_wide_slots_on_the_host_take_every_way_and_arrive(fmt: int, order: str) -> None:
    """Runs by memcpy, scattered slots by index, blocks as blocks, and what is left by the slot op."""
    case = Case(nl=2, nb=8, bs=8, nh=4, hs=128, dtype=torch.bfloat16)
    made = torch.Generator().manual_seed(3)
    slots = {
        "a run": torch.arange(5, 37),
        "blocks": (torch.randperm(8, generator=made)[:4, None] * 8 + torch.arange(8)).flatten(),
        "anywhere": torch.randperm(64, generator=made)[:32],
        "padding between": torch.where(torch.arange(32) % 5 == 2, -1, torch.arange(20, 52)),
    }[order]
    packed, width = fmt in (12, 13), 128 if fmt == 3 else 4 * 128
    kind = SGLangGPUConnector if fmt == 4 else VLLMPagedMemGPUConnectorV2
    connector = kind(
        width // 2 if packed else width, 2, use_mla=fmt == 3, layout_hints={"engine_kv_format": fmt}
    )
    pages = build(fmt, case)
    held = content(fmt, pages)
    obj = an_object(connector.get_shape(32), MemoryFormat.UNDEFINED, torch.bfloat16)
    obj.raw_tensor.fill_(9)
    connector.from_gpu(obj, 0, 32, kvcaches=pages, slot_mapping=slots)
    assert (content(fmt, pages) == held).all()
    padding = obj.tensor[:, :, slots < 0].contiguous()
    assert (padding.view(torch.uint8) == 9).all()
    target = zeroed(pages)
    connector.to_gpu(obj, 0, 32, kvcaches=target, slot_mapping=slots)
    expected = content(fmt, zeroed(pages))
    named = slots[slots >= 0].tolist()
    expected[:, :, named] = held[:, :, named]
    assert (content(fmt, target) == expected).all()

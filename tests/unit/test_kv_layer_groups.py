"""What grouping promises: groups partition the layers, sizes divide, windows keep what attention can see."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1 import kv_layer_groups
from lmcache.v1.kv_layer_groups import (
    AttnWindowDesc,
    EngineGroupInfo,
    KernelGroupInfo,
    KVLayerGroupsManager,
    ObjectGroupInfo,
    format_kvcache_shape_spec,
    parse_kvcache_shape_spec,
)
from lmcache.v1.kv_layout import EngineKVFormat, kv_format
from lmcache.v1.multiprocess import group_view
from lmcache.v1.platform.ops_types import PageBufferShapeDesc

QUICK = settings(max_examples=80, deadline=None)
CHUNK = 16


@dataclass
class FakeTensor:
    """Shape and strides without memory."""

    shape: tuple[int, ...]
    dtype: str = "torch.bfloat16"
    pad: int = 0
    itemsize: int = 2

    def stride(self) -> tuple[int, ...]:
        strides, run = [], 1
        for size in reversed(self.shape):
            strides.append(run)
            run *= size
        strides[-1] += self.pad
        return tuple(reversed(strides))

    def element_size(self) -> int:
        return self.itemsize

    def data_ptr(self) -> int:
        return id(self)


def packed(nb: int = 6, bs: int = 4, nh: int = 2, cs: int = 8, **how: Any) -> FakeTensor:
    return FakeTensor((nb, bs, nh, cs), **how)


def manager(
    infos: Sequence[EngineGroupInfo] = (), chunk: int = CHUNK, separate: bool = False, layers: int = 6
) -> KVLayerGroupsManager:
    """A manager of like layers of 4 slots per block, format 13."""
    return KVLayerGroupsManager(
        [packed() for _ in range(layers)],
        engine_kv_formats=[13] * layers,
        engine_group_infos=infos,
        lmcache_tokens_per_chunk=chunk,
        separate_object_groups=separate,
    )


HYBRID = [
    EngineGroupInfo(0, (0, 3)),
    EngineGroupInfo(1, (1, 4), 4, 8),
    EngineGroupInfo(2, (2,), 4, 40),
    EngineGroupInfo(3, (5,), 4, 4, 0, True),
]


# --- kernel groups -----------------------------------------------------------------------------------------

KINDS = {
    3: lambda: FakeTensor((6, 4, 8)),
    12: lambda: FakeTensor((6, 2, 4, 8)),
    13: packed,
    14: lambda: FakeTensor((6, 4, 132), "torch.uint8", itemsize=1),
    16: lambda: [packed(), packed()],
    17: lambda: [FakeTensor((6, 4, 1, 8)), FakeTensor((6, 4, 1, 2))],
    -13: lambda: packed(nh=4),
    -3: lambda: FakeTensor((6, 4, 8), "torch.float16"),
}


@given(kinds=st.lists(st.sampled_from(sorted(KINDS)), max_size=12), data=st.data(), separate=st.booleans())
@QUICK
def test_groups_partition_the_layers_and_are_alike_within(
    kinds: list[int], data: st.DataObject, separate: bool
) -> None:
    engine = [data.draw(st.integers(-1, 2)) for _ in kinds]
    alike: dict[tuple[int, int], list[int]] = {}
    for index, key in enumerate(zip(engine, kinds, strict=True)):
        alike.setdefault(key, []).append(index)
    infos = [EngineGroupInfo(group, tuple(at)) for (group, _), at in alike.items() if group >= 0]
    infos = data.draw(st.permutations(infos))
    found = KVLayerGroupsManager([KINDS[k]() for k in kinds], [abs(k) for k in kinds], infos, CHUNK, separate)
    expected = alike if infos else {(0, k): [i for i, kind in enumerate(kinds) if kind == k] for k in kinds}
    expected = {key: at for key, at in expected.items() if key[0] >= 0}
    groups = found.kernel_groups
    assert [group.layer_indices for group in groups] == sorted(expected.values())
    for group in groups:
        engine_group, kind = next(key for key, at in expected.items() if at == group.layer_indices)
        assert (group.engine_group_idx, group.engine_kv_format) == (engine_group, abs(kind))
        assert group.shape_desc.nl == group.num_layers
    in_objects = [index for objects in found.object_groups for index in objects.kernel_group_indices]
    assert sorted(in_objects) == list(range(found.num_kernel_groups))
    assert found.kv_layer_groups is found.kernel_groups


def test_a_group_says_what_device_ops_must_know() -> None:
    kv = [packed(pad=5), [FakeTensor((6, 4, 1, 8)), FakeTensor((6, 4, 1, 2), itemsize=4)], packed(pad=5)]
    packed_group, planes = KVLayerGroupsManager(kv, [13, 17, 13]).kernel_groups
    assert packed_group.shape_desc == PageBufferShapeDesc(1, 2, 6, 4, 2, 8, 2, 4 * 2 * 8 + 5)
    assert planes.shape_desc == PageBufferShapeDesc(1, 1, 6, 4, 1, 8 + 2 * 2, 2, 0)
    assert (packed_group.layer_indices, packed_group.dtype) == ([0, 2], "torch.bfloat16")
    assert (packed_group.hidden_dim_size, packed_group.slots_per_block) == (16, 4)
    assert isinstance(packed_group.engine_kv_format, EngineKVFormat)
    assert KVLayerGroupsManager(kv, [13, 17, 13]).get_shape_desc(1) is not planes.shape_desc


def test_planes_are_tight_or_equally_far_apart() -> None:
    def stride(*planes: FakeTensor) -> int:
        return KVLayerGroupsManager([list(planes)], [17]).get_shape_desc(0).block_stride_elems

    wide, narrow = FakeTensor((6, 4, 1, 8), pad=8), FakeTensor((6, 4, 1, 2), pad=32)
    assert stride(wide, narrow) == 40
    assert stride(FakeTensor((6, 4, 1, 8)), FakeTensor((6, 4, 1, 2))) == 0
    assert stride(wide) == 40
    with pytest.raises(LayoutError, match="not equally far apart"):
        stride(wide, FakeTensor((6, 4, 1, 2)))
    with pytest.raises(LayoutError, match="not equally far apart"):
        stride(wide, FakeTensor((6, 4, 1, 2), pad=32, itemsize=4))


@pytest.mark.parametrize("row", [0, 8])
def test_layers_of_one_tensor_are_one_group(row: int) -> None:
    pool = FakeTensor((6, 3, 2, 4, 4, 8))
    (group,) = KVLayerGroupsManager([pool], [row] * 3).kernel_groups
    assert (group.layer_indices, group.shape_desc.nb, group.shape_desc.kv_size) == ([0, 1, 2], 6, 2)
    with pytest.raises(LayoutError, match="several groups"):
        KVLayerGroupsManager([pool], [row] * 3, [EngineGroupInfo(0, (0,)), EngineGroupInfo(1, (1, 2))])


def test_layers_of_k_and_v_lists_are_one_group() -> None:
    (group,) = KVLayerGroupsManager([[packed()] * 3, [packed()] * 3], [9] * 3).kernel_groups
    assert (group.layer_indices, group.shape_desc.kv_size) == ([0, 1, 2], 2)


def test_a_layer_in_no_group_is_not_looked_at() -> None:
    found = KVLayerGroupsManager([object(), packed()], [13, 13], [EngineGroupInfo(4, (1,))])
    assert [(g.layer_indices, g.engine_group_idx) for g in found.kernel_groups] == [([1], 4)]


def test_tensors_and_formats_that_do_not_go_together_are_refused() -> None:
    cases: list[tuple[list[Any], list[int], str]] = [
        ([packed()], [13, 13], "2 engine_kv_formats for 1 layers"),
        ([packed()], [3], r"not of the form"),
        ([packed()], [77], "known: 0 "),
        ([[packed()] * 2, [packed()] * 2], [9, 13], "share a structure"),
        ([FakeTensor((24, 1, 8))], [5], "no blocks"),
        ([packed(nb=6), packed(nb=7)], [13, 13], "6 and 7 of them"),
        ([packed(), packed(pad=8)], [13, 13], "64 and 72 elements apart"),
        ([FakeTensor((6, 2, 4, 2, 8), pad=8)], [2], "padded"),
        ([[packed(), packed(nh=3)]], [16], "K and V of a layer differ"),
        ([[FakeTensor((6, 4, 1, 8), itemsize=4), FakeTensor((6, 4, 1, 1), itemsize=1)]], [17], "add up"),
    ]
    for kv, formats, text in cases:
        with pytest.raises(LayoutError, match=text):
            KVLayerGroupsManager(kv, formats)


# --- what the engine says of groups ------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("infos", "text"),
    [
        ([EngineGroupInfo(0, (0, 99))], "layer 99: expected 0 to 5"),
        ([EngineGroupInfo(0, (-1,))], "layer -1"),
        ([EngineGroupInfo(0, ())], "names no layer"),
        ([EngineGroupInfo(0, (0, 1)), EngineGroupInfo(1, (1, 2))], "layer 1 is named twice"),
        ([EngineGroupInfo(0, (0, 1)), EngineGroupInfo(0, (2, 3))], "one info for each"),
        ([EngineGroupInfo(0, (0,), 6)], "multiple of 4 slots"),
        ([EngineGroupInfo(0, (0,), -4)], "multiple of 4 slots"),
        ([EngineGroupInfo(0, (0,), 12)], "multiple of tokens_per_block=12"),
        ([EngineGroupInfo(0, (0,), 4, 6)], "sw_size_tokens=6"),
        ([EngineGroupInfo(0, (0,), 4, 0)], "sw_size_tokens=0"),
        ([EngineGroupInfo(0, (0,), 4, -2)], "sw_size_tokens=-2"),
        ([EngineGroupInfo(0, (0,), 4, -1, -1)], "extra_object_group_tag=-1"),
    ],
)
def test_infos_that_do_not_fit_are_refused(infos: list[EngineGroupInfo], text: str) -> None:
    with pytest.raises(LayoutError, match=re.escape(text)):
        manager(infos)


def test_one_info_over_layers_of_two_shapes_is_refused() -> None:
    with pytest.raises(LayoutError, match="one info for each"):
        KVLayerGroupsManager([packed(), packed(nh=4)], [13, 13], [EngineGroupInfo(0, (0, 1))])


def test_a_chunk_is_whole_blocks() -> None:
    for chunk, text in [(18, "lmcache_tokens_per_chunk=18"), (0, "positive"), (-4, "positive")]:
        with pytest.raises(LayoutError, match=text):
            manager(chunk=chunk)


def test_a_window_longer_than_a_chunk_need_not_be_whole_blocks() -> None:
    assert manager([EngineGroupInfo(0, (0,), 4, CHUNK + 1)]).get_slots_per_chunk_in_sw(0) == CHUNK


def test_a_slot_may_stand_for_several_tokens() -> None:
    found = manager([EngineGroupInfo(0, tuple(range(6)), 16)])
    (group,) = found.kernel_groups
    assert (group.calculate_slots(32), group.calculate_slots(4)) == (8, 1)
    assert found.get_slots_per_chunk_in_sw(0) == 4
    with pytest.raises(LayoutError, match="multiple of the 4 tokens"):
        group.calculate_slots(6)


# --- object groups and windows -----------------------------------------------------------------------------


def test_one_object_holds_all_layers_and_needs_the_whole_prefix_unless_told_otherwise() -> None:
    found = manager(HYBRID)
    assert found.object_groups == [ObjectGroupInfo([0, 1, 2, 3])]
    assert found.get_attn_desc() == AttnWindowDesc([-1], 1, ("attention",))


def test_layers_of_other_windows_states_and_tags_are_stored_apart() -> None:
    found = manager(HYBRID, separate=True)
    assert found.num_object_groups == 4
    kinds = ("attention", "attention", "attention", "recurrent")
    assert found.get_attn_desc() == AttnWindowDesc([-1, 1, 3, 1], 1, kinds)
    tagged = [
        EngineGroupInfo(0, (0, 3)),
        EngineGroupInfo(1, (1, 4), 4, 8, 7),
        EngineGroupInfo(2, (2,), 4, 40, 3),
        EngineGroupInfo(3, (5,), 4, 16),
    ]
    found = manager(tagged, separate=True)
    assert [group.kernel_group_indices for group in found.object_groups] == [[0], [3], [2], [1]]
    assert found.get_attn_desc().group_kinds == ("attention", "attention", "aux", "aux")


def test_windows_of_equally_many_chunks_share_an_object() -> None:
    infos = [EngineGroupInfo(0, (0,), 4, 40), EngineGroupInfo(1, (1,)), EngineGroupInfo(2, (2,), 4, 48)]
    assert [g.kernel_group_indices for g in manager(infos, separate=True).object_groups] == [[0, 2], [1]]


@pytest.mark.parametrize("separate", [False, True])
def test_full_windows_keep_whole_chunks_and_leave_groups_and_states_as_they_are(separate: bool) -> None:
    found = manager(HYBRID, separate=separate)
    before = list(found.object_groups)
    assert [found.get_subchunk_sw_size_tokens(i) for i in range(4)] == [CHUNK, 8, CHUNK, 4]
    assert [found.get_slots_per_chunk_in_sw(i) for i in range(4)] == [CHUNK, 8, CHUNK, 4]
    for _ in range(2):
        found.enable_full_sw_kv()
        assert [found.get_subchunk_sw_size_tokens(i) for i in range(4)] == [CHUNK, CHUNK, CHUNK, 4]
        assert found.object_groups == before
        assert found.get_attn_desc().num_chunks_in_sw == ([-1, -1, -1, 1] if separate else [-1])
    assert [group.sw_size_tokens for group in found.kernel_groups] == [-1, 8, 40, 4]


@given(blocks=st.integers(1, 8), window=st.integers(1, 200), full=st.booleans())
@QUICK
def test_what_is_kept_of_a_chunk_covers_the_window_and_no_more(blocks: int, window: int, full: bool) -> None:
    chunk = 4 * blocks
    infos = [EngineGroupInfo(0, tuple(range(6)), 4, window)]
    if window < chunk and window % 4:
        with pytest.raises(LayoutError, match="sw_size_tokens"):
            manager(infos, chunk)
        return
    found = manager(infos, chunk, separate=True)
    if full:
        found.enable_full_sw_kv()
    kept = found.get_subchunk_sw_size_tokens(0)
    assert kept == (chunk if full else min(window, chunk))
    assert found.get_slots_per_chunk_in_sw(0) == found.calculate_num_blocks(0, kept) * 4
    (chunks,) = found.get_attn_desc().num_chunks_in_sw
    assert chunks == -1 if full else (chunks - 1) * chunk < window <= chunks * chunk


def test_blocks_are_counted_whole() -> None:
    found = manager()
    assert [found.calculate_num_blocks(0, n) for n in (0, 3, 4, 16, 38)] == [0, 0, 1, 4, 9]
    with pytest.raises(LayoutError, match="num_tokens=-1"):
        found.calculate_num_blocks(0, -1)
    assert found.num_blocks == 6


# --- nothing to group --------------------------------------------------------------------------------------


@pytest.mark.parametrize("separate", [False, True])
def test_without_layers_everything_is_empty_and_nothing_fails(separate: bool) -> None:
    found = KVLayerGroupsManager([], engine_kv_formats=[], separate_object_groups=separate)
    found.enable_full_sw_kv()
    assert (found.kernel_groups, found.kv_layer_groups, found.object_groups) == ([], [], [])
    assert (found.num_kernel_groups, found.num_object_groups, found.num_blocks) == (0, 0, 0)
    assert found.get_attn_desc() == AttnWindowDesc([], 1, ())


@pytest.mark.parametrize("index", [-1, 1])
def test_a_group_that_is_not_there_is_refused_not_taken_from_the_end(index: int) -> None:
    found = manager()
    for ask in (
        found.get_shape_desc,
        found.get_subchunk_sw_size_tokens,
        found.get_slots_per_chunk_in_sw,
        lambda at: found.calculate_num_blocks(at, 4),
    ):
        with pytest.raises(LayoutError, match="expected 0 to 0"):
            ask(index)


def test_engines_import_what_they_declare_by_its_older_path() -> None:
    assert group_view.EngineGroupInfo is kv_layer_groups.EngineGroupInfo
    assert group_view.engine_group_layer_indices(HYBRID) == [[0, 3], [1, 4], [2], [5]]
    assert group_view.engine_group_layer_indices(()) == []
    with pytest.raises(AttributeError):
        HYBRID[0].tokens_per_block = 8  # type: ignore[misc]


# --- shapes as text ----------------------------------------------------------------------------------------

DTYPES = ("float16", "float32", "bfloat16", "uint8", "int8")
sizes = st.integers(1, 1000)
spec = st.tuples(st.integers(1, 2), sizes, sizes, sizes, sizes, st.sampled_from(DTYPES), st.integers(1, 9))


@given(parts=st.lists(spec, min_size=1, max_size=4), blank=st.sampled_from(["", " "]))
@QUICK
@pytest.mark.torch
def test_shapes_survive_the_way_through_text_and_back(parts: list[Any], blank: str) -> None:
    pytest.importorskip("torch")
    text = ";".join("({},{},{},{},{}):{}:{}".format(*part) for part in parts)
    groups = parse_kvcache_shape_spec(text.replace(",", f",{blank}").replace(";", f"{blank};{blank}"))
    assert format_kvcache_shape_spec(groups) == text
    assert [i for group in groups for i in group.layer_indices] == list(range(sum(part[6] for part in parts)))
    for group, (kv, nb, bs, nh, hs, _, count) in zip(groups, parts, strict=True):
        desc = PageBufferShapeDesc(kv, count, nb, bs, nh, hs, group.dtype.itemsize)
        assert (group.shape_desc, group.tokens_per_block) == (desc, bs)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "(2,6,4,2):float16:1",
        "(2,6,4,2,8):float64:1",
        "(3,6,4,2,8):float16:1",
        "(2,6,0,2,8):float16:1",
        "(2,6,4,2,8):float16:0",
        "(2,6,4,2,8):float16:1;",
        "2,6,4,2,8:float16:1",
        "(2,6,4,2,8):float16:99999999999",
    ],
)
@pytest.mark.torch
def test_a_text_that_is_no_shape_is_refused(text: str) -> None:
    pytest.importorskip("torch")
    with pytest.raises(LayoutError, match="expected"):
        parse_kvcache_shape_spec(text)


def test_a_dtype_that_text_cannot_name_is_refused() -> None:
    groups = KVLayerGroupsManager([packed(dtype="torch.float64")], [13]).kernel_groups
    with pytest.raises(LayoutError, match="float64"):
        format_kvcache_shape_spec(groups)
    assert format_kvcache_shape_spec(manager().kernel_groups) == "(1,6,4,2,8):bfloat16:6"
    assert isinstance(groups[0], KernelGroupInfo)
    assert kv_format(groups[0].engine_kv_format or 0).id == 13

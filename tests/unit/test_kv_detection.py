"""Detection of layouts on real tensors: every structure, every refusal to guess, and no copies."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.utils import (
    LayoutHints,
    get_group_data_ptrs,
    normalize_and_discover_per_layer_formats,
    normalize_kv_and_discover_format,
)
from lmcache.v1.kv_layout import (
    AmbiguousLayoutError,
    EngineKVFormat,
    KVFormat,
    in_memory_order,
    kv_format,
    kv_formats,
    register_kv_format,
    table,
)

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

VLLM, SGLANG, TRTLLM, ATOM = EngineType.VLLM, EngineType.SGLANG, EngineType.TRTLLM, EngineType.ATOM
NB, NL, BS, NH, HS = 5, 3, 4, 3, 8  # no size is a literal's, and blocks, slots and heads differ
QUICK = settings(max_examples=25, deadline=None)
PAIRED = {"num_kv_heads": NH, "tokens_per_block": BS, "head_dim": HS}


def zeros(*shape: int, dtype: Any = None, device: str = "cpu") -> Any:
    return torch.zeros(shape, dtype=dtype or torch.float32, device=device)


def layers(*shape: int, n: int = NL, **how: Any) -> list[Any]:
    return [zeros(*shape, **how) for _ in range(n)]


def leaves(node: Any) -> Iterator[Any]:
    if isinstance(node, (list, tuple)):
        for child in node:
            yield from leaves(child)
    else:
        yield node


def hints(**given: Any) -> LayoutHints:
    return given  # type: ignore[return-value]


U8 = torch.uint8
INDEX = 132

# Structure, engine, hints, row, and the shape of the first tensor afterwards (None: as it was).
Case = tuple[Any, EngineType, dict[str, Any], int, "tuple[int, ...] | None"]
DETECTED: dict[str, Case] = {
    "vLLM cross-layer": (zeros(NB, NL, 2, BS, NH, HS), VLLM, {"kv_layout": "NHD"}, 0, None),
    "vLLM cross-layer, nothing declared": (zeros(NB, NL, 2, BS, NH, HS), VLLM, {}, 0, None),
    "vLLM K/V first, NHD": (layers(2, NB, BS, NH, HS), VLLM, {"kv_layout": "NHD"}, 1, None),
    "vLLM K/V first, HND": (layers(2, NB, NH, BS, HS), VLLM, {"kv_layout": "HND"}, 6, None),
    "vLLM K/V second, NHD": (layers(NB, 2, BS, NH, HS), VLLM, {"kv_layout": "NHD"}, 2, None),
    "vLLM K/V second, HND": (layers(NB, 2, NH, BS, HS), VLLM, {"kv_layout": "HND"}, 7, None),
    "vLLM packed, NHD": (layers(NB, BS, NH, HS), VLLM, {"kv_layout": "NHD"}, 13, None),
    "vLLM packed, HND": (layers(NB, NH, BS, HS), VLLM, {"kv_layout": "HND"}, 12, None),
    "vLLM packed, LBNHC": (layers(NB, BS, NH, HS), VLLM, {"kv_layout": "LBNHC"}, 13, None),
    "vLLM packed, LBHNC": (layers(NB, NH, BS, HS), VLLM, {"kv_layout": "LBHNC"}, 12, None),
    "vLLM MLA": (layers(NB, BS, 576), VLLM, {}, 3, None),
    "vLLM MLA, whatever is declared": (layers(NB, BS, 576), VLLM, {"kv_layout": "HND"}, 3, None),
    "vLLM sparse index": (layers(NB, BS, INDEX, dtype=U8), VLLM, {}, 14, None),
    "vLLM sparse index, HND": (
        layers(NB, 1, BS, INDEX, dtype=U8),
        VLLM,
        {"kv_layout": "HND"},
        14,
        (NB, BS, INDEX),
    ),
    "vLLM sparse index, NHD": (
        layers(NB, BS, 1, INDEX, dtype=U8),
        VLLM,
        {"kv_layout": "NHD"},
        14,
        (NB, BS, INDEX),
    ),
    "vLLM packed bytes of several heads": (
        layers(NB, NH, BS, INDEX, dtype=U8),
        VLLM,
        {"kv_layout": "HND"},
        12,
        None,
    ),
    "vLLM-RBLN": (layers(2, NB, NH, 1, BS, HS), VLLM, {}, 15, None),
    "vLLM-RBLN shows its order": (layers(2, NB, NH, 1, BS, HS), VLLM, {"kv_layout": "NHD"}, 15, None),
    "vLLM-Ascend": ([(zeros(NB, BS, NH, HS), zeros(NB, BS, NH, HS))] * NL, VLLM, {}, 16, None),
    "vLLM-Ascend MLA": ([(zeros(NB, BS, 1, 512), zeros(NB, BS, 1, 64))] * NL, VLLM, {}, 17, None),
    "vLLM-Ascend MLA, one plane": ([(zeros(NB, BS, 1, 512),)] * NL, VLLM, {}, 17, None),
    "vLLM-Ascend DSA": ([(zeros(NB, BS, 1, 64),) * 3] * NL, VLLM, {}, 17, None),
    "SGLang in-process": ([layers(NB * BS, NH, HS)] * 2, SGLANG, {}, 4, None),
    "SGLang in-process MLA": (layers(NB * BS, 1, HS), SGLANG, {}, 5, None),
    "SGLang MLA with blocks": (
        layers(NB * BS, 1, HS),
        SGLANG,
        {"tokens_per_block": BS},
        3,
        (NB, BS, HS),
    ),
    "SGLang flat K, V": (
        layers(NB * BS, NH, HS, n=2 * NL),
        SGLANG,
        {"kv_list_layout": "k_v", "tokens_per_block": BS},
        9,
        (NB, BS, NH, HS),
    ),
    "SGLang flat K, V of fused slots": (
        layers(NB * BS, NH, HS, n=2 * NL),
        SGLANG,
        {"kv_list_layout": "k_v"},
        4,
        None,
    ),
    "SGLang K and V lists": ([layers(NB, BS, NH, HS)] * 2, SGLANG, {}, 9, None),
    "SGLang unified MLA": (layers(NB, BS, HS), SGLANG, {"kv_list_layout": "unified"}, 3, None),
    "SGLang unified": (layers(NB, BS, NH, HS), SGLANG, {"kv_list_layout": "unified"}, 18, None),
    "TRT-LLM pool": (zeros(NB, NL, 2, NH * BS * HS), TRTLLM, PAIRED, 8, (NB, NL, 2, NH, BS, HS)),
    "TRT-LLM pool in a list": ([zeros(NB, NL, 2, NH * BS * HS)], TRTLLM, PAIRED, 8, (NB, NL, 2, NH, BS, HS)),
    "ATOM": (layers(NB, BS, HS), ATOM, {}, 3, None),
    "a row that is declared": (layers(NB, NH, BS, 2, HS), VLLM, {"engine_kv_format": 10}, 10, None),
    "a row that is declared by name": (
        layers(2, 2, BS, NH, HS),
        VLLM,
        {"engine_kv_format": "NL_X_NB_TWO_BS_NH_HS"},
        2,
        None,
    ),
    "single-head pairs that are declared": (
        [(zeros(NB, BS, 1, 64),) * 2] * NL,
        VLLM,
        {"engine_kv_format": 17},
        17,
        None,
    ),
    "single-head pairs by head size": ([(zeros(NB, BS, 1, 64),) * 2] * NL, VLLM, {"head_dim": 64}, 16, None),
    "equal planes by head size": ([(zeros(NB, BS, 1, 64),) * 2] * NL, VLLM, {"head_dim": 128}, 17, None),
    "order by count of heads": (layers(NB, NH, BS, HS), VLLM, {"num_kv_heads": NH}, 12, None),
    "order by slots per block": (layers(NB, BS, NH, HS), VLLM, {"tokens_per_block": 2 * BS}, 13, None),
}


@pytest.mark.parametrize("name", DETECTED)
def test_each_structure_is_detected_without_a_copy(name: str) -> None:
    kv, engine, given, row_id, shape = DETECTED[name]
    found, fmt = normalize_kv_and_discover_format(kv, engine, hints(**given))
    before, after = list(leaves(kv)), list(leaves(found))
    assert (fmt, fmt.name) == (row_id, kv_format(row_id).name)
    assert isinstance(fmt, EngineKVFormat)
    assert tuple(after[0].shape) == (shape or tuple(before[0].shape))
    assert [t.data_ptr() for t in after] == [t.data_ptr() for t in before]
    for one, other in zip(before, after, strict=True):
        other.fill_(1)
        assert one.sum() == one.numel(), "a write to the view must reach the engine's memory"


AMBIGUOUS: dict[str, tuple[Any, EngineType, dict[str, Any], set[int], str]] = {
    "packed on CPU": (layers(NB, BS, NH, HS), VLLM, {}, {12, 13}, "kv_layout"),
    "K/V first on CPU": (layers(2, NB, BS, NH, HS), VLLM, {}, {1, 6}, "kv_layout"),
    "K/V second on CPU": (layers(NB, 2, BS, NH, HS), VLLM, {}, {2, 7}, "kv_layout"),
    "two blocks, NHD": (layers(2, 2, BS, NH, HS), VLLM, {"kv_layout": "NHD"}, {1, 2}, "engine_kv_format"),
    "two blocks, HND": (layers(2, 2, NH, BS, HS), VLLM, {"kv_layout": "HND"}, {6, 7}, "engine_kv_format"),
    "two blocks on CPU": (layers(2, 2, BS, NH, HS), VLLM, {}, {1, 2, 6, 7}, "engine_kv_format"),
    "two blocks on an accelerator": (
        layers(2, 2, BS, NH, HS, device="meta"),
        VLLM,
        {},
        {1, 2},
        "engine_kv_format",
    ),
    "equal planes": ([(zeros(NB, BS, 1, 64),) * 2] * NL, VLLM, {}, {16, 17}, "engine_kv_format"),
    "equal planes, HND": (
        [(zeros(NB, BS, 1, 64),) * 2] * NL,
        VLLM,
        {"kv_layout": "HND"},
        {16, 17},
        "engine_kv_format",
    ),
    "one head": (layers(NB, 1, BS, HS), VLLM, {}, {12, 13}, "kv_layout"),
    "as many heads as slots": (layers(NB, 4, 4, HS), VLLM, {"num_kv_heads": 4}, {12, 13}, "kv_layout"),
    "counts that fit no order": (layers(NB, BS, NH, HS), VLLM, {"num_kv_heads": 7}, {12, 13}, "kv_layout"),
    "counts that fit no order, on an accelerator": (
        layers(NB, BS, NH, HS, device="meta"),
        VLLM,
        {"num_kv_heads": 7},
        {12, 13},
        "kv_layout",
    ),
    "SGLang flat": (layers(NB * BS, NH, HS), SGLANG, {}, {3, 4}, "kv_list_layout"),
    "SGLang flat with blocks": (layers(NB, BS, NH, HS), SGLANG, {}, {9, 18}, "kv_list_layout"),
}


@pytest.mark.parametrize("name", AMBIGUOUS)
def test_what_fits_several_rows_is_not_guessed_but_names_them_and_the_hint(name: str) -> None:
    kv, engine, given, rows, hint = AMBIGUOUS[name]
    with pytest.raises(AmbiguousLayoutError) as caught:
        normalize_kv_and_discover_format(kv, engine, hints(**given))
    assert {row.id for row in caught.value.rows} == rows
    assert caught.value.hint == hint
    assert hint in str(caught.value)
    assert all(row.name in str(caught.value) for row in caught.value.rows)


@pytest.mark.parametrize("name", [name for name, case in AMBIGUOUS.items() if case[1] is VLLM])
def test_declaring_the_row_settles_every_ambiguity_each_way(name: str) -> None:
    kv, engine, given, rows, _ = AMBIGUOUS[name]
    for row in rows:
        declared = {key: value for key, value in given.items() if key != "kv_layout"}
        _, fmt = normalize_kv_and_discover_format(kv, engine, hints(**declared, engine_kv_format=row))
        assert fmt == row


@pytest.mark.parametrize(
    ("shape", "row"),
    [((2, NB, BS, NH, HS), 1), ((NB, 2, BS, NH, HS), 2), ((NB, BS, NH, HS), 13)],
)
def test_on_an_accelerator_nhd_is_the_default_and_a_declaration_wins(
    shape: tuple[int, ...], row: int
) -> None:
    tensors = layers(*shape, device="meta")
    assert normalize_kv_and_discover_format(tensors, VLLM)[1] == row
    hnd = {1: 6, 2: 7, 13: 12}[row]
    assert normalize_kv_and_discover_format(tensors, VLLM, hints(kv_layout="HND"))[1] == hnd
    assert normalize_kv_and_discover_format(tensors, VLLM, hints(num_kv_heads=shape[-3]))[1] == hnd


PADDED = zeros(NB, 2, 2, BS, NH, HS)[:, 0]
REFUSED: dict[str, tuple[Any, EngineType | str, dict[str, Any], str]] = {
    "no tensors": ([], VLLM, {}, "an empty list"),
    "rank 2": (zeros(NB, HS), VLLM, {}, r"\(5, 8\)"),
    "rank 5, no axis of K and V": (layers(NB, 3, BS, NH, HS), VLLM, {"kv_layout": "NHD"}, "engine_kv_format"),
    "a cross-layer tensor of another form": (zeros(NB, NL, 3, BS, NH, HS), VLLM, {}, "expected all layers"),
    "rows of two kinds": (
        [zeros(NB, BS, HS), zeros(NB, BS, NH, HS)],
        VLLM,
        {"kv_layout": "NHD"},
        "all layers",
    ),
    "MLA beside its index": (
        [zeros(NB, BS, INDEX, dtype=U8), zeros(NB, BS, 64, dtype=U8)],
        VLLM,
        {},
        "all layers",
    ),
    "planes that differ in slots": ([(zeros(NB, BS, 1, 8), zeros(NB, 2, 1, 8))], VLLM, {}, "all layers"),
    "K and V of several heads that differ": (
        [(zeros(NB, BS, 2, 8), zeros(NB, BS, 2, 4))],
        VLLM,
        {},
        "layers",
    ),
    "nested too deep": ([[layers(NB, BS, HS)]], VLLM, {}, "expected all layers"),
    "no tensor": ([object()], VLLM, {}, "got object"),
    "no elements": (layers(0, BS, HS), VLLM, {}, "at least one element"),
    "gaps in a page": ([zeros(NB, BS, 2 * HS)[..., :HS]], VLLM, {}, "one run of memory"),
    "gaps between heads": ([zeros(NB, NH, BS + 1, HS)[:, :, :BS]], VLLM, {"kv_layout": "HND"}, "one run"),
    "overlap": ([zeros(1, BS, HS).expand(NB, BS, HS)], VLLM, {}, "one run of memory"),
    "HND declared, cross-layer NHD": (zeros(NB, NL, 2, BS, NH, HS), VLLM, {"kv_layout": "HND"}, "declared"),
    "HND declared, NHD pairs": ([(zeros(NB, BS, NH, HS),) * 2], VLLM, {"kv_layout": "HND"}, "as declared"),
    "NHD declared, a TRT-LLM pool": (
        zeros(NB, NL, 2, NH * BS * HS),
        TRTLLM,
        {**PAIRED, "kv_layout": "NHD"},
        "as declared",
    ),
    "a row that does not fit": (layers(NB, BS, HS), VLLM, {"engine_kv_format": 13}, "declared KV format"),
    "a row against an order": (
        layers(NB, BS, NH, HS),
        VLLM,
        {"engine_kv_format": 13, "kv_layout": "HND"},
        "as declared",
    ),
    "an unknown row": (layers(NB, BS, HS), VLLM, {"engine_kv_format": 77}, "known: 0 "),
    "an unknown order": (layers(NB, BS, HS), VLLM, {"kv_layout": "XYZ"}, "known: LBHNC"),
    "an order without pages": (layers(NB, NH, BS, HS), VLLM, {"kv_layout": "LHBNC"}, "not one piece"),
    "an unknown hint": (layers(NB, BS, HS), VLLM, {"layout": "NHD"}, "known: engine_kv_format"),
    "an unknown kind of list": (layers(NB, BS, HS), SGLANG, {"kv_list_layout": "v_k"}, "unified"),
    "an order that is no text": (layers(NB, BS, HS), VLLM, {"kv_layout": ["NHD"]}, "known: LBHNC"),
    "a row that is no id": (layers(NB, BS, HS), VLLM, {"engine_kv_format": 3.0}, "known: 0 "),
    "a count that is a truth": (layers(NB, BS, HS), VLLM, {"num_kv_heads": True}, "positive integer"),
    "a count below one": (layers(NB, BS, HS), VLLM, {"tokens_per_block": 0}, "positive integer"),
    "slots that do not divide": (layers(NB * BS, 1, HS), SGLANG, {"tokens_per_block": 7}, "whole number"),
    "an odd list of K and V": (layers(NB, BS, NH, HS), SGLANG, {"kv_list_layout": "k_v"}, "got 3"),
    "a nested list declared flat": (
        [layers(NB, BS, HS)] * 2,
        SGLANG,
        {"kv_list_layout": "unified"},
        "flat list",
    ),
    "more K than V": ([layers(NB, BS, NH, HS), layers(NB, BS, NH, HS, n=2)], SGLANG, {}, "expected all"),
    "padded slots": (
        [zeros(NB * BS, 2, HS)[:, :1]],
        SGLANG,
        {"tokens_per_block": BS},
        "side by side",
    ),
    "a pool without hints": (
        zeros(NB, NL, 2, 96),
        TRTLLM,
        {"head_dim": HS},
        "num_kv_heads, tokens_per_block",
    ),
    "a pool of other sizes": (zeros(NB, NL, 2, 95), TRTLLM, PAIRED, "3 \\* 4 \\* 8"),
    "a pool without V": (zeros(NB, NL, 1, NH * BS * HS), TRTLLM, PAIRED, "expected all layers"),
    "ATOM of rank 4": (layers(NB, BS, NH, HS), ATOM, {}, "expected all layers"),
    "an engine that is a mock": (
        layers(NB, BS, HS),
        EngineType.MOCK,
        {},
        "known: vllm, sglang, trtllm, atom",
    ),
    "an engine nobody knows": (layers(NB, BS, HS), "vlm", {}, "known: vllm"),
}


BY_LAYER = [
    name for name in REFUSED if name not in ("rows of two kinds", "MLA beside its index", "no tensors")
]


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_known_is_refused_in_one_line_that_says_what_was_expected(name: str) -> None:
    kv, engine, given, text = REFUSED[name]
    with pytest.raises(LayoutError, match=text) as caught:
        normalize_kv_and_discover_format(kv, engine, hints(**given))
    assert "\n" not in str(caught.value)
    assert not isinstance(caught.value, AmbiguousLayoutError)


def test_k_and_v_on_two_devices_are_no_layer() -> None:
    pair = (zeros(NB, BS, NH, HS), zeros(NB, BS, NH, HS).to("meta"))
    with pytest.raises(LayoutError, match="declared KV format NL_X_TWO_X_NB_BS_NH_HS"):
        normalize_kv_and_discover_format([pair], VLLM, hints(engine_kv_format=16))


@pytest.mark.parametrize("given", ["NHD", [1], {1: 2, "layout": 3}], ids=str)
def test_hints_that_are_none_are_refused(given: Any) -> None:
    with pytest.raises(LayoutError, match="hint"):
        normalize_kv_and_discover_format(layers(NB, BS, HS), VLLM, given)


@pytest.mark.parametrize("name", BY_LAYER)
def test_what_is_not_known_is_refused_layer_by_layer_too(name: str) -> None:
    kv, engine, given, text = REFUSED[name]
    with pytest.raises(LayoutError, match=text):
        normalize_and_discover_per_layer_formats(kv, [], engine, hints(**given))


# --- memory order ------------------------------------------------------------------------------------------


@given(
    shape=st.lists(st.integers(1, 4), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
    pad=st.integers(0, 2),
)
@QUICK
def test_axes_come_back_in_memory_order_however_they_are_indexed(
    shape: list[int], order: Any, pad: int
) -> None:
    run = prod(shape[1:])
    memory = torch.arange(shape[0] * (run + pad))
    straight = memory.as_strided(shape, [run + pad] + [prod(shape[i + 1 :]) for i in range(1, len(shape))])
    axes = list(range(len(shape)))
    order.shuffle(axes)
    found = in_memory_order(straight.permute(*axes))
    assert found.data_ptr() == memory.data_ptr()
    assert list(found.stride()) == sorted(found.stride(), reverse=True)
    assert found.flatten().tolist() == straight.flatten().tolist()
    assert in_memory_order(found) is found


@pytest.mark.parametrize("row", [kv_format(i) for i in (1, 2, 3, 6, 7, 12, 13, 15)], ids=lambda row: row.name)
@given(axes=st.permutations(range(6)), pad=st.integers(0, 2))
@QUICK
def test_views_of_any_order_and_padding_are_detected_as_their_memory_is(
    row: KVFormat, axes: list[int], pad: int
) -> None:
    shape = row.shape({"NB": 5, "BS": 4, "NH": 3, "HS": 7, "CS": 7})
    run = prod(shape[1:]) + pad
    memory = zeros(shape[0] * run)
    straight = memory.as_strided(shape, [run, *row.strides(row.sizes(shape))[1:]])
    view = straight.permute(*[a for a in axes if a < row.rank])
    order = hints(kv_layout="HND" if row.is_hnd else "NHD")
    (found,), fmt = normalize_kv_and_discover_format([view], VLLM, order)
    assert fmt == row.id
    assert (tuple(found.shape), found.stride(0)) == (shape, run)
    assert found.data_ptr() == memory.data_ptr()


# --- layers that differ ------------------------------------------------------------------------------------


def test_layers_of_several_kinds_are_detected_each_by_itself() -> None:
    mla, index, packed = zeros(NB, BS, 576), zeros(NB, BS, INDEX, dtype=U8), zeros(NB, NH, BS, HS)
    pair = (zeros(NB, BS, NH, HS), zeros(NB, BS, NH, HS))
    found, formats = normalize_and_discover_per_layer_formats(
        [mla, index, pair, mla, index], [[0, 3], [1, 4], [2]], VLLM
    )
    assert formats == [3, 14, 16, 3, 14]
    assert found[2] == list(pair)
    assert found[0] is mla
    _, formats = normalize_and_discover_per_layer_formats(
        [mla, packed, mla], [], VLLM, hints(kv_layout="HND")
    )
    assert formats == [3, 12, 3]


def test_a_layer_in_no_group_is_left_as_it_is() -> None:
    state = [object(), zeros(NB, 2 * HS)[:, :HS]]
    found, formats = normalize_and_discover_per_layer_formats(
        [state, zeros(NB, BS, 1, HS).permute(0, 2, 1, 3)], [[1]], VLLM, hints(kv_layout="NHD")
    )
    assert found[0] is state
    assert tuple(found[1].shape) == (NB, BS, 1, HS)
    assert formats == [13, 13]


def test_structures_that_layers_share_stay_whole() -> None:
    pool, formats = normalize_and_discover_per_layer_formats(zeros(NB, NL, 2, BS, NH, HS), [], VLLM)
    assert (len(pool), formats) == (1, [0] * NL)
    assert get_group_data_ptrs(pool, formats[0], range(NL)) == [pool[0].data_ptr()]
    flat = layers(NB * BS, NH, HS, n=2 * NL)
    given = hints(kv_list_layout="k_v", tokens_per_block=BS)
    lists, formats = normalize_and_discover_per_layer_formats(flat, [list(range(NL))], SGLANG, given)
    assert ([len(part) for part in lists], formats) == ([NL, NL], [9] * NL)
    assert get_group_data_ptrs(lists, 9, range(NL)) == [tensor.data_ptr() for tensor in flat]


def test_counts_do_not_put_layers_of_one_engine_into_two_orders() -> None:
    kv = [zeros(NB, 8, 16, HS), zeros(NB, 16, 8, HS)]  # HND: 8 heads of 16 slots, and 16 of 8
    for one in kv:
        normalize_and_discover_per_layer_formats([one], [], VLLM, hints(num_kv_heads=8))
    with pytest.raises(AmbiguousLayoutError) as caught:
        normalize_and_discover_per_layer_formats(kv, [], VLLM, hints(num_kv_heads=8))
    assert caught.value.hint == "kv_layout"
    given = hints(num_kv_heads=8, kv_layout="HND")
    assert normalize_and_discover_per_layer_formats(kv, [], VLLM, given)[1] == [12, 12]


def test_groups_that_name_no_layer_or_one_twice_are_refused() -> None:
    kv = layers(NB, BS, HS)
    for groups, text in [
        ([[0, 3]], "layer 3"),
        ([[-1]], "layer -1"),
        ([[0], [0]], "twice"),
        ([[]], "no layer"),
    ]:
        with pytest.raises(LayoutError, match=text):
            normalize_and_discover_per_layer_formats(kv, groups, VLLM)
    with pytest.raises(LayoutError, match="layer 9"):
        normalize_and_discover_per_layer_formats(zeros(NB, NL, 2, BS, NH, HS), [[9]], VLLM)


# --- rows of plugins ---------------------------------------------------------------------------------------


def test_a_plugin_row_takes_part_in_detection_by_what_it_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_by_id", "_by_name"):
        monkeypatch.setattr(table, name, dict(getattr(table, name)))
    kv = layers(NB, BS, NH, 2, HS, n=2)
    with pytest.raises(LayoutError, match="engine_kv_format"):
        normalize_kv_and_discover_format(kv, VLLM, hints(kv_layout="NHD"))
    register_kv_format(KVFormat(1001, "MINE", "NL x [NB, BS, NH, 2, HS]", engines=("vllm",)))
    assert normalize_kv_and_discover_format(kv, VLLM, hints(kv_layout="NHD"))[1] == 1001
    assert {row.id for row in kv_formats()} >= {1001}

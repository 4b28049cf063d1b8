"""Slots on the simulated accelerator: as torch's baseline moves them, in shapes that do not follow the request."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_hpu._native")

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from test_shapes import Shapes

from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform import fixed_shape_slots, torch_ops

pytestmark = [pytest.mark.torch, pytest.mark.sim]

BLOCKS, SIZE, HEADS, WIDTH, LAYERS = 6, 4, 2, 8, 3
TOTAL = BLOCKS * SIZE
AXES = {"NB": BLOCKS, "BS": SIZE, "NH": HEADS, "HS": WIDTH, "CS": 2 * WIDTH, "NL": LAYERS, "PBS": TOTAL}
SERVED = (
    "NL_X_TWO_X_NB_BS_NH_HS",
    "NL_X_TWO_NB_BS_NH_HS",
    "NL_X_NB_BS_HS",
    "TWO_X_NL_X_NB_BS_NH_HS",
    "TWO_X_NL_X_NBBS_NH_HS",
    "NL_X_NBBS_ONE_HS",
    "NL_X_NB_BS_NH_CS",
    "NL_X_NB_BS_NH_HS",
)
"""Slots of all blocks follow one another."""
LEFT = ("NL_X_NB_TWO_BS_NH_HS", "NL_X_NB_NH_BS_CS", "NB_NL_TWO_BS_NH_HS")


def pages_of(name: str) -> Any:
    row = kv_format(name)
    shape = [AXES.get(axis, int(axis) if axis.isdigit() else 0) for axis in row.dims.axes]

    def level(levels: tuple[str, ...]) -> Any:
        if not levels:
            return torch.randn(shape).to(torch.bfloat16).to("sim")
        count = 2 if levels[0] == "2" else LAYERS
        return [level(levels[1:]) for _ in range(count)]

    return level(row.dims.levels)


def flat(node: Any) -> Iterator[Any]:
    if isinstance(node, list):
        for part in node:
            yield from flat(part)
    else:
        yield node


def copied(node: Any) -> Any:
    return [copied(part) for part in node] if isinstance(node, list) else node.clone()


def object_of(name: str, tokens: int) -> Any:
    row = kv_format(name)
    hidden = WIDTH if row.is_mla else HEADS * WIDTH * (2 if row.is_packed else 1)
    return torch.randn(row.kv_size, LAYERS, tokens, hidden).to(torch.bfloat16)


@pytest.fixture
def took(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each transfer was made in fixed shapes."""
    answers: list[bool] = []
    whole = fixed_shape_slots._transfer
    monkeypatch.setattr(
        fixed_shape_slots, "_transfer", lambda *given: answers.append(whole(*given)) or answers[-1]
    )
    return answers


def both(name: str, mapping: list[int], tokens: int, way: int, skip: int = 0) -> None:
    """The op and the baseline on equal operands leave equal bytes behind, everywhere."""
    from lmcache_hpu.ops import HpuDeviceOps

    pages, obj = pages_of(name), object_of(name, tokens)
    others, other = copied(pages), obj.clone()
    for op, paged, kv in (
        (HpuDeviceOps().multi_layer_kv_transfer, pages, obj),
        (torch_ops.multi_layer_kv_transfer, others, other),
    ):
        op(
            kv, paged, torch.tensor(mapping, dtype=torch.int64), torch.device("sim"), TOTAL, way,
            kv_format(name).id, 0, 0, skip,
        )  # fmt: skip
        torch.sim.synchronize()
    assert torch.equal(obj, other)
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(flat(pages), flat(others), strict=True))


@pytest.mark.parametrize("name", SERVED)
@settings(
    max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)  # fmt: skip
@given(data=st.data())
def test_exactly_the_named_slots_move_whatever_the_request(
    sim: Any, took: list[bool], name: str, data: st.DataObject
) -> None:
    tokens = data.draw(st.integers(1, TOTAL))
    slots = data.draw(st.permutations(range(TOTAL)))[: data.draw(st.integers(0, tokens))]
    mapping = [slot if data.draw(st.booleans()) else -1 for slot in slots]
    way, skip = data.draw(st.integers(0, 1)), data.draw(st.integers(0, 3))
    took.clear()
    both(name, mapping, tokens, way, skip)
    assert took == [True]


@pytest.mark.parametrize("name", LEFT)
@pytest.mark.parametrize("way", [0, 1])
def test_layouts_whose_slots_do_not_follow_one_another_are_torch_s(
    sim: Any, took: list[bool], name: str, way: int
) -> None:
    both(name, [5, -1, 17, 0], 6, way)
    assert took == [False]


@pytest.mark.parametrize("token_major", [False, True])
@pytest.mark.parametrize("way", [0, 1])
@pytest.mark.parametrize("name", ["NL_X_TWO_X_NB_BS_NH_HS", "NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_BS_HS"])
def test_one_layer_moves_as_torch_moves_it(
    sim: Any, took: list[bool], name: str, way: int, token_major: bool
) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    pages, obj = pages_of(name), object_of(name, 5)[:, 0]
    if token_major:
        obj = obj.transpose(0, 1).contiguous()
    others, other = copied(pages), obj.clone()
    for op, paged, kv in (
        (HpuDeviceOps().single_layer_kv_transfer, pages, obj),
        (torch_ops.single_layer_kv_transfer, others, other),
    ):
        op(kv, paged[1], torch.tensor([9, -1, 3, 23]), way, kv_format(name).id, token_major)
        torch.sim.synchronize()
    assert took == [True]
    assert torch.equal(obj, other)
    assert all(torch.equal(one.cpu(), two.cpu()) for one, two in zip(flat(pages), flat(others), strict=True))


@pytest.mark.parametrize(
    ("more", "said"),
    [
        ({"slot_mapping": [TOTAL]}, f"{TOTAL}"),
        ({"slot_mapping": [0] * 7}, "7"),
        ({"page_buffer_size": TOTAL + 1}, "page_buffer_size"),
        ({"direction": 2}, "2 is not a valid TransferDirection"),
        ({"skip_prefix_n_tokens": -1}, "skip"),
    ],
)
def test_what_is_out_of_range_is_refused_in_the_baseline_s_words(
    sim: Any, more: dict[str, Any], said: str
) -> None:
    from lmcache_hpu.ops import HpuDeviceOps

    name = "NL_X_TWO_X_NB_BS_NH_HS"
    given = {
        "kv": object_of(name, 6), "ptrs": pages_of(name), "slot_mapping": [1, 2], "device": torch.device("sim"),
        "page_buffer_size": TOTAL, "direction": 0, "format": kv_format(name).id, **more,
    }  # fmt: skip
    before = copied(given["ptrs"])
    with pytest.raises(ValueError, match=said):
        HpuDeviceOps().multi_layer_kv_transfer(**given)
    assert all(torch.equal(a.cpu(), b.cpu()) for a, b in zip(flat(before), flat(given["ptrs"]), strict=True))


def test_requests_of_any_length_make_no_more_shapes_than_one_of_each_size(sim: Any) -> None:
    from lmcache.v1.platform.fixed_shapes import DEFAULT_SIZES
    from lmcache_hpu.ops import HpuDeviceOps

    ops, name = HpuDeviceOps(), "NL_X_TWO_X_NB_BS_NH_HS"
    pages = [[torch.zeros(100, SIZE, HEADS, WIDTH, device="sim") for _ in range(2)] for _ in range(2)]

    def seen(requests: list[list[int]]) -> set[Any]:
        with Shapes() as shapes:
            for mapping in requests:
                kv = torch.zeros(2, 2, len(mapping), HEADS * WIDTH)
                for way in (0, 1):
                    ops.multi_layer_kv_transfer(
                        kv, pages, torch.tensor(mapping), torch.device("sim"), 400, way, kv_format(name).id
                    )
        return shapes.seen

    few = seen([list(range(size)) for size in DEFAULT_SIZES])
    many = [
        [slot if slot % 5 else -1 for slot in range(length)] for length in (*range(2, 40), 127, 300)
    ]  # fmt: skip
    assert seen(many) == few

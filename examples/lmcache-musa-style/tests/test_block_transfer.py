"""Block transfers against a reference that indexes plainly. Host memory stands in for the device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from lmcache.errors import LayoutError
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

from lmcache_musa_style.spec import MusaStyleDeviceSpec

torch = pytest.importorskip("torch", reason="the tests that move bytes need torch")

NL, NB, BS, NH, HS = 3, 11, 4, 2, 8
H2D, D2H = TransferDirection.H2D, TransferDirection.D2H

# Format id: shape of a layer's tensor, planes, heads, and one block of one plane as [BS, NH * HS], by hand.
FORMATS: dict[int, tuple[tuple[int, ...], int, int, Callable[[Any, int, int], Any]]] = {
    1: ((2, NB, BS, NH, HS), 2, NH, lambda t, kv, b: t[kv, b].reshape(BS, -1)),
    2: ((NB, 2, BS, NH, HS), 2, NH, lambda t, kv, b: t[b, kv].reshape(BS, -1)),
    3: ((NB, BS, HS), 1, 1, lambda t, kv, b: t[b]),
    6: ((2, NB, NH, BS, HS), 2, NH, lambda t, kv, b: t[kv, b].transpose(0, 1).reshape(BS, -1)),
    7: ((NB, 2, NH, BS, HS), 2, NH, lambda t, kv, b: t[b, kv].transpose(0, 1).reshape(BS, -1)),
    12: ((NB, NH, BS, HS), 1, NH, lambda t, kv, b: t[b].transpose(0, 1).reshape(BS, -1)),
    13: ((NB, BS, NH, HS), 1, NH, lambda t, kv, b: t[b].reshape(BS, -1)),
}
DTYPES = [torch.float32, torch.bfloat16, torch.uint8]


@pytest.fixture(scope="module")
def ops() -> Any:
    return MusaStyleDeviceSpec().get_ops()


def noise(shape: tuple[int, ...], dtype: Any) -> Any:
    size = torch.Size(shape).numel() * dtype.itemsize
    return torch.randint(0, 256, (size,), dtype=torch.uint8).view(dtype).reshape(shape)


def same(one: Any, other: Any) -> bool:
    """Bit for bit: noise may be NaN, which equals nothing."""
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


def describe(fmt: int, dtype: Any) -> PageBufferShapeDesc:
    _, planes, heads, _ = FORMATS[fmt]
    return PageBufferShapeDesc(planes, NL, NB, BS, heads, HS, dtype.itemsize)


def expected(fmt: int, paged: Any, objects: Any, ids: list[int], per_object: int, skip: int) -> Any:
    """What the objects hold after the pages were read."""
    _, planes, _, block = FORMATS[fmt]
    after = [obj.clone() for obj in objects]
    for at, block_id in enumerate(ids):
        if at >= skip:
            start = at % per_object * BS
            for layer in range(NL):
                for kv in range(planes):
                    after[at // per_object][kv, layer, start : start + BS] = block(paged[layer], kv, block_id)
    return after


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("skip", [0, 1, 3])
def test_reading_pages_fills_exactly_the_objects_slots(ops: Any, fmt: int, dtype: Any, skip: int) -> None:
    shape, planes, heads, _ = FORMATS[fmt]
    paged = [noise(shape, dtype) for _ in range(NL)]
    before = [tensor.clone() for tensor in paged]
    objects = [noise((planes, NL, 2 * BS, heads * HS), dtype) for _ in range(3)]
    ids = [7, 8, 2, 0, 10]
    want = expected(fmt, paged, objects, ids, 2, skip)
    ops.multi_layer_block_kv_transfer(paged, objects, ids, "cpu", D2H, describe(fmt, dtype), 2 * BS, fmt, skip)
    assert all(same(one, other) for one, other in zip(objects, want, strict=True))
    assert all(same(one, other) for one, other in zip(paged, before, strict=True))


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_what_was_read_is_written_back_to_other_pages_and_nowhere_else(ops: Any, fmt: int, dtype: Any) -> None:
    shape, planes, heads, block = FORMATS[fmt]
    source, target = ([noise(shape, dtype) for _ in range(NL)] for _ in range(2))
    before = [tensor.clone() for tensor in target]
    objects = [noise((planes, NL, 2 * BS, heads * HS), dtype) for _ in range(2)]
    ids, others = [1, 9, 4], [3, 0, 10]
    desc = describe(fmt, dtype)
    ops.multi_layer_block_kv_transfer(source, objects, ids, "cpu", D2H, desc, 2 * BS, fmt)
    ops.multi_layer_block_kv_transfer(target, objects, torch.tensor(others), "cpu", H2D, desc, 2 * BS, fmt)
    for layer in range(NL):
        for kv in range(planes):
            for block_id in range(NB):
                want = block(before[layer], kv, block_id)
                if block_id in others:
                    want = block(source[layer], kv, ids[others.index(block_id)])
                assert same(block(target[layer], kv, block_id), want), (layer, kv, block_id)


@pytest.mark.parametrize("fmt", FORMATS)
def test_these_formats_are_served_without_the_baseline(ops: Any, fmt: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("the baseline was called")

    monkeypatch.setattr(DeviceOps, "multi_layer_block_kv_transfer", refuse)
    shape, planes, heads, _ = FORMATS[fmt]
    paged = [noise(shape, torch.float32) for _ in range(NL)]
    objects = [noise((planes, NL, BS, heads * HS), torch.float32)]
    for direction in (D2H, H2D):
        ops.multi_layer_block_kv_transfer(paged, objects, [1], "cpu", direction, describe(fmt, torch.float32), BS, fmt)


def test_of_a_block_that_is_named_twice_the_last_one_is_written(ops: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the baseline: which of two writes of one kernel or index operation comes last is not told on a device."""
    asked: list[Any] = []
    whole = DeviceOps.multi_layer_block_kv_transfer
    monkeypatch.setattr(DeviceOps, "multi_layer_block_kv_transfer", lambda *call: (asked.append(call), whole(*call)))
    shape, planes, heads, block = FORMATS[1]
    paged = [noise(shape, torch.float32) for _ in range(NL)]
    objects = [noise((planes, NL, 3 * BS, heads * HS), torch.float32)]
    ops.multi_layer_block_kv_transfer(paged, objects, [4, 7, 4], "cpu", H2D, describe(1, torch.float32), 3 * BS, 1, 0)
    assert asked
    for layer in range(NL):
        for kv in range(planes):
            assert same(block(paged[layer], kv, 4), objects[0][kv, layer, 2 * BS :])


@pytest.mark.parametrize(
    ("change", "error"),
    [
        ({"block_ids": [NB]}, ValueError),
        ({"block_ids": [-1]}, ValueError),
        ({"chunk_size": BS + 1}, ValueError),
        ({"skip_prefix_n_blocks": -1}, ValueError),
        ({"direction": 2}, ValueError),
        ({"shape_desc": PageBufferShapeDesc(2, NL, NB, BS, NH + 1, HS, 4)}, LayoutError),
        ({"engine_kv_format": 999}, LayoutError),
    ],
)
def test_a_transfer_that_cannot_be_right_is_refused_and_moves_nothing(
    ops: Any, change: dict[str, Any], error: type[Exception]
) -> None:
    paged = [noise(FORMATS[1][0], torch.float32) for _ in range(NL)]
    objects = [torch.zeros(2, NL, BS, NH * HS)]
    call = {
        "paged": paged, "objects": objects, "block_ids": [0], "device": "cpu", "direction": D2H,
        "shape_desc": describe(1, torch.float32), "chunk_size": BS, "engine_kv_format": 1,
        "skip_prefix_n_blocks": 0,
    }  # fmt: skip
    with pytest.raises(error):
        ops.multi_layer_block_kv_transfer(**{**call, **change})
    assert not objects[0].any()

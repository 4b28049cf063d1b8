"""Slots on the host go by memcpy, by rows or by strided copies as it is cheapest: each way moves the same bytes."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.connector_cases import (  # noqa: E402
    ALL,
    WHOLE,
    Model,
    Store,
    Transfer,
    check_round_trip,
    objects_for,
    save,
    sizes,
    transfers,
    whole,
)
from helpers.slot_cases import SERVED, Case, build, raw  # noqa: E402
from lmcache.v1.gpu_connector import hostruns  # noqa: E402
from lmcache.v1.gpu_connector.hostruns import HostRuns  # noqa: E402
from lmcache.v1.gpu_connector.slots import Slots  # noqa: E402
from lmcache.v1.kv_layout import kv_format  # noqa: E402
from lmcache.v1.platform.ops_types import TransferDirection  # noqa: E402
from lmcache.v1.platform.torch_ops import _hostcopy  # noqa: E402
from lmcache.v1.utils.memcpy import bytes_at, copy_slices  # noqa: E402

NEVER = 1 << 40
SMALL = {"_LEAST_ROW": 16, "_SERIAL": 8, "_LEAST_BYTES": 1}
WAYS: dict[str, dict[str, int]] = {
    "slices": {**SMALL, "_SHORT_BYTES": 0},
    "memcpy": {**SMALL, "_SHORT_BYTES": 0, "_LONG_COPY": 0},
    "rows": {**SMALL, "_SHORT_BYTES": NEVER, "_LONG_RUN": NEVER},
    "strides": {**SMALL, "_SHORT_BYTES": NEVER, "_LONG_RUN": 0},
}
PAIRS = [
    (name, fmt)
    for name in ("VLLMPagedMemGPUConnectorV2", "VLLMPagedMemLayerwiseGPUConnector")
    for fmt in SERVED
    if name in WHOLE or not kv_format(fmt).is_single_kv
]


@contextmanager
def by(way: str) -> Iterator[None]:
    """Thresholds that leave one way, in small pieces among threads."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in WAYS[way].items():
            patch.setattr(hostruns, name, value)
        patch.setattr(_hostcopy, "_THREADED", 0)
        patch.setattr(_hostcopy, "_threads", lambda: 3)
        yield


def stored(name: str, model: Model, transfer: Transfer, pages: Any) -> list[bytes]:
    """What a store makes of objects that were all zero."""
    connector, store = whole(ALL[name], model, False), Store()
    objects = objects_for(connector, model, transfer, store)
    for obj in store.given:
        obj.raw_tensor.zero_()
    save(connector, objects, transfer, kvcaches=pages, slot_mapping=torch.tensor(transfer.slots), sync=True)
    return [raw(tensor).tobytes() for obj in store.given for tensor in obj.tensors]


def wide(data: Any, fmt: int) -> Case:
    return replace(data.draw(sizes(fmt)), hs=data.draw(st.sampled_from([8, 32])))


@pytest.mark.parametrize(("name", "fmt"), PAIRS)
@settings(max_examples=8)
@given(data=st.data(), way=st.sampled_from(sorted(WAYS)))
def test_each_way_stores_what_the_op_stores_and_brings_it_back(
    name: str, fmt: int, data: Any, way: str
) -> None:
    model = Model(fmt, wide(data, fmt))
    transfer = data.draw(transfers(model.case.slots))
    pages = build(fmt, model.case)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(HostRuns, "move", lambda *_, **__: False)
        expected = stored(name, model, transfer, pages)
    with by(way):
        assert stored(name, model, transfer, pages) == expected
        check_round_trip(ALL[name], model, transfer)


WIDE = [pair for pair in PAIRS if pair[1] != 17]  # 17's narrow planes here are of one element


@pytest.mark.parametrize("slots", ["in a row", "blocks", "at random", "after a cached prefix"])
@pytest.mark.parametrize(("name", "fmt"), WIDE)
def test_slots_of_every_layout_move_without_the_op(
    name: str, fmt: int, slots: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = Case(nl=2, nb=8, bs=4, nh=2, hs=64, dtype=torch.bfloat16)
    ids = {"blocks": [b * 4 + at for b in (5, 0, 3, 1, 7, 2, 6, 4) for at in range(4)]}
    ids["at random"] = [at * 7 % 32 for at in range(32)]
    found: list[bool] = []
    move = HostRuns.move
    monkeypatch.setattr(HostRuns, "move", lambda *args: found.append(move(*args)) or found[-1])
    transfer = Transfer(ids.get(slots, [*range(32)]), [2], [30], 5 if "prefix" in slots else 0)
    check_round_trip(ALL[name], Model(fmt, case), transfer)
    assert found
    assert all(found)


def test_a_slice_that_is_not_within_its_memory_is_refused() -> None:
    here, there = torch.zeros(64, dtype=torch.uint8), torch.ones(64, dtype=torch.uint8)
    views = [bytes_at(tensor.data_ptr(), 64) for tensor in (here, there)]
    with pytest.raises(ValueError, match="different structures"):
        copy_slices(views[0], [slice(40, 72)], views[1], [slice(0, 32)])
    assert not here.any()


def test_slices_are_copied_one_after_the_other() -> None:
    here, there = torch.zeros(8, dtype=torch.uint8), torch.arange(8, dtype=torch.uint8)
    views = [bytes_at(tensor.data_ptr(), 8) for tensor in (here, there)]
    copy_slices(views[0], [slice(0, 2), slice(5, 6)], views[1], [slice(4, 6), slice(1, 2)])
    assert here.tolist() == [4, 5, 0, 0, 0, 1, 0, 0]


@pytest.mark.parametrize("way", sorted(WAYS))
def test_planes_side_by_side_go_to_their_columns(way: str) -> None:
    nested = [tuple(torch.randn(4, 2, 1, width) for width in (32, 64)) for _ in range(2)]
    index = torch.tensor([5, 0, 3, 6, 7])
    expected = torch.stack([torch.cat([part.flatten(0, 2)[index] for part in parts], 1) for parts in nested])
    obj = torch.zeros(1, 2, 5, 96)
    with by(way):
        assert HostRuns(kv_format(17), nested).move(obj, Slots(index, False), TransferDirection.D2H)
        assert torch.equal(obj[0], expected)
        for part in (part for parts in nested for part in parts):
            part.zero_()
        assert HostRuns(kv_format(17), nested).move(obj, Slots(index, False), TransferDirection.H2D)
    for parts, rows in zip(nested, expected, strict=True):
        flat = torch.cat([part.flatten(0, 2) for part in parts], 1)
        assert torch.equal(flat[index], rows)
        assert not flat[[1, 2, 4]].any()

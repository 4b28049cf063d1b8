"""Slots on a device, slots out of range, and what is refused, by name and before anything moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import kv_format, kv_formats, table
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import TransferDirection

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.torch

from helpers.slot_cases import SERVED, STRINGS, Case, an_object, build, content, leaves, raw  # noqa: E402
from lmcache.v1.platform.torch_ops import _planes  # noqa: E402

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
OPS = DeviceOps()


def call(fmt: int, case: Case, kv: Any, pages: Any, slots: Any, way: int = D2H, **change: Any) -> None:
    """The op with what fits, unless changed."""
    given = {"device": "cpu", "page_buffer_size": case.slots, "direction": way, "format": fmt, **change}
    OPS.multi_layer_kv_transfer(kv, pages, slots, **given)


def addresses(paged: Any) -> list[int]:
    return [tensor.data_ptr() for tensor in leaves(paged)]


# --- on a device -------------------------------------------------------------------------------------------


def test_on_a_device_no_step_waits_for_what_the_slots_are() -> None:
    case = Case()  # tensors without content: whatever reads a value back raises
    for fmt in (2, 12, 17):
        paged = [
            tuple(t.to("meta") for t in part) if isinstance(part, tuple) else part.to("meta")
            for part in build(fmt, case)
        ]
        obj, slots = an_object(fmt, case, 4).to("meta"), torch.tensor([1, -1, 2, 99]).to("meta")
        for way in (H2D, D2H):
            OPS.multi_layer_kv_transfer(obj, paged, slots, "meta", case.slots, way, fmt)
        OPS.multi_layer_kv_transfer(an_object(fmt, case, 4), paged, slots, "meta", case.slots, H2D, fmt)


def test_on_a_device_a_slot_beyond_the_pages_counts_as_negative() -> None:
    case = Case()
    paged, obj = build(13, case), an_object(13, case, 3)
    held, rows = content(13, paged), raw(obj)
    rows[:, :, 1] = held[:, :, 6]
    with mock.patch("lmcache.v1.platform.torch_ops._slots._is_host", return_value=False):
        call(13, case, obj, paged, torch.tensor([case.slots, 6, 10**12]))
    assert (raw(obj) == rows).all()


# --- mutations ---------------------------------------------------------------------------------------------


def law_holds(fmt: int) -> bool:
    """Whether what a plain gather reads is what the reference reads."""
    case = Case(bs=4, nh=3, hs=4)
    paged = build(fmt, case)
    obj = an_object(fmt, case, 3)
    try:
        call(fmt, case, obj, paged, torch.tensor([9, 0, 5]))
    except (LayoutError, RuntimeError):
        return False
    return bool((raw(obj) == content(fmt, paged)[:, :, [9, 0, 5]]).all())


@pytest.mark.parametrize("axis", range(5), ids=["KV", "NB", "BS", "NH", "W"])
@pytest.mark.parametrize("fmt", SERVED)
def test_a_stride_that_is_off_by_one_breaks_the_law(
    fmt: int, axis: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, sizes = _planes.canonical_view, []

    def wrong(*args: Any) -> Any:
        view = right(*args)
        sizes.append(view.shape[axis])
        strides = [stride + (at == axis) for at, stride in enumerate(view.strides)]
        return replace(view, strides=tuple(strides))

    assert law_holds(fmt)
    monkeypatch.setattr(_planes, "canonical_view", wrong)
    monkeypatch.setattr(_planes, "slot_layout", _planes.slot_layout.__wrapped__)  # which remembers
    assert law_holds(fmt) == (max(sizes) == 1)  # the stride of an axis of size one says nothing


@pytest.mark.parametrize("fmt", sorted(set(SERVED) - {5}))  # of id 5 all other axes have size 1
def test_a_row_with_two_axes_in_each_other_s_place_breaks_the_law(
    fmt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = kv_format(fmt)
    one, other = ("NB", "BS") if row.is_mla else ("PBS" if row.is_pbs_fused else "BS", "NH")
    swapped = {one: other, other: one}
    axes = ", ".join(swapped.get(axis, axis) for axis in row.dims.axes)
    wrong = "".join(f"{level} x " for level in row.dims.levels) + f"[{axes}]"
    monkeypatch.setattr(table, "_by_id", {**table._by_id, fmt: replace(row, dims_text=wrong)})
    assert not law_holds(fmt)


# --- refusals ----------------------------------------------------------------------------------------------


@contextmanager
def refused(error: Any, match: str, *sides: Any) -> Iterator[None]:
    """What happens within fails for that reason, and leaves both sides as they were."""
    tensors = [tensor for side in sides for tensor in leaves(side)]
    before = [raw(tensor) for tensor in tensors]
    with pytest.raises(error, match=match):
        yield
    assert all((raw(tensor) == old).all() for tensor, old in zip(tensors, before, strict=True))


@pytest.mark.parametrize("way", [H2D, D2H])
@pytest.mark.parametrize("fmt", [14, 100])
def test_a_format_whose_slots_cannot_be_reached_is_refused_by_op_and_name(fmt: int, way: int) -> None:
    case = Case(hs=132, dtype=torch.uint8)
    kv, pages = an_object(3, case, 2), build(3, case)
    name = kv_format(fmt).name
    for op, args in {
        "multi_layer_kv_transfer": ([0, 1], "cpu", case.slots, way, fmt),
        "multi_layer_kv_transfer_unilateral": ([0, 1], "cpu", case.slots, way, fmt),
        "single_layer_kv_transfer": ([0, 1], way, fmt),
    }.items():
        with refused(LayoutError, f"^{op} does not serve .*{name}", kv, pages):
            getattr(OPS, op)(kv, pages, *args)


def test_each_op_says_which_rows_it_serves_and_refuses_the_others() -> None:
    served = {
        "multi_layer_kv_transfer": set(SERVED),
        "multi_layer_kv_transfer_unilateral": {3, 4, 5, 9, 17},
        "single_layer_kv_transfer": set(SERVED) - {0, 8},
        "single_layer_kv_transfer_sgl": {4, 9, 16},
        "load_and_reshape_flash": {4, 9, 16},
        "reshape_and_cache_back_flash": {4, 9, 16},
    }
    for name, rows in served.items():
        op = getattr(OPS, name)
        assert op.stream_ordered
        assert op.takes == ({"tensors", "pointers"} if name.startswith("multi") else {"tensors"})
        assert {row.id for row in kv_formats() if not op.serves(row)} == rows, name
    case = Case()
    for fmt in set(STRINGS) - served["multi_layer_kv_transfer_unilateral"]:
        with pytest.raises(LayoutError, match=f"unilateral does not serve .*{kv_format(fmt).name}"):
            OPS.multi_layer_kv_transfer_unilateral(None, [], [0], "cpu", case.slots, D2H, fmt)
    for fmt in (0, 8):
        with pytest.raises(
            LayoutError, match=f"single_layer_kv_transfer does not serve .*{kv_format(fmt).name}"
        ):
            OPS.single_layer_kv_transfer(None, None, [0], D2H, fmt)


@pytest.mark.parametrize(
    ("fmt", "sizes", "lacking"),
    [(fmt, {}, "block_size") for fmt in (0, 2)]
    + [(fmt, {}, "block_size and head_size") for fmt in (6, 7, 8, 10, 12, 15)]
    + [(fmt, {"block_size": 2}, "head_size") for fmt in (6, 7, 8, 10, 12, 15)]
    + [(fmt, {"head_size": 4}, "block_size") for fmt in (6, 7, 8, 10, 12, 15)]
    + [(13, {"block_stride_elems": 64}, "block_size")],
)
def test_with_addresses_what_a_format_lacks_is_said(fmt: int, sizes: dict[str, int], lacking: str) -> None:
    case = Case()
    kv, pages = an_object(fmt, case, 2), build(fmt, case)
    match = f"multi_layer_kv_transfer: .*{kv_format(fmt).name}.* needs {lacking}, got 0$"
    for way in (H2D, D2H):
        with refused(LayoutError, match, kv, pages):
            call(fmt, case, kv, addresses(pages), [0, 1], way, **sizes)


def test_planes_of_unknown_width_are_not_taken_by_address() -> None:
    case = Case()
    kv, pages = an_object(17, case, 2), build(17, case)
    sizes = {"block_size": case.bs, "head_size": case.hs}
    with refused(LayoutError, "NP.* widths .* unknown", kv, pages):
        call(17, case, kv, addresses(pages), [0], **sizes)


@pytest.mark.parametrize("by_address", [False, True])
@pytest.mark.parametrize(
    ("change", "error", "match"),
    [
        ({"slots": [0, 10]}, ValueError, "slot 10 of token 1: expected less than 10"),
        ({"slots": [0, 99, -1], "skip_prefix_n_tokens": 1}, ValueError, "slot 99 of token 1"),
        ({"slots": [0, 1, 2, 3, 4]}, ValueError, "5 slots: expected at most the 4 tokens"),
        ({"slots": [0.5]}, TypeError, "slots of torch.float32: expected integers"),
        ({"slots": torch.zeros(2, 2, dtype=torch.int64)}, TypeError, "expected one axis"),
        ({"skip_prefix_n_tokens": -1}, ValueError, "skip_prefix_n_tokens=-1"),
        ({"page_buffer_size": 0}, ValueError, "page_buffer_size=0"),
        ({"page_buffer_size": 11}, (ValueError, LayoutError), "page_buffer_size=11"),
        ({"block_size": 3}, (ValueError, LayoutError), "block_size=3"),
        ({"head_size": 3}, LayoutError, "head_size=3"),
        ({"block_stride_elems": 3}, (ValueError, LayoutError), "block_stride_elems=3"),
        ({"direction": 2}, ValueError, "TransferDirection"),
    ],
)
def test_an_argument_out_of_range_is_refused_before_anything_moves(
    change: dict[str, Any], error: Any, match: str, by_address: bool
) -> None:
    case = Case()
    for fmt in (2, 13):
        kv, pages = an_object(fmt, case, 4), build(fmt, case)
        given = {"slots": [0, 1], "block_size": 2, "head_size": 4, **change}
        operand = addresses(pages) if by_address else pages
        for way in (H2D, D2H):
            with refused(error, match, kv, pages):
                call(fmt, case, kv, operand, way=way, **given)


def test_addresses_that_cannot_be_pages_are_refused() -> None:
    case = Case()
    kv, pages = an_object(13, case, 2), build(13, case)
    good = addresses(pages)
    for bad, error, match in [
        (good[:2], LayoutError, "2 pointers: expected 3"),
        ([*good[:2], 0], ValueError, "address 0"),
        ([], LayoutError, "no tensors given"),
        ([*good[:2], pages[2]], TypeError, "expected a tensor"),
        (torch.tensor(good).double(), TypeError, "expected NL x"),
    ]:
        with refused(error, match, kv, pages):
            call(13, case, kv, bad, [0])
    with refused(ValueError, "host memory only", kv, pages):
        call(13, case, kv, good, [0], device="meta")
    one = an_object(4, case, 2)
    with refused(LayoutError, "it has no block axis", one, []):
        call(4, case, one, addresses(build(4, case)), [0], block_size=2, block_stride_elems=64)


def test_pages_or_objects_whose_elements_share_memory_are_not_written() -> None:
    case = Case()
    kv, pages = an_object(1, case, 4), build(1, case)
    for bad in (kv[:1].expand(2, -1, -1, -1), kv[:, :, :1].expand(-1, -1, 4, -1)):
        for slots in ([0, 1], [0, -1, 2]):
            with refused(LayoutError, "elements share memory", kv, pages):
                call(1, case, bad, pages, slots)
    alike = [page[:1].expand(2, *page.shape[1:]) for page in pages]  # K and V are one
    with refused(LayoutError, "slots share memory", kv, pages):
        call(1, case, kv, alike, [0], H2D)


def test_addresses_come_as_any_integers() -> None:
    case = Case()
    pages, want = build(13, case), an_object(13, case, 2)
    call(13, case, want, pages, [7, 0])
    for given in ([*np.array(addresses(pages))], torch.tensor(addresses(pages), dtype=torch.uint64)):
        kv = an_object(13, case, 2)
        call(13, case, kv, given, [7, 0])
        assert (raw(kv) == raw(want)).all()


def test_an_object_that_does_not_fit_the_pages_is_refused() -> None:
    case = Case()
    pages, good = build(2, case), an_object(2, case, 2)
    for bad, match in [
        (good[:, :2], "the pages have 3 layers of 8"),
        (good[..., :-1], "the pages have 3 layers of 8"),
        (good[:1], "expected 2 for K and V"),
        (good[0], "expected 2 for K and V"),
        (good.flatten(), "expected 2 for K and V"),
        (good.half(), "object of torch.float16: the pages have torch.float32"),
        (good.transpose(2, 3).contiguous().transpose(2, 3), "expected contiguous rows"),
        (good.to(torch.complex128), "elements of 16 bytes"),
    ]:
        with refused(LayoutError, match, bad, pages):
            call(2, case, bad, pages, [0, 1])
    with refused(TypeError, "expected a tensor, got int", good, pages):
        call(2, case, good.data_ptr(), pages, [0])


def test_pages_that_are_not_what_the_row_says_are_refused() -> None:
    case = Case()
    kv, pages = an_object(13, case, 2), build(13, case)
    for bad, error, match in [
        (pages[0], TypeError, "expected NL x"),
        ([[page] for page in pages], TypeError, "expected a tensor"),
        ([page[0] for page in pages], LayoutError, "is not of the form"),
        ([pages[0], pages[1], pages[2][:3]], LayoutError, "tensors differ: 10, 6"),
        ([pages[0], pages[1], pages[2].half()], LayoutError, "tensors differ"),
        ([pages[0], pages[1], pages[2][:1].expand(5, -1, -1, -1)], LayoutError, "slots share memory"),
        ([page[:0] for page in pages], LayoutError, "hold nothing"),
    ]:
        with refused(error, match, kv, pages):
            call(13, case, kv, bad, [0, 1])
    with pytest.raises(LayoutError, match="expected K and V, got 3 entries"):
        call(9, case, an_object(9, case, 2), [*build(9, case), []], [0])


def test_float8_pages_go_into_byte_objects_but_not_into_another_float8() -> None:
    case = Case(dtype=torch.float8_e4m3fn)
    kv, pages = an_object(13, case, 2), build(13, case)
    call(13, case, kv.view(torch.uint8), pages, [3, 1])
    assert (raw(kv) == content(13, pages)[:, :, [3, 1]]).all()
    with refused(LayoutError, "object of torch.float8", kv, pages):
        call(13, case, kv.view(torch.float8_e5m2), pages, [0])

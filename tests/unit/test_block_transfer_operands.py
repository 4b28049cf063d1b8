"""What the whole-block transfer is given: addresses, strided and inference tensors, ids named twice, and
what it refuses of them before anything moves. The laws themselves are in test_block_transfer_laws.py."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from lmcache.errors import LayoutError
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.ops_types import PageBufferShapeDesc, TransferDirection

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.torch

from lmcache.v1.platform.torch_ops import multi_layer_block_kv_transfer  # noqa: E402

H2D, D2H = TransferDirection.H2D, TransferDirection.D2H
NL, NB, BS, NH, HS = 2, 4, 2, 2, 4


def desc(kv: int = 1, nb: int = NB, nh: int = NH, hs: int = HS, **more: int) -> PageBufferShapeDesc:
    return PageBufferShapeDesc(kv, NL, nb, BS, nh, hs, 4, **more)


def layers(*shape: int, count: int = NL) -> list[Any]:
    return [torch.rand(shape) for _ in range(count)]


def addresses(tensors: list[Any]) -> list[int]:
    return [tensor.data_ptr() for tensor in tensors]


def chunk(slots: int = 8) -> Any:
    return torch.full((1, NL, slots, NH * HS), -1.0)


def run(
    fmt: int, paged: Any, objects: Any, ids: Any, way: int, what: Any = None, device: Any = "cpu"
) -> None:
    DeviceOps().multi_layer_block_kv_transfer(paged, objects, ids, device, way, what or desc(), 8, fmt, 0)


def test_the_op_says_what_it_takes_and_serves() -> None:
    assert multi_layer_block_kv_transfer.takes == {"tensors", "pointers"}
    why = {fmt: multi_layer_block_kv_transfer.serves(kv_format(fmt)) for fmt in (*range(19), 100)}
    assert {fmt for fmt, reason in why.items() if reason} == {4, 5, 100}


# -------------------------------------------------------------------------------------------------- addresses


def test_one_address_of_a_tensor_of_all_layers_needs_no_list() -> None:
    paged, obj = torch.rand(NB, NL, 2, BS, NH, HS), torch.zeros(2, NL, 8, NH * HS)
    run(0, paged.data_ptr(), [obj.data_ptr()], [3], D2H, desc(kv=2))
    assert torch.equal(obj[:, :, :BS], paged[3].transpose(0, 1).flatten(-2))


def test_planes_of_different_width_are_refused_by_address() -> None:
    with pytest.raises(
        LayoutError, match=r"multi_layer_block_kv_transfer .*NL_X_NP_X_NB_BS_ONE_HS.*pointers"
    ):
        run(17, [64] * 4, [64], [0], D2H, desc(nh=1))


@pytest.mark.parametrize(
    ("fmt", "what", "fault"),
    [
        (13, desc(kv=2), "shape_desc.kv_size=2: expected 1"),
        (3, desc(nh=2), "shape_desc.nh=2: expected 1"),
        (13, desc(hs=0), "shape_desc.hs=0"),
        (11, desc(hs=5), "shape_desc.hs=5: expected K and V of equal width"),
        (1, desc(kv=2, nb=0), "shape_desc.nb=0: where V begins"),
        (13, desc(block_stride_elems=15), "block_stride_elems=15: a block has 16"),
        (9, desc(kv=2), "2 pointers: expected 4 of nl=2"),
        (13, PageBufferShapeDesc(1, NL, NB, BS, NH, HS, 3), "element_size=3"),
    ],
)
def test_a_descriptor_that_addresses_cannot_be_read_with_is_refused(fmt: int, what: Any, fault: str) -> None:
    with pytest.raises(LayoutError, match=f"{kv_format(fmt).name}.*{fault}"):
        run(fmt, [64, 64], [64], [0], D2H, what)


def test_addresses_that_are_none_or_of_a_device_are_refused() -> None:
    paged, obj = layers(NB, BS, NH, HS), chunk()
    before = obj.clone()
    with pytest.raises(ValueError, match="pointer 0: expected a positive address"):
        run(13, [paged[0].data_ptr(), 0], [obj.data_ptr()], [0], D2H)
    with pytest.raises(ValueError, match="address 0"):
        run(13, addresses(paged), [obj.data_ptr(), 0], [0, 1, 2, 3, 0], D2H)
    with pytest.raises(ValueError, match="device meta: the baseline takes addresses of host memory only"):
        run(13, addresses(paged), [obj.data_ptr()], [0], D2H, device="meta")
    assert torch.equal(obj, before)


def test_both_sides_are_tensors_or_both_are_addresses() -> None:
    paged, obj = layers(NB, BS, NH, HS), chunk()
    with pytest.raises(TypeError, match="expected addresses as pages are, got Tensor"):
        run(13, addresses(paged), [obj], [0], D2H)
    with pytest.raises(TypeError, match="expected tensors, got int"):
        run(13, paged, [obj.data_ptr()], [0], D2H)


def test_ids_beside_addresses_are_bounded_by_the_blocks_that_were_said() -> None:
    paged, obj = layers(NB, BS, NH, HS), chunk()
    for ids, nb in (([2], 2), ([-1], 0)):
        with pytest.raises(ValueError, match=f"block id {ids[0]}: expected 0"):
            run(13, addresses(paged), [obj.data_ptr()], ids, D2H, desc(nb=nb))
    run(13, addresses(paged), [obj.data_ptr()], [3], D2H, desc(nb=0))  # nobody said how many
    assert torch.equal(obj[0, 1, :BS], paged[1][3].flatten(1))


@pytest.mark.parametrize("kind", [torch.int64, torch.uint64, None])
def test_addresses_come_as_any_integers(kind: Any) -> None:
    paged, obj, want = layers(NB, BS, NH, HS), chunk(), chunk()
    run(13, paged, [want], [3, 0], D2H)
    table = torch.tensor(addresses(paged), dtype=kind) if kind else [*np.array(addresses(paged))]
    run(13, table, [obj.data_ptr()], [3, 0], D2H)
    assert torch.equal(obj, want)


@pytest.mark.parametrize("fmt", [12, 13])
@pytest.mark.parametrize("ids", [[3, 1, 2, 0, 4], [0, 1, 2, 3, 4]], ids=["scattered", "consecutive"])
def test_bytes_move_right_wherever_both_sides_begin(fmt: int, ids: list[int]) -> None:
    nb, bs, nh, hs = 5, 2, 2, 16  # elements of 16 bytes would do, but for where they begin
    shape = (nb, nh, bs, hs) if fmt == 12 else (nb, bs, nh, hs)
    what = PageBufferShapeDesc(1, 1, nb, bs, nh, hs, 1)
    for ours, theirs in itertools.product((0, 1, 2, 4, 8), repeat=2):
        pages, back = (torch.randint(0, 256, (ours + nb * 64,), dtype=torch.uint8) for _ in range(2))
        obj = torch.zeros(theirs + nb * 64, dtype=torch.uint8)[theirs:].view(1, 1, nb * bs, nh * hs)
        source, target = pages[ours:].view(shape), back[ours:].view(shape)
        for way, tensor in ((D2H, source), (H2D, target)):
            DeviceOps().multi_layer_block_kv_transfer([tensor], [obj], ids, "cpu", way, what, 10, fmt, 0)
        want = source.transpose(1, 2) if fmt == 12 else source
        assert torch.equal(obj.view(nb, bs, nh, hs), want[ids])
        assert torch.equal(target, source)


# ------------------------------------------------------------------------------------------------- block ids


@pytest.mark.parametrize(
    "ids", [[0.0, 1.7], torch.tensor([0.0, 1.7]), "01", torch.tensor([[0, 1]]), [[0]], None, [None]], ids=str
)
def test_block_ids_that_are_no_integers_are_refused_not_cut_off(ids: Any) -> None:
    obj = chunk()
    with pytest.raises(
        TypeError, match=r"multi_layer_block_kv_transfer: block_ids=.*expected one axis of int"
    ):
        run(13, layers(NB, BS, NH, HS), [obj], ids, D2H)
    assert (obj == -1).all()


def test_of_a_block_that_is_written_twice_the_last_wins() -> None:
    ids = [1, 3, 1, 0, 1, 3]  # over two objects of four blocks
    for fmt, shape in ((13, (NB, BS, NH, HS)), (12, (NB, NH, BS, HS))):
        paged, objects = layers(*shape), [torch.rand(1, NL, 8, NH * HS) for _ in range(2)]
        want = [tensor.clone() for tensor in paged]
        for position, block in enumerate(ids):
            index, at = divmod(position, 4)
            for layer in range(NL):
                page = objects[index][0, layer, at * BS : (at + 1) * BS].view(BS, NH, HS)
                want[layer][block] = page if fmt == 13 else page.transpose(0, 1)
        run(fmt, paged, objects, ids, H2D)
        assert all(torch.equal(a, b) for a, b in zip(paged, want, strict=True))


def test_a_block_that_is_read_twice_is_there_twice() -> None:
    paged, obj = layers(NB, BS, NH, HS), chunk()
    run(13, paged, [obj], [2, 2, 0], D2H)
    assert torch.equal(obj[0, 0, :6], paged[0][[2, 2, 0]].reshape(6, -1))


# ---------------------------------------------------------------------------------------------------- tensors


@pytest.mark.parametrize(("fmt", "shape"), [(13, (NB, BS, NH, HS)), (12, (NB, NH, BS, HS))])
def test_an_object_may_lie_anyhow_in_memory(fmt: int, shape: tuple[int, ...]) -> None:
    paged = layers(*shape)
    tight = chunk()
    run(fmt, paged, [tight], [3, 0, 1], D2H)
    room = torch.full((2, 12, NL, NH * HS + 3), -1.0)
    views = [
        room[:1, :8, :, 1 : NH * HS + 1].permute(0, 2, 1, 3),  # slots outside layers, rows that start oddly
        torch.full((1, NL, NH * HS, 8), -1.0).transpose(2, 3),  # elements outside slots
    ]
    for view in views:
        run(fmt, paged, [view], [3, 0, 1], D2H)
        assert torch.equal(view, tight)
        back = [torch.zeros(shape) for _ in range(NL)]
        run(fmt, back, [view], [3, 0, 1], H2D)
        assert all(torch.equal(a[[3, 0, 1]], b[[3, 0, 1]]) for a, b in zip(back, paged, strict=True))
    assert (room[1] == -1).all()
    assert (room[:, 8:] == -1).all()


@pytest.mark.parametrize(
    "shared",
    [
        chunk()[:, :, :1].expand(-1, -1, 8, -1),
        chunk()[:, :1].expand(-1, NL, -1, -1),
        chunk()[..., :1].expand(-1, -1, -1, NH * HS),
    ],
)
def test_an_object_whose_elements_share_memory_is_read_but_not_written(shared: Any) -> None:
    paged, first = layers(NB, BS, NH, HS), chunk()
    with pytest.raises(LayoutError, match="elements share memory"):
        run(13, paged, [first, shared], [0, 1, 2, 3, 0, 1], D2H)
    assert (first == -1).all()
    run(13, paged, [shared], [1], H2D)
    assert all((tensor[1] == -1).all() for tensor in paged)


@pytest.mark.parametrize(
    ("fmt", "shape", "axis"),
    [
        (13, (NB, BS, NH, HS), 0),
        (12, (NB, NH, BS, HS), 2),
        (1, (2, NB, BS, NH, HS), 0),
        (2, (NB, 2, BS, NH, HS), 1),
    ],
)
def test_pages_that_share_memory_are_refused(fmt: int, shape: tuple[int, ...], axis: int) -> None:
    paged = [torch.zeros(shape).narrow(axis, 0, 1).expand(shape) for _ in range(NL)]
    kv = kv_format(fmt).kv_size
    with pytest.raises(LayoutError, match=f"{kv_format(fmt).name}.*share memory"):
        run(fmt, paged, [torch.rand(kv, NL, 8, NH * HS)], [0, 1], H2D, desc(kv=kv))
    assert not any(tensor.any() for tensor in paged)


def test_a_block_stride_that_the_tensors_do_not_have_is_refused() -> None:
    padded = [torch.rand(NB, BS * NH * HS + 4)[:, : BS * NH * HS].view(NB, BS, NH, HS) for _ in range(NL)]
    obj, want = chunk(), chunk()
    run(13, padded, [want], [3, 1], D2H)  # tensors say it themselves
    run(13, padded, [obj], [3, 1], D2H, desc(block_stride_elems=BS * NH * HS + 4))
    assert torch.equal(obj, want)
    with pytest.raises(LayoutError, match=r"shape_desc\.block_stride_elems=16: the tensors have 20"):
        run(13, padded, [obj], [3, 1], D2H, desc(block_stride_elems=16))
    run(13, [t[:1] for t in padded], [obj], [0], D2H, desc(nb=1, block_stride_elems=16))  # one block has none


def test_elements_that_no_integer_is_as_long_as_are_refused_by_name() -> None:
    paged = [torch.zeros(NB, BS, NH, HS, dtype=torch.complex128) for _ in range(NL)]
    what = PageBufferShapeDesc(1, NL, NB, BS, NH, HS, 16)
    with pytest.raises(LayoutError, match="multi_layer_block_kv_transfer: elements of 16 bytes"):
        run(13, paged, [chunk().to(torch.complex128)], [0], D2H, what)


@pytest.mark.parametrize("order", ["LBHNC", "LHBNC", "BHLNC"])
def test_tensors_made_in_inference_mode_are_served_outside_of_it(order: str) -> None:
    sizes = dict(zip("LBHNC", (NL, NB, NH, BS, HS), strict=True))
    with torch.inference_mode():
        memory = torch.rand([sizes[letter] for letter in order])
        paged = list(memory.permute([order.index(letter) for letter in "LBHNC"]))
        obj = chunk()
    want = torch.stack([page[[1, 3]].transpose(1, 2).reshape(4, -1) for page in paged])
    run(12, paged, [obj], [1, 3], D2H)
    assert torch.equal(obj[0, :, :4], want)
    run(12, paged, [obj + 1], [1, 3], H2D)
    assert torch.equal(paged[1][3].transpose(0, 1).reshape(2, -1), want[1, 2:] + 1)


def test_tensors_that_differ_are_refused_together() -> None:
    for other in (torch.rand(NB, BS, NH, HS).double(), torch.rand(NB + 1, BS, NH, HS)):
        with pytest.raises(LayoutError, match=r"NL_X_NB_BS_NH_CS.*tensors differ"):
            run(13, [torch.rand(NB, BS, NH, HS), other], [chunk()], [0], D2H)


def test_k_and_v_of_different_layers_are_refused() -> None:
    paged = [layers(NB, BS, NH, HS, count=2), layers(NB, BS, NH, HS, count=1)]
    obj = torch.zeros(2, NL, 8, NH * HS)
    with pytest.raises(LayoutError, match=r"TWO_X_NL_X_NB_BS_NH_HS.*K has 2 layers, V 1"):
        run(9, paged, [obj], [0], D2H, desc(kv=2))


@pytest.mark.parametrize(("fmt", "shape"), [(1, (4,)), (2, (NB, 2)), (3, (NB,)), (13, (NB, BS, NH, HS, 1))])
def test_a_tensor_of_another_rank_is_refused(fmt: int, shape: tuple[int, ...]) -> None:
    with pytest.raises(LayoutError, match=f"{kv_format(fmt).name}.*is not of the form"):
        run(fmt, [torch.rand(shape)] * NL, [chunk()], [0], D2H)


def test_a_page_that_must_be_taken_whole_is_refused_in_another_order() -> None:
    paged = [torch.rand(NB, HS, BS).transpose(1, 2) for _ in range(NL)]
    with pytest.raises(LayoutError, match=r"NL_X_NB_BSV_BSS.*one run"):
        run(14, paged, [torch.rand(1, NL, 8, HS)], [0], D2H, desc(nh=1))

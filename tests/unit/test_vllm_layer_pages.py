"""Which pages a vLLM layer has whose cache is a tuple of tensors, and which tuples are refused."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod
from typing import Any

import pytest

from lmcache.errors import LayoutError
from lmcache.integration.vllm.layer_pages import GroupLayout, PageTensors, page_tensors

BLOCK, BLOCKS, HEADS, SIZE = 16, 6, 2, 8
PAGE = BLOCK * HEADS * SIZE * 2
GROUP = GroupLayout("LBHNC", BLOCK, BLOCKS, mla=False)
LATENT = GROUP._replace(mla=True)
FORM = (BLOCKS, BLOCK, HEADS, SIZE)


@dataclass(frozen=True)
class Storage:
    _cdata: int


@dataclass
class FakeTensor:
    """Shape, strides and where it begins in which storage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...] = ()
    dtype: str = "torch.bfloat16"
    device: str = "cpu"
    storage: int = 0
    offset: int = 0

    def __post_init__(self) -> None:
        if not self.strides:
            self.strides = tuple(prod(self.shape[at + 1 :]) for at in range(len(self.shape)))
        self.storage = self.storage or id(self)

    def stride(self) -> tuple[int, ...]:
        return self.strides

    def element_size(self) -> int:
        return 2

    def data_ptr(self) -> int:
        raise AssertionError("a device need not tell its addresses")

    def storage_offset(self) -> int:
        return self.offset

    def untyped_storage(self) -> Storage:
        return Storage(self.storage)


class TensorTuple(tuple[Any, ...]):
    """As an engine has it that wants tuples to look like tensors."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self), *self[0].shape)

    def stride(self) -> tuple[int, ...]:
        return (0, *self[0].stride())

    def data_ptr(self) -> int:
        return 1


def tensor(*shape: int, **more: Any) -> Any:
    return FakeTensor(shape or FORM, **more)


def found(*layers: Any, group: GroupLayout = GROUP) -> PageTensors:
    return page_tensors({f"l{i}": layer for i, layer in enumerate(layers)}, names(layers), group)


def names(layers: tuple[Any, ...]) -> list[str]:
    return [f"l{i}" for i in range(len(layers))]


def pair(*shape: int, **more: Any) -> tuple[Any, Any]:
    return tensor(*shape, **more), tensor(*shape, **more)


# ------------------------------------------------------------------------------------------------ what is taken


def test_k_and_v_are_two_pages_of_one_layer_whose_name_stands_twice() -> None:
    one, other = pair(), pair()
    pages = found(one, other)
    assert all(a is b for a, b in zip(pages.tensors, (*one, *other), strict=True))
    assert pages.names == ("l0", "l0", "l1", "l1")
    layout = pages.layout("test")
    assert (layout.format, layout.planes, layout.num_layers) == ("NL_X_TWO_X_NB_BS_NH_HS", 2, 2)
    assert layout.page_bytes == (PAGE,) * 4
    assert (layout.block_size, layout.num_kv_heads, layout.head_size) == (BLOCK, HEADS, SIZE)


@pytest.mark.parametrize(
    "layer",
    [
        list(pair()),
        TensorTuple(pair()),
        (*pair(), None, None),
        pair(BLOCKS * BLOCK, HEADS, SIZE),
        pair((BLOCKS + 1) * BLOCK, HEADS, SIZE),
        pair(BLOCKS + 1, BLOCK, HEADS, SIZE),
    ],
    ids=[
        "list",
        "tuple that looks like a tensor",
        "places for scales",
        "slots",
        "spare slots",
        "spare block",
    ],
)
def test_every_form_of_a_pair_has_the_same_pages(layer: Any) -> None:
    plain, pages = found(pair()), found(layer)
    assert pages.layout("test") == plain.layout("test")
    assert [p.page_stride_bytes for p in pages.pages] == [PAGE, PAGE]


def test_blocks_of_a_kernel_that_are_smaller_are_taken_together() -> None:
    pages = found(pair(BLOCKS * 4, BLOCK // 4, HEADS, SIZE))
    assert [(p.num_blocks, p.page_bytes, p.block_size, p.split) for p in pages.pages] == [
        (6, PAGE, 16, 4)
    ] * 2


def test_halves_of_one_tensor_lie_apart_and_side_by_side() -> None:
    block = BLOCK * HEADS * SIZE
    apart = tuple(tensor(storage=1, offset=at * BLOCKS * block) for at in (0, 1))
    strides = (2 * block, HEADS * SIZE, SIZE, 1)
    beside = tuple(tensor(strides=strides, storage=1, offset=at * block) for at in (0, 1))
    assert found(apart).layout("test") == found(beside).layout("test")
    assert [p.page_stride_bytes for p in found(beside).pages] == [2 * PAGE] * 2


@pytest.mark.parametrize(
    ("layer", "row", "pages"),
    [
        ((tensor(BLOCKS, BLOCK, 64), tensor(BLOCKS, BLOCK, 8)), "NL_X_NP_X_NB_BS_ONE_HS", (2048, 256)),
        ((tensor(BLOCKS * BLOCK, 1, 64), tensor(BLOCKS * BLOCK, 8)), "NL_X_NP_X_NB_BS_ONE_HS", (2048, 256)),
        (
            tuple(tensor(BLOCKS, BLOCK, 1, width) for width in (64, 8, 16)),
            "NL_X_NP_X_NB_BS_ONE_HS",
            (2048, 256, 512),
        ),
        ((tensor(BLOCKS * BLOCK, 72), None, None, None), "NL_X_NB_BS_HS", (2304,)),
        ((tensor(BLOCKS, BLOCK, 1, 72),), "NL_X_NB_BS_HS", (2304,)),
    ],
    ids=["two planes", "slots", "three planes", "one of slots", "one"],
)
def test_a_latent_has_as_many_planes_as_its_engine_gives_it(
    layer: Any, row: str, pages: tuple[int, ...]
) -> None:
    layout = found(layer, layer, group=LATENT).layout("test")
    assert (layout.format, layout.page_bytes, layout.num_layers) == (row, pages * 2, 2)
    assert (layout.num_kv_heads, layout.head_size) == (1, sum(pages) // 32)


def test_layers_of_one_tensor_are_what_they_were() -> None:
    pages = found(tensor(BLOCKS, HEADS, BLOCK, 2 * SIZE), tensor(BLOCKS, HEADS, BLOCK, 2 * SIZE))
    layout = pages.layout("test")
    assert (layout.format, layout.page_bytes, layout.planes) == ("NL_X_NB_NH_BS_CS", (2 * PAGE,) * 2, 1)
    assert (pages.names, pages.order) == (("l0", "l1"), "LBHNC")


def test_no_layout_of_several_tensors_is_one_of_another_number() -> None:
    latents = [
        [tensor(BLOCKS, BLOCK, 8)],
        [(tensor(BLOCKS, BLOCK, 8),)],
        [(tensor(BLOCKS, BLOCK, 4), tensor(BLOCKS, BLOCK, 4))],
        [(tensor(BLOCKS, BLOCK, 2), tensor(BLOCKS, BLOCK, 6))],
        [(tensor(BLOCKS, BLOCK, 6), tensor(BLOCKS, BLOCK, 2))],
        [(tensor(BLOCKS, BLOCK, 4), tensor(BLOCKS, BLOCK, 4))] * 2,
        [tuple(tensor(BLOCKS, BLOCK, 4) for _ in range(4))],
    ]
    told = {
        (pages.layout("test").fingerprint(), pages.order)
        for pages in (found(*layers, group=LATENT) for layers in latents)
    }
    assert len(told) == len(latents)


# ---------------------------------------------------------------------------------------------- what is refused

K = tensor()
HOSTILE: dict[str, tuple[list[Any], str]] = {
    "nothing": ([None], "got NoneType: expected a tensor, or K and V as a tuple"),
    "a number": ([7], "got int: expected a tensor"),
    "an empty tuple": ([()], "an empty tuple: expected K and V"),
    "empty places": ([(None, None)], "an empty tuple: expected K and V"),
    "K alone": ([(K, None)], "1 tensor in a tuple: expected K and V"),
    "V alone": ([(None, K)], "entry 0 is NoneType: expected a tensor"),
    "three": ([(*pair(), tensor())], "3 tensors in a tuple: expected K and V; keep the cache in a type without"),
    "scales": ([(*pair(), tensor(1), tensor(1))], "4 tensors in a tuple: expected K and V"),
    "nested": ([(list(pair()), list(pair()))], "entry 0 is list: expected a tensor"),
    "sizes": (
        [(tensor(), tensor(BLOCKS, BLOCK, HEADS, 2 * SIZE))],
        "K is (6, 16, 2, 8) and V (6, 16, 2, 16): expected one shape",
    ),
    "dtypes": ([(tensor(), tensor(dtype="torch.float16"))], "dtype torch.float16, and torch.bfloat16 before it"),
    "devices": ([(tensor(), tensor(device="sim:1"))], "device sim:1, and cpu before it: expected one device"),
    "one axis": ([pair(64)], "a tensor of shape (64,): expected [blocks, slots, heads, size]"),
    "five axes": ([pair(BLOCKS, BLOCK, HEADS, 1, SIZE)], "expected [blocks, slots, heads, size]"),
    "too few blocks": ([pair(BLOCKS - 1, BLOCK, HEADS, SIZE)], "5 blocks of 16 slots: expected at least 6 of 16"),
    "heads outside slots": ([pair(BLOCKS, HEADS, BLOCK, SIZE)], "6 blocks of 2 slots: expected at least 6 of 16"),
    "odd blocks": ([pair(BLOCKS * 4, 5, HEADS, SIZE)], "24 blocks of 5 slots: expected at least 6 of 16"),
    "odd slots": ([pair(BLOCKS * BLOCK + 1, HEADS, SIZE)], "97 slots: expected whole blocks of 16"),
    "no elements": ([pair(BLOCKS, BLOCK, 0, SIZE)], "not one contiguous run"),
    "gaps": ([pair(strides=(1024, 64, 16, 2))], "not one contiguous run"),
    "another order": ([pair(strides=(256, 8, 128, 1))], "expected axes that lie as they are listed"),
    "padded slots": ([pair(BLOCKS * BLOCK, HEADS, SIZE, strides=(32, 8, 1))], "not one contiguous run"),
    "blocks that overlap": ([pair(strides=(128, 16, 8, 1))], "pages of 512 bytes overlap"),
    "one tensor twice": ([(K, K)], "two of its tensors share memory"),
    "views of one": ([(tensor(storage=1), tensor(storage=1, offset=7))], "two of its tensors share memory"),
    "a tensor among tuples": (
        [pair(), tensor()],
        "layer l1: a tensor, and of layer l0 of its group 2 tensors in a tuple: expected alike",
    ),
    "a tuple among tensors": ([tensor(), pair()], "layer l1: 2 tensors in a tuple, and of layer l0"),
    "layers of two types": ([pair(), pair(dtype="torch.float16")], "layer l1: dtype torch.float16"),
    "layers of two devices": ([pair(), pair(device="sim")], "layer l1: device sim"),
    "layers of two sizes": ([pair(), pair(BLOCKS, BLOCK, 2 * HEADS, SIZE)], "layers of one group differ"),
}  # fmt: skip


@pytest.mark.parametrize("what", HOSTILE)
def test_what_is_no_pair_of_k_and_v_is_refused_in_one_line(what: str) -> None:
    layers, said = HOSTILE[what]
    with pytest.raises(LayoutError) as refused:
        found(*layers).layout("test")
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)
    assert "layer" in str(refused.value)


LATENTS: dict[str, tuple[Any, str]] = {
    "several heads": ((tensor(), tensor()), "expected [blocks, slots, size]"),
    "blocks": ((tensor(BLOCKS, BLOCK, 8), tensor(BLOCKS - 1, BLOCK, 8)), "5 blocks of 16 slots"),
    "types": ((tensor(BLOCKS, BLOCK, 8), tensor(BLOCKS, BLOCK, 8, dtype="torch.uint8")), "dtype torch.uint8"),
    "scales": ((tensor(BLOCKS, BLOCK, 8), None, tensor(1), None), "entry 1 is NoneType"),
    "one axis": ((tensor(BLOCKS * BLOCK),), "expected [blocks, slots, size]"),
}


@pytest.mark.parametrize("what", LATENTS)
def test_planes_that_are_not_of_one_latent_are_refused_in_one_line(what: str) -> None:
    layer, said = LATENTS[what]
    with pytest.raises(LayoutError, match="KV cache of layer l0: ") as refused:
        found(layer, group=LATENT)
    assert said in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_layer_that_the_engine_did_not_register_is_named() -> None:
    with pytest.raises(LayoutError, match="layer l9: got NoneType"):
        page_tensors({"l0": pair()}, ["l0", "l9"], GROUP)

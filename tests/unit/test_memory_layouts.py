"""What a memory object's tensors are: the token axis of each format, where each tensor begins, the plain form."""

from __future__ import annotations

from math import prod
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.v1.memory.metadata import MemoryObjMetadata, itemsize_of, layout_of
from lmcache.v1.memory_management import MemoryFormat

F = MemoryFormat
TOKENS = 16
SHAPES = {
    F.KV_2LTD: (2, 3, TOKENS, 5),
    F.KV_T2D: (TOKENS, 2, 5),
    F.KV_2TD: (2, TOKENS, 5),
    F.KV_MLA_FMT: (1, 3, TOKENS, 5),
    F.EC_TD: (TOKENS, 5),
    F.HS_TD: (TOKENS, 5),
}
TYPES = ("uint8", "int16", "bfloat16", "float32", "int64", "float8_e4m3fn")


@pytest.mark.parametrize(("fmt", "shape"), SHAPES.items(), ids=lambda value: getattr(value, "name", None))
def test_every_format_counts_the_tokens_on_its_own_axis(fmt: MemoryFormat, shape: tuple[int, ...]) -> None:
    assert fmt.token_axis == fmt.token_dim() == shape.index(TOKENS)
    assert fmt.tokens(shape) == TOKENS
    assert layout_of(shape, "float16", fmt).nbytes == 2 * prod(shape)


@pytest.mark.parametrize("fmt", [F.UNDEFINED, F.BINARY, F.BINARY_BUFFER])
def test_bytes_and_the_undefined_have_no_tokens_and_any_shape(fmt: MemoryFormat) -> None:
    assert (fmt.token_axis, fmt.token_dim(), fmt.tokens((7,))) == (None, 0, 0)
    assert layout_of((7, 1, 2), "uint8", fmt).nbytes == 14


@pytest.mark.parametrize(
    ("fmt", "shape", "expected"),
    [
        (F.KV_2LTD, (2, 3, 4), "4 axes, 2LTD"),
        (F.KV_2LTD, (1, 3, 4, 5), "2 on the first axis"),
        (F.KV_MLA_FMT, (2, 3, 4, 5), "1 on the first axis"),
        (F.KV_T2D, (4, 2), "3 axes, T2D"),
        (F.KV_2TD, (3, 4, 5), "2 on the first axis"),
    ],
)
def test_a_shape_that_a_format_cannot_have_is_refused(
    fmt: MemoryFormat, shape: tuple[int, ...], expected: str
) -> None:
    with pytest.raises(ValueError, match=rf"memory format {fmt.name}: .*expected {expected}"):
        layout_of(shape, "float16", fmt)


@given(
    st.lists(
        st.tuples(st.lists(st.integers(1, 9), min_size=1, max_size=3), st.sampled_from(TYPES)), min_size=1
    )
)
def test_tensors_of_one_object_are_aligned_to_their_elements_and_never_overlap(found: list[Any]) -> None:
    layout = layout_of([shape for shape, _ in found], [dtype for _, dtype in found])
    at = 0
    for (shape, dtype), start, end in zip(found, layout.starts, layout.ends, strict=True):
        assert start % itemsize_of(dtype) == 0
        assert at <= start < at + itemsize_of(dtype), "no gap is larger than alignment asks for"
        assert end - start == prod(shape) * itemsize_of(dtype)
        at = end
    assert layout.nbytes == at


@given(st.sampled_from(sorted(SHAPES, key=lambda fmt: fmt.name)), st.sampled_from(TYPES), st.integers(1, 3))
def test_the_plain_form_says_the_whole_layout(fmt: MemoryFormat, dtype: str, count: int) -> None:
    metadata = MemoryObjMetadata(layout_of([SHAPES[fmt]] * count, dtype, fmt), 0, 0)
    assert MemoryObjMetadata.layout_from_dict(metadata.to_dict()) == metadata.layout


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({}, "memory format None"),
        ({"fmt": "KV_XYZ", "shapes": [[1]], "dtypes": ["uint8"]}, "expected one of UNDEFINED, KV_2LTD"),
        ({"fmt": "BINARY", "shapes": [], "dtypes": []}, "expected lists, one entry each"),
        ({"fmt": "BINARY", "shapes": [[1.5]], "dtypes": ["uint8"]}, "expected lists, one entry each"),
        ({"fmt": "BINARY", "shapes": [[True]], "dtypes": ["uint8"]}, "expected lists, one entry each"),
        ({"fmt": "BINARY", "shapes": [[1]], "dtypes": "uint8"}, "expected lists, one entry each"),
        ({"fmt": "BINARY", "shapes": [[1]], "dtypes": ["uint8", "uint8"]}, "1 shapes and 2 dtypes"),
        ({"fmt": "BINARY", "shapes": [[-1]], "dtypes": ["uint8"]}, "expected sizes of 1 or more"),
        ({"fmt": "BINARY", "shapes": [[1]], "dtypes": ["__class__"]}, "dtype '__class__': expected one of"),
    ],
)
def test_a_plain_form_that_says_no_layout_is_refused(found: dict[str, Any], expected: str) -> None:
    with pytest.raises(ValueError, match=expected):
        MemoryObjMetadata.layout_from_dict(found)


def test_what_was_written_may_be_said_late_but_must_fit() -> None:
    metadata = MemoryObjMetadata(layout_of((2, 16, 8), "float16"), 0, 0)
    assert metadata.fmt is F.UNDEFINED
    metadata.fmt = F.KV_2TD
    assert metadata.fmt.tokens(metadata.shape) == 16
    with pytest.raises(ValueError, match="KV_2LTD"):
        metadata.fmt = F.KV_2LTD
    assert metadata.fmt is F.KV_2TD

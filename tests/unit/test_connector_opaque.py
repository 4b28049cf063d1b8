"""The connector of opaque pages: whole blocks as bytes, and clear words for what is not whole."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.errors import LayoutError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.slot_cases import Case, build, content, gaps_of, zeroed  # noqa: E402
from lmcache.v1.gpu_connector.gpu_connectors import VLLMOpaquePagesConnector  # noqa: E402
from lmcache.v1.kv_layout import kv_format  # noqa: E402
from lmcache.v1.memory_management import AdHocMemoryAllocator, MemoryFormat  # noqa: E402

CASE = Case(nl=3, nb=6, bs=4, nh=2, hs=8)
FORMATS = [1, 2, 3, 6, 7, 12, 13, 15, 16, 17]


def connector_for(fmt: int, case: Case = CASE) -> VLLMOpaquePagesConnector:
    row = kv_format(fmt)
    heads, width = (1, 2 * case.hs + 3) if fmt == 17 else (1 if row.is_mla else case.nh, case.hs)
    meta = SimpleNamespace(
        kv_shape=(case.nl, 1, 256, heads, width // (2 if row.is_packed else 1)), use_mla=row.is_mla
    )
    return VLLMOpaquePagesConnector.from_metadata(meta, layout_hints={"engine_kv_format": fmt})


def an_object(connector: VLLMOpaquePagesConnector, tokens: int) -> Any:
    fmt = MemoryFormat.KV_MLA_FMT if connector.planes == 1 else MemoryFormat.KV_2LTD
    return AdHocMemoryAllocator().allocate(tuple(connector.get_shape(tokens)), torch.float32, fmt)


@pytest.mark.parametrize("fmt", FORMATS)
@given(data=st.data())
def test_blocks_come_back_to_where_the_slots_say_and_nowhere_else(fmt: int, data: Any) -> None:
    connector = connector_for(fmt)
    source = build(fmt, CASE)
    blocks = data.draw(st.permutations(range(CASE.nb)))
    padded = data.draw(st.sets(st.integers(0, CASE.nb - 1), max_size=2))
    slots = torch.tensor(
        [-1 if at in padded else block * 4 + i for at, block in enumerate(blocks) for i in range(4)]
    )
    first = data.draw(st.integers(0, CASE.nb - 1))
    last = data.draw(st.integers(first + 1, CASE.nb))
    cached = data.draw(st.integers(0, CASE.nb))
    obj = an_object(connector, (last - first) * 4)
    connector.batched_from_gpu([obj], [first * 4], [last * 4], kvcaches=source, slot_mapping=slots)
    assert obj.metadata.fmt is MemoryFormat.BINARY

    target, held = zeroed(source), content(fmt, source)
    expected = content(fmt, target)
    for at in range(max(first, cached), last):
        if at not in padded:
            own = slice(blocks[at] * 4, blocks[at] * 4 + 4)
            expected[:, :, own] = held[:, :, own]
    connector.batched_to_gpu(
        [obj], [first * 4], [last * 4],
        kvcaches=target, slot_mapping=slots, vllm_cached_tokens=cached * 4,
    )  # fmt: skip
    assert (content(fmt, target) == expected).all()


def test_padded_blocks_are_taken_without_what_lies_between_them() -> None:
    case = Case(nl=2, nb=4, bs=4, nh=2, hs=8, gaps=(0, 0, 8, 0, 0, 0))
    connector, source = connector_for(12, case), build(12, case)
    obj = an_object(connector, 16)
    connector.from_gpu(obj, 0, 16, kvcaches=source, slot_mapping=torch.arange(16))
    target = zeroed(source)
    connector.to_gpu(obj, 0, 16, kvcaches=target, slot_mapping=torch.arange(16))
    assert (content(12, target) == content(12, source)).all()
    assert gaps_of(target) == gaps_of(source)
    assert source[0].stride(0) > source[0][0].numel(), "blocks lie apart"


@pytest.mark.parametrize(
    ("start", "end", "slots", "more", "text"),
    [
        (2, 8, range(24), {}, r"start=2: expected a multiple of the block size 4"),
        (0, 7, range(24), {}, r"end=7: expected a multiple .*save_unfull_chunk: false"),
        (0, 8, range(24), {"vllm_cached_tokens": 3}, r"vllm_cached_tokens=3: expected a multiple"),
        (0, 8, range(1, 25), {}, r"slots of tokens 0 to 4: expected one whole block of 4"),
        (4, 8, [0, 1, 2, 3, 8, 9, -1, 11], {}, r"slots of tokens 4 to 8: expected one whole block"),
        (0, 28, range(24), {}, r"expected them within the 24 of slot_mapping"),
    ],
)
def test_what_is_no_whole_block_is_refused(start: int, end: int, slots: Any, more: Any, text: str) -> None:
    connector, source = connector_for(12), build(12, CASE)
    obj = an_object(connector, end - start)
    kwargs = {"kvcaches": source, "slot_mapping": torch.tensor(list(slots)), **more}
    if not more:
        with pytest.raises(LayoutError, match=text):
            connector.from_gpu(obj, start, end, **kwargs)
    obj.metadata.fmt = MemoryFormat.BINARY
    before = content(12, source)
    with pytest.raises(LayoutError, match=text):
        connector.to_gpu(obj, start, end, **kwargs)
    assert (content(12, source) == before).all()


def test_an_object_of_other_sizes_or_of_single_tokens_is_refused() -> None:
    connector, source = connector_for(12), build(12, CASE)
    kwargs = {"kvcaches": source, "slot_mapping": torch.arange(24)}
    with pytest.raises(LayoutError, match=r"memory object of 2\d+ bytes for 4 tokens|memory object of"):
        connector.from_gpu(an_object(connector, 8), 0, 4, **kwargs)
    with pytest.raises(LayoutError, match="format KV_2LTD: expected BINARY"):
        connector.to_gpu(an_object(connector, 4), 0, 4, **kwargs)
    with pytest.raises(ValueError, match="block 6: expected less than 6"):
        connector.from_gpu(an_object(connector, 4), 0, 4, kvcaches=source, slot_mapping=torch.arange(24, 28))
    with pytest.raises(LayoutError, match="kvcaches: expected them with the first call"):
        connector_for(12).from_gpu(an_object(connector, 4), 0, 4, slot_mapping=torch.arange(24))

"""Copies between an accelerator's pages and chunks in host memory, by torch, on tensors of the host."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.v1.multiprocess.transfer_context.pages import ChunkCopy, KVGroupPages, Span, copy_pages
from lmcache.v1.platform import _device_detect

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch


@pytest.mark.parametrize("direction", ["store", "load"])
def test_a_copy_waits_for_the_stream_it_is_queued_on_and_not_for_the_device(
    direction: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    waited: list[Any] = []

    def whole(device: Any = None) -> None:
        raise AssertionError("the whole device was waited for")

    monkeypatch.setattr(_device_detect, "synchronize_current_stream", waited.append)
    monkeypatch.setattr(_device_detect, "synchronize_device", whole)
    pages = torch.arange(32, dtype=torch.uint8).view(4, 8)
    before, chunk = pages.clone(), bytearray(range(100, 116))
    namespace: Any = SimpleNamespace(page_bytes=(8,), blocks_per_chunk=2)
    group = KVGroupPages(namespace, 4, [pages.data_ptr()], [8], device="foo:1", tensors=[pages])
    copy_pages(group, direction, [ChunkCopy(0, memoryview(chunk), [Span(0, 3, 1), Span(1, 1, 1)])])
    if direction == "store":
        assert bytes(chunk) == bytes(before[[3, 1]].flatten().tolist())
    else:
        assert pages[[3, 1]].flatten().tolist() == list(range(100, 116))
    assert waited == ["foo:1"]

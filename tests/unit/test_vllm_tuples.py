"""KV caches that are tuples, through a real server: all comes back, nothing else moves, and no layout meets another."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from helpers.server import RunningServer, running_server
from lmcache.errors import LayoutError
from lmcache.testing.engine import CHUNK

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.vllm_caches import NAMES, TUPLES, check_comes_back, check_no_crossing, described, making  # noqa: E402

LARGE = torch.zeros(40, 16, 2, 8)


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with running_server("--chunk-size", str(CHUNK)) as running:
        yield running


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
@pytest.mark.parametrize("form", TUPLES)
def test_what_was_stored_comes_back_into_zeroed_pages_and_nothing_else_moves(
    server: RunningServer, form: str, mode: str
) -> None:
    with making(server, "cpu", mode) as make:
        check_comes_back(make, form, 1000 + 100 * TUPLES.index(form) + len(mode))


@pytest.mark.parametrize("mode", ["engine_driven", "lmcache_driven"])
def test_no_layout_is_given_what_another_stored(server: RunningServer, mode: str) -> None:
    with making(server, "cpu", mode) as make:
        check_no_crossing(make, 2000 + len(mode))


def test_a_pair_on_a_device_is_asked_for_no_address() -> None:
    pair = tuple(torch.zeros(32, 16, 2, 8, device="meta", dtype=torch.bfloat16) for _ in "kv")
    group = described("pairs", dict.fromkeys(NAMES, pair))
    assert group.addresses == []
    assert group.strides == [512] * 4


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ((LARGE[:32], torch.zeros(32, 16, 2, 8, device="meta")), "device meta, and cpu before it"),
        ((LARGE[:32], torch.zeros(32, 16, 2, 8).half()), "dtype torch.float16"),
        ((LARGE[:32], LARGE[8:]), "share memory"),
        ((LARGE[:32],), "1 tensor in a tuple: expected K and V"),
    ],
)
def test_tensors_that_are_no_pair_are_refused_before_anything_is_sent(layer: Any, said: str) -> None:
    with pytest.raises(LayoutError, match=said) as refused:
        described("pairs", dict.fromkeys(NAMES, layer))
    assert NAMES[0] in str(refused.value)

"""Long copies on the host, though cheapest with the interpreter's lock, let other threads run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.gpu_connector.hostruns import HostRuns  # noqa: E402
from lmcache.v1.gpu_connector.slots import Slots  # noqa: E402
from lmcache.v1.kv_layout import kv_format  # noqa: E402
from lmcache.v1.platform.ops_types import TransferDirection  # noqa: E402
from lmcache.v1.utils.memcpy import copy_each  # noqa: E402

BLOCKS, PIECE, ROUNDS = 16, 32 << 10, 200
Copy = Callable[[], None]


@pytest.fixture(autouse=True)
def _no_turn_is_forced() -> Iterator[None]:
    """A thread that wants the lock waits until it is given back."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000)
    yield
    sys.setswitchinterval(before)


def slots() -> Copy:
    """Blocks at random of a chunk; many such are moved one after the other."""
    nested = [tuple(torch.zeros(BLOCKS, 16, 8, 128, dtype=torch.bfloat16) for _ in "kv") for _ in range(4)]
    obj = torch.zeros(2, 4, BLOCKS * 16, 8 * 128, dtype=torch.bfloat16)
    index = torch.arange(BLOCKS * 16).view(BLOCKS, 16).flip(0).flatten()
    runs, chosen = HostRuns(kv_format(16), nested), Slots(index, False)

    def copy() -> None:
        assert runs.move(obj, chosen, TransferDirection.D2H)

    return copy


def pieces() -> Copy:
    """Of pages, some at a time."""
    there, here = (torch.zeros(BLOCKS * PIECE, dtype=torch.uint8) for _ in range(2))
    offsets, sizes = range(0, BLOCKS * PIECE, PIECE), [PIECE] * BLOCKS

    def copy() -> None:
        start, begin = there.data_ptr(), here.data_ptr()
        copy_each([begin + at for at in offsets], [start + at for at in offsets], sizes)

    return copy


@pytest.mark.parametrize("made", [slots, pieces])
def test_another_thread_has_its_turn_while_copies_go_on(made: Callable[[], Copy]) -> None:
    begin, turn = threading.Event(), threading.Event()
    other = threading.Thread(target=lambda: (begin.wait(), turn.set()), daemon=True)
    other.start()
    copy = made()
    begin.set()
    had = False
    for _ in range(ROUNDS):
        copy()
        had = had or turn.is_set()
    other.join(20)
    assert had

"""Copies that threads share among them: all have ended when the call has, whichever of them failed."""

from __future__ import annotations

import threading
import time
from functools import partial

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.platform.torch_ops import _hostcopy  # noqa: E402

NBYTES = 1 << 30


@pytest.fixture(autouse=True)
def three(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_hostcopy, "_threads", lambda: 3)


@pytest.mark.parametrize("who", [(0,), (1,), (2,), (0, 1), (1, 2), (0, 1, 2)])
def test_nobody_copies_once_a_failed_call_is_over(who: tuple[int, ...]) -> None:
    """Each task runs in a thread of its own: they meet before any of them goes on."""
    met, over = threading.Barrier(3, timeout=20), threading.Event()
    ended: list[int] = []

    def task(number: int) -> None:
        met.wait()
        if number in who:
            raise ValueError(f"task {number}")
        time.sleep(0.2)  # the others have failed, and the call would be over
        assert not over.is_set()
        ended.append(number)

    with pytest.raises(ValueError, match="task"):
        _hostcopy.share([partial(task, number) for number in range(3)], NBYTES)
    over.set()
    assert sorted([*ended, *who]) == [0, 1, 2]

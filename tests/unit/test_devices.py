"""What the server does with the device sides of its sessions: which objects move where, and what a fence waits for."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.v1.multiprocess import device_side
from lmcache.v1.multiprocess.server.devices import Devices
from lmcache.v1.protocol import messages as m

EXPORT = m.DeviceExport(groups=[[b""]])


class Side:
    """A side that ends when it is told to."""

    def __init__(self, *arguments: Any) -> None:
        self.moves: list[Any] = []
        self.fences: list[Callable[[], None]] = []
        self.ended = self.closed = False

    def submit(self, move: Any) -> None:
        self.moves.append(move)

    def fence(self, passed: Callable[[], None]) -> None:
        self.fences.append(passed)

    def close(self) -> None:
        self.closed = True

    def join(self, seconds: float = 0.0) -> bool:
        return self.ended


@pytest.fixture
def sides(monkeypatch: pytest.MonkeyPatch) -> list[Side]:
    made: list[Side] = []

    def make(*arguments: Any) -> Side:
        made.append(Side())
        return made[-1]

    monkeypatch.setattr(device_side, "DeviceSide", make)
    return made


def devices(pinned: list[Any] | None = None) -> Devices:
    held: list[Any] = [] if pinned is None else pinned
    l1 = SimpleNamespace(pin_entries=held.extend, unpin_entries=lambda entries: held.clear())
    counter = SimpleNamespace(inc=lambda n: None)
    metrics = SimpleNamespace(device_loaded=counter)
    return Devices(None, l1, threading.Lock(), metrics, lambda keys: None)  # type: ignore[arg-type]


def test_each_group_of_a_share_goes_to_its_own_blocks(sides: list[Side]) -> None:
    pinned: list[Any] = []
    table = devices(pinned)
    table.open("s", 1, EXPORT, [], print)
    share = [SimpleNamespace(offset=offset) for offset in (10, 20, 30, 11, 21, 31)]
    load = m.DeviceLoad(session="s", lease=1, blocks=[[1, 2, 3], [4, 5, 6]], skip=[0, 2], event=b"")
    answers: list[m.Reply] = []
    table.load("s", load, share, 3, answers.append)  # type: ignore[arg-type]
    (move,) = sides[0].moves
    assert [(part.offsets, part.blocks, part.skip) for part in move.parts] == [
        ([10, 20, 30], [1, 2, 3], 0),
        ([11, 21, 31], [4, 5, 6], 2),
    ]
    assert (pinned, answers) == (share, [])
    move.done("")
    assert (pinned, answers) == ([], [m.Moved(count=6)])


@pytest.mark.parametrize("order", list(itertools.permutations(range(3))), ids=str)
def test_a_fence_waits_for_every_mapping_that_a_session_ever_had(
    sides: list[Side], order: tuple[int, ...]
) -> None:
    table = devices()
    for _ in range(3):
        table.open("s", 1, EXPORT, [], print)
    table.open("other", 1, EXPORT, [], print)
    answers: list[m.Reply] = []
    assert table.fence("s", answers.append) is None
    assert sides[3].fences == []
    for index in order:
        assert answers == []
        (passed,) = sides[index].fences
        passed()
    assert answers == [m.Ok()]


def test_a_fence_passes_at_once_where_nothing_moves(sides: list[Side]) -> None:
    table = devices()
    assert table.fence("nobody", print) == m.Ok()
    table.open("s", 1, EXPORT, [], print)
    table.drop("s")
    assert table.fence("s", print) is None, "its device may still be at work"
    sides[0].ended = True
    assert table.fence("s", print) == m.Ok()


def test_closing_waits_for_every_mapping(sides: list[Side], caplog: pytest.LogCaptureFixture) -> None:
    table = devices()
    for _ in range(3):
        table.open("s", 1, EXPORT, [], print)
    sides[1].ended = sides[2].ended = True  # and the first one never does
    table.close()
    assert [side.closed for side in sides] == [True, True, True]
    assert caplog.text.count("did not end its transfers in time") == 1

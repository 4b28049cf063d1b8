"""Recorded completions and events: nothing lost, nothing twice, in order, of one process."""

from __future__ import annotations

import logging
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest

import lmcache.logging
from lmcache.v1.platform import _device_detect
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps
from lmcache.v1.platform.torch_ops import completions, get_gpu_pci_bus_id

OPS = CpuDeviceOps()


@pytest.fixture(autouse=True)
def drained() -> Iterator[None]:
    OPS.drain_recorded_completions()
    OPS.drain_recorded_events()
    yield
    OPS.drain_recorded_completions()
    OPS.drain_recorded_events()


def test_what_is_recorded_is_drained_once_and_in_order() -> None:
    assert OPS.drain_recorded_completions() == []
    for number in range(3):
        OPS.record_completion_on_stream(0, "done", bytes([number]))
    assert OPS.drain_recorded_completions() == [("done", b"\0"), ("done", b"\1"), ("done", b"\2")]
    assert OPS.drain_recorded_completions() == []


def test_racing_threads_lose_nothing_and_see_nothing_twice() -> None:
    writers, each, seen, done = 6, 2000, [], threading.Event()
    begin = threading.Barrier(writers + 2)

    def write(writer: int) -> None:
        begin.wait(10)
        for number in range(each):
            OPS.record_completion_on_stream(0, str(writer), number.to_bytes(4, "big"))

    def drain() -> list[tuple[str, bytes]]:
        begin.wait(10)
        mine: list[tuple[str, bytes]] = []
        while not done.is_set():
            mine += OPS.drain_recorded_completions()
        return mine

    with ThreadPoolExecutor(writers + 2) as pool:
        drains = [pool.submit(drain) for _ in range(2)]
        for writing in [pool.submit(write, writer) for writer in range(writers)]:
            writing.result(30)
        done.set()
        parts = [future.result(30) for future in drains]
    rest = OPS.drain_recorded_completions()
    for part in (*parts, rest):
        seen += part
        for writer in range(writers):
            numbers = [payload for kind, payload in part if kind == str(writer)]
            assert numbers == sorted(numbers)
    assert len(seen) == writers * each
    assert len({*seen}) == len(seen)


@pytest.mark.parametrize(
    "arguments", [("0", "k", b""), (0, b"k", b""), (0, "k", "text"), (0, "k", bytearray()), (0, None, b"")]
)
def test_a_completion_of_other_types_is_refused_and_not_recorded(arguments: Any) -> None:
    with pytest.raises(TypeError):
        OPS.record_completion_on_stream(*arguments)
    assert OPS.drain_recorded_completions() == []


def test_an_event_has_the_time_of_its_record_and_keeps_what_was_said_then() -> None:
    texts, numbers = {"a": "b"}, {"n": 1}
    before = time.time()
    OPS.record_event_on_stream(0, "copied", "session", texts, numbers)
    after = time.time()
    texts["a"], numbers["n"] = "changed", 2
    [(kind, session, when, said, counted)] = OPS.drain_recorded_events()
    assert (kind, session, said, counted) == ("copied", "session", {"a": "b"}, {"n": 1})
    assert before <= when <= after
    assert OPS.drain_recorded_events() == []


@pytest.mark.parametrize(
    "arguments",
    [
        (0, 1, "s", {}, {}),
        (0, "t", None, {}, {}),
        (0, "t", "s", {"a": 1}, {}),
        (0, "t", "s", {1: "a"}, {}),
        (0, "t", "s", {}, {"n": 1.5}),
        (0, "t", "s", {}, {2: 1}),
        (None, "t", "s", {}, {}),
    ],
)
def test_an_event_of_other_types_is_refused_and_not_recorded(arguments: Any) -> None:
    with pytest.raises(TypeError):
        OPS.record_event_on_stream(*arguments)
    assert OPS.drain_recorded_events() == []


def test_events_that_nobody_drains_are_bounded_and_completions_are_not(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(lmcache.logging, "_said", set())
    monkeypatch.setattr(completions, "_events", completions._Queue("recorded events", 4))
    with caplog.at_level(logging.WARNING, "lmcache"):
        for number in range(7):
            OPS.record_event_on_stream(0, str(number), "s", {}, {})
            OPS.record_completion_on_stream(0, str(number), b"")
    assert [event[0] for event in OPS.drain_recorded_events()] == ["3", "4", "5", "6"]
    assert len(OPS.drain_recorded_completions()) == 7
    assert caplog.messages == ["recorded events: nobody drains them; the oldest are dropped"]
    OPS.record_event_on_stream(0, "after", "s", {}, {})
    assert [event[0] for event in OPS.drain_recorded_events()] == ["after"]
    assert completions._MAX_EVENTS == 65_536  # as the contract says


def test_a_forked_process_begins_with_none() -> None:
    code = """
import os, sys
from lmcache.v1.platform.torch_ops import drain_recorded_completions as drain
from lmcache.v1.platform.torch_ops import record_completion_on_stream as record
record(0, "parent", b"")
child = os.fork()
if not child:
    empty = drain() == []
    record(0, "child", b"")
    os._exit(0 if empty and drain() == [("child", b"")] else 1)
assert os.waitpid(child, 0)[1] == 0
assert drain() == [("parent", b"")]
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# --- device info -------------------------------------------------------------------------------------------


def select(monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
    monkeypatch.setattr(_device_detect, "selected", lambda: SimpleNamespace(torch_dev=module))


def test_the_bus_id_is_in_upper_case_with_its_domain(monkeypatch: pytest.MonkeyPatch) -> None:
    places = [(0, 0x0B, 0), (1, 0xFF, 0x1F)]
    names = ("pci_domain_id", "pci_bus_id", "pci_device_id")
    select(
        monkeypatch,
        SimpleNamespace(
            device_count=lambda: 2,
            get_device_properties=lambda i: SimpleNamespace(**dict(zip(names, places[i], strict=True))),
        ),
    )
    assert get_gpu_pci_bus_id() == "0000:0B:00.0"
    assert OPS.get_gpu_pci_bus_id(1) == "0001:FF:1F.0"
    with pytest.raises(ValueError, match="device_id=2: there are 2 devices"):
        get_gpu_pci_bus_id(2)
    with pytest.raises(ValueError, match="device_id=-1"):
        get_gpu_pci_bus_id(-1)


@pytest.mark.parametrize(
    "module", [None, SimpleNamespace(), SimpleNamespace(get_device_properties=lambda i: SimpleNamespace())]
)
def test_a_bus_id_that_is_not_known_is_none(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    select(monkeypatch, module)
    assert get_gpu_pci_bus_id() is None


def test_the_host_has_no_bus_id() -> None:
    assert get_gpu_pci_bus_id(0) is None

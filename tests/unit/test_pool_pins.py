"""The pool is page-locked once per backend, and unlocked at the end."""

from __future__ import annotations

import logging
import threading
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest

from helpers.pinning import Pinner, PinningSpec
from lmcache.errors import LMCacheError
from lmcache.v1 import platform
from lmcache.v1.multiprocess.pool_pins import PoolPins, lock_mapping

ADDRESS, SIZE = 0x7000_0000, 1 << 20


class View:
    address, data_bytes = ADDRESS, SIZE


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> PoolPins:
    monkeypatch.setattr(Pinner, "pins", {})
    return PoolPins(View())  # type: ignore[arg-type]


def test_workers_of_one_backend_lock_the_whole_pool_once_until_the_end(pins: PoolPins) -> None:
    pins.pin(PinningSpec())
    pins.pin(PinningSpec())
    assert Pinner.pins == {ADDRESS: SIZE}
    pins.release()
    assert Pinner.pins == {}
    pins.release()


def test_a_backend_that_cannot_lock_says_so_once_and_costs_nothing_else(
    pins: PoolPins, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Pinner, "works", False)
    with caplog.at_level(logging.WARNING):
        pins.pin(PinningSpec())
        pins.pin(PinningSpec())
    (record,) = caplog.records
    assert "foo: the pool's 1048576 bytes cannot be page-locked" in record.getMessage()
    pins.release()


def test_a_device_that_locks_nothing_is_not_asked_and_nothing_is_said(
    pins: PoolPins, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(PinningSpec):
        pin_memory_backend: Any = None

    pins.pin(Plain())
    assert not caplog.records


class Mapping:
    """A worker's view of a pool; what it was when it went."""

    address, data_bytes = ADDRESS, SIZE


class Device(NamedTuple):
    """What is read of a torch.device."""

    type: str
    index: int | None = None


def lock(view: Mapping, kind: str) -> threading.Thread | None:
    thread = lock_mapping(view, Device(kind))  # type: ignore[arg-type]
    if thread is not None:
        thread.join(10)
        assert not thread.is_alive()
    return thread


@pytest.fixture
def spec(pins: PoolPins, monkeypatch: pytest.MonkeyPatch) -> PinningSpec:
    """The one of devices of type foo; others have none."""
    one = PinningSpec()
    monkeypatch.setattr(platform, "get_device_spec", {"foo": one}.get)
    return one


def test_a_workers_mapping_is_locked_for_as_long_as_anybody_has_it(spec: PinningSpec) -> None:
    view: Mapping | None = Mapping()
    assert lock(view, "foo") is not None  # type: ignore[arg-type]
    assert Pinner.pins == {ADDRESS: SIZE}
    copying = view
    view = None
    assert Pinner.pins == {ADDRESS: SIZE}
    del copying
    assert Pinner.pins == {}


def test_a_start_does_not_wait_for_the_lock(spec: PinningSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, answer = threading.Event(), threading.Event()

    def slow(*_: Any) -> bool:
        asked.set()
        return answer.wait(10)

    monkeypatch.setattr(Pinner, "pin_memory", slow)
    thread = lock_mapping(Mapping(), Device("foo"))  # type: ignore[arg-type]
    assert thread is not None
    assert asked.wait(10)
    assert thread.is_alive()
    answer.set()
    thread.join(10)


def test_a_worker_locks_nothing_for_the_host_or_for_a_device_that_nobody_serves(spec: PinningSpec) -> None:
    assert lock(Mapping(), "cpu") is None
    lock(Mapping(), "bar")
    assert Pinner.pins == {}


def test_the_thread_locks_for_the_workers_own_device(
    spec: PinningSpec, monkeypatch: pytest.MonkeyPatch
) -> None:
    chosen = []
    module = SimpleNamespace(set_device=chosen.append)
    monkeypatch.setattr(spec, "_get_torch_module", lambda: module)
    view = Mapping()
    thread = lock_mapping(view, Device("foo", 3))  # type: ignore[arg-type]
    assert thread is not None
    thread.join(10)
    assert chosen == [Device("foo", 3)]
    assert Pinner.pins == {ADDRESS: SIZE}


def test_a_device_that_breaks_while_it_locks_costs_a_line(
    spec: PinningSpec, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(kind: str) -> PinningSpec:
        raise LMCacheError("two backends serve it")

    monkeypatch.setattr(platform, "get_device_spec", broken)
    for _ in range(2):
        lock(Mapping(), "baz")
    (record,) = caplog.records
    assert "the pool is not page-locked: two backends serve it" in record.getMessage()

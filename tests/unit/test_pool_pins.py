"""The pool is page-locked once per backend, and unlocked at the end."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from lmcache.v1.multiprocess.pool_pins import PoolPins
from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend

ADDRESS, SIZE = 0x7000_0000, 1 << 20


class View:
    address, data_bytes = ADDRESS, SIZE


class Backend(PinMemoryBackend):
    held: dict[int, int] = {}  # noqa: RUF012
    works = True

    @property
    def is_pin_supported(self) -> bool:
        return True

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        assert ptr not in self.held, "locked twice"
        if self.works:
            self.held[ptr] = size
        return self.works

    def unpin_memory(self, ptr: int) -> bool:
        return self.held.pop(ptr, None) is not None


class Spec(DeviceSpec):
    device_type = backend_name = "foo"
    pin_memory_backend = Backend


@pytest.fixture
def pins(monkeypatch: pytest.MonkeyPatch) -> PoolPins:
    monkeypatch.setattr(Backend, "held", {})
    return PoolPins(View())  # type: ignore[arg-type]


def test_workers_of_one_backend_lock_the_whole_pool_once_until_the_end(pins: PoolPins) -> None:
    pins.pin(Spec())
    pins.pin(Spec())
    assert Backend.held == {ADDRESS: SIZE}
    pins.release()
    assert Backend.held == {}
    pins.release()


def test_a_backend_that_cannot_lock_says_so_once_and_costs_nothing_else(
    pins: PoolPins, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(Backend, "works", False)
    with caplog.at_level(logging.WARNING):
        pins.pin(Spec())
        pins.pin(Spec())
    (record,) = caplog.records
    assert "foo: the pool's 1048576 bytes cannot be page-locked" in record.getMessage()
    pins.release()


def test_a_device_that_locks_nothing_is_not_asked_and_nothing_is_said(
    pins: PoolPins, caplog: pytest.LogCaptureFixture
) -> None:
    class Plain(Spec):
        pin_memory_backend: Any = None

    pins.pin(Plain())
    assert not caplog.records

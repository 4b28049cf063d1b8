"""A device backend that page-locks memory, and remembers which."""

from __future__ import annotations

from lmcache.v1.platform.base.device_spec import DeviceSpec
from lmcache.v1.platform.base.pin_memory import PinMemoryBackend


class Pinner(PinMemoryBackend):
    """``pins``: address and size of what is locked; a test sets one of its own."""

    pins: dict[int, int] = {}  # noqa: RUF012
    works = True

    @property
    def is_pin_supported(self) -> bool:
        return True

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        assert ptr not in self.pins, "locked twice"
        if self.works:
            self.pins[ptr] = size
        return self.works

    def unpin_memory(self, ptr: int) -> bool:
        return self.pins.pop(ptr, None) is not None


class PinningSpec(DeviceSpec):
    device_type = backend_name = "foo"
    pin_memory_backend = Pinner

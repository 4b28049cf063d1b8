"""Page-locking of host memory, so that a device can copy to and from it at full speed."""

from __future__ import annotations

__all__ = ["PinMemoryBackend"]


class PinMemoryBackend:
    """The base class pins nothing and says so. Methods answer with False instead of raising.

    Pinning only speeds staging up: a caller that gets False goes on with pageable memory, or refuses.
    """

    @property
    def is_pin_supported(self) -> bool:
        """Whether :meth:`pin_memory` can succeed on this host."""
        return False

    def pin_memory(self, ptr: int, size: int, flags: int = 0) -> bool:
        """Page-lock ``size`` bytes at host address ``ptr``; ``flags`` are those of ``cudaHostRegister``."""
        return False

    def unpin_memory(self, ptr: int) -> bool:
        """Undo :meth:`pin_memory` for the same address."""
        return False

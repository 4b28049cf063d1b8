"""Where the bytes of memory objects are: arenas over host pages, over what a device's ops allocate, over tensors."""

from __future__ import annotations

import ctypes
import weakref
from collections.abc import Callable
from functools import lru_cache
from typing import Any

__all__ = ["Arena", "buffer_arena", "host_arena", "pinned_arena", "tensor_arena"]

# (huge pages, a NUMA node): which pair of a device's ops gives and takes such memory back.
_OPS = {
    (False, False): "pinned",
    (False, True): "pinned_numa",
    (True, False): "hugepage_pinned",
    (True, True): "hugepage_pinned_numa",
}


class Arena:
    """``size`` bytes at ``address``, or in a tensor of a device that has no addresses here (then it is 0).

    The memory goes when :meth:`close` is called or nobody has the arena any more.
    """

    def __init__(
        self,
        size: int,
        address: int,
        release: Callable[[], object] | None = None,
        tensor: Any = None,
        keeps: Any = None,
    ) -> None:
        """
        Args:
            size: Bytes.
            address: Of the first byte.
            release: Gives the memory back; called once.
            tensor: A flat tensor of bytes, where there is no address.
            keeps: Whatever must live as long as the arena.
        """
        self.size = size
        self.address = address
        self.tensor = tensor
        self._keeps = keeps
        self._finalizer = weakref.finalize(self, release) if release else None
        if self._finalizer is not None:
            self._finalizer.atexit = False  # at the end of the process other threads may still copy

    def window(self, offset: int, nbytes: int, holder: Any) -> Any:
        """A buffer over bytes of the arena. It keeps ``holder`` alive, and so does every view of it.

        Raises:
            ValueError: The arena is on a device.
        """
        if not self.address:
            raise ValueError(
                f"memory of device {self.tensor.device}: the CPU cannot view its bytes; copy the tensor"
            )
        found = _bytes_type(nbytes).from_address(self.address + offset)
        found.holder = holder
        return found

    def close(self) -> None:
        """Give the memory back. Nothing may use it any more. Closing twice is allowed."""
        if self._finalizer is not None:
            self._finalizer()
        self._keeps = self.tensor = None
        self.address = 0


@lru_cache(maxsize=256)  # making a type takes longer than allocating the memory
def _bytes_type(nbytes: int) -> Any:
    return ctypes.c_uint8 * nbytes


def buffer_arena(nbytes: int) -> Arena:
    """Zeroed memory of Python's own, for one object."""
    buffer = _bytes_type(nbytes)()
    return Arena(nbytes, ctypes.addressof(buffer), keeps=buffer)


def host_arena(
    size: int, numa_node: int | None = None, before_release: Callable[[], object] | None = None
) -> Arena:
    """Pages of the host, not page-locked and not there before they are touched.

    Args:
        size: Bytes.
        numa_node: Ask for memory of this node.
        before_release: Called once, while the pages are still there.

    Raises:
        MemoryError: There are not enough.
    """
    from lmcache.v1.platform.torch_ops.host_pages import address_of, map_pages

    memory = map_pages("host_arena", size, node=-1 if numa_node is None else numa_node)

    def release() -> None:
        if before_release is not None:
            before_release()
        memory.close()

    return Arena(size, address_of(memory), release)


def pinned_arena(
    size: int, hugepages: bool = False, numa_node: int | None = None, device_id: int = 0
) -> Arena:
    """Host memory from the selected backend's ops, page-locked as far as that can.

    Huge pages, nodes and pinning are granted where the host and the backend grant them; what is not is logged once.

    Raises:
        MemoryError: There is not enough.
        DeviceError: The backend that was asked for cannot be delivered.
    """
    kind = _OPS[hugepages, numa_node is not None]
    ops = _host_ops(f"alloc_{kind}_ptr")
    address = int(getattr(ops, f"alloc_{kind}_ptr")(size, device_id if numa_node is None else numa_node))
    free = getattr(ops, f"free_{kind}_ptr")
    return Arena(size, address, lambda: free(address))


def tensor_arena(tensor: Any) -> Arena:
    """A flat, tight tensor of one-byte elements, on any device.

    Raises:
        ValueError: It is something else.
    """
    from lmcache.v1.platform.host_tensors import is_host

    if tensor.dim() != 1 or tensor.element_size() != 1 or not tensor.is_contiguous():
        raise ValueError(
            f"arena of a {tensor.dtype} tensor of shape {tuple(tensor.shape)}: expected one contiguous axis of "
            "uint8; make it with torch.empty(size, dtype=torch.uint8)"
        )
    size = int(tensor.numel())
    if is_host(tensor):
        return Arena(size, int(tensor.data_ptr()), keeps=tensor)
    return Arena(size, 0, tensor=tensor)


def _host_ops(name: str) -> Any:
    """The selected backend's ops, or the baseline where torch is absent or the backend lacks the op."""
    from lmcache.v1.platform import resolve_device_ops, torch_ops
    from lmcache.v1.platform._selection import import_torch

    if import_torch() is None:
        return torch_ops
    ops = resolve_device_ops()
    return ops if hasattr(ops, name) else torch_ops

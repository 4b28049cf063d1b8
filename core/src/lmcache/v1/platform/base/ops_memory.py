"""Ops on memory as such, as members of ``DeviceOps``: copies, views, host memory, where a device sits."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.op import op

if TYPE_CHECKING:
    import torch

__all__ = ["MemoryOps"]


class MemoryOps:
    """Allocators give the address of zeroed, page-aligned host memory. Each has a partner that frees it.

    Pinning, hugepages and NUMA nodes are wishes: the baseline grants what the host and the selected backend
    grant, and logs once what it does not and why. Allocators raise ValueError for a size below 1 or a bad name,
    MemoryError where the memory cannot be had. What frees raises ValueError, and frees nothing, for an address
    that its partner did not give or that is free already, and for a size or name that is not the one asked for.
    All are thread-safe. Free only what nothing uses any more, copies on a stream included.
    """

    @op
    def lmcache_memcpy_async(
        self,
        dest: Any,
        src: Any,
        nbytes: int,
        direction: int,
        host_buffer_offset: int,
        host_buffer_alignments: int,
    ) -> None:
        """Copy bytes between the host and the device, in the order of the current stream.

        Args:
            dest: Where to: a contiguous tensor, or an address if ``operand_kinds`` has pointers. The copy
                begins at its start.
            src: Where from, of the same kind as ``dest``.
            nbytes: How many bytes, 0 or more.
            direction: H2D (0) or D2H (1).
            host_buffer_offset: Where the host's side of the copy begins in the buffer that holds it; the
                address has it in it already.
            host_buffer_alignments: A power of two. Where host memory is pinned piece by piece, a backend
                splits the copy wherever an offset is a multiple of this. The baseline need not.

        Raises:
            TypeError: One is a tensor and the other an address, or neither.
            ValueError: Sizes are out of range, the tensors overlap or have gaps.
            DeviceError: Addresses, and the op does not take them on this device.
        """

    @op
    def batched_memcpy(self, src: Sequence[int], dst: Sequence[int], sizes: Sequence[int]) -> None:
        """Copy between host addresses, one copy after the other; done when the call returns.

        Args:
            src: Addresses to read.
            dst: Addresses to write, as many. The two ranges of one copy may overlap.
            sizes: Bytes of each copy, 0 or more.

        Raises:
            ValueError: The lengths differ, a size is negative, or an address of bytes is not positive.
        """

    @op
    def tensor_from_ptr(
        self, ptr: int, shape: Sequence[int], dtype: torch.dtype, device: Any
    ) -> torch.Tensor:
        """View memory as a tight tensor; never a copy. It owns nothing: the memory must outlive it.

        Args:
            ptr: Address of the first element.
            shape: Sizes, in elements.
            dtype: Element type.
            device: Where the memory lies; the baseline serves the CPU only.

        Raises:
            ValueError: A device that is not served, no address, or a negative size.
        """

    @op
    def alloc_pinned_ptr(self, size: int, device_id: int = 0) -> int:
        """Host memory, page-locked for the device.

        Args:
            size: Bytes.
            device_id: For backends that lock memory for one device; the baseline locks for all.
        """

    @op
    def free_pinned_ptr(self, ptr: int) -> None:
        """Free ``ptr`` of ``alloc_pinned_ptr``."""

    @op
    def alloc_pinned_numa_ptr(self, size: int, numa_id: int = 0) -> int:
        """Host memory of one NUMA node, page-locked for the device.

        Args:
            size: Bytes.
            numa_id: The node; a negative one leaves it to the kernel.
        """

    @op
    def free_pinned_numa_ptr(self, ptr: int, size: int | None = None) -> None:
        """Free ``ptr`` of ``alloc_pinned_numa_ptr``; ``size``, if not 0, is checked."""

    @op
    def alloc_hugepage_pinned_ptr(self, size: int, device_id: int = 0) -> int:
        """Host memory in hugepages, page-locked for the device.

        Args:
            size: Bytes; whole hugepages are taken.
            device_id: For backends that lock memory for one device; the baseline locks for all.
        """

    @op
    def free_hugepage_pinned_ptr(self, ptr: int, size: int | None = None) -> None:
        """Free ``ptr`` of ``alloc_hugepage_pinned_ptr``; ``size``, if not 0, is checked."""

    @op
    def alloc_hugepage_pinned_numa_ptr(self, size: int, numa_id: int = 0) -> int:
        """Host memory in hugepages of one NUMA node, page-locked for the device.

        Args:
            size: Bytes; whole hugepages are taken.
            numa_id: The node; a negative one leaves it to the kernel.
        """

    @op
    def free_hugepage_pinned_numa_ptr(self, ptr: int, size: int | None = None) -> None:
        """Free ``ptr`` of ``alloc_hugepage_pinned_numa_ptr``; ``size``, if not 0, is checked."""

    @op
    def alloc_numa_ptr(self, size: int, numa_id: int = 0) -> int:
        """Host memory of one NUMA node, not page-locked.

        Args:
            size: Bytes.
            numa_id: The node; a negative one leaves it to the kernel.
        """

    @op
    def free_numa_ptr(self, ptr: int, size: int | None = None) -> None:
        """Free ``ptr`` of ``alloc_numa_ptr``; ``size``, if not 0, is checked."""

    @op
    def alloc_shm_pinned_ptr(self, size: int, name: str) -> int:
        """Host memory that other processes may map as ``/dev/shm/NAME``, page-locked for the device.

        The segment has mode 0600 and is reserved in full. One of that name that a dead process made with this
        op is replaced; any other is left alone. The name goes when the memory is freed or the process exits.

        Args:
            size: Bytes. The file is longer: its last page is the mark of this op.
            name: A file name; one leading slash, as of ``shm_open``, is dropped.

        Raises:
            ValueError: ``size`` is below 1, or ``name`` is no plain file name.
            DeviceError: A segment of that name is there, and nothing proves that it is stale.
            MemoryError: /dev/shm has not enough room.
        """

    @op
    def free_shm_pinned_ptr(self, ptr: int, size: int, name: str) -> None:
        """Free ``ptr`` of ``alloc_shm_pinned_ptr`` and remove the name; other mappings stay valid.

        Args:
            ptr: The address.
            size: Bytes asked for; 0 is not checked.
            name: The name asked for; an empty one is not checked.
        """

    @op
    def get_gpu_pci_bus_id(self, device_id: int = 0) -> str | None:
        """Where a device sits on the PCI bus, ``DDDD:BB:DD.0`` in upper-case hexadecimal; None if not known.

        Args:
            device_id: Index among the selected backend's devices.

        Raises:
            ValueError: There is no such device.
        """

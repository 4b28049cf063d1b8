"""The native module: the SYCL runtime's queues, USM and copies, and the kernel, as plain integers.

``queue`` is the address of an in-order ``sycl::queue``, as torch's ``sycl_queue`` has it. What the runtime refuses
raises the class of ``set_errors`` (RuntimeError until then), operands that do not fit the KV format its other class
(ValueError until then), numbers out of range ValueError: whatever is raised, nothing was queued. Calls that may block
release the GIL. All are thread-safe. Addresses may be given as signed numbers, as int64 tensors have them. Once SYCL
was used, a forked process is refused.

``Table`` is a list of integers, or ``(address, count)`` of int64 that the device can read and nobody else looks at.
"""

from collections.abc import Sequence
from typing import Literal, TypeAlias

Table: TypeAlias = Sequence[int] | tuple[int, int]
Kind: TypeAlias = Literal["host", "device", "shared"]

LMCACHE_NATIVE_ABI: int
SYCL_MAJOR: int

def set_errors(device: type[Exception], layout: type[Exception]) -> None: ...
def devices() -> list[str]: ...
def queue_create(device: int = 0, in_order: bool = True) -> int: ...
def queue_destroy(queue: int) -> None:
    """Wait for it, then end it."""

def queue_wait(queue: int) -> None: ...
def queue_is_idle(queue: int) -> bool: ...
def queue_device(queue: int) -> str: ...
def usm_alloc(queue: int, bytes: int, kind: Kind) -> int:
    """Page-aligned memory of the queue's context; its contents are anything."""

def usm_free(address: int) -> None:
    """Once, and only what ``usm_alloc`` gave; its queue may be gone."""

def usm_kind(queue: int, address: int) -> str:
    """A ``Kind``, or "unknown" for memory that is not of the queue's context."""

def copy_async(queue: int, to: int, source: int, bytes: int) -> None: ...
def transfer(
    op: str,
    queue: int,
    format: int,
    direction: int,
    shape: Sequence[int],
    pages: Table,
    objects: Sequence[int],
    ids: Table,
    object_slots: int,
    skip: int = 0,
    by_slot: bool = False,
    token_major: bool = False,
    widths: Sequence[int] = (),
    plane: int = 0,
) -> None:
    """Move blocks, or slots of one object, between pages and objects.

    ``op`` is for messages; ``shape`` are the eight numbers of PageBufferShapeDesc; ``widths`` those of a layer's planes
    where each has its own, of which ``plane`` is moved.
    """

def record(queue: int, channel: int, kind: str, payload: bytes) -> None: ...
def drain(channel: int) -> list[tuple[str, bytes, float]]:
    """What queues have reached on channel 0 or 1, oldest first; with seconds since 1970."""

def mark(queue: int) -> int:
    """A number for the present end of the queue."""

def passed() -> list[int]:
    """Take the marks that their queues are past."""

def stall(queue: int, seconds: float) -> int:
    """Keep the queue busy until ``release`` of the answer, or for so long at most."""

def release(ticket: int) -> None: ...
def kernel_origin(queue: int) -> str:
    """Where the kernel came from: "ahead" where icpx compiled it, "spirv", "source", or "" before it is needed."""

def kernels_from(way: str) -> None:
    """For tests: kernels from now on are had one way only; "" is as always."""

def compile_spirv(queue: int) -> bytes: ...
def shipped_spirv() -> bytes: ...
def count_tables() -> int: ...

"""The native module: the driver's functions, and the kernels, as plain integers.

Addresses, sizes, streams, events and ordinals are ints. A stream is the driver's handle (torch's
``cuda_stream``); 0 is the default stream. ``device`` is an ordinal of this process; where it may be left out, -1
means the device of the thread's current context, or device 0 where there is none. The primary context is used,
as torch does, and what was current before a call is current after it.

``import`` touches no driver: the first call that needs one loads it. Every failure of the driver raises the class
of ``set_error_type`` (RuntimeError until then), with attributes ``code`` (the driver's number, 0 if it is not the
driver's) and ``call`` (the driver's function). Operands that do not fit the KV format raise ``layout`` of
``set_error_type`` (ValueError until then), numbers out of range ValueError, and other types TypeError: whatever is
raised, nothing was queued. Calls that may block release the GIL. All are thread-safe.

``Table`` is either an int, which is an address of int64 values in device memory, or the values themselves: a
sequence of ints, or a contiguous buffer of 64-bit integers (``array('q')``, numpy int64). Values travel with the
launch. Nobody looks into a table in device memory, so its ids are not checked: a kernel leaves alone what is out of
range.
"""

from collections.abc import Sequence
from typing import Any, TypeAlias

from typing_extensions import Buffer

Table: TypeAlias = int | Sequence[int] | Buffer
Integers: TypeAlias = Sequence[int] | Buffer

LMCACHE_NATIVE_ABI: int

#: Images that this build embeds, by kind: {"cuda": "sm_80 sm_90 ...", "rocm": ""}; empty: not built in.
IMAGES: dict[str, str]

#: The driver that the CUDA image needs, as ``driver_version`` counts: 13000 for nvcc 13.0. 0: no such image.
IMAGE_DRIVER_VERSION: int

#: Ids of the KV formats that block_transfer serves (all with blocks), slot_transfer serves (all that may be cut), and
#: execute_direct_copy_transfer serves.
BLOCK_FORMATS: tuple[int, ...]
SLOT_FORMATS: tuple[int, ...]
DIRECT_FORMATS: tuple[int, ...]

# ------------------------------------------------------------------------------------------------------- the driver
def use(kind: str) -> None:
    """Choose the driver of this process: "cuda" (which it is until told) or "rocm". It is not loaded yet.

    ValueError for another word; the error type if a call has loaded the other one already.
    """

def set_error_type(device: type[Exception], layout: type[Exception] | None = None) -> None: ...
def driver_path() -> str:
    """What was loaded: "libcuda.so.1", or the path of the HIP runtime that was in the process. Loads it."""

def driver_version() -> int:
    """As the driver counts: 13000 is CUDA 13.0. HIP: major * 10000000 + minor * 100000 + patch."""

def device_count() -> int:
    """0 where the driver is there and says that it has no device. No driver at all is an error."""

def device_info(ordinal: int) -> dict[str, Any]:
    """uuid (16 bytes), name, pci_bus_id ("0000:1B:00.0", upper case), capability (major, minor), arch ("sm_90",
    "gfx942"), total_memory, vmm, fd_handles, mem_ops, host_register, integrated (bools)."""

def current_device() -> int:
    """The ordinal of the thread's current context; -1 if there is none."""

# ----------------------------------------------------------------------------------------------------------- memory
def mem_alloc(device: int, nbytes: int) -> int: ...
def mem_free(device: int, ptr: int) -> None: ...
def mem_info(device: int) -> tuple[int, int]:
    """Bytes free, and in all."""

def address_range(ptr: int, device: int = -1) -> tuple[int, int]:
    """Base and size of the allocation that holds ``ptr``."""

def memset_async(ptr: int, value: int, nbytes: int, stream: int, device: int) -> None:
    """``value`` is a byte."""

def memcpy_async(dst: int, src: int, nbytes: int, stream: int, device: int) -> None:
    """Between any two addresses: host, this device, other devices."""

def memcpy_split_async(
    dst: int,
    src: int,
    nbytes: int,
    host_offset: int,
    alignment: int,
    direction: int,
    stream: int,
    device: int,
) -> None:
    """Likewise, cut wherever ``host_offset`` plus what is copied is a multiple of ``alignment``, a power of two.

    Memory is pinned by pages at least, so an ``alignment`` below 4096 cuts nothing. ``direction``: 0 H2D, 1 D2H.
    """

def memcpy_batch_async(dsts: Integers, srcs: Integers, sizes: Integers, stream: int, device: int) -> None:
    """As many copies, in no order among themselves. One call of the driver where ``batch_memcpy_native()`` and
    ``stream`` is not 0, else one each."""

def batch_memcpy_native() -> bool: ...
def host_register(ptr: int, nbytes: int, flags: int = 0, device: int = -1) -> None:
    """``flags`` as CUDA counts: 1 portable, 2 mapped, 4 I/O memory, 8 read only."""

def host_unregister(ptr: int, device: int = -1) -> None: ...
def host_alloc(nbytes: int, flags: int = 0, device: int = -1) -> int:
    """Page-locked. ``flags``: 1 portable, 2 mapped, 4 write combined."""

def host_free(ptr: int, device: int = -1) -> None: ...

# ------------------------------------------------------------------------------------------------ streams, events
def stream_create(device: int, priority: int = 0) -> int:
    """One that does not wait for the default stream. A lower number has priority."""

def stream_destroy(stream: int, device: int = -1) -> None: ...
def stream_synchronize(stream: int, device: int = -1) -> None: ...
def stream_query(stream: int, device: int = -1) -> bool:
    """Whether all work is done."""

def stream_wait_event(stream: int, event: int, device: int = -1) -> None: ...
def stream_priority_range(device: int) -> tuple[int, int]:
    """Least and greatest priority: (0, -5)."""

def event_create(device: int, interprocess: bool = False, timing: bool = False) -> int:
    """ValueError for both at once: the driver has no such event."""

def event_destroy(event: int, device: int = -1) -> None: ...
def event_record(event: int, stream: int, device: int = -1) -> None: ...
def event_query(event: int, device: int = -1) -> bool: ...
def event_synchronize(event: int, device: int = -1) -> None: ...
def event_elapsed_ms(start: int, end: int, device: int = -1) -> float: ...
def event_export(event: int, device: int = -1) -> bytes:
    """64 bytes."""

def event_open(device: int, handle: bytes) -> int: ...
def stream_write_u64(stream: int, address: int, value: int, device: int = -1) -> None: ...
def stream_wait_u64_geq(stream: int, address: int, value: int, device: int = -1) -> None:
    """The stream goes on once the word is ``value`` or later (a difference of less than 2**63)."""

# -------------------------------------------------------------------------------------------- memory of others
def ipc_export(ptr: int, device: int = -1) -> tuple[bytes, int, int]:
    """64 bytes for the allocation that holds ``ptr``, where ``ptr`` is in it, and the allocation's size."""

def ipc_open(device: int, handle: bytes) -> int:
    """The allocation's base in this process. The driver opens none of this process's own."""

def ipc_close(device: int, base: int) -> None: ...
def vmm_supported(device: int) -> bool:
    """Whether memory can be made that file descriptors share."""

def vmm_alloc(device: int, nbytes: int) -> int: ...
def vmm_export_fd(ptr: int, device: int = -1) -> tuple[int, int, int]:
    """A new descriptor (the caller closes it), the size of what it shares, and where ``ptr`` is in it."""

def vmm_import_fd(device: int, fd: int, nbytes: int) -> int:
    """Map ``nbytes``, the size that the exporter told. The caller still closes ``fd``."""

def vmm_free(device: int, ptr: int) -> None:
    """Of ``vmm_alloc`` and ``vmm_import_fd`` alike."""

# ------------------------------------------------------------------------------------------------------- completions
def record_completion_on_stream(stream: int, kind: str, payload: bytes, device: int = -1) -> None: ...
def drain_recorded_completions() -> list[tuple[str, bytes]]: ...
def record_event_on_stream(
    stream: int, type: str, session: str, texts: dict[str, str], numbers: dict[str, int], device: int = -1
) -> None:
    """Numbers are of 64 bits. The latest 65,536 events are kept."""

def drain_recorded_events() -> list[tuple[str, str, float, dict[str, str], dict[str, int]]]: ...
def dropped_events() -> int:
    """How many events were dropped because nobody drained them, since the module was loaded."""

# --------------------------------------------------------------------------------------------------------- transfers
def block_transfer(
    format: int,
    shape: Sequence[int],
    direction: int,
    device: int,
    stream: int,
    pages: Table,
    objects: Integers,
    ids: Table,
    object_slots: int,
    skip: int = 0,
    *,
    page_count: int = -1,
    id_count: int = -1,
    page_alignment: int = 0,
    plane: int = 0,
    widths: Sequence[int] = (),
) -> None:
    """``multi_layer_block_kv_transfer`` by addresses.

    Args:
        format: Id of the layout's row.
        shape: The eight numbers of ``PageBufferShapeDesc`` in their order.
        direction: 0 H2D (writes the pages), 1 D2H.
        pages: Addresses of the format's tensors in the order of ``lmc_layout_init``: at most 384, or a table in
            device memory.
        objects: Addresses of the objects: device memory, or page-locked host memory.
        ids: Block ids. Where the values are given: one out of range raises ValueError, and where ids are repeated
            in H2D the last one wins.
        object_slots: Slots per object, ``chunk_size``.
        skip: The first so many ids are left alone.
        page_count, id_count: How many a table in device memory has; not read for values.
        page_alignment: All addresses of a table of pages in device memory, or-ed together (or a power of two that
            divides them): copies are as wide as it allows. 0: they are as wide as an element.
        plane, widths: For a format whose planes have their own widths: which is meant, and the widths of all.
    """

def slot_transfer(
    format: int,
    shape: Sequence[int],
    direction: int,
    device: int,
    stream: int,
    pages: Table,
    object: int,
    slots: Table,
    object_slots: int,
    skip: int = 0,
    *,
    token_major: bool = False,
    page_count: int = -1,
    slot_count: int = -1,
    page_alignment: int = 0,
    plane: int = 0,
    widths: Sequence[int] = (),
) -> None:
    """The ops by slot mapping: token i of the one object goes to flat slot ``slots[i]``; negative ones, and those
    behind the last block, are left alone. ``token_major``: one layer, ``[slots, planes, row]``. ``object_slots``:
    tokens that the object has room for. ``shape.nb`` 0: slots have no end."""

def execute_object_group_transfer(
    direction: int,
    device: int,
    stream: int,
    host_alignment: int,
    groups: Sequence[Any],
    steps: Sequence[Any],
    phase_timing_enabled: bool = False,
    session_id: str = "",
) -> None:
    """The op: ``groups`` and ``steps`` are any objects with the attributes of ``KernelGroupSpec`` and ``BatchStep``
    (``shape_desc`` has the eight of ``PageBufferShapeDesc``). A group may have ``page_alignment``, too."""

def pop_completed_phase_timings() -> list[tuple[int, int, int, float, int, str, float, float]]:
    """(phase, direction, device, milliseconds, bytes, session, start, end) of what is done."""

def execute_direct_copy_transfer(
    direction: int,
    device: int,
    stream: int,
    host_alignment: int,
    groups: Sequence[Any],
    objects: Sequence[Any],
) -> None:
    """The op: objects with the attributes of ``DirectCopyGroupSpec`` and ``DirectCopyObject``."""

def direct_copy_format_supported(fmt: int) -> bool: ...
def copy_kernel(dst: int, src: int, nbytes: int, stream: int, device: int) -> None:
    """A copy by a kernel instead of a copy engine, of memory that does not overlap."""

# ---------------------------------------------------------------------------------------------------- RoPE, CacheGen
def rotary(
    device: int,
    stream: int,
    old_positions: int,
    new_positions: int,
    position_type: str,
    keys: int,
    key_type: str,
    table: int,
    table_type: str,
    positions: int,
    tokens: int,
    heads: int,
    rotated: int,
    token_stride: int,
    head_stride: int,
    is_neox: bool,
    element_stride: int = 1,
) -> None:
    """Turn keys in place, as the baseline does; where both positions are equal the key keeps every bit.

    ``table`` is ``[positions, rotated]``, tight. Strides are in elements. Types: "int32", "int64"; "float16",
    "bfloat16", "float32". A token with a position outside the table is left alone.
    """

def cachegen_cdf(
    device: int,
    stream: int,
    symbols: int,
    symbol_type: str,
    layers: int,
    tokens: int,
    channels: int,
    bins: int,
    counts: int,
    cdf: int,
    status: int,
) -> None:
    """``calculate_cdf`` into ``cdf``, int16 ``[L, C, bins + 1]``.

    ``symbols`` is ``[L, T, C]``, tight, of "uint8", "int8", "int16", "int32" or "int64". ``counts`` is int32
    ``[bins, L * C]`` to work in. ``status``, uint8 ``[L * C]``, gets one of CACHEGEN_... per stream.
    """

def cachegen_measure(
    device: int,
    stream: int,
    cdf: int,
    bins: int,
    symbols: int,
    symbol_type: str,
    layers: int,
    tokens: int,
    channels: int,
    sizes: int,
    status: int,
) -> None:
    """Bytes that each stream needs into ``sizes``, int64 ``[L * C]``: -1 for one that cannot be coded, of which
    ``status`` says why. Look at both before encoding."""

def cachegen_encode(
    device: int,
    stream: int,
    cdf: int,
    bins: int,
    symbols: int,
    symbol_type: str,
    layers: int,
    tokens: int,
    channels: int,
    sizes: int,
    out: int,
    capacity: int,
) -> None:
    """Write stream i to ``out + i * capacity``, ``sizes[i]`` bytes as measured. One that has -1, or more than
    ``capacity``, is left out."""

def cachegen_decode(
    device: int,
    stream: int,
    cdf: int,
    bins: int,
    data: int,
    starts: int,
    ends: int,
    symbols: int,
    symbol_type: str,
    layers: int,
    tokens: int,
    channels: int,
    status: int,
) -> None:
    """Decode ``data[starts[i]:ends[i]]`` (int64 ``[L * C]``, in range) into ``symbols``; ``status`` says of each
    whether it was whole."""

CACHEGEN_OK: int
CACHEGEN_BAD_CDF: int
CACHEGEN_BAD_SYMBOL: int
CACHEGEN_DAMAGED: int

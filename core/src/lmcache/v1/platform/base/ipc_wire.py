"""How an exported KV tensor travels between processes: a descriptor of plain values, strictly decoded.

``WireDescriptor`` names a backend, not a class: the receiver looks the decoder up among its own backends. What
the device needs to open the memory is an opaque tree of primitives; what every receiver can judge without the
device (types, shapes, strides, whether a view stays within its allocation) is typed and checked here.
Decoding runs no code of the sender's choice, imports nothing and opens nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, TypeVar

import msgspec

__all__ = ["DTYPE_BYTES", "TensorMeta", "WireDescriptor", "check_primitives", "convert", "decode", "encode"]

T = TypeVar("T")

MAX_BYTES = 1 << 20
"""Of one encoded descriptor: a layer's planes and handles take some hundred."""
MAX_DIMS = 16
MAX_PLANES = 64
MAX_DEPTH = 8
MAX_NODES = 10_000

#: Names of torch dtypes, without ``torch.``, and the bytes of an element.
DTYPE_BYTES = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1,
}  # fmt: skip

Count = Annotated[int, msgspec.Meta(ge=0, le=(1 << 63) - 1)]
Axes = Annotated[tuple[Count, ...], msgspec.Meta(max_length=MAX_DIMS)]
Name = Annotated[str, msgspec.Meta(min_length=1, max_length=128)]


class TensorMeta(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One tensor as a view on an exported allocation.

    Raises:
        ValueError: The dtype is not one of ``DTYPE_BYTES``, or the view does not lie within ``nbytes``.
    """

    dtype: Name
    shape: Axes
    stride: Axes
    """In elements, never negative."""
    storage_offset: Count
    """In elements, from the start of the allocation."""
    nbytes: Count
    """Of the whole allocation that is exported."""
    device: Count | Annotated[str, msgspec.Meta(max_length=128)] = 0
    """UUID of the device, or its index where it has none."""

    def __post_init__(self) -> None:
        if self.dtype not in DTYPE_BYTES:
            raise ValueError(
                f"tensor dtype {self.dtype[:40]!r} is unknown; expected one of {', '.join(DTYPE_BYTES)}"
            )
        if len(self.shape) != len(self.stride):
            raise ValueError(f"tensor shape {self.shape} and stride {self.stride} differ in length")
        if self.span > self.nbytes:
            raise ValueError(
                f"a {self.dtype} view of shape {self.shape}, stride {self.stride}, offset "
                f"{self.storage_offset} ends at byte {self.span} of an allocation of {self.nbytes} bytes"
            )

    @property
    def span(self) -> int:
        """Bytes from the start of the allocation to the end of the view."""
        last = sum((n - 1) * step for n, step in zip(self.shape, self.stride, strict=True))
        elements = last + 1 if all(self.shape) else 0
        return (self.storage_offset + elements) * DTYPE_BYTES[self.dtype]

    @classmethod
    def of(cls, tensor: Any, device: int | str | None = None) -> TensorMeta:
        """Describe a torch tensor; ``device`` replaces the index of the tensor's device."""
        index = getattr(tensor.device, "index", None) or 0
        return cls(
            dtype=str(tensor.dtype).removeprefix("torch."),
            shape=tuple(int(n) for n in tensor.shape),
            stride=tuple(int(step) for step in tensor.stride()),
            storage_offset=int(tensor.storage_offset()),
            nbytes=int(tensor.untyped_storage().nbytes()),
            device=index if device is None else device,
        )

    def matches(self, tensor: Any) -> bool:
        """Whether ``tensor`` has this dtype, shape and stride; the importer's offset is its own affair."""
        found = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tuple(tensor.stride())
        return found == (self.dtype, self.shape, self.stride)


class WireDescriptor(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One layer's export."""

    backend: Name
    """``DeviceSpec.backend_name`` of the exporter."""
    wire_version: Annotated[int, msgspec.Meta(ge=0, le=1 << 31)]
    """Of the backend's payload: ``DeviceIPCWrapper.wire_version``."""
    tensors: Annotated[tuple[TensorMeta, ...], msgspec.Meta(min_length=1, max_length=MAX_PLANES)]
    payload: dict[str, Any]
    """What the wrapper's ``to_wire`` gave: None, bool, int, float, str, bytes, lists and maps of them."""


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = msgspec.msgpack.Decoder(WireDescriptor)


def encode(descriptor: WireDescriptor) -> bytes:
    """The descriptor as MessagePack.

    Raises:
        ValueError: It holds what may not travel, or is too large.
    """
    check_primitives(descriptor.payload)
    try:
        data = _ENCODER.encode(descriptor)
    except (OverflowError, UnicodeEncodeError) as exc:
        raise ValueError(f"IPC payload cannot be encoded: {exc}") from None
    decode(data)  # what we would refuse is not sent
    return data


def decode(data: bytes) -> WireDescriptor:
    """The descriptor in ``data``, every field checked.

    Raises:
        ValueError: ``data`` is anything else.
    """
    if len(data) > MAX_BYTES:
        raise ValueError(f"IPC descriptor of {len(data)} bytes: expected at most {MAX_BYTES}")
    try:
        descriptor = _DECODER.decode(data)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError, TypeError) as exc:
        raise ValueError(f"not an IPC descriptor: {_one_line(exc)}") from None
    check_primitives(descriptor.payload)
    return descriptor


def convert(data: Any, kind: type[T], what: str = "IPC payload") -> T:
    """``data`` as the msgspec type ``kind``, strictly; for use in a wrapper's ``from_wire``.

    Raises:
        ValueError: It does not fit.
    """
    check_primitives(data, what)
    try:
        return msgspec.convert(data, kind, strict=True)
    except msgspec.MsgspecError as exc:
        raise ValueError(f"{what}: {_one_line(exc)}") from None


def check_primitives(data: Any, what: str = "IPC payload") -> None:
    """Refuse all but primitives, lists (or tuples) and text-keyed maps, and what is too deep or too much.

    Raises:
        ValueError: Says what was found.
    """
    nodes, level = 0, [data]
    for _ in range(MAX_DEPTH + 1):
        below: list[Any] = []
        nodes += len(level)
        if nodes > MAX_NODES:
            raise ValueError(f"{what}: expected at most {MAX_NODES} values")
        for value in level:
            if isinstance(value, Mapping):
                if not all(type(key) is str for key in value):
                    raise ValueError(f"{what}: expected text as the keys of maps")
                below += value.values()
            elif type(value) in (list, tuple):
                below += value
            elif value is not None and type(value) not in (bool, int, float, str, bytes):
                raise ValueError(
                    f"{what}: a {type(value).__name__} cannot travel; expected None, bool, int, float, str, "
                    "bytes, lists and maps"
                )
        if not below:
            return
        level = below
    raise ValueError(f"{what}: expected at most {MAX_DEPTH} levels of lists and maps")


def _one_line(exc: BaseException) -> str:
    return " ".join(str(exc).split())[:300] or type(exc).__name__

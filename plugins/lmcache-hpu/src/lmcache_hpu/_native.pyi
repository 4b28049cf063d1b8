from collections.abc import Sequence

from typing_extensions import Buffer

LMCACHE_NATIVE_ABI: int
HOST_ALIGNMENT: int

class HostBuffer:
    def __init__(self, nbytes: int, lock: bool = True) -> None: ...
    @property
    def address(self) -> int: ...
    @property
    def nbytes(self) -> int: ...
    @property
    def locked(self) -> bool: ...
    def __buffer__(self, flags: int) -> memoryview: ...

def gather(
    stage: int,
    addresses: Sequence[int] | Buffer,
    pieces: int,
    piece_bytes: int,
    stride: int,
    threads: int = 0,
) -> None: ...
def scatter(
    stage: int,
    addresses: Sequence[int] | Buffer,
    pieces: int,
    piece_bytes: int,
    stride: int,
    threads: int = 0,
) -> None: ...
def batched_memcpy(
    src: Sequence[int] | Buffer, dst: Sequence[int] | Buffer, sizes: Sequence[int] | Buffer
) -> None: ...
def alloc_pinned_ptr(size: int, device_id: int = 0) -> int: ...
def free_pinned_ptr(ptr: int) -> None: ...

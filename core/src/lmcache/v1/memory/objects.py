"""A memory object: one or more tensors in a range of bytes, shared by counted holders."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.memory.metadata import Layout, MemoryObjMetadata
from lmcache.v1.memory.turn import OwnerLock

if TYPE_CHECKING:
    from lmcache.v1.memory.arena import Arena

__all__ = ["MemoryObj", "Owner", "Place"]


class Place(NamedTuple):
    """A range of an arena. ``key`` tells the ranges of one allocator apart."""

    arena: Arena
    offset: int
    nbytes: int
    key: int


class Owner(Protocol):
    """What an object needs of the allocator that made it."""

    lock: OwnerLock
    #: Places of objects that were dropped with holders left, and the two counts. Appending needs no lock.
    lost: deque[tuple[Place, int, int]]
    #: Objects of which a reference was given back by a thread that was in the lock. Likewise.
    late: deque[MemoryObj]

    def released(self, place: Place) -> None:
        """Called with the lock held."""


class MemoryObj:
    """Born with one reference, its maker's. The memory goes back when no reference and no pin is left.

    A reference says that somebody uses the bytes; a pin says that somebody will, so that nobody evicts them.
    Tensors and buffers of an object keep it from being dropped, yet not from being released: who gives the last
    reference back says that all use is over, copies on a stream included.

    Counts are thread-safe. The bytes have no lock: whoever writes them is alone with them.
    """

    __slots__ = ("__weakref__", "_owner", "_pins", "_place", "_refs", "_used", "metadata")

    def __init__(self, owner: Owner, place: Place, layout: Layout) -> None:
        self._owner = owner
        self._place = place
        self._refs = 1
        self._pins = 0
        self._used: int | None = None
        self.metadata = MemoryObjMetadata(layout, place.offset, place.nbytes)

    # --- holders -----------------------------------------------------------------------------------------

    def ref_count_up(self) -> None:
        """
        Raises:
            ValueError: It is released already.
        """
        with self._owner.lock:
            self._alive("ref_count_up")
            self._refs += 1

    def ref_count_down(self) -> None:
        """
        Raises:
            ValueError: There is no reference to give back.
        """
        if self._owner.lock.is_inside():  # the collector ends a generator in the middle of the owner's work
            self._owner.late.append(self)
            return
        with self._owner.lock:
            self.drop_reference()

    def drop_reference(self) -> None:
        """:meth:`ref_count_down` with the lock held; for the owner."""
        if not self._refs:
            raise ValueError(f"memory object at {self._place.offset}: no reference is left to give back")
        self._refs -= 1
        self._release_if_free()

    def pin(self) -> bool:
        """
        Raises:
            ValueError: It is released already.
        """
        with self._owner.lock:
            self._alive("pin")
            self._pins += 1
        return True

    def unpin(self) -> bool:
        """
        Raises:
            ValueError: There is no pin to give back.
        """
        with self._owner.lock:
            if not self._pins:
                raise ValueError(f"memory object at {self._place.offset}: no pin is left to give back")
            self._pins -= 1
            self._release_if_free()
        return True

    def get_ref_count(self) -> int:
        return self._refs

    def get_pin_count(self) -> int:
        return self._pins

    @property
    def is_pinned(self) -> bool:
        return self._pins > 0

    @property
    def can_evict(self) -> bool:
        """Whether the one who keeps it is its only holder."""
        with self._owner.lock:
            return self._refs == 1 and not self._pins

    def is_valid(self) -> bool:
        """Whether its memory is still its own."""
        return self._refs > 0 or self._pins > 0

    @property
    def place(self) -> Place:
        """Where it is, for the one who made it."""
        return self._place

    def parent(self) -> Any:
        """The allocator that made it."""
        return self._owner

    def _alive(self, what: str) -> None:
        if not self._refs and not self._pins:
            raise ValueError(
                f"{what}: memory object at {self._place.offset}: its memory was given back; hold a reference"
            )

    def _release_if_free(self) -> None:
        if not self._refs and not self._pins:
            self._owner.released(self._place)

    def __del__(self) -> None:
        # The collector may run this in a thread that holds the lock: only note it. No tensor is left either,
        # for a tensor would keep the object.
        if self._refs or self._pins:
            self._owner.lost.append((self._place, self._refs, self._pins))

    # --- contents ----------------------------------------------------------------------------------------

    @property
    def tensor(self) -> Any:
        """The first tensor; None while the object holds serialised bytes."""
        return None if self._used is not None else self.get_tensor(0)

    def get_tensor(self, index: int) -> Any:
        """One of the object's tensors, made anew on each call; never a copy.

        Raises:
            IndexError: There are fewer.
            ValueError: The memory was given back.
        """
        layout = self.metadata.layout
        if not 0 <= index < len(layout.shapes):
            raise IndexError(f"tensor {index} of a memory object that has {len(layout.shapes)}")
        return self._view("get_tensor", layout.starts[index], layout.shapes[index], layout.dtypes[index])

    @property
    def tensors(self) -> list[Any]:
        return [self.get_tensor(i) for i in range(len(self.metadata.shapes))]

    @property
    def raw_tensor(self) -> Any:
        """All bytes as one flat tensor of uint8."""
        return self._view("raw_tensor", 0, (self.get_size(),), "uint8")

    @property
    def byte_array(self) -> memoryview:
        """All bytes, writable.

        Raises:
            ValueError: The memory was given back, or it is a device's.
        """
        self._alive("byte_array")
        return memoryview(self._window(self.get_size())).cast("B")

    @property
    def data_ptr(self) -> int:
        """Address of the first byte."""
        self._alive("data_ptr")
        arena, offset = self._place.arena, self._place.offset
        base = arena.address or int(arena.tensor.data_ptr())
        return base + offset

    def _view(self, what: str, start: int, shape: tuple[int, ...], dtype: Any) -> Any:
        from lmcache.v1.platform.host_tensors import tensor_in, tensor_over

        self._alive(what)
        arena = self._place.arena
        if arena.address:
            return tensor_over(self._window(self._place.nbytes), start, shape, dtype)
        return tensor_in(arena.tensor, self._place.offset + start, shape, dtype)

    def _window(self, nbytes: int) -> Any:
        return self._place.arena.window(self._place.offset, nbytes, self)

    # --- description -------------------------------------------------------------------------------------

    def set_used_size(self, nbytes: int) -> None:
        """The object holds that many serialised bytes from now on, and no tensors.

        Raises:
            ValueError: That many do not fit.
        """
        if not 0 < nbytes <= self._place.nbytes:
            raise ValueError(
                f"used size {nbytes}: expected 1 to {self._place.nbytes} bytes, what the object has"
            )
        self._used = nbytes

    def get_size(self) -> int:
        """Bytes of content."""
        return self.metadata.layout.nbytes if self._used is None else self._used

    def get_physical_size(self) -> int:
        """Bytes that it takes in its arena."""
        return self._place.nbytes

    def get_shape(self) -> tuple[int, ...]:
        return self.metadata.shape

    def get_shapes(self) -> tuple[tuple[int, ...], ...]:
        return self.metadata.shapes

    def get_dtype(self) -> Any:
        return self.metadata.dtype

    def get_dtypes(self) -> tuple[Any, ...]:
        return self.metadata.dtypes

    def get_memory_format(self) -> MemoryFormat:
        return self.metadata.fmt

    def get_num_tokens(self) -> int:
        """Tokens of the first tensor; 0 where the format has none."""
        return self.metadata.fmt.tokens(self.metadata.shape)

    def __repr__(self) -> str:
        fmt, shapes = self.metadata.fmt.name, self.metadata.shapes
        return f"MemoryObj({fmt}, {shapes}, refs={self._refs}, pins={self._pins})"

"""Pages of a tensor of the Neuron runtime, read and written by the runtime itself.

For whoever holds ``nrt_tensor_t`` handles, such as a model runner over the runtime. Torch does not tell the handle
behind a tensor, so transfers of torch tensors do not come here.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lmcache.errors import DeviceError
from lmcache_neuron import runtime

__all__ = ["TensorPages", "why_not"]


def why_not() -> str:
    """Why the runtime cannot be used here, in one line; empty if it can."""
    return str(runtime.native().nrt_why_not())


@dataclass(frozen=True)
class TensorPages:
    """One page per block in a tensor.

    Attributes:
        handle: The ``nrt_tensor_t`` pointer. It must live as long as this object is used.
        page_bytes: Bytes of a page.
        stride: Bytes from a block's page to the next block's.
        first: Where the first block's page begins.
    """

    handle: int
    page_bytes: int
    stride: int
    first: int = 0

    def __post_init__(self) -> None:
        for name in ("handle", "page_bytes", "stride", "first"):
            # Python's own integers: those of numpy are cut off silently where they overflow.
            object.__setattr__(self, name, operator.index(getattr(self, name)))
        if not 0 <= self.handle < 1 << 64:
            raise ValueError(f"TensorPages: handle={self.handle}: expected an address of 64 bits")
        if self.page_bytes < 1 or self.stride < self.page_bytes or self.first < 0:
            raise ValueError(
                f"TensorPages: page_bytes={self.page_bytes}, stride={self.stride}, first={self.first}: expected a page"
                " of 1 byte or more within its stride"
            )

    def read(self, ids: Sequence[int], hosts: Sequence[int]) -> None:
        """Copy the page of block ``ids[i]`` to the address ``hosts[i]``.

        Raises:
            ValueError: An id or an address is out of range; nothing has moved.
            DeviceError: There is no runtime, or it failed.
        """
        self._move(runtime.native().nrt_read, ids, hosts)

    def write(self, ids: Sequence[int], hosts: Sequence[int]) -> None:
        """The other way round; see :meth:`read`."""
        self._move(runtime.native().nrt_write, ids, hosts)

    def _move(self, call: Any, ids: Sequence[int], hosts: Sequence[int]) -> None:
        blocks = [operator.index(block) for block in ids]
        offsets = [self.first + block * self.stride for block in blocks]
        for block, offset in zip(blocks, offsets, strict=True):
            if block < 0:
                raise ValueError(f"block id {block}: expected 0 or more")
            if offset + self.page_bytes >= 1 << 63:
                raise ValueError(f"block id {block}: its page begins at {offset}: no tensor is as large")
        try:
            call(self.handle, offsets, [operator.index(host) for host in hosts], self.page_bytes)
        except RuntimeError as exc:
            raise DeviceError(str(exc)) from exc

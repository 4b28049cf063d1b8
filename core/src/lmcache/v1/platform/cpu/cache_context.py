"""The cache context of host memory: KV tensors that a worker keeps in shared memory.

Copies on the host are done when the call returns, so the stream holds nothing; the server gives each worker a
thread of its own to wait in.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.logging import init_logger
from lmcache.v1.platform.cpu.stub_cpu_device import StubStream
from lmcache.v1.platform.torch_cache_context import TorchCacheContext

if TYPE_CHECKING:
    import torch

__all__ = ["CPUCacheContext"]

logger = init_logger(__name__)


class CPUCacheContext(TorchCacheContext):
    """See :class:`TorchCacheContext`. ``gpu`` in a name is historical: all memory is the host's."""

    device_type: ClassVar[str] = "cpu"

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._stream = StubStream(device="cpu")
        self._high_priority = StubStream(device="cpu", priority=0)
        super().__init__(*args, **kwargs)
        logger.info(
            "CPU cache context: %d layers, %d blocks, dtype %s, shared memory",
            self.num_layers, self.num_blocks, self._group(0).dtype,
        )  # fmt: skip

    @property
    def stream(self) -> StubStream:
        """A stream that never holds work."""
        return self._stream

    @property
    def cupy_stream(self) -> StubStream:
        """The same stream."""
        return self._stream

    @property
    def high_priority_stream(self) -> StubStream:
        """A second one, for what must not queue behind the first on other devices."""
        return self._high_priority

    @property
    def high_priority_cupy_stream(self) -> StubStream:
        """The same as :attr:`high_priority_stream`."""
        return self._high_priority

    @property
    def kv_pointers(self) -> torch.Tensor:
        """Data pointers of all KV tensors, int64, in layer order."""
        import torch

        from lmcache.v1.platform.torch_cache_context import tensors_of

        return torch.tensor(
            [tensor.data_ptr() for layer in self.kv_caches_ for tensor in tensors_of(layer)],
            dtype=torch.int64,
        )

    @property
    def block_size(self) -> int:
        """Slots per block of the first kernel group."""
        return int(self._group(0).shape_desc.bs)

    @property
    def group_slots_per_blocks(self) -> list[int]:
        """Slots per block, per kernel group."""
        return [int(group.shape_desc.bs) for group in self._groups]

    def blocks_for_tokens(self, num_logical_tokens: int, group_idx: int) -> int:
        """Blocks that span ``num_logical_tokens`` in a kernel group."""
        group = self._group(group_idx)
        slots = num_logical_tokens * group.slots_per_block // group.tokens_per_block
        return int(slots // group.shape_desc.bs)

    def get_group_kv_pointers(self, group_idx: int) -> torch.Tensor:
        """The other name of :meth:`get_kernel_group_kv_pointers`."""
        return self.get_kernel_group_kv_pointers(group_idx)

    def get_tmp_gpu_buffer_flat(self, chunk_idx: int) -> torch.Tensor:
        """All staging of one batch slot, as bytes."""
        return self._slot(chunk_idx)

    def get_tmp_chunk_gpu_buffer(self, group_idx: int = 0) -> torch.Tensor:
        """Staging of one kernel group in the first batch slot."""
        return self.get_temp_kernel_group_buffer(0, group_idx)

    def get_tmp_chunk_gpu_buffer_batched(self, batch_size: int, group_idx: int = 0) -> list[torch.Tensor]:
        """Staging of one kernel group in the first ``batch_size`` batch slots.

        Raises:
            ValueError: more than there are.
        """
        if batch_size > self.max_batch_size:
            raise ValueError(f"batch of {batch_size}: expected at most {self.max_batch_size}")
        return [self.get_temp_kernel_group_buffer(index, group_idx) for index in range(batch_size)]

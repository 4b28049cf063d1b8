"""The ranks of one SGLang engine: tensor- and pipeline-parallel schedulers that must take the same decisions.

Every method is a collective: all ranks call it, in the same order, or none does.
"""

from __future__ import annotations

from typing import Any

import torch

from lmcache.errors import ConfigError

__all__ = ["Mesh"]


class Mesh:
    """TP x PP ranks.

    Args:
        tp_group, pp_group: process groups for tensors on ``device``.

    Raises:
        ConfigError: a rank outside its size, or a group that is missing or has another size.
    """

    def __init__(
        self,
        tp_size: int,
        tp_rank: int,
        tp_group: Any,
        pp_size: int = 1,
        pp_rank: int = 0,
        pp_group: Any = None,
        device: Any = "cpu",
    ) -> None:
        for name, size, rank, group in (
            ("tp", tp_size, tp_rank, tp_group),
            ("pp", pp_size, pp_rank, pp_group),
        ):
            if not 0 <= rank < size:
                raise ConfigError(f"{name}_rank={rank}: expected 0 to {name}_size - 1, {size - 1}")
            if size > 1:
                found = torch.distributed.get_world_size(group=group) if group is not None else 0
                if found != size:
                    raise ConfigError(
                        f"{name}_group of {found} ranks: expected a process group of {name}_size={size}"
                    )
        self.tp_size, self.tp_rank, self._tp_group = tp_size, tp_rank, tp_group
        self.pp_size, self.pp_rank, self._pp_group = pp_size, pp_rank, pp_group
        self._device = device

    @property
    def rank(self) -> int:
        return self.pp_rank * self.tp_size + self.tp_rank

    @property
    def ranks(self) -> int:
        return self.pp_size * self.tp_size

    @property
    def leads(self) -> bool:
        return self.rank == 0

    def reduce(self, tensor: torch.Tensor, op: Any) -> None:
        """Reduce in place: over a stage's TP ranks, then over the stages, which is over all of them."""
        if self.tp_size > 1:
            torch.distributed.all_reduce(tensor, op=op, group=self._tp_group)
        if self.pp_size > 1:
            torch.distributed.all_reduce(tensor, op=op, group=self._pp_group)

    def least(self, value: int) -> int:
        """The least of all ranks' values."""
        if self.ranks == 1:
            return value
        tensor = torch.tensor([value], dtype=torch.int64, device=self._device)
        self.reduce(tensor, torch.distributed.ReduceOp.MIN)
        return int(tensor.item())

    def all(self, value: bool) -> bool:
        return self.least(int(value)) > 0

    def leaders(self, value: int, data: bytes = b"") -> tuple[int, bytes]:
        """The leader's number, and bytes of its. What the others give does not matter."""
        if self.ranks == 1:
            return value, data
        least = -(1 << 62)
        head = [value, len(data)] if self.leads else [least, 0]
        tensor = torch.tensor(head, dtype=torch.int64, device=self._device)
        self.reduce(tensor, torch.distributed.ReduceOp.MAX)
        value, size = (int(x) for x in tensor.tolist())
        if not size:
            return value, b""
        content = torch.zeros(size, dtype=torch.uint8, device=self._device)
        if self.leads:
            content.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        self.reduce(content, torch.distributed.ReduceOp.MAX)
        return value, bytes(content.tolist())

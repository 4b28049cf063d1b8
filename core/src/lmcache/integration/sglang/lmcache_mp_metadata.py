"""Records that SGLang's ``LMCacheUnifiedRadixCache`` keeps of its requests. Its code reads and sets the fields."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lmcache.v1.multiprocess.client import Call

if TYPE_CHECKING:
    import torch

__all__ = [
    "LMCacheExternalFlow",
    "LMCacheLoadOperation",
    "LMCacheLookupOperation",
    "LMCachePendingStore",
    "LMCacheStoreOperation",
    "Outcome",
    "Pinned",
]


class Outcome:
    """Whether an operation succeeded, once it has ended."""

    def __init__(self, result: bool | None = None) -> None:
        self._ended = threading.Event()
        self._result = False
        if result is not None:
            self.end(result)

    def end(self, result: bool) -> None:
        self._result = result
        self._ended.set()

    def query(self) -> bool:
        """Whether it has ended."""
        return self._ended.is_set()

    def result(self, timeout: float | None = None) -> bool:
        """Wait for the end.

        Raises:
            TimeoutError: after ``timeout`` seconds.
        """
        if not self._ended.wait(timeout):
            raise TimeoutError(f"operation not ended within {timeout} s")
        return self._result


@dataclass(frozen=True, slots=True)
class Pinned:
    """What a lookup pinned at the server, as every rank knows it. ``slots[group]`` are this rank's."""

    lease: int
    epoch: str
    chunk_size: int
    slots: list[list[int]]


@dataclass
class LMCacheLookupOperation:
    """A lookup; ``total_hit_tokens`` is None until the answer is there.

    The first ``lock_start`` tokens are not wanted any more; their pins end with the others'.
    """

    request_id: str
    token_ids: list[int]
    local_hit_tokens: int
    cache_salt: str
    total_hit_tokens: int | None = None
    locks_held: bool = False
    lock_start: int = 0
    lease: int = 0
    """Under which the leader asked; 0: it did not."""
    call: Call | None = None
    """The leader's round trip."""
    message: Any = None
    pinned: Pinned | None = None


@dataclass
class _Operation:
    """``result`` is what all ranks agreed on; None until they have."""

    request_id: str
    start: int
    end: int
    future: Outcome
    result: bool | None = field(default=None, kw_only=True)

    def query(self) -> bool:
        return self.result is not None or self.future.query()


@dataclass
class LMCacheLoadOperation(_Operation):
    """A load of tokens ``[start, end)``, of which those below ``local_hit_tokens`` are left alone.

    ``device_indices``: the slots of the others, which SGLang gives back if it fails.
    """

    local_hit_tokens: int
    device_indices: torch.Tensor
    lookup: LMCacheLookupOperation


@dataclass
class LMCacheStoreOperation(_Operation):
    """A store of tokens ``[start, end)``."""


@dataclass
class LMCacheExternalFlow:
    """One request from its lookup to the end of its load. SGLang makes it and sets all of it."""

    key: Any
    lookup: LMCacheLookupOperation
    total_hit: int | None = None
    local_hit_tokens: int | None = None
    load: LMCacheLoadOperation | None = None
    anchor_node: Any = None
    anchor_lock: Any = None
    mamba_value: torch.Tensor | None = None
    request_mamba_value: torch.Tensor | None = None
    allocated_request_mamba_for_load: bool = False
    load_req: Any = None
    free_mamba_after_load: bool = False
    loaded_skip_tokens: int = 0
    released_skip_tokens: int = 0
    prefix_published: bool = False
    load_completed: bool = False
    retire_requested: bool = False
    cancelled: bool = False


@dataclass
class LMCachePendingStore:
    """A store under way, and the node of SGLang's tree that it keeps locked."""

    operation: LMCacheStoreOperation
    node_id: Any
    lock_params: Any

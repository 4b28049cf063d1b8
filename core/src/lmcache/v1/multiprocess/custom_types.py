"""Types of the multiprocess path that engines import by these names."""

from __future__ import annotations

from typing import Any, TypeAlias

import msgspec

KVCache: TypeAlias = "list[Any]"
"""A worker's KV tensors as a server receives them: one wrapper per layer."""


class RequestAllocationRecord(msgspec.Struct, frozen=True):
    """Blocks that an engine gave to a request in one step, and the tokens that they are for."""

    req_id: str
    new_block_ids: list[list[int]]
    new_token_ids: list[int]


BlockAllocationRecord = RequestAllocationRecord

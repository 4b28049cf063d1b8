"""Ops of MusaStyle devices: a method overrides the torch baseline; what is not overridden is the baseline's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.op_contract import serves, takes

from lmcache_musa_style.plan import has_blocks, make_plan

H2D, D2H = 0, 1  # TransferDirection: objects to pages, pages to objects


class MusaStyleDeviceOps(DeviceOps):
    """No native module: plain torch calls that suit the device better than those of the baseline."""

    device_type: ClassVar[str] = "musa"

    @serves(has_blocks)
    @takes("tensors")
    def multi_layer_block_kv_transfer(
        self,
        paged: Any,
        objects: Sequence[Any],
        block_ids: Any,
        device: Any,
        direction: int,
        shape_desc: Any,
        chunk_size: int,
        engine_kv_format: int,
        skip_prefix_n_blocks: int = 0,
    ) -> None:
        """One gather or scatter per object and layer; the baseline makes one copy per run of blocks.

        The contract is the base method's. Everything is queued on the current stream, in order.
        """
        plan = make_plan(paged, objects, block_ids, shape_desc, chunk_size, engine_kv_format, skip_prefix_n_blocks)
        if plan is None or direction not in (H2D, D2H):
            super().multi_layer_block_kv_transfer(
                paged, objects, block_ids, device, direction, shape_desc, chunk_size, engine_kv_format,
                skip_prefix_n_blocks,
            )  # fmt: skip
            return
        import torch

        for span in plan.spans:
            ids = torch.tensor(span.ids, device=plan.layers[0].device)
            for layer, pages in enumerate(plan.layers):
                kv, _, bs, nh, width = pages.shape
                mine = span.chunk[:, layer].view(kv, len(span.ids), bs, nh, width)
                if int(direction) == D2H:
                    mine.copy_(pages.index_select(1, ids))
                else:
                    pages.index_copy_(1, ids, mine.to(pages.device))

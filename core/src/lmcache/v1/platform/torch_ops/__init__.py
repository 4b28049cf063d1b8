"""The torch baseline: every op it has, on any device that torch can copy to and from.

Symbol names and signatures are those of ``DeviceOps``. A backend may call these directly where its native
op does not serve a case.
"""

from __future__ import annotations

from lmcache.v1.platform.torch_ops.block_transfer import multi_layer_block_kv_transfer

__all__ = ["multi_layer_block_kv_transfer"]

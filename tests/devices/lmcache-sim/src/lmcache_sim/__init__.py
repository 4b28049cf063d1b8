"""A simulated accelerator: ``import lmcache_sim`` makes the torch device ``sim`` and the module ``torch.sim``.

It behaves as real ones do where CPU tensors hide mistakes: device memory faults when the host touches it, work
is queued on streams and can be held back, events and memory cross processes through handles, memory runs out.

Settings, read on first use: ``LMCACHE_SIM_DEVICES`` (2), ``LMCACHE_SIM_VISIBLE_DEVICES`` (all),
``LMCACHE_SIM_MEMORY`` per device (4GiB), ``LMCACHE_SIM_PROTECT`` (1), ``LMCACHE_SIM_DELAY_US`` before all work (0),
``LMCACHE_SIM_LINK_GBPS`` and ``LMCACHE_SIM_LINK_US`` between host and device (0: no limit).
``LMCACHE_SIM_AUTOLOAD=1`` lets ``import torch`` import this package, too.

Use spawn, not fork: a child forked after the device was used is refused.
"""

from __future__ import annotations

from lmcache_sim._load import get_include, library_path, load

__all__ = ["get_include", "library_path"]

load()

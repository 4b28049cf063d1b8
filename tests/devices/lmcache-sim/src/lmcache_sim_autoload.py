"""What ``import torch`` calls where this wheel is installed. A module of its own, so that it costs nothing.

A vendor's wheel would load its device here. A simulated one must not become the accelerator of every process of
an environment that has it installed, so it waits to be asked: ``LMCACHE_SIM_AUTOLOAD=1``.
"""

from __future__ import annotations

import os


def autoload() -> None:
    """Import ``lmcache_sim`` if the environment asks for it."""
    wanted = os.environ.get("LMCACHE_SIM_AUTOLOAD", "0")
    if wanted not in ("", "0", "1"):
        raise ImportError(f"LMCACHE_SIM_AUTOLOAD={wanted}: expected 0 or 1")
    if wanted == "1":
        import lmcache_sim  # noqa: F401

"""The environment variables of this wheel, as a table; the first value of each is the default."""

from __future__ import annotations

import os

from lmcache.errors import ConfigError, bad_value

__all__ = ["CHOICES", "FOLDER", "choice", "isolated"]

CHOICES = {
    # Whether the native module is used. Without it torch's operations serve, and the server moves nothing itself.
    "LMCACHE_CUDA_NATIVE": ("on", "off"),
    # How KV memory is shared with the server: torch's storage handles, the driver's, or file descriptors.
    "LMCACHE_CUDA_IPC": ("auto", "torch", "raw", "vmm"),
    # Engine and server share neither /dev/shm nor a pid namespace: containers of their own.
    "LMCACHE_CUDA_ISOLATED_IPC": ("0", "1"),
    # How work is ordered between processes: the driver's events, or counters in host or device memory.
    "LMCACHE_CUDA_EVENTS": ("auto", "driver", "host", "device"),
}

FOLDER = "LMCACHE_CUDA_IPC_DIR"
"""Where the sockets lie over which file descriptors pass; containers must share it. Default: a private folder."""


def choice(name: str) -> str:
    """What the variable ``name`` says.

    Raises:
        ConfigError: None of its values.
    """
    values = CHOICES[name]
    value = os.environ.get(name, "").strip().lower() or values[0]
    if value not in values:
        raise ConfigError(bad_value(name, value, f"one of {', '.join(values)}"))
    return value


def isolated() -> bool:
    """Whether nothing but the GPU, and what is shared on purpose, connects engine and server."""
    return choice("LMCACHE_CUDA_ISOLATED_IPC") == "1"

"""Pages of host memory from the kernel: plain, in hugepages, of one NUMA node. Linux; needs no torch.

Hugepages and nodes are granted as far as the host grants them; what it does not is logged once.
"""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
import platform
from pathlib import Path

from lmcache.logging import init_logger, warn_once

__all__ = ["address_of", "map_pages"]

logger = init_logger(__name__)

_MEMINFO = Path("/proc/meminfo")

# Numbers of the Linux ABI that Python has no names for (all of them, at least, not in 3.10).
_MAP_HUGETLB = 0x40000
_MADV_HUGEPAGE = 14
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_MPOL_PREFERRED = 1
_SYS_MBIND = {"x86_64": 237, "aarch64": 235, "riscv64": 235, "ppc64le": 259, "s390x": 268}

_LIBC = ctypes.CDLL(None, use_errno=True)
_LIBC.syscall.restype = ctypes.c_long
_LIBC.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def map_pages(op: str, size: int, huge: bool = False, node: int = -1) -> mmap.mmap:
    """Zeroed private memory of at least ``size`` bytes.

    Args:
        op: Who asks, for messages.
        size: Bytes, 1 or more.
        huge: In hugepages, if there are enough that are free.
        node: Of this NUMA node, as long as it has memory; a negative one leaves it to the kernel.

    Raises:
        MemoryError: The kernel does not give that much.
    """
    if huge:
        memory, why = _huge(op, size, node)
        if memory is not None:
            return memory
        warn_once(logger, "hugepages", "%s: no hugepages, plain pages instead: %s", op, why)
    try:
        memory = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except (OSError, OverflowError) as exc:
        raise MemoryError(f"{op}: {size} bytes of host memory: {exc}; ask for less or free memory") from None
    if huge:
        _madvise(memory, _MADV_HUGEPAGE)  # the kernel may still join them by itself; if not, nothing is lost
    _prefer_node(op, memory, node)
    return memory


def address_of(memory: mmap.mmap) -> int:
    """Where ``memory`` begins. It stays there until it is closed."""
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))


def _huge(op: str, size: int, node: int) -> tuple[mmap.mmap | None, str]:
    """Memory in hugepages, or why there is none."""
    page = _hugepage_size()
    if not page:
        return None, "the kernel has none"
    try:
        memory = mmap.mmap(
            -1, -(-size // page) * page, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _MAP_HUGETLB
        )
    except (OSError, OverflowError) as exc:
        return None, f"{exc}; {size} bytes need {-(-size // page)} of {page} bytes (sysctl vm.nr_hugepages)"
    _prefer_node(op, memory, node)
    # A container's limit of hugepages strikes at the first touch, with SIGBUS: touch them where that is an error.
    failed = _madvise(memory, _MADV_POPULATE_WRITE)
    if failed and failed != errno.EINVAL:  # EINVAL: a kernel that cannot be asked
        memory.close()
        return None, f"they cannot be populated ({os.strerror(failed)}); is there a limit on this container?"
    return memory, ""


def _hugepage_size() -> int:
    try:
        lines = _MEMINFO.read_text().splitlines()
    except OSError:
        return 0
    found = next((line.split() for line in lines if line.startswith("Hugepagesize:")), ["", "0"])
    return int(found[1]) * 1024


def _prefer_node(op: str, memory: mmap.mmap, node: int) -> None:
    if node < 0:
        return
    why = _mbind(memory, node)
    if why:
        warn_once(logger, f"node {node}", "%s: NUMA node %d is not honoured: %s", op, node, why)


def _mbind(memory: mmap.mmap, node: int) -> str:
    """Take the pages from ``node`` when they are first touched; why not, if that is refused."""
    number = _SYS_MBIND.get(platform.machine())
    if number is None:
        return f"no system call is known for {platform.machine()}"
    if not Path(f"/sys/devices/system/node/node{node}").exists():
        return "this host has no such node"
    bits = ctypes.sizeof(ctypes.c_ulong) * 8
    mask = (ctypes.c_ulong * (node // bits + 1))()
    mask[node // bits] = 1 << node % bits
    failed = _LIBC.syscall(
        ctypes.c_long(number),
        ctypes.c_void_p(address_of(memory)),
        ctypes.c_ulong(len(memory)),
        ctypes.c_int(_MPOL_PREFERRED),
        mask,
        ctypes.c_ulong(len(mask) * bits + 1),  # the kernel reads one bit less than it is told
        ctypes.c_uint(0),
    )
    return os.strerror(ctypes.get_errno()) if failed else ""


def _madvise(memory: mmap.mmap, advice: int) -> int:
    """0, or the error number. Unlike ``mmap.madvise`` it lets other threads run meanwhile."""
    failed = _LIBC.madvise(address_of(memory), len(memory), advice)
    return ctypes.get_errno() if failed else 0

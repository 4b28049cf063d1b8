"""The L1 pool: one shared-memory segment, reserved in full, whose bytes other processes may map.

Layout of the segment: a table of 64-bit generation words, one per 4 KiB page of the data area, then the data
area. The word of an object's first page holds the object's generation while the object lives and 0
afterwards. A reader that checks the word before and after its copy can thus tell that the bytes were the
object's all along (a sequence lock, as in Linux' ``seqlock_t``), even if the server meanwhile took the memory
back or died.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import mmap
import os
import secrets
import threading
from pathlib import Path

from lmcache.errors import StartupError
from lmcache.logging import init_logger

logger = init_logger(__name__)

PAGE = 4096
_WORD = 8
_RESERVE_STEP = 256 << 20
_MADV_POPULATE_WRITE = 23  # Linux 5.14
_SHM_DIR = Path("/dev/shm")
_PREFIX = (
    "lmcache-l1-"  # not the original's "lmcache_l1_pool_": the sweep must not touch what it cannot judge
)
_SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL


def table_bytes(data_bytes: int) -> int:
    """Bytes of the generation table of a pool with ``data_bytes`` of data, in whole pages."""
    return (data_bytes // PAGE * _WORD + PAGE - 1) & -PAGE


class PoolView:
    """One process's mapping of a pool: ``data`` (writable bytes) and ``generations`` (64-bit words)."""

    def __init__(self, fd: int, data_bytes: int) -> None:
        self.data_bytes = data_bytes
        head = table_bytes(data_bytes)
        self._map = mmap.mmap(fd, head + data_bytes, mmap.MAP_SHARED)
        whole = memoryview(self._map)
        self.generations = whole[: data_bytes // PAGE * _WORD].cast("Q")
        self.data = whole[head : head + data_bytes]
        self._whole = whole
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(whole)) + head

    def generation(self, offset: int) -> int:
        return int(self.generations[offset // PAGE])

    def prefault(self, stop: threading.Event) -> None:
        """Fill this process's page tables, so that the first copy pays no page faults. Releases the GIL.

        Once ``stop`` is set it ends after the step that it is in.
        """
        libc = ctypes.CDLL(None, use_errno=True)
        libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
        start, total = self.address - table_bytes(self.data_bytes), len(self._whole)
        for at in range(0, total, _RESERVE_STEP):
            if stop.is_set():
                return
            if libc.madvise(start + at, min(_RESERVE_STEP, total - at), _MADV_POPULATE_WRITE):
                logger.debug("prefault stopped: %s", os.strerror(ctypes.get_errno()))
                return


class ShmPool:
    """Creates, reserves and owns the segment.

    Args:
        data_bytes: size of the data area; rounded down to whole pages.
        name: None for an anonymous memfd; else a segment ``/dev/shm/lmcache-l1-<name>`` of mode 0600.
        stop: reserving gives up once this is set.

    Raises:
        StartupError: if the memory cannot be had; the text says how much is needed and how much is available.
    """

    def __init__(self, data_bytes: int, name: str | None = None, stop: threading.Event | None = None) -> None:
        data_bytes -= data_bytes % PAGE
        self.total_bytes = table_bytes(data_bytes) + data_bytes
        self.path: Path | None = _SHM_DIR / f"{_PREFIX}{name}" if name else None
        _check_available(self.total_bytes, self.path)
        self.fd = self._lock_fd = -1
        try:
            self.fd = self._open()
            _reserve(self.fd, self.total_bytes, stop)
            if self.path is None:
                # A client that could shrink the file would make every other process die of SIGBUS.
                fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, _SEALS)
            self.view = _mapped(self.fd, data_bytes)
        except BaseException:
            self.close()
            raise

    @property
    def kind(self) -> str:
        return "named" if self.path else "memfd"

    def _open(self) -> int:
        if self.path is None:
            try:
                return os.memfd_create("lmcache-l1", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
            except OSError as exc:
                self.path = _SHM_DIR / f"{_PREFIX}auto_{secrets.token_hex(8)}"
                logger.warning(
                    "memfd_create failed (%s): L1 becomes the named segment %s", exc.strerror, self.path
                )
        try:
            fd = os.open(self.path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        except FileExistsError:
            raise StartupError(
                f"shared-memory segment {self.path}: expected a free name, another server holds it;"
                " choose another --shm-name"
            ) from None
        # The lock is the sign of life: the kernel drops it with the process, and a sweeper that gets it
        # knows.
        fcntl.flock(fd, fcntl.LOCK_EX)
        if os.fstat(fd).st_nlink == 0:  # a sweeper came between open and lock
            os.close(fd)
            return self._open()
        self._lock_fd = fd
        # What clients map is another open file: a mapping would keep this one, and its lock, past our death. Not by
        # its name, which an operator may have removed by now.
        return os.open(f"/proc/self/fd/{fd}", os.O_RDWR | os.O_CLOEXEC)

    def close(self) -> None:
        """Remove the name, if it is ours, and close the file. Mappings elsewhere stay valid."""
        if self.path is not None and self._lock_fd >= 0 and _is_at(self._lock_fd, self.path):
            self.path.unlink(missing_ok=True)
        for fd in (self.fd, self._lock_fd):
            if fd >= 0:
                os.close(fd)
        self.fd = self._lock_fd = -1


def new_generation() -> int:
    """A generation no other object has and no payload is likely to hold: 63 random bits, never 0."""
    return secrets.randbits(63) | 1


def sweep_stale_segments() -> list[Path]:
    """Unlink named segments whose server is dead (nobody holds their lock); return their paths.

    Between the opening of a file and its lock another file may have come under the name. Once it is locked and
    still has the name, nobody else takes that from it: a server does not take a name that is in use.
    """
    swept = []
    for path in sorted(_SHM_DIR.glob(f"{_PREFIX}*")):
        try:
            fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            continue  # another user's, or gone meanwhile: not ours to judge
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_at(fd, path):
                path.unlink(missing_ok=True)
                swept.append(path)
        except OSError as exc:
            if exc.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.EPERM):
                raise
        finally:
            os.close(fd)
    return swept


def _is_at(fd: int, path: Path) -> bool:
    """Whether ``path`` still is the name of the file that is open as ``fd``."""
    try:
        return os.path.samestat(os.fstat(fd), os.lstat(path))
    except FileNotFoundError:
        return False


def _reserve(fd: int, total: int, stop: threading.Event | None) -> None:
    for at in range(0, total, _RESERVE_STEP):  # in steps, so that a signal is heard between them
        if stop is not None and stop.is_set():
            raise StartupError("stopped by a signal while reserving L1")
        try:
            if not at:
                os.ftruncate(fd, total)
            os.posix_fallocate(fd, at, min(_RESERVE_STEP, total - at))
        except OSError as exc:
            raise StartupError(
                f"L1 pool: reserving {_gib(total)} failed after {_gib(at)} ({exc.strerror});"
                " lower --l1-size-gb or free memory"
            ) from None


def _mapped(fd: int, data_bytes: int) -> PoolView:
    try:
        return PoolView(fd, data_bytes)
    except OSError as exc:  # a limit of address space, for one
        raise StartupError(
            f"L1 pool: mapping {_gib(data_bytes)} failed ({exc.strerror}); lower --l1-size-gb or raise `ulimit -v`"
        ) from None


def _check_available(need: int, path: Path | None) -> None:
    limits = {"memory": available_memory()}
    if path is not None:
        stat = os.statvfs(_SHM_DIR)
        limits[str(_SHM_DIR)] = stat.f_bavail * stat.f_frsize
    for what, have in limits.items():
        if need > have:
            raise StartupError(
                f"L1 pool: {_gib(need)} needed, {_gib(have)} available in {what};"
                f" lower --l1-size-gb or free {what}"
            )


def available_memory(
    meminfo: Path = Path("/proc/meminfo"),
    cgroup: Path = Path("/sys/fs/cgroup"),
    membership: Path = Path("/proc/self/cgroup"),
) -> int:
    """Bytes this process could still take: the system's MemAvailable, or less where a cgroup limits it."""
    available = _fields(meminfo).get("MemAvailable:", 0) * 1024
    for base, limit, usage, prefix in (
        ("", "memory.max", "memory.current", ""),  # cgroup v2
        ("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_"),  # cgroup v1
    ):
        for group in _groups_above(cgroup / base, base, membership):
            try:
                most, used = ((group / name).read_text().strip() for name in (limit, usage))
                stat = _fields(group / "memory.stat")
            except OSError:
                continue  # no such cgroup here
            if most.isdigit():
                # Cached file pages count as usage, but the kernel gives them up when memory is wanted.
                cached = sum(stat.get(f"{prefix}{kind}_file", 0) for kind in ("active", "inactive"))
                available = min(available, max(0, int(most) - int(used) + cached))
    return available


def _groups_above(root: Path, controller: str, membership: Path) -> list[Path]:
    """The cgroups whose limits hold for this process, from the root (a container's own) down to its own."""
    groups = [root]
    lines = membership.read_text().splitlines() if membership.is_file() else []
    for _, controllers, path in (line.split(":", 2) for line in lines):
        if controllers.split(",").count(controller):
            groups += [root.joinpath(*path.split("/")[1 : n + 1]) for n in range(1, path.count("/") + 1)]
    return groups


def _fields(path: Path) -> dict[str, int]:
    """First and second word of each line whose second is a number."""
    words = (line.split() for line in path.read_text().splitlines())
    return {w[0]: int(w[1]) for w in words if len(w) > 1 and w[1].isdigit()}


def _gib(n: int) -> str:
    return f"{n / (1 << 30):.2f} GiB"

"""Two processes and one device: memory by handle and by file descriptor, and the order of work by events.

    python two_processes.py [--kind cuda] [--device 0] [--mib 64]

The second process is this file again. It maps what it is sent, waits by its own stream for the event of the first,
answers with what it read, writes over it, and gives the mapping back.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import socket
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rig import MIB, Rig, rig

SECONDS = 60.0
WAYS = ("handle", "descriptor")
_MOST = 1 << 16


class Line:
    """Messages over a socket: JSON, and file descriptors beside it."""

    def __init__(self, end: socket.socket) -> None:
        end.settimeout(SECONDS)
        self._end = end

    def say(self, fd: int = -1, **fields: Any) -> None:
        """Send one."""
        data = json.dumps(fields).encode()
        assert len(data) < _MOST
        socket.send_fds(self._end, [data], [fd] if fd >= 0 else [])

    def hear(self) -> tuple[dict[str, Any], int]:
        """The next one, and its descriptor or -1. Nothing at all is the other's death."""
        data, fds, _, _ = socket.recv_fds(self._end, _MOST, 1)
        if not data:
            raise SystemExit("the other process has died; see above")
        return json.loads(data), (fds[0] if fds else -1)


def digest(data: bytes) -> str:
    """Of what was read."""
    return hashlib.sha256(data).hexdigest()


# ---- the second process


def serve(one: Rig, line: Line) -> None:
    """Do as the first one asks until it says that it is done."""
    while True:
        asked, fd = line.hear()
        if asked["way"] == "done":
            return
        nbytes, offset = asked["nbytes"], asked["offset"]
        base, give_back = _mapped(one, asked, fd)
        event = one.native.event_open(one.device, bytes.fromhex(asked["event"]))
        one.native.stream_wait_event(one.stream, event, one.device)
        seen = digest(one.read(base + offset, nbytes))
        one.native.memset_async(base + offset, asked["fill"], nbytes, one.stream, one.device)
        one.wait()
        one.native.event_destroy(event, one.device)
        give_back()
        line.say(digest=seen)


def _mapped(one: Rig, asked: dict[str, Any], fd: int) -> tuple[int, Callable[[], None]]:
    if asked["way"] == "handle":
        base = one.native.ipc_open(one.device, bytes.fromhex(asked["handle"]))
        return base, lambda: one.native.ipc_close(one.device, base)
    base = one.native.vmm_import_fd(one.device, fd, asked["allocation"])
    os.close(fd)
    return base, lambda: one.native.vmm_free(one.device, base)


# ---- the first process


def exchange(one: Rig, line: Line, way: str, nbytes: int) -> str:
    """Let the other one read and write; what is wrong, or nothing."""
    native, device = one.native, one.device
    ptr = native.mem_alloc(device, nbytes) if way == "handle" else native.vmm_alloc(device, nbytes)
    event = native.event_create(device, True, False)
    last = random.Random(way).randbytes(MIB)
    want = digest(last * (nbytes // MIB))
    fields: dict[str, Any] = {"way": way, "nbytes": nbytes, "event": native.event_export(event, device).hex()}
    fd = -1
    if way == "handle":
        handle, fields["offset"], fields["allocation"] = native.ipc_export(ptr, device)
        fields["handle"] = handle.hex()
    else:
        fd, fields["allocation"], fields["offset"] = native.vmm_export_fd(ptr, device)
    # Work that takes its time: only what was queued last may be seen.
    one.write(ptr, last)
    for _ in range(20):
        for at in range(MIB, nbytes, MIB):
            native.memset_async(ptr + at, 7, MIB, one.stream, device)
    for at in range(MIB, nbytes, MIB):
        one.copy(ptr + at, ptr, MIB)
    native.event_record(event, one.stream, device)
    line.say(fd, fill=0x5A, **fields)
    if fd >= 0:
        os.close(fd)
    answer, _ = line.hear()
    now = one.read(ptr, nbytes)
    native.event_destroy(event, device)
    (native.mem_free if way == "handle" else native.vmm_free)(device, ptr)
    if answer["digest"] != want:
        return "the other process read other bytes than were written before the event"
    return "" if now == b"\x5a" * nbytes else "what the other process wrote is not there"


def main(arguments: list[str]) -> int:
    """Exit code 1 if a way fails. A way that the device does not have is said and fails nothing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--kind", choices=("cuda", "rocm"), default="cuda", help="which driver (cuda)")
    parser.add_argument("--device", type=int, default=0, help="ordinal of the device (0)")
    parser.add_argument("--mib", type=int, default=64, help="size of what is shared (64)")
    parser.add_argument("--serve", type=int, default=-1, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    with rig(given.kind, given.device, 1) as one:
        if given.serve >= 0:
            serve(one, Line(socket.socket(fileno=given.serve)))
            return 0
        mine, theirs = socket.socketpair()
        command = [sys.executable, __file__, "--kind", given.kind, "--device", str(given.device)]
        with theirs:
            other = subprocess.Popen(
                [*command, "--serve", str(theirs.fileno())],
                pass_fds=[theirs.fileno()],
                stdin=subprocess.DEVNULL,
            )
        try:
            failed = [way for way in WAYS if not _try(one, Line(mine), way, given.mib * MIB)]
            Line(mine).say(way="done")
            return int(bool(failed) or other.wait(SECONDS) != 0)
        finally:
            mine.close()
            if other.poll() is None:
                other.kill()
            other.wait()


def _try(one: Rig, line: Line, way: str, nbytes: int) -> bool:
    if way == "descriptor" and not one.native.vmm_supported(one.device):
        print(f"memory by {way}: the device has none")
        return True
    fault = exchange(one, line, way, nbytes)
    print(f"memory by {way}, {nbytes // MIB} MiB, with an event: {fault or 'ok'}", flush=True)
    return not fault


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

"""Backends made of the CPU's, each with one fault, in one wheel: what the conformance kit must catch.

``FAKES`` has a row for each: the test of the kit that says what is wrong, and the level at which it does.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from zoo import wheels

PACKAGE = "lmcache_fakes"

_SPECS = """
from lmcache.v1.platform.cpu import CpuDeviceSpec


class Fake(CpuDeviceSpec):
    OPS = "Plain"

    @property
    def backend_name(self):
        return type(self).__name__.lower()

    @property
    def ops_cls(self):
        from lmcache_fakes import ops
        return getattr(ops, self.OPS)

    def is_available(self):
        try:
            import torch
        except ImportError:
            return False
        return hasattr(torch, "cpu")


class Asynchronous(Fake):
    OPS = "Ordered"

    def current_stream(self, device=None):
        from lmcache_fakes import ops
        return ops.stream()

    def conformance_stall(self, stream, seconds):
        import time
        stream.launch_host_func(lambda _: time.sleep(seconds))


class Fake_Good(Fake):
    pass


class Fake_Absent(Fake):
    def is_available(self):
        return False


class Fake_Async(Asynchronous):
    pass


class Fake_Idle(Fake):
    OPS = "Idle"


class Fake_Swaps(Fake):
    OPS = "Swaps"


class Fake_More(Fake):
    OPS = "More"


class Fake_Crash(Fake):
    OPS = "Crash"


class Fake_Hang(Fake):
    OPS = "Hang"


class Fake_Hasty(Asynchronous):
    OPS = "Hasty"


class Fake_Claims(Fake):
    ipc_wrapper_cls = None

    def is_lmcache_driven_available(self):
        return True


class Fake_Early(Asynchronous):
    def is_stream_event_complete(self, event):
        return True


class Fake_Blocks(Asynchronous):
    def is_stream_event_complete(self, event):
        event.synchronize()
        return True


class Fake_Offset(Fake):
    @property
    def ipc_wrapper_cls(self):
        from lmcache_fakes import wrappers
        return wrappers.Offset


class Fake_Copies(Fake):
    @property
    def ipc_wrapper_cls(self):
        from lmcache_fakes import wrappers
        return wrappers.Copies


class Fake_Leaks(Fake):
    @property
    def ipc_wrapper_cls(self):
        from lmcache_fakes import wrappers
        return wrappers.Leaks
"""

_EAGER = """
import torch
from lmcache_fakes import Fake


class Fake_Eager(Fake):
    pass
"""

_OPS = """
import ctypes
import threading
import time

from lmcache.v1.platform.base.op_contract import serves, takes
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps
from lmcache.v1.platform.cpu.stream import CpuStream
from lmcache.v1.platform.torch_ops import block_transfer

_RULE = block_transfer.multi_layer_block_kv_transfer.serves
_stream = None


def stream():
    global _stream
    if _stream is None:
        _stream = CpuStream()
    return _stream


class Plain(CpuDeviceOps):
    pass


class Ordered(CpuDeviceOps):
    is_synchronous = False

    def __init__(self):
        self._done, self._lock = [], threading.Lock()

    def record_completion_on_stream(self, stream_ptr, kind, payload):
        stream().launch_host_func(self._note, (kind, payload))

    def _note(self, item):
        with self._lock:
            self._done.append(item)

    def drain_recorded_completions(self):
        with self._lock:
            done, self._done = self._done, []
        return done


class Hasty(Ordered):
    def record_completion_on_stream(self, stream_ptr, kind, payload):
        self._note((kind, payload))


def wrong(change):
    class Wrong(CpuDeviceOps):
        @serves(_RULE)
        @takes("tensors")
        def multi_layer_block_kv_transfer(
            self, paged, objects, block_ids, device, direction, shape_desc, chunk_size, engine_kv_format, skip=0
        ):
            ids = [int(i) for i in block_ids]
            ids = change(ids, int(direction), shape_desc)
            if ids is not None:
                super().multi_layer_block_kv_transfer(
                    paged, objects, ids, device, direction, shape_desc, chunk_size, engine_kv_format, skip
                )
    return Wrong


def swapped(ids, direction, desc):
    return [ids[1], ids[0], *ids[2:]] if direction == 1 and len(ids) > 1 else ids


def one_more(ids, direction, desc):
    return [*ids, (ids[-1] + 1) % desc.nb] if direction == 0 and ids else ids


def hang(*_):
    time.sleep(600)


Idle = wrong(lambda *_: None)
Swaps = wrong(swapped)
More = wrong(one_more)
Crash = wrong(lambda *_: ctypes.string_at(0))
Hang = wrong(hang)
"""

_WRAPPERS = """
from lmcache.v1.platform.cpu.ipc_wrapper import CpuShmTensorWrapper

_KEPT = []


class Offset(CpuShmTensorWrapper):
    def to_tensor(self):
        mapped = super().to_tensor()
        return mapped.roll(1, -1) if mapped.is_contiguous() else mapped


class Copies(CpuShmTensorWrapper):
    def to_tensor(self):
        mapped = super().to_tensor()
        return mapped.clone() if mapped.is_contiguous() else mapped


class Leaks(CpuShmTensorWrapper):
    def to_tensor(self):
        import mmap
        _KEPT.append(mmap.mmap(-1, 4096, prot=mmap.PROT_READ if len(_KEPT) % 2 else mmap.PROT_WRITE))
        return super().to_tensor()
"""


@dataclass(frozen=True)
class FakeBackend:
    """One backend of the wheel, and the test of the kit that catches it."""

    name: str
    caught_by: str
    level: str = "basic"


FAKES = (
    FakeBackend("fake_idle", "test_block_transfer.test_a_copy_that_is_asked_for_is_made"),
    FakeBackend("fake_swaps", "test_block_transfer.test_blocks_come_in_the_order_of_their_ids"),
    FakeBackend("fake_more", "test_block_transfer.test_no_block_is_written_that_was_not_named"),
    FakeBackend("fake_hasty", "test_streams.test_a_busy_stream_delays_the_completion"),
    FakeBackend("fake_early", "test_streams.test_an_event_is_not_complete_while_the_work_before_it_runs"),
    FakeBackend("fake_blocks", "test_streams.test_asking_an_event_does_not_wait"),
    FakeBackend("fake_claims", "test_level.test_a_capability_is_not_claimed_without_what_it_needs"),
    FakeBackend("fake_eager", "test_identity.test_importing_and_making_the_spec_imports_nothing_heavy"),
    FakeBackend(
        "fake_offset", "test_tensor_ipc.test_the_other_process_sees_the_same_bytes", "lmcache-driven"
    ),
    FakeBackend("fake_copies", "test_tensor_ipc.test_what_one_writes_the_other_sees", "lmcache-driven"),
    FakeBackend(
        "fake_leaks", "test_tensor_ipc.test_mapping_and_closing_leaves_nothing_open", "lmcache-driven"
    ),
)
_SOUND = ("fake_good", "fake_absent", "fake_async", "fake_crash", "fake_hang")


def install_fakes(folder: Path) -> Path:
    """Build the wheels and install them; the folder for PYTHONPATH.

    The one that imports torch too early is in a folder ``eager`` beside it, for every process would pay for it.
    """
    names = [*_SOUND, *(fake.name for fake in FAKES)]
    lazy = {name: f"{PACKAGE}:{_class(name)}" for name in names if name != "fake_eager"}
    files: dict[str, str | bytes] = {
        f"{PACKAGE}/__init__.py": _SPECS, f"{PACKAGE}/ops.py": _OPS, f"{PACKAGE}/wrappers.py": _WRAPPERS,
    }  # fmt: skip
    one = wheels.build(folder, "lmcache-fakes", files, _points(lazy), ["lmcache>=0"])
    files = {f"{PACKAGE}_eager/__init__.py": _EAGER}
    points = _points({"fake_eager": f"{PACKAGE}_eager:Fake_Eager"})
    other = wheels.build(folder, "lmcache-fakes-eager", files, points, ["lmcache>=0"])
    wheels.install([(one, folder / "site"), (one, folder / "eager"), (other, folder / "eager")])
    return folder / "site"


def install_badly_packed(folder: Path, library: bytes) -> Path:
    """A wheel whose code is sound, and whose contents are not: a compiled library that is tied to torch, in a
    wheel for any platform, beside a top-level package ``tests``, for no lmcache in particular."""
    files: dict[str, str | bytes] = {
        "lmcache_packed/__init__.py": _SPECS.replace(PACKAGE, "lmcache_packed"),
        "lmcache_packed/ops.py": _OPS, "lmcache_packed/_native.so": library, "tests/__init__.py": "",
    }  # fmt: skip
    points = _points({"fake_good": "lmcache_packed:Fake_Good"})
    wheels.install([(wheels.build(folder, "lmcache-packed", files, points, []), folder / "packed")])
    return folder / "packed"


def _points(entries: Mapping[str, str]) -> str:
    return f"[{wheels.GROUP}]\n" + "".join(f"{name} = {value}\n" for name, value in entries.items())


def _class(name: str) -> str:
    return "_".join(part.capitalize() for part in name.split("_"))


def verify(site: Path, *arguments: str, seconds: float = 300.0) -> subprocess.CompletedProcess[str]:
    """Run ``lmcache device verify`` where the wheel is installed."""
    path = os.pathsep.join(part for part in (str(site), os.environ.get("PYTHONPATH", "")) if part)
    return subprocess.run(
        [sys.executable, "-m", "lmcache.cli.main", "device", "verify", *arguments],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=seconds,
    )

"""A process beside the test's, with the same stand-in and the same fake driver. ``Peer`` is the test's end of it.

Requests and answers are lines of JSON; what raises there is raised here as ``PeerFailed``.
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

__all__ = ["Gate", "Peer", "PeerFailed"]


class PeerFailed(Exception):
    """What a request raised in the other process."""


class Peer:
    """The other process; ends with the ``with`` block."""

    def __init__(self) -> None:
        here = Path(__file__).parent
        code = f"import sys; sys.path.insert(0, {str(here)!r}); import peer; peer.serve()"
        self.process = subprocess.Popen(
            [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
        )

    def ask(self, what: str, **arguments: Any) -> Any:
        """Let it do something and wait for the answer."""
        self.tell(what, **arguments)
        return self.answer()

    def tell(self, what: str, **arguments: Any) -> None:
        """Let it do something; ``answer`` waits."""
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps({"what": what, **arguments}) + "\n")

    def answer(self) -> Any:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            raise PeerFailed(f"the process has ended with {self.process.wait()}")
        answer = json.loads(line)
        if "error" in answer:
            raise PeerFailed(answer["error"])
        return answer["value"]

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()

    def __enter__(self) -> Peer:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.process.kill()
        self.process.communicate()


class Gate:
    """Holds a stream until it is opened: nothing that is queued behind it runs before."""

    def __init__(self) -> None:
        import standin

        self._native = standin.native()
        self._ptr = self._native.host_alloc(8, 3, 0)
        self._word = ctypes.c_uint64.from_address(self._ptr)
        self._word.value = 0

    def hold(self, stream: Any) -> None:
        self._native.stream_wait_u64_geq(stream.cuda_stream, self._ptr, 1, 0)

    def open(self) -> None:
        self._word.value = 1


# --- the other process -------------------------------------------------------------------------------------


class _Served:
    def __init__(self) -> None:
        import standin
        import torch

        standin.install()
        self.standin, self.torch = standin, torch
        self.native = standin.native()
        self.wrappers: list[Any] = []
        self.tensors: list[Any] = []
        self.kept: list[Any] = []
        self.gates: list[Gate] = []
        self.backend: Any = None
        self.event: Any = None

    @property
    def stream(self) -> Any:
        if not hasattr(self, "_stream"):
            self._stream = self.standin.Stream()
        return self._stream

    # memory
    def map(self, wires: list[str]) -> list[Any]:
        import msgspec

        from lmcache_cuda.ipc import CudaIPCWrapper

        self.wrappers += [CudaIPCWrapper.from_wire(msgspec.msgpack.decode(bytes.fromhex(w))) for w in wires]
        self.tensors = [wrapper.to_tensor() for wrapper in self.wrappers]
        return self.seen()

    def seen(self) -> list[Any]:
        return [
            [self._one(part) for part in tensor] if isinstance(tensor, tuple) else self._one(tensor)
            for tensor in self.tensors
        ]

    def _one(self, tensor: Any) -> Any:
        raw = tensor.contiguous().view(-1).view(self.torch.uint8)
        return [list(tensor.shape), list(tensor.stride()), str(tensor.dtype), raw.tolist()]

    def fill(self, index: int, value: int) -> None:
        self.tensors[index].fill_(value)

    def close(self) -> None:
        for wrapper in self.wrappers:
            wrapper.close()
        self.wrappers, self.tensors = [], []

    def mapped(self) -> int:
        import gc

        from lmcache_cuda.ipc_ways import MAPPED

        gc.collect()
        return len(MAPPED)

    def export(self, nbytes: int, value: int, vmm: bool) -> str:
        import msgspec

        from lmcache_cuda.ipc import CudaIPCWrapper

        tensor = self.standin.device_tensor(self.torch.full((nbytes,), value, dtype=self.torch.uint8), vmm)
        wrapper = CudaIPCWrapper.wrap(tensor)
        self.kept += [tensor, wrapper]
        return msgspec.msgpack.encode(wrapper.to_wire()).hex()

    # events
    def events(self, kind: str, unseen_seconds: float = 60.0) -> None:
        from lmcache_cuda.events import DriverEventBackend
        from lmcache_cuda.timeline import PAGES, TimelineEventBackend

        self.backend = (
            DriverEventBackend()
            if kind == "driver"
            else TimelineEventBackend(PAGES[kind], unseen_seconds=unseen_seconds)
        )
        self.backend.check_event_support("cpu")

    def hold(self) -> None:
        self.gates.append(Gate())
        self.gates[-1].hold(self.stream)

    def open(self) -> None:
        for gate in self.gates:
            gate.open()

    def record(self) -> str:
        self.event = self.backend.create_event("cpu")
        self.backend.record_event(self.event, self.stream)
        return self.backend.export_event(self.event, "cpu").hex()

    def write(self, index: int, value: int) -> None:
        """Queue it on the stream."""
        tensor = self.tensors[index]
        self.native.memset_async(tensor.data_ptr(), value, tensor.numel(), self.stream.cuda_stream, 0)

    def synchronize(self) -> None:
        self.stream.synchronize()


def serve() -> None:
    served = _Served()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"value": getattr(served, request.pop("what"))(**request)}
        except Exception as exc:
            answer = {"error": f"{type(exc).__name__}: {exc}"}
        print(json.dumps(answer), flush=True)

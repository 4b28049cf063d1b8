"""A second process beside a test, which has the same backend."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import select
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

__all__ = ["Helper", "Peer", "PeerFailed", "digest", "layers", "peer"]

_SECONDS = 60.0
_CHILD = Path(__file__).with_name("suite") / "child.py"


class PeerFailed(Exception):
    """The other process could not do what it was asked; the text is its own."""


class Peer:
    """Asks the other process, one request at a time. It ends with its standard input."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, str(_CHILD)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=dict(os.environ),
        )

    def ask(self, do: str, **fields: Any) -> Any:
        """The answer.

        Raises:
            PeerFailed: if it cannot, has died, or does not answer in time.
        """
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        try:
            self.process.stdin.write(json.dumps({"do": do, **fields}).encode() + b"\n")
            self.process.stdin.flush()
        except BrokenPipeError:
            raise PeerFailed(f"{do}: the other process has died") from None
        ready, _, _ = select.select([self.process.stdout], [], [], _SECONDS)
        line = self.process.stdout.readline() if ready else b""
        if not line:
            self.kill()
            raise PeerFailed(f"{do}: the other process died or gave no answer in {_SECONDS:g} s")
        reply = json.loads(line)
        if not reply["ok"]:
            raise PeerFailed(f"{do}: {reply['answer']}")
        return reply["answer"]

    def map(self, wires: Sequence[bytes]) -> list[dict[str, Any]]:
        """Let it import and map; what each tensor is and holds, as it sees them: ``sum``, ``digest``,
        ``shape``, ``stride``, ``dtype`` and ``device``."""
        answer: list[dict[str, Any]] = self.ask("map", wires=[_text(wire) for wire in wires])
        return answer

    def sums(self) -> list[int]:
        """The sums of the bytes of the tensors that it has mapped."""
        answer: list[int] = self.ask("sums")
        return answer

    def export(self, nbytes: int, value: int) -> list[bytes]:
        """Let it export a tensor of ``nbytes`` times ``value``; its descriptors."""
        return [base64.b64decode(wire) for wire in self.ask("export", nbytes=nbytes, value=value)]

    def export_layers(self, count: int, shape: Sequence[int]) -> list[bytes]:
        """Let it export :func:`layers`; their descriptors."""
        answer = self.ask("export_layers", count=count, shape=list(shape))
        return [base64.b64decode(wire) for wire in answer]

    def after(self, event: bytes) -> int:
        """The sum of the first tensor's bytes, read by its stream after the event."""
        return int(self.ask("after", event=_text(event)))

    def kill(self) -> None:
        """End it as a crash would."""
        self.process.kill()
        self.process.wait()
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                try:
                    pipe.close()
                except BrokenPipeError:  # what was not flushed has nobody to go to
                    continue


def layers(count: int, shape: Sequence[int]) -> list[Any]:
    """Tensors of int16 on the host, the same in every process."""
    import torch

    generator = torch.Generator().manual_seed(count)
    return [
        torch.randint(0, 1 << 15, tuple(shape), dtype=torch.int16, generator=generator) for _ in range(count)
    ]


def digest(tensor: Any) -> str:
    """A digest of a tensor's bytes in the order of its elements."""
    import torch

    return hashlib.sha256(tensor.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


@contextmanager
def peer() -> Iterator[Peer]:
    """A process for one test."""
    one = Peer()
    try:
        yield one
    finally:
        one.kill()


class Helper:
    """A process that tests share: starting one takes as long as importing torch does."""

    def __init__(self) -> None:
        self._peer: Peer | None = None

    def __enter__(self) -> Peer:
        if self._peer is None or self._peer.process.poll() is not None:
            self._peer = Peer()
        return self._peer

    def __exit__(self, *exc_info: object) -> None:
        # What a test left mapped must not be what the next one sees.
        if self._peer is not None and self._peer.process.poll() is None:
            try:
                self._peer.ask("close")
            except PeerFailed:
                self.close()

    def close(self) -> None:
        """End it."""
        if self._peer is not None:
            self._peer.kill()
            self._peer = None

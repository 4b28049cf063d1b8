"""``fault``: memory that errs on demand, for tests and for operators who want to see what a bad tier does.

Every fault has a rate between 0 and 1, drawn per call (``error``, ``hang``, ``wrong_answer``) or per object (the
others), from one seed. ``latency_ms`` holds always.
"""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec

from lmcache.v1.storage.l2.adapter import AdapterError, Call, Held, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.options import Size, read_options

__all__ = ["FaultAdapter", "FaultOptions", "make"]

Rate = Annotated[float, msgspec.Meta(ge=0, le=1)]
Method = Literal["contains", "store", "load", "delete"]


class FaultOptions(msgspec.Struct, frozen=True, kw_only=True):
    """Options of ``{"type": "fault", …}``."""

    error: Rate = 0.0
    """The call raises."""
    hang: Rate = 0.0
    """The call does not return before ``hang_seconds``, or :meth:`FaultAdapter.release`; then it goes on as if
    nothing had been."""
    hang_seconds: Annotated[float, msgspec.Meta(gt=0)] = 3600.0
    wrong_answer: Rate = 0.0
    """The call answers for one object too few."""
    miss: Rate = 0.0
    """An object that is there is not given, or not seen."""
    phantom: Rate = 0.0
    """``contains`` says yes to what is not there."""
    short: Rate = 0.0
    """A load fills half of the memory and claims all."""
    empty: Rate = 0.0
    """A load fills nothing and claims all."""
    wrong_bytes: Rate = 0.0
    """A load changes one byte."""
    wrong_object: Rate = 0.0
    """A load gives another object of the same size, with its own, valid header."""
    lost: Rate = 0.0
    """A store claims to have kept what it dropped."""
    torn: Rate = 0.0
    """A store keeps the second half as zeros, and claims all."""
    latency_ms: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    on: tuple[Method, ...] = ("contains", "store", "load", "delete")
    """Methods that may err."""
    seed: int = 0
    capacity: Size = Size(0)
    """0: none."""
    shared: bool = False
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 2
    batch: Annotated[int, msgspec.Meta(ge=1, le=1024)] = 16


_RATES = (
    "error", "hang", "wrong_answer", "miss", "phantom", "short", "empty", "wrong_bytes", "wrong_object", "lost", "torn",
)  # fmt: skip


class _Object(NamedTuple):
    header: bytes
    payload: bytes
    used: float


def make(options: Mapping[str, Any]) -> FaultAdapter:
    """The adapter of an operator's options.

    Raises:
        ConfigError: for an option that cannot be used.
    """
    return FaultAdapter(read_options("fault", FaultOptions, options))


class FaultAdapter(StorageAdapter):
    """See the module. ``plan`` may be changed at any time by :meth:`set`."""

    def __init__(self, options: FaultOptions = FaultOptions()) -> None:  # noqa: B008 -- frozen
        self.plan = options
        self.shared, self.threads, self.batch = options.shared, options.threads, options.batch
        self.objects: dict[bytes, _Object] = {}
        self.calls = 0
        self.running = 0
        """Calls inside at this moment, those that hang included."""
        self._random = random.Random(options.seed)  # noqa: S311 -- faults, not secrets
        self._mutex = threading.Lock()
        self._released = threading.Event()

    # ---- the drill

    def set(self, **changes: Any) -> None:
        """Change options of the plan, for calls that begin from now on."""
        with self._mutex:
            self.plan = msgspec.structs.replace(self.plan, **changes)

    def calm(self) -> None:
        """No fault from now on; what hangs goes on."""
        self.set(**dict.fromkeys(_RATES, 0.0), latency_ms=0.0)
        self.release()

    def release(self) -> None:
        """Let go on what hangs now."""
        with self._mutex:
            released, self._released = self._released, threading.Event()
        released.set()

    # ---- the adapter

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._call("contains") as roll:
            return roll.answer([not roll("miss") if key in self.objects else roll("phantom") for key in keys])

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        with self._call("store") as roll:
            answers = []
            for key, header, payload in objects:
                kept = (roll.hung or not call.over) and self._keep(key, header, bytes(payload), roll)
                answers.append(kept)
            return roll.answer(answers)

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        with self._call("load") as roll:
            late = call.over and not roll.hung  # what hung does not know how late it is
            return roll.answer([None if late else self._give(want, roll) for want in wants])

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        with self._call("delete") as roll:
            return roll.answer([self.objects.pop(key, None) is not None or True for key in keys])

    def scan(self) -> Iterator[Held]:
        for key, found in list(self.objects.items()):
            yield Held(key, len(found.header) + len(found.payload), found.used)

    def headers(self, keys: Sequence[bytes], call: Call) -> list[bytes | None]:
        found = [self.objects.get(key) for key in keys]
        return [None if item is None else item.header for item in found]

    def usage(self) -> Usage:
        held = list(self.objects.values())
        used = sum(len(item.header) + len(item.payload) for item in held)
        return Usage(used, len(held), self.plan.capacity)

    def describe(self) -> str:
        faults = ", ".join(
            f"{name} {getattr(self.plan, name):g}" for name in _RATES if getattr(self.plan, name)
        )
        return f"memory that errs ({faults or 'on demand'})"

    def close(self) -> None:
        self.release()

    # ---- how it errs

    def _call(self, method: Method) -> _Dice:
        return _Dice(self, method)

    def _keep(self, key: bytes, header: bytes, payload: bytes, roll: _Dice) -> bool:
        capacity = self.plan.capacity
        if capacity and self.usage().used_bytes + len(header) + len(payload) > capacity:
            return False
        if roll("torn"):
            payload = payload[: len(payload) // 2].ljust(len(payload), b"\0")
        if not roll("lost"):
            self.objects[key] = _Object(header, payload, time.time())
        return True

    def _give(self, want: Want, roll: _Dice) -> bytes | None:
        key, memory = want
        found = self.objects.get(key)
        if found is not None and roll("wrong_object"):
            others = [o for k, o in list(self.objects.items()) if k != key and len(o.payload) == len(memory)]
            found = others[roll.below(len(others))] if others else None
        if found is None or len(found.payload) != len(memory) or roll("miss"):
            return None
        if roll("empty"):
            return found.header
        size = len(memory) // 2 if roll("short") else len(memory)
        memory[:size] = found.payload[:size]
        if roll("wrong_bytes"):
            memory[roll.below(len(memory))] ^= 1 + roll.below(255)
        return found.header


class _Dice:
    """One call: counts it, errs at its beginning, and draws its faults."""

    def __init__(self, adapter: FaultAdapter, method: Method) -> None:
        self._adapter = adapter
        with adapter._mutex:  # together: who hangs by this plan is let go by the release that follows it
            self._plan, self._released = adapter.plan, adapter._released
        self._errs = method in self._plan.on
        self.hung = False

    def __call__(self, fault: str) -> bool:
        rate = getattr(self._plan, fault) if self._errs else 0.0
        with self._adapter._mutex:
            return bool(rate) and self._adapter._random.random() < rate

    def below(self, count: int) -> int:
        with self._adapter._mutex:
            return self._adapter._random.randrange(count)

    def answer(self, answers: list[Any]) -> list[Any]:
        """What the call returns."""
        return answers[:-1] if self("wrong_answer") else answers

    def __enter__(self) -> _Dice:
        adapter = self._adapter
        with adapter._mutex:
            adapter.calls += 1
            adapter.running += 1
        try:
            if self._plan.latency_ms:
                time.sleep(self._plan.latency_ms / 1000)
            if self("hang"):
                self.hung = True
                self._released.wait(self._plan.hang_seconds)
            if self("error"):
                kinds = (AdapterError, OSError, RuntimeError, SystemExit)
                raise kinds[self.below(len(kinds))]("an error on demand")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        with self._adapter._mutex:
            self._adapter.running -= 1

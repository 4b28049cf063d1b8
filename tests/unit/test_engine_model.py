"""Any history of calls, with a disk below and without, with room and without: right values, kept promises, no leaks."""

from __future__ import annotations

import shutil
import tempfile
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

torch = pytest.importorskip("torch")

from helpers.engine_rig import CHUNK, Rig  # noqa: E402

pytestmark = pytest.mark.torch

PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=4 * CHUNK + 1)
IDS = st.sampled_from(["a", "b", "c"])


class History(RuleBasedStateMachine):
    """With room for everything: what the model says is exactly what happens."""

    changes: dict[str, Any] = {}  # noqa: RUF012
    exact = True
    on_disk = False

    def __init__(self) -> None:
        super().__init__()
        self.folder = tempfile.mkdtemp(prefix="engine-model-")
        self.rig = self.start()
        self.kept: set[tuple[int, ...]] = set()
        """Prefixes that end with a stored chunk."""
        self.pinned: dict[str, tuple[list[int], int]] = {}

    def start(self) -> Rig:
        changes = {
            key: value.format(self.folder) if isinstance(value, str) else value
            for key, value in self.changes.items()
        }
        return Rig(None, **changes)

    def ends(self, tokens: list[int]) -> list[int]:
        ends = list(range(CHUNK, len(tokens) + 1, CHUNK))
        if self.rig.config.save_unfull_chunk and len(tokens) % CHUNK:
            ends.append(len(tokens))
        return ends

    def expected(self, tokens: list[int]) -> int:
        found = 0
        for end in self.ends(tokens):
            if tuple(tokens[:end]) not in self.kept:
                break
            found = end
        return found

    def check(self, found: int, tokens: list[int]) -> None:
        expected = self.expected(tokens)
        assert found == expected if self.exact else found <= expected

    @rule(tokens=PROMPTS)
    def store(self, tokens: list[int]) -> None:
        self.rig.store(tokens)
        if not self.rig.engine.is_frozen():
            self.kept.update(tuple(tokens[:end]) for end in self.ends(tokens))

    @rule(tokens=PROMPTS)
    def lookup(self, tokens: list[int]) -> None:
        self.check(self.rig.engine.lookup(tokens), tokens)

    @rule(tokens=PROMPTS)
    def retrieve(self, tokens: list[int]) -> None:
        self.check(self.rig.retrieve(tokens), tokens)

    @rule(tokens=PROMPTS, lookup_id=IDS)
    def lookup_and_pin(self, tokens: list[int], lookup_id: str) -> None:
        found = self.rig.engine.lookup(tokens, pin=True, lookup_id=lookup_id)
        self.check(found, tokens)
        if found:
            self.pinned[lookup_id] = (tokens, found)
        else:
            self.check_pin_of(lookup_id)

    def check_pin_of(self, lookup_id: str) -> None:
        """A lookup that found nothing leaves an older one of its id alone."""

    @rule(tokens=PROMPTS, lookup_id=IDS)
    def look_up_asynchronously(self, tokens: list[int], lookup_id: str) -> None:
        self.rig.engine.async_lookup_and_prefetch(lookup_id, tokens)
        found = self.rig.engine.lookup_result(lookup_id, 10)
        assert found is not None
        self.check(found, tokens)
        self.pinned[lookup_id] = (tokens, found)

    @precondition(lambda self: self.pinned)
    @rule()
    def what_is_pinned_can_be_retrieved(self) -> None:
        lookup_id, (tokens, found) = next(iter(self.pinned.items()))
        assert self.rig.retrieve(tokens[:found], req_id=lookup_id) == found

    @rule(lookup_id=IDS)
    def unpin(self, lookup_id: str) -> None:
        self.rig.engine.lookup_unpin(lookup_id)
        self.pinned.pop(lookup_id, None)

    @precondition(lambda self: not self.pinned)
    @rule(tokens=PROMPTS)
    def clear_one(self, tokens: list[int]) -> None:
        self.rig.engine.flush()
        count = self.rig.engine.clear(tokens)
        gone = {tuple(tokens[:end]) for end in self.ends(tokens)} & self.kept
        starts = {end: start for start, end in zip([0, *self.ends(tokens)], self.ends(tokens), strict=False)}
        expected = sum(len(prefix) - starts[len(prefix)] for prefix in gone)
        assert count == expected if self.exact else count <= expected
        self.kept -= gone

    @precondition(lambda self: not self.pinned)
    @rule()
    def clear_all(self) -> None:
        self.rig.engine.flush()
        self.rig.engine.clear()
        self.kept.clear()

    @precondition(lambda self: not self.pinned)
    @rule()
    def close_and_start(self) -> None:
        self.rig.engine.close()
        self.rig = self.start()
        if not self.rig.config.local_disk:
            self.kept.clear()

    @invariant()
    def nobody_holds_an_object_between_calls(self) -> None:
        assert self.rig.engine.chunk_store.pool.live == 0

    def teardown(self) -> None:
        for lookup_id in list(self.pinned):
            self.rig.engine.lookup_unpin(lookup_id)
        self.rig.engine.lookup_unpin(["a", "b", "c"])
        self.rig.assert_nothing_is_held()
        self.rig.engine.close()
        shutil.rmtree(self.folder)


class InMemory(History):
    """Tails are kept, too."""

    changes = {"save_unfull_chunk": True}  # noqa: RUF012


class LayerByLayer(History):
    changes = {"use_layerwise": True}  # noqa: RUF012


class OverDisk(History):
    """A restart keeps everything; L1 is only passed through."""

    changes = {"local_cpu": False, "save_unfull_chunk": True}  # noqa: RUF012
    on_disk = True


class UnderPressure(History):
    """A dozen objects fit, a page each."""

    changes = {"use_layerwise": True}  # noqa: RUF012
    exact = False

    def start(self) -> Rig:
        rig = super().start()
        # Take all but a few pages away, so that histories of a few chunks meet the limit.
        allocator = rig.engine.stack.l1._allocator
        while allocator.capacity - allocator.used > 12 * 4096:
            allocator.allocate(4096)
        rig.engine.stack.l1._watermark = 1.0
        rig.engine.stack.l1._evict_ratio = 0.0
        return rig


for machine in (InMemory, LayerByLayer, OverDisk, UnderPressure):
    machine.TestCase.settings = settings(max_examples=15, stateful_step_count=20)

TestInMemory = InMemory.TestCase
TestLayerByLayer = LayerByLayer.TestCase
TestOverDisk = OverDisk.TestCase
TestUnderPressure = UnderPressure.TestCase

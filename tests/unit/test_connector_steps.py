"""Layerwise connectors as generators: how many steps, what each promises, and how they may end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from lmcache.errors import LayoutError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.connector_cases import LAYERWISE, Model, Store, Transfer, objects_for, save, whole  # noqa: E402
from helpers.slot_cases import Case, build, content, zeroed  # noqa: E402

CASE = Case(nl=4, nb=4, bs=4, nh=2, hs=4)
CHUNKS = Transfer(list(range(16)), [1, 6], [5, 11], 0)
NONE = Transfer(list(range(16)), [], [], 0)
STEPS = range(CASE.nl + 2)
KINDS = pytest.mark.parametrize("kind", LAYERWISE.values(), ids=LAYERWISE.keys())


class Rig:
    """A connector over a cache of one layout, with objects for two chunks."""

    def __init__(self, kind: type[Any], fmt: int = 2, transfer: Transfer = CHUNKS) -> None:
        self.model = Model(fmt, CASE)
        self.connector = whole(kind, self.model, use_gpu=True)
        self.pages = build(fmt, CASE)
        self.store, self.transfer = Store(), transfer
        self.slots = torch.tensor(transfer.slots)
        self.connector.initialize_kvcaches_ptr(kvcaches=self.pages)
        self.objects = objects_for(self.connector, self.model, transfer, self.store)

    def saving(self, sync: bool = True) -> Any:
        return self.connector.batched_from_gpu(
            self.objects, self.transfer.starts, self.transfer.ends,
            kvcaches=self.pages, slot_mapping=self.slots, sync=sync,
        )  # fmt: skip

    def loading(self, pages: Any, sync: bool = True) -> Any:
        return self.connector.batched_to_gpu(
            self.transfer.starts, self.transfer.ends, kvcaches=pages, slot_mapping=self.slots, sync=sync
        )

    def saved(self) -> Rig:
        kwargs = {"kvcaches": self.pages, "slot_mapping": self.slots, "sync": True}
        save(self.connector, self.objects, self.transfer, **kwargs)
        return self

    def is_clean(self) -> None:
        """Nobody but the test holds an object, nobody holds a buffer, and the next transfer works."""
        for obj in self.store.given:
            assert (obj.get_ref_count(), obj.get_pin_count()) == (1, 0)
        assert getattr(self.connector, "_pass", None) is None
        target = zeroed(self.pages)
        self.saved()
        running = self.loading(target)
        next(running)
        for layer in self.objects:
            running.send(layer)
        next(running)
        found, held = content(self.model.fmt, target), content(self.model.fmt, self.pages)
        for _, slot in self.transfer.loaded:
            assert (found[:, :, slot] == held[:, :, slot]).all()
        self.store.give_back()
        assert self.store.allocator.live == 0


def engine(running: Any, layers: list[Any]) -> Iterator[int]:
    """Drives a load as an engine does, from a generator of its own: a StopIteration would end up as RuntimeError."""
    next(running)
    for at, objects in enumerate(layers):
        yield at
        running.send(objects)
    yield len(layers)
    next(running)
    yield len(layers) + 1


@KINDS
@pytest.mark.parametrize("transfer", [CHUNKS, NONE], ids=["two chunks", "no chunk"])
def test_a_store_is_one_step_more_than_there_are_layers_and_a_load_two(kind: Any, transfer: Transfer) -> None:
    rig = Rig(kind, transfer=transfer)
    assert sum(1 for _ in rig.saving()) == CASE.nl + 1
    assert len(list(engine(rig.loading(zeroed(rig.pages)), rig.objects))) == CASE.nl + 2
    running = rig.loading(zeroed(rig.pages))
    assert sum(1 for _ in running) == CASE.nl + 2, "also where layers are not sent"


@KINDS
def test_without_a_chunk_not_even_a_cache_is_needed(kind: Any) -> None:
    connector = whole(kind, Model(2, CASE), use_gpu=True)
    assert sum(1 for _ in connector.batched_from_gpu([], [], [], sync=False)) == CASE.nl + 1
    assert sum(1 for _ in connector.batched_to_gpu([], [], sync=False)) == CASE.nl + 2


@KINDS
def test_chunks_that_are_all_cached_are_steps_without_work(kind: Any) -> None:
    rig = Rig(kind).saved()
    target = zeroed(rig.pages)
    running = rig.connector.batched_to_gpu(
        CHUNKS.starts, CHUNKS.ends, kvcaches=target, slot_mapping=rig.slots, sync=True, vllm_cached_tokens=11
    )
    assert len(list(engine(running, rig.objects))) == CASE.nl + 2
    assert not content(2, target).any()
    rig.is_clean()


@KINDS
@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("end", ["close", "drop", "throw"])
def test_a_transfer_may_end_after_any_step(kind: Any, steps: int, end: str) -> None:
    for load in (False, True):
        rig = Rig(kind).saved()
        running = rig.loading(zeroed(rig.pages)) if load else rig.saving(sync=False)
        for step in range(min(steps, CASE.nl + 1)):
            if load and 1 <= step <= CASE.nl:
                running.send(rig.objects[step - 1])
            else:
                next(running)
        if end == "close":
            running.close()
        elif end == "throw" and steps:
            with pytest.raises(KeyError):
                running.throw(KeyError("the request was aborted"))
        del running
        rig.is_clean()


@KINDS
def test_a_layer_that_is_not_sent_leaves_its_pages_alone(kind: Any) -> None:
    rig = Rig(kind).saved()
    target = zeroed(rig.pages)
    running = rig.loading(target)
    next(running)
    for layer in range(CASE.nl):
        running.send(None if layer == 1 else rig.objects[layer])
    next(running)
    assert [bool(content(2, target)[:, layer].any()) for layer in range(CASE.nl)] == [True, False, True, True]
    rig.is_clean()


@KINDS
def test_the_store_of_a_layer_is_done_one_step_later(kind: Any) -> None:
    rig = Rig(kind)
    expected = Rig.saved(rig).objects
    before = [[obj.raw_tensor.clone() for obj in layer] for layer in expected]
    for layer in rig.objects:
        for obj in layer:
            obj.raw_tensor.zero_()
    running = rig.saving()
    next(running)
    for layer in range(CASE.nl):
        next(running)
        assert all(
            obj.raw_tensor.equal(old) for obj, old in zip(rig.objects[layer], before[layer], strict=True)
        )
    rig.is_clean()


@KINDS
def test_what_does_not_fit_is_refused_before_the_first_step_and_leaves_nothing(kind: Any) -> None:
    rig = Rig(kind)
    common = {"kvcaches": rig.pages, "slot_mapping": rig.slots}
    with pytest.raises(LayoutError, match=r"expected 4 lists of 2 objects"):
        rig.connector.batched_from_gpu(rig.objects[1:], CHUNKS.starts, CHUNKS.ends, sync=True, **common)
    with pytest.raises(LayoutError, match="expected them within the 16 tokens"):
        rig.connector.batched_to_gpu([1], [17], sync=True, **common)
    with pytest.raises(LayoutError, match="slot_mapping=NoneType"):
        rig.connector.batched_to_gpu([1], [3], kvcaches=rig.pages, sync=True)
    if rig.connector.needs_sync:
        with pytest.raises(ValueError, match="sync=None: expected True or False"):
            rig.connector.batched_to_gpu([1], [3], **common)
    rig.is_clean()


@KINDS
def test_objects_that_do_not_fit_end_the_load_and_leave_nothing(kind: Any) -> None:
    for wrong, text in (
        (lambda rig: rig.objects[0][:1], "expected 2, one per chunk"),
        (lambda rig: list(reversed(rig.objects[0])), "memory object of shape"),
    ):
        rig = Rig(kind).saved()
        running = rig.loading(zeroed(rig.pages))
        next(running)
        with pytest.raises(LayoutError, match=text):
            running.send(wrong(rig))
        rig.is_clean()


@KINDS
@pytest.mark.parametrize("junk", [5, "ab", [object(), object()], {"a": 1, "b": 2}, iter([1, 2])])
def test_whatever_is_sent_instead_of_objects_ends_the_load_and_leaves_nothing(kind: Any, junk: Any) -> None:
    rig = Rig(kind).saved()
    running = rig.loading(zeroed(rig.pages))
    next(running)
    running.send(rig.objects[0])
    with pytest.raises((TypeError, AttributeError, LookupError, LayoutError)):
        running.send(junk)
    rig.is_clean()


@KINDS
def test_a_layer_of_which_a_chunk_has_no_memory_is_refused_and_leaves_nothing(kind: Any) -> None:
    rig = Rig(kind).saved()
    running = rig.loading(zeroed(rig.pages))
    next(running)
    with pytest.raises(LayoutError, match="no memory object for a chunk"):
        running.send([rig.objects[0][0], None])
    rig.is_clean()
    rig = Rig(kind)
    kept, rig.objects[2] = rig.objects[2], [rig.objects[2][0], None]
    saving = rig.saving()
    next(saving)
    next(saving)
    with pytest.raises(LayoutError, match="no memory object for a chunk"):
        next(saving)
    rig.objects[2] = kept
    rig.is_clean()


@KINDS
def test_an_object_that_was_given_back_is_refused_and_the_others_are_not_held(kind: Any) -> None:
    rig = Rig(kind).saved()
    running = rig.loading(zeroed(rig.pages))
    next(running)
    gone = rig.store.make(rig.connector, rig.model, 5)
    rig.store.given.remove(gone)
    gone.ref_count_down()
    with pytest.raises(ValueError, match="its memory was given back"):
        running.send([rig.objects[0][0], gone])
    rig.is_clean()


@KINDS
def test_an_object_of_another_format_is_refused(kind: Any) -> None:
    rig = Rig(kind)  # nothing was stored: the objects say of themselves that they hold nothing known
    running = rig.loading(zeroed(rig.pages))
    next(running)
    with pytest.raises(LayoutError, match="memory object of format UNDEFINED: expected KV_"):
        running.send(rig.objects[0])
    rig.is_clean()


@KINDS
def test_one_chunk_at_a_time_is_not_for_layerwise_connectors(kind: Any) -> None:
    rig = Rig(kind)
    with pytest.raises(NotImplementedError, match="use batched_to_gpu"):
        rig.connector.to_gpu(rig.objects[0][0], 1, 5)
    with pytest.raises(NotImplementedError, match="use batched_from_gpu"):
        rig.connector.from_gpu(rig.objects[0][0], 1, 5)

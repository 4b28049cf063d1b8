"""A fault of ours inside the connector costs a hit or a store. It neither kills the engine nor goes unreported."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from helpers.local import LocalClient, LocalServer
from helpers.mini_engine import FakeRequest
from lmcache.integration.vllm.scheduler_side import SchedulerSide, StepPlan
from lmcache.integration.vllm.worker_side import WorkerSide
from lmcache.v1.multiprocess.transfer_context.worker_transfer import LoadItem, StoreItem

CHUNK = 8


class Broken:
    """A transfer context that fails in a way nobody foresaw."""

    groups = (SimpleNamespace(null_block=0),)

    def load(self, items: Any) -> Any:
        raise IndexError("unforeseen")

    store = load


def item() -> LoadItem:
    return LoadItem("r", 1, "epoch", [], [[0, 3, 4]], [0])


def test_an_unforeseen_fault_in_a_load_is_a_failed_load_with_its_blocks() -> None:
    side = WorkerSide(Broken(), 0)  # type: ignore[arg-type]
    side.load(StepPlan(1, 0, [(item(), [[[0, 1]]])]))
    result = side.take_result()
    assert (result.failed, result.bad_blocks) == ({"r"}, {3, 4})


def test_an_unforeseen_fault_in_a_store_costs_only_what_was_to_be_stored() -> None:
    side = WorkerSide(Broken(), 0)  # type: ignore[arg-type]
    side.store(StepPlan(1, 1, stores=[StoreItem(CHUNK, [b"h" * 32], [[1, 2]])]))


def scheduler() -> SchedulerSide:
    client = LocalClient(LocalServer(chunk_size=CHUNK))
    return SchedulerSide(client, [4])  # type: ignore[arg-type]


def test_tokens_that_cannot_be_hashed_run_uncached() -> None:
    side = scheduler()
    request = FakeRequest("r", [-1] * 40)
    assert side.matched_tokens(request, 0) == 0
    side.scheduled("r", 0, 40, (list(range(1, 11)),))
    assert side.take_plan().stores == []


def test_a_load_that_vllm_expects_and_nobody_promised_is_planned_to_fail() -> None:
    side = scheduler()
    side.allocated(FakeRequest("r", list(range(40))), ([5, 6, 7],), 16)
    ((planned, slots),) = side.take_plan().loads
    assert (planned.request, planned.epoch, planned.blocks) == ("r", "", [[5, 6, 7]])
    assert slots == [[[]]]

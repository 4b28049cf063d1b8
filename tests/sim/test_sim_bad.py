"""The conformance kit catches what is wrong: one simulated device per fault, see tests/devices/lmcache-sim-bad."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from helpers.kit import BAD, install_bad_sim, verify
from helpers.wheels import environment

pytest.importorskip("torch")
pytestmark = pytest.mark.sim

Catch = Callable[..., None]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the bad device is installed."""
    folder = tmp_path_factory.mktemp("bad")
    install_bad_sim(folder)
    return folder


@pytest.fixture
def catch(site: Path, tmp_path: Path, good_sim: dict[str, Any]) -> Catch:
    """Asserts that the kit fails the backend with ``fault`` in a test named ``test``, and the good one passes it."""

    def assert_caught(fault: str, test: str, only: str = "") -> None:
        only = only or test.partition(".")[2].partition("[")[0]
        env = environment(site, LMCACHE_SIM_FAULT=fault)
        report = verify("sim-bad", tmp_path / "report.json", env, "--level", "lmcache-driven", "--only", only)
        failed = [row["test"] for row in report["failed"]]
        assert [name for name in failed if name.startswith(test)], (failed, report["error"])
        assert not report["ok"]
        passed = [name for name in good_sim["passed"] if name.startswith(test)]
        assert passed, f"the good device does not pass {test}"
        assert set(failed) <= {*good_sim["passed"]}, "the good device does not pass these either"

    return assert_caught


def test_the_bad_device_without_a_fault_is_not_available(site: Path) -> None:
    code = "from lmcache_sim_bad.spec import BadSimDeviceSpec as B; print(B().is_available())"
    env = environment(site, LMCACHE_SIM_FAULT="")
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.strip() == "False", done.stderr


# ------------------------------------------------------------------------------------------------- block transfers
BLOCKS = "test_block_transfer."
ONE_FORMAT = "test_exactly_the_named_blocks_move and NL_X_NB_BS_NH_CS"


@pytest.mark.long
def test_the_kit_catches_a_copy_that_does_nothing(catch: Catch) -> None:
    catch("copies_nothing", BLOCKS + "test_a_copy_that_is_asked_for_is_made")


def test_the_kit_catches_a_wrong_stride(catch: Catch) -> None:
    catch("heads_and_slots_swapped", BLOCKS + "test_exactly_the_named_blocks_move[NL_X_NB_NH_BS_CS")


@pytest.mark.long
def test_the_kit_catches_elements_of_the_wrong_size(catch: Catch) -> None:
    catch("half_an_element", BLOCKS + "test_every_element_type_moves_bit_by_bit")


@pytest.mark.long
def test_the_kit_catches_a_retrieve_that_writes_one_block_too_many(catch: Catch) -> None:
    catch("one_block_too_many", BLOCKS + "test_no_block_is_written_that_was_not_named")


@pytest.mark.long
def test_the_kit_catches_a_skipped_prefix_that_is_written(catch: Catch) -> None:
    catch("ignores_the_skipped_prefix", BLOCKS + "test_exactly_the_named_blocks_move", only=ONE_FORMAT)


@pytest.mark.long
def test_the_kit_catches_a_tail_that_is_dropped(catch: Catch) -> None:
    catch("drops_the_tail", BLOCKS + "test_exactly_the_named_blocks_move", only=ONE_FORMAT)


@pytest.mark.long
def test_the_kit_catches_blocks_in_another_order(catch: Catch) -> None:
    catch("sorts_the_blocks", BLOCKS + "test_blocks_come_in_the_order_of_their_ids")


def test_the_kit_catches_a_transfer_that_does_not_wait_for_its_stream(catch: Catch) -> None:
    catch("own_stream", "test_streams.test_a_transfer_begins_after_the_work_before_it")


@pytest.mark.long
def test_the_kit_catches_a_slot_that_is_a_hole_and_is_moved(catch: Catch) -> None:
    catch("writes_the_hole", "test_slot_transfer.test_exactly_the_named_slots_move")


@pytest.mark.long
def test_the_kit_catches_staging_copies_that_drop_the_last_bytes(catch: Catch) -> None:
    catch("staging_drops_odd_bytes", "test_memory.test_async_copies_move_every_byte_and_no_other[4095]")


# ------------------------------------------------------------------------------------------ completions and events
@pytest.mark.long
def test_the_kit_catches_a_completion_that_is_immediate(catch: Catch) -> None:
    catch("completes_at_once", "test_streams.test_a_busy_stream_delays_the_completion")


def test_the_kit_catches_completions_out_of_order(catch: Catch) -> None:
    catch("completes_backwards", "test_streams.test_completions_of_a_stream_keep_their_order")


@pytest.mark.long
def test_the_kit_catches_completions_that_are_lost(catch: Catch) -> None:
    catch("loses_completions", "test_streams.test_no_completion_of_many_threads_is_lost")


def test_the_kit_catches_an_event_that_fires_early(catch: Catch) -> None:
    catch("event_fires_early", "test_events.test_an_event_is_not_complete_while_the_work_before_it_runs")


@pytest.mark.long
def test_the_kit_catches_a_query_that_blocks(catch: Catch) -> None:
    catch("query_blocks", "test_events.test_asking_does_not_wait")


@pytest.mark.long
def test_the_kit_catches_a_wait_that_does_nothing(catch: Catch) -> None:
    catch("wait_does_nothing", "test_events.test_the_other_process_s_stream_waits_for_ours")


@pytest.mark.long
def test_the_kit_catches_one_handle_for_all_events(catch: Catch) -> None:
    catch("one_handle_for_all", "test_events.test_handles_are_bytes_and_differ_between_events")


# ------------------------------------------------------------------------------------------------------------- ipc
IPC = "test_tensor_ipc."


def test_the_kit_catches_a_handle_to_the_wrong_offset(catch: Catch) -> None:
    catch("maps_the_wrong_offset", IPC + "test_the_other_process_sees_the_same_bytes[offset]")


@pytest.mark.long
def test_the_kit_catches_the_wrong_device_index(catch: Catch) -> None:
    catch("maps_the_wrong_device", IPC + "test_a_tensor_stays_on_its_device")


@pytest.mark.long
def test_the_kit_catches_a_copy_in_the_place_of_a_mapping(catch: Catch) -> None:
    catch("maps_a_copy", IPC + "test_what_one_writes_the_other_sees")


def test_the_kit_catches_a_mapping_that_leaks(catch: Catch) -> None:
    catch("leaks_a_mapping", IPC + "test_mapping_and_closing_leaves_nothing_open")


# ----------------------------------------------------------------------------------------------------------- plans
STEPS = "test_plans.test_a_plan_does_its_steps_one_after_the_other"


@pytest.mark.long
def test_the_kit_catches_a_plan_that_uses_its_buffers_again_too_early(catch: Catch) -> None:
    catch("plan_stages_too_early", STEPS)


@pytest.mark.long
def test_the_kit_catches_a_plan_that_leaves_out_its_last_step(catch: Catch) -> None:
    catch("plan_ends_too_early", STEPS)


@pytest.mark.long
def test_the_kit_catches_a_direct_copy_that_takes_the_blocks_of_another_object(catch: Catch) -> None:
    catch("direct_copy_of_the_first_chunk", "test_plans.test_a_direct_copy_moves_exactly_the_named_objects")


# -------------------------------------------------------------------------------------------------------- the rest
@pytest.mark.long
def test_the_kit_catches_staging_buffers_that_overlap(catch: Catch) -> None:
    catch("staging_overlaps", "test_cache_context.test_staging_slots_are_apart_and_on_the_device")


@pytest.mark.long
def test_the_kit_catches_pinning_that_only_says_so(catch: Catch) -> None:
    catch("pins_nothing", "test_device.test_pinned_memory_can_be_copied_from_and_unpinned_once")


def test_the_kit_catches_a_claim_of_a_capability_that_is_lacking(catch: Catch) -> None:
    catch("claims_what_it_lacks", "test_level.test_a_capability_is_not_claimed_without_what_it_needs")


@pytest.mark.long
def test_the_kit_catches_a_spec_that_imports_torch(catch: Catch) -> None:
    catch("imports_torch_early", "test_identity.test_importing_and_making_the_spec_imports_nothing_heavy")


def test_every_fault_has_a_test() -> None:
    env = {**os.environ, "PYTHONPATH": os.pathsep.join([str(BAD), os.environ.get("PYTHONPATH", "")])}
    code = "from lmcache_sim_bad.spec import FAULTS; print(*FAULTS)"
    done = subprocess.run([sys.executable, "-c", code], env=env, capture_output=True, text=True, timeout=60)
    source = Path(__file__).read_text()
    assert done.stdout.split()
    assert [name for name in done.stdout.split() if f'catch("{name}"' not in source] == []

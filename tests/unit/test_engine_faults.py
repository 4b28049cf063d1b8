"""What goes wrong below or beside the engine costs hits, not answers: one test per fault that others were bitten by."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.bad_adapter import BadAdapter  # noqa: E402
from helpers.engine_rig import CHUNK, Rig, engine_threads, running, settle  # noqa: E402
from helpers.host_connector import Broken  # noqa: E402
from lmcache.errors import StartupError  # noqa: E402
from lmcache.v1.keys import account_id  # noqa: E402
from lmcache.v1.storage.l2.envelope import unpack  # noqa: E402
from lmcache.v1.storage.l2.registry import BUILT_IN  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(4 * CHUNK))
QUICK = {"blocking_timeout_secs": 0.3, "lookup_timeout_ms": 200}


def only_below(rig: Rig) -> None:
    """Everything is below, nothing in L1."""
    assert rig.engine.flush()
    with rig.engine.stack.lock:
        rig.engine.stack.l1.clear()


def files(folder: Path) -> list[Path]:
    return [path for path in folder.rglob("*") if path.is_file() and path.stat().st_size > 4096]


def disk(folder: Path, **changes: Any) -> Any:
    return running(None, local_disk=str(folder), max_local_disk_size=1, **changes)


# --- disks


def test_a_disk_is_found_again_after_a_restart_and_counts_no_byte_twice(tmp_path: Path) -> None:
    used = []
    for round_ in range(3):
        with disk(tmp_path) as rig:
            assert rig.engine.lookup(TOKENS) == (len(TOKENS) if round_ else 0)
            assert rig.retrieve(TOKENS) == (len(TOKENS) if round_ else 0)
            rig.store(TOKENS)
            assert rig.engine.flush()
            used.append(rig.engine.status()["tiers"][0]["used_bytes"])
    assert used[0] == used[1] == used[2] > 0
    assert len(files(tmp_path)) == 4


def test_stored_objects_say_what_they_are() -> None:
    bad = BadAdapter()
    with running([("bad", bad)]) as rig:
        rig.store(TOKENS, request_configs={"lmcache.cache_salt": "alice"})
        assert rig.engine.flush()
        infos = [unpack(header) for header, _ in bad.held.values()]
        assert [info.namespace for info in infos] == rig.engine.chunk_store.shapes.namespaces * 4
        assert {info.account for info in infos} == {account_id("alice")}


def test_clear_removes_the_files(tmp_path: Path) -> None:
    with disk(tmp_path) as rig:
        rig.store(TOKENS)
        assert rig.engine.flush()
        assert rig.engine.clear(locations=["LocalCPUBackend"]) == len(TOKENS)
        assert rig.engine.lookup(TOKENS) == len(TOKENS)
        assert rig.engine.clear(locations=["LocalDiskBackend"]) == len(TOKENS)
        assert rig.engine.lookup(TOKENS) == 0
        assert files(tmp_path) == []


@pytest.mark.parametrize("damage", ["flip", "cut", "remove"])
def test_a_damaged_file_ends_the_prefix_before_it(tmp_path: Path, damage: str) -> None:
    with disk(tmp_path) as rig:
        rig.store(TOKENS)
        assert rig.engine.flush()
        chunks = rig.engine.token_database.chunks(TOKENS, rig.engine.token_database.request(None))
        name = rig.engine.chunk_store.rows(chunks)[2][0][0].hex()
        (victim,) = (path for path in files(tmp_path) if name[-32:] in path.name)
        if damage == "flip":
            whole = bytearray(victim.read_bytes())
            whole[-1 if whole[-1] else 4096] ^= 1
            whole[4096] ^= 1
            victim.write_bytes(whole)
        elif damage == "cut":
            victim.write_bytes(victim.read_bytes()[:100])
        else:
            victim.unlink()
        only_below(rig)
        assert rig.retrieve(TOKENS) == 2 * CHUNK
        assert rig.retrieve(TOKENS[: 3 * CHUNK]) == 2 * CHUNK


def test_a_single_missing_file_is_a_miss_and_no_error(tmp_path: Path) -> None:
    with disk(tmp_path) as rig:
        rig.store(TOKENS[:CHUNK])
        only_below(rig)
        files(tmp_path)[0].unlink()
        assert rig.retrieve(TOKENS[:CHUNK]) == 0
        rig.store(TOKENS[:CHUNK])
        assert rig.retrieve(TOKENS[:CHUNK]) == CHUNK


def test_a_folder_that_goes_away_costs_writes_and_nothing_else(tmp_path: Path) -> None:
    folder = tmp_path / "kv"
    with disk(folder) as rig:
        shutil.rmtree(folder)
        rig.store(TOKENS)
        assert rig.engine.flush()
        assert rig.retrieve(TOKENS) == len(TOKENS)
        rig.assert_nothing_is_held()


def test_two_engines_never_own_one_disk(tmp_path: Path) -> None:
    with disk(tmp_path):
        with pytest.raises(Exception, match="rank-0-of-1") as caught:
            Rig(None, local_disk=str(tmp_path), max_local_disk_size=1)
        assert "\n" not in str(caught.value)


CHILD = """
import os, signal, sys
from helpers.engine_rig import Rig
rig = Rig(None, remote_url=f"fs://{sys.argv[1]}")
rig.store(list(range(16)))
assert rig.engine.flush()
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_wrote_before_it_was_killed_is_found_by_another_that_shares_the_folder(
    tmp_path: Path,
) -> None:
    with running(None, remote_url=f"fs://{tmp_path}") as rig:
        assert rig.engine.lookup(TOKENS) == 0
        path = os.pathsep.join(filter(None, [str(Path(__file__).parents[1]), *sys.path]))
        child = subprocess.run(
            [sys.executable, "-c", CHILD, str(tmp_path)], env={**os.environ, "PYTHONPATH": path}, timeout=60
        )
        assert child.returncode == -signal.SIGKILL
        assert rig.engine.lookup(TOKENS) == len(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


# --- tiers that fail, hang and lie


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_tier_that_lies_never_gets_a_wrong_byte_through(layerwise: bool) -> None:
    bad = BadAdapter()
    with running([("bad", bad)], use_layerwise=layerwise) as rig:
        rig.store(TOKENS)
        only_below(rig)
        bad.mode = "lies"
        assert rig.retrieve(TOKENS) == 0


@pytest.mark.parametrize("mode", ["fails", "hangs", "forgets"])
@pytest.mark.parametrize("layerwise", [False, True])
def test_no_call_is_slower_than_its_deadline(mode: str, layerwise: bool) -> None:
    bad = BadAdapter()
    with running([("bad", bad)], use_layerwise=layerwise, **QUICK) as rig:
        rig.store(TOKENS)
        only_below(rig)
        bad.mode = mode
        began = time.monotonic()
        rig.engine.lookup(TOKENS)
        rig.engine.lookup(TOKENS, pin=True, lookup_id="a")
        assert rig.retrieve(TOKENS, req_id="a") == 0
        rig.store(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)
        rig.engine.clear()
        assert time.monotonic() - began < 8
        rig.engine.lookup_unpin("a")
        bad.release()
        settle(lambda: rig.engine.status()["live_objects"] == 0, "objects to come back")


def test_a_tier_that_hangs_does_not_keep_the_engine_from_closing() -> None:
    bad = BadAdapter()
    rig = Rig([("bad", bad)])
    bad.mode = "hangs"
    rig.store(TOKENS)
    began = time.monotonic()
    rig.engine.close(0.5)
    assert time.monotonic() - began < 10
    bad.release()
    settle(lambda: not engine_threads(), "threads to end")


def test_a_tier_that_cannot_be_had_is_told_of_by_the_setting_not_by_the_server_s_flag(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.delitem(sys.modules, BUILT_IN["s3"].module, raising=False)
    monkeypatch.setitem(sys.modules, "obstore", None)  # so that importing it fails
    with pytest.raises(StartupError, match=r"^l2_adapters type 's3': needs the package obstore"):
        Rig(None, l2_adapters=[{"type": "s3", "url": "s3://b"}])
    assert not engine_threads()


def test_closing_writes_what_waits_before_the_memory_goes() -> None:
    slow = BadAdapter()
    gate = threading.Event()
    enter = slow._enter

    def wait(what: str) -> None:
        gate.wait(10)
        enter(what)

    slow._enter = wait  # type: ignore[method-assign]
    rig = Rig([("slow", slow)])
    rig.store(TOKENS)
    threading.Timer(0.05, gate.set).start()
    rig.engine.close(10)
    assert len(slow.held) == 4
    assert slow.closed


def test_a_tier_that_is_to_have_it_first_has_it_when_store_returns() -> None:
    peer = BadAdapter(sync=True)
    peer.mode = "hangs"
    with running([("peer", peer)]) as rig:
        threading.Timer(0.1, peer.release).start()
        rig.store(TOKENS)
        assert len(peer.held) == 4


def test_places_are_written_and_read_only_as_set() -> None:
    one, two = BadAdapter(), BadAdapter()
    with running([("one", one), ("two", two)], store_location="one", retrieve_locations=["l1", "two"]) as rig:
        rig.store(TOKENS)
        assert rig.engine.flush()
        assert (len(one.held), len(two.held)) == (4, 0)
        only_below(rig)
        assert rig.engine.lookup(TOKENS) == rig.retrieve(TOKENS) == 0
        two.held.update(one.held)
        assert rig.engine.lookup(TOKENS, search_range=["one"]) == 0
        assert rig.engine.lookup(TOKENS, search_range=["two"]) == len(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


def test_what_came_from_below_stays_in_l1() -> None:
    below = BadAdapter()
    with running([("below", below)]) as rig:
        rig.store(TOKENS)
        only_below(rig)
        assert rig.retrieve(TOKENS) == len(TOKENS)
        loads = below.calls.count("load")
        assert rig.retrieve(TOKENS) == len(TOKENS)
        assert below.calls.count("load") == loads


# --- pressure


@pytest.mark.parametrize("layerwise", [False, True])
def test_a_prefix_is_stored_as_far_as_there_is_room(layerwise: bool) -> None:
    many = list(range(600 * CHUNK))
    with running(use_layerwise=layerwise, cache_policy="noop") as rig:
        rig.store(many)
        found = rig.engine.lookup(many)
        assert 0 < found < len(many)
        assert found % CHUNK == 0
        assert rig.retrieve(many) == found
        assert rig.engine.status()["no_room_chunks"] > 0


def test_a_load_for_which_there_is_no_room_is_a_miss_at_once() -> None:
    below = BadAdapter()
    with running([("below", below)]) as rig:
        rig.store(TOKENS)
        only_below(rig)
        allocator = rig.engine.stack.l1._allocator
        taken = []
        while (offset := allocator.allocate(4096)) is not None:
            taken.append(offset)
        began = time.monotonic()
        assert rig.retrieve(TOKENS) == 0
        assert rig.retrieve(TOKENS[:CHUNK]) == 0
        rig.store(TOKENS)
        assert time.monotonic() - began < 8, "less than one wait for tiers"
        for offset in taken:
            allocator.free(offset)
        rig.store(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


def test_more_than_fits_is_stored_by_evicting_the_oldest() -> None:
    with running(cache_policy="LRU") as rig:
        for start in range(0, 4000 * CHUNK, 100 * CHUNK):
            last = list(range(start, start + 100 * CHUNK))
            rig.store(last)
            assert rig.engine.lookup(last) == len(last)
        assert rig.engine.lookup(list(range(100 * CHUNK))) == 0


# --- connectors


@pytest.mark.parametrize("layerwise", [False, True])
def test_an_error_of_the_connector_is_raised_and_nothing_is_kept_or_held(layerwise: bool) -> None:
    with running(use_layerwise=layerwise) as rig:
        rig.connector.fail = True
        with pytest.raises(Broken):
            rig.store(TOKENS)
        assert rig.engine.lookup(TOKENS) == 0
        rig.connector.fail = False
        rig.store(TOKENS)
        rig.connector.fail = True
        with pytest.raises(Broken):
            rig.retrieve(TOKENS)
        rig.connector.fail = False
        assert rig.retrieve(TOKENS) == len(TOKENS)


def test_an_object_that_a_connector_keeps_is_neither_evicted_nor_given_to_anybody_else() -> None:
    with running(cache_policy="LRU") as rig:
        move = rig.connector.batched_from_gpu
        kept: list[Any] = []

        def keep(objs: Any, *rest: Any, **kwargs: Any) -> None:
            for obj in objs:
                obj.ref_count_up()
            kept.extend(objs)
            move(objs, *rest, **kwargs)

        rig.connector.batched_from_gpu = keep  # type: ignore[method-assign]
        rig.store(TOKENS)
        before = [obj.tensor.clone() for obj in kept]
        rig.connector.batched_from_gpu = move  # type: ignore[method-assign]
        assert rig.engine.clear() == 0
        for start in range(1000, 1000 + 1000 * CHUNK, 100 * CHUNK):
            rig.store(list(range(start, start + 100 * CHUNK)))
        assert all(torch.equal(obj.tensor, then) for obj, then in zip(kept, before, strict=True))
        assert rig.retrieve(TOKENS) == len(TOKENS)
        for obj in kept:
            obj.ref_count_down()
        assert rig.engine.clear(TOKENS) == len(TOKENS)


def test_objects_that_a_connector_drops_without_giving_them_back_come_back() -> None:
    with running() as rig:
        move = rig.connector.batched_from_gpu

        def forget(objs: Any, *rest: Any, **kwargs: Any) -> None:
            for obj in objs:
                obj.ref_count_up()
            move(objs, *rest, **kwargs)

        rig.connector.batched_from_gpu = forget  # type: ignore[method-assign]
        rig.store(TOKENS)
        assert rig.engine.clear() == len(TOKENS)

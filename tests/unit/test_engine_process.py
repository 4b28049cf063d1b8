"""What an engine does to the process around it, to its forks and to whoever uses it after its end."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.engine_rig import CHUNK, MIB, Rig, engine_threads, running, settle  # noqa: E402
from lmcache.v1.cache_engine import LMCacheEngineBuilder  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(4 * CHUNK))
QUICK = {"blocking_timeout_secs": 0.3, "lookup_timeout_ms": 200}


def disk(folder: Path, **changes: Any) -> Any:
    return running(None, local_disk=str(folder), max_local_disk_size=1, **changes)


def test_an_engine_changes_nothing_of_its_process_and_leaves_no_thread(tmp_path: Path) -> None:
    import gc
    import logging
    import multiprocessing

    def around() -> list[Any]:
        handlers = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)]
        return [
            multiprocessing.get_start_method(allow_none=True),
            gc.isenabled(),
            handlers,
            list(logging.getLogger().handlers),
            dict(os.environ),
            torch.get_num_threads(),
            threading.active_count(),
        ]

    settle(lambda: not engine_threads(), "threads of earlier tests to end")
    before = around()
    gc.collect()
    descriptors = set(os.listdir("/proc/self/fd"))
    with disk(tmp_path) as rig:
        rig.store(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)
    settle(lambda: not engine_threads(), "threads to end")
    assert around() == before
    del rig  # what it has mapped stays as long as somebody could look
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) == descriptors


def test_the_pool_is_page_locked_for_a_device_that_can_and_no_longer_than_the_engine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from lmcache.v1.platform import _device_detect

    locked: dict[int, int] = {}

    class Spec:
        backend_name = "fast"
        is_pin_supported = True

        def pin_memory(self, address: int, size: int) -> bool:
            locked[address] = size
            return True

        def unpin_memory(self, address: int) -> bool:
            return locked.pop(address) > 0

    monkeypatch.setattr(_device_detect, "selected", lambda: SimpleNamespace(spec=Spec()))
    rig = Rig()
    assert locked == {rig.engine.stack.view.address: 1 << 20}
    rig.engine.close()
    assert locked == {}


FORKED = """
import os, signal, sys
from helpers.engine_rig import MIB, Rig
from lmcache.v1.cache_engine import LMCacheEngineBuilder
rig = Rig(adapters=())
LMCacheEngineBuilder._engines["e"] = rig.engine
go, begin = os.pipe()
child = os.fork()
if not child:
    signal.alarm(20)
    os.read(go, 1)
    with rig.engine.stack.lock:  # as if a thread of the parent had held it
        for first in range(0, 400, 4):
            rig.store(range(first, first + 4))
        assert (rig.engine.lookup(range(4)), rig.retrieve(range(4)), rig.engine.clear()) == (0, 0, 0)
        assert (rig.engine.is_healthy(), rig.engine.status(), rig.engine.flush()) == (False, {"healthy": False}, False)
        rig.engine.lookup_unpin("x")
        rig.engine.close()
    assert LMCacheEngineBuilder.get("e") is None
    mine = LMCacheEngineBuilder.get_or_create("e", rig.config, rig.about, rig.connector)
    assert mine is not rig.engine and mine.is_healthy()
    mine.close()
    os._exit(0)
mine = range(1000, 1040)
rig.store(mine)
os.write(begin, b"x")
status = os.waitpid(child, 0)[1]
assert rig.retrieve(mine) == 40
assert status == 0, status
assert LMCacheEngineBuilder.get("e") is rig.engine
rig.engine.close()
"""


def test_a_forked_child_has_no_part_in_its_parent_s_engine() -> None:
    tests = str(Path(__file__).parent.parent)
    subprocess.run(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {tests!r})\n{FORKED}"], check=True, timeout=60
    )


def test_what_is_closed_answers_with_nothing() -> None:
    rig = Rig()
    rig.store(TOKENS)
    rig.engine.close()
    rig.engine.close()
    assert (rig.engine.health(), rig.engine.is_healthy()) == (-1, False)
    rig.store(TOKENS)
    assert rig.engine.lookup(TOKENS) == rig.retrieve(TOKENS) == rig.engine.clear() == 0


def test_an_object_outlives_the_engine_that_made_it() -> None:
    rig = Rig()
    rig.store(TOKENS)
    database = rig.engine.token_database
    held = rig.engine.chunk_store.read(database.chunks(TOKENS, database.request(None)))
    tensor = held[0].objs[0].tensor
    before = tensor.clone()
    rig.engine.close()
    assert torch.equal(tensor, before)
    for one in held:
        one.objs[0].ref_count_down()


def test_one_id_is_one_engine_and_other_settings_are_an_error() -> None:
    rig = Rig()
    rig.engine.close()
    made = LMCacheEngineBuilder.get_or_create("id", rig.config, rig.about, rig.connector)
    try:
        assert LMCacheEngineBuilder.get_or_create("id", rig.config, rig.about, rig.connector) is made
        assert LMCacheEngineBuilder.get("id") is made
        other = type(rig.config).from_dict({**rig.config.values(), "save_unfull_chunk": True})
        with pytest.raises(ValueError, match="save_unfull_chunk"):
            LMCacheEngineBuilder.get_or_create("id", other, rig.about, rig.connector)
    finally:
        LMCacheEngineBuilder.destroy("id")
    assert LMCacheEngineBuilder.get("id") is None
    assert not made.is_healthy()
    LMCacheEngineBuilder.destroy("id")


def test_a_pool_that_does_not_fit_is_one_line_that_names_the_key() -> None:
    with pytest.raises(Exception, match="max_local_cpu_size") as caught:
        Rig(max_local_cpu_size=1 << 20)
    assert "\n" not in str(caught.value)
    assert MIB


def test_a_wrong_place_is_an_error_at_the_start() -> None:
    for changes in ({"store_location": "disk"}, {"retrieve_locations": ["RemoteBackend"]}):
        with pytest.raises(ValueError, match="expected one of l1"):
            Rig(**changes)

"""What keeps equal tokens apart in the in-process engine, each with a control that shares."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from helpers.engine_rig import CHUNK, Rig, running  # noqa: E402
from helpers.host_connector import HEAD_SIZE, HEADS, LAYERS  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = list(range(2 * CHUNK))

SAME: list[dict[str, Any]] = [
    {},
    {"worker_id": 0, "engine_id": "another", "role": "worker"},
    {"served_model_name": "alias"},
]
OTHER: list[dict[str, Any]] = [
    {"model_name": "tests/other"},
    {"model_revision": "r2"},
    {"model_revision": ""},
    {"kv_dtype": torch.int32},
    {"kv_shape": (LAYERS, 2, CHUNK, HEADS * 2, HEAD_SIZE // 2)},
    {"kv_shape": (LAYERS * 2, 2, CHUNK, HEADS, HEAD_SIZE // 2)},
    {"kv_shape": (LAYERS, 1, CHUNK, HEADS, HEAD_SIZE * 2), "use_mla": True},
    {"world_size": 2},
    {"world_size": 2, "worker_id": 1},
    {"engine": "another 1.0"},
    {"kv_extra": {"quantization": "fp8"}},
]


def on_disk(folder: Path, about: dict[str, Any], **changes: Any) -> Any:
    # One folder for all, whatever the rank, so that only keys keep them apart.
    disk = {"type": "disk", "path": str(folder), "max_gb": 1}
    return running(None, about, l2_adapters=[disk], **changes)


@pytest.mark.parametrize("about", SAME)
def test_engines_whose_kv_is_the_same_share_a_disk(tmp_path: Path, about: dict[str, Any]) -> None:
    with on_disk(tmp_path, {}) as rig:
        rig.store(TOKENS)
    with on_disk(tmp_path, about) as rig:
        assert rig.engine.lookup(TOKENS) == len(TOKENS)
        assert rig.retrieve(TOKENS) == len(TOKENS)


@pytest.mark.parametrize("about", OTHER, ids=str)
def test_engines_whose_kv_differs_never_hit_each_other_s_chunks(
    tmp_path: Path, about: dict[str, Any]
) -> None:
    with on_disk(tmp_path, {}) as rig:
        rig.store(TOKENS)
    with on_disk(tmp_path, about) as rig:
        assert rig.engine.lookup(TOKENS) == 0
        assert rig.retrieve(TOKENS) == 0


def test_a_forked_child_does_not_share_a_revision_that_was_made_up(tmp_path: Path) -> None:
    code = f"""
import os
from helpers.engine_rig import Rig
def rig():
    return Rig(None, {{"model_revision": ""}}, l2_adapters=[{{"type": "shared_fs", "path": {str(tmp_path)!r}}}])
first, again = rig(), rig()
first.store(range(16))
assert first.engine.flush() and again.engine.lookup(range(16)) == 16, "one process shares"
child = os.fork()
if not child:
    os._exit(rig().engine.lookup(range(16)))
assert os.waitpid(child, 0)[1] == 0
"""
    tests = str(Path(__file__).parents[1])
    path = os.pathsep.join([tests, *filter(None, sys.path)])
    subprocess.run(
        [sys.executable, "-c", code], env={**os.environ, "PYTHONPATH": path}, check=True, timeout=60
    )


def test_ranks_of_one_engine_never_hit_each_other_s_chunks(tmp_path: Path) -> None:
    first, second = ({"world_size": 2, "worker_id": rank} for rank in (0, 1))
    with on_disk(tmp_path, first) as rig:
        rig.store(TOKENS)
    for about, expected in ((second, 0), (first, len(TOKENS))):
        with on_disk(tmp_path, about) as rig:
            assert rig.engine.lookup(TOKENS) == expected


@pytest.mark.parametrize("changes", [{"use_layerwise": True}, {"extra_config": {"model_revision": "mine"}}])
def test_settings_that_change_what_is_stored_keep_chunks_apart(
    tmp_path: Path, changes: dict[str, Any]
) -> None:
    with on_disk(tmp_path, {}) as rig:
        rig.store(TOKENS)
    with on_disk(tmp_path, {}, **changes) as rig:
        assert rig.engine.lookup(TOKENS) == 0
        rig.store(TOKENS)
    with on_disk(tmp_path, {}, **changes) as rig:
        assert rig.retrieve(TOKENS) == len(TOKENS)


REQUESTS: list[dict[str, Any]] = [
    {},
    {"lmcache.cache_salt": "alice"},
    {"lmcache.cache_salt": "bob"},
    {"lmcache.lora": "alice"},
    {"lmcache.tag.user": "alice"},
    {"lmcache.tag.user": "bob"},
    {"lmcache.tag.team": "alice"},
    {"lmcache.media": [[1, 2, "cat"]]},
    {"lmcache.media": [[1, 2, "dog"]]},
    {"lmcache.media": [[0, 2, "cat"]]},
]


@pytest.mark.parametrize("tokens", [TOKENS, TOKENS[: CHUNK - 1]], ids=["whole chunks", "a tail"])
def test_salts_adapters_tags_and_media_keep_equal_tokens_apart(tokens: list[int]) -> None:
    for configs in REQUESTS:
        with running(save_unfull_chunk=True) as rig:
            rig.store(tokens, request_configs=configs)
            for asked in REQUESTS:
                expected = len(tokens) if asked == configs else 0
                assert rig.engine.lookup(tokens, request_configs=asked) == expected, (configs, asked)
                assert rig.retrieve(tokens, request_configs=asked) == expected, (configs, asked)


def test_a_key_of_others_in_a_request_changes_nothing() -> None:
    with running() as rig:
        rig.store(TOKENS, request_configs={"temperature": 1})
        assert rig.engine.lookup(TOKENS) == len(TOKENS)


def test_a_request_that_is_not_to_be_saved_is_not() -> None:
    with running() as rig:
        rig.store(TOKENS, request_configs={"lmcache.skip_save": True})
        assert rig.engine.lookup(TOKENS) == 0


def test_a_tail_is_no_whole_chunk_of_a_smaller_engine_nor_the_start_of_one() -> None:
    with running(save_unfull_chunk=True) as rig:
        rig.store(TOKENS[: CHUNK - 1])
        assert rig.engine.lookup(TOKENS[: CHUNK - 1]) == CHUNK - 1
        assert rig.engine.lookup(TOKENS[: CHUNK - 2]) == 0
        assert rig.engine.lookup(TOKENS) == 0


def test_what_an_account_has_is_counted_by_its_salt() -> None:
    with running() as rig:
        rig.store(TOKENS, request_configs={"lmcache.cache_salt": "alice"})
        usage = rig.engine.stack.l1.usage_by_account()
        assert [account.objects for name, account in usage.items() if name] == [2]


def test_a_rig_checks_what_it_retrieves() -> None:
    """A control of the helper that all these tests trust."""
    rig = Rig()
    try:
        rig.store(TOKENS)
        obj = rig.engine.chunk_store.read(
            rig.engine.token_database.chunks(TOKENS, rig.engine.token_database.request(None))
        )
        obj[0].objs[0].tensor.add_(1)
        with pytest.raises(AssertionError):
            rig.retrieve(TOKENS)
        for held in obj:
            held.objs[0].ref_count_down()
    finally:
        rig.engine.close()

"""Engines whose caches meet below their memory: on a disk one after the other, in a shared folder at once."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path

import pytest

from e2e.conftest import tokens
from e2e.engine import EngineFailed, EngineProcess, engine, inproc
from helpers.server import channel_to, wait_for
from lmcache.v1.multiprocess.server.embedded import embedded_address
from lmcache.v1.protocol import messages as m

pytestmark = pytest.mark.vllm

CHUNK = 256
PROMPTS = [tokens(900 + i, 500 + 100 * i) for i in range(4)]
CHUNKS = [len(prompt) // CHUNK for prompt in PROMPTS]


def run(process: EngineProcess, prompts: list[list[int]]) -> tuple[list[list[int]], list[int]]:
    """Tokens and cached chunks."""
    results = process.generate(prompts)
    return [r["tokens"] for r in results], [r["cached"] // CHUNK for r in results]


def written(ident: str) -> bool:
    """Whether every tier of an engine has all that was stored."""
    with channel_to(embedded_address(ident)) as tool:
        reply, _ = tool.call(m.Status(), 10)
    assert isinstance(reply, m.State)
    rows = reply.fields["l2"]
    return all(row["stored"] and not row["queued_objects"] for row in rows)


def test_a_restart_hits_the_disk_and_engines_at_once_hit_each_others_folder(
    model_dir: Callable[[str], Path], tmp_path: Path
) -> None:
    model, disk, folder = model_dir("gqa"), tmp_path / "disk", tmp_path / "shared"
    folder.mkdir()
    file = tmp_path / "lmcache.yaml"
    file.write_text(f"chunk_size: {CHUNK}\nlocal_disk: {disk}\nmax_local_disk_size: 1\n")
    shared = json.dumps([{"type": "shared_fs", "path": str(folder)}])
    from_file = {"LMCACHE_CONFIG_FILE": str(file)}

    with engine(model, tmp_path / "first", inproc("first", by_path=True), env=from_file) as first:
        truth, cached = run(first, PROMPTS)
        assert cached == [0] * len(PROMPTS)
        # Not waited for: what is not on the disk yet is written as the engine ends.

    with ExitStack() as stack:
        transfer = inproc("second")
        second = EngineProcess(
            model, tmp_path / "second", transfer, env=from_file | {"LMCACHE_L2_ADAPTERS": shared}
        )
        stack.callback(second.close)
        transfer = inproc("third", remote_url=f"fs://{folder}")
        third = EngineProcess(model, tmp_path / "third", transfer)
        stack.callback(third.close)
        second.ready()
        third.ready()
        assert run(second, PROMPTS) == (truth, CHUNKS), "the disk outlives the engine"
        new = [tokens(950 + i, 600) for i in range(2)]
        new_truth, cached = run(second, new)
        assert cached == [0, 0]
        wait_for(lambda: written("second"), 30, "the folder has what the second engine stored")
        assert run(third, new) == (new_truth, [2, 2]), "one engine's chunks are found by another that runs"


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"chunk_sise": 256},
            "chunk_sise (kv_connector_extra_config): no such setting; did you mean chunk_size?",
        ),
        ({"chunk_size": 192}, "expected a multiple of this engine's block size 128; e.g. 256"),
    ],
)
def test_a_setting_that_cannot_be_met_is_one_line_at_start(
    model_dir: Callable[[str], Path], log: Path, extra: dict[str, object], words: str
) -> None:
    with pytest.raises(EngineFailed), engine(model_dir("gqa"), log, inproc("bad", **extra)):
        raise AssertionError("the engine started")
    assert words in log.read_text()

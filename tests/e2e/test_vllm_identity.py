"""Never a crossed hit: engines that differ in anything that changes KV miss on one another's objects.

Each case first proves the positive: the engine hits what it stored itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.conftest import tokens
from e2e.engine import EngineProcess, connector, engine
from helpers.server import Server

pytestmark = pytest.mark.vllm

PROMPT = tokens(900, 800)
HIT = 768


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with Server() as running:
        yield running


@pytest.fixture(scope="module")
def stored(server: Server, model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> int:
    """Objects on the server after the first engine stored PROMPT, plain and under salt "a"."""
    with engine(model_dir("gqa"), tmp_path_factory.mktemp("base") / "log", connector(server.port)) as process:
        assert cached(process) == [0, HIT]
        assert cached(process, salts=["a"]) == [0, HIT], "a salt misses what no salt stored, and hits its own"
        assert cached(process, salts=["b"]) == [0, HIT], "another salt misses"
        assert cached(process) == [HIT, HIT], "and no salt still hits"
    return int(server.state()["l1"]["objects"])


def cached(process: EngineProcess, **kwargs: Any) -> list[int]:
    """Cached tokens of PROMPT, twice in a row."""
    return [process.generate([PROMPT], **kwargs)[0]["cached"] for _ in range(2)]


def test_the_same_engine_again_hits(
    stored: int, server: Server, model_dir: Callable[[str], Path], log: Path
) -> None:
    with engine(model_dir("gqa"), log, connector(server.port)) as process:
        assert cached(process) == [HIT, HIT]
        assert cached(process, salts=["a"]) == [HIT, HIT]
        assert cached(process, salts=["c"]) == [0, HIT]


@pytest.mark.parametrize("settings", [{"dtype": "bfloat16"}, {"block_size": 64}], ids=["dtype", "block size"])
def test_another_layout_misses(
    stored: int, server: Server, model_dir: Callable[[str], Path], log: Path, settings: dict[str, Any]
) -> None:
    with engine(model_dir("gqa"), log, connector(server.port), **settings) as process:
        assert cached(process) == [0, HIT]


def test_another_model_misses(stored: int, server: Server, tmp_path: Path, log: Path) -> None:
    with engine(models.gqa(tmp_path / "gqa", seed=1), log, connector(server.port)) as process:
        assert cached(process) == [0, HIT]


@pytest.mark.long
def test_a_folder_whose_weights_changed_is_another_revision(
    server: Server, tmp_path: Path, log: Path
) -> None:
    folder = models.gqa(tmp_path / "model", seed=2)
    with engine(folder, log, connector(server.port)) as process:
        assert cached(process) == [0, HIT]
    models.gqa(folder, seed=3)
    with engine(folder, log.with_name("changed"), connector(server.port)) as process:
        assert cached(process) == [0, HIT]


def test_adapters_miss_on_each_other_and_on_the_base(
    stored: int, server: Server, model_dir: Callable[[str], Path], tmp_path: Path, log: Path
) -> None:
    one, two = models.lora(tmp_path / "one", 1), models.lora(tmp_path / "two", 2)
    transfer = connector(server.port)
    with engine(model_dir("gqa"), log, transfer, enable_lora=True, max_loras=2, max_lora_rank=8) as process:
        base = cached(process)
        assert base[1] == HIT
        first = cached(process, lora=["one", 1, str(one)])
        second = cached(process, lora=["two", 2, str(two)])
        assert (first, second) == ([0, HIT], [0, HIT])
        # The same name for other weights is another adapter.
        assert cached(process, lora=["one", 3, str(two)])[0] == 0
        assert cached(process) == [HIT, HIT]


def test_what_was_stored_before_a_reset_is_not_found_after_it(
    stored: int, server: Server, model_dir: Callable[[str], Path], log: Path
) -> None:
    with engine(model_dir("gqa"), log, connector(server.port)) as process:
        assert cached(process) == [HIT, HIT]
        assert process.call("reset")
        assert cached(process) == [0, HIT]

"""Models once per run; engines and servers per module, since an engine takes some twenty seconds to start."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from e2e import models


@pytest.fixture(scope="session")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``model_dir("gqa")``: the folder of a model of ``models.py``, made at first use."""
    root = tmp_path_factory.mktemp("models")

    def make(kind: str) -> Path:
        folder = root / kind
        return folder if folder.exists() else Path(getattr(models, kind)(folder))

    return make


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "engine.log"


def tokens(seed: int, count: int) -> list[int]:
    """``count`` random token ids; the same for the same seed."""
    rng = random.Random(seed)
    return [rng.randrange(models.VOCAB) for _ in range(count)]

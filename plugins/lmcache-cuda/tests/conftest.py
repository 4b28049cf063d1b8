"""Helpers of these tests are imported by their names, wherever the tests are started."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))


@pytest.fixture
def fake_cuda() -> Iterator[None]:
    """torch.cuda's stand-in over the fake driver, for as long as the test runs."""
    import standin

    from lmcache_cuda import runtime

    before = dict(vars(runtime))
    standin.install()
    yield
    for name, value in before.items():
        setattr(runtime, name, value)


def pytest_configure(config: pytest.Config) -> None:
    """Tests of the conformance kit are run here, too; what they need is given."""
    config.addinivalue_line("markers", "lmcache_needs(*capabilities): what a backend must declare")

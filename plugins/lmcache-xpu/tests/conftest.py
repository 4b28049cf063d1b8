"""The SYCL runtime's CPU device, and queues of the native module where torch.xpu would have its own."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).parent))

# The package's own .icd file names a folder that is not there.
_DRIVER = Path(sys.prefix, "lib", "libintelocl.so")
if _DRIVER.is_file():
    os.environ.setdefault("OCL_ICD_FILENAMES", str(_DRIVER))


def pytest_configure(config: pytest.Config) -> None:
    """Tests of the conformance kit are run here, too; what they need is given."""
    config.addinivalue_line("markers", "lmcache_needs(*capabilities): what a backend must declare")


@pytest.fixture(scope="session")
def module() -> Any:
    """The native module, on a runtime that has a device."""
    from lmcache_xpu import native

    loaded = native.load()
    assert loaded.devices(), "the SYCL runtime has no device: expected intel-opencl-rt's CPU"
    return loaded


@pytest.fixture
def queue(module: Any) -> Iterator[int]:
    made = module.queue_create(0)
    yield made
    module.queue_destroy(made)

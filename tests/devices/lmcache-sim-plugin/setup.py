"""Compiles csrc/ into one library beside the Python files. It knows nothing of torch, and of Python neither."""

from __future__ import annotations

import importlib.util
import os
import subprocess
from pathlib import Path

from setuptools import setup
from setuptools.command.bdist_wheel import bdist_wheel
from setuptools.command.build_py import build_py

ROOT = Path(__file__).resolve().parent
FLAGS = ["-std=c++17", "-O2", "-fPIC", "-pthread", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]


def folder_of(package: str) -> Path:
    """Where a package is installed, without importing it: the device is not to be loaded for a build."""
    found = importlib.util.find_spec(package)
    if found is None or not found.submodule_search_locations:
        raise SystemExit(f"lmcache-sim-plugin is built against {package}, which is not installed here")
    return Path(found.submodule_search_locations[0])


class Build(build_py):
    def run(self) -> None:
        super().run()
        target = Path(self.build_lib, "lmcache_sim_plugin").resolve()
        sim = folder_of("lmcache_sim")
        command = [os.environ.get("CXX", "g++"), *FLAGS, "-shared", "-s", "-Wl,--no-undefined"]
        command += [f"-isystem{folder_of('lmcache') / 'include'}", f"-isystem{sim / 'include'}"]
        command += [str(path) for path in sorted((ROOT / "csrc").glob("*.cpp"))]
        command += [f"-L{sim}", "-llmcache_sim", "-Wl,-rpath,$ORIGIN/../lmcache_sim"]
        command += ["-o", str(target / "liblmcache_sim_plugin.so")]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"{' '.join(command)}\n{done.stdout}{done.stderr}")


class Wheel(bdist_wheel):
    """One wheel for every Python: the library is reached through ctypes."""

    def finalize_options(self) -> None:
        super().finalize_options()
        self.root_is_pure = False

    def get_tag(self) -> tuple[str, str, str]:
        return ("py3", "none", super().get_tag()[2])


setup(cmdclass={"build_py": Build, "bdist_wheel": Wheel})

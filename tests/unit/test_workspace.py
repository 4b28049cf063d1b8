"""What the workspace promises about itself: its wheel, its size, its dependencies and its files."""

from __future__ import annotations

import ast
import importlib.metadata
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).resolve().parents[2]
SOURCE = ROOT / "core" / "src"
MODULES = sorted((SOURCE / "lmcache").rglob("*.py"))

VENDORS = re.compile(r"torch|cuda|nvidia|nccl|cupy|rocm|amd|hip|xpu|intel|ipex|habana|hpu|neuron|npu|triton")
UNSAFE_MODULES = {"cloudpickle", "dill", "marshal", "pickle", "shelve"}
TORCH_FREE = (
    "cli",
    "v1/storage",
    "v1/cache_engine",
    "v1/config",
    "v1/memory",
    "v1/memory_management",
    "v1/metadata",
    "v1/protocol",
    "v1/multiprocess/server",
)

IMPORT_WITHOUT_TORCH = """
import importlib, sys

asked_for = []

class Refuse:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "transformers", "vllm", "sglang"}:
            asked_for.append(f"{wanted} asked for {name}")
            raise ModuleNotFoundError(f"{name} is not to be imported here", name=name)

sys.meta_path.insert(0, Refuse())
for wanted in sys.argv[1:]:
    try:
        importlib.import_module(wanted)
    except ModuleNotFoundError as exc:  # of a storage engine's client, which is an extra and may be absent
        if (exc.name or "").partition(".")[0] not in {"redis", "obstore", "mooncake"}:
            raise
sys.exit("; ".join(asked_for) or 0)
"""


def relative(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


def requirements() -> list[Requirement]:
    return [Requirement(line) for line in importlib.metadata.requires("lmcache") or []]


def is_extra(requirement: Requirement) -> bool:
    return requirement.marker is not None and "extra" in str(requirement.marker)


def project_files() -> Iterator[Path]:
    """Every file of the project, without environments, caches and what is built."""
    for folder, folders, files in os.walk(ROOT):
        kept = {name for name in folders if not name.startswith(".") or name in {".ci", ".github"}}
        folders[:] = sorted(kept - {"__pycache__", "build", "dist"})
        yield from (Path(folder, name) for name in sorted(files) if name != ".git")


def torch_free_modules() -> list[str]:
    found = []
    for part in TORCH_FREE:
        place = SOURCE / "lmcache" / part
        paths = place.rglob("*.py") if place.is_dir() else [place.with_suffix(".py")]
        for path in paths:
            if path.is_file() and path.stem != "__main__":
                names = path.relative_to(SOURCE).with_suffix("").parts
                found.append(".".join(names[:-1] if names[-1] == "__init__" else names))
    return sorted(found)


def test_the_wheel_under_test_is_this_tree_s_and_is_pure_python() -> None:
    wheel = importlib.metadata.distribution("lmcache")
    assert wheel.version == "1.0.0"
    assert "Tag: py3-none-any" in (wheel.read_text("WHEEL") or "").splitlines()


def test_the_wheel_carries_its_licence_and_says_that_it_is_typed() -> None:
    wheel = importlib.metadata.distribution("lmcache")
    assert wheel.metadata["License-Expression"] == "Apache-2.0"
    assert "Apache License" in (wheel.read_text("licenses/LICENSE") or "")
    assert Path(str(wheel.locate_file("lmcache/py.typed"))).is_file()


def test_the_wheel_owns_no_top_level_package_but_its_own() -> None:
    files = importlib.metadata.files("lmcache") or []
    packages = {file.parts[0] for file in files if file.suffix == ".py"}
    assert packages == {"lmcache"}


def test_a_plain_install_asks_for_neither_torch_nor_a_vendor() -> None:
    plain = {requirement.name for requirement in requirements() if not is_extra(requirement)}
    assert "pyzmq" in plain
    assert {name for name in plain if VENDORS.search(name.lower())} == set()


def test_torch_is_asked_for_by_the_extras_that_need_it() -> None:
    for extra in ("cpu", "transformers"):
        names = {r.name for r in requirements() if r.marker and r.marker.evaluate({"extra": extra})}
        assert "torch" in names, extra


def test_no_requirement_pins_one_version_or_lacks_a_lower_bound() -> None:
    for requirement in requirements():
        operators = {specifier.operator for specifier in requirement.specifier}
        assert ">=" in operators, str(requirement)
        assert not operators & {"==", "==="}, str(requirement)


def test_no_module_is_longer_than_500_lines() -> None:
    modules = [path for path in project_files() if path.suffix == ".py"]
    lengths = {relative(path): len(path.read_text(encoding="utf-8").splitlines()) for path in modules}
    assert {relative(path) for path in MODULES} < lengths.keys()
    assert {name: length for name, length in lengths.items() if length > 500} == {}


def unsafe_uses(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        elif isinstance(node, ast.Call):
            if isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec"}:
                yield node.lineno, node.func.id
            for keyword in node.keywords:
                if keyword.arg == "allow_pickle" and not (
                    isinstance(keyword.value, ast.Constant) and keyword.value.value is False
                ):
                    yield node.lineno, "allow_pickle"
            first = node.args[0] if node.args else None
            names = [str(first.value)] if isinstance(first, ast.Constant) else []
        for name in names:
            if name.partition(".")[0] in UNSAFE_MODULES:
                yield node.lineno, name


def test_no_module_unpickles_or_evaluates_text() -> None:
    found = [
        f"{relative(path)}:{line}: {what}"
        for path in MODULES
        for line, what in unsafe_uses(ast.parse(path.read_bytes(), str(path)))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "from pickle import loads",
        "import a, dill",
        "eval('1')",
        "def f():\n exec(x)",
        "np.load(f, allow_pickle=True)",
        "importlib.import_module('marshal')",
    ],
)
def test_the_search_for_unsafe_code_finds_it(text: str) -> None:
    assert list(unsafe_uses(ast.parse(text)))


def test_what_runs_without_torch_imports_neither_torch_nor_an_engine() -> None:
    done = subprocess.run(
        [sys.executable, "-c", IMPORT_WITHOUT_TORCH, "lmcache", *torch_free_modules()],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr


def test_the_readme_stays_within_120_lines() -> None:
    assert len((ROOT / "README.md").read_text(encoding="utf-8").splitlines()) <= 120


def test_every_end_to_end_test_is_in_an_environment_that_some_task_runs() -> None:
    marked = re.compile(r"pytest\.mark\.(torch|vllm)\b")
    modules = (ROOT / "tests" / "e2e").rglob("test_*.py")
    assert [relative(p) for p in modules if not marked.search(p.read_text(encoding="utf-8"))] == []


def test_no_file_names_a_folder_of_one_machine() -> None:
    folder = re.compile(rb"(?<![\w.}~/-])/(?:work|root|opt(?!/(?:rocm|intel|habanalabs|aws)\b)|home/\w+)/\w")
    found = [
        f"{relative(path)}:{number}"
        for path in project_files()
        for number, line in enumerate(path.read_bytes().splitlines(), 1)
        if folder.search(line)
    ]
    assert found == []


def test_the_core_and_the_workspace_carry_the_same_licence() -> None:
    assert (ROOT / "LICENSE").read_bytes() == (ROOT / "core" / "LICENSE").read_bytes()

"""``lmcache device new``: what it writes builds, installs, is found and passes its own tests at once."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from helpers.server import refused, run_cli
from helpers.wheels import ROOT, build_wheel, environment, install
from lmcache.cli.main import main
from lmcache.cli.verbs import device_new
from lmcache.errors import LMCacheError
from lmcache.v1.platform.base.device_spec import DeviceSpec

HAS_TORCH = importlib.util.find_spec("torch") is not None
HAS_COMPILER = any(shutil.which(name) for name in ("c++", "g++", "clang++"))
STYLES = [
    "override",
    pytest.param(
        "native",
        marks=[pytest.mark.long, pytest.mark.skipif(not HAS_COMPILER, reason="needs a C++ compiler")],
    ),
]
COMMON = {
    ".gitignore", "LICENSE", "README.md", "pyproject.toml", ".github/workflows/ci.yml",
    "src/lmcache_foo/__init__.py", "src/lmcache_foo/py.typed", "src/lmcache_foo/spec.py",
    "src/lmcache_foo/ops.py", "src/lmcache_foo/plan.py", "tests/test_identity.py", "tests/test_discovery.py",
    "tests/test_laziness.py", "tests/test_block_transfer.py", "tests/test_conformance.py",
}  # fmt: skip
NATIVE = {
    "CMakeLists.txt",
    "csrc/module.cpp",
    "csrc/strided_copy.h",
    "src/lmcache_foo/_native.pyi",
    "tests/test_native.py",
}


def new(folder: Path, *arguments: str) -> Path:
    done = run_cli("device", "new", *arguments, "--directory", str(folder), "--format", "json")
    assert done.returncode == 0, done.stderr
    return Path(json.loads(done.stdout)["project"])


def files(project: Path) -> set[str]:
    return {path.relative_to(project).as_posix() for path in project.rglob("*") if path.is_file()}


def run_tests(project: Path, site: Path) -> str:
    """Run the project's tests on what is installed in ``site``; pytest's last line."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "tests"],
        cwd=project,
        env=environment(site),
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout.splitlines()[-1]


def built_and_tested(folder: Path, style: str) -> tuple[Path, str]:
    """The folder where a new project is installed, and what its tests say."""
    project = new(folder, "foo", "--style", style)
    install(build_wheel(project, folder / "wheel"), folder / "site")
    return folder / "site", run_tests(project, folder / "site")


# ---- the whole way


@pytest.mark.parametrize("style", STYLES)
def test_a_new_project_builds_installs_is_found_and_passes_its_own_tests(style: str, tmp_path: Path) -> None:
    site, said = built_and_tested(tmp_path, style)
    skipped = "" if HAS_TORCH else r", 2 skipped"  # what moves bytes, and the conformance kit
    assert re.match(rf"\d+ passed{skipped} in", said), said
    listed = json.loads(run_cli("device", "list", "--format", "json", env=environment(site)).stdout)
    (record,) = [row for row in listed["devices"] if row["name"] == "foo"]
    assert (record["distribution"], record["version"], record["state"]) == (
        "lmcache-foo",
        "0.1.0",
        "unavailable",
    )
    wheel = next((tmp_path / "wheel").glob("*.whl")).name
    assert wheel.endswith("-py3-none-any.whl") == (style == "override"), wheel


@pytest.mark.torch
@pytest.mark.long
@pytest.mark.skipif(not HAS_TORCH, reason="needs torch")
@pytest.mark.parametrize("style", STYLES)
def test_with_torch_it_moves_blocks_as_its_reference_does(style: str, tmp_path: Path) -> None:
    _, said = built_and_tested(tmp_path, style)
    found = re.match(r"(\d+) passed in", said)
    assert found, said
    assert int(found[1]) > 90


# ---- what is written


@pytest.mark.parametrize(("style", "expected"), [("override", COMMON), ("native", COMMON | NATIVE)])
def test_a_project_has_everything_that_a_vendor_publishes(
    style: str, expected: set[str], tmp_path: Path
) -> None:
    project = new(tmp_path, "foo", "--style", style)
    assert project == tmp_path / "lmcache-foo"
    assert files(project) == expected
    for name in expected:
        text = (project / name).read_text(encoding="utf-8")
        assert not re.search(r"@\w+@", text), name
        if name.endswith(".py"):
            compile(text, name, "exec")
    workflow = (project / ".github/workflows/ci.yml").read_text()
    assert ("cibuildwheel --output-dir" in workflow) == (style == "native")


@pytest.mark.parametrize("style", ["override", "native"])
def test_its_workflow_tests_the_wheel_that_it_built_and_no_release_of_the_same_name(
    style: str, tmp_path: Path
) -> None:
    workflow = (new(tmp_path, "foo", "--style", style) / ".github/workflows/ci.yml").read_text()
    jobs = re.split(r"\n  (?=[\w-]+:)", workflow)
    using = [job for job in jobs if "download-artifact" in job and not job.startswith("publish")]
    assert len(using) == 2
    for job in using:
        first, *others = re.findall(r"pip install (.*lmcache-foo.*)", job)
        assert first.startswith("--no-deps --no-index --find-links "), job
        assert [line for line in others if "--upgrade" in line or "--find-links" in line] == []


def test_every_place_of_the_name_is_spelt_as_that_place_wants_it(tmp_path: Path) -> None:
    project = new(tmp_path, "foo_2", "--style", "native")
    assert project.name == "lmcache-foo-2"
    pyproject = (project / "pyproject.toml").read_text()
    assert 'name = "lmcache-foo-2"' in pyproject
    assert 'foo_2 = "lmcache_foo_2.spec:Foo2DeviceSpec"' in pyproject
    assert 'dependencies = ["lmcache>=1.0,<2"]' in pyproject
    assert "namespace lmcache_foo_2" in (project / "csrc/strided_copy.h").read_text()
    assert 'torch.device("foo_2")' in (project / "src/lmcache_foo_2/spec.py").read_text()


def test_a_device_that_torch_knows_by_another_name_keeps_both(tmp_path: Path) -> None:
    project = new(tmp_path, "foo_pro", "--torch-device", "foo", "--style", "native")
    texts = {name: (project / name).read_text() for name in files(project)}
    assert [name for name, text in texts.items() if "torch.foo_pro" in text or '"foo_pro"])' in text] == []
    assert 'device_type: ClassVar[str] = "foo"' in texts["src/lmcache_foo_pro/ops.py"]
    scope: dict[str, type[DeviceSpec]] = {}
    exec(compile(texts["src/lmcache_foo_pro/spec.py"], "spec.py", "exec"), scope)
    spec = scope["FooProDeviceSpec"]()
    assert (spec.backend_name, spec.device_type, spec.torch_module_name) == ("foo_pro", "foo", "foo")


def test_what_is_shown_for_a_package_that_makes_the_torch_module_asks_for_it_only_where_it_is_not_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (new(tmp_path, "foo") / "src/lmcache_foo/spec.py").read_text()
    shown = re.sub(r"^( +)# (if not hasattr\(torch|    import torch_foo)", r"\1\2", text, flags=re.M)
    assert len(set(shown.splitlines()) - set(text.splitlines())) == 2, "nothing is shown"
    scope: dict[str, type[DeviceSpec]] = {}
    exec(compile(shown, "spec.py", "exec"), scope)
    spec = scope["FooDeviceSpec"]()
    torch = ModuleType("torch")
    monkeypatch.setitem(sys.modules, "torch", torch)
    assert not spec.is_available()
    assert spec.unavailable_reason() == "torch.foo is not there: No module named 'torch_foo'"
    torch.foo = SimpleNamespace(is_available=lambda: True)  # type: ignore[attr-defined]
    assert spec.is_available()


def test_the_sample_of_a_vendor_is_the_template_but_for_what_was_changed_by_hand(tmp_path: Path) -> None:
    sample = ROOT / "examples" / "lmcache-musa-style"
    project = new(tmp_path, "musa_style", "--torch-device", "musa")
    ours = {name for name in files(project) if (sample / name).read_text() != (project / name).read_text()}
    assert ours == {"README.md", "src/lmcache_musa_style/spec.py"}


def test_the_text_says_what_to_do_next(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "new", "foo", "--directory", str(tmp_path / "not" / "yet")]) == 0
    out = capsys.readouterr().out
    project = tmp_path / "not" / "yet" / "lmcache-foo"
    assert out == f"{project}: 15 files\nnext: cd {project} && pip install '.[test]' && pytest\n"


# ---- refusals


@pytest.mark.parametrize(
    "name",
    [
        "Foo",
        "2foo",
        "foo-bar",
        "foo bar",
        "_foo",
        "foo_",
        "foo__bar",
        "",
        "föö",
        "../foo",
        "a" * 33,
        "foo\n",
        "class",
    ],
)
def test_a_name_that_cannot_serve_everywhere_is_refused(name: str, tmp_path: Path) -> None:
    line = refused(run_cli("device", "new", name, "--directory", str(tmp_path)), 2)
    assert line.startswith(f"lmcache device new: NAME {name!r}: expected a lowercase identifier")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("device", ["Foo", "torch.foo", "", "cpu", "is"])
def test_a_device_that_torch_cannot_have_is_refused(device: str, tmp_path: Path) -> None:
    line = refused(run_cli("device", "new", "foo", "--torch-device", device, "--directory", str(tmp_path)), 2)
    assert line.startswith(f"lmcache device new: --torch-device {device!r}: expected a ")
    assert list(tmp_path.iterdir()) == []


def test_the_name_of_a_built_in_backend_is_refused(tmp_path: Path) -> None:
    line = refused(run_cli("device", "new", "cpu", "--directory", str(tmp_path)), 2)
    assert "NAME 'cpu': expected a name of your own" in line


def test_what_is_there_already_is_never_touched(tmp_path: Path) -> None:
    kept = tmp_path / "lmcache-foo" / "kept"
    kept.parent.mkdir()
    kept.write_text("mine")
    line = refused(run_cli("device", "new", "foo", "--directory", str(tmp_path)), 2)
    assert line == f"lmcache device new: {kept.parent}: is there already; choose another NAME or --directory"
    assert files(kept.parent) == {"kept"}


def test_a_directory_that_is_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    line = refused(run_cli("device", "new", "foo", "--directory", str(tmp_path / "file")), 2)
    assert line == f"lmcache device new: --directory {tmp_path / 'file'}: expected a folder (File exists)"


def test_a_project_that_cannot_be_written_leaves_nothing_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(path: Path, *_: object, **__: object) -> None:
        if path.name == "ci.yml":
            raise OSError(28, os.strerror(28))

    monkeypatch.setattr(Path, "write_text", full)
    with pytest.raises(LMCacheError, match="cannot be written \\(No space left on device\\)"):
        device_new.write(tmp_path / "p", "override", device_new.values("foo", "override", "foo"))
    assert list(tmp_path.iterdir()) == []

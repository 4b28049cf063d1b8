"""The workflows that a vendor could take over: what they name is there, and they test what they publish."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from helpers.wheels import ROOT

WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


@pytest.fixture(params=WORKFLOWS, ids=lambda path: path.stem)
def name(request: pytest.FixtureRequest) -> str:
    return str(request.param.stem)


@pytest.fixture
def workflow(name: str) -> dict[Any, Any]:
    found = yaml.safe_load((ROOT / ".github" / "workflows" / f"{name}.yml").read_text())
    assert isinstance(found, dict)
    return found


def commands(workflow: dict[Any, Any]) -> list[str]:
    plugin = workflow["env"]["PLUGIN"]
    steps = [step for job in workflow["jobs"].values() for step in job["steps"]]
    return [step["run"].replace("$PLUGIN", plugin) for step in steps if "run" in step]


def test_there_is_one_for_each_device_wheel() -> None:
    assert [f"lmcache-{path.stem}" for path in WORKFLOWS] == sorted(
        path.parent.name for path in ROOT.glob("plugins/*/pyproject.toml")
    )


def test_every_path_that_it_names_is_there(name: str, workflow: dict[Any, Any]) -> None:
    watched = workflow[True]["pull_request"]["paths"]  # YAML reads `on` as true
    named = [path.removesuffix("/**") for path in watched]
    for command in commands(workflow):
        named += re.findall(r"(?<![\w./-])(?:plugins|constraints|\./core|core)(?:/[\w./-]+)?", command)
    assert f"plugins/lmcache-{name}" in named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_what_runs_dev_brings_the_python_that_dev_is_tested_with(workflow: dict[Any, Any]) -> None:
    for title, job in workflow["jobs"].items():
        if any(step.get("run", "").startswith("./dev") for step in job["steps"]):
            versions = [
                step["with"]["python-version"]
                for step in job["steps"]
                if "python-version" in step.get("with", ())
            ]
            assert versions == ["3.11"], title


def test_every_python_that_has_a_wheel_is_tested_before_it_is_published(
    name: str, workflow: dict[Any, Any]
) -> None:
    tomllib = pytest.importorskip("tomllib", reason="is in Python from 3.11 on")
    settings = tomllib.loads((ROOT / "plugins" / f"lmcache-{name}" / "cibuildwheel.toml").read_text())
    built = [tag.removesuffix("-*").replace("cp3", "3.") for tag in settings["tool"]["cibuildwheel"]["build"]]
    jobs = workflow["jobs"]
    assert jobs["test"]["strategy"]["matrix"]["python"] == built
    assert {"sdist", "test"} < set(jobs["publish"]["needs"])
    assert jobs["publish"]["if"] == f"startsWith(github.ref, 'refs/tags/{workflow['name']}-v')"


def test_what_is_tested_is_the_wheel_that_was_built_and_no_release(
    name: str, workflow: dict[Any, Any]
) -> None:
    installs = [line for line in commands(workflow) if "pip install" in line and f"lmcache-{name}" in line]
    assert installs
    assert [line for line in installs if "--no-deps --no-index --find-links wheelhouse" not in line] == []

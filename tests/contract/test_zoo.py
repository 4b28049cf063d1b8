"""Bad wheels, built and installed for real: each costs itself only, and is explained.

``LMCACHE_UPDATE_SNAPSHOTS=1 pytest tests/contract/test_zoo.py`` writes what ``device list`` says now.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from helpers.server import COMMAND
from zoo import wheels
from zoo.animals import ANIMALS, FAKE_TORCH, GOOD, Animal, compiler

SNAPSHOTS = Path(__file__).parents[1] / "zoo" / "snapshots"
HANG_SECONDS = "3"
DECIDING = ("DEVICE_TYPE", "LMCACHE_DEVICE_BACKEND", "LMCACHE_DISABLE_PLUGINS", "LMCACHE_LOG_LEVEL")
SOUND = {"usable", "not-on-this-host", "no-torch-module"}

USE_CORE = """
import json, sys, lmcache
from lmcache.v1.platform import device_records, get_device_spec, resolve_device_ops
assert lmcache.torch_device_type == "good", lmcache.torch_device_type
assert lmcache.device_ops is resolve_device_ops("good")
assert get_device_spec("cpu").backend_name == "cpu"
loaded = [name for name in sys.modules if name.startswith("zoo_")]
print(json.dumps({"records": [r.as_dict() for r in device_records()], "loaded": loaded}))
"""


def viable() -> list[Animal]:
    return [a for a in ANIMALS if compiler() or not any(name.endswith(".c") for name in a.files)]


@pytest.fixture(scope="session")
def zoo(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Folders with one installed wheel each; ``base`` has the good one and a stand-in for torch."""
    root = tmp_path_factory.mktemp("zoo")
    built = root / "wheels"
    built.mkdir()
    sites = {animal.name: root / animal.name for animal in viable()}
    sites["base"] = root / "base"
    torch = wheels.build(built, "torch", {"torch/__init__.py": FAKE_TORCH}, requires=())
    jobs = [(GOOD.build(built), sites["base"]), (torch, sites["base"])]
    wheels.install(jobs + [(animal.build(built), sites[animal.name]) for animal in viable()])
    for animal in viable():
        if animal.damage:
            (points,) = sites[animal.name].glob("*.dist-info/entry_points.txt")
            points.write_text(animal.damage)
    return sites


def run(command: list[str], *sites: Path, **env: str) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if name not in DECIDING}
    # Behind what is there already, so that the lmcache under test is found where it was.
    path = [*map(str, sites), *filter(None, [os.environ.get("PYTHONPATH")])]
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=60,
        env={**clean, "PYTHONPATH": os.pathsep.join(path), **env},
    )


def cli(*argv: str, sites: tuple[Path, ...], **env: str) -> subprocess.CompletedProcess[str]:
    return run([*COMMAND, *argv], *sites, **env)


def use_core(*sites: Path, **env: str) -> tuple[dict[str, Any], str]:
    done = run([sys.executable, "-c", USE_CORE], *sites, **env)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout), done.stderr


@pytest.mark.parametrize("animal", ANIMALS, ids=lambda animal: animal.name)
def test_device_list_says_what_a_person_wants_to_read(animal: Animal, zoo: dict[str, Path]) -> None:
    site = visit(animal, zoo)
    done = cli("device", "list", "--timeout", HANG_SECONDS, sites=(site, zoo["base"]))
    assert (done.returncode, done.stderr) == (0, "")
    text = done.stdout.replace(str(site), "SITE")
    snapshot = SNAPSHOTS / f"{animal.name}.txt"
    if os.environ.get("LMCACHE_UPDATE_SNAPSHOTS"):
        snapshot.write_text(text, encoding="utf-8")
    assert text == snapshot.read_text(encoding="utf-8")
    good = next(line.split() for line in text.splitlines() if line.startswith("good "))
    assert good[:4] == ["good", "good", "selected", "lmcache-zoo-good"]


@pytest.mark.parametrize("animal", ANIMALS, ids=lambda animal: animal.name)
def test_the_core_and_every_other_plugin_work_beside_it(animal: Animal, zoo: dict[str, Path]) -> None:
    site = visit(animal, zoo)
    env = {"LMCACHE_DISABLE_PLUGINS": animal.name} if animal.dangerous else {}
    told, log = use_core(site, zoo["base"], **env)
    record = find(animal, told["records"])
    assert record["code"] == ("disabled" if animal.dangerous else animal.code)
    assert bool(record["remedy"]) == (record["code"] not in SOUND - {"no-torch-module"})
    if animal.code not in SOUND and not animal.dangerous:
        (line,) = (line for line in log.splitlines() if "WARNING" in line)
        version = record["version"]
        for part in (record["name"], f"{animal.distribution} {version}", record["note"]):
            assert part in line


@pytest.mark.parametrize("animal", ANIMALS, ids=lambda animal: animal.name)
def test_who_names_a_backend_imports_no_other(animal: Animal, zoo: dict[str, Path]) -> None:
    site = visit(animal, zoo)
    told, _ = use_core(site, zoo["base"], LMCACHE_DEVICE_BACKEND="good")
    assert told["loaded"] == ["zoo_good"]


@pytest.mark.parametrize("animal", [a for a in ANIMALS if a.doctor], ids=lambda animal: animal.name)
def test_the_doctor_finds_what_shows_only_in_use(animal: Animal, zoo: dict[str, Path]) -> None:
    site = visit(animal, zoo)
    done = cli("device", "doctor", "--format", "json", sites=(site, zoo["base"]))
    assert (done.returncode, done.stderr) == (1, "")
    told = json.loads(done.stdout)
    rows = {row["name"]: row for row in told["devices"]}
    assert not told["sound"]
    assert [name for name, row in rows.items() if not row["sound"]] == [animal.name]
    row = rows[animal.name]
    notes = " ".join([row["note"], *(check["note"] for check in row["checks"])])
    assert animal.doctor in notes
    copies = [check for check in rows["good"]["checks"] if check["check"] == "copy"]
    assert [(check["ok"], check["note"]) for check in copies] == [(True, "three elements there and back")]


def test_a_backend_with_broken_native_code_is_fatal_only_if_it_is_used(zoo: dict[str, Path]) -> None:
    animal = next(a for a in ANIMALS if a.name == "undefined-symbol-later")
    site = visit(animal, zoo)
    code = "import lmcache; lmcache.torch_device_type; lmcache.device_ops"
    done = run([sys.executable, "-c", code], site, zoo["base"], LMCACHE_DEVICE_BACKEND=animal.name)
    last = done.stderr.splitlines()[-1]
    assert done.returncode == 1
    assert last.startswith("lmcache.errors.DeviceError: ")
    for part in ("undefined symbol: no_such_function", f"{animal.distribution} 1.0", "pip install"):
        assert part in last


def test_the_whole_zoo_at_once_leaves_every_verb_and_the_good_plugin_working(zoo: dict[str, Path]) -> None:
    sites = tuple(site for name, site in zoo.items() if name != "base")
    everything = (*sites, zoo["base"])
    for argv in (["--help"], ["version"], ["ping", "--help"], ["server", "--help"], ["device", "--help"]):
        began = time.monotonic()
        done = cli(*argv, sites=everything)
        assert (done.returncode, done.stderr) == (0, ""), argv
        assert time.monotonic() - began < 5
    done = cli("device", "explain", "--timeout", HANG_SECONDS, "--format", "json", sites=everything)
    told = json.loads(done.stdout)
    states = {(record["name"], record["distribution"]): record["state"] for record in told["devices"]}
    assert (done.returncode, states["good", GOOD.distribution]) == (0, "selected")
    assert len(told["devices"]) == len(viable()) + 2
    killers = ",".join(animal.name for animal in viable() if animal.dangerous)
    use_core(*everything, LMCACHE_DISABLE_PLUGINS=killers)


@pytest.mark.parametrize("torch", [True, False], ids=["torch", "no-torch"])
def test_verbs_work_whatever_the_variables_say(zoo: dict[str, Path], torch: bool, tmp_path: Path) -> None:
    env = {
        "LMCACHE_DEVICE_BACKEND": "goood",
        "DEVICE_TYPE": "gpu!",
        "LMCACHE_DISABLE_PLUGINS": ",nobody,,",
        "LMCACHE_MP_TRANSFER_MODE": "sideways",
        "LMCACHE_LOG_LEVEL": "error",
    }
    sites: tuple[Path, ...] = (zoo["base"],)
    if not torch:
        (tmp_path / "torch.py").write_text("raise ModuleNotFoundError('No module', name='torch')\n")
        sites = (tmp_path, zoo["base"])
    for argv, code in (
        (["--help"], 0),
        (["version"], 0),
        (["server", "--help"], 0),
        (["device", "list"], 0),
        (["device", "explain"], 1),
        (["device", "doctor"], 0),
        (["ping", "--port", "1", "--timeout", "0.2"], 1),
    ):
        done = cli(*argv, sites=sites, **env)
        assert done.returncode == code, done
        assert "Traceback" not in done.stderr
    for verb in ("list", "explain"):
        said = cli("device", verb, sites=sites, **env).stdout
        assert "LMCACHE_DISABLE_PLUGINS: no plugin to disable is called nobody; found: good" in said
    assert (
        "LMCACHE_DEVICE_BACKEND=goood: no such backend (did you mean good?)"
        in cli("device", "list", sites=sites, **env).stdout
    )


def visit(animal: Animal, zoo: dict[str, Path]) -> Path:
    if animal.name not in zoo:
        pytest.skip(f"{animal.name} is compiled, and there is no C compiler")
    return zoo[animal.name]


def find(animal: Animal, records: list[dict[str, Any]]) -> dict[str, Any]:
    (found,) = (
        r for r in records if r["name"] == animal.backend and r["distribution"] == animal.distribution
    )
    return found

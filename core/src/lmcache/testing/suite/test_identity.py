"""Names, packaging and laziness."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest

from lmcache.testing.runner import Run
from lmcache.testing.wheel import InstalledWheel, glibc_of
from lmcache.v1.platform._records import BUILT_IN
from lmcache.v1.platform.base.device_spec import DeviceSpec

_HEAVY = ("torch", "numpy")
_FOREIGN = re.compile(r"lib(torch|c10|cudart)[\w+-]*\.so")
_ACCIDENTS = {"tests", "test", "docs", "examples", "src", "benchmarks", "lmcache", "torch"}
_IMPORT = """
import importlib, json, sys
import lmcache.v1.platform.base.device_spec
before = set(sys.modules)
module, _, name = sys.argv[1].partition(":")
cls = getattr(importlib.import_module(module), name)
spec = cls()
spec.backend_name, spec.device_type, spec.torch_module_name
print(json.dumps(sorted({m.partition(".")[0] for m in set(sys.modules) - before})))
"""


def test_names_are_lowercase_and_agree_with_the_entry_point(spec: DeviceSpec, run: Run) -> None:
    for name in (spec.device_type, spec.backend_name):
        assert name, "a name is empty"
        assert name == name.lower(), name
    assert spec.torch_module_name
    assert spec.backend_name == run.report.backend == run.record.name


def test_the_spec_needs_no_arguments_and_one_is_like_another(spec: DeviceSpec) -> None:
    again = type(spec)()
    assert (again.device_type, again.backend_name, again.torch_module_name) == (
        spec.device_type,
        spec.backend_name,
        spec.torch_module_name,
    )


def test_importing_and_making_the_spec_imports_nothing_heavy(run: Run) -> None:
    target = f"{type(run.spec).__module__}:{type(run.spec).__qualname__}"
    if run.record.origin != BUILT_IN:
        target = run.record.value
    done = subprocess.run(
        [sys.executable, "-c", _IMPORT, target], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    heavy = set(_HEAVY) & set(json.loads(done.stdout.splitlines()[-1]))
    assert not heavy, f"the module of the spec imports {heavy}; import them inside the members that need them"


@pytest.fixture
def wheel(run: Run) -> InstalledWheel:
    if run.record.origin == BUILT_IN:
        pytest.skip("not a wheel of its own: it ships with the core")
    return InstalledWheel(run.record)


def test_the_wheel_says_which_lmcache_it_is_for(wheel: InstalledWheel) -> None:
    wanted = [line for line in wheel.requirements() if re.match(r"lmcache\b(?!-)", line)]
    assert wanted, f"Requires-Dist does not name lmcache: {wheel.requirements()}"
    assert any(sign in line for line in wanted for sign in "<>=~"), f"without a range: {wanted}"


def test_the_wheel_puts_nothing_into_packages_of_others(wheel: InstalledWheel) -> None:
    mine = wheel.distribution.metadata["Name"]
    shared = {name: owners for name in wheel.packages() if len(owners := wheel.owners(name)) > 1}
    assert not shared, f"{mine} shares top-level packages: {shared}"
    assert not wheel.packages() & _ACCIDENTS, f"top-level packages that are not its own: {wheel.packages()}"


def test_the_wheel_s_tags_tell_whether_it_has_compiled_code(wheel: InstalledWheel) -> None:
    libraries = [path.name for path, _ in wheel.libraries()]
    tags = wheel.tags()
    assert tags, "the distribution has no WHEEL file: install it as a wheel"
    if libraries:
        assert not [tag for tag in tags if tag.endswith("-any")], (
            f"{libraries} in a wheel for any platform: {tags}"
        )


def test_no_library_of_the_wheel_is_tied_to_a_torch_or_a_cuda_runtime(wheel: InstalledWheel) -> None:
    tied = {
        path.name: foreign
        for path, library in wheel.libraries()
        if (foreign := [name for name in library.needed if _FOREIGN.match(name)])
    }
    assert not tied, (
        f"NEEDED libraries that change with every torch: {tied}; pass addresses as integers instead"
    )


def test_no_library_of_the_wheel_is_searched_for_beside_the_current_folder(wheel: InstalledWheel) -> None:
    for path, library in wheel.libraries():
        odd = [part for part in library.search if not part.startswith(("$ORIGIN", "${ORIGIN}", "/"))]
        assert not odd, f"{path.name}: RPATH {odd}: expected $ORIGIN or an absolute folder"


def test_libraries_run_where_the_wheel_s_tags_say(wheel: InstalledWheel) -> None:
    for path, library in wheel.libraries():
        for tag in wheel.tags():
            platform = tag.rpartition("-")[2]
            assert platform.endswith(library.machine) or platform == "any", (
                f"{path.name} is {library.machine}: {tag}"
            )
            promised = glibc_of(tag)
            if promised:
                wanted = library.newest("GLIBC")
                assert wanted <= promised, f"{path.name} needs glibc {wanted}, and {tag} promises {promised}"

"""Who this backend says it is, to LMCache and on disk."""

from __future__ import annotations

from importlib import metadata

from lmcache.v1.platform.base.device_spec import PLUGIN_API, DeviceSpec

from lmcache_musa_style.spec import MusaStyleDeviceSpec


def test_the_names_are_what_lmcache_expects() -> None:
    spec = MusaStyleDeviceSpec()
    assert isinstance(spec, DeviceSpec)
    assert (spec.backend_name, spec.device_type, spec.torch_module_name) == ("musa_style", "musa", "musa")


def test_the_plugin_api_is_one_that_this_lmcache_speaks() -> None:
    major, minor = MusaStyleDeviceSpec.plugin_api
    assert major == PLUGIN_API[0]
    assert minor <= PLUGIN_API[1]


def test_the_entry_point_has_the_backend_s_name_and_names_the_class() -> None:
    (point,) = [p for p in metadata.entry_points(group="lmcache.device_plugins") if p.name == "musa_style"]
    assert point.value == "lmcache_musa_style.spec:MusaStyleDeviceSpec"
    assert point.load() is MusaStyleDeviceSpec


def test_the_distribution_says_which_lmcache_it_is_for() -> None:
    asked = metadata.requires("lmcache-musa-style") or []
    (requirement,) = [line for line in asked if line.startswith("lmcache") and "extra ==" not in line]
    assert "<" in requirement, "state the highest version that was tested"


def test_the_wheel_owns_its_own_package_only() -> None:
    files = metadata.files("lmcache-musa-style") or []
    packages = {file.parts[0] for file in files if len(file.parts) > 1 and file.suffix in {".py", ".so"}}
    assert packages <= {"lmcache_musa_style"}  # an editable install lists no modules


def test_without_the_device_it_is_not_available_and_does_not_raise() -> None:
    assert MusaStyleDeviceSpec().is_available() in (False, True)

"""Storage adapters whose package is absent, and those of plugins: what is asked for comes, or an error says why not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from helpers.held_tier import HeldTier
from helpers.local import LocalServer
from helpers.made_plugins import HEAD, Install
from helpers.server import refused, run_cli, run_python
from helpers.wheels import environment
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.plugins import PluginHost
from lmcache.v1.plugins.adapters import external_adapters
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.l2.fault import FaultAdapter
from lmcache.v1.storage.l2.registry import BUILT_IN, build

NEEDY = {name: kind for name, kind in BUILT_IN.items() if kind.package}


@pytest.mark.parametrize("name", NEEDY)
def test_an_adapter_whose_package_is_absent_is_an_error_with_the_line_that_installs_it(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind = NEEDY[name]
    for module in [
        found
        for found in sys.modules
        if found.startswith(kind.module) or found.partition(".")[0] == kind.package
    ]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, kind.package, None)  # so that importing it fails
    with pytest.raises(StartupError) as caught:
        build({"type": name})
    assert str(caught.value) == (
        f"--l2-adapter type '{name}': needs the package {kind.package}, which is not installed; {kind.install}"
    )
    assert kind.install == f"pip install lmcache[{name}]"


def test_a_server_that_is_asked_for_an_absent_package_says_how_to_install_it(tmp_path: Path) -> None:
    (tmp_path / "redis.py").write_text("raise ModuleNotFoundError('No module named redis', name='redis')\n")
    argv = ["server", "--l1-size-gb", "0.01", "--port", "0", "--http-port", "0", "--l2-adapter"]
    done = run_cli(*argv, '{"type": "redis", "url": "redis://127.0.0.1:1"}', env=environment(tmp_path))
    assert refused(done, 3).endswith(
        "needs the package redis, which is not installed; pip install lmcache[redis]"
    )


def test_the_table_of_adapters_imports_no_package_of_any() -> None:
    done = run_python("import sys, lmcache.v1.storage.l2.registry; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not {kind.package for kind in NEEDY.values()} & set(done.stdout.split())


def offers(mapping: str) -> str:
    """A plugin that offers storage adapters."""
    return HEAD + (
        "from lmcache.errors import ConfigError\n"
        "from lmcache.v1.storage.l2.fault import FaultAdapter\n"
        "def right(options):\n    return FaultAdapter()\n"
        "def picky(options):\n    raise ConfigError(f'--l2-adapter picky: {sorted(options)}')\n"
        "def broken(options):\n    raise SystemExit('no\\nway')\n"
        "def odd(options):\n    return 7\n"
        f"@hookimpl\ndef lmcache_storage_adapters():\n    return {mapping}\n"
    )


def test_an_adapter_of_a_plugin_is_built_with_the_operator_s_options(install: Install) -> None:
    install("mine", {"mine": "mine_module"}, offers("{'mine': right, 'picky': picky}"))
    makers = external_adapters(PluginHost())
    assert isinstance(build({"type": "mine"}, makers), FaultAdapter)
    with pytest.raises(ConfigError, match=r"picky: \['path', 'size'\]"):
        build({"type": "picky", "path": "x", "size": 1}, makers)
    with pytest.raises(ConfigError, match="did you mean picky"):
        build({"type": "pickly"}, makers)


@pytest.mark.parametrize(
    ("name", "fault"), [("broken", "it raises SystemExit: no way"), ("odd", "it makes a int")]
)
def test_a_maker_that_fails_is_an_error_that_names_its_plugin(
    install: Install, name: str, fault: str
) -> None:
    install("mine", {"mine": "failing_module"}, offers(f"{{'{name}': {name}}}"))
    with pytest.raises(StartupError) as caught:
        build({"type": name}, external_adapters(PluginHost()))
    assert str(caught.value) == f"--l2-adapter type '{name}' of mine 1.0: {fault}: expected a StorageAdapter"


def test_a_plugin_never_replaces_a_built_in_adapter(install: Install) -> None:
    install("rude", {"rude": "rude_adapters"}, offers("{'disk': right, 'rude': right}"))
    host = PluginHost()
    assert list(external_adapters(host)) == ["rude"]
    assert host.records[0].note == "its 'disk' is not used: the name is taken by lmcache"


@pytest.mark.parametrize("mapping", ["1 / 0", "['x']", "{7: right}", "{'x': 'not a function', 'y': right}"])
def test_a_plugin_that_offers_nonsense_costs_itself_only(install: Install, mapping: str) -> None:
    install("bad", {"a-bad": "bad_adapters"}, offers(mapping))
    install("good", {"good": "good_adapters"}, offers("{'mine': right}"))
    host = PluginHost()
    assert list(external_adapters(host)) == ["mine"]
    assert {record.point.name: record.state for record in host.records} == {
        "a-bad": "unplugged",
        "good": "loaded",
    }


def test_what_a_plugin_s_adapter_says_of_itself_shows_no_password_and_can_be_printed() -> None:
    class Told(HeldTier):
        fault = ""

        def describe(self) -> str:
            if self.fault:
                raise KeyError(self.fault)
            return "at db://user:s3cret@host/x\x1b[31m\nnext"

    server = LocalServer(pages=16, adapters=lambda: [("told", Told())])
    (row,) = server.ask(m.Status())[0].fields["l2"]  # type: ignore[union-attr]
    assert row["where"] == "at db://***@host/x?[31m next"
    server.close()
    Told.fault = "db://user:s3cret@host"
    with pytest.raises(
        StartupError, match=r"tier told: it cannot be set up \(KeyError: 'db://\*\*\*@host'\)"
    ):
        LocalServer(pages=16, adapters=lambda: [("told", Told())])

"""Eviction policies that plugins bring: found, refused by name, guarded, and scored."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.made_plugins import HEAD, Install, plugins_with
from lmcache.cli.main import main
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.plugins import refused_policies
from lmcache.v1.storage.eviction import LRU, GuardedPolicy

POLICY = """
from lmcache.v1.storage.eviction import LRU
@hookimpl
def lmcache_eviction_policies():
    return {"Mine": MAKE}
"""


def test_a_plugin_s_policy_is_found_by_name(install: Install) -> None:
    plugins = plugins_with(install, POLICY.replace("MAKE", "LRU"))
    assert plugins.policies == ["LRU", "LFU", "FIFO", "ARC", "S3-FIFO", "noop", "Mine"]
    ServerConfig(l1_size_gb=1, eviction_policy="Mine").check(plugins.policies)
    assert isinstance(plugins.make_policy("Mine"), GuardedPolicy)
    assert isinstance(plugins.make_policy("LRU"), LRU)


@pytest.mark.parametrize(("asked", "meant"), [("mine", "Mine"), ("Mien", "Mine"), ("lru", "LRU")])
def test_an_unknown_policy_is_refused_with_what_may_have_been_meant(
    asked: str, meant: str, install: Install
) -> None:
    plugins = plugins_with(install, POLICY.replace("MAKE", "LRU"))
    with pytest.raises(ConfigError) as caught:
        ServerConfig(l1_size_gb=1, eviction_policy=asked).check(plugins.policies)
    names = "LRU, LFU, FIFO, ARC, S3-FIFO, noop, Mine"
    expected = f"--eviction-policy '{asked}': expected one of {names}; did you mean {meant}?"
    assert str(caught.value) == expected


def test_an_unknown_policy_names_the_plugins_that_might_have_had_it(install: Install) -> None:
    plugins = plugins_with(install, "1 / 0")
    with pytest.raises(ConfigError, match=r"plugins that are not loaded: server-side \(import-failed\)"):
        ServerConfig(l1_size_gb=1, eviction_policy="Mine").check(
            plugins.policies, refused_policies(plugins.host.records)
        )


@pytest.mark.parametrize(
    ("make", "fault"),
    [("lambda: 1 / 0", "it raises ZeroDivisionError: division by zero"), ("dict", "it makes a dict")],
)
def test_a_policy_that_is_asked_for_and_not_delivered_stops_the_start(
    make: str, fault: str, install: Install
) -> None:
    plugins = plugins_with(install, POLICY.replace("MAKE", make))
    with pytest.raises(StartupError) as caught:
        plugins.make_policy("Mine")
    assert str(caught.value).startswith(f"--eviction-policy 'Mine' of server-side 1.0: {fault}: expected")


def test_a_policy_that_fails_later_gives_way_to_lru_and_is_recorded(install: Install) -> None:
    make = "type('Bad', (LRU,), {'touch': lambda self, keys: 1 / 0})"
    plugins = plugins_with(install, POLICY.replace("MAKE", make))
    policy = plugins.make_policy("Mine")
    policy.add(b"a", 1)
    policy.add(b"b", 1)
    policy.touch([b"a"])
    assert list(policy.victims()) == [b"b", b"a"]
    (record,) = plugins.host.records
    assert (record.state, record.note) == (
        "unplugged",
        "eviction policy Mine, touch: ZeroDivisionError: division by zero",
    )


def test_a_plugin_s_policy_is_scored_on_a_trace_unless_it_raises(
    install: Install, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bad = "type('Bad', (LRU,), {'touch': lambda self, keys: 1 / 0})"
    install(
        "mine", {"mine": "mine_policy"}, HEAD + POLICY.replace('"Mine": MAKE', f'"Mine": LRU, "Bad": {bad}')
    )
    trace = tmp_path / "trace"
    trace.write_text('{"hash_ids": [1, 2, 1, 3, 1, 2]}')
    verb = ["tool", "simulate", str(trace), "--blocks", "1,2,3", "--policy"]
    assert main([*verb, "LRU,Mine"]) == 0
    ours, mine = capsys.readouterr().out.splitlines()[2:4]
    assert mine.split() == ["Mine", *ours.split()[1:]]
    assert main([*verb, "Mine,Bad"]) == 1
    out, line = capsys.readouterr()
    assert out == ""
    assert "eviction policy Bad, touch: ZeroDivisionError" in line
    assert line.endswith("expected a policy that never raises\n")

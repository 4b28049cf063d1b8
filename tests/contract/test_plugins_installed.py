"""The sample plugin of ``examples/``, built and installed for real, and a real server with plugins."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from helpers.server import Worker, namespace, refused, run_cli, running_server, wait_for
from helpers.wheels import ROOT, build_wheel, environment, install, write_distribution

BAD = """
from lmcache.v1.plugins import hookimpl
@hookimpl
def lmcache_observe(event, fields):
    raise RuntimeError("no thanks")
"""
MRU = """
from lmcache.v1.plugins import hookimpl
from lmcache.v1.storage.eviction import LRU
class MRU(LRU):
    def victims(self):
        return reversed(list(super().victims()))
@hookimpl
def lmcache_eviction_policies():
    return {"MRU": MRU}
"""


@pytest.fixture(scope="module")
def hello(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder in which the sample plugin is installed."""
    folder = tmp_path_factory.mktemp("hello")
    project = shutil.copytree(ROOT / "examples" / "lmcache-hello-plugin", folder / "project")
    install(build_wheel(project, folder / "wheel"), folder / "site")
    return folder / "site"


def test_the_sample_s_verb_is_listed_runs_and_refuses_like_ours(hello: Path) -> None:
    env = environment(hello)
    assert "verb of the plugin lmcache-hello-plugin 0.1.0" in run_cli("--help", env=env).stdout
    done = run_cli("hello", "--name", "you", env=env)
    assert (done.returncode, done.stdout) == (0, "hello you, from lmcache 1.0.0\n")
    line = refused(run_cli("hello", "--name", " ", env=env), 2)
    assert line == "lmcache hello: --name ' ': expected a name; leave it out to greet the world"


def test_the_list_of_plugins_has_both_of_the_sample(hello: Path) -> None:
    done = run_cli("plugins", "--format", "json", env=environment(hello))
    rows = json.loads(done.stdout)["plugins"]
    assert [(row["name"], row["state"], row["distribution"]) for row in rows] == [
        ("cli.hello", "loaded", "lmcache-hello-plugin"),
        ("hello-observer", "loaded", "lmcache-hello-plugin"),
    ]


def test_an_observer_hears_what_a_server_does_and_a_bad_one_is_unplugged(
    hello: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    heard = tmp_path / "heard.jsonl"
    site = tmp_path / "site"
    write_distribution(site, "bad-observer", {"a-bad": "bad_observer"}, {"bad_observer": BAD})
    for name, value in environment(hello, LMCACHE_HELLO_LOG=str(heard)).items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(site))
    monkeypatch.setenv("PYTHONPATH", environment(site)["PYTHONPATH"])
    with running_server() as running:
        with Worker(running.address, [namespace()], engine="e1") as worker:
            assert worker.store(range(512)) == 2
            wait_for(lambda: '"stored": 2' in heard.read_text(), what="counters")
        wait_for(lambda: "session_closed" in heard.read_text(), what="the end of the session")
        assert running.get("/healthcheck")[0] == 200
        assert running.end() == 0
        log = running.errors()
    events = [json.loads(line) for line in heard.read_text().splitlines()]
    names = [event["event"] for event in events if event["event"] != "counters"]
    assert names == ["started", "session_opened", "engine_registered", "session_closed", "stopping"]
    assert events[0]["address"] == running.address
    opened = next(event for event in events if event["event"] == "session_opened")
    assert opened == {"event": "session_opened", "role": "worker", "engine": "e1", "rank": 0, "client": ""}
    assert (
        log.count("plugin a-bad of bad-observer 1.0 is unplugged: lmcache_observe: RuntimeError: no thanks")
        == 1
    )


def test_a_server_evicts_by_the_policy_of_a_plugin(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_distribution(tmp_path / "site", "mru", {"mru": "mru_policy"}, {"mru_policy": MRU})
    monkeypatch.setenv("PYTHONPATH", environment(tmp_path / "site")["PYTHONPATH"])
    with running_server("--eviction-policy", "MRU") as running:
        assert running.state()["l1"]["policy"] == "MRU"
    line = refused(run_cli("server", "--l1-size-gb", "0.01", "--eviction-policy", "mur"), 2)
    assert line.endswith(
        "--eviction-policy 'mur': expected one of LRU, LFU, FIFO, ARC, S3-FIFO, noop, MRU; did you mean MRU?"
    )

"""What the host of ``lmcache.plugins`` promises: a faulty plugin costs itself only, and says why."""

from __future__ import annotations

import logging
import sys
import threading
import time
from pathlib import Path

import pytest

from helpers.made_plugins import HEAD, Install, plugins_with
from lmcache.cli.main import main
from lmcache.v1.multiprocess.server.plugins import ServerPlugins
from lmcache.v1.plugins import PluginHost, PluginRecord, ServerHandle

OBSERVER = (
    HEAD
    + "seen = []\n@hookimpl\ndef lmcache_observe(event, fields):\n    seen.append((event, dict(fields)))\n"
)
VERB = """
class Verb:
    HELP = "say it"
    def add(self, parser):
        parser.add_argument("--loud", action="store_true")
    def run(self, args):
        print("IT" if args.loud else "it")
        return 0

@hookimpl
def lmcache_cli_verbs():
    return {NAMES}
"""


def records(host: PluginHost) -> dict[str, PluginRecord]:
    return {record.point.name: record for record in host.records}


def observe(host: PluginHost, event: str = "e") -> None:
    host.broadcast("lmcache_observe", event=event, fields={"n": 1})


# ---- loading


FAULTS = [
    ("raises", "1 / 0", "import-failed", "ZeroDivisionError: division by zero"),
    ("exits", "import sys; sys.exit(3)", "import-failed", "SystemExit: 3"),
    ("is_not_python", "def", "import-failed", "SyntaxError"),
    ("implements_nothing", "x = 1", "invalid", "implements no hook"),
    ("forgets_the_mark", "def lmcache_observe(event, fields): ...", "invalid", "implements no hook"),
    (
        "misspells",
        HEAD + "@hookimpl\ndef lmcache_observ(event): ...",
        "invalid",
        "there is no hook lmcache_observ: did you mean lmcache_observe?",
    ),
    ("asks_for_more", HEAD + "@hookimpl\ndef lmcache_observe(event, colour): ...", "invalid", "colour"),
    (
        "wraps",
        HEAD + "@hookimpl(wrapper=True)\ndef lmcache_observe(event, fields):\n    return (yield)",
        "invalid",
        "lmcache_observe is a wrapper",
    ),
    (
        "wants_a_newer_core",
        OBSERVER,
        "incompatible",
        "it requires lmcache>=99, and lmcache 1.0.0 runs",
    ),
]


@pytest.mark.parametrize(("name", "text", "state", "note"), FAULTS, ids=[fault[0] for fault in FAULTS])
def test_a_faulty_plugin_costs_itself_only_and_its_record_says_why(
    name: str, text: str, state: str, note: str, install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    requires = ("lmcache>=99",) if state == "incompatible" else ("lmcache>=1,<2",)
    install(f"bad-{name}", {"a-bad": f"bad_{name}"}, text, version="2.5", requires=requires)
    install("good-one", {"b-good": "good_one"}, OBSERVER)
    with caplog.at_level(logging.WARNING):
        host = PluginHost()
        observe(host)
    bad = records(host)["a-bad"]
    assert (bad.state, bad.point.distribution, bad.point.version) == (state, f"bad-{name}", "2.5")
    assert note in bad.note
    assert bad.remedy
    assert bool(bad.traceback) == (state == "import-failed")
    assert [r.message for r in caplog.records] == [bad.verdict()]
    assert f"bad-{name} 2.5" in bad.verdict()
    assert records(host)["b-good"].state == "loaded"
    assert sys.modules["good_one"].seen == [("e", {"n": 1})]


def test_extras_of_an_entry_point_are_no_part_of_what_it_names(install: Install) -> None:
    install("with-extras", {"extras": "extras_module:sys.modules [a,b]"}, "import sys\n")
    (found,) = PluginHost().records
    assert "implements no hook" in found.note  # it was found, and is a dictionary


def test_a_name_that_a_terminal_would_obey_is_logged_harmless(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("evil", {"e\x1b[31m": "evil_module"}, "1 / 0")
    PluginHost()
    assert [r.message.isprintable() for r in caplog.records] == [True]


def test_an_entry_point_may_name_an_object_but_no_class(install: Install) -> None:
    text = HEAD + (
        "seen = []\n"
        "class Plugin:\n    @hookimpl\n    def lmcache_observe(self, event):\n        seen.append(event)\n"
        "plugin = Plugin()\n"
    )
    install("objects", {"object": "objects_module:plugin", "class": "objects_module:Plugin"}, text)
    host = PluginHost()
    observe(host)
    assert records(host)["object"].state == "loaded"
    assert "names the class Plugin: expected a module or an object" in records(host)["class"].note
    assert sys.modules["objects_module"].seen == ["e"]


def test_of_two_plugins_with_one_name_the_first_is_loaded_and_the_other_names_it(install: Install) -> None:
    install("first", {"same": "a_first"}, OBSERVER)
    install("second", {"same": "b_second"}, OBSERVER)
    one, other = PluginHost().records
    assert (one.state, other.state) == ("loaded", "duplicate")
    assert other.note == "the name is taken by first 1.0 (a_first)"
    assert "b_second" not in sys.modules


def test_a_plugin_that_fails_does_not_hold_its_name(install: Install) -> None:
    install("first", {"same": "a_first"}, "1 / 0")
    install("second", {"same": "b_second"}, OBSERVER)
    assert [record.state for record in PluginHost().records] == ["import-failed", "loaded"]


@pytest.mark.parametrize("setting", ["a-bad", "A_Bad", " x, some_dist "])
def test_a_disabled_plugin_is_not_imported(
    setting: str, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("some-dist", {"a-bad": "never_imported"}, "1 / 0")
    monkeypatch.setenv("LMCACHE_DISABLE_PLUGINS", setting)
    (record,) = PluginHost().records
    assert record.state == "blocked"
    assert "never_imported" not in sys.modules


def test_a_distribution_with_unreadable_metadata_does_not_hide_the_others(
    install: Install, tmp_path: Path
) -> None:
    install("broken", {"broken": "broken_module"}, OBSERVER)
    install("good", {"good": "good_module"}, OBSERVER)
    points = tmp_path / "site" / "broken-1.0.dist-info" / "entry_points.txt"
    points.write_bytes(b"[lmcache.plugins]\n\xff=")
    assert records(PluginHost())["good"].state == "loaded"
    points.write_text("[lmcache.plugins]\nno equals sign\n")
    host = PluginHost()
    assert records(host)["good"].state == "loaded"
    assert records(host)["broken"].state == "invalid"
    assert records(host)["broken"].note.startswith("its entry_points.txt cannot be read: ")


# ---- calling


def test_a_hook_that_raises_is_recorded_and_never_called_again(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install("bad", {"bad": "bad_hook"}, OBSERVER + "    raise SystemExit('no')\n")
    install("good", {"good": "good_hook"}, OBSERVER)
    host = PluginHost()
    with caplog.at_level(logging.WARNING):
        observe(host, "one")
        observe(host, "two")
    record = records(host)["bad"]
    assert (record.state, record.note) == ("unplugged", "lmcache_observe: SystemExit: no")
    assert "bad_hook.py" in record.traceback
    assert len(caplog.records) == 1
    assert [event for event, _ in sys.modules["bad_hook"].seen] == ["one"]
    assert [event for event, _ in sys.modules["good_hook"].seen] == ["one", "two"]


def test_keyboard_interrupt_is_the_user_s_and_passes(install: Install) -> None:
    install("bad", {"bad": "interrupted"}, OBSERVER + "    raise KeyboardInterrupt\n")
    host = PluginHost()
    with pytest.raises(KeyboardInterrupt):
        observe(host)


def test_plugins_are_called_in_the_order_that_they_ask_for(install: Install) -> None:
    text = (
        "import builtins\n"
        + HEAD
        + "@hookimpl(tryfirst={})\ndef lmcache_observe(fields):\n    fields.append({!r})\n"
    )
    install("a", {"a": "order_a"}, text.format(False, "a"))
    install("b", {"b": "order_b"}, text.format(True, "b"))
    heard: list[str] = []
    PluginHost().broadcast("lmcache_observe", event="e", fields=heard)
    assert heard == ["b", "a"]


def test_a_name_that_is_taken_is_not_offered_again(install: Install) -> None:
    text = HEAD + "@hookimpl\ndef lmcache_eviction_policies():\n    return {}\n"
    install("a", {"a": "offers_a"}, text.format("{'LRU': list, 'mine': list}"))
    install("b", {"b": "offers_b"}, text.format("{'mine': dict}"))
    install("c", {"c": "offers_c"}, text.format("['mine']"))
    host = PluginHost()
    offers = host.collect("lmcache_eviction_policies", taken={"LRU": 1})
    assert {name: record.point.name for name, (_, record) in offers.items()} == {"mine": "a"}
    assert records(host)["a"].note == "its 'LRU' is not used: the name is taken by lmcache"
    assert records(host)["b"].note == "its 'mine' is not used: the name is taken by a 1.0"
    assert records(host)["c"].note == "lmcache_eviction_policies returned list: expected a mapping from names"


# ---- verbs


def verb(names: str = '{"it": Verb()}') -> str:
    return HEAD + VERB.replace("{NAMES}", names)


def test_help_names_a_plugin_s_verb_without_importing_it(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("it-plugin", {"cli.it": "it_verb"}, "raise RuntimeError", version="3.1")
    assert main(["--help"]) == 0
    assert "  it              verb of the plugin it-plugin 3.1\n" in capsys.readouterr().out
    assert "it_verb" not in sys.modules


def test_a_plugin_s_verb_has_flags_and_help_like_any_other(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("it-plugin", {"cli.it": "it_verb"}, verb())
    assert main(["it", "--loud"]) == 0
    assert capsys.readouterr().out == "IT\n"
    assert main(["it", "--help"]) == 0
    assert "say it" in capsys.readouterr().out
    assert main(["it", "--lood"]) == 2
    assert (
        capsys.readouterr().err
        == "lmcache it: unknown flag '--lood': did you mean --loud? see lmcache it --help\n"
    )


def test_a_plugin_never_replaces_a_verb_or_a_group_of_ours(
    install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    points = {"cli.version": "rude_verb", "cli.query": "rude_verb"}
    install("rude", points, verb('{"version": Verb(), "query": Verb()}'))
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("lmcache 1.0.0")
    assert main(["--help"]) == 0
    assert "rude" not in capsys.readouterr().out
    assert "rude_verb" not in sys.modules


@pytest.mark.parametrize(
    ("text", "note"),
    [
        ("1 / 0", "is import-failed: ZeroDivisionError: division by zero"),
        (verb('{"other": Verb()}'), "is invalid: lmcache_cli_verbs does not return 'it', which it announces"),
        (verb("1"), "is unplugged: lmcache_cli_verbs returned int: expected a mapping"),
        (verb('{"it": 1}'), "is unplugged: its verb failed: AttributeError"),
        (
            verb().replace('print("IT"', 'exec("raise SystemError()"'),
            "is unplugged: its verb failed: SystemError",
        ),
    ],
)
def test_a_plugin_s_broken_verb_is_one_line_and_no_other_verb_suffers(
    text: str, note: str, install: Install, capsys: pytest.CaptureFixture[str]
) -> None:
    install("it-plugin", {"cli.it": "it_verb"}, text)
    assert main(["it", "--loud"]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1
    assert err.startswith("lmcache it: plugin cli.it of it-plugin 1.0 ")
    assert note in err
    assert main(["version"]) == 0


def test_a_disabled_verb_is_no_verb(
    install: Install, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install("it-plugin", {"cli.it": "it_verb"}, verb())
    monkeypatch.setenv("LMCACHE_DISABLE_PLUGINS", "it-plugin")
    assert main(["it"]) == 2
    assert "unknown verb 'it'" in capsys.readouterr().err


def test_the_list_of_plugins_shows_every_record(install: Install, capsys: pytest.CaptureFixture[str]) -> None:
    install("it-plugin", {"cli.it": "it_verb", "watch": "it_verb"}, verb())
    install("bad", {"bad": "bad_listed"}, "1 / 0")
    assert main(["plugins"]) == 0
    lines = [line.split()[:4] for line in capsys.readouterr().out.splitlines()]
    assert ["bad", "bad", "1.0", "import-failed"] in lines
    assert ["cli.it", "it-plugin", "1.0", "loaded"] in lines
    assert ["watch", "it-plugin", "1.0", "invalid"] in lines


# ---- the server's side


HANDLE = ServerHandle("tcp://127.0.0.1:1", "http://127.0.0.1:2", "e", 256, 1, dict)


def test_without_plugins_the_server_starts_no_thread_and_keeps_no_events() -> None:
    before = threading.active_count()
    plugins = ServerPlugins()
    plugins.emit("session_opened", {})
    plugins.started(HANDLE, threading.Event())
    assert threading.active_count() == before
    assert plugins.policies == ["LRU", "LFU", "FIFO", "ARC", "S3-FIFO", "noop"]
    plugins.close()


def test_the_server_does_not_load_what_only_the_command_line_needs(install: Install) -> None:
    install("it-plugin", {"cli.it": "it_verb"}, "1 / 0")
    assert ServerPlugins().host.records == []


def test_observers_hear_events_in_order_and_cannot_change_them(install: Install) -> None:
    text = OBSERVER.removeprefix(HEAD) + (
        "@hookimpl\ndef lmcache_server_stopping(server):\n    seen.append(server.epoch)\n"
        "    try:\n        del FIELDS['a']\n    except TypeError:\n        seen.append('frozen')\n"
    )
    plugins = plugins_with(
        install,
        text.replace(
            "seen.append((event, dict(fields)))", "global FIELDS; FIELDS = fields; seen.append(event)"
        ),
    )
    for event in ("a", "b", "c"):
        plugins.emit(event, {"a": 1})
    plugins.stopping(HANDLE)
    plugins.close()
    assert sys.modules["server_side"].seen == ["a", "b", "c", "e", "frozen"]


def test_counters_are_told_only_after_a_change(install: Install) -> None:
    plugins = plugins_with(install, OBSERVER.removeprefix(HEAD))
    for evicted in (0, 0, 1, 1):
        plugins.count({"evicted": evicted})
    plugins.close()
    assert [fields["evicted"] for _, fields in sys.modules["server_side"].seen] == [0, 1]


def test_a_hook_that_never_returns_holds_up_neither_start_nor_stop_nor_events(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for limit in ("START_SECONDS", "STOP_SECONDS"):
        monkeypatch.setattr(f"lmcache.v1.multiprocess.server.plugins.{limit}", 0.2)
    monkeypatch.setattr("lmcache.v1.multiprocess.server.plugins._MAX_WAITING", 10)
    text = (
        "import threading\nfree = threading.Event()\n"
        "@hookimpl\ndef lmcache_server_started():\n    free.wait(60)\n"
        "@hookimpl\ndef lmcache_server_stopping(): ...\n"
        "@hookimpl\ndef lmcache_observe(): ...\n"
    )
    plugins = plugins_with(install, text)
    began = time.monotonic()
    with caplog.at_level(logging.WARNING):
        plugins.started(HANDLE, threading.Event())
        for _ in range(50):
            plugins.emit("counters", {})
        plugins.stopping(HANDLE)
        plugins.close()
    assert time.monotonic() - began < 5
    sys.modules["server_side"].free.set()
    text = " ".join(record.message for record in caplog.records)
    assert "server-side of server-side 1.0 has not returned from lmcache_server_started within 0.2 s" in text
    assert "observers are slow" in text


def test_a_signal_ends_the_wait_for_a_plugin_at_start(install: Install) -> None:
    text = (
        "import threading\nfree = threading.Event()\n"
        "@hookimpl\ndef lmcache_server_started():\n    free.wait(60)\n"
    )
    plugins = plugins_with(install, text)
    stop = threading.Event()
    stop.set()
    began = time.monotonic()
    plugins.started(HANDLE, stop)
    assert time.monotonic() - began < 5
    sys.modules["server_side"].free.set()
    plugins.close()

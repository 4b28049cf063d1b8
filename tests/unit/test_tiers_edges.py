"""A store of several tiers at the edges: none, closed, options and adapters that are not what they should be."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from helpers.stored import disk
from helpers.tiers import Store, held, key, memory, until
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.storage.l2.adapter import AdapterError
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions
from lmcache.v1.storage.l2.fault import make as make_fault
from lmcache.v1.storage.tiers import TierOptions


def test_after_close_nothing_is_taken_and_nothing_hangs() -> None:
    store = Store(memory())
    store.put("a")
    store.close(5.0)
    assert store.ask("b")[0] is None
    assert store.put("b") == 1
    with store.lock:
        assert store.clear().result(1.0) == {"l1": 2, "t0": -1}
    assert store.nothing_is_taken()
    assert store.flush(0.0)


def test_a_store_without_tiers_is_an_l1() -> None:
    store = Store()
    assert store.put("a") == 1
    assert store.ask("a", "b")[0] is None
    with store.lock:
        assert store.written([key("a")]) is None
        assert store.clear().result(0) == {"l1": 1}
    assert (store.status(), store.flush(0.0)) == ([], True)
    store.close(1.0)


@pytest.mark.parametrize(
    ("option", "text"),
    [
        ({"store_policy": "never"}, "store_policy='never': expected one of write_behind, skip_l1"),
        ({"prefetch_policy": "x"}, "prefetch_policy='x': expected one of retain, drop"),
        ({"queue_bytes": 0}, "queue_bytes=0: expected a number above 0"),
        ({"load_seconds": float("nan")}, "load_seconds=nan: expected a number above 0"),
    ],
)
def test_an_option_that_cannot_be_used_is_refused_in_one_line(option: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        TierOptions(**option)  # type: ignore[arg-type]
    assert str(caught.value) == text


def test_a_tier_that_cannot_tell_what_it_holds_does_not_start() -> None:
    class Mute(FaultAdapter):
        def scan(self):  # type: ignore[no-untyped-def]
            raise AdapterError("unreadable")

    with pytest.raises(StartupError, match=r"tier t0: it cannot be set up \(AdapterError: unreadable\)"):
        Store(Mute())


def test_what_does_not_start_leaves_no_thread_behind(tmp_path: Path) -> None:
    class Mute(FaultAdapter):
        def scan(self):  # type: ignore[no-untyped-def]
            raise AdapterError("unreadable")

    store = Store(disk(tmp_path))
    store.put("a")
    assert store.flush(10.0)
    store.close(5.0)
    before = set(threading.enumerate())
    first = disk(tmp_path, quotas_gb={"": 0.0})
    with pytest.raises(StartupError, match="tier t1"):
        Store(first, Mute())
    first.close()
    assert until(lambda: set(threading.enumerate()) <= before)


@pytest.mark.parametrize("header", [7, 1 << 60, "text", b"", b"LMCKV", [1], object()])
def test_a_header_of_any_kind_is_survived(header: object) -> None:
    class Strange(FaultAdapter):
        def load(self, wants, call):  # type: ignore[no-untyped-def]
            return [header] * len(wants)

    store = Store(Strange())
    store.put("a")
    assert store.flush(10.0)
    store.forget()
    assert store.fetch("a") == 0
    assert store.status()[0]["quarantined"] == 1
    store.close(5.0)


@pytest.mark.parametrize("answer", [None, 5, [], [True, True], [object()], {}])
def test_an_answer_of_any_kind_is_survived(answer: object) -> None:
    class Strange(FaultAdapter):
        def store(self, objects, call):  # type: ignore[no-untyped-def]
            return answer

        contains = load = delete = store  # type: ignore[assignment]

    store = Store(Strange(FaultOptions(shared=True)))
    store.put("a")
    assert store.flush(10.0)
    store.forget()
    assert store.fetch("a") == 0
    with store.lock:
        gone = store.delete([key("a")])
    assert gone.result(10.0)["t0"] in (-1, 1)
    assert until(store.nothing_is_taken)
    store.close(5.0)


def test_a_tier_that_only_takes_is_never_asked_and_one_that_only_gives_never_written_to() -> None:
    taker, giver = memory(shared=True), memory(shared=True)
    taker.reads, giver.writes = False, False
    store = Store(taker, giver)
    store.put("a")
    assert store.flush(10.0)
    assert (held(taker), held(giver)) == ({"a"}, set())
    giver.objects.update(taker.objects)
    calls = taker.calls
    store.forget()
    assert store.fetch("a") == 1
    assert taker.calls == calls
    store.close(5.0)


def test_a_plugin_that_fails_to_tell_its_usage_spoils_no_status() -> None:
    class Mute(FaultAdapter):
        def usage(self):  # type: ignore[no-untyped-def]
            raise RuntimeError("no")

    store = Store(Mute())
    assert store.put("a") == 1
    assert store.flush(10.0)
    assert store.status()[0]["used_bytes"] == -1
    assert store.status()[0]["stored"] == 1
    store.close(5.0)


def test_the_fault_adapter_takes_an_operator_s_options_and_refuses_what_it_does_not_know() -> None:
    assert make_fault({"error": 0.5, "capacity": "1MiB", "on": ["load"]}).plan.capacity == 1 << 20
    with pytest.raises(ConfigError, match="did you mean hang"):
        make_fault({"hangs": 1})
    with pytest.raises(ConfigError, match="error=2"):
        make_fault({"error": 2})

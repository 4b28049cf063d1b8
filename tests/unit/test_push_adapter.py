"""What the adapter `peer` makes of an operator's options, and of a peer that is not there."""

from __future__ import annotations

import importlib.util
import time
from typing import Any

import pytest

from helpers.pusher import key_of, put_of
from helpers.server import dead_port, running_server
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.storage.l2.adapter import AdapterError, Call, Want
from lmcache.v1.storage.l2.registry import build
from lmcache.v1.storage.shm_pool import PAGE

HAS_NIXL = any(map(importlib.util.find_spec, ("nixl_cu12", "nixl_cu13", "nixl")))


@pytest.mark.parametrize(
    ("options", "hint"),
    [
        ({}, "address"),
        ({"address": "h", "transprot": "nixl"}, "did you mean transport?"),
        ({"address": "h", "transport": "rdma"}, "expected one of auto, nixl, frames"),
        ({"address": "udp://h:1"}, "expected tcp://HOST:PORT"),
        ({"address": "h:99999"}, "h:99999"),
        ({"address": "h", "sync": "yes"}, "sync"),
        ({"address": "h", "wait_seconds": -1}, "wait_seconds"),
        ({"address": "h", "timeout_seconds": 0}, "timeout_seconds"),
        ({"address": "h", "push": False, "pull": False}, "push and pull are both false"),
    ],
)
def test_an_option_that_cannot_be_used_is_named_in_one_line(options: dict[str, Any], hint: str) -> None:
    with pytest.raises(ConfigError) as caught:
        build({"type": "peer", **options})
    assert str(caught.value).startswith("--l2-adapter peer")
    assert hint in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.skipif(HAS_NIXL, reason="says what happens without NIXL")
def test_nixl_that_is_asked_for_and_absent_is_an_error_with_its_install_line() -> None:
    with pytest.raises(StartupError, match=r"pip install --no-deps nixl-cu12 numpy"):
        build({"type": "peer", "address": "127.0.0.1", "transport": "nixl"})
    build({"type": "peer", "address": "127.0.0.1", "transport": "auto"}).close()


def test_a_peer_that_is_away_costs_one_time_out_and_then_nothing_for_a_while() -> None:
    adapter = build(
        {
            "type": "peer", "address": f"127.0.0.1:{dead_port()}", "transport": "frames",
            "timeout_seconds": 0.3,
        }
    )  # fmt: skip
    began = time.monotonic()
    with pytest.raises(AdapterError, match="no connection"):
        adapter.store([put_of("a")], Call(10))
    assert 0.2 < time.monotonic() - began < 5
    began = time.monotonic()
    for _ in range(100):
        with pytest.raises(AdapterError):
            adapter.contains([key_of("a")], Call(10))
    assert time.monotonic() - began < 10, "a time-out each would be 30 s"
    adapter.close()


def test_a_peer_is_only_asked_what_it_is_there_for() -> None:
    away = {"type": "peer", "address": f"127.0.0.1:{dead_port()}", "transport": "frames"}
    only_push, only_pull = build({**away, "pull": False}), build({**away, "push": False})
    assert only_push.contains([key_of("a")], Call(1)) == [False]
    assert only_push.load([Want(key_of("a"), memoryview(bytearray(8)))], Call(1)) == [None]
    assert only_pull.store([put_of("a")], Call(1)) == [False]
    for adapter in (only_push, only_pull):
        assert adapter.delete([key_of("a")], Call(1)) == [False]  # what a peer holds is its own
        assert adapter.clear(Call(1)) == 0
        adapter.close()


def test_a_batch_may_be_empty_or_name_an_object_twice() -> None:
    with running_server() as server:
        adapter = build({"type": "peer", "address": server.address, "transport": "frames"})
        assert adapter.store([], Call(5)) == adapter.contains([], Call(5)) == adapter.load([], Call(5)) == []
        twice = [put_of("a"), put_of("b"), put_of("a")]
        keys = [put.key for put in twice]
        assert adapter.store(twice, Call(5)) == [True] * 3
        assert adapter.contains([*keys, key_of("c")], Call(5)) == [True] * 3 + [False]
        wants = [Want(put.key, memoryview(bytearray(len(put.payload)))) for put in twice]
        wants.append(
            Want(keys[0], memoryview(bytearray(len(twice[0].payload) + 1)))
        )  # another length is a miss
        headers = adapter.load(wants, Call(5))
        assert [header is not None for header in headers] == [True] * 3 + [False]
        assert [want.payload for want in wants[:3]] == [put.payload for put in twice]
        adapter.close()


def test_objects_of_several_accounts_may_be_in_one_batch() -> None:
    with running_server() as server:
        adapter = build({"type": "peer", "address": server.address, "transport": "frames"})
        batch = [put_of(n, account=f"{n % 3:016x}") for n in range(9)]
        assert adapter.store(batch, Call(5)) == [True] * 9
        accounts = {row["account"]: row["used_bytes"] for row in server.state()["accounts"]}
        assert [accounts[f"{n:016x}"] for n in range(3)] == [3 * 2 * PAGE] * 3
        adapter.close()

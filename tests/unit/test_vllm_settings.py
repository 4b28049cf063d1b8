"""What the connector's settings promise: every key is understood or refused, and a slip is pointed out."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.errors import ConfigError
from lmcache.integration.vllm.settings import _KEYS, _REFUSED, ConnectorSettings, read_settings
from lmcache.v1.multiprocess.client import ClientOptions
from lmcache.v1.platform.base.device_spec import MPTransferMode


@pytest.fixture(autouse=True)
def no_mode_in_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("LMCACHE_MP_TRANSFER_MODE", raising=False)


def read(**keys: Any) -> ConnectorSettings:
    return read_settings({f"lmcache.mp.{name}": value for name, value in keys.items()})


def refusal(**keys: Any) -> str:
    with pytest.raises(ConfigError) as refused:
        read(**keys)
    text = str(refused.value)
    assert "\n" not in text
    return text


def test_without_settings_the_server_is_on_this_host_at_its_usual_port() -> None:
    assert read_settings({}) == ConnectorSettings(address="tcp://127.0.0.1:5555", client=ClientOptions())


@pytest.mark.parametrize(
    ("keys", "address"),
    [
        ({"host": "h"}, "tcp://h:5555"),
        ({"host": "h:1"}, "tcp://h:1"),
        ({"host": "tcp://h"}, "tcp://h:5555"),
        ({"host": "tcp://h:1"}, "tcp://h:1"),
        ({"host": "tcp://h", "port": 7}, "tcp://h:7"),
        ({"host": "h", "port": "7"}, "tcp://h:7"),
        ({"host": "tcp://h:7", "port": 7}, "tcp://h:7"),
        ({"port": 7}, "tcp://127.0.0.1:7"),
        ({"host": "localhost", "port": 7}, "tcp://127.0.0.1:7"),
        ({"host": "::1", "port": 7}, "tcp://[::1]:7"),
        ({"host": "[::1]:7"}, "tcp://[::1]:7"),
        ({"host": "tcp://[fe80::2]"}, "tcp://[fe80::2]:5555"),
    ],
)
def test_the_server_s_address_may_be_spelt_in_many_ways(keys: dict[str, Any], address: str) -> None:
    assert read(**keys).address == address


@pytest.mark.parametrize(
    "keys",
    [
        {"host": "grpc://h"},
        {"host": "ipc:///tmp/x"},
        {"host": ""},
        {"host": "tcp://"},
        {"host": "h:99999"},
        {"host": "h:x"},
        {"host": ["h"]},
        {"host": "tcp://h:1/path"},
        {"host": "tcp://h:1", "port": 2},
        {"port": 0},
        {"port": 65536},
        {"port": "x"},
        {"port": True},
        {"port": 1.5},
    ],
    ids=str,
)
def test_an_address_that_is_none_is_refused_with_what_was_found(keys: dict[str, Any]) -> None:
    text = refusal(**keys)
    assert str(next(reversed(keys.values()))) in text


@pytest.mark.parametrize(
    ("keys", "field", "value"),
    [
        ({"mq_timeout": 5}, "control_timeout", 5.0),
        ({"mq_timeout": "0.5"}, "control_timeout", 0.5),
        ({"heartbeat_interval": 3}, "heartbeat_interval", 3.0),
        ({"fence_timeout": 90}, "fence_timeout", 90.0),
        ({"shm": "require"}, "shm", "require"),
        ({"shm": "off"}, "shm", "off"),
    ],
)
def test_limits_and_paths_reach_the_client(keys: dict[str, Any], field: str, value: Any) -> None:
    assert getattr(read(**keys).client, field) == value


def test_the_other_settings_are_taken_as_given() -> None:
    settings = read(save_decode_cache=True, model_revision="abc", mp_transfer_mode="engine_driven")
    assert (settings.save_decode_cache, settings.model_revision) == (True, "abc")
    assert settings.mode is MPTransferMode.ENGINE_DRIVEN


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ({"mq_timeout": 0}, "0.05..3600"),
        ({"mq_timeout": -1}, "0.05..3600"),
        ({"mq_timeout": "soon"}, "seconds"),
        ({"mq_timeout": True}, "seconds"),
        ({"mq_timeout": None}, "seconds"),
        ({"mq_timeout": float("nan")}, "seconds"),
        ({"mq_timeout": float("inf")}, "seconds"),
        ({"heartbeat_interval": 1e9}, "0.05..3600"),
        ({"fence_timeout": 0}, "0.05..3600"),
        ({"shm": "maybe"}, "auto, require or off"),
        ({"shm": True}, "auto, require or off"),
        ({"save_decode_cache": "true"}, "JSON boolean"),
        ({"save_decode_cache": 1}, "JSON boolean"),
        ({"model_revision": {"a": 1}}, "text"),
    ],
    ids=str,
)
def test_a_value_of_the_wrong_kind_is_refused_with_its_key_and_what_was_expected(
    keys: dict[str, Any], expected: str
) -> None:
    text = refusal(**keys)
    assert f"lmcache.mp.{next(iter(keys))}" in text
    assert expected in text


def test_a_mode_nobody_knows_is_refused_wherever_it_was_set(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "lmcache.mp.mp_transfer_mode" in refusal(mp_transfer_mode="warp")
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "warp")
    assert "LMCACHE_MP_TRANSFER_MODE" in refusal()


def test_the_environment_s_mode_counts_only_without_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LMCACHE_MP_TRANSFER_MODE", "engine_driven")
    assert read().mode is MPTransferMode.ENGINE_DRIVEN
    assert read(mp_transfer_mode="auto").mode is MPTransferMode.AUTO


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("lmcache.mp.prot", "lmcache.mp.port"),
        ("lmcache.mp.Host", "lmcache.mp.host"),
        ("lmcache.mp.save_decode", "lmcache.mp.save_decode_cache"),
        ("lmcache.mp.transfer_mode", "lmcache.mp.mp_transfer_mode"),
        ("lmcache.host", "lmcache.mp.host"),
        ("lmcache.port", "lmcache.mp.port"),
        ("lmcache.mp_host", "lmcache.mp.host"),
        ("lmcache_mp.host", "lmcache.mp.host"),
        ("lmcachemp.port", "lmcache.mp.port"),
    ],
)
def test_a_key_that_looks_like_ours_is_refused_with_what_may_be_meant(key: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=rf"{key}: no such setting; did you mean {meant}\?"):
        read_settings({key: "x"})


def test_a_key_of_ours_that_resembles_nothing_is_refused_with_all_that_there_are() -> None:
    with pytest.raises(ConfigError, match="no such setting; known: ") as refused:
        read_settings({"lmcache.mp.xyzzy": 1})
    assert all(f"lmcache.mp.{name}" in str(refused.value) for name in _KEYS)


@pytest.mark.parametrize("key", ["use_layerwise", "kv_connector", "nixl.backend", "host", "mooncake.port"])
def test_keys_of_other_software_in_the_same_map_are_let_be(key: str) -> None:
    assert read_settings({key: "x"}) == read_settings({})


@pytest.mark.parametrize("name", _REFUSED)
def test_a_setting_that_cannot_be_met_is_refused_with_the_reason(name: str) -> None:
    text = refusal(**{name: "wanted"})
    assert text == f"lmcache.mp.{name}='wanted': {_REFUSED[name]}; remove it"


@pytest.mark.parametrize("name", _REFUSED)
@pytest.mark.parametrize("value", [False, None, ""])
def test_a_setting_that_cannot_be_met_may_be_switched_off(name: str, value: Any) -> None:
    assert read(**{name: value}) == read()


def test_the_one_hash_that_there_is_may_be_named() -> None:
    assert read(hash_algorithm="blake3") == read()
    assert "lmcache.mp.hash_algorithm" in refusal(hash_algorithm="sha256")


def test_a_setting_with_another_s_accepted_value_is_refused() -> None:
    assert "lazy_offload" in refusal(lazy_offload="blake3")

"""Settings of the in-process engine: who wins, what is refused, and what a mistake reads like."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.errors import ConfigError
from lmcache.v1.config import FIELDS, REFUSED, LMCacheEngineConfig, masked, places, shown, tier_specs
from lmcache.v1.config.sources import OTHER_VARIABLES, from_environment


def written(folder: Path, text: str) -> str:
    path = folder / "lmcache.yaml"
    path.write_text(text)
    return str(path)


def load(
    path: str | None = None, overrides: dict[str, Any] | None = None, **environ: str
) -> LMCacheEngineConfig:
    return LMCacheEngineConfig.load(path, overrides, environ)


def refusal(call: Any, *arguments: Any, **keywords: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        call(*arguments, **keywords)
    text = str(caught.value)
    assert "\n" not in text
    assert caught.value.exit_code == 2
    return text


@given(
    in_code=st.none() | st.integers(1, 999),
    in_environment=st.none() | st.integers(1, 999),
    in_file=st.none() | st.integers(1, 999),
)
def test_code_beats_the_environment_which_beats_the_file_which_beats_the_default(
    tmp_path_factory: pytest.TempPathFactory,
    in_code: int | None,
    in_environment: int | None,
    in_file: int | None,
) -> None:
    path = None
    if in_file is not None:
        path = written(tmp_path_factory.mktemp("config"), f"chunk_size: {in_file}")
    environ = {} if in_environment is None else {"LMCACHE_CHUNK_SIZE": str(in_environment)}
    overrides = {} if in_code is None else {"chunk_size": in_code}
    config = LMCacheEngineConfig.load(path, overrides, environ)
    expected = [
        (in_code, "code"),
        (in_environment, "LMCACHE_CHUNK_SIZE"),
        (in_file, f"file {path}"),
        (256, "default"),
    ]
    value, source = next(pair for pair in expected if pair[0] is not None)
    assert (config.chunk_size, config.source_of("chunk_size")) == (value, source)


def test_the_file_is_the_one_that_the_variable_names_unless_another_is_given(tmp_path: Path) -> None:
    named = written(tmp_path, "chunk_size: 64")
    (tmp_path / "other.yaml").write_text("chunk_size: 32")
    assert load(LMCACHE_CONFIG_FILE=named).chunk_size == 64
    assert load(str(tmp_path / "other.yaml"), LMCACHE_CONFIG_FILE=named).chunk_size == 32


def test_a_wrong_value_is_an_error_even_where_another_source_overrides_it(tmp_path: Path) -> None:
    path = written(tmp_path, "chunk_size: many")
    assert f"chunk_size (file {path})='many'" in refusal(load, path, {"chunk_size": 1})


@pytest.mark.parametrize(
    ("value", "shown"),
    [(5, "a number"), (True, "a boolean"), ("s3cret", "text of 6"), (["s3cret"], "a list of 1")],
)
def test_what_is_no_map_is_told_by_its_kind_alone(value: object, shown: str) -> None:
    said = refusal(LMCacheEngineConfig.from_dict, {"extra_config": value})
    assert said.startswith(f"extra_config (code)={shown}: expected a map")


@pytest.mark.parametrize("key", list(FIELDS))
def test_every_key_refuses_what_it_is_not_and_says_what_it_takes(key: str) -> None:
    said = refusal(LMCacheEngineConfig.from_dict, {key: object()})
    assert said.startswith(f"{key} (code)=")
    assert said.endswith(f"expected {FIELDS[key].expected}")


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("chunk_size", 0),
        ("chunk_size", -3),
        ("chunk_size", True),
        ("chunk_size", 1.5),
        ("max_local_cpu_size", 0),
        ("max_local_cpu_size", -1),
        ("max_local_cpu_size", float("nan")),
        ("max_local_cpu_size", float("inf")),
        ("blocking_timeout_secs", 0),
        ("lookup_timeout_ms", 0),
        ("min_retrieve_tokens", -1),
        ("local_cpu", "perhaps"),
        ("retrieve_locations", 7),
        ("l2_adapters", "{"),
        ("extra_config", "[]"),
        ("pd_role", "proxy"),
    ],
)
def test_values_out_of_range_are_refused(key: str, value: Any) -> None:
    assert refusal(LMCacheEngineConfig.from_dict, {key: value}).startswith(f"{key} (code)=")


def test_text_of_the_environment_is_read_in_the_type_of_its_key() -> None:
    config = load(
        LMCACHE_LOCAL_CPU="False",
        LMCACHE_MAX_LOCAL_CPU_SIZE="0.5",
        LMCACHE_RETRIEVE_LOCATIONS="LocalCPUBackend, disk",
        LMCACHE_EXTRA_CONFIG='{"model_revision": "r1"}',
        LMCACHE_L2_ADAPTERS='[{"type": "shared_fs", "path": "/x"}]',
        LMCACHE_REMOTE_URL="null",
    )
    assert config.local_cpu is False
    assert config.pool_bytes == 1 << 29
    assert config.retrieve_locations == ("LocalCPUBackend", "disk")
    assert config.get_extra_config_value("model_revision") == "r1"
    assert config.l2_adapters == ({"type": "shared_fs", "path": "/x"},)
    assert config.remote_url is None


def test_an_unknown_key_is_an_error_that_names_the_nearest(tmp_path: Path) -> None:
    assert "did you mean chunk_size?" in refusal(load, written(tmp_path, "chunk_sise: 1"))
    assert "did you mean local_disk?" in refusal(load, None, {"local_disc": "/x"})
    assert "expected one of chunk_size" in refusal(load, None, {"zzz": 1})


@pytest.mark.parametrize("key", list(FIELDS))
def test_a_variable_spelled_almost_like_a_key_is_an_error(key: str) -> None:
    slip = f"LMCACHE_{key.upper()}S"
    if slip.removeprefix("LMCACHE_").lower() not in FIELDS:
        assert "did you mean LMCACHE_" in refusal(from_environment, {slip: "1"})


@pytest.mark.parametrize(
    "name",
    [
        *sorted(OTHER_VARIABLES),
        "LMCACHE_OTHER_DEVICE_TARGETS",
        "LMCACHE_FOO_IPC_DIR",
        "LMCACHE_FOO_BLOCK_SIZES",
        "LMCACHE_KILL_ROUNDS",
    ],
)
def test_variables_of_other_parts_are_let_pass(name: str) -> None:
    assert from_environment({name: "x"}) == {}


def test_no_variable_that_anything_here_reads_is_taken_for_a_slip() -> None:
    root = Path(__file__).parents[2]
    sources = [
        *root.glob("core/src/**/*.py"),
        *root.glob("plugins/*/src/**/*.py"),
        *root.glob("tests/devices/**/*.py"),
    ]
    names = {name for path in sources for name in re.findall(r"\bLMCACHE_[A-Z0-9_]+\b", path.read_text())}
    assert "LMCACHE_DEVICE_BACKEND" in names
    for name in sorted(names):
        key = name.removeprefix("LMCACHE_").lower()
        assert key in FIELDS or from_environment({name: "x"}) == {}, name


@pytest.mark.parametrize("key", list(REFUSED))
def test_keys_of_0_5_that_are_not_served_say_why_unless_they_ask_for_nothing(key: str) -> None:
    assert key not in FIELDS
    for nothing in (None, False, 0, "", [], "false"):
        LMCacheEngineConfig.from_dict({key: nothing})
    said = refusal(LMCacheEngineConfig.from_dict, {key: "wanted"})
    assert said == f"{key}='wanted' (code): not supported; {REFUSED[key]}"


def test_a_disk_without_a_size_is_an_error_and_so_is_a_size_without_a_disk() -> None:
    assert "max_local_disk_size" in refusal(LMCacheEngineConfig.from_defaults, local_disk="/x")
    assert "local_disk" in refusal(LMCacheEngineConfig.from_defaults, max_local_disk_size=1)


@pytest.mark.parametrize(
    ("key", "default"),
    [
        ("pre_caching_hash_algorithm", "builtin"), ("remote_serde", "naive"), ("py_enable_gc", True),
        ("local_disk_path_sharding", "by_gpu"), ("gds_path_sharding", "by_gpu"), ("gds_backend", "cufile"),
        ("use_gds", True), ("maru_pool_size", 4.0), ("blend_min_tokens", 256), ("blend_special_str", " # # "),
        ("mp_port", 5555), ("lmcache_worker_heartbeat_delay_time", 10), ("pd_shutdown_timeout_sec", 5.0),
        ("pd_allocation_timeout_sec", float("inf")), ("pd_condition_poll_interval_sec", 0.005),
        ("pd_backend_mode", "async"), ("internal_api_server_host", "127.0.0.1"),
        ("internal_api_server_port_start", 6999), ("lazy_memory_initial_ratio", 0.2),
        ("lazy_memory_expand_trigger_ratio", 0.5), ("lazy_memory_step_ratio", 0.1), ("pin_check_interval_sec", 30),
        ("chunk_statistics_strategy", "memory_bloom_filter"), ("max_hidden_state_cpu_size", 2.0),
        ("hidden_states_retrieve_mode", "prefix_strict"), ("extra_config", None), ("l2_adapters", None),
    ],
)  # fmt: skip
def test_a_default_of_0_5_that_somebody_wrote_down_asks_for_nothing(key: str, default: Any) -> None:
    assert load(None, {key: default}).values() == load().values()
    text = "null" if default is None else str(default)
    assert load(**{f"LMCACHE_{key.upper()}": text}).values() == load().values()


def test_blending_is_refused_until_it_is_there() -> None:
    assert "blending is not supported" in refusal(LMCacheEngineConfig.from_defaults, enable_blending=True)


@pytest.mark.parametrize("name", ["lru", "LRU", "S3_FIFO", "s3-fifo", "noop"])
def test_policies_are_found_in_any_spelling(name: str) -> None:
    LMCacheEngineConfig.from_defaults(cache_policy=name)


def test_an_unknown_policy_is_an_error_that_lists_them() -> None:
    assert "LRU, LFU" in refusal(LMCacheEngineConfig.from_defaults, cache_policy="MRU")


@pytest.mark.parametrize(
    ("url", "spec"),
    [
        ("redis://h:1/0", {"type": "redis", "url": "redis://h:1/0"}),
        ("rediss://h:1", {"type": "redis", "url": "rediss://h:1"}),
        ("valkey://h:1", {"type": "redis", "url": "redis://h:1"}),
        ("unix:///run/redis.sock", {"type": "redis", "url": "unix:///run/redis.sock"}),
        ("s3://bucket/prefix", {"type": "s3", "url": "s3://bucket/prefix"}),
        ("fs:///mnt/kv", {"type": "shared_fs", "path": "/mnt/kv"}),
        ("fs://host:0/mnt/kv", {"type": "shared_fs", "path": "/mnt/kv"}),
        ("mooncakestore://h:50051/", {"type": "mooncake", "master": "h:50051"}),
    ],
)
def test_remote_urls_become_storage_engines(url: str, spec: dict[str, Any]) -> None:
    config = LMCacheEngineConfig.from_defaults(remote_url=url)
    assert [tier.spec for tier in tier_specs(config)] == [spec]


@pytest.mark.parametrize("url", ["lm://h:1", "h:1", "redis-sentinel://h", "fs:", "mooncakestore://"])
def test_remote_urls_that_nothing_serves_are_errors(url: str) -> None:
    assert refusal(LMCacheEngineConfig.from_defaults, remote_url=url).startswith("remote_url (code)=")


def test_tiers_are_asked_in_the_order_disk_then_listed_then_remote_with_names_of_their_own() -> None:
    config = LMCacheEngineConfig.from_defaults(
        local_disk="file:///x",
        max_local_disk_size=2,
        l2_adapters=[{"type": "disk", "path": "/y", "max_gb": 1}],
        remote_url="fs:///z",
    )
    tiers = tier_specs(config, worker_id=1, world_size=2)
    assert [tier.name for tier in tiers] == ["disk", "disk-2", "shared_fs"]
    assert tiers[0].spec == {"type": "disk", "path": "/x/rank-1-of-2", "max_gb": 2.0}


def test_a_prefill_engine_pushes_to_the_decoder_s_server() -> None:
    config = LMCacheEngineConfig.from_defaults(enable_pd=True, pd_role="sender", pd_peer_host="d1")
    assert tier_specs(config)[0].spec["type"] == "peer"
    for host, address in (("d1", "tcp://d1:7"), ("::1", "tcp://[::1]:7"), ("[::1]", "tcp://[::1]:7")):
        peer = LMCacheEngineConfig.from_defaults(
            enable_pd=True, pd_role="sender", pd_peer_host=host, pd_peer_port=7
        )
        assert tier_specs(peer)[0].spec["address"] == address
    assert "pd_role" in refusal(LMCacheEngineConfig.from_defaults, enable_pd=True)
    assert "pd_role" in refusal(LMCacheEngineConfig.from_defaults, enable_pd=True, pd_role="receiver")
    assert "pd_peer_host" in refusal(LMCacheEngineConfig.from_defaults, enable_pd=True, pd_role="sender")
    assert "enable_pd" in refusal(LMCacheEngineConfig.from_defaults, pd_role="sender")


def test_names_of_places_are_tiers_types_or_names_of_0_5() -> None:
    tiers = tier_specs(
        LMCacheEngineConfig.from_defaults(local_disk="/x", max_local_disk_size=1, remote_url="fs:///z")
    )
    assert places(None, tiers, "x") is None
    assert places(["LocalCPUBackend", "RemoteBackend"], tiers, "x") == {"l1", "shared_fs"}
    assert places(["l1", "disk"], tiers, "x") == {"l1", "disk"}
    assert "expected one of l1, disk, shared_fs" in refusal(places, ["PDBackend"], tiers, "x")


def test_entries_of_l2_adapters_may_have_names_as_those_of_the_server() -> None:
    fast, slow = (
        {"type": "disk", "path": f"/{name}", "max_gb": 1, "name": name} for name in ("fast", "disk-2")
    )
    plain = {"type": "disk", "path": "/x", "max_gb": 1}
    config = LMCacheEngineConfig.from_defaults(l2_adapters=[fast, plain, slow, plain])
    tiers = tier_specs(config)
    assert [tier.name for tier in tiers] == ["fast", "disk", "disk-2", "disk-3"]
    assert all("name" not in tier.spec for tier in tiers)
    assert tier_specs(config) == tiers
    assert places(["fast"], tiers, "x") == {"fast"}
    for bad in ("l1", "", "a b", 7, "fast"):
        adapters = [fast, plain | {"name": bad}]
        assert "l2_adapters name" in refusal(
            lambda adapters: tier_specs(LMCacheEngineConfig.from_defaults(l2_adapters=adapters)), adapters
        )


def test_a_slip_in_extra_config_is_an_error_and_a_plugin_s_key_is_not() -> None:
    config = LMCacheEngineConfig.from_defaults(extra_config={"my_plugin.key": 1})
    assert config.get_extra_config_value("my_plugin.key") == 1
    said = refusal(LMCacheEngineConfig.from_defaults, extra_config={"save_only_first_rnk": True})
    assert "did you mean save_only_first_rank?" in said


@given(
    secret=st.text("abcdefghijklmnop0123456789", min_size=8, max_size=20),
    key=st.sampled_from(["password", "secret_key", "api_key", "access_key", "token"]),
)
def test_no_secret_is_shown(secret: str, key: str) -> None:
    secret = f"~{secret}"
    config = LMCacheEngineConfig.from_defaults(
        remote_url=f"redis://user:{secret}@host:1/0?{key}={secret}",
        l2_adapters=[{"type": "s3", key: secret, "url": f"s3://{secret}@b", "more": [{key: secret}]}],
        extra_config={key: secret},
    )
    assert secret not in str(shown(config))
    assert secret not in str(masked({"a": [f"redis://:{secret}@h"]}))
    assert "host:1/0" in str(shown(config)["remote_url"]["value"])


def test_no_secret_is_in_an_error() -> None:
    for values in (
        {"extra_config": '{"password": "hunter2"'},
        {"l2_adapters": "hunter2"},
        {"remote_url": "nope://hunter2@host"},
        {"remote_url": "fs://hunter2@host"},
    ):
        assert "hunter2" not in refusal(LMCacheEngineConfig.from_dict, values)


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("a: [", "not YAML"),
        ("- 1", "expected a map"),
        ("\x00", "not YAML"),
        ("{b: {a: 1, a: 2}}", "'a' is set twice"),
    ],
)
def test_a_file_that_is_no_map_of_keys_is_one_line(tmp_path: Path, text: str, part: str) -> None:
    assert part in refusal(LMCacheEngineConfig.from_file, written(tmp_path, text))


@pytest.mark.parametrize("value", [5000 * "[", "\udcff"])
@pytest.mark.parametrize("key", ["EXTRA_CONFIG", "L2_ADAPTERS", "RETRIEVE_LOCATIONS", "CHUNK_SIZE"])
def test_a_variable_of_any_text_is_read_or_refused_in_one_line(key: str, value: str) -> None:
    if key == "RETRIEVE_LOCATIONS" and value == "\udcff":
        value = f"[{value}"  # as JSON; a name may be any text
    assert key.lower() in refusal(LMCacheEngineConfig.from_env, {f"LMCACHE_{key}": value})


def test_a_file_that_cannot_be_read_is_one_line_and_an_empty_one_is_all_defaults(tmp_path: Path) -> None:
    assert "cannot be read" in refusal(LMCacheEngineConfig.from_file, str(tmp_path / "absent"))
    assert "cannot be read" in refusal(LMCacheEngineConfig.from_file, str(tmp_path))
    assert LMCacheEngineConfig.from_file(written(tmp_path, "")).sources == {}


def test_a_configuration_does_not_change(tmp_path: Path) -> None:
    config = LMCacheEngineConfig.from_defaults()
    with pytest.raises(AttributeError):
        config.chunk_size = 1  # type: ignore[misc]


def test_the_documentation_has_every_key_with_its_default() -> None:
    page = (Path(__file__).parents[2] / "docs" / "configuration.md").read_text()
    rows = dict(re.findall(r"^\| `(\w+)` \| (.+?) \|", page, re.MULTILINE))
    defaults = LMCacheEngineConfig.from_defaults()
    for key in FIELDS:
        value = getattr(defaults, key)
        text = f"{value:g}" if isinstance(value, float) else json.dumps(value).strip('"')
        assert text == rows[key], key

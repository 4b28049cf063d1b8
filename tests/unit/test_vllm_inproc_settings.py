"""From the keys that users know to a server inside the engine; what cannot be met is one line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ConfigError
from lmcache.integration.vllm.inproc_settings import (
    connector_settings,
    in_users_words,
    read_config,
    server_config,
)
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.embedded import embedded_address


def server(extra: dict[str, Any], environ: dict[str, str] | None = None) -> ServerConfig:
    return server_config(read_config(extra, environ or {}), [128])


def test_without_any_setting_the_defaults_serve() -> None:
    made = server({})
    assert (made.l1_size_gb, made.chunk_size, made.eviction_policy, made.l2_adapter) == (5.0, 256, "ARC", ())
    assert made.supported_transfer_mode == "engine_driven"


def test_code_goes_before_the_environment_and_that_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "config.yaml"
    file.write_text("chunk_size: 512\nmax_local_cpu_size: 1\ncache_policy: lru\n")
    environ = {
        "LMCACHE_CONFIG_FILE": str(file),
        "LMCACHE_MAX_LOCAL_CPU_SIZE": "2",
        "LMCACHE_CHUNK_SIZE": "1024",
    }
    made = server({"lmcache.chunk_size": 128}, environ)
    assert (made.chunk_size, made.l1_size_gb, made.eviction_policy) == (128, 2.0, "LRU")


def test_tiers_come_in_the_order_in_which_they_are_asked(tmp_path: Path) -> None:
    made = server(
        {
            "local_disk": f"file://{tmp_path}/disk",
            "max_local_disk_size": 7,
            "l2_adapters": [{"type": "fault"}],
            "lmcache.remote_url": f"fs://{tmp_path}/shared",
            "local_cpu": False,
            "blocking_timeout_secs": 4,
        }
    )
    specs = [json.loads(text) for text in made.l2_adapter]
    assert [spec["type"] for spec in specs] == ["disk", "fault", "shared_fs"]
    assert specs[0]["max_gb"] == 7
    assert (made.l2_store_policy, made.l2_prefetch_policy) == ("skip_l1", "drop")
    assert (made.l2_load_seconds, made.l2_prefetch_seconds) == (4, 4)


def test_data_parallel_engines_have_disk_folders_of_their_own(tmp_path: Path) -> None:
    config = read_config({"local_disk": str(tmp_path), "max_local_disk_size": 1}, {})
    folders = [json.loads(server_config(config, [128], n).l2_adapter[0])["path"] for n in range(3)]
    assert folders[0] == str(tmp_path / "rank-0-of-1"), "as without data parallelism"
    assert len(set(folders)) == 3


def test_the_example_of_a_chunk_size_fits_every_group_of_the_engine() -> None:
    with pytest.raises(ConfigError, match=r"block size 96; e\.g\. 384"):
        server_config(read_config({}, {}), [128, 96])
    assert server_config(read_config({"chunk_size": 384}, {}), [128, 96]).chunk_size == 384


def test_a_key_of_nobodys_is_said_once(caplog: pytest.LogCaptureFixture) -> None:
    for _ in range(2):
        read_config({"async_loading": True, "use_native": False}, {})
    (record,) = caplog.records
    assert "key async_loading is none of LMCache's" in record.getMessage()


def test_the_two_sides_do_as_the_settings_say() -> None:
    extra = {
        "save_decode_cache": True,
        "min_retrieve_tokens": 512,
        "use_layerwise": True,
        "lookup_timeout_ms": 700,
        "extra_config": {"model_revision": "mine"},
    }
    made = connector_settings(read_config(extra, {}), "engine")
    assert made.address == embedded_address("engine")
    assert (made.save_decode_cache, made.min_tokens, made.prefetch_timeout) == (True, 512, 0.7)
    assert made.layerwise
    assert made.model_revision == "mine"
    assert connector_settings(read_config({}, {}), "engine").prefetch_timeout == 2.0


def test_what_is_there_anyway_and_what_is_not_ours_passes() -> None:
    server(
        {
            "enable_async_loading": True,
            "pin_timeout_sec": 30,
            "remote_serde": "naive",
            "enable_blending": False,
        }
    )
    server({"use_native": False, "somebody.elses": 1, "discard_partial_chunks": True})


@pytest.mark.parametrize(
    ("extra", "words"),
    [
        (
            {"lmcache.chunk_sise": 256},
            "chunk_sise (kv_connector_extra_config): no such setting; did you mean",
        ),
        ({"chunk_sise": 256}, "did you mean chunk_size?"),
        ({"lmcache.mp.port": "5555"}, "a setting of LMCacheMPConnector"),
        ({"chunk_size": 256, "lmcache.chunk_size": 512}, "are the same setting"),
        ({"chunk_size": 200}, "a multiple of this engine's block size 128; e.g. 256"),
        ({"chunk_size": True}, "chunk_size"),
        ({"enable_blending": True}, "blending is not supported"),
        ({"save_unfull_chunk": True}, "whole chunks"),
        ({"enable_kv_events": True}, "no events"),
        ({"retrieve_locations": ["disk"]}, "every tier is read"),
        ({"store_location": "disk"}, "every tier is stored to"),
        ({"enable_p2p": True}, "share a storage engine"),
        ({"local_disk": "/var/cache/lmcache"}, "max_local_disk_size"),
        ({"remote_url": "lm://host:1"}, "remote_url"),
        ({"cache_policy": "BEST"}, "cache_policy"),
    ],
)
def test_a_wish_that_cannot_be_met_is_one_line(extra: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError) as error:
        server(extra)
    assert words in str(error.value)
    assert "\n" not in str(error.value)
    assert "--" not in str(error.value), "the server's flags mean nothing to who runs no server"


def test_errors_of_the_server_name_the_users_keys() -> None:
    text = "L1 pool: 9 GiB needed; lower --l1-size-gb or free memory"
    assert in_users_words(text) == "L1 pool: 9 GiB needed; lower max_local_cpu_size or free memory"

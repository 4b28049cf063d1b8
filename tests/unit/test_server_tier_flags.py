"""From ``--l2-adapter`` to tiers: their names, and what becomes of those built before one that cannot be."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest

from helpers.held_tier import HeldTier
from lmcache.errors import ConfigError, StartupError
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.tiers import build_adapters, parse_adapters, tier_options
from lmcache.v1.storage.l2.adapter import StorageAdapter


def spec(kind: str, **options: object) -> str:
    return json.dumps({"type": kind, **options})


def test_tiers_are_named_by_their_json_or_their_type_and_number() -> None:
    texts = [spec("disk"), spec("disk", name="fast"), spec("redis"), spec("disk"), spec("disk")]
    assert [name for name, _ in parse_adapters(texts)] == ["disk", "fast", "redis", "disk-2", "disk-3"]
    assert all("name" not in options for _, options in parse_adapters(texts))


@pytest.mark.parametrize(
    "texts", [[spec("a", name="x"), spec("b", name="x")], [spec("a"), spec("b", name="a")]]
)
def test_two_tiers_of_one_name_are_refused(texts: list[str]) -> None:
    with pytest.raises(ConfigError, match="and none of"):
        parse_adapters(texts)


def test_an_adapter_that_cannot_be_built_closes_those_before_it() -> None:
    closed: list[int] = []

    class Counted(HeldTier):
        def close(self) -> None:
            closed.append(1)

    def make(options: Mapping[str, Any]) -> StorageAdapter:
        return Counted()

    with pytest.raises(ConfigError, match="type 'no such'"):
        build_adapters([spec("mine"), spec("no such")], {"mine": make})
    assert closed == [1]


@pytest.mark.parametrize(
    ("l1_gb", "tiers", "asked", "mib"),
    [(10, 1, None, 256), (10, 2, None, 256), (0.5, 1, None, 128), (0.5, 2, None, 64), (0.5, 1, 0.5, 512)],
)
def test_what_waits_for_tiers_is_a_quarter_of_l1_at_most_unless_more_is_asked_for(
    l1_gb: float, tiers: int, asked: float | None, mib: int
) -> None:
    config = ServerConfig(
        l1_size_gb=l1_gb, l2_queue_gb=asked, l2_adapter=tuple(spec("fault") for _ in range(tiers))
    )
    config.check()
    assert tier_options(config).queue_bytes == mib << 20


@pytest.mark.parametrize(
    "text",
    [
        json.dumps({"url": "redis://:hunter2@host"}),
        json.dumps({"type": 1, "password": "hunter2"}),
        '{"type": "redis", "url": "redis://:hunter2@host"',
        "redis://:hunter2@host",
        json.dumps(["hunter2"]),
        json.dumps("hunter2"),
        '{"url": "hunter2\udcff"}',
        spec("redis", url=["redis://:hunter2@host"]),
        spec("redis", url="redis://:hunter2@[host"),
        spec("redis", url="redis://:hunter2@host:port"),
        spec("redis", url="redis://:hun#ter2@host"),
        spec("s3", url="s3://hunter2:hunter2@bucket"),
        spec("s3", url="s3://:hunter2@[bucket"),
        spec("s3", url="s3://bucket", endpoint="ftp://k:hunter2@host"),
        spec("s3", url="s3://bucket", endpoint="http://k:hunter2@host"),
        spec("s3", url="s3://bucket", endpoint="https://host/?token=hunter2"),
    ],
)
def test_no_error_about_an_adapter_shows_a_password(text: str) -> None:
    with pytest.raises((ConfigError, StartupError)) as told:
        build_adapters([text], {})
    assert "hunter2" not in str(told.value)
    assert "hun#ter2" not in str(told.value)
    assert "--l2-adapter" in str(told.value)
    assert len(str(told.value).splitlines()) == 1

"""The S3 adapter on a local S3 server: the conformance suite, and a server that refuses, hangs or is not there."""

from __future__ import annotations

import signal
import threading
import time
import urllib.request
from collections.abc import Iterator
from typing import Any

import obstore
import pytest
from obstore.store import S3Store

from helpers.engines import Engine, s3_server
from helpers.server import dead_port
from lmcache.errors import ConfigError, StartupError
from lmcache.testing.adapters import AdapterConformance
from lmcache.testing.adapters.objects import new_object, read, write
from lmcache.v1.storage.l2.adapter import AdapterError, Call, StorageAdapter, Want
from lmcache.v1.storage.l2.registry import build

SECONDS = 20.0
SOON = 3.0


@pytest.fixture(scope="module")
def server() -> Iterator[Engine]:
    with s3_server("cache") as engine:
        yield engine


@pytest.fixture(autouse=True)
def keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CACHE_KEY", "AKIAXXXXXXXXXXXXXXXX")
    monkeypatch.setenv("CACHE_SECRET", "very-s3cret")


def opened(port: int, url: str = "s3://cache/kv", **options: Any) -> StorageAdapter:
    defaults = {
        "type": "s3", "url": url, "endpoint": f"http://127.0.0.1:{port}", "region": "us-east-1", "allow_http": True,
        "access_key_env": "CACHE_KEY", "secret_key_env": "CACHE_SECRET",
    }  # fmt: skip
    return build(defaults | options)


class TestS3(AdapterConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def options(self, server: Engine) -> None:
        self.port = server.port

    def make(self) -> StorageAdapter:
        return opened(self.port)


def test_an_object_above_the_size_of_a_part_is_sent_in_parts(server: Engine) -> None:
    adapter = opened(server.port, part="5MiB")
    put = new_object(17_000_000)
    write(adapter, [put], SECONDS)
    assert read(adapter, put.key, len(put.payload), SECONDS) == bytes(put.payload)
    with urllib.request.urlopen(
        f"http://127.0.0.1:{server.port}/cache/kv/{put.key.hex()}", timeout=30
    ) as answer:
        assert answer.headers["ETag"].strip('"').endswith("-4")  # as S3 names what came in four parts
    adapter.close()


def test_a_server_that_hangs_costs_the_call_its_time_and_is_used_again(server: Engine) -> None:
    adapter, put = opened(server.port), new_object(1_000_000)
    write(adapter, [put], SECONDS)
    assert server.process is not None
    server.process.send_signal(signal.SIGSTOP)
    try:
        want = Want(put.key, memoryview(bytearray(1_000_000)))
        start = time.monotonic()
        with pytest.raises(AdapterError, match="no answer in time"):
            adapter.load([want], Call(0.4))
        call = Call(60.0)
        threading.Timer(0.1, call.cancel).start()
        assert adapter.load([want], call) == [None]
        with pytest.raises(AdapterError, match="no answer in time"):
            adapter.store([put], Call(0.4))
        assert time.monotonic() - start < SOON
    finally:
        server.process.send_signal(signal.SIGCONT)
    assert read(adapter, put.key, 1_000_000, SECONDS) == bytes(put.payload)
    adapter.close()


def test_a_server_that_is_not_there_ends_the_start_unless_it_is_not_required() -> None:
    start = time.monotonic()
    with pytest.raises(StartupError) as caught:
        opened(port := dead_port())
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)
    adapter = opened(port, required=False)
    with pytest.raises(AdapterError, match=f"127.0.0.1:{port}: .*refused"):
        adapter.store([new_object(10)], Call(SECONDS))
    assert time.monotonic() - start < 4 * SOON
    adapter.close()


def test_a_bucket_that_is_not_there_ends_the_start(server: Engine) -> None:
    with pytest.raises(StartupError, match="NoSuchBucket"):
        opened(server.port, url="s3://elsewhere/kv")


def test_clear_leaves_what_others_put_below_the_prefix(server: Engine) -> None:
    adapter = opened(server.port, url="s3://cache/mine")
    theirs = S3Store(
        "cache",
        endpoint=f"http://127.0.0.1:{server.port}",
        region="us-east-1",
        access_key_id="other",
        secret_access_key="other",
        client_options={"allow_http": True},
    )
    names = ["mine/readme.txt", "mine/" + "0" * 127, "mine-too/" + "0" * 128]
    for name in names:
        obstore.put(theirs, name, b"theirs")
    write(adapter, [new_object(100) for _ in range(20)], SECONDS)
    assert adapter.clear(Call(SECONDS)) == 20
    assert [bytes(obstore.get(theirs, name).bytes()) for name in names] == [b"theirs"] * 3
    adapter.close()


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"url": "http://cache"}, "s3://BUCKET"),
        ({"allow_http": False}, "in the clear"),
        ({"access_key_env": ""}, "both or none"),
        ({"secret_key_env": "NOT_SET"}, "export NOT_SET"),
        ({"part": "1MiB"}, "at least 5MiB"),
        ({"secret_access_key": "very-s3cret"}, "no such option"),
    ],
)
def test_a_bad_option_is_one_line_that_shows_no_secret(change: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        opened(9, **change)
    assert "\n" not in str(caught.value)
    assert "s3cret" not in str(caught.value)

"""Prefill and decode apart: two real vLLMs, each at a server of its own, of which prefill's pushes to decode's.

A request goes to prefill first, for one token, then to decode. Truth is what an engine without a cache gives.
"""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from e2e import models
from e2e.conftest import tokens
from e2e.engine import EngineProcess, connector, engine
from helpers.server import Server, wait_for
from lmcache.v1.multiprocess.peer.nixl import missing

pytestmark = pytest.mark.vllm

CHUNK = 256
BACK = 20.0
"""Seconds until pushes arrive again at a server that was killed and started."""
LENGTHS = [255, 256, 257, 700, 1024, 1300]
WAYS = [
    pytest.param("frames", marks=pytest.mark.long),
    pytest.param("nixl", marks=pytest.mark.skipif(bool(missing()), reason=missing() or "NIXL is there")),
]


def chunks(prompts: list[list[int]]) -> int:
    """Whole chunks, which is what can be pushed."""
    return sum(len(prompt) // CHUNK for prompt in prompts)


def expected_hit(prompt: list[int]) -> int:
    """All whole chunks, but never the last token."""
    return min(len(prompt) // CHUNK * CHUNK, len(prompt) - 1)


class Pair:
    """Both engines with their servers.

    Args:
        roles: vLLM's kv_role of prefill and of decode.
        queue_gb: what may wait to be pushed.
        mode: how the engines and their servers move pages.
        peer: options of prefill's tier, which is decode's server.
    """

    def __init__(
        self, roles: tuple[str, str], queue_gb: float = 0.25, mode: str = "auto", **peer: Any
    ) -> None:
        self.roles, self.mode = roles, mode
        self.decode_server = Server()
        to_decode = {"type": "peer", "address": f"localhost:{self.decode_server.port}", "pull": False, **peer}
        flags = ("--l2-adapter", json.dumps(to_decode), "--l2-queue-gb", str(queue_gb))
        self.prefill_server = Server(*flags)
        self.prefill: EngineProcess
        self.decode: EngineProcess

    @contextmanager
    def running(self, model: Path, logs: Path, **settings: Any) -> Iterator[Pair]:
        servers = (self.prefill_server, self.decode_server)
        with ExitStack() as end:
            for server in reversed(servers):
                end.enter_context(server)
            end.callback(lambda: self.decode_server.kill())  # it may be another by then
            made = []
            for role, server, name in zip(self.roles, servers, ("prefill", "decode"), strict=True):
                transfer = connector(server.port, **{"lmcache.mp.mp_transfer_mode": self.mode})
                transfer["kv_role"] = role
                made.append(end.enter_context(engine(model, logs / name, transfer, **settings)))
            self.prefill, self.decode = made
            for server in servers:
                wait_for(server.registered, BACK, "each engine has found its server")
            yield self

    def restart_decode(self, *, fetches: bool) -> None:
        """Another server in the place of decode's, which has prefill's for a tier if it ``fetches``."""
        self.decode_server.kill()
        spec = {"type": "peer", "address": f"localhost:{self.prefill_server.port}", "push": False}
        flags = ("--l2-adapter", json.dumps(spec | {"transport": "frames"})) if fetches else ()
        self.decode_server = Server(*flags, port=self.decode_server.port).start()
        wait_for(self.decode_server.registered, BACK, "the engine finds the server")

    def fetched(self) -> int:
        """Objects that decode's server has taken from prefill's."""
        return int(self.decode_server.running.metrics()['lmcache_mp_l2_loaded_total{tier="peer"}'])

    def ask(self, prompts: list[list[int]], **kwargs: Any) -> list[dict[str, Any]]:
        """What a proxy does: prefill, then decode; the answers of decode."""
        for result in self.prefill.generate(prompts, max_tokens=1, **kwargs):
            assert len(result["tokens"]) == 1
        return self.decode.generate(prompts, **kwargs)

    def nothing_is_left(self) -> None:
        for server in (self.prefill_server, self.decode_server):
            wait_for(server.idle, what="all is given back")

    def pushed(self) -> int:
        """Objects that arrived at decode's server since it was started."""
        return int(self.decode_server.running.metrics()["lmcache_mp_pushed_objects_total"])

    def workers_of_decode(self) -> int:
        return [session["role"] for session in self.decode_server.state()["sessions"]].count("worker")

    def in_frames(self) -> int:
        """Bytes of payload that came to decode's server in frames."""
        return int(self.decode_server.running.metrics()["lmcache_mp_frame_written_bytes_total"])


@pytest.fixture(scope="module")
def plain(
    model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[EngineProcess]:
    """The same vLLM without a connector."""
    with engine(model_dir("gqa"), tmp_path_factory.mktemp("plain") / "log") as process:
        yield process


def truth(process: EngineProcess, prompts: list[list[int]]) -> list[list[int]]:
    """What a full prefill gives."""
    results = process.generate(prompts)
    assert [result["cached"] for result in results] == [0] * len(prompts)
    return [result["tokens"] for result in results]


@pytest.fixture(scope="module")
def pair(model_dir: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[Pair]:
    """Push in step, in frames, each engine in its role, whole prompts in one step, 15 chunks that may wait."""
    made = Pair(
        ("kv_producer", "kv_consumer"), queue_gb=0.03, sync=True, transport="frames", timeout_seconds=10
    )
    with made.running(
        model_dir("gqa"), tmp_path_factory.mktemp("pd"), max_num_batched_tokens=8192
    ) as running:
        yield running


def test_decode_computes_only_what_was_not_pushed_and_gives_the_tokens_of_a_full_prefill(
    pair: Pair, plain: EngineProcess
) -> None:
    prompts = [tokens(1000 + i, length) for i, length in enumerate(LENGTHS)]
    before = pair.pushed(), pair.in_frames()
    right = truth(plain, prompts)
    assert pair.decode.generate([prompts[-1]], max_tokens=1)[0]["cached"] == 0, "nothing is there yet"
    for one, wanted in zip(prompts, right, strict=True):  # the answer of prefill is all that is waited for
        (result,) = pair.ask([one])
        assert result["tokens"] == wanted
        assert result["cached"] == expected_hit(one)
    assert pair.pushed() - before[0] == chunks(prompts)
    assert pair.in_frames() > before[1]
    assert pair.prefill.generate(prompts, max_tokens=1)[-1]["cached"] == 0, "a producer loads nothing"
    stored = pair.decode_server.state()["l1"]["objects"]
    (own,) = pair.decode.generate([tokens(1900, 1000)])
    assert own["cached"] == 0
    assert pair.decode_server.state()["l1"]["objects"] == stored, "a consumer stores nothing"
    pair.nothing_is_left()


def test_a_batch_of_requests_that_share_a_prefix_is_pushed_once(pair: Pair, plain: EngineProcess) -> None:
    prefix = tokens(1100, 2 * CHUNK)
    prompts = [prefix + tokens(1101 + i, 300) for i in range(4)]
    before = pair.pushed()
    right = truth(plain, prompts)
    results = pair.ask(prompts)
    assert [result["tokens"] for result in results] == right
    assert [result["cached"] for result in results] == [3 * CHUNK] * len(prompts)
    assert pair.pushed() - before == 2 + len(prompts)


def test_salts_do_not_cross(pair: Pair) -> None:
    one = tokens(1200, 800)
    assert pair.ask([one], salts=["a"])[0]["cached"] == 3 * CHUNK
    assert pair.decode.generate([one], salts=["b"])[0]["cached"] == 0
    assert pair.decode.generate([one])[0]["cached"] == 0
    assert pair.ask([one], salts=["b"])[0]["cached"] == 3 * CHUNK


def test_another_model_does_not_find_what_was_pushed(pair: Pair, tmp_path: Path, log: Path) -> None:
    one = tokens(1250, 800)
    assert pair.ask([one])[0]["cached"] == 3 * CHUNK
    transfer = connector(pair.decode_server.port) | {"kv_role": "kv_consumer"}
    with engine(models.gqa(tmp_path / "gqa", seed=1), log, transfer) as other:
        wait_for(lambda: pair.workers_of_decode() == 2, BACK, "the other engine finds the server")
        assert other.generate([one])[0]["cached"] == 0
    assert pair.decode.generate([one])[0]["cached"] == 3 * CHUNK


def test_decodes_server_dies_and_comes_back_and_nobody_but_it_forgets(
    pair: Pair, plain: EngineProcess
) -> None:
    prefix = tokens(1300, 2 * CHUNK)
    prompts = [prefix + tokens(1301 + i, 400) for i in range(6)]
    right = truth(plain, prompts)
    assert pair.ask(prompts[:1])[0]["cached"] == 3 * CHUNK

    pair.prefill.generate(prompts[1:2], max_tokens=1)
    pair.decode.worker("kill_before_load", pair.decode_server.pid, int(signal.SIGKILL))
    assert [r["tokens"] for r in pair.decode.generate(prompts[1:2])] == right[1:2], "killed before a load"

    pair.restart_decode(fetches=False)
    killer = threading.Timer(0.2, pair.decode_server.kill)
    killer.start()
    assert [r["tokens"] for r in pair.prefill.generate(prompts[2:5])] == right[2:5], "killed during pushes"
    killer.join()
    for one, wanted in zip(prompts[3:], right[3:], strict=True):
        (result,) = pair.ask([one])
        assert (result["tokens"], result["cached"]) == (wanted, 0), "prefill serves on, decode computes"

    pair.restart_decode(fetches=False)
    fresh = iter(range(1400, 1500))

    def arrives() -> bool:
        (result,) = pair.ask([tokens(next(fresh), 600)])
        return bool(result["cached"] == 2 * CHUNK and pair.pushed())

    wait_for(arrives, BACK, "a push arrives at the new server")
    assert pair.ask(prompts[:1])[0]["cached"] == 0, "what prefill has had all along is not pushed again"
    pair.restart_decode(fetches=True)
    results = pair.ask(prompts)
    assert [result["tokens"] for result in results] == right
    assert [result["cached"] for result in results] == [3 * CHUNK] * len(prompts), "but fetched from there"
    pair.nothing_is_left()


def test_what_had_no_room_to_wait_for_its_push_is_fetched(pair: Pair, plain: EngineProcess) -> None:
    pair.restart_decode(fetches=True)
    one = tokens(1700, 31 * CHUNK + 100)
    wanted = truth(plain, [one])
    (result,) = pair.ask([one])
    assert ([result["tokens"]], result["cached"]) == (wanted, 31 * CHUNK)
    (tier,) = pair.prefill_server.state()["l2"]
    assert tier["dropped"] >= 16
    assert pair.fetched() >= 16
    pair.nothing_is_left()


@pytest.mark.parametrize("way", WAYS)
def test_two_ranks_of_engines_that_do_both_are_pushed_behind(
    way: str, model_dir: Callable[[str], Path], plain: EngineProcess, tmp_path: Path
) -> None:
    prompts = [tokens(1500 + i, length) for i, length in enumerate(LENGTHS)]
    right = truth(plain, prompts)
    mode = "lmcache_driven" if way == "frames" else "engine_driven"
    made = Pair(("kv_both", "kv_both"), mode=mode, transport=way)
    with made.running(model_dir("gqa"), tmp_path, tensor_parallel_size=2) as pair:
        pair.prefill.generate(prompts, max_tokens=1)
        wait_for(lambda: pair.pushed() == 2 * chunks(prompts), BACK, "every rank's objects arrive")
        assert (pair.in_frames() > 0) == (way == "frames")
        assert pair.decode_server.state()["peers"]["transport"] == way
        for process in (pair.decode, pair.prefill):
            results = process.generate(prompts)
            assert [result["tokens"] for result in results] == right
            assert [result["cached"] for result in results] == list(map(expected_hit, prompts))
        own = tokens(1600, 600)
        assert [pair.decode.generate([own])[0]["cached"] for _ in range(2)] == [0, 2 * CHUNK]
        assert pair.prefill.generate([own])[0]["cached"] == 0, "what decode has stays there"
        pair.nothing_is_left()

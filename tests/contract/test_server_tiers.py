"""A real server over a disk: what was stored is found, by its own kind only, at once, and after a restart."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.forked_server import ForkedServer
from helpers.rig import Rig
from helpers.server import namespace, refused, run_cli, taken_port, wait_for
from helpers.tier_load import Stranger
from lmcache.cli.main import main
from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.embedded import EmbeddedServer
from lmcache.v1.protocol import messages as m

TOKENS = list(range(1300))
"""Five chunks and a part of one."""


def disk(folder: Path) -> dict[str, Any]:
    return {"l2_adapter": (json.dumps({"type": "disk", "path": str(folder / "disk"), "max_gb": 0.05}),)}


def a_server(folder: Path, **settings: Any) -> ForkedServer:
    return ForkedServer(folder / "log", **({"l1_size_gb": 0.02} | disk(folder) | settings))


@pytest.fixture
def server(tmp_path: Path) -> Iterator[ForkedServer]:
    with a_server(tmp_path) as running:
        yield running
    assert "Traceback" not in (tmp_path / "log").read_text()


def tier(stranger: Stranger) -> dict[str, Any]:
    (row,) = stranger.ask(m.Status()).fields["l2"]
    return dict(row)


def written(stranger: Stranger) -> None:
    wait_for(lambda: tier(stranger)["queued_objects"] == 0, what="all is written behind")


def clear_l1(stranger: Stranger) -> None:
    stranger.ask(m.Clear(tiers=["l1"]))


# ---- restarts


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_what_was_stored_before_a_clean_end_is_found_by_the_next_server(tmp_path: Path, end: int) -> None:
    with a_server(tmp_path) as first:
        with Stranger(first.address, "e") as stranger:
            hashes = stranger.hashes(TOKENS)
            assert stranger.store(hashes) == 5
        assert first.end(end) == 0
    with a_server(tmp_path) as second, Stranger(second.address, "e") as stranger:
        assert stranger.find(hashes, wait=-1) == 0, "not in L1"
        assert stranger.find(hashes) == 5
        assert tier(stranger)["loaded"] == 5


def test_a_client_of_protocol_1_finds_in_l1_what_was_fetched_behind(server: ForkedServer) -> None:
    with Stranger(server.address, "e") as stranger:
        hashes = stranger.hashes(TOKENS)
        stranger.store(hashes)
        written(stranger)
        clear_l1(stranger)
        hello = m.Hello(protocol_min=1, protocol_max=1, role="scheduler", engine="e")
        welcome = stranger.ask(hello)
        assert welcome.protocol == 1

        def found() -> int:
            fields = {"op": "lookup", "session": welcome.session, "request": "r", "hashes": b"".join(hashes)}
            message = msgspec.msgpack.encode(fields | {"lease": next(leases)})
            reply = stranger.ask(m.request_decoder.decode(message))
            stranger.ask(m.EndRequest(session=welcome.session, requests=["r"]))
            return int(reply.chunks)

        leases = iter(range(10_000))
        assert found() == 0
        wait_for(lambda: found() == 5, what="the fetch behind")


# ---- whose is whose

KINDS: dict[str, Namespace] = {
    "base": namespace("m", page_bytes=(4096,)),
    "model": namespace("n", page_bytes=(4096,)),
    "dtype": namespace("m", page_bytes=(4096,), dtype="bfloat16"),
    "layout": namespace("m", page_bytes=(2048, 2048)),
}
SCOPES: list[dict[str, str]] = [{}, {"salt": "a"}, {"salt": "b"}, {"lora": "a"}, {"lora": "b"}]


def test_models_types_layouts_salts_and_adapters_never_meet_and_each_finds_its_own(tmp_path: Path) -> None:
    """Equal tokens, one server, one disk. What is found is compared with what only its own key gives."""
    with a_server(tmp_path) as server:
        with ExitStack() as stack:
            strangers = {
                kind: stack.enter_context(Stranger(server.address, kind, ns)) for kind, ns in KINDS.items()
            }
            cases = [
                (stranger, stranger.hashes(TOKENS, **scope))
                for stranger in strangers.values()
                for scope in SCOPES
            ]
            for stranger, hashes in cases:
                assert stranger.find(hashes) == 0, "a hit on something that was never stored"
                assert stranger.store(hashes) == 5
                assert stranger.find(hashes) == 5, "its own is found"
            written(strangers["base"])
            clear_l1(strangers["base"])
            for stranger, hashes in reversed(cases):
                assert stranger.find(hashes) == 5, "its own is found below"
            others = [stranger.hashes(TOKENS, salt="c") for stranger in strangers.values()]
            assert [s.find(h) for s, h in zip(strangers.values(), others, strict=True)] == [0] * len(KINDS)
        assert server.end() == 0
    with a_server(tmp_path) as server:
        for kind, ns in KINDS.items():
            with Stranger(server.address, kind, ns) as stranger:
                for scope in SCOPES:
                    assert stranger.find(stranger.hashes(TOKENS, **scope)) == 5
                assert stranger.find(stranger.hashes(TOKENS, salt="c")) == 0


# ---- an acknowledged store is found


@contextmanager
def embedded_server(folder: Path, **settings: Any) -> Iterator[EmbeddedServer]:
    """As an engine has it in its own process."""
    (folder / "log").touch()
    config = ServerConfig(**({"l1_size_gb": 0.02} | disk(folder) | settings))
    with closing(EmbeddedServer(config, str(folder))) as server:
        yield server


MODES = [
    pytest.param(a_server, {}, {}, id="shared memory"),
    pytest.param(a_server, {"shm": "off"}, {}, id="frames"),
    pytest.param(embedded_server, {}, {}, id="embedded"),
    pytest.param(
        a_server, {}, {"l2_store_policy": "skip_l1", "l2_prefetch_policy": "drop"}, id="passed through L1"
    ),
    pytest.param(a_server, {"mode": "lmcache_driven"}, {}, marks=pytest.mark.torch, id="lmcache-driven"),
]
PAIRS = 3


@pytest.mark.parametrize(("serve", "client", "settings"), MODES)
def test_every_acknowledged_store_is_found_by_the_next_lookup_whatever_is_cleared(
    tmp_path: Path, serve: Callable[..., Any], client: dict[str, Any], settings: dict[str, Any]
) -> None:
    """Engines that share a model store and look up at once, while L1 is cleared and small."""
    if "mode" in client:
        pytest.importorskip("torch")
    faults: list[str] = []
    stop = threading.Event()
    blocks = list(range(1, 11))

    def pair(number: int, writer: Rig, reader: Rig) -> None:
        try:
            for i in range(12):
                start = 1_000_000 * (number + 1) + 1000 * i
                tokens = list(range(start, start + 160))
                count = writer.store(tokens, blocks)
                if count != 5:
                    faults.append(f"{number}.{i}: {count} of 5 chunks stored")
                elif (found := reader.fetch(f"{number}.{i}", tokens, blocks)) != 5:
                    faults.append(f"{number}.{i}: acknowledged, and {found} of 5 chunks found")
        except BaseException as exc:
            faults.append(f"{number}: {type(exc).__name__}: {exc}")

    def clear(address: str) -> None:
        with Stranger(address, "tool", namespace("t", chunk_size=32)) as tool:
            while not stop.wait(0.005):
                clear_l1(tool)

    with serve(tmp_path, chunk_size=32, **settings) as server, ExitStack() as stack:
        fields = {"wait": 60.0, "patience": 20.0, "page_bytes": (4096, 2048), **client}
        rigs = [stack.enter_context(Rig(server.address, f"e{n}", **fields)) for n in range(2 * PAIRS)]
        threads = [
            threading.Thread(target=pair, args=(n, rigs[2 * n], rigs[2 * n + 1])) for n in range(PAIRS)
        ]
        clearing = threading.Thread(target=clear, args=(server.address,))
        for thread in (*threads, clearing):
            thread.start()
        for thread in threads:
            thread.join(60)
        stop.set()
        clearing.join(10)
    assert faults == []
    assert "Traceback" not in (tmp_path / "log").read_text()


# ---- flags

BAD = [
    (2, ["--l2-adapter", "{"], "--l2-adapter of 1 characters: not JSON"),
    (2, ["--l2-adapter", "[]"], 'expected an object with a "type"'),
    (2, ["--l2-adapter", '{"type": "disc"}'], "--l2-adapter type 'disc': expected one of disk"),
    (2, ["--l2-adapter", '{"type": "disk"}'], "path, max_gb: missing"),
    (2, ["--l2-adapter", '{"type": "fault", "name": "l1"}'], "--l2-adapter name 'l1': expected 1 to 64 of"),
    (2, ["--l2-adapter", '{"type": "fault", "name": 3}'], "--l2-adapter name 3: expected 1 to 64 of"),
    (3, ["--l2-adapter", '{"type": "disk", "path": "/proc/x", "max_gb": 1}'], "/proc/x"),
    (2, ["--l2-store-policy", "behind"], "--l2-store-policy 'behind': expected one of write_behind, skip_l1"),
    (2, ["--l2-prefetch-policy", "keep"], "--l2-prefetch-policy 'keep': expected one of retain, drop"),
    (2, ["--l2-queue-gb", "0"], "--l2-queue-gb 0: expected a positive number of GiB"),
    (2, ["--l2-queue-gb", "1"], "of all tiers together no more than --l1-size-gb 0.01"),
    (2, ["--l2-load-seconds", "nan"], "--l2-load-seconds nan: expected seconds within 0.01..3600"),
    (2, ["--l2-store-seconds", "0"], "--l2-store-seconds 0: expected seconds within"),
    (2, ["--l2-prefetch-seconds", "-1"], "--l2-prefetch-seconds -1: expected seconds within"),
    (2, ["--l2-flush-seconds", "inf"], "--l2-flush-seconds inf: expected seconds within 0..3600"),
]


@pytest.mark.parametrize(("code", "flags", "text"), BAD, ids=[" ".join(flags) for _, flags, _ in BAD])
def test_a_bad_tier_is_one_line_before_anything_is_bound(
    code: int, flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with taken_port() as port:  # which would be the fault, if it were tried
        argv = ["server", "--l1-size-gb", "0.01", "--port", str(port), "--http-port", "0", *flags]
        handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)]
        try:
            assert main(argv) == code
        finally:
            for number, handler in zip((signal.SIGTERM, signal.SIGINT), handlers, strict=True):
                signal.signal(number, handler)
    out, err = capsys.readouterr()
    assert out == ""
    assert text in err
    assert len(err.splitlines()) == 1


def test_a_directory_that_another_server_has_is_refused_by_the_pid_of_its_owner(
    server: ForkedServer, tmp_path: Path
) -> None:
    adapter = disk(tmp_path)["l2_adapter"][0]
    argv = ["server", "--l1-size-gb", "0.01", "--port", "0", "--http-port", "0", "--l2-adapter", adapter]
    assert str(server.pid) in refused(run_cli(*argv, timeout=30), 3)

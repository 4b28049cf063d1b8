"""What a server says of pushes that none of its engines can find."""

from __future__ import annotations

import json
import logging

import pytest

from helpers.server import Worker, namespace, running_server, wait_for
from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.server.sessions import Sessions
from lmcache.v1.multiprocess.server.unmatched import Unmatched
from lmcache.v1.protocol import peer as p


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


class Bench:
    """A server's part that judges, its engines, and one who pushes."""

    def __init__(self) -> None:
        self.sessions = Sessions()
        self.unmatched = Unmatched(self.sessions)

    def engine(self, *ranks: Namespace, of: int = 0) -> None:
        """An engine of ``of`` ranks, of which these have registered."""
        name = f"engine {len(self.sessions.engines)}"
        self.sessions.open("scheduler", name, 0, of or len(ranks), "")
        self.sessions.engines[name].namespaces |= {i: [(ns.digest(), ns)] for i, ns in enumerate(ranks)}
        self.unmatched.engine_registered()

    def push(self, *layouts: Namespace, told: bool = True) -> None:
        keys = b"".join(layout.digest() + bytes(32) for layout in layouts)
        told_of = list(layouts) if told else []
        message = p.PushReserve(session="s", lease=1, keys=keys, sizes=[1] * len(layouts), layouts=told_of)
        self.unmatched.pushed(message)


def test_what_differs_from_the_nearest_engine_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine(namespace("other", page_bytes=(128,) * 40, extra={"max_model_len": "1"}))
    bench.engine(*[namespace(tp_rank=rank, tp_size=2, extra={"max_model_len": "4096"}) for rank in (0, 1)])
    ranks = [namespace(tp_rank=rank, tp_size=2, extra={"max_model_len": "8192"}) for rank in (0, 1)]
    bench.push(*ranks)
    bench.push(*ranks, told=False)
    (line,) = said(caplog)
    assert "max_model_len '8192' there and '4096' here;" in line
    assert "tp_rank" not in line
    assert bench.unmatched.count == 2
    bench.engine(*ranks)
    bench.push(*ranks, told=False)
    assert (bench.unmatched.count, len(said(caplog))) == (0, 1)


def test_nothing_is_said_before_all_ranks_are_there_or_of_what_an_engine_finds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    bench = Bench()
    ranks = [namespace(tp_rank=rank, tp_size=2) for rank in (0, 1)]
    bench.push(*ranks, namespace("two"))
    bench.engine(ranks[0], of=2)
    bench.push(*ranks)
    assert (bench.unmatched.count, said(caplog)) == (0, [])
    bench.engine(*ranks)
    bench.push(*ranks, namespace("two"), told=False)
    (line,) = said(caplog)
    assert "model 'two' there and 'model' here" in line
    assert bench.unmatched.count == 1


def test_what_an_engine_that_has_left_would_have_found_is_said_too(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine(namespace(dtype="float16"))
    bench.push(namespace(dtype="float16"))
    assert said(caplog) == []
    for session in list(bench.sessions.by_id):
        bench.sessions.close(session)
    bench.engine(namespace(dtype="float32"))
    bench.push(namespace(dtype="float16"), told=False)
    (line,) = said(caplog)
    assert "dtype 'float16' there and 'float32' here" in line


def test_a_hostile_peers_words_are_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    bench = Bench()
    bench.engine(namespace())
    for number in range(500):
        bench.push(namespace(f"\x1b[2J\n{number}" + "x" * 9000, layers=("y" * 99,) * 99))
    assert bench.unmatched.count <= 64
    lines = said(caplog)
    assert 1 <= len(lines) <= 64
    assert all(line.isprintable() and len(line) < 1300 for line in lines)


@pytest.mark.parametrize("engine_first", [True, False])
def test_decode_says_why_it_does_not_find_what_prefill_pushes(engine_first: bool) -> None:
    here, there = namespace("pd"), namespace("pd", revision="r2")
    with running_server() as decode:
        flags = json.dumps({"type": "peer", "address": f"127.0.0.1:{decode.port}", "transport": "frames"})
        with running_server("--l2-adapter", flags) as prefill, Worker(prefill.address, [there]) as engine:
            pushed = 0

            def push() -> None:
                nonlocal pushed
                assert engine.store(range(1000 * pushed, 1000 * pushed + 600)) == 2
                pushed += 2
                wait_for(lambda: decode.metrics()["lmcache_mp_pushed_objects_total"] == pushed)

            if not engine_first:
                push()
                assert decode.state()["peers"]["unmatched_layouts"] == 0
            with Worker(decode.address, [here]):
                push()
                assert decode.state()["peers"]["unmatched_layouts"] == 1
                wait_for(lambda: "revision 'r2' there and 'r1' here" in decode.errors(), what="the line")

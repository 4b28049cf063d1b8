"""What a server says of pushes that none of its engines can find."""

from __future__ import annotations

import json
import logging

import pytest

from helpers.server import Worker, namespace, running_server, wait_for
from lmcache.v1.multiprocess.server.unmatched import Unmatched

PROMPT = list(range(600))


def said(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


def test_what_differs_from_the_nearest_engine_is_named_once(caplog: pytest.LogCaptureFixture) -> None:
    far = namespace("other", page_bytes=(128,) * 40, extra={"max_model_len": "1"})
    near = namespace(tp_rank=0, tp_size=2, extra={"max_model_len": "4096"})
    known = {layout.digest(): layout for layout in (far, near)}
    layouts = Unmatched(known)
    ranks = [namespace(tp_rank=rank, tp_size=2, extra={"max_model_len": "8192"}) for rank in (0, 1)]
    for _ in range(2):
        layouts.pushed(ranks)
    (line,) = said(caplog)
    assert "max_model_len '8192' there and '4096' here;" in line
    assert "tp_rank" not in line
    assert layouts.count == 2
    layouts.pushed([namespace(tp_rank=1, tp_size=2, extra={"max_model_len": "4096"})])
    assert len(said(caplog)) == 1, "a rank of the nearest engine that has yet to register"
    known.update({layout.digest(): layout for layout in ranks})
    layouts.look()
    assert (layouts.count, len(said(caplog))) == (1, 1)


def test_nothing_is_said_before_an_engine_is_there_or_of_what_it_finds(
    caplog: pytest.LogCaptureFixture,
) -> None:
    known = {}
    layouts = Unmatched(known)
    layouts.pushed([namespace(), namespace("two")])
    assert (layouts.count, said(caplog)) == (0, [])
    known[namespace().digest()] = namespace()
    layouts.look()
    (line,) = said(caplog)
    assert "model 'two' there and 'model' here" in line
    assert layouts.count == 1


def test_a_hostile_peers_words_are_bounded_and_printable(caplog: pytest.LogCaptureFixture) -> None:
    known = {namespace().digest(): namespace()}
    layouts = Unmatched(known)
    for number in range(500):
        layouts.pushed([namespace(f"\x1b[2J\n{number}" + "x" * 9000, layers=("y" * 99,) * 99)])
    assert layouts.count <= 64
    lines = said(caplog)
    assert 1 <= len(lines) <= 64
    assert all(line.isprintable() and len(line) < 1300 for line in lines)


@pytest.mark.parametrize("engine_first", [True, False])
def test_decode_says_why_it_does_not_find_what_prefill_pushes(engine_first: bool) -> None:
    here, there = namespace("pd", tp_size=1), namespace("pd", revision="r2")
    with running_server() as decode:
        flags = json.dumps({"type": "peer", "address": f"127.0.0.1:{decode.port}", "transport": "frames"})
        with running_server("--l2-adapter", flags) as prefill, Worker(prefill.address, [there]) as engine:

            def push() -> None:
                assert engine.store(PROMPT) == 2
                wait_for(lambda: decode.metrics()["lmcache_mp_pushed_objects_total"] == 2)

            def unmatched() -> int:
                return int(decode.state()["peers"]["unmatched_layouts"])

            if not engine_first:
                push()
                assert unmatched() == 0
            with Worker(decode.address, [here]):
                if engine_first:
                    push()
                assert unmatched() == 1
                wait_for(lambda: "revision 'r2' there and 'r1' here" in decode.errors(), what="the line")

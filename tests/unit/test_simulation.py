"""What the simulator counts, that nothing beats the optimum, and what ``lmcache tool simulate`` makes of files."""

from __future__ import annotations

import json
import lzma
import os
import xml.etree.ElementTree as ET
from collections.abc import Callable
from functools import cache
from itertools import chain
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.cli.main import main
from lmcache.v1.storage.eviction import LRU
from lmcache.v1.storage.policies import BUILT_IN
from lmcache.v1.storage.simulation import hits_by_access, hits_through_l1, most_hits

TRACES_VARIABLE = "LMCACHE_TRACES"


def blocks(text: str) -> list[list[bytes]]:
    """Requests with a block per letter, apart by blanks."""
    return [[letter.encode() for letter in word] for word in text.split()]


SMALL = st.lists(st.text("abcd", max_size=4), max_size=4).map(lambda words: blocks(" ".join(words)))
CHAINS = st.lists(
    st.tuples(st.integers(0, 5), st.integers(1, 6)).map(
        lambda c: [b"%d/%d" % (c[0], i) for i in range(c[1])]
    ),
    max_size=40,
)


# ---- counting


def test_every_block_of_every_request_counts_from_the_first_on() -> None:
    assert hits_by_access(LRU(), blocks("abc abd ab"), 10) == 4
    assert hits_by_access(LRU(), blocks("abc abd ab"), 2) == 0


def test_a_block_comes_in_as_soon_as_it_was_missed() -> None:
    assert hits_by_access(LRU(), blocks("aa"), 1) == 1
    assert hits_by_access(LRU(), blocks("abab"), 1) == 0


def test_through_l1_only_a_prefix_counts() -> None:
    assert hits_through_l1(LRU(), blocks("abc abd xab"), 100) == 2
    assert hits_by_access(LRU(), blocks("abc abd xab"), 100) == 4


def test_through_l1_a_full_cache_evicts_as_the_server_does() -> None:
    trace = [[b"%d" % i] for i in range(100)]
    assert hits_through_l1(LRU(), trace + trace[-90:], 100) == 90
    assert hits_through_l1(LRU(), trace + trace[:5], 100) == 0


# ---- the optimum


def best(accesses: tuple[bytes, ...], size: int) -> int:
    """By trying everything: what just came may come in for any other, or stay out."""

    @cache
    def from_here(i: int, held: frozenset[bytes]) -> int:
        if i == len(accesses):
            return 0
        key = accesses[i]
        if key in held:
            return 1 + from_here(i + 1, held)
        now = held | {key}
        choices = [held] + ([now] if len(now) <= size else [now - {gone} for gone in held])
        return max(from_here(i + 1, choice) for choice in choices)

    return from_here(0, frozenset())


@given(trace=SMALL, size=st.integers(1, 4))
def test_the_optimum_is_what_trying_everything_finds(trace: list[list[bytes]], size: int) -> None:
    assert most_hits(trace, size) == best(tuple(chain.from_iterable(trace)), size)


@pytest.mark.parametrize("replay", [hits_by_access, hits_through_l1])
@pytest.mark.parametrize("name", BUILT_IN)
@given(trace=CHAINS, size=st.integers(1, 12))
def test_no_policy_beats_the_optimum(
    name: str, replay: Callable[..., int], trace: list[list[bytes]], size: int
) -> None:
    assert replay(BUILT_IN[name](), trace, size) <= most_hits(trace, size)


@pytest.mark.parametrize(
    ("trace", "sizes", "percent"),
    [
        ("conversation", (1000, 5000, 10000, 20000, 50000), (4.4, 11.0, 21.1, 28.7, 35.5)),
        ("synthetic", (1000, 5000, 10000, 20000), (8.2, 27.9, 42.3, 57.1)),
    ],
)
def test_lru_finds_in_the_public_traces_what_is_known_of_it(
    trace: str, sizes: tuple[int, ...], percent: tuple[float, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = os.environ.get(TRACES_VARIABLE)
    if not folder:
        pytest.skip(
            f"{TRACES_VARIABLE} names no folder with the traces of Mooncake, which are not in this repository"
        )
    file = Path(folder) / f"mooncake_{trace}_trace.jsonl.xz"
    told = simulate(capsys, file, "--policy", "LRU", "--blocks", ",".join(map(str, sizes)))
    assert [round(100 * rate, 1) for rate in told["hit_rates"]["LRU"]] == list(percent)


# ---- the verb


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    file = tmp_path / "small.jsonl"
    requests = [{"timestamp": 0, "hash_ids": ids} for ids in ([0, 1, 2], [0, 1, 3], [], [4, 0, 1])]
    file.write_text("\n".join(map(json.dumps, requests)) + "\n\n")
    return file


def simulate(capsys: pytest.CaptureFixture[str], *argv: object) -> dict[str, dict[str, list[float]]]:
    assert main(["tool", "simulate", *map(str, argv), "--format", "json"]) == 0
    return dict(json.loads(capsys.readouterr().out))


def refusal(capsys: pytest.CaptureFixture[str], code: int, *argv: object) -> str:
    assert main(["tool", "simulate", *map(str, argv)]) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err.strip().removeprefix("lmcache tool simulate: ")


def test_the_verb_shows_every_policy_and_the_optimum_at_every_size(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["tool", "simulate", str(trace), "--blocks", "5,1,5"]) == 0
    head, columns, *rows = capsys.readouterr().out.splitlines()
    assert head.startswith(
        "small.jsonl: 4 requests, 9 blocks, 5 of them distinct; replay accesses; % of blocks"
    )
    assert columns.split() == ["policy", "1", "5"]
    assert [row.split()[0] for row in rows] == [*BUILT_IN, "optimum"]
    assert rows[0].split() == ["LRU", "0.0", "44.4"]


def test_json_has_the_counts_behind_the_rates(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert simulate(capsys, trace, "--policy", "noop,LRU", "--blocks", "1,5", "--replay", "l1") == {
        "trace": "small.jsonl",
        "replay": "l1",
        "requests": 4,
        "blocks": 9,
        "distinct_blocks": 5,
        "sizes": [1, 5],
        "hits": {"noop": [1, 2], "LRU": [1, 2], "optimum": [2, 4]},
        "hit_rates": {"noop": [0.11111, 0.22222], "LRU": [0.11111, 0.22222], "optimum": [0.22222, 0.44444]},
    }


def test_a_packed_trace_is_read_like_a_plain_one(trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
    packed = trace.with_name("packed")
    packed.write_bytes(lzma.compress(trace.read_bytes()))
    plain, other = (simulate(capsys, file) for file in (trace, packed))
    assert other == {**plain, "trace": "packed"}


def test_the_chart_has_a_line_and_a_name_for_each_policy(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chart = trace.with_name("a<b>.svg")
    simulate(capsys, trace, "--plot", chart, "--blocks", "1,3,5")
    space = "{http://www.w3.org/2000/svg}"
    root = ET.fromstring(chart.read_text())
    lines = root.findall(f"{space}polyline")
    assert len(lines) == len(BUILT_IN) + 1
    assert {len(line.attrib["points"].split()) for line in lines} == {3}
    texts = [text.text for text in root.findall(f"{space}text")]
    assert {*BUILT_IN, "optimum", "1", "3", "5", "small.jsonl, replay accesses"} <= set(texts)
    places = [float(text.attrib["y"]) for text in root.findall(f"{space}text") if text.text in BUILT_IN]
    assert len({round(y) for y in places}) == len(BUILT_IN)


def test_a_chart_of_one_size_without_hits_is_drawn(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "t"
    trace.write_text('{"hash_ids": [1]}')
    simulate(capsys, trace, "--blocks", "7", "--plot", tmp_path / "c.svg")
    ET.parse(tmp_path / "c.svg")


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "Expecting property name enclosed in double quotes"),
        ("[" * 100_000, "expected one JSON object per line"),
        ("[1]", '[1]: expected an object with "hash_ids"'),
        ('{"hash": [1]}', '{"hash": [1]}: expected an object with "hash_ids"'),
        ('{"hash_ids": 7}', "hash_ids 7: expected a list of whole numbers"),
        ('{"hash_ids": [1, 2.5]}', "hash_ids: 2.5: expected whole numbers only"),
        ('{"hash_ids": [true]}', "hash_ids: true: expected whole numbers only"),
        ('{"hash_ids": [null]}', "hash_ids: null: expected whole numbers only"),
        ("\udcff", "expected one JSON object per line"),
    ],
)
def test_a_line_that_is_no_request_is_named(
    line: str, said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_bytes(trace.read_bytes() + line.encode("utf-8", "surrogateescape"))
    told = refusal(capsys, 1, trace)
    assert told.startswith(f"{trace}:6: ")
    assert said in told


def test_a_packed_trace_that_ends_early_or_is_damaged_is_named(
    trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    whole = lzma.compress(trace.read_bytes())
    for data in (whole[:-20], whole[:30] + b"?" * 8 + whole[38:]):
        trace.write_bytes(data)
        told = refusal(capsys, 1, trace)
        assert told.startswith(f"{trace}:")
        assert told.endswith("expected a whole xz file; fetch it again")


@pytest.mark.parametrize("text", ["", "\n", '{"hash_ids": []}'])
def test_a_trace_without_blocks_is_refused(
    text: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace.write_text(text)
    assert refusal(capsys, 1, trace).startswith(f"{trace}: no request with blocks: expected JSON lines")


@pytest.mark.parametrize(
    ("code", "flags", "said"),
    [
        (
            2,
            ("/nowhere/trace",),
            "/nowhere/trace: cannot be read (No such file or directory); expected a trace",
        ),
        (2, ("a\0b",), "'a\\x00b': expected the name of a trace file"),
        (
            2,
            ("T", "--policy", "arc"),
            "--policy 'arc': expected all or some of LRU, LFU, FIFO, ARC, S3-FIFO, noop;",
        ),
        (2, ("T", "--policy", "LRU,"), "--policy '': expected all or some of LRU"),
        (2, ("T", "--blocks", "10,0"), "--blocks: '0': expected a whole number of at least 1"),
        (2, ("T", "--blocks", "many"), "--blocks: 'many': expected a whole number"),
        (2, ("T", "--replay", "l2"), "--replay: 'l2': expected one of accesses, l1"),
        (2, (), "the following arguments are required: TRACE"),
        (
            1,
            ("T", "--plot", "/nowhere/c.svg"),
            "--plot /nowhere/c.svg: cannot be written (No such file or directory);",
        ),
    ],
)
def test_wrong_usage_is_one_line(
    code: int, flags: tuple[str, ...], said: str, trace: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = tuple(str(trace) if flag == "T" else flag for flag in flags)
    assert refusal(capsys, code, *flags).startswith(said)

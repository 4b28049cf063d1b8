"""The command line without a server: what it costs, how it refuses, what it prints."""

from __future__ import annotations

import importlib
import json
import os
import subprocess
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from helpers.server import COMMAND, refused, run_cli, run_python
from lmcache.cli import holdings, output, tokens
from lmcache.cli.main import VERBS, main
from lmcache.errors import ConfigError, LMCacheError
from lmcache.v1.protocol.messages import Holding

MODULES_AFTER = """
import sys
from lmcache.cli.main import main
code = main(sys.argv[1:])
print("\\n".join(sorted(sys.modules)), file=sys.stderr)
sys.exit(code)
"""
THERE = [
    name for name, (module, _) in VERBS.items() if importlib.util.find_spec(f"lmcache.cli.verbs.{module}")
]


def modules_after(*argv: str) -> set[str]:
    done = run_python(MODULES_AFTER, *argv)
    assert done.returncode == 0, done.stderr
    return set(done.stderr.split())


def one_line(capsys: pytest.CaptureFixture[str], code: int, *argv: str) -> str:
    """Run in this process; the one line with which the command fails."""
    assert main(argv) == code
    out, err = capsys.readouterr()
    assert out == ""
    assert len(err.splitlines()) == 1, err
    return err


# ---- cost


def test_help_takes_less_than_0_3_seconds_of_cpu() -> None:
    def seconds() -> float:
        began = os.times()
        assert run_cli("--help").returncode == 0
        ended = os.times()
        spent = ended.children_user + ended.children_system
        return spent - began.children_user - began.children_system

    assert min(seconds() for _ in range(5)) < 0.3


def test_help_imports_no_verb_and_nothing_heavy() -> None:
    modules = modules_after("--help")
    assert "lmcache.cli.main" in modules
    assert {name for name in modules if name.startswith("lmcache.cli.verbs.")} == set()
    heavy = (
        "torch",
        "vllm",
        "zmq",
        "msgspec",
        "blake3",
        "uvicorn",
        "starlette",
        "prometheus_client",
        "numpy",
    )
    assert modules & set(heavy) == set()


@pytest.mark.parametrize("name", THERE)
def test_a_verb_s_help_imports_neither_torch_nor_an_engine(name: str) -> None:
    modules = modules_after(*name.split(), "--help")
    assert modules & {"torch", "vllm", "transformers", "zmq"} == set()


@pytest.mark.parametrize("name", THERE)
def test_every_verb_is_listed_with_the_text_that_it_gives_itself(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    module, text = VERBS[name]
    assert text == importlib.import_module(f"lmcache.cli.verbs.{module}").HELP
    assert main(["--help"]) == 0
    assert text in capsys.readouterr().out


def test_a_group_of_verbs_has_its_own_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["query", "--help"]) == 0
    out = capsys.readouterr().out
    assert "query kvcache" in out
    assert "query engine" in out
    assert "describe" not in out


def test_a_verb_whose_module_is_not_there_is_no_verb(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(VERBS, "ghost", ("no_such_module", "never seen"))
    assert main(["--help"]) == 0
    assert "ghost" not in capsys.readouterr().out
    assert "unknown verb 'ghost'" in one_line(capsys, 2, "ghost")


# ---- refusals

USAGE = [
    ([], "no verb given"),
    (["pingg"], "unknown verb 'pingg': did you mean ping?"),
    (["bench", "engine"], "unknown verb 'bench': expected one of server, ping"),
    (["--verbose"], "unknown flag '--verbose'"),
    (["query"], "lmcache query: no verb given: expected one of kvcache, engine"),
    (["query", "kvcahce"], "unknown verb 'kvcahce': did you mean kvcache?"),
    (["ping", "--hots", "x"], "unknown flag '--hots': did you mean --host?"),
    (["ping", "--hos=x"], "unknown flag '--hos': did you mean --host?"),
    (["ping", "-x"], "unknown flag '-x'"),
    (["ping", "now"], "unexpected argument 'now'"),
    (["ping", "--format", "xml"], "--format: 'xml': expected one of terminal, json"),
    (["server"], "--l1-size-gb: missing, expected GiB"),
    (["ping", "--port"], "--port: expected one argument"),
    (["ping", "--port", "99999"], "port 99999: expected a number within 1..65535"),
    (["ping", "--port", "x"], "port x: expected a number within 1..65535"),
    (["ping", "--host", "http://h:1"], "server address 'http://h:1': expected tcp://HOST:PORT"),
    (["ping", "--host", "h:1", "--port", "2"], "they name two ports"),
    (["ping", "--host", "h:0"], "expected a port within 1..65535"),
    (["ping", "--host", "a b"], "server address 'tcp://a b:5555'"),
    (["ping", "--host", "*"], "server address 'tcp://*:5555'"),
    (["ping", "--host", "\udcff"], "expected tcp://HOST:PORT"),
    (["ping", "--timeout", "0"], "--timeout: '0': expected seconds above 0"),
    (["ping", "--timeout", "nan"], "--timeout: 'nan': expected seconds above 0"),
    (["ping", "--timeout", "1e9"], "--timeout: '1e9': expected seconds above 0"),
    (["server", "--l1-size", "1"], "unknown flag '--l1-size': did you mean --l1-size-gb?"),
    (["server", "--l1-size-gb", "much"], "--l1-size-gb: 'much': expected a number"),
    (["server", "--port", "1.5"], "--port: '1.5': expected a whole number"),
    (["query", "kvcache"], "prompt given by none: expected exactly one of --tokens, --tokens-file, --text"),
    (["query", "kvcache", "--tokens", "1", "--text", "a"], "prompt given by --tokens and --text"),
    (["query", "kvcache", "--tokens", "1", "--tokenizer", "x"], "expected with --text only"),
    (["query", "kvcache", "--tokens", "1,x"], "--tokens: 'x': expected token ids"),
    (["query", "kvcache", "--tokens", ","], "--tokens: expected at least one token id"),
    (["query", "kvcache", "--tokens-file", "no/such"], "--tokens-file no/such: cannot be read"),
    (["query", "kvcache", "--tokens-file", "."], "--tokens-file .: cannot be read (Is a directory)"),
    (["query", "kvcache", "--tokens-file", "a\0b"], "expected a text file"),
    (
        ["query", "kvcache", "--text", "a"],
        "--text: expected with exactly one of --tokenizer PATH, --engine-url",
    ),
    (["query", "kvcache", "--text", "\udcff", "--tokenizer", "x"], "--text: expected UTF-8"),
    (["query", "kvcache", "--tokens", "1", "--tag", "novalue"], "--tag: 'novalue': expected KEY=VALUE"),
    (
        ["query", "kvcache", "--text", "a", "--engine-url", "ftp://h"],
        "--engine-url ftp://h: expected http://HOST",
    ),
    (["query", "engine"], "prompt: expected exactly one of --prompt, --prompt-file"),
    (["query", "engine", "--prompt", "a", "--prompt-file", "b"], "expected exactly one of --prompt"),
    (["query", "engine", "--prompt-file", "no/such"], "--prompt-file no/such: cannot be read"),
    (["query", "engine", "--prompt", "a", "--url", "h:x"], "--url h:x: expected http://HOST:PORT"),
    (["query", "engine", "--prompt", "a", "--url", "http://u:p@h"], "expected http://HOST:PORT"),
    (["query", "engine", "--prompt", "a", "--url", "http://h/ä"], "printable ASCII"),
    (
        ["query", "engine", "--prompt", "a", "--max-tokens", "0"],
        "--max-tokens: '0': expected a whole number of",
    ),
    (
        ["query", "engine", "--prompt", "a", "--api-key-env", "LMC_NO_SUCH"],
        "--api-key-env LMC_NO_SUCH: expected",
    ),
]


@pytest.mark.parametrize(("argv", "text"), USAGE, ids=[" ".join(argv) for argv, _ in USAGE])
def test_a_usage_error_is_one_line_and_exit_code_2(
    argv: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    line = one_line(capsys, 2, *argv)
    assert line.startswith("lmcache")
    assert text in line


def test_nobody_there_is_one_line_and_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    line = one_line(capsys, 1, "ping", "--port", "1", "--timeout", "0.2")
    assert "no cache server answers at tcp://127.0.0.1:1 within 0.2 s" in line
    line = one_line(capsys, 1, "query", "engine", "--url", "127.0.0.1:1", "--prompt", "a")
    assert "http://127.0.0.1:1/v1/models: Connection refused" in line


def test_a_missing_tokenizer_package_is_named_with_its_remedy(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", None)
    line = one_line(capsys, 3, "query", "kvcache", "--text", "a", "--tokenizer", "x")
    assert (
        line == "lmcache query kvcache: --tokenizer: needs the package tokenizers; pip install tokenizers\n"
    )


# ---- streams


@pytest.mark.parametrize("argv", [["--help"], ["server", "--help"], ["version"]], ids=" ".join)
def test_a_reader_that_left_is_no_noise(argv: list[str]) -> None:
    read, write = os.pipe()
    os.close(read)
    try:
        done = run_cli(*argv, capture_output=False, stdout=write, stderr=subprocess.PIPE)
    finally:
        os.close(write)
    assert (done.returncode, done.stderr) == (1, "")


@pytest.mark.parametrize("argv", [["--help"], ["server", "--help"], ["version"]], ids=" ".join)
def test_output_that_cannot_be_written_is_one_line(argv: list[str]) -> None:
    with open("/dev/full", "w") as full:
        done = run_cli(*argv, capture_output=False, stdout=full, stderr=subprocess.PIPE)
    assert done.returncode == 1
    assert done.stderr.splitlines()[0].endswith(
        "standard output: cannot be written (No space left on device)"
    )
    assert len(done.stderr.splitlines()) == 1


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_closed_streams_are_no_error(closed: str) -> None:
    command = ["sh", "-c", f'exec "$@" {closed}', "sh", *COMMAND, "version"]
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0
    assert done.stderr == ""


def test_an_interrupt_is_no_traceback() -> None:
    code = "import os, signal, lmcache.cli.main as cli\n"
    code += "cli._choose = lambda *_: os.kill(os.getpid(), signal.SIGINT)\nraise SystemExit(cli.main([]))"
    done = run_python(code)
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "")


# ---- what is printed


def test_version_says_the_protocol_in_both_formats(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    assert capsys.readouterr().out.startswith("lmcache ")
    assert main(["--version", "--format", "json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert set(told) == {"version", "protocol_min", "protocol_max", "python"}


def test_a_name_from_elsewhere_moves_no_cursor() -> None:
    assert output.clean("a\x1b[2Jb\nc\u202e") == "a\\x1b[2Jb\\nc\\u202e"
    assert [output.clean(value) for value in (None, "", True, False, 0)] == ["-", "-", "yes", "no", "0"]


def test_a_terminal_without_the_characters_still_gets_its_text() -> None:
    env = os.environ | {"PYTHONIOENCODING": "ascii"}
    code = "from lmcache.cli.output import write; write('é')"
    done = run_python(code, env=env)
    assert (done.returncode, done.stdout, done.stderr) == (0, "\\xe9\n", "")


def test_columns_are_as_wide_as_their_widest_cell_and_numbers_are_to_the_right() -> None:
    assert output.table(("name", "n"), [("a", 5), ("longer", 123)]) == "name      n\na         5\nlonger  123"
    assert output.pairs([("a", 1), ("bcd", None)]) == "a    1\nbcd  -"


def test_sizes_and_durations_are_in_fitting_units() -> None:
    sizes = [output.size(n) for n in (0, 1023, 1024, 5 << 30, 3 << 50)]
    assert sizes == ["0 B", "1023 B", "1.00 KiB", "5.00 GiB", "3072.00 TiB"]
    assert [output.duration(s) for s in (2e-6, 0.0015, 2)] == ["2 µs", "1.50 ms", "2.00 s"]


# ---- tokens


@pytest.mark.parametrize(
    "text",
    ["1,2,4294967295", "1 2\n4294967295\n", "[1, 2, 4294967295]", " [1,2,4294967295]\n", "1, 2, 4294967295,"],
)
def test_token_ids_are_read_from_lists_in_any_spelling(text: str) -> None:
    assert tokens.parse_tokens(text, "--tokens") == [1, 2, 4294967295]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "[1",
        "[1.0]",
        "[true]",
        '["x"]',
        "[[1]]",
        "[null]",
        "-1",
        "4294967296",
        "1e3",
        "٣",
        "0x10",
        "9" * 5000,
    ],
)
def test_what_is_no_token_id_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^--tokens: "):
        tokens.parse_tokens(text, "--tokens")


class _FakeTokenizer:
    def __init__(self, path: str) -> None:
        if "good" not in Path(path).read_text():
            raise Exception("expected value at line 1")  # what the package raises
        self.ids: list[int] = []

    @classmethod
    def from_file(cls, path: str) -> _FakeTokenizer:
        return cls(path)

    def encode(self, text: str) -> _FakeTokenizer:
        self.ids = [ord(c) for c in text]
        return self


def _args(**given: Any) -> Any:
    names = ("tokens", "tokens_file", "text", "tokenizer", "engine_url", "model", "api_key_env")
    return types.SimpleNamespace(**(dict.fromkeys(names) | given))


def test_a_text_is_tokenized_by_a_file_or_a_model_s_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(sys.modules, "tokenizers", types.SimpleNamespace(Tokenizer=_FakeTokenizer))
    file = tmp_path / "tokenizer.json"
    file.write_text("good")
    assert tokens.read_tokens(_args(text="ab", tokenizer=str(file))) == [97, 98]
    assert tokens.read_tokens(_args(text="ab", tokenizer=str(tmp_path))) == [97, 98]
    file.write_text("bad")
    with pytest.raises(ConfigError, match=r"expected value at line 1: expected a tokenizer\.json"):
        tokens.read_tokens(_args(text="ab", tokenizer=str(file)))
    with pytest.raises(ConfigError, match=r"cannot be read \(No such file or directory\)"):
        tokens.read_tokens(_args(text="ab", tokenizer=str(tmp_path / "none")))


# ---- what a server holds


def share(chunks: int, **fields: Any) -> Holding:
    defaults: dict[str, Any] = {
        "model": "m", "revision": "r", "dtype": "d", "group": 0, "groups": 1, "tp_rank": 0, "tp_size": 1,
        "pp_rank": 0, "pp_size": 1, "tier": "L1",
    }  # fmt: skip
    return Holding(chunks=chunks, **(defaults | fields))


def test_a_model_holds_what_all_its_ranks_and_groups_hold() -> None:
    rows = [
        share(chunks, group=group, groups=2, tp_rank=rank, tp_size=2)
        for chunks, (group, rank) in zip((5, 4, 3, 6), ((0, 0), (0, 1), (1, 0), (1, 1)), strict=True)
    ]
    (found,) = holdings.summarise(rows, 256)
    assert (found.tokens, found.complete, len(found.shares)) == (3 * 256, True, 4)


@pytest.mark.parametrize("gone", range(4))
def test_an_incomplete_set_holds_nothing(gone: int) -> None:
    rows = [share(9, tp_rank=tp, tp_size=2, pp_rank=pp, pp_size=2) for tp in (0, 1) for pp in (0, 1)]
    del rows[gone]
    (found,) = holdings.summarise(rows, 256)
    assert (found.tokens, found.complete) == (0, False)


def test_a_rank_registered_twice_stands_for_no_other() -> None:
    rows = [share(9, tp_rank=0, tp_size=2), share(9, tp_rank=0, tp_size=2)]
    assert not holdings.summarise(rows, 256)[0].complete


def test_several_layouts_of_a_whole_model_are_listed_one_by_one() -> None:
    found = holdings.summarise([share(1), share(7), share(2, model="n")], 16)
    assert [(entry.model, entry.tokens) for entry in found] == [("m", 112), ("n", 32), ("m", 16)]


def test_several_layouts_of_a_divided_model_are_bounded_from_below() -> None:
    rows = [share(chunks, tp_rank=rank, tp_size=2) for chunks, rank in ((5, 0), (0, 1), (0, 0), (4, 1))]
    assert [entry.tokens for entry in holdings.summarise(rows, 16)] == [0]


def test_tiers_revisions_and_types_are_told_apart() -> None:
    rows = [share(1), share(2, tier="L2"), share(3, revision="s"), share(4, dtype="e")]
    assert [entry.tokens for entry in holdings.summarise(rows, 1)] == [4, 3, 2, 1]


def test_an_error_of_ours_keeps_its_exit_code() -> None:
    assert (ConfigError("x").exit_code, LMCacheError("x").exit_code) == (2, 1)
    assert refused(run_cli("query", "kvcache"), 2).startswith("lmcache query kvcache: ")

"""Every command of the pages runs as it is written there, at a server with a tier."""

from __future__ import annotations

import importlib
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.forked_server import ForkedServer
from helpers.server import http_get
from helpers.tier_load import Stranger
from lmcache.cli.args import Parser
from lmcache.cli.main import main
from lmcache.cli.verbs import device_verify
from lmcache.integration.vllm.inproc_settings import read_config
from lmcache.integration.vllm.settings import read_settings
from lmcache.v1.multiprocess.server import app
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.tiers import parse_adapters
from lmcache.v1.storage.l2.options import read_options
from lmcache.v1.storage.l2.registry import BUILT_IN

REPOSITORY = Path(__file__).parents[2]
PAGES = [
    "README.md",
    *sorted(page.relative_to(REPOSITORY).as_posix() for page in (REPOSITORY / "docs").rglob("*.md")),
]
FENCED = re.compile(r"^```(?:bash|sh|console)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
AT_THE_SERVER = ("ping", "describe", "query kvcache", "kvcache", "quota")
FAILS = ("query engine",)
"""There is no engine here: exit code 1, but no wrong usage."""
OF_DEVICES = "device verify"
"""There is no device here: its flags are read, and no more."""
CONNECTORS = {"LMCacheMPConnector": read_settings, "LMCacheConnectorV1": read_config}
OF_EXAMPLES = ("sqlite",)
"""Storage engines of the sample plugins, which have tests of their own."""
PROMPT = list(range(600))
FILES = {
    "prompt.json": json.dumps(PROMPT),
    "FILE": "chunk_size: 128\n",
    "TRACE": '{"hash_ids": [1, 2, 3]}\n{"hash_ids": [1, 2, 4]}\n',
}


def commands(page: str) -> list[list[str]]:
    """The commands of a page's shell blocks, as words."""
    found = []
    for block in FENCED.findall((REPOSITORY / page).read_text(encoding="utf-8")):
        pending = ""
        for line in block.splitlines():
            pending += line.removesuffix("\\") if line.endswith("\\") else f"{line}\n"
            try:
                words = shlex.split(pending, comments=True)
            except ValueError:  # a quotation that the next line goes on with
                continue
            if not line.endswith("\\"):
                found.append(words)
                pending = ""
    return [words for words in found if words and words[0] in ("lmcache", "curl", "vllm")]


CASES = [(page, words) for page in PAGES for words in commands(page)]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ForkedServer]:
    folder = tmp_path_factory.mktemp("docs")
    tier = json.dumps({"type": "disk", "path": str(folder / "disk"), "max_gb": 0.05})
    with ForkedServer(folder / "log", l1_size_gb=0.02, l2_adapter=(tier,)) as running:
        with Stranger(running.address, "e") as engine:
            assert engine.store(engine.hashes(PROMPT)) == len(PROMPT) // 256
            yield running


def check_server(config: ServerConfig, announce: Any) -> None:
    """Instead of a server: all that is checked before one is made."""
    config.check()
    for _, spec in parse_adapters(config.l2_adapter):
        kind = str(spec.pop("type"))
        if kind in OF_EXAMPLES:
            continue
        try:
            module = importlib.import_module(BUILT_IN[kind].module)
        except ImportError:
            assert BUILT_IN[kind].package, f"{kind} needs nothing"  # its package is not here
            continue
        structs = [o for o in vars(module).values() if isinstance(o, type) and issubclass(o, msgspec.Struct)]
        (options,) = [
            o for o in structs if o.__module__ == module.__name__ and o.__name__.endswith("Options")
        ]
        read_options(kind, options, spec)


@pytest.mark.parametrize(("page", "words"), CASES, ids=[f"{page}: {' '.join(w)[:60]}" for page, w in CASES])
def test_every_command_of_the_docs_runs_as_written(
    page: str, words: list[str], server: ForkedServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(app, "run_server", check_server)
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    if words[0] == "curl" and words[1].endswith("/v1/completions"):  # an engine's: none is here
        body = json.loads(words[words.index("-d") + 1])
        assert (body["max_tokens"] == 1) == ("prefill" in words[1])
        return
    if words[0] == "curl":
        path = re.fullmatch(r"(?:http://)?(?:localhost|127\.0\.0\.1):8080(/\w+)", words[1])
        assert path is not None, words
        assert http_get(server.ready.http + path[1])[0] == 200
        return
    if words[0] == "vllm":
        config = json.loads(words[words.index("--kv-transfer-config") + 1])
        CONNECTORS[config["kv_connector"]](config.get("kv_connector_extra_config", {}))
        return
    line = " ".join(words[1:]).removesuffix(" &")
    argv = [word for word in words[1:] if word != "&"]
    if line.startswith(OF_DEVICES):
        parser = Parser()
        device_verify.add(parser)
        parser.parse(argv[2:])
        return
    if line.startswith(AT_THE_SERVER) and "--help" not in argv:
        if "--port" in argv:
            at = argv.index("--port")
            assert argv[at + 1] == "5555"
            del argv[at : at + 2]
        argv += ["--host", server.address]
    assert main(argv) == line.startswith(FAILS), argv


def test_the_pages_have_commands_to_run() -> None:
    verbs = {" ".join(words[1:3]) for _, words in CASES}
    assert {"quota set", "quota delete", "kvcache clear", "config check", "describe kvcache"} <= verbs
    assert sum(words[1] == "server" for _, words in CASES) > 5

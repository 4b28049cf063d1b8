"""The pages name what there is: every flag, series and option, and no link, flag, series or variable beside it."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from lmcache.cli.args import Parser
from lmcache.cli.main import VERBS
from lmcache.integration.vllm import settings
from lmcache.v1.config import FIELDS
from lmcache.v1.multiprocess.server import app
from lmcache.v1.multiprocess.server.config import FLAGS, ServerConfig
from lmcache.v1.multiprocess.server.metrics import TIER_COUNTERS, TIER_GAUGES, Metrics
from lmcache.v1.storage.l2.registry import BUILT_IN

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"
PAGES = {path: path.read_text(encoding="utf-8") for path in [ROOT / "README.md", *sorted(DOCS.rglob("*.md"))]}
OPERATORS = PAGES[DOCS / "operators.md"]
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]+")
OF_OTHERS = {
    "vLLM": {
        "--kv-transfer-config", "--kv-offloading-size", "--kv-offloading-backend", "--block-size",
        "--max-model-len", "--max-num-batched-tokens",
    },
    "examples/pd_proxy.py": {"--prefill", "--decode"},
    "SGLang": {
        "--model-path", "--enable-lmcache", "--enable-lora", "--enable-hierarchical-cache",
        "--lmcache-config-file", "--page-size",
    },
    "Mooncake": {"--rpc_port", "--metrics_port", "--default_kv_lease_ttl"},
    "pip": {"--index-url", "--no-deps"},
    "containers": {"--ulimit"},
    "tests on a GPU": {"--kit", "--backend"},
}  # fmt: skip


def cells(page: str) -> list[list[str]]:
    """The rows of a page's tables."""
    lines = [line for line in page.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in re.split(r"(?<!\\)\|", line)[1:-1]] for line in lines]


def flags_of(verb: str) -> set[str]:
    parser = Parser()
    importlib.import_module(f"lmcache.cli.verbs.{VERBS[verb][0]}").add(parser)
    return {flag for action in parser._actions for flag in action.option_strings} - {"-h", "--help"}


def documented() -> dict[str, set[str]]:
    """Verbs and their flags, by docs/command-line.md."""
    rows = cells(PAGES[DOCS / "command-line.md"])
    shared = {row[0]: set(FLAG.findall(row[1])) for row in rows if re.fullmatch(r"\*\w+\*", row[0])}
    found = {}
    for row in rows:
        for verb in re.findall(r"`([a-z ]+?)(?: [A-Z\[][^`]*)?`", row[0]):
            groups = re.findall(r"\*\w+\*", row[2])
            found[verb] = set(FLAG.findall(row[1])).union(*(shared[group] for group in groups))
    found["server"] |= {f"--{name}" for name in server_rows()}
    return found


def server_rows() -> dict[str, str]:
    """Flags of ``lmcache server`` and their defaults, by docs/operators.md."""
    found = {}
    for row in cells(OPERATORS):
        names = re.findall(r"`--([a-z0-9-]+)`", row[0])
        if names:
            defaults = row[1].split(", ") if len(names) > 1 else row[1:2]
            found.update(zip(names, defaults, strict=True))
    return found


def test_every_verb_is_documented_with_exactly_its_flags() -> None:
    assert documented() == {verb: flags_of(verb) for verb in VERBS}


def test_every_flag_of_the_server_is_documented_with_its_default() -> None:
    rows = server_rows()
    assert rows.keys() == {name for name, _, _ in FLAGS}
    for name, text in rows.items():
        default = getattr(ServerConfig(), name.replace("-", "_"))
        if isinstance(default, (int, float)) and default:
            assert float(text) == default, name
        elif isinstance(default, str) and default:
            assert text == default, name


def test_no_page_names_a_flag_that_nothing_has() -> None:
    ours = set().union(*map(flags_of, VERBS)) | {"--help", "--version"}
    known = ours.union(*OF_OTHERS.values())
    unknown = {
        (path.name, flag) for path, text in PAGES.items() for flag in FLAG.findall(text) if flag not in known
    }
    assert unknown == set()


def test_every_flag_of_others_that_is_named_here_is_on_some_page() -> None:
    written = {flag for text in PAGES.values() for flag in FLAG.findall(text)}
    assert set().union(*OF_OTHERS.values()) <= written


# ---- metrics


def series() -> set[str]:
    """Names of the samples that a server with a tier shows."""
    metrics = Metrics()
    service: Any = SimpleNamespace(l1=None, sessions=None)
    registered: list[str] = []
    metrics.watch = lambda name, text, read: registered.append(name)  # type: ignore[method-assign]
    app._gauges(metrics, service, None)  # type: ignore[arg-type]
    tier = dict.fromkeys([*TIER_GAUGES, *TIER_COUNTERS], 0) | {"name": "t", "state": "up"}
    shown = Metrics()
    assert isinstance(shown.registry, CollectorRegistry)
    shown.watch_tiers(lambda: [tier])
    names = {s.name for family in shown.registry.collect() for s in family.samples}
    return {n for n in names if not n.endswith("_created")} | {f"lmcache_mp_{name}" for name in registered}


def test_every_series_is_documented_and_no_other() -> None:
    rows = cells(PAGES[DOCS / "metrics.md"])
    named = {name for row in rows for name in re.findall(r"`(\w+)(?:\{\w+\})?`", row[0])}
    assert {f"lmcache_mp_{name}" for name in named} == series()


def test_no_page_names_a_series_that_there_is_not() -> None:
    modules = {path.stem for path in (ROOT / "core" / "src").rglob("lmcache_mp_*.py")}
    known = series() | modules
    found = {
        (path.name, name)
        for path, text in PAGES.items()
        for name in re.findall(r"lmcache_mp_\w+\b(?!\*)", text)
    }
    assert {(page, name) for page, name in found if name not in known and name != "lmcache_mp_l2_"} == set()


# ---- settings and options


def test_every_setting_of_the_vllm_connector_is_documented() -> None:
    written = {name for row in cells(OPERATORS) for name in re.findall(r"`lmcache\.mp\.(\w+)`", row[0])}
    assert written == set(settings._KEYS)


def options_of(kind: str) -> set[str]:
    """Read off the source: the package that an adapter needs may be absent."""
    spec = importlib.util.find_spec(BUILT_IN[kind].module)
    assert spec is not None
    assert spec.origin is not None
    path = Path(spec.origin)
    beside = path.with_name(f"{path.stem}_options.py")
    tree = ast.parse((beside if beside.exists() else path).read_text(encoding="utf-8"))
    (options,) = [n for n in tree.body if isinstance(n, ast.ClassDef) and n.name.endswith("Options")]
    return {
        n.target.id for n in options.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)
    }


@pytest.mark.parametrize("kind", BUILT_IN)
def test_every_option_of_a_tier_is_documented(kind: str) -> None:
    page = PAGES.get(DOCS / "storage" / f"{kind.replace('_', '-')}.md", PAGES[DOCS / "tiers.md"])
    options = options_of(kind)
    assert options
    assert {name for name in options if not re.search(rf"[`\"]{name}[`\"]", page)} == set()


# ---- links


def anchors(page: Path) -> set[str]:
    """As GitHub makes them of headings."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    plain = (re.sub(r"\[([^]]*)\]\([^)]*\)|[`*]", r"\1", heading) for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in plain}


def test_every_link_within_the_pages_leads_somewhere() -> None:
    dead = []
    for page in [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]:
        for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            if link.startswith("http"):
                continue
            if not target.exists() or (anchor and anchor not in anchors(target)):
                dead.append(f"{page.relative_to(ROOT)}: {link}")
    assert dead == []


def test_every_variable_that_is_named_is_read_somewhere() -> None:
    folders = (ROOT / name for name in ("core/src", "plugins", "tests", "tools", "benchmarks"))
    kinds = (".py", ".cpp", ".h", ".tmpl", ".toml", ".txt", ".sh")
    files = [path for folder in folders for path in folder.rglob("*") if path.suffix in kinds]
    files += [ROOT / "noxfile.py"]
    code = "\n".join(p.read_text(encoding="utf-8", errors="replace") for p in files if p != Path(__file__))
    known = set(re.findall(r"\bLMCACHE_[A-Z0-9_]+\b", code)) | {f"LMCACHE_{key.upper()}" for key in FIELDS}
    named = {name for text in PAGES.values() for name in re.findall(r"\bLMCACHE_[A-Z0-9_]+\b", text)}
    assert named - known == {"LMCACHE_NATIVE_ABI_VALUE"}, "a vendor's own, in an example of the SDK's page"

"""Entry point of the ``lmcache`` command.

Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cannot start. What a user can cause is one line on standard
error; a traceback means a fault of ours. A verb is imported when it runs, so ``--help`` costs nothing.
"""

from __future__ import annotations

import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from lmcache.cli.args import Parser, UsageError
from lmcache.cli.output import clean, write
from lmcache.errors import LMCacheError

if TYPE_CHECKING:
    from lmcache.v1.utils.entry_points import EntryPoint

VERBS = {
    "server": ("server", "run the cache server"),
    "ping": ("ping", "time a round trip to a running server"),
    "describe": ("describe", "show a running server's settings, its fill and who is connected"),
    "query kvcache": ("query_kvcache", "say how many tokens of a prompt a running server holds, and where"),
    "kvcache list": ("kvcache_list", "list the objects that a running server holds in L1 or a tier"),
    "kvcache clear": ("kvcache_clear", "drop what a running server holds"),
    "kvcache pin": ("kvcache_pin", "keep a prompt in L1 until it is unpinned or the server ends"),
    "kvcache unpin": ("kvcache_unpin", "let a pinned prompt go like any other"),
    "kvcache warm": ("kvcache_warm", "fetch a prompt from the tiers below into L1"),
    "quota set": ("quota_set", "limit what requests of one cache salt may hold in L1 or in a tier"),
    "quota get": ("quota_get", "show one salt's limits and use"),
    "quota list": ("quota_list", "show the limit and use of every account"),
    "quota delete": ("quota_delete", "lift one salt's limit"),
    "query engine": ("query_engine", "time one completion of an OpenAI-compatible engine"),
    "device list": ("device_list", "show every device backend that is installed, and what became of it"),
    "device explain": ("device_explain", "say which device backend is used and why, and why not the others"),
    "device doctor": ("device_doctor", "try every device backend in a process of its own"),
    "device verify": ("device_verify", "run the conformance kit against a device backend"),
    "device new": ("device_new", "write the project of a new device backend: code, tests, packaging, CI"),
    "config show": ("config_show", "show every setting of the in-process engine, with its source"),
    "config check": (
        "config_check",
        "check a configuration file of the in-process engine (exit code 0 or 2)",
    ),
    "demo": ("demo", "run a small model without and with cached KV, and compare"),
    "tool simulate": ("tool_simulate", "replay recorded requests against eviction policies"),
    "plugins": ("plugins", "list the plugins that are no devices, and what became of each"),
    "version": ("version", "print the version"),
}
"""What is typed: the module below ``lmcache.cli.verbs``, and what ``--help`` says of it."""

_PACKAGE = "lmcache.cli.verbs"
_INTERRUPTED = 130  # what a shell reports for SIGINT


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    path: list[str] = []
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by whoever started us; libraries expect it to be there
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115
    try:
        rest = _choose(path, sys.argv[1:] if argv is None else argv)
        if " ".join(path) in VERBS:
            return _run(importlib.import_module(f"{_PACKAGE}.{VERBS[' '.join(path)][0]}"), path, rest)
        if path and not _next_words(path):
            return _run_of_plugin(path, rest)
        write(_help(path))
        return 0
    except LMCacheError as exc:
        print(f"{_prog(path)}: {' '.join(str(exc).split())}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return _INTERRUPTED
    except BrokenPipeError:  # whoever read our output has left; Python's own flush at exit must not complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _choose(path: list[str], argv: Sequence[str]) -> list[str]:
    """Move the words that name a verb, or a group whose help is wanted, to ``path``; return the rest."""
    rest = ["version", *argv[1:]] if argv[:1] == ["--version"] else list(argv)
    while " ".join(path) not in VERBS:
        choices = _next_words(path)
        if not rest:
            raise UsageError(f"no verb given: expected one of {', '.join(choices)}; see {_prog(path)} --help")
        word = rest.pop(0)
        if word in ("-h", "--help"):
            break
        if word not in choices:
            offered = {} if path else _verbs_of_plugins()
            if word in offered:
                path.append(word)
                break
            choices += offered
            close = difflib.get_close_matches(word, choices, 1)
            hint = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(choices)};"
            what = "flag" if word.startswith("-") else "verb"
            raise UsageError(f"unknown {what} {word!r}: {hint} see {_prog(path)} --help")
        path.append(word)
    return rest


def _prog(path: Sequence[str]) -> str:
    return " ".join(("lmcache", *path))


def _next_words(path: Sequence[str]) -> list[str]:
    """The words that may follow ``path``, in the order of the table; only of verbs whose module is there."""
    prefix = "".join(f"{word} " for word in path)
    return list(dict.fromkeys(name[len(prefix) :].split()[0] for name in _known() if name.startswith(prefix)))


def _known() -> list[str]:
    return [name for name, (module, _) in VERBS.items() if importlib.util.find_spec(f"{_PACKAGE}.{module}")]


def _help(path: Sequence[str]) -> str:
    prefix = "".join(f"{word} " for word in path)
    names = [name for name in _known() if name.startswith(prefix)]
    offered = {} if path else _verbs_of_plugins()
    width = max(map(len, [*names, *offered]))
    lines = [
        f"usage: lmcache {prefix}VERB [FLAGS]",
        "",
        "KV cache for LLM engines, kept outside the engine.",
        "",
    ]
    lines += [f"  {name:{width}}  {VERBS[name][1]}" for name in names]
    lines += [
        f"  {name:{width}}  verb of the plugin {clean(point.source)}" for name, point in offered.items()
    ]
    lines += ["", "lmcache VERB --help lists a verb's flags; lmcache --version prints the version."]
    lines += ["Exit codes: 0 done, 1 failed, 2 wrong usage, 3 cannot start."]
    return "\n".join(lines)


def _verbs_of_plugins() -> Mapping[str, EntryPoint]:
    """From metadata alone; looked for only where a word is no verb of ours, and for help."""
    from lmcache.cli.plugin_verbs import announced

    return announced({name.split()[0] for name in VERBS})


def _run_of_plugin(path: Sequence[str], argv: Sequence[str]) -> int:
    from lmcache.cli.plugin_verbs import blame, load

    verb, record = load(path[0], {name.split()[0] for name in VERBS})
    with blame(record):
        return _run(verb, path, argv)


def _run(module: Any, path: Sequence[str], argv: Sequence[str]) -> int:
    parser = Parser(prog=_prog(path), description=module.HELP)
    module.add(parser)
    try:
        args = parser.parse(argv)
    except SystemExit as exc:  # after --help
        return exc.code if isinstance(exc.code, int) else 1
    return int(module.run(args))


if __name__ == "__main__":
    sys.exit(main())

"""Entry point of the ``lmcache`` command.

Exit codes: 0 ok, 1 failure, 2 usage, 3 cannot start. What a user can cause is one line on standard error; a
traceback means a fault of ours.
"""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from typing import NoReturn

from lmcache.errors import LMCacheError

VERBS = ("server",)


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        print(f"{self.prog}: {message}; see {self.prog} --help", file=sys.stderr)
        raise SystemExit(2)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns its exit code."""
    parser = _Parser(prog="lmcache", description="KV cache for LLM engines, kept outside the accelerator.")
    verbs = parser.add_subparsers(dest="verb", metavar="VERB", required=True)
    for name in VERBS:
        module = importlib.import_module(f"lmcache.cli.verbs.{name}")
        sub = verbs.add_parser(name, help=module.HELP, description=module.HELP)
        module.add(sub)
        sub.set_defaults(run=module.run)
    args = parser.parse_args(argv)
    try:
        return int(args.run(args))
    except LMCacheError as exc:
        print(f"lmcache {args.verb}: {exc}", file=sys.stderr)
        return exc.exit_code
    except KeyboardInterrupt:
        return 130


if __name__ == "__main__":
    sys.exit(main())

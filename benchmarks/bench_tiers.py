"""Storage tiers beside the bare input and output that they are made of, in the same run, in turns.

Each part has a module of its own, ``tiers_NAME.py``, with ``measure(report, repeats)``.
"""

from __future__ import annotations

import importlib
import sys

from harness import Report, parser

PARTS = ("disk",)


def main() -> int:
    options = parser(__doc__, repeats=9)
    options.add_argument("--parts", default=",".join(PARTS), help=f"some of {','.join(PARTS)} (all)")
    args = options.parse_args()
    report = Report(args)
    for name in args.parts.split(","):
        if name not in PARTS:
            options.error(f"--parts {name}: expected some of {','.join(PARTS)}")
        importlib.import_module(f"tiers_{name}").measure(report, args.repeats)
    return report.finish()


if __name__ == "__main__":
    sys.exit(main())

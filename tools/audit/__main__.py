"""`python -m audit PLUGIN WHEEL...`: exit code 1 if a wheel has a fault, 2 if it was asked wrongly."""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from pathlib import Path

from audit.opened import opened
from audit.policies import POLICIES
from audit.rules import audit, facts


def _version(text: str) -> tuple[int, ...]:
    return tuple(int(part) for part in text.split("."))


def main(arguments: list[str]) -> int:
    """One line per fault; of a sound wheel what is in it."""
    parser = argparse.ArgumentParser(prog="audit", description="Audit built device wheels.")
    parser.add_argument("plugin", choices=tuple(POLICIES), help="whose wheels they are")
    parser.add_argument("wheels", nargs="+", type=Path, metavar="WHEEL")
    parser.add_argument(
        "--glibc",
        type=_version,
        metavar="X.Y",
        help="the newest glibc that they may ask for, if not the published one",
    )
    given = parser.parse_args(arguments)
    policy = POLICIES[given.plugin]
    if given.glibc:
        policy = replace(policy, glibc=given.glibc)
    bad = False
    for path in given.wheels:
        try:
            with opened(path) as wheel:
                faults = audit(wheel, policy)
                lines = faults or list(facts(wheel))
        except (OSError, ValueError) as exc:
            faults = lines = [f"wheel: {exc}"]
        bad = bad or bool(faults)
        print(f"{'FAULTY' if faults else 'sound'}: {path.name}")
        for line in lines:
            print(f"  {line}")
    return int(bad)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

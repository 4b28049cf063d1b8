"""What the ``device`` verbs print of records of device backends, which come as dictionaries."""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterable, Mapping
from typing import Any

from lmcache.cli.args import seconds
from lmcache.cli.output import clean, pairs, table

VARIABLES = ("LMCACHE_DEVICE_BACKEND", "DEVICE_TYPE", "LMCACHE_DISABLE_PLUGINS")
"""What decides beside what is installed."""

Record = Mapping[str, Any]


def add_timeout(parser: argparse.ArgumentParser) -> None:
    """``--timeout`` for one step of one plugin."""
    parser.add_argument(
        "--timeout",
        type=seconds,
        default=20.0,
        help="seconds that a plugin's import or probe may take before it counts as hung (20)",
    )


def source(record: Record) -> str:
    """Distribution and version."""
    text = f"{record['distribution'] or 'unknown'} {record['version']}".strip()
    return text + (" (built in)" if record["origin"] == "built-in" else "")


def overview(records: Iterable[Record]) -> str:
    """One row per backend."""
    rows = [(r["name"], r["device_type"], r["state"], source(r), r["note"]) for r in records]
    return table(("backend", "type", "state", "from", "note"), rows)


def remedies(records: Iterable[Record]) -> str:
    """What can be done about each backend that has a remedy."""
    return pairs((r["name"], r["remedy"]) for r in records if r["remedy"])


def settings() -> dict[str, str]:
    """The variables that decide and are set."""
    return {name: os.environ[name] for name in VARIABLES if os.environ.get(name, "").strip()}


def settings_text() -> str:
    """The same as one line."""
    return clean(", ".join(f"{name}={value}" for name, value in settings().items()) or "none of them is set")


def paragraphs(*parts: str) -> str:
    """What is not empty, with an empty line between."""
    return "\n\n".join(part for part in parts if part)

"""``lmcache plugins``: which plugins are installed, and can they be loaded?"""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format
from lmcache.cli.output import emit, table

HELP = "list the plugins that are no devices, and what became of each"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Load every plugin of ``lmcache.plugins`` in a child process, and print what came of it."""
    from lmcache.v1.plugins.survey import survey

    records = survey()
    rows = [
        (
            record["name"],
            f"{record['distribution']} {record['version']}".strip(),
            record["state"],
            ", ".join(record["hooks"]),
            "; ".join(part for part in (record["note"], record["remedy"]) if part),
        )
        for record in records
    ]
    text = table(("plugin", "distribution", "state", "hooks", "note"), rows)
    none = "no plugins; entry-point group lmcache.plugins. For devices: lmcache device list"
    emit(args.format, {"plugins": records}, text if rows else none)
    return 0

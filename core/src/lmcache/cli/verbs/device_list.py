"""``lmcache device list``: every backend that is installed, and what became of it."""

from __future__ import annotations

import argparse

from lmcache.cli.args import add_format
from lmcache.cli.devices import add_timeout, overview, paragraphs, remedies
from lmcache.cli.output import clean, emit

HELP = "show every device backend that is installed, and what became of it"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_timeout(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Print all records; that some backend is broken, or none can be chosen, is no failure of this verb."""
    from lmcache.v1.platform.diagnosis import survey

    seen = survey(args.timeout)
    data = {
        "devices": seen.records,
        "selected": seen.selected,
        "why": seen.why,
        "error": seen.error,
        "remark": seen.remark,
    }
    problem = clean(f"no backend can be selected: {seen.error}") if seen.error else ""
    parts = (overview(seen.records), remedies(seen.records), problem, seen.remark)
    emit(args.format, data, paragraphs(*parts))
    return 0

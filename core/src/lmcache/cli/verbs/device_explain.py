"""``lmcache device explain``: why this backend, and why not the others."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcache.cli.args import add_format
from lmcache.cli.devices import add_timeout, paragraphs, settings, settings_text, source
from lmcache.cli.output import clean, emit, pairs

if TYPE_CHECKING:
    from lmcache.v1.platform.diagnosis import Survey

HELP = "say which device backend is used and why, and why not the others"


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_timeout(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if the settings and what is installed leave no choice."""
    from lmcache.v1.platform.diagnosis import survey

    seen = survey(args.timeout)
    others = [(r["name"], _why_not(r, seen)) for r in seen.records if r["state"] != "selected"]
    data = {
        "selected": seen.selected,
        "why": seen.why,
        "error": seen.error,
        "settings": settings(),
        "remark": seen.remark,
        "not_selected": [{"name": name, "why": why} for name, why in others],
        "devices": seen.records,
    }
    told = [_answer(seen), f"settings: {settings_text()}", *filter(None, [seen.remark])]
    emit(args.format, data, paragraphs("\n".join(told), "not selected:\n" + pairs(others) if others else ""))
    return 1 if seen.error else 0


def _answer(seen: Survey) -> str:
    if seen.error:
        return clean(f"no backend can be selected: {seen.error}")
    chosen = next(r for r in seen.records if r["state"] == "selected")
    return clean(f"selected: {chosen['name']} from {source(chosen)}, because {seen.why}")


def _why_not(record: Mapping[str, Any], seen: Survey) -> str:
    """One line for a backend that is not used."""
    parts = [record["state"], record["note"], record["remedy"]]
    if record["state"] == "available" and not seen.error:
        parts.append(
            f"{seen.selected} was taken; set LMCACHE_DEVICE_BACKEND={record['name']} to take this one"
        )
    return "; ".join(part for part in parts if part)

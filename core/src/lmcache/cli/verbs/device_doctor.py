"""``lmcache device doctor``: does each backend really work?"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import Any

from lmcache.cli.args import add_format
from lmcache.cli.devices import add_timeout, paragraphs, remedies, source
from lmcache.cli.output import duration, emit, table

HELP = "try every device backend in a process of its own"

#: A backend in one of these states is as it should be, here or for others; any other is a fault.
_SOUND = frozenset(["blocked", "unavailable", "available", "selected"])
_FAULTY_PROBES = frozenset(["probe-raised", "probe-crashed", "probe-timeout"])
_MARKS = {True: "ok", False: "FAILED", None: "skipped"}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the flags."""
    add_timeout(parser)
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Exit code 1 if any backend is faulty. That a device is not on this host is no fault."""
    from lmcache.v1.platform.diagnosis import examine

    records = [{**record, "sound": _is_sound(record)} for record in examine(args.timeout)]
    rows = [(r["name"], r["state"], source(r), _steps(r), _notes(r)) for r in records]
    sound = all(record["sound"] for record in records)
    verdict = "every backend is sound" if sound else _faults(records)
    text = paragraphs(table(("backend", "state", "from", "checks", "note"), rows), remedies(records), verdict)
    emit(args.format, {"devices": records, "sound": sound}, text)
    return 0 if sound else 1


def _is_sound(record: Mapping[str, Any]) -> bool:
    if record["state"] not in _SOUND or record["code"] in _FAULTY_PROBES:
        return False
    return all(check["ok"] is not False for check in record["checks"])


def _steps(record: Mapping[str, Any]) -> str:
    imported = record["import_seconds"]
    steps = [] if imported is None else [f"import {duration(imported)}"]
    return ", ".join([*steps, *(f"{check['check']} {_MARKS[check['ok']]}" for check in record["checks"])])


def _notes(record: Mapping[str, Any]) -> str:
    notes = [record["note"], *(check["note"] for check in record["checks"])]
    return "; ".join(note for note in notes if note)


def _faults(records: list[dict[str, Any]]) -> str:
    names = [record["name"] for record in records if not record["sound"]]
    return f"{len(names)} of {len(records)} not sound: {', '.join(names)}"

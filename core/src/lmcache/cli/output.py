"""What verbs print: text for people, or one JSON object for programs."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Mapping, Sequence

from lmcache.errors import LMCacheError


def write(text: str) -> None:
    """Print ``text`` and a newline now.

    Raises:
        BrokenPipeError: if the reader has left. LMCacheError: if the output cannot be written otherwise.
    """
    out = sys.stdout
    try:
        try:
            out.write(text + "\n")
        except UnicodeEncodeError:  # a name that this terminal has no characters for
            out.write(text.encode("ascii", "backslashreplace").decode("ascii") + "\n")
        out.flush()
    except BrokenPipeError:
        raise
    except OSError as exc:
        # Or Python tries once more at exit, with a traceback.
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115
        raise LMCacheError(f"standard output: cannot be written ({exc.strerror})") from None


def emit(form: str, data: Mapping[str, object], text: str) -> None:
    """Print ``data`` as one JSON object if ``form`` is "json", else ``text``."""
    if form == "json":
        import json

        text = json.dumps(data, default=str, allow_nan=False)
    write(text)


def pairs(rows: Iterable[tuple[str, object]]) -> str:
    """``name  value`` lines, the values in one column."""
    cells = [(name, clean(value)) for name, value in rows]
    width = max((len(name) for name, _ in cells), default=0)
    return "\n".join(f"{name:{width}}  {value}".rstrip() for name, value in cells)


def table(headers: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Columns below headers. A column whose every cell is a number is set to the right."""
    body = [list(row) for row in rows]
    cells = [list(headers)] + [[clean(value) for value in row] for row in body]
    widths = [max(len(line[i]) for line in cells) for i in range(len(headers))]
    right = [bool(body) and all(isinstance(row[i], int | float) for row in body) for i in range(len(headers))]
    lines = (
        "  ".join(
            f"{cell:{'>' if to_right else '<'}{width}}"
            for cell, width, to_right in zip(line, widths, right, strict=True)
        )
        for line in cells
    )
    return "\n".join(line.rstrip() for line in lines)


def clean(value: object) -> str:
    """``value`` as one line that moves no cursor: names come from other processes. ``-`` is nothing."""
    text = "yes" if value is True else "no" if value is False else "" if value is None else str(value)
    return "".join(c if c.isprintable() else repr(c)[1:-1] for c in text) or "-"


def size(nbytes: float) -> str:
    """``nbytes`` in the largest binary unit in which it is at least 1."""
    units = ("B", "KiB", "MiB", "GiB", "TiB")
    power = 0
    while nbytes >= 1024 and power < len(units) - 1:
        nbytes, power = nbytes / 1024, power + 1
    return f"{nbytes:.{2 if power else 0}f} {units[power]}"


def duration(secs: float) -> str:
    """``secs`` in µs, ms or s."""
    if secs < 1e-3:
        return f"{secs * 1e6:.0f} µs"
    return f"{secs * 1e3:.2f} ms" if secs < 1 else f"{secs:.2f} s"

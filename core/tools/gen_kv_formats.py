"""Write the SDK's table of KV formats from the layout table of the core.

    PYTHONPATH=core/src python core/tools/gen_kv_formats.py

A test compares the file in the tree with what ``header`` makes, so the two tables cannot drift apart.
"""

from __future__ import annotations

from pathlib import Path

from lmcache.v1.kv_layout import KVFormat, kv_formats

TARGET = Path(__file__).resolve().parents[1] / "src" / "lmcache" / "include" / "lmcache" / "kv_formats.h"

#: Rows from here on are registered by plugins and bring code of their own.
FIRST_PLUGIN_ID = 1000

_LETTERS = {"NL": "L", "NP": "N", "2": "2", "1": "", "NB": "B", "BS": "S", "PBS": "P", "T": "T"}
_LETTERS |= {"NH": "H", "HS": "W", "CS": "W"}

_BEGIN = """\
/* Made by core/tools/gen_kv_formats.py from lmcache.v1.kv_layout; do not edit.
 *
 * One row per KV format. `levels` are the lists that a tensor is nested in, outermost first, and `axes` those of
 * the tensor, by letter:
 *
 *   L layers            2 K and V             N planes of a layer, each of its own width
 *   B blocks            S slots per block     P slots of all blocks in one axis
 *   H heads             W elements per head and slot; where K and V lie side by side, of both
 *   T tokens, without blocks
 *
 * Axes of size one are left out.
 */
#ifndef LMCACHE_KV_FORMATS_H
#define LMCACHE_KV_FORMATS_H

#include "abi.h"

typedef struct lmc_format_row {
    int id;
    int whole_pages; /* 1: a page may be moved whole, but not cut */
    const char *name;
    const char *levels;
    const char *axes;
} lmc_format_row;

/* The row with this id, or a null pointer. */
LMC_HOST_FN const lmc_format_row *lmc_format(int id)
{
    static const lmc_format_row rows[] = {
"""

_END = """\
    };
    unsigned int at;
    for (at = 0; at < sizeof(rows) / sizeof(rows[0]); ++at)
        if (rows[at].id == id)
            return &rows[at];
    return 0;
}

#endif
"""


def _letters(symbols: tuple[str, ...]) -> str:
    return "".join(_LETTERS[symbol] for symbol in symbols)


def _row(row: KVFormat) -> str:
    axes = row.dims.axes
    if axes[-2:] == ("2", "HS"):  # a packed pair is one run, whatever the string calls its halves
        axes = (*axes[:-2], "CS")
    whole = int(not row.token_addressable)
    return (
        f'        {{{row.id}, {whole}, "{row.name}", "{_letters(row.dims.levels)}", "{_letters(axes)}"}},\n'
    )


def header() -> str:
    """The text of ``kv_formats.h``."""
    rows = [row for row in kv_formats() if row.id < FIRST_PLUGIN_ID]
    return _BEGIN + "".join(_row(row) for row in rows) + _END


if __name__ == "__main__":
    TARGET.write_text(header(), encoding="utf-8")

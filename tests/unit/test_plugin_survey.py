"""``lmcache plugins`` asks a child process, so a plugin that does not survive its import is one row."""

from __future__ import annotations

from pathlib import Path

import pytest

from helpers.wheels import write_distribution
from lmcache.v1.plugins.survey import survey

GOOD = """
from lmcache.v1.plugins import hookimpl

@hookimpl
def lmcache_observe(event, fields): ...
"""


@pytest.mark.parametrize(
    ("body", "fault"),
    [
        ("import os; os._exit(0)", "exit"),
        ("import os, signal; os.kill(os.getpid(), signal.SIGSEGV)", "SIGSEGV"),
        ("import time; time.sleep(600)", "no end after"),
    ],
    ids=["exits", "crashes", "hangs"],
)
def test_a_plugin_that_takes_its_process_along_is_one_row_of_the_survey(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, body: str, fault: str
) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delenv("LMCACHE_DISABLE_PLUGINS", raising=False)
    write_distribution(tmp_path, "bad-dist", {"bad": "bad_module"}, {"bad_module": body})
    write_distribution(tmp_path, "good-dist", {"good": "good_module"}, {"good_module": GOOD})
    rows = {row["name"]: row for row in survey(seconds=2.0)}
    assert rows["good"]["state"] == "loaded"
    assert rows["bad"]["state"] == "import-failed"
    assert fault in rows["bad"]["note"]

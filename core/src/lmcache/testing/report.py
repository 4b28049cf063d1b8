"""What a run of the kit found, as data: JSON, JUnit, and lines for people."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeAlias

__all__ = ["Report", "why_expected"]

Row: TypeAlias = "dict[str, str]"
"""``{"test": name, "why": text}``."""

_TITLES = (
    ("failed", "FAILED"),
    ("unexpected_passes", "PASSED though expected to fail"),
    ("stale_expectations", "EXPECTED to fail, and no test has that name"),
    ("expected_failures", "failed as expected"),
    ("unsupported", "unsupported"),
    ("not_shown", "not shown"),
)


def why_expected(expectations: Mapping[str, str], test: str) -> str | None:
    """The vendor's reason why ``test`` fails, or None; a name without parameters stands for all of them."""
    return expectations.get(test, expectations.get(test.partition("[")[0]))


@dataclass
class Report:
    """One run against one backend. Lists of faults and the like hold ``{"test": name, "why": text}``."""

    backend: str
    level: str
    only: str = ""
    """The expression that chose tests; empty: all were to run."""
    source: str = ""
    """Distribution and version."""
    lmcache: str = ""
    torch: str = ""
    declared: list[str] = field(default_factory=list)
    faults: dict[str, str] = field(default_factory=dict)
    """Declarations that raised."""
    passed: list[str] = field(default_factory=list)
    failed: list[Row] = field(default_factory=list)
    unsupported: list[Row] = field(default_factory=list)
    """Tests of what the backend does not declare."""
    not_shown: list[Row] = field(default_factory=list)
    """Tests that ran and could see nothing either way, as on a device that is done before the host looks."""
    expected_failures: list[Row] = field(default_factory=list)
    """Tests that failed, and of which the vendor said so."""
    unexpected_passes: list[Row] = field(default_factory=list)
    """Tests that passed although the vendor expects them to fail: drop the expectation."""
    stale_expectations: list[Row] = field(default_factory=list)
    """Expectations of which the kit has no test."""
    expectations: dict[str, str] = field(default_factory=dict)
    """What the vendor expects to fail: test name to reason."""
    figures: dict[str, float] = field(default_factory=dict)
    """Measured ratios and rates; they fail nothing."""
    error: str = ""
    """Why the run could not begin."""
    running: str = ""
    """The test that was under way when the run ended, if it did not end by itself."""
    finished: bool = False
    seconds: float = 0.0
    durations: dict[str, float] = field(default_factory=dict)
    """Seconds of each test, set-up and end included."""

    @property
    def ok(self) -> bool:
        """Whether the backend conforms at this level."""
        faults = self.failed or self.unexpected_passes or self.stale_expectations
        return self.finished and bool(self.passed) and not faults and not self.error

    def settled(self) -> set[str]:
        """The tests that have an outcome."""
        rows = [row for name, _ in _TITLES for row in getattr(self, name)]
        return {*self.passed, *(row["test"] for row in rows)}

    def died(self, why: str) -> None:
        """File that the process ended in the test that was under way."""
        test, self.running = self.running or "the beginning of the run", ""
        expected = why_expected(self.expectations, test)
        rows = self.failed if expected is None else self.expected_failures
        rows.append({"test": test, "why": why if expected is None else f"{expected} ({why})"})

    def save(self, path: Path) -> None:
        """Write as JSON, all or nothing: a run that dies leaves what it had found."""
        scratch = path.with_name(f".{path.name}.part")
        scratch.write_text(self.json(), encoding="utf-8")
        scratch.replace(path)

    def json(self) -> str:
        """All of it, as JSON."""
        return json.dumps(self.as_dict(), indent=2) + "\n"

    def as_dict(self) -> dict[str, Any]:
        """The fields, and ``ok``."""
        return {"ok": self.ok, **asdict(self)}

    @classmethod
    def load(cls, path: Path) -> Report:
        """What :meth:`save` wrote."""
        data: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        data.pop("ok", None)
        return cls(**data)

    def lines(self) -> Iterator[str]:
        """For people."""
        for name, title in _TITLES:
            for row in getattr(self, name):
                yield f"{title}: {row['test']}: {row['why']}"
        for name, value in self.figures.items():
            yield f"measured: {name}: {value:.2f}"
        if not self.finished:
            yield f"FAILED: the run did not come to its end; it was in {self.running or 'its beginning'}"
        counts = [f"{len(self.passed)} passed", f"{len(self.failed)} failed"]
        counts += [f"{len(self.unsupported)} unsupported", f"{len(self.not_shown)} not shown"]
        counts += [f"{len(self.expected_failures)} failed as expected"]
        verdict = "conforms" if self.ok else "does NOT conform"
        if self.only and self.ok:
            verdict = "passes what --only names"
        told = f"{self.backend} ({self.source}) {verdict} at level {self.level}"
        yield f"{told}: {', '.join(counts)} in {self.seconds:.0f} s"

    def junit(self) -> str:
        """JUnit XML. What is unsupported, not shown or failed as expected is a skipped test there."""
        kinds = {
            "failed": "failure", "unexpected_passes": "failure", "stale_expectations": "failure",
            "expected_failures": "skipped", "unsupported": "skipped", "not_shown": "skipped",
        }  # fmt: skip
        rows = [
            (row["test"], kinds[name], title, row["why"])
            for name, title in _TITLES
            for row in getattr(self, name)
        ]
        if not self.finished:
            rows.append((self.running or "the run", "failure", "FAILED", "did not come to its end"))
        cases = [(test, "", "", "") for test in self.passed] + rows
        suite = ElementTree.Element(
            "testsuite",
            name=f"lmcache device verify {self.backend} --level {self.level}",
            tests=str(len(cases)),
            failures=str(sum(kind == "failure" for _, kind, _, _ in cases)),
            skipped=str(sum(kind == "skipped" for _, kind, _, _ in cases)),
            errors="0",
            time=str(self.seconds),
        )
        for test, kind, title, why in cases:
            module, _, name = test.partition(".")
            case = ElementTree.SubElement(suite, "testcase", classname=module, name=name or test)
            case.set("time", str(self.durations.get(test, 0.0)))
            if kind:
                ElementTree.SubElement(case, kind, message=_printable(f"{title}: {why}"))
        return ElementTree.tostring(suite, encoding="unicode", xml_declaration=True) + "\n"


def _printable(text: str) -> str:
    """XML has no place for control characters, not even escaped."""
    return "".join(c if c.isprintable() else " " for c in text)

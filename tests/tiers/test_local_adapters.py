"""The conformance suite on adapters that need no server, and on adapters that do wrong, which it must find."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path

import pytest

from helpers.server import run_python
from helpers.wheels import ROOT
from lmcache.testing.adapters import AdapterConformance, run
from lmcache.v1.storage.accounts import Accounts
from lmcache.v1.storage.l2.adapter import Call, Held, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.envelope import unpack
from lmcache.v1.storage.l2.fault import FaultAdapter, FaultOptions
from lmcache.v1.storage.l2.registry import build


class TestDisk(AdapterConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = str(tmp_path / "objects")

    def make(self) -> StorageAdapter:
        return build({"type": "disk", "path": self.path, "max_gb": 1})


class TestSharedDirectory(AdapterConformance):
    persistent = True

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path) -> None:
        self.path = str(tmp_path)

    def make(self) -> StorageAdapter:
        return build({"type": "shared_fs", "path": self.path})


class TestFault(AdapterConformance):
    """Without a fault it is memory that does right."""

    def make(self) -> StorageAdapter:
        return build({"type": "fault"})


class TestSample(AdapterConformance):
    """``examples/lmcache-storage-example``, which takes the suite to itself in its own tests, too."""

    persistent = True

    @pytest.fixture(autouse=True)
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.syspath_prepend(str(ROOT / "examples" / "lmcache-storage-example" / "src"))
        self.spec = {"type": "sqlite", "path": str(tmp_path / "objects.db")}

    def make(self) -> StorageAdapter:
        from lmcache_storage_example.plugin import lmcache_storage_adapters

        return build(self.spec, lmcache_storage_adapters())


# ---- without pytest, and on adapters that do wrong


def test_the_suite_runs_without_pytest_and_finds_no_fault_in_a_right_adapter() -> None:
    outcomes = list(run(FaultAdapter, largest=200_000))
    assert [str(outcome) for outcome in outcomes if outcome.fault] == []
    assert len(outcomes) == sum(name.startswith("test_") for name in vars(AdapterConformance))


class _WritesLate(FaultAdapter):
    """Fills payloads of earlier loads again."""

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        for earlier in getattr(self, "earlier", ()):
            earlier.payload[-1] = 7
        self.earlier = list(wants)
        return super().load(wants, call)


class _WritesBeside(FaultAdapter):
    """Rounds the end of a payload up, as one does who reads whole blocks."""

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        for want in wants:
            whole = want.payload.obj
            assert isinstance(whole, bytearray)
            whole[-1] = 7
        return super().load(wants, call)


class _KeepsTheCallersMemory(FaultAdapter):
    """Stores a view in place of the bytes."""

    def __init__(self) -> None:
        super().__init__()
        self.views: dict[bytes, Put] = {}

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        self.views |= {put.key: put for put in objects}
        return super().store(objects, call)

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        answers = super().load(wants, call)
        for want, answer in zip(wants, answers, strict=True):
            if answer is not None:
                want.payload[:] = self.views[want.key].payload
        return answers


class _CountsWrong(FaultAdapter):
    """Forgets to take what was removed from its books."""

    def usage(self) -> Usage:
        return super().usage()._replace(objects=3)


class _IgnoresQuotas(FaultAdapter):
    """Keeps good books, and stores whatever comes."""

    quotas: dict[str, int]

    def __init__(self) -> None:
        super().__init__()
        self.quotas = {}

    def accounts(self) -> Accounts:
        books = Accounts(self.quotas)
        for held in self.scan():
            books.take(str(held.account), held.size)
            books.published(str(held.account))
        return books

    def scan(self) -> Iterator[Held]:
        for held in super().scan():
            yield held._replace(account=unpack(self.objects[held.key].header).account)


class _ForgetsAccounts(_IgnoresQuotas):
    """Tells nobody's account after a restart."""

    def scan(self) -> Iterator[Held]:
        return (held._replace(account="") for held in super().scan())


class _NeverLooks(FaultAdapter):
    """Goes on after the call is over, an object at a time."""

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        self._released.wait(0.05 if not call.over else 2.5)
        return super().store(objects, call)


ONE_FAULT = (
    "error", "wrong_answer", "miss", "phantom", "short", "empty", "wrong_bytes", "wrong_object", "lost", "torn"
)  # fmt: skip
CLASSES = (
    _WritesLate,
    _WritesBeside,
    _KeepsTheCallersMemory,
    _CountsWrong,
    _IgnoresQuotas,
    _ForgetsAccounts,
    _NeverLooks,
)
WRONG: dict[str, Callable[[], StorageAdapter]] = {
    **{name: partial(FaultAdapter, FaultOptions(**{name: 1.0})) for name in ONE_FAULT},
    **{kind.__name__: kind for kind in CLASSES},
}


@pytest.mark.parametrize("fault", WRONG)
def test_the_suite_finds_what_an_adapter_does_wrong(fault: str) -> None:
    found = next(
        (outcome for outcome in run(WRONG[fault], seconds=2.0, largest=100_000) if outcome.fault), None
    )
    assert found, f"an adapter with {fault} passed"
    assert "\n" not in str(found)
    assert ("its quota" in found.name.replace("_", " ")) == ("Quotas" in fault or "Accounts" in fault)


def test_the_suite_needs_no_package_of_an_engine() -> None:
    done = run_python("import sys, lmcache.testing.adapters; print(*sys.modules)")
    assert done.returncode == 0, done.stderr
    assert not {"redis", "obstore", "mooncake", "torch"} & set(done.stdout.split())

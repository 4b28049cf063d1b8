"""Two hosts in one: network namespaces with servers in them, joined to each other and to the test by veth pairs."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import pytest

from helpers.server import RunningServer, running_server


@dataclass(frozen=True)
class Host:
    """A network namespace. ``near`` is its address for the test, ``far`` that for the other host."""

    name: str
    near: str
    far: str

    @property
    def prefix(self) -> tuple[str, ...]:
        """What makes a command run there."""
        return ("ip", "netns", "exec", self.name)

    @contextmanager
    def server(self, *flags: str, l1_gb: float = 0.05, port: int = 0) -> Iterator[RunningServer]:
        """A server there; its addresses are those for the test."""
        everywhere = ("--host", "0.0.0.0", "--http-host", "0.0.0.0")
        fixed = ("--port", str(port)) if port else ()
        with running_server(*everywhere, *fixed, *flags, l1_gb=l1_gb, prefix=self.prefix) as server:
            for name in ("address", "http"):
                server.ready[name] = str(server.ready[name]).replace("0.0.0.0", self.near)
            yield server


def _ip(*words: str) -> None:
    done = subprocess.run(["ip", *words], capture_output=True, text=True, timeout=20)
    if done.returncode:
        raise OSError(f"ip {' '.join(words)}: {done.stderr.strip()}")


def _veth(ends: Sequence[tuple[str, str, str]]) -> None:
    """A pair of (interface, address, namespace or nothing)."""
    (first, _, _), (second, _, _) = ends
    _ip("link", "add", first, "type", "veth", "peer", "name", second)
    for link, address, space in ends:
        within = ("-n", space) if space else ()
        if space:
            _ip("link", "set", link, "netns", space)
        _ip(*within, "addr", "add", f"{address}/30", "dev", link)
        _ip(*within, "link", "set", link, "up")


@contextmanager
def two_hosts() -> Iterator[tuple[Host, Host]]:
    """Skips where the kernel grants no namespaces: not root, or a container without the right."""
    if os.geteuid() or shutil.which("ip") is None:
        pytest.skip("needs root and iproute2 to make network namespaces")
    pid = os.getpid()
    tag, net = f"{pid:x}", f"10.{pid >> 8 & 255}.{pid & 255}"
    hosts = (Host(f"lmc-a-{tag}", f"{net}.2", f"{net}.9"), Host(f"lmc-b-{tag}", f"{net}.6", f"{net}.10"))
    with ExitStack() as end:
        try:
            for host in hosts:
                _ip("netns", "add", host.name)
                end.callback(_ip, "netns", "del", host.name)
                _ip("-n", host.name, "link", "set", "lo", "up")
            _veth([(f"la{tag}", f"{net}.1", ""), (f"ra{tag}", hosts[0].near, hosts[0].name)])
            _veth([(f"lb{tag}", f"{net}.5", ""), (f"rb{tag}", hosts[1].near, hosts[1].name)])
            _veth([(f"ma{tag}", hosts[0].far, hosts[0].name), (f"mb{tag}", hosts[1].far, hosts[1].name)])
            for host, here in zip(hosts, (f"{net}.1", f"{net}.5"), strict=True):
                # Engines such as UCX choose themselves which address of a host they use.
                _ip("route", "add", f"{host.far}/32", "via", host.near)
                _ip("-n", host.name, "route", "add", "default", "via", here)
        except OSError as exc:
            pytest.skip(f"the kernel grants no network namespaces: {exc}")
        yield hosts

"""Payload by NIXL: a pusher writes into the memory that its peer reserved, over RDMA, shared memory or TCP (UCX).

Agents know each other by ``get_agent_metadata`` and plain integers; nothing of NIXL that is a pickle is made or read.
Only the writer loads its peer's metadata, so a server reads nothing of NIXL's that a client sent. An agent's own
progress thread would keep a core busy for ever: here agents make progress while there is something to wait for.
"""

from __future__ import annotations

import importlib
import importlib.util
import logging
import os
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from lmcache.errors import LMCacheError
from lmcache.logging import init_logger, warn_once
from lmcache.v1.protocol.peer import Region
from lmcache.v1.storage.shm_pool import PoolView

logger = init_logger(__name__)

INSTALL = "pip install --no-deps nixl-cu12 numpy"
_MODULES = ("nixl_cu12", "nixl_cu13", "nixl")
_INFINIBAND = Path("/sys/class/infiniband")
_PROGRESS_SECONDS = 50e-6
_MOST_SECONDS = 1e-3
_IDLE_SECONDS = 0.5


class NixlError(LMCacheError):
    """NIXL is not there, or failed. One line for people."""


def missing() -> str:
    """Why NIXL cannot be used here; empty if its package is there. Imports nothing."""
    if any(importlib.util.find_spec(name) for name in _MODULES):
        return ""
    return f"nixl-cu12 is not installed; {INSTALL}"


def _load() -> Any:
    if why := missing():
        raise NixlError(why)
    name = next(name for name in _MODULES if importlib.util.find_spec(name))
    raises = logging.raiseExceptions
    try:
        module = importlib.import_module(name)
    except Exception as exc:  # what a vendor's loader may raise is not ours to know
        raise NixlError(f"{name} cannot be imported: {type(exc).__name__}: {exc}") from None
    finally:
        logging.raiseExceptions = raises  # it sets that for the whole process
    theirs = logging.getLogger("nixl")  # it writes to standard output, where a server says that it is ready
    for handler in theirs.handlers:
        if isinstance(handler, logging.StreamHandler) and handler.stream is sys.stdout:
            handler.setStream(sys.stderr)
    if "NIXL_LOG_LEVEL" not in os.environ:
        theirs.setLevel(logging.WARNING)
    return module


@contextmanager
def _ucx_settings() -> Iterator[None]:
    """What UCX is to be told unless the operator has; it reads its variables once, as it is loaded.

    It would write to standard output, and try for two minutes to reach an address that drops packets: with one
    retransmission it is three seconds. Without a device of its kind the InfiniBand module stays out: with nixl-cu12
    1.5.1 a process that has loaded it beside the system's libnl ends in a segmentation fault.
    """
    wanted = {"UCX_LOG_FILE": "stderr", "UCX_TCP_SYN_CNT": "1"}
    if not (_INFINIBAND.is_dir() and any(_INFINIBAND.iterdir())):
        wanted["UCX_MODULES"] = "^ib"
    new = {name: value for name, value in wanted.items() if name not in os.environ}
    os.environ.update(new)
    try:
        yield
    finally:
        for name in new:
            del os.environ[name]


class Agent:
    """A NIXL agent with the UCX backend, safe to share by threads.

    Raises:
        NixlError: if there is none to be had.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        with _ucx_settings():
            module = _load()
            try:
                config = module.nixl_agent_config(enable_prog_thread=False, backends=["UCX"])
                self._agent: Any = module.nixl_agent(f"lmcache-{secrets.token_hex(8)}", config)
            except Exception as exc:
                raise NixlError(f"NIXL agent: {type(exc).__name__}: {exc}") from None
        if "UCX" not in self._agent.backends:
            raise NixlError("NIXL agent: its UCX backend is not there")

    def register(self, base: int, length: int) -> Any:
        """Make host memory known; what :meth:`forget` takes.

        Raises:
            NixlError: if it cannot be registered.
        """
        with self._lock:
            return _tried("memory", lambda: self._agent.register_memory([(base, length, 0, "")], "DRAM"))

    def forget(self, registered: Any) -> None:
        """Undo :meth:`register`."""
        with self._lock:
            _tried("memory", lambda: self._agent.deregister_memory(registered))

    def metadata(self) -> bytes:
        """What another agent loads to write to the memory registered here."""
        with self._lock:
            return bytes(_tried("metadata", self._agent.get_agent_metadata))

    def meet(self, metadata: bytes) -> str:
        """Load another agent's metadata; its name."""
        with self._lock:
            name = _tried("the peer's metadata", lambda: self._agent.add_remote_agent(metadata))
        return name.decode() if isinstance(name, bytes) else str(name)

    def part(self, name: str) -> None:
        """Forget another agent."""
        with self._lock:
            _tried("the peer", lambda: self._agent.remove_remote_agent(name))

    def progress(self) -> None:
        """Let what arrives arrive."""
        with self._lock:
            _tried("progress", self._agent.get_new_notifs)

    def start(
        self, name: str, local: Sequence[tuple[int, int]], remote: Sequence[tuple[int, int]]
    ) -> Transfer:
        """Write ``local`` ranges (address, bytes) to ``remote`` ones of agent ``name``."""
        with self._lock:
            agent = self._agent

            def post() -> Transfer:
                ours = agent.get_xfer_descs([(*pair, 0) for pair in local], "DRAM")
                theirs = agent.get_xfer_descs([(*pair, 0) for pair in remote], "DRAM")
                handle = agent.initialize_xfer("WRITE", ours, theirs, name)
                return Transfer(self, handle, agent.transfer(handle))

            found: Transfer = _tried("write", post)
            return found

    def check(self, handle: Any) -> str:
        with self._lock:
            return str(self._agent.check_xfer_state(handle))

    def release(self, handle: Any) -> None:
        with self._lock:
            self._agent.release_xfer_handle(handle)

    def close(self) -> None:
        """Let go of the agent. Nothing may be under way."""
        with self._lock:
            self._agent = None


class Transfer:
    """A write under way."""

    def __init__(self, agent: Agent, handle: Any, state: str) -> None:
        self._agent, self._handle, self._state = agent, handle, state

    def wait(self, until: Callable[[], bool]) -> bool:
        """Wait till it is over, or ``until`` says to stop; whether it is.

        Raises:
            NixlError: if it failed.
        """
        pause = _PROGRESS_SECONDS
        while self._state == "PROC" and not until():
            self._state = _tried("write", lambda: self._agent.check(self._handle))
            if self._state == "PROC":
                time.sleep(pause)
                pause = min(pause * 1.2, _MOST_SECONDS)
        if self._state == "ERR":
            raise NixlError("NIXL write: failed")
        return self._state == "DONE"

    def end(self) -> bool:
        """Let go of it, cancelling it if it is under way; False if it cannot be cancelled now."""
        try:
            self._agent.release(self._handle)
        except Exception:
            return False
        return True


def _tried(what: str, call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as exc:  # the binding's exceptions differ by version
        raise NixlError(f"NIXL {what}: {type(exc).__name__}: {exc}") from None


class Target:
    """The pool of a server, registered for peers to write to.

    Args:
        needed: whether anybody may be writing now. Called without the server's lock.

    Raises:
        NixlError: if NIXL is not there or refuses the memory.
    """

    def __init__(self, view: PoolView, needed: Callable[[], bool]) -> None:
        self._agent = Agent()
        self._view = view  # the memory must outlive the agent
        self._registered = self._agent.register(view.address, view.data_bytes)
        self.region = Region(agent=self._agent.metadata(), base=view.address, length=view.data_bytes)
        self._needed = needed
        self._awake = threading.Event()
        self._stop = False
        self._thread = threading.Thread(target=self._run, name="lmcache-nixl", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """Somebody is about to write."""
        self._awake.set()

    def _run(self) -> None:
        idle_since = time.monotonic()
        while not self._stop:
            try:
                self._agent.progress()
            except NixlError as exc:
                warn_once(logger, "progress", "peers' writes may not arrive: %s", exc)
            if self._needed():
                idle_since = time.monotonic()
            if time.monotonic() - idle_since < _IDLE_SECONDS:
                time.sleep(_PROGRESS_SECONDS)
            else:
                self._awake.clear()
                self._awake.wait(_IDLE_SECONDS)
                if self._awake.is_set():
                    idle_since = time.monotonic()

    def close(self) -> None:
        """Nobody writes any more."""
        self._stop = True
        self._awake.set()
        self._thread.join(5)
        self._agent.forget(self._registered)
        self._agent.close()

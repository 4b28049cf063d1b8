"""Descriptors between processes: to whom they go, and what becomes of them when somebody ends."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from lmcache.errors import ConfigError, DeviceError
from lmcache_cuda import fd_socket
from lmcache_cuda.fd_socket import FdServer, fetch


@pytest.fixture
def server(tmp_path: Path) -> Iterator[FdServer]:
    made = FdServer(str(tmp_path))
    yield made
    made.close()


def memory(content: bytes) -> int:
    fd = os.memfd_create("test")
    os.write(fd, content)
    return fd


CHILD = """
import os, sys
from lmcache_cuda.fd_socket import fetch
fd, connection = fetch(sys.argv[1], bytes.fromhex(sys.argv[2]))
print(os.pread(fd, 100, 0).decode())
os.pwrite(fd, b"back", 0)
"""


def test_another_process_gets_the_very_memory(server: FdServer) -> None:
    fd = memory(b"hello")
    token = server.offer(os.dup(fd))
    child = subprocess.run(
        [sys.executable, "-c", CHILD, server.path, token.hex()], capture_output=True, text=True
    )
    assert child.stdout.strip() == "hello", child.stderr
    assert os.pread(fd, 5, 0) == b"backo"
    os.close(fd)


def test_only_the_token_gets_it_and_only_until_it_is_withdrawn(server: FdServer) -> None:
    token = server.offer(memory(b"x"))
    for wrong in (b"", bytes(16), token[:8], token + b"\0"):
        with pytest.raises(DeviceError):
            fetch(server.path, wrong)
    fd, connection = fetch(server.path, token)
    os.close(fd)
    connection.close()
    server.withdraw(token)
    server.withdraw(token)
    with pytest.raises(DeviceError, match="does not share this any more"):
        fetch(server.path, token)


def test_the_socket_is_the_users_own_and_goes_with_the_process(tmp_path: Path) -> None:
    code = (
        "import os; from lmcache_cuda import fd_socket; s = fd_socket.server(); "
        "print(s.path); print(oct(os.stat(s.path).st_mode))"
    )
    child = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    path, mode = child.stdout.split()
    assert mode == "0o140600"
    assert not os.path.exists(path)
    assert not os.path.exists(os.path.dirname(path))


@pytest.mark.parametrize(("user", "mine", "fits"), [(7, 7, True), (0, 7, True), (8, 7, False), (7, 0, True)])
def test_another_users_process_is_refused(user: int, mine: int, fits: bool) -> None:
    if fits:
        fd_socket.check_user(user, mine)
    else:
        with pytest.raises(DeviceError, match="is of user 8: expected 7"):
            fd_socket.check_user(user, mine)


def test_the_connection_ends_when_the_exporter_does(tmp_path: Path) -> None:
    code = (
        "import os, sys; from lmcache_cuda.fd_socket import FdServer; s = FdServer(sys.argv[1]);"
        "fd = os.memfd_create('x'); print(s.path, s.offer(fd).hex(), flush=True); sys.stdin.read()"
    )
    child = subprocess.Popen(
        [sys.executable, "-c", code, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert child.stdout is not None
    path, token = child.stdout.readline().split()
    fd, connection = fetch(path, bytes.fromhex(token))
    connection.settimeout(0)
    with pytest.raises(BlockingIOError):
        connection.recv(1)
    child.kill()
    child.communicate()
    connection.settimeout(30)
    assert connection.recv(1) == b""
    os.close(fd)
    connection.close()


def test_a_folder_that_cannot_be_used_is_named_with_its_variable(tmp_path: Path) -> None:
    with pytest.raises(
        ConfigError, match=r"LMCACHE_CUDA_IPC_DIR=.*expected a folder in which this process may make"
    ):
        FdServer(str(tmp_path / "missing"))


def test_a_socket_that_is_not_there_is_an_error_that_names_the_folder_s_variable(tmp_path: Path) -> None:
    with pytest.raises(DeviceError, match="LMCACHE_CUDA_IPC_DIR must name a folder that both"):
        fetch(str(tmp_path / "none.sock"), bytes(16))


def test_nothing_stays_open_behind_hundreds_of_fetches(server: FdServer) -> None:
    token = server.offer(memory(b"x"))
    fd, connection = fetch(server.path, token)
    os.close(fd)
    connection.close()
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(300):
        fd, connection = fetch(server.path, token)
        os.close(fd)
        connection.close()
    gc.collect()
    # A thread of the server may have the last few connections in hand.
    assert len(os.listdir("/proc/self/fd")) < before + 50


def test_a_server_that_was_out_of_descriptors_serves_again(
    server: FdServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    token, failed = server.offer(memory(b"x")), threading.Event()
    real = server._socket

    class Exhausted:
        """The listening socket, in a process that has no descriptor left for three importers."""

        left = 3

        def accept(self) -> Any:
            peer, address = real.accept()
            if self.left:
                self.left -= 1
                if not self.left:
                    failed.set()
                peer.close()
                raise OSError(errno.EMFILE, "Too many open files")
            return peer, address

        def __getattr__(self, name: str) -> Any:
            return getattr(real, name)

    monkeypatch.setattr(fd_socket, "_PAUSE", 0.0)
    server._socket = Exhausted()
    while not failed.is_set():  # the thread may have been in the real one's accept already
        with contextlib.suppress(DeviceError):
            fd, connection = fetch(server.path, token)
            os.close(fd)
            connection.close()
    fd, connection = fetch(server.path, token)
    assert os.pread(fd, 1, 0) == b"x"
    os.close(fd)
    connection.close()


def test_the_server_s_thread_ends_with_it(tmp_path: Path) -> None:
    before = set(threading.enumerate())
    made = FdServer(str(tmp_path))
    (thread,) = set(threading.enumerate()) - before
    made.close()
    thread.join(60)
    assert not thread.is_alive()


def test_the_token_is_shown_to_the_named_process_alone(server: FdServer) -> None:
    token = server.offer(memory(b"x"))
    with pytest.raises(DeviceError, match=rf"is {os.getpid()}: expected 1, which the descriptor names"):
        fetch(server.path, token, 1)
    fd, connection = fetch(server.path, token, os.getpid())
    os.close(fd)
    connection.close()


@pytest.mark.parametrize("answer", [b"+", b"", b"junk"])
def test_a_socket_that_sends_no_descriptor_is_refused(tmp_path: Path, answer: bytes) -> None:
    path = str(tmp_path / "liar.sock")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as liar:
        liar.bind(path)
        liar.listen(1)

        def lie() -> None:
            peer, _ = liar.accept()
            with peer:
                peer.recv(16)
                peer.send(answer)

        thread = threading.Thread(target=lie)
        thread.start()
        with pytest.raises(DeviceError, match="no descriptor came; the exporter has ended"):
            fetch(path, bytes(16))
        thread.join(60)


def test_the_end_of_an_offer_waits_for_no_lock_of_the_making_of_a_server() -> None:
    """The garbage collector ends offers anywhere, so also while this very thread makes or looks up the server."""
    token = fd_socket.server().offer(memory(b"x"))
    done = threading.Thread(target=fd_socket.withdraw, args=(token,))
    with fd_socket._LOCK:
        done.start()
        done.join(60)
        assert not done.is_alive()
    with pytest.raises(DeviceError, match="does not share this any more"):
        fetch(fd_socket.server().path, token)


KILLED = """
import os, signal, sys
from lmcache_cuda.fd_socket import FdServer
server = FdServer(sys.argv[1] or None)
print(server.path, flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize("own", [True, False])
def test_the_socket_of_a_process_that_was_killed_is_removed_by_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: bool
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    folder = "" if own else str(tmp_path)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}

    def killed() -> str:
        done = subprocess.run(
            [sys.executable, "-c", KILLED, folder], capture_output=True, text=True, env=environment
        )
        assert done.returncode == -signal.SIGKILL, done.stderr
        return done.stdout.strip()

    living = FdServer(folder or None)
    old, young = killed(), killed()
    for path in (old, living.path):
        os.utime(path, (1, 1))
    after = FdServer(folder or None)
    assert not os.path.exists(old)
    assert not own or not os.path.exists(os.path.dirname(old))
    assert os.path.exists(young), "it may be about to listen"
    assert os.path.exists(living.path)
    for server in (after, living):
        server.close()

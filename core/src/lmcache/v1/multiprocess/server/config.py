"""What an operator may set, checked as a whole before anything is bound or allocated."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Sequence

import msgspec

from lmcache.errors import ConfigError
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.storage.policies import BUILT_IN

POLICIES = tuple(BUILT_IN)
SHM_MODES = ("auto", "off")
_GRANULE = 16
_MIN_L1_BYTES = 1 << 20
_MAX_L1_GIB = 1 << 30

FLAGS: tuple[tuple[str, type, str], ...] = (
    ("host", str, "address of the request port (127.0.0.1)"),
    ("port", int, "request port (5555; 0 picks a free one)"),
    ("http-host", str, "address of the HTTP port (127.0.0.1)"),
    ("http-port", int, "HTTP port: /healthcheck /status /metrics (8080; 0 picks a free one)"),
    ("l1-size-gb", float, "size of L1 in GiB of shared memory, reserved in full at start (required)"),
    ("eviction-policy", str, f"one of {', '.join(POLICIES)}, or what a plugin offers (ARC)"),
    ("eviction-trigger-watermark", float, "fraction of L1 above which a store evicts first (0.95)"),
    ("eviction-ratio", float, "fraction of L1 that such an eviction frees (0.05)"),
    ("chunk-size", int, "tokens per stored chunk, a multiple of the engine's block size (256)"),
    ("supported-transfer-mode", str, "auto, engine_driven or lmcache_driven (auto)"),
    ("shm", str, f"one of {', '.join(SHM_MODES)}: may clients on this host map L1? (auto)"),
    ("shm-name", str, "name L1 as a segment in /dev/shm instead of an anonymous memfd"),
    ("shm-socket", str, "path of the Unix socket that hands out L1's descriptor (an abstract one)"),
    ("session-timeout", float, "seconds of silence after which a client counts as gone (30)"),
)


class ServerConfig(msgspec.Struct, kw_only=True, frozen=True):
    """Settings of ``lmcache server``; each is a flag of the same name."""

    host: str = "127.0.0.1"
    port: int = 5555
    http_host: str = "127.0.0.1"
    http_port: int = 8080
    l1_size_gb: float = 0.0
    """Size of L1 in GiB (2**30 bytes). Required: there is no size that fits everybody."""
    eviction_policy: str = "ARC"
    eviction_trigger_watermark: float = 0.95
    eviction_ratio: float = 0.05
    chunk_size: int = 256
    """Tokens per stored chunk."""
    supported_transfer_mode: str = "auto"
    shm: str = "auto"
    """auto: clients on this host map the pool; off: payload travels in frames only."""
    shm_name: str = ""
    """Name of a segment in /dev/shm; empty: an anonymous memfd, which leaves no name behind."""
    shm_socket: str = ""
    """Unix socket that hands out the pool's descriptor; empty: an abstract one, which leaves no file."""
    session_timeout: float = 30.0
    """Seconds of silence after which a client counts as gone."""

    @property
    def l1_bytes(self) -> int:
        return int(self.l1_size_gb * (1 << 30))

    def check(self, policies: Sequence[str] = POLICIES, hint: str = "") -> None:
        """Validate every value.

        Args:
            policies: names of the eviction policies there are.
            hint: why there are no others, for the message.

        Raises:
            ConfigError: one line that names the flag, its value, what was expected and the remedy.
        """
        for name, port in (("--port", self.port), ("--http-port", self.http_port)):
            if not 0 <= port <= 65535:
                raise ConfigError(f"{name} {port}: expected 0..65535 (0 picks a free port)")
        if self.port and self.port == self.http_port and self.host == self.http_host:
            raise ConfigError(f"--http-port {self.http_port}: the same as --port; choose another")
        for name, host in (("--host", self.host), ("--http-host", self.http_host)):
            if not host.strip():
                raise ConfigError(
                    f"{name} {host!r}: expected an address of this host, e.g. 127.0.0.1 or 0.0.0.0"
                )
        if not 0 < self.l1_size_gb <= _MAX_L1_GIB:
            raise ConfigError(
                f"--l1-size-gb {self.l1_size_gb:g}: expected a positive number of GiB, e.g. --l1-size-gb 10"
            )
        if self.l1_bytes < _MIN_L1_BYTES:
            least = f"{_MIN_L1_BYTES / 2**30:g} GiB (1 MiB)"
            raise ConfigError(f"--l1-size-gb {self.l1_size_gb:g}: expected at least {least}")
        if self.eviction_policy not in policies:
            lower = {name.lower(): name for name in policies}
            close = difflib.get_close_matches(self.eviction_policy.lower(), lower, 1)
            meant = f"; did you mean {lower[close[0]]}?" if close else ""
            raise ConfigError(
                f"--eviction-policy {self.eviction_policy!r}: expected one of {', '.join(policies)}"
                f"{meant}{hint}"
            )
        if not 0 < self.eviction_trigger_watermark <= 1:
            raise ConfigError(
                f"--eviction-trigger-watermark {self.eviction_trigger_watermark:g}: expected a fraction of L1"
                " within (0, 1], e.g. 0.95"
            )
        if not 0 <= self.eviction_ratio < self.eviction_trigger_watermark:
            raise ConfigError(
                f"--eviction-ratio {self.eviction_ratio:g}: expected a fraction of L1 from 0 up to the"
                f" watermark {self.eviction_trigger_watermark:g}, e.g. 0.05"
            )
        if self.chunk_size <= 0 or self.chunk_size % _GRANULE:
            raise ConfigError(
                f"--chunk-size {self.chunk_size}: expected a positive multiple of {_GRANULE} tokens, or no"
                " engine's block size divides it; e.g. 256"
            )
        mode = MPTransferMode.parse(self.supported_transfer_mode, source="--supported-transfer-mode")
        if mode is MPTransferMode.LMCACHE_DRIVEN and importlib.util.find_spec("torch") is None:
            raise ConfigError(
                "--supported-transfer-mode lmcache_driven: needs torch, which is not installed here;"
                " pip install lmcache[cpu] or a device wheel, or use engine_driven"
            )
        if self.shm not in SHM_MODES:
            raise ConfigError(f"--shm {self.shm!r}: expected one of {', '.join(SHM_MODES)}")
        if self.shm_name and not re.fullmatch(r"[A-Za-z0-9_.-]{1,64}", self.shm_name):
            raise ConfigError(
                f"--shm-name {self.shm_name!r}: expected 1 to 64 of the characters A-Z a-z 0-9 _ . -"
            )
        if self.shm == "off" and (self.shm_name or self.shm_socket):
            raise ConfigError("--shm off: contradicts --shm-name or --shm-socket; drop one of them")
        if self.shm_socket == "@" or len(self.shm_socket.encode("utf-8", "surrogateescape")) > 100:
            raise ConfigError(
                f"--shm-socket {self.shm_socket}: expected a path, or @NAME, of at most 100 bytes"
                " (a limit of Unix sockets)"
            )
        if not self.session_timeout >= 5:
            raise ConfigError(f"--session-timeout {self.session_timeout:g}: expected at least 5 seconds")

"""What an operator may set, checked as a whole before anything is bound or allocated."""

from __future__ import annotations

import difflib
import importlib.util
import re
from collections.abc import Sequence

import msgspec

from lmcache.errors import ConfigError, StartupError
from lmcache.v1.multiprocess.server.tiers import parse_adapters
from lmcache.v1.platform.base.device_spec import MPTransferMode
from lmcache.v1.storage.policies import BUILT_IN

POLICIES = tuple(BUILT_IN)
SHM_MODES = ("auto", "off")
PEER_TRANSPORTS = ("auto", "frames")
STORE_POLICIES = ("write_behind", "skip_l1")
PREFETCH_POLICIES = ("retain", "drop")
_GRANULE = 16
_MAX_CHUNK = 1 << 20
_MIN_L1_BYTES = 1 << 20
_MAX_L1_GIB = 1 << 30
_MAX_SECONDS = 3600.0

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
    (
        "push-limit-gb",
        float,
        "most GiB of L1 that peers may hold for what they have yet to push (half of L1)",
    ),
    ("peer-transport", str, f"one of {', '.join(PEER_TRANSPORTS)}: may peers write to L1 by NIXL? (auto)"),
    (
        "l2-adapter",
        list,
        "a tier below L1, as a JSON object with its type; may be repeated, the fastest first",
    ),
    (
        "l2-store-policy",
        str,
        f"one of {', '.join(STORE_POLICIES)}: what stays in L1 once tiers hold it (write_behind)",
    ),
    (
        "l2-prefetch-policy",
        str,
        f"one of {', '.join(PREFETCH_POLICIES)}: what of a read from tiers stays in L1 (retain)",
    ),
    (
        "l2-queue-gb",
        float,
        "GiB of L1 that may wait to be written to one tier (0.25, but a quarter of L1 for all at most)",
    ),
    ("l2-load-seconds", float, "limit of one read of a tier (5)"),
    ("l2-store-seconds", float, "limit of one write to a tier (30)"),
    ("l2-prefetch-seconds", float, "limit of all that is read for one lookup (10)"),
    ("l2-flush-seconds", float, "limit of what is still written to tiers at the end (10)"),
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
    push_limit_gb: float = 0.0
    """GiB of L1 that peers may hold unpublished, and may pin to read; 0: half of L1."""
    peer_transport: str = "auto"
    """auto: peers may write to L1 by NIXL, if its package is installed; frames: nobody may."""
    l2_adapter: tuple[str, ...] = ()
    """The tiers below L1, each a JSON object, the fastest first."""
    l2_store_policy: str = "write_behind"
    l2_prefetch_policy: str = "retain"
    l2_queue_gb: float | None = None
    """GiB of L1 that may wait to be written to one tier. None: 0.25, but of all tiers at most a quarter of L1."""
    l2_load_seconds: float = 5.0
    l2_store_seconds: float = 30.0
    l2_prefetch_seconds: float = 10.0
    l2_flush_seconds: float = 10.0
    session_timeout: float = 30.0
    """Seconds of silence after which a client counts as gone."""

    @property
    def l1_bytes(self) -> int:
        return int(self.l1_size_gb * (1 << 30))

    @property
    def push_limit_bytes(self) -> int:
        """0: half of L1."""
        return int(self.push_limit_gb * (1 << 30))

    def check(self, policies: Sequence[str] = POLICIES, hint: str = "") -> None:
        """Validate every value.

        Args:
            policies: names of the eviction policies there are.
            hint: why there are no others, for the message.

        Raises:
            ConfigError: one line that names the flag, its value, what was expected and the remedy.
            StartupError: likewise, if a package is missing for what is asked for.
        """
        self._check_addresses()
        if not 0 < self.l1_size_gb <= _MAX_L1_GIB:
            raise ConfigError(
                f"--l1-size-gb {self.l1_size_gb:g}: expected a positive number of GiB, at most {_MAX_L1_GIB};"
                " e.g. --l1-size-gb 10"
            )
        if self.l1_bytes < _MIN_L1_BYTES:
            least = f"{_MIN_L1_BYTES / 2**30:g} GiB (1 MiB)"
            raise ConfigError(f"--l1-size-gb {self.l1_size_gb:g}: expected at least {least}")
        self._check_eviction(policies, hint)
        if not 0 < self.chunk_size <= _MAX_CHUNK or self.chunk_size % _GRANULE:
            raise ConfigError(
                f"--chunk-size {self.chunk_size}: expected a multiple of {_GRANULE} tokens up to {_MAX_CHUNK}, or no"
                " engine's block size divides it; e.g. 256"
            )
        mode = MPTransferMode.parse(self.supported_transfer_mode, source="--supported-transfer-mode")
        if mode is MPTransferMode.LMCACHE_DRIVEN and importlib.util.find_spec("torch") is None:
            raise StartupError(
                "--supported-transfer-mode lmcache_driven: needs torch, which is not installed here;"
                " pip install lmcache[cpu] or a device wheel, or use engine_driven"
            )
        self._check_shm()
        if not 0 <= self.push_limit_gb <= self.l1_size_gb:
            raise ConfigError(
                f"--push-limit-gb {self.push_limit_gb:g}: expected 0 (half of L1) to --l1-size-gb {self.l1_size_gb:g}"
            )
        if self.peer_transport not in PEER_TRANSPORTS:
            raise ConfigError(
                f"--peer-transport {self.peer_transport!r}: expected one of {', '.join(PEER_TRANSPORTS)}"
            )
        if not self.session_timeout >= 5:
            raise ConfigError(f"--session-timeout {self.session_timeout:g}: expected at least 5 seconds")
        self._check_tiers()

    def _check_addresses(self) -> None:
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

    def _check_eviction(self, policies: Sequence[str], hint: str) -> None:
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

    def _check_shm(self) -> None:
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

    def _check_tiers(self) -> None:
        parse_adapters(self.l2_adapter)
        for name, value, choices in (
            ("store", self.l2_store_policy, STORE_POLICIES),
            ("prefetch", self.l2_prefetch_policy, PREFETCH_POLICIES),
        ):
            if value not in choices:
                raise ConfigError(f"--l2-{name}-policy {value!r}: expected one of {', '.join(choices)}")
        queue = self.l2_queue_gb
        if queue is not None and not 0 < queue * max(1, len(self.l2_adapter)) <= self.l1_size_gb:
            raise ConfigError(
                f"--l2-queue-gb {queue:g}: expected a positive number of GiB, of all tiers together no more than"
                f" --l1-size-gb {self.l1_size_gb:g}: what waits cannot be evicted"
            )
        for name, least in (("load", 0.01), ("store", 0.01), ("prefetch", 0.01), ("flush", 0.0)):
            seconds = getattr(self, f"l2_{name}_seconds")
            if not least <= seconds <= _MAX_SECONDS:
                raise ConfigError(
                    f"--l2-{name}-seconds {seconds:g}: expected seconds within {least:g}..{_MAX_SECONDS:g}"
                )

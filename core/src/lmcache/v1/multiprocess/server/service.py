"""The server's answers: one method per message, over the L1 index and the session table.

Called under the server's lock; does no I/O. What goes wrong with one request is a :class:`Refused`, which
becomes that request's error reply and touches nothing else.
"""

from __future__ import annotations

import logging
import os
import secrets
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import lmcache
from lmcache.logging import init_logger
from lmcache.v1.keys import DIGEST_BYTES, Namespace
from lmcache.v1.multiprocess.server import checks
from lmcache.v1.multiprocess.server.config import ServerConfig
from lmcache.v1.multiprocess.server.devices import Devices, Later, served_modes
from lmcache.v1.multiprocess.server.lookups import Lookups
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.peers import Peers
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.multiprocess.server.sessions import Session, Sessions
from lmcache.v1.multiprocess.server.state import accounts_state, l1_state, public, session_state
from lmcache.v1.multiprocess.server.stores import Stores
from lmcache.v1.multiprocess.server.tiers import tier_options
from lmcache.v1.multiprocess.server.timers import Timers
from lmcache.v1.multiprocess.server.tools import Tools
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l1 import GRACE_SECONDS, L1Cache
from lmcache.v1.storage.l2.adapter import StorageAdapter
from lmcache.v1.storage.shm_pool import PoolView
from lmcache.v1.storage.tiers import TieredStore

logger = init_logger(__name__)

_MAX_NAME = 256
_MAX_RANKS = 1 << 16
_MAX_KNOWN = 1024


def _tell_nobody(event: str, fields: Mapping[str, Any]) -> None:
    return None


class Service:
    """State and handlers. ``handle`` is the one entry, under ``lock``, which ends of device copies take, too.

    ``emit`` is told of sessions and registrations; it must return at once. ``adapters`` are the tiers below L1, which
    belong to ``store`` from then on.
    """

    def __init__(
        self,
        config: ServerConfig,
        view: PoolView,
        attach: m.Attach | None,
        metrics: Metrics,
        policy: EvictionPolicy | None = None,
        emit: Callable[[str, Mapping[str, Any]], None] = _tell_nobody,
        lock: threading.Lock | None = None,
        adapters: Sequence[tuple[str, StorageAdapter]] = (),
    ) -> None:
        self.config = config
        self.epoch = secrets.token_hex(8)
        self.attach = attach
        self.metrics = metrics
        self.sessions = Sessions()
        self._stopping = False
        self.started = time.time()
        self._view = view
        self._emit = emit
        watermark = None if config.eviction_policy == "noop" else config.eviction_trigger_watermark
        self.l1 = L1Cache(view, watermark, config.eviction_ratio, policy, GRACE_SECONDS)
        self.modes = served_modes(config.supported_transfer_mode)
        lock = lock or threading.Lock()
        self._version = lmcache.__version__
        self._known: dict[bytes, Namespace] = {}
        """The namespaces registered last, for tools: objects outlive their engine."""
        self.store = TieredStore(
            self.l1,
            view,
            adapters,
            lock,
            tier_options(config),
            lambda key: self._known.get(key[:DIGEST_BYTES]),
            emit,
        )
        self.devices = Devices(view, self.l1, lock, metrics, self.store.published)
        self.lookups = Lookups(
            self.store, lock, metrics, self.epoch, config.chunk_size, config.l2_prefetch_seconds
        )
        self._timers = Timers()
        self._stores = Stores(
            self.store, self.sessions, self.devices, self._timers, metrics, view, self.epoch
        )
        self.peers = Peers(
            self.epoch, view, self.l1, lock, metrics, self.sessions, config.push_limit_bytes,
            config.peer_transport != "frames", lambda: self._stopping, self.store.published,
        )  # fmt: skip
        self._tools = Tools(self.store, self.lookups, self._known, config.chunk_size)
        self._handlers: dict[type, Callable[..., Any]] = {
            m.Hello: self._hello,
            m.Bye: self._bye,
            m.Ping: self._ping,
            m.Read: self._read,
            m.Release: self._release,
            m.EndRequest: self._end_request,
            m.Status: self._status,
            **self._stores.handlers,
            **self._tools.handlers,
        }
        self._patient: dict[type, Callable[..., m.Reply | None]] = {
            m.Register: self._register,
            m.Lookup: self._lookup,
            m.DeviceLoad: self._device_load,
            m.DeviceFence: self._device_fence,
            **self._stores.patient,
            **self._tools.patient,
        }
        """What a device or a tier may have a part in: these answer at once, or give None and call ``later`` once."""

    def handle(
        self, request: m.Request, payload: Sequence[memoryview], later: Later, connection: bytes = b""
    ) -> tuple[m.Reply, Sequence[memoryview]] | None:
        """The reply to a request and its payload frames; a refusal or a fault of ours is an error reply.

        None: ``later`` is called with the reply, once, from any thread.
        """
        kind = type(request)
        try:
            if kind in self.peers.handlers:
                reply = self.peers.handle(request, payload, later, connection)
            elif kind in self._patient:
                reply = self._patient[kind](request, later)
            else:
                reply = self._handlers[kind](request, payload)
            if reply is None:
                return None
        except Refused as exc:
            self.metrics.errors.labels(exc.code).inc()
            return m.Error(code=exc.code, message=str(exc)), ()
        except Exception as exc:  # one request's fault must not stop the loop that serves the others
            logger.exception("request %s failed", type(request).__name__)
            self.metrics.errors.labels("internal").inc()
            return m.Error(
                code="internal", message=f"{type(request).__name__}: {type(exc).__name__}: {exc}"
            ), ()
        return reply if isinstance(reply, tuple) else (reply, ())

    # ---- time

    @property
    def next_deadline(self) -> float:
        """When :meth:`expire` has something to do, or earlier; ``time.monotonic``."""
        return min(self.lookups.next_deadline, self._timers.next_deadline)

    def expire(self, now: float) -> None:
        """Answer those who waited long enough for something. Called under the lock."""
        self.lookups.expire(now)
        self._timers.expire(now)

    def stop(self) -> None:
        """Grant nothing new from here on; who waits for tiers gets what there is. Called under the lock."""
        self._stopping = self._stores.stopping = True
        self.lookups.finish()
        self._timers.expire(float("inf"))

    # ---- sessions

    def _hello(self, msg: m.Hello, _: object) -> m.Reply:
        if not msg.protocol_min <= m.PROTOCOL or not msg.protocol_max >= m.PROTOCOL_MIN:
            raise Refused(
                "protocol",
                f"client speaks protocol {msg.protocol_min}..{msg.protocol_max},"
                f" this server (lmcache {self._version}) {m.PROTOCOL_MIN}..{m.PROTOCOL};"
                " install matching versions on both sides",
            )
        if not 0 <= msg.rank < msg.ranks <= _MAX_RANKS:
            raise Refused(
                "bad_request", f"rank {msg.rank} of {msg.ranks}: expected 0 <= rank < ranks <= {_MAX_RANKS}"
            )
        for what, text in (("engine", msg.engine), ("client", msg.client)):
            if len(text) > _MAX_NAME or not text.isprintable():  # both reach the log and people's terminals
                raise Refused(
                    "bad_request", f"{what} {text[:40]!r}: expected up to {_MAX_NAME} printable characters"
                )
        engine = self.sessions.engines.get(msg.engine)
        if engine is not None and engine.ranks != msg.ranks:
            raise Refused(
                "bad_request", f"engine {msg.engine}: {msg.ranks} ranks, but it opened with {engine.ranks}"
            )
        session = self.sessions.open(msg.role, msg.engine, msg.rank, msg.ranks, msg.client)
        self._emit("session_opened", public(session))
        return m.Welcome(
            protocol=min(m.PROTOCOL, msg.protocol_max),
            epoch=self.epoch,
            session=session.id,
            chunk_size=self.config.chunk_size,
            version=self._version,
            attach=self.attach,
            modes=tuple(self.modes),
        )

    def _bye(self, msg: m.Bye, _: object) -> m.Reply:
        self.drop_session(msg.session, dead=True)
        return m.Ok()

    def _ping(self, msg: m.Ping, _: object) -> m.Reply:
        session = self.sessions.by_id.get(msg.session)
        if session is not None:
            session.seen = time.monotonic()
        return m.Pong(
            epoch=self.epoch,
            known=session is not None,
            chunk_size=self.config.chunk_size,
            version=self._version,
            modes=tuple(self.modes),
        )

    def _register(self, msg: m.Register, later: Later) -> m.Reply | None:
        session = self.sessions.active(msg.session)
        engine = self.sessions.engine_of(session)
        if session.role != "worker" or not msg.namespaces:
            raise Refused(
                "bad_request",
                f"{session.role} with {len(msg.namespaces)} KV groups: expected a worker with one or more",
            )
        checks.check_layouts(msg.namespaces, self.config.chunk_size)
        if msg.mapped and not session.mapped:
            raise Refused(
                "not_attached", "registered as mapping the pool, but holds no descriptor of it; attach first"
            )
        checks.check_mode(msg, self.modes)
        if msg.device is not None:
            checks.check_peer(session)
        namespaces = [(ns.digest(), ns) for ns in msg.namespaces]
        if engine.namespaces.get(session.rank, namespaces) != namespaces and self.sessions.peers(session):
            # What one of them looked up would otherwise be read as the layout of the other.
            raise Refused(
                "bad_request",
                f"engine {session.engine} rank {session.rank}: a live client registered it with another"
                " model or layout; give each engine an engine_id of its own",
            )
        engine.namespaces[session.rank] = namespaces
        session.registered = True
        self._remember(namespaces)
        if engine.complete:
            self.peers.unmatched.engine_registered()
        fields = {"ranks": engine.ranks, "model": msg.namespaces[0].model, "groups": len(msg.namespaces)}
        self._emit(
            "engine_registered",
            {"engine": session.engine, "rank": session.rank, **fields, "mapped": msg.mapped},
        )
        logger.info(
            "engine %s rank %d/%d registered: %s, %d KV group(s), %s",
            session.engine, session.rank, engine.ranks, msg.namespaces[0].model,
            len(msg.namespaces), self._path(session) if msg.device is None else "device",
        )  # fmt: skip
        checks.warn_of_room(session.engine, engine.ranks, msg.namespaces, self.l1.usage()["capacity_bytes"])
        if msg.device is None:
            self.devices.drop(session.id)
            return m.Ok()
        assert session.peer is not None  # noqa: S101 -- check_peer
        self.devices.open(session.id, session.peer.pid, msg.device, msg.namespaces, later)
        return None

    def _remember(self, namespaces: Sequence[tuple[bytes, Namespace]]) -> None:
        for ns_digest, ns in namespaces:
            self._known.pop(ns_digest, None)  # the one registered last is at the end
            self._known[ns_digest] = ns
        for ns_digest in list(self._known)[:-_MAX_KNOWN]:
            del self._known[ns_digest]

    # ---- loads

    def _lookup(self, msg: m.Lookup, later: Later) -> m.Reply | None:
        session = self.sessions.active(msg.session)
        engine = self.sessions.engine_of(session)
        if self._stopping:
            return m.Found(epoch=self.epoch, chunks=0)
        checks.check_account(msg.account)
        if self.l1.is_used_up(session.engine, msg.lease):  # maybe the request ended before this arrived
            raise Refused("lease_gone", f"lease {msg.lease}: given back before, or in use; take a new id")
        chain = session.hashes.get(msg.request, [])
        if not 0 <= msg.known <= len(chain):
            raise Refused(
                "unknown_request", f"request {msg.request}: {len(chain)} chunk digests known, not {msg.known}"
            )
        if msg.start < 0:
            raise Refused("bad_request", f"lookup from chunk {msg.start}: expected 0 or more")
        chain[msg.known :] = checks.digests(msg.hashes)
        session.hashes[msg.request] = chain
        return self.lookups.lookup(session, engine, msg, chain[msg.start :], later)

    def _read(self, msg: m.Read, _: object) -> tuple[m.Reply, Sequence[memoryview]]:
        session = self.sessions.active(msg.session)
        share = self.l1.read_share(session.engine, msg.lease, session.rank)
        if not 0 <= msg.index < len(share):
            raise Refused(
                "lease_gone",
                f"lease {msg.lease}: rank {session.rank} holds {len(share)} objects, not number {msg.index}",
            )
        entry = share[msg.index]
        if (
            msg.offset < 0
            or msg.length < 1
            or msg.length > m.PIECE_BYTES
            or msg.offset + msg.length > entry.size
        ):
            raise Refused(
                "bad_request", f"read of {msg.length} bytes at {msg.offset}: the object has {entry.size}"
            )
        start = entry.offset + msg.offset
        self.metrics.read_bytes.inc(msg.length)
        return m.Ok(), (self._view.data[start : start + msg.length],)

    def _release(self, msg: m.Release, _: object) -> m.Reply:
        session = self.sessions.active(msg.session)
        of_worker = session.role == "worker"
        for lease in msg.leases:
            if not of_worker:
                self.lookups.release(session.engine, lease)
            self.l1.release(session.engine, lease, session.rank if of_worker else None)
        return m.Ok()

    def _end_request(self, msg: m.EndRequest, _: object) -> m.Reply:
        session = self.sessions.active(msg.session)
        engine = self.sessions.engine_of(session)
        for request in msg.requests:
            self.lookups.drop(session.engine, request)
            # It was stored in parts, first chunks first, and maybe looked up in part: now its prefix is one
            # again.
            columns = engine.columns(session.hashes.pop(request, []))
            self.l1.touch([column for mine in columns.values() for column in mine], used=False)
            self.l1.drop_request(session.engine, request)
        return m.Ok()

    def _device_load(self, msg: m.DeviceLoad, later: Later) -> m.Reply | None:
        session, namespaces = self._stores.device_worker(msg.session)
        share = self.l1.read_share(session.engine, msg.lease, session.rank)
        if not share:
            raise Refused("lease_gone", f"lease {msg.lease}: rank {session.rank} holds nothing under it")
        chunks = checks.check_share(namespaces, share)
        checks.check_blocks(namespaces, [chunks] * len(namespaces), msg.blocks)
        if len(msg.skip) != len(namespaces) or min(msg.skip) < 0:
            raise Refused(
                "bad_request", f"skip {msg.skip}: expected 0 or more for {len(namespaces)} KV groups"
            )
        self.devices.load(session.id, msg, share, chunks, later)
        return None

    def _device_fence(self, msg: m.DeviceFence, later: Later) -> m.Reply | None:
        # Asked for by a worker that we may have taken for gone: what moves for it may still be moving.
        session = self.sessions.by_id.get(msg.session)
        if session is not None:
            self.l1.release(session.engine, msg.lease, session.rank)
        return self.devices.fence(msg.session, later)

    # ---- tools

    def _status(self, msg: m.Status, _: object) -> m.Reply:
        return m.State(fields=self.status())

    def status(self) -> dict[str, object]:
        """The server's state, as /status shows it."""
        sessions = list(self.sessions.by_id.values())
        return {
            "version": self._version,
            "protocol": [m.PROTOCOL_MIN, m.PROTOCOL],
            "epoch": self.epoch,
            "pid": os.getpid(),
            "uptime_seconds": round(time.time() - self.started, 3),
            "chunk_size": self.config.chunk_size,
            "transfer_modes": self.modes,
            "shared_memory": self.attach is not None,
            "l1": l1_state(self.l1, self.config.eviction_policy),
            "peers": self.peers.state(),
            "l2": self.store.status(),
            "accounts": accounts_state(self.l1),
            "requests": sum(len(session.hashes) for session in sessions),
            "sessions": [session_state(session, self._path(session)) for session in sessions],
        }

    # ---- helpers

    def drop_session(self, ident: str, dead: bool) -> None:
        """Close a session and take back what it owns; ``dead``: its process is known to be gone."""
        session = self.sessions.by_id.get(ident)
        if session is None or self.peers.drop(ident, dead):
            return
        if not dead and session.mapped:
            # It may only be stopped: its mapped writes stay its own until its process ends (see WriteLease).
            self.l1.drop_session(ident, dead=False)
            return
        self.sessions.close(ident)
        self.lookups.drop(session.engine, session=ident)
        self.devices.drop(ident)
        self.l1.drop_session(ident, dead=True)
        if session.role == "worker":
            self.l1.drop_rank(session.engine, session.rank)
        self._emit("session_closed", public(session))
        logger.log(
            logging.INFO if session.registered else logging.DEBUG,  # one that is refused tries again for ever
            "session of engine %s %s rank %d closed", session.engine or "-", session.role, session.rank,
        )  # fmt: skip

    def _path(self, session: Session) -> str:
        if session.role != "worker":
            return "control"
        if session.id in self.devices:
            return "device"
        return "shared_memory" if session.mapped else "frames"

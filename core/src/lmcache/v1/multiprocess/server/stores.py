"""Stores: room, payload in frames, publication, and what the server reads off devices.

Called under the server's lock; does no I/O.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from lmcache.v1.keys import Namespace
from lmcache.v1.multiprocess.server import checks
from lmcache.v1.multiprocess.server.devices import Devices, Later, device_columns, once, written_keys
from lmcache.v1.multiprocess.server.lookups import MAX_WAIT_SECONDS
from lmcache.v1.multiprocess.server.metrics import Metrics
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.multiprocess.server.sessions import Session, Sessions
from lmcache.v1.multiprocess.server.timers import Timers
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.leases import Reservation
from lmcache.v1.storage.shm_pool import PoolView
from lmcache.v1.storage.tiers import TieredStore

__all__ = ["Stores"]


class Stores:
    """Handlers by message; those in ``patient`` may answer later."""

    def __init__(
        self,
        store: TieredStore,
        sessions: Sessions,
        devices: Devices,
        timers: Timers,
        metrics: Metrics,
        view: PoolView,
        epoch: str,
    ) -> None:
        self._store = store
        self._sessions = sessions
        self._devices = devices
        self._timers = timers
        self._metrics = metrics
        self._view = view
        self._epoch = epoch
        self.stopping = False
        self.handlers: dict[type, Callable[..., Any]] = {
            m.Reserve: self._reserve,
            m.Write: self._write,
            m.Abort: self._abort,
        }
        self.patient: dict[type, Callable[..., m.Reply | None]] = {
            m.Commit: self._commit,
            m.DeviceStore: self._device_store,
        }

    def device_worker(self, ident: str) -> tuple[Session, list[tuple[bytes, Namespace]]]:
        """A session whose device memory is mapped, and its layouts.

        Raises:
            Refused: if it is none.
        """
        session = self._sessions.active(ident)
        if session.id not in self._devices:
            raise Refused("unregistered", f"rank {session.rank} exported no device memory; register it first")
        return session, self._sessions.engine_of(session).namespaces[session.rank]

    def _device_store(self, msg: m.DeviceStore, later: Later) -> m.Reply | None:
        session, namespaces = self.device_worker(msg.session)
        if self.stopping:
            raise Refused("stopping", "the server is stopping and takes nothing new")
        hashes = [checks.digests(joined) for joined in msg.hashes]
        if len(hashes) != len(namespaces):
            raise Refused("bad_request", f"{len(hashes)} KV groups: registered are {len(namespaces)}")
        checks.check_account(msg.account)
        checks.check_blocks(namespaces, [len(mine) for mine in hashes], msg.blocks)
        columns = device_columns(namespaces, hashes)
        try:
            return self._devices.store(
                session.id, msg, columns, [ns.blocks_per_chunk for _, ns in namespaces], later
            )
        except KeyError:
            raise Refused(
                "lease_gone", f"lease {msg.lease}: given back before, or in use; take a new id"
            ) from None

    def _reserve(self, msg: m.Reserve, _: object) -> m.Reply:
        session = self._sessions.active(msg.session)
        if self.stopping:
            raise Refused("stopping", "the server is stopping and takes nothing new")
        namespaces = self._sessions.engine_of(session).namespaces.get(session.rank)
        if namespaces is None or len(namespaces) != len(msg.hashes):
            have = "none" if namespaces is None else str(len(namespaces))
            raise Refused(
                "unregistered",
                f"reserve for {len(msg.hashes)} KV groups: rank {session.rank} registered {have}",
            )
        checks.check_account(msg.account)
        columns = device_columns(namespaces, [checks.digests(joined) for joined in msg.hashes])
        try:
            slots = self._store.l1.reserve(session.id, msg.lease, columns, session.mapped, msg.account)
        except KeyError:
            raise Refused(
                "lease_gone", f"lease {msg.lease}: given back before, or in use; take a new id"
            ) from None
        return m.Reserved(
            epoch=self._epoch, slots=[[word for slot in column for word in slot] for column in slots]
        )

    def _write(self, msg: m.Write, payload: Sequence[memoryview]) -> m.Reply:
        session = self._sessions.active(msg.session)
        items = self._owned(session, msg.lease)
        if not 0 <= msg.index < len(items) or len(payload) != 1:
            raise Refused(
                "bad_request",
                f"write to reservation {msg.index} with {len(payload)} payload frames:"
                f" the lease holds {len(items)}",
            )
        item, data = items[msg.index], payload[0]
        if msg.offset < 0 or msg.offset + len(data) > item.size:
            raise Refused(
                "bad_request", f"write of {len(data)} bytes at {msg.offset}: the reservation has {item.size}"
            )
        start = item.offset + msg.offset
        self._view.data[start : start + len(data)] = data
        item.written += len(data)
        self._metrics.written_bytes.inc(len(data))
        return m.Ok()

    def _commit(self, msg: m.Commit, later: Later) -> m.Reply | None:
        session = self._sessions.active(msg.session)
        if self._devices.holds(session.id, msg.lease):
            answer = once(later)

            def settled(reply: m.Reply, keys: Sequence[bytes]) -> None:
                in_step = self._in_step(reply, keys, msg.wait, answer)
                if in_step is not None:
                    answer(in_step)

            self._devices.commit(session.id, msg.lease, settled)
            return None
        items = self._owned(session, msg.lease)
        if not session.mapped:  # then every byte has come through here, or is somebody else's of before
            short = [i for i in set(msg.indexes) if 0 <= i < len(items) and items[i].written < items[i].size]
            if short:
                raise Refused(
                    "bad_request", f"commit of {len(short)} reservations that were not written in full"
                )
        keys = written_keys(items, msg.indexes)
        try:
            count = self._store.l1.commit(session.id, msg.lease, msg.indexes)
        except IndexError as exc:
            raise Refused("bad_request", str(exc)) from None
        self._metrics.stored_objects.inc(count)
        self._store.published(keys)
        return self._in_step(m.Ok(count=count), keys, msg.wait, later)

    def _in_step(self, reply: m.Reply, keys: Sequence[bytes], wait: float, later: Later) -> m.Reply | None:
        """``reply``; None if tiers are written in step with L1: then ``later`` gets it once they have ``keys``."""
        written = self._store.written(keys)
        if written is None:
            return reply
        answer = once(later)
        written.add_done_callback(lambda _: answer(reply))
        self._timers.at(time.monotonic() + min(max(0.0, wait), MAX_WAIT_SECONDS), lambda: answer(reply))
        return None

    def _abort(self, msg: m.Abort, _: object) -> m.Reply:
        session = self._sessions.active(msg.session)
        for lease in msg.leases:
            self._store.l1.abort(session.id, lease)
            if session.id in self._devices:
                self._devices.abort(session.id, lease)
        return m.Ok()

    def _owned(self, session: Session, lease: int) -> list[Reservation]:
        try:
            return self._store.l1.reserved(session.id, lease)
        except KeyError:
            raise Refused("lease_gone", f"write lease {lease}: not held (any more)") from None

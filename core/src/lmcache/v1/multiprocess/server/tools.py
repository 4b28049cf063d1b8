"""What the server does for people's tools: looks inside, holds, warms, clears, limits.

All handlers are called under the server's lock and do no I/O themselves.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from lmcache.v1.keys import DIGEST_BYTES, Namespace, object_key
from lmcache.v1.multiprocess.server import checks
from lmcache.v1.multiprocess.server.devices import Later
from lmcache.v1.multiprocess.server.lookups import MAX_WAIT_SECONDS, Lookups
from lmcache.v1.multiprocess.server.refused import Refused
from lmcache.v1.multiprocess.server.state import holdings
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.tiers import L1_NAME, TieredStore

__all__ = ["Tools"]

_MAX_LISTED = 1000
_MAX_QUOTA = 1 << 60


class Tools:
    """Handlers by message; those in ``patient`` may answer later.

    Args:
        known: the namespaces that were registered, by digest.
    """

    def __init__(
        self,
        store: TieredStore,
        lookups: Lookups,
        known: Mapping[bytes, Namespace],
        chunk_size: int,
    ) -> None:
        self._store = store
        self._lookups = lookups
        self._known = known
        self._chunk_size = chunk_size
        self.handlers: dict[type, Callable[..., Any]] = {
            m.Query: lambda msg, _: self._holdings(checks.digests(msg.hashes)),
            m.ListObjects: self._list,
            m.Hold: self._hold,
            m.SetQuota: self._set_quota,
            m.Quotas: self._quotas,
        }
        self.patient: dict[type, Callable[..., m.Reply | None]] = {m.Warm: self._warm, m.Clear: self._clear}

    # ---- looking

    def _holdings(self, chain: Sequence[bytes]) -> m.Reply:
        return m.Holdings(chunk_size=self._chunk_size, rows=holdings(self._store, self._known, chain))

    def _list(self, msg: m.ListObjects, _: object) -> m.Reply:
        if not 1 <= msg.limit <= _MAX_LISTED:
            raise Refused("bad_request", f"list of {msg.limit} objects: expected 1 to {_MAX_LISTED}")
        after, account = msg.after, msg.account
        fitting = (
            row
            for row in self._rows(msg.tier, account)
            if row[0] > after and (account is None or row[2] == account)
        )
        found = heapq.nsmallest(msg.limit + 1, fitting)  # keys differ, so nothing else is compared
        objects = [
            m.Stored(
                key=key,
                size=size,
                model=ns.model if (ns := self._known.get(key[:DIGEST_BYTES])) else "",
                account=whose,
                pins=pins,
                held=held,
            )
            for key, size, whose, pins, held in found[: msg.limit]
        ]
        return m.Listing(objects=objects, more=len(found) > msg.limit)

    def _rows(self, tier: str, account: str | None) -> Iterable[tuple[bytes, int, str | None, int, bool]]:
        """Key, size, account, pins, held of all objects; refused where it cannot be told which are of ``account``."""
        if tier == L1_NAME:
            return ((e.key, e.size, e.account, e.pins, e.held) for e in self._store.l1.entries())
        try:
            items = self._store.objects(tier)
        except KeyError as exc:
            raise Refused("bad_request", exc.args[0]) from None
        if items is None:
            raise Refused("bad_request", f"tier {tier!r}: is shared, so this list is not to be had")
        unknown = 0 if account is None else sum(item.account is None for _, item in items)
        if unknown:
            raise Refused(
                "bad_request",
                f"tier {tier!r}: its engine does not say whose {unknown} of its {len(items)} objects are;"
                " list them without an account",
            )
        return ((key, item.size, item.account, 0, False) for key, item in items)

    # ---- keeping

    def _hold(self, msg: m.Hold, _: object) -> m.Reply:
        chain = checks.digests(msg.hashes)
        keys = [object_key(digest, chunk) for digest in self._known for chunk in chain]
        l1 = self._store.l1
        return m.Ok(count=l1.hold(keys) if msg.on else l1.unhold(keys))

    def _warm(self, msg: m.Warm, later: Later) -> m.Reply | None:
        checks.check_account(msg.account)
        chain = checks.digests(msg.hashes)
        if not msg.wait > 0:
            raise Refused("bad_request", f"wait {msg.wait}: expected seconds above 0")
        waits = self._lookups.warm(
            self._known,
            lambda digest: [object_key(digest, chunk) for chunk in chain],
            msg.account,
            min(msg.wait, MAX_WAIT_SECONDS),
            lambda: later(self._holdings(chain)),
        )
        return None if waits else self._holdings(chain)

    def _clear(self, msg: m.Clear, later: Later) -> m.Reply | None:
        if msg.account is not None:
            checks.check_account(msg.account)
        try:
            cleared = self._store.clear(msg.tiers, msg.account, msg.force)
        except KeyError as exc:
            raise Refused("bad_request", exc.args[0]) from None
        if cleared.done():
            return _sum(cleared.result())
        cleared.add_done_callback(lambda future: later(_sum(future.result())))
        return None

    # ---- limits

    def _set_quota(self, msg: m.SetQuota, _: object) -> m.Reply:
        checks.check_account(msg.account)
        if msg.limit_bytes is not None and not 0 <= msg.limit_bytes <= _MAX_QUOTA:
            raise Refused(
                "bad_request", f"limit of {msg.limit_bytes} bytes: expected 0 to {_MAX_QUOTA}, or none"
            )
        try:
            self._store.set_quota(msg.account, msg.limit_bytes, msg.tier)
        except (KeyError, ValueError) as exc:
            raise Refused("bad_request", exc.args[0]) from None
        return m.Ok()

    def _quotas(self, msg: m.Quotas, _: object) -> m.Reply:
        return m.Accounts(
            rows=[
                m.Account(
                    account=name,
                    used_bytes=use.used_bytes,
                    objects=use.objects,
                    limit_bytes=use.quota_bytes,
                    tier=tier,
                )
                for tier, name, use in self._store.accounts()
            ]
        )


def _sum(counts: Mapping[str, int]) -> m.Ok:
    return m.Ok(count=sum(max(0, count) for count in counts.values()), counts=dict(counts))

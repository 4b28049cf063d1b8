"""L1 over the tiers below it: what the server and the in-process engine both hold.

Every published object is written to every tier (write-behind), so what L1 evicts is below already. A prefix that
L1 does not have is looked for in the tiers, in their order (prefetch), and what a shared tier gave is written to those
above it that are our own (promotion). ``docs/tiers.md`` has the whole story.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

import msgspec

from lmcache.errors import ConfigError, StartupError
from lmcache.v1.keys import Namespace
from lmcache.v1.storage.accounts import AccountUsage
from lmcache.v1.storage.eviction import EvictionPolicy
from lmcache.v1.storage.l1 import L1Cache
from lmcache.v1.storage.l2.adapter import AdapterError, Call, StorageAdapter
from lmcache.v1.storage.l2.asking import holds
from lmcache.v1.storage.l2.clock import Clock
from lmcache.v1.storage.l2.remote import reason
from lmcache.v1.storage.l2.removals import Removal
from lmcache.v1.storage.l2.tier import Tier
from lmcache.v1.storage.l2.tier_index import Item
from lmcache.v1.storage.prefetch import Loader, Prefetch, Rows
from lmcache.v1.storage.shm_pool import PoolView
from lmcache.v1.storage.writebehind import WriteBehind

__all__ = ["Prefetch", "TierOptions", "TieredStore"]

L1_NAME = "l1"
"""How ``clear`` and ``delete`` call L1."""
_CLEAR_BATCH = 64


class TierOptions(msgspec.Struct, frozen=True, kw_only=True):
    """What holds for all tiers. The server's flags set all but the breaker's figures and ``promote``.

    Raises:
        ConfigError: for a value that cannot be used.
    """

    store_policy: str = "write_behind"
    """``write_behind``, or ``skip_l1``: what all tiers have is the first to leave L1."""
    prefetch_policy: str = "retain"
    """``retain``, or ``drop``: what came from below leaves L1 when its reader is done."""
    queue_bytes: int = 256 << 20
    """What writes that wait may pin in L1, per tier. Beyond it a write is dropped and counted."""
    load_seconds: float = 5.0
    store_seconds: float = 30.0
    """Deadline of one call of an adapter."""
    breaker_failures: int = 3
    breaker_seconds: float = 5.0
    """A tier is left alone after so many failures in a row, and looked at again after so long."""
    promote: bool = True
    """Whether what a tier gave is written to the tiers above it that belong to this server alone."""

    def __post_init__(self) -> None:
        for name, value, known in (
            ("store_policy", self.store_policy, ("write_behind", "skip_l1")),
            ("prefetch_policy", self.prefetch_policy, ("retain", "drop")),
        ):
            if value not in known:
                raise ConfigError(f"{name}={value!r}: expected one of {', '.join(known)}")
        for name in ("queue_bytes", "load_seconds", "store_seconds", "breaker_failures", "breaker_seconds"):
            if not getattr(self, name) > 0:
                raise ConfigError(f"{name}={getattr(self, name)!r}: expected a number above 0")


def _tell_nobody(event: str, fields: Mapping[str, Any]) -> None:
    return None


def _nameless(namespace: bytes) -> Namespace | None:
    return None


class TieredStore:
    """L1 and the tiers.

    Args:
        l1, view: the cache and its pool.
        adapters: the tiers below, in the order in which they are asked: a name for each, and its engine.
        lock: around ``l1``. The methods below say whether they want it held.
        namespace_of: a namespace by its 32-byte digest, for the headers; it is called in threads of the tiers.
        observe: told of ``quarantine`` and ``tier_state`` events; must return at once.
        policies: what goes first from a tier of our own, by the tier's name; LRU where none is named.

    Raises:
        ConfigError: for two tiers of one name. StartupError: if a tier of our own cannot list what it holds.
    """

    def __init__(
        self,
        l1: L1Cache,
        view: PoolView,
        adapters: Sequence[tuple[str, StorageAdapter]],
        lock: threading.Lock,
        options: TierOptions = TierOptions(),  # noqa: B008 -- frozen
        namespace_of: Callable[[bytes], Namespace | None] = _nameless,
        observe: Callable[[str, Mapping[str, Any]], None] = _tell_nobody,
        policies: Mapping[str, EvictionPolicy] | None = None,
    ) -> None:
        names = [name for name, _ in adapters]
        if len({*names, L1_NAME}) != len(names) + 1:
            raise ConfigError(
                f"tiers {', '.join(names)}: expected a name of its own for each, and none {L1_NAME!r}"
            )
        self.l1 = l1
        self.options = options
        self._lock = lock
        self._clock = Clock()
        self._tiers: list[Tier] = []
        for name, adapter in adapters:
            try:
                tier = Tier(
                    name, adapter, self._clock,
                    options.load_seconds, options.store_seconds, options.breaker_failures, options.breaker_seconds,
                    observe, (policies or {}).get(name),
                )  # fmt: skip
            except Exception as exc:  # a plugin's may be anything
                for made in self._tiers:
                    made.workers.close(0)
                self._clock.close()
                text = reason(f"{type(exc).__name__}: {exc}")
                raise StartupError(f"tier {name}: it cannot be set up ({text})") from exc
            self._tiers.append(tier)
        self._writes = WriteBehind(
            l1, view, self._tiers, lock, self._clock,
            options.queue_bytes, options.store_policy == "skip_l1", namespace_of,
        )  # fmt: skip
        self._loader = Loader(
            l1, view, self._tiers, lock, self._clock, options.prefetch_policy == "drop", self._promote
        )

    # ---- with the lock held; none does I/O

    @property
    def names(self) -> list[str]:
        """The tiers below L1, in order."""
        return [tier.name for tier in self._tiers]

    def published(self, keys: Sequence[bytes], tiers: Container[str] | None = None) -> None:
        """Write behind, to all tiers or only these, what was just committed to L1. Keys that L1 does not have are
        passed over."""
        if self._tiers:
            self._writes.queue(keys, self._among(tiers))

    def written(self, keys: Sequence[bytes]) -> Future[bool] | None:
        """What ends when the *sync* tiers have these objects, just published: True, or False if one gave up, at
        the latest after ``store_seconds``. Callbacks come without the lock. None: there is nothing to wait for."""
        return self._writes.watch(keys, self.options.store_seconds)

    def prefetch(
        self,
        rows: Rows,
        account: str,
        seconds: float,
        on_done: Callable[[], None],
        tiers: Container[str] | None = None,
    ) -> Prefetch | None:
        """Bring a prefix into L1.

        Args:
            rows: chunks in the order of their chain, each with the ``(key, size)`` of every rank and group. A chunk
                counts if all of its objects are there. Rows that L1 has count, too, and are pinned.
            account: whose quota it counts against.
            seconds: until when; then the prefix ends with what is there.
            on_done: called once, from any thread, without the lock, when it ended by itself. Must return at once.
            tiers: ask only these.

        Returns:
            None if nothing below L1 could lengthen the prefix; nothing is pinned then.
        """
        return self._loader.begin(rows, account, seconds, on_done, tiers) if self._tiers else None

    def delete(
        self, keys: Sequence[bytes], tiers: Sequence[str] | None = None, force: bool = False
    ) -> Future[dict[str, int]]:
        """Delete these objects from ``tiers`` (None: from L1 and all below); what L1 has pinned stays there.

        Returns:
            How many went, by tier, ``l1`` included; -1 for a tier that failed.

        Raises:
            KeyError: for an unknown tier.
        """
        l1, below = self._chosen(tiers)
        removal, known = Removal.of(keys), list(dict.fromkeys(keys))
        self._forget(removal, below)
        counts = {L1_NAME: self.l1.delete(keys, force)} if l1 else {}
        return self._below(below, counts, removal, lambda tier, call: tier.delete(known, call))

    def clear(
        self, tiers: Sequence[str] | None = None, account: str | None = None, force: bool = False
    ) -> Future[dict[str, int]]:
        """Drop everything from ``tiers`` (None: from L1 and all below), except what L1 has pinned or, without
        ``force``, held.

        Args:
            account: only what counts against it. A shared tier cannot tell and answers -1.

        Returns:
            As :meth:`delete`; -1 also where the number is not known.

        Raises:
            KeyError: for an unknown tier.
        """
        l1, below = self._chosen(tiers)
        removal = Removal(account=account)
        self._forget(removal, below)
        counts = {L1_NAME: self.l1.clear(force, account)} if l1 else {}
        if account is not None:
            return self._below(below, counts, removal, lambda tier, call: _clear_account(tier, account, call))
        return self._below(below, counts, removal, lambda tier, call: tier.clear(call))

    def set_quota(self, account: str, nbytes: int | None, tier: str = L1_NAME) -> None:
        """Limit what an account may take in L1 or in a tier of our own; None: no limit.

        Raises:
            KeyError: for an unknown tier. ValueError: for one where accounts cannot be limited.
        """
        if tier == L1_NAME:
            self.l1.set_quota(account, nbytes)
        else:
            self._named(tier).set_quota(account, nbytes)

    def accounts(self, limited: bool = False) -> list[tuple[str, str, AccountUsage]]:
        """Tier, account and what it has there, of L1 first, then of every tier that knows. ``limited``: only accounts
        with a quota there; of others there may be very many."""
        rows = [(L1_NAME, name, has) for name, has in self.l1.usage_by_account(limited).items()]
        return rows + [
            (tier.name, name, has) for tier in self._tiers for name, has in tier.accounts(limited).items()
        ]

    def figures(self) -> list[dict[str, Any]]:
        """As :meth:`status`, without ``accounts``: what it costs does not depend on what there is."""
        return [{**tier.status(), **self._writes.waiting(tier)} for tier in self._tiers]

    def status(self) -> list[dict[str, Any]]:
        """Every tier: ``name``, ``type``, ``where``, ``shared``, ``sync``, ``state``, ``objects``, ``used_bytes``,
        ``capacity_bytes`` (-1: not known), ``accounts`` (None: not known), ``queued_objects``,
        ``queued_bytes``, and running totals."""
        accounts = [{"accounts": tier.accounts_state()} for tier in self._tiers]
        return [{**figures, **more} for figures, more in zip(self.figures(), accounts, strict=True)]

    def known(self, tier: str, key: bytes) -> bool | None:
        """Whether a tier holds an object, from memory; None: only its engine knows.

        Raises:
            KeyError: for an unknown tier.
        """
        return self._named(tier).may_hold(key)

    def objects(self, tier: str) -> list[tuple[bytes, Item]] | None:
        """What a tier holds, by key; None: only its engine knows.

        Raises:
            KeyError: for an unknown tier.
        """
        index = self._named(tier).index
        return None if index is None else index.items()

    @property
    def idle(self) -> bool:
        """Whether no write waits or runs and no prefetch is under way."""
        return self._writes.idle and not self._loader.active

    # ---- without it

    def holds(self, keys: Sequence[bytes], seconds: float, tiers: Container[str] | None = None) -> list[bool]:
        """Whether one of the tiers (None: any) says that it holds each object. Shared ones are asked, all at once,
        and count as far as they answer within ``seconds``."""
        return holds(self._among(tiers), keys, seconds)

    def flush(self, seconds: float) -> bool:
        """Wait until all writes are done or given up; False if they are not by then."""
        return self._writes.flush(seconds)

    def close(self, seconds: float) -> None:
        """Flush, end every prefetch, every thread and every adapter, all within about ``seconds``. A thread whose
        call hangs is left behind; so is its memory in L1."""
        until = Call(seconds)
        self._loader.close()
        self.flush(seconds * 0.8)
        for tier in self._tiers:
            tier.workers.close(0)  # all are told before we wait for one
        for tier in self._tiers:
            tier.close(until.remaining)
        self._clock.close()

    # ---- helpers

    def _promote(self, key: bytes, source: Tier) -> None:
        if self.options.promote and source is not self._tiers[0]:
            above = self._tiers[: self._tiers.index(source)]
            self._writes.queue([key], [tier for tier in above if not tier.shared])

    def _among(self, names: Container[str] | None) -> list[Tier]:
        return [tier for tier in self._tiers if names is None or tier.name in names]

    def _named(self, name: str) -> Tier:
        for tier in self._tiers:
            if tier.name == name:
                return tier
        raise KeyError(f"tier {name!r}: expected one of {', '.join([L1_NAME, *self.names])}")

    def _chosen(self, names: Sequence[str] | None) -> tuple[bool, list[Tier]]:
        if names is None:
            return True, list(self._tiers)
        named = [self._named(name) for name in names if name != L1_NAME]
        return L1_NAME in names, [tier for tier in self._tiers if tier in named]

    def _forget(self, removal: Removal, tiers: Sequence[Tier]) -> None:
        """What is on its way from or to these tiers is not to arrive."""
        if tiers:
            self._loader.forget(removal)
            self._writes.forget(removal, tiers)

    def _below(
        self,
        tiers: Sequence[Tier],
        counts: dict[str, int],
        removal: Removal,
        act: Callable[[Tier, Call], int],
    ) -> Future[dict[str, int]]:
        """Have every tier do ``act`` for a removal, in a thread of its own; ``counts`` gets the numbers."""
        future: Future[dict[str, int]] = Future()
        future.set_running_or_notify_cancel()  # whoever loses interest stops nothing
        left = len(tiers)
        mutex = threading.Lock()

        def ended(tier: Tier, count: int | None) -> None:
            nonlocal left
            with mutex:
                counts[tier.name] = -1 if count is None else count
                left -= 1
                last = not left
            if last:
                future.set_result(counts)

        for tier in tiers:
            if not tier.remove_later(removal, partial(act, tier), partial(ended, tier)):
                ended(tier, None)
        if not tiers:
            future.set_result(counts)
        return future


def _clear_account(tier: Tier, account: str, call: Call) -> int:
    """Delete what counts against ``account``, by the index or else by its header; -1 where the engine alone knows what
    it holds."""
    if tier.index is None:
        return -1
    mine, unknown = tier.index.of_account(account)
    count = 0
    for at in range(0, len(mine) + len(unknown), _CLEAR_BATCH):
        if call.over:
            raise AdapterError(
                f"tier {tier.name}: no time left after {at} of {len(mine) + len(unknown)} objects"
            )
        part = mine[at : at + _CLEAR_BATCH]
        rest = unknown[max(0, at - len(mine)) : max(0, at + _CLEAR_BATCH - len(mine))]
        infos = tier.headers(rest, call) if rest else []
        part += [
            k for k, info in zip(rest, infos, strict=True) if info is not None and info.account == account
        ]
        count += tier.delete(part, call) if part else 0
    return count

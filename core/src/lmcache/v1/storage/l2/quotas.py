"""Accounts in one tier of our own: what each may take there, and what goes when that is too much.

An account over its quota loses its own objects, those that the tier's policy names first; never anybody else's. What
does not fit even then is refused. The engine keeps the books (:meth:`StorageAdapter.accounts`) and is strict: it takes
nothing beyond a quota, whoever else stores at the same moment.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Collection, Sequence
from typing import NamedTuple

from lmcache.logging import init_logger
from lmcache.v1.storage.accounts import Accounts, AccountUsage
from lmcache.v1.storage.l2.adapter import Call, Put, StorageAdapter
from lmcache.v1.storage.l2.envelope import EnvelopeError, unpack
from lmcache.v1.storage.l2.tier_index import Item, TierIndex

__all__ = ["Coming", "TierAccounts", "coming", "part_of"]

logger = init_logger(__name__)

_EVICT_TO = 0.90
"""Of a quota: where an eviction stops, as for the whole tier."""
_PART_SECONDS, _PART = 1.0, 0.25


class Coming(NamedTuple):
    """An object that is to be stored."""

    put: Put
    item: Item


def coming(adapter: StorageAdapter, put: Put) -> Coming:
    """What an engine of our own will have with ``put``."""
    try:
        account = sys.intern(unpack(put.header).account)  # of millions of objects few texts
    except EnvelopeError:  # not ours to judge: a load will tell
        account = None
    head, body = len(put.header), len(put.payload)
    return Coming(put, Item(head + body, account, int(adapter.takes(head, body))))


def part_of(call: Call) -> Call:
    """For what is removed ahead of its time: it is not to cost the call, and those that wait for it, theirs."""
    return Call(min(_PART_SECONDS, call.remaining * _PART))


class TierAccounts:
    """The quotas of one tier. Thread-safe; what takes a :class:`Call` runs in the tier's threads.

    Args:
        evict: deletes these objects, and counts them as evicted; begins with none once its second call is over.
    """

    def __init__(
        self, adapter: StorageAdapter, index: TierIndex, evict: Callable[[Sequence[bytes], Call, Call], None]
    ) -> None:
        self._adapter = adapter
        self._index = index
        self._evict = evict

    @property
    def books(self) -> Accounts | None:
        """The engine's; None if it keeps none, or fails to show them."""
        try:
            books = self._adapter.accounts()
        except Exception as exc:  # a plugin's fault must not spoil the server's status
            logger.debug("%s: accounts: %s", type(self._adapter).__name__, exc)
            return None
        return books if isinstance(books, Accounts) else None

    def usage(self, limited: bool = False) -> dict[str, AccountUsage]:
        """Of every account that has something there, or a quota; ``limited``: only of those with a quota."""
        books = self.books
        return {} if books is None else books.usage(limited)

    @property
    def over(self) -> bool:
        """Whether some account has more than it may."""
        books = self.books
        return books is not None and bool(books.over())

    def make_room(self, objects: Sequence[Coming], call: Call) -> list[bool]:
        """Evict what the accounts of ``objects`` have too much of; for each whether it fits then."""
        books = self.books
        fits = [True] * len(objects)
        if books is None:
            return fits
        for account in dict.fromkeys(one.item.account for one in objects):
            quota = None if account is None else books.quota(account)
            if account is not None and quota is not None:
                mine = [i for i, one in enumerate(objects) if one.item.account == account]
                self._fit(account, quota, objects, mine, fits, call)
        return fits

    def _fit(
        self,
        account: str,
        quota: int,
        objects: Sequence[Coming],
        mine: Sequence[int],
        fits: list[bool],
        call: Call,
    ) -> None:
        new = [i for i in mine if objects[i].put.key not in self._index]
        sizes = [objects[i].item.taken for i in new]
        need = min(quota, sum(size for size in sizes if size <= quota))  # nothing goes for what cannot come
        used = self._used(account)
        if used + need > quota:
            # Some more at once, because the way to the account's own may be long.
            nbytes = used + need - int(quota * _EVICT_TO)
            without = {objects[i].put.key for i in mine}
            self._drop(nbytes, without, account, call, part_of(call))
            if self._used(account) + need > quota:
                self._drop(self._used(account) + need - quota, without, account, call, call)
        room = quota - self._used(account)
        for i, size in zip(new, sizes, strict=True):
            fits[i] = size <= room
            room -= size if fits[i] else 0

    def is_full(self, one: Coming) -> bool:
        """Whether its account's quota is why it was not taken."""
        books, account = self.books, one.item.account
        if books is None or account is None:
            return False
        quota = books.quota(account)
        return quota is not None and books.used(account) + one.item.taken > quota

    def trim(self, call: Call) -> bool:
        """Evict what accounts have beyond their quotas, which may be newer than what they have; whether another call
        would get further."""
        books, went, until = self.books, False, part_of(call)
        if books is None:
            return False
        for account in books.over():
            quota, used = books.quota(account), books.used(account)
            if quota is not None:
                self._drop(used - quota, (), account, call, until)
                went = went or books.used(account) < used
        return went and self.over

    def _used(self, account: str) -> int:
        books = self.books  # others than before, if another directory came to its place
        return 0 if books is None else books.used(account)

    def _drop(self, nbytes: int, without: Collection[bytes], account: str, call: Call, until: Call) -> None:
        if not until.over:
            self._evict(self._index.victims(nbytes, without, account), call, until)

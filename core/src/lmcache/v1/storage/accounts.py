"""Books: whose bytes are whose in L1 or in a tier, what quotas there are; and what happened in L1 so far."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

__all__ = ["AccountUsage", "Accounts", "L1Counters"]


@dataclass(slots=True)
class L1Counters:
    """Running totals since the server started."""

    stored: int = 0
    duplicates: int = 0
    evicted: int = 0
    dropped_full: int = 0
    aborted: int = 0
    loaded: int = 0
    """From tiers below."""


class AccountUsage(NamedTuple):
    """``used_bytes`` is what is taken, reservations included; ``quota_bytes`` is None where there is no limit."""

    used_bytes: int
    objects: int
    quota_bytes: int | None


@dataclass(slots=True)
class _Account:
    used: int = 0
    objects: int = 0
    """Published."""


class Accounts:
    """Figures of every account that has something, and the quotas, also of those that have nothing.

    Changed under a lock of its owner's; it may be read without.

    Args:
        quotas: limits that hold already. They are kept there, so that other books may go by the same.
    """

    def __init__(self, quotas: dict[str, int] | None = None) -> None:
        self._have: dict[str, _Account] = {}
        self._quotas = {} if quotas is None else quotas

    def take(self, account: str, nbytes: int) -> None:
        """Room is reserved."""
        self._have.setdefault(account, _Account()).used += nbytes

    def give(self, account: str, nbytes: int) -> None:
        """Room is free again."""
        have = self._have[account]
        have.used -= nbytes
        if not have.used and not have.objects:  # a file system may put a small file where it takes nothing
            del self._have[account]

    def published(self, account: str) -> None:
        """One of its reservations became an object."""
        self._have[account].objects += 1

    def removed(self, account: str) -> None:
        """One of its objects goes; :meth:`give` follows."""
        self._have[account].objects -= 1

    def set_quota(self, account: str, nbytes: int | None) -> None:
        """Limit an account; None: no limit.

        Raises:
            ValueError: for a negative limit.
        """
        if nbytes is not None and nbytes < 0:
            raise ValueError(f"quota of {nbytes} bytes: expected 0 or more, or None for no limit")
        if nbytes is None:
            self._quotas.pop(account, None)
        else:
            self._quotas[account] = nbytes

    def quota(self, account: str) -> int | None:
        """The limit in bytes, if there is one."""
        return self._quotas.get(account) if self._quotas else None

    def over(self) -> list[str]:
        """Accounts that have more than their limit."""
        return [name for name, quota in list(self._quotas.items()) if self.used(name) > quota]

    def used(self, account: str) -> int:
        """Bytes taken."""
        have = self._have.get(account)
        return have.used if have else 0

    def objects(self, account: str) -> int:
        """Published objects."""
        have = self._have.get(account)
        return have.objects if have else 0

    def usage(self, limited: bool = False) -> dict[str, AccountUsage]:
        """Everybody who has something or a quota; ``limited``: only who has a quota."""
        names = sorted(self._quotas if limited else {*self._have, *self._quotas})
        return {
            name: AccountUsage(self.used(name), self.objects(name), self._quotas.get(name)) for name in names
        }

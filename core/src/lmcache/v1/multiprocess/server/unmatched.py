"""Layouts that peers push and no engine of this server has: it is said in the log, for else nobody would notice.

What is pushed lies under the key of its own layout. Where prefill and decode differ in anything that the key holds,
pushes arrive and lookups find nothing: safe, and silent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from lmcache.logging import init_logger
from lmcache.v1.keys import Namespace
from lmcache.v1.storage.l2.remote import reason

__all__ = ["Unmatched"]

logger = init_logger(__name__)

_KEPT = 64
_SHOWN = 60
"""Characters of a value."""
_PLACE = {"tp_rank", "pp_rank", "group"}
"""What differs between the parts of one engine. Those of which nothing else differs may yet register."""


class Unmatched:
    """Called under the server's lock.

    Args:
        known: the layouts that engines registered here, by digest.
    """

    def __init__(self, known: Mapping[bytes, Namespace]) -> None:
        self._known = known
        self._pushed: dict[bytes, Namespace] = {}
        self._unseen: list[Namespace] = []
        """Pushed, and not compared with anything yet."""
        self._said: set[str] = set()

    def pushed(self, layouts: Sequence[Namespace]) -> None:
        """A peer tells the layouts of what it pushes."""
        for layout in layouts:
            digest = layout.digest()
            if digest not in self._pushed:
                self._pushed[digest] = layout
                self._unseen.append(layout)
        for digest in list(self._pushed)[:-_KEPT]:
            del self._pushed[digest]
        del self._unseen[:-_KEPT]
        self.look()

    def look(self) -> None:
        """Say what is new. To be called when an engine has registered, too."""
        if not self._known:
            return
        unseen, self._unseen = self._unseen, []
        for layout in unseen:
            if len(self._said) < _KEPT and layout.digest() not in self._known:
                self._say(layout)

    def _say(self, there: Namespace) -> None:
        nearest = min(self._known.values(), key=lambda known: len(_differing(there, known)))
        names = _differing(there, nearest)
        one, two = _fields(there), _fields(nearest)
        told = [name for name in names if name not in _PLACE]
        text = ", ".join(f"{n} {_short(one.get(n))} there and {_short(two.get(n))} here" for n in told)
        if text and text not in self._said:
            self._said.add(text)
            logger.warning(
                "a peer pushes KV of a layout that no engine of this server has, so none finds it: %s;"
                " start both engines alike",
                reason(text, 1000),
            )

    @property
    def count(self) -> int:
        """Pushed layouts that no engine here has; 0 as long as there is no engine."""
        return sum(digest not in self._known for digest in self._pushed) if self._known else 0


def _differing(one: Namespace, two: Namespace) -> list[str]:
    first, second = _fields(one), _fields(two)
    return [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]


def _fields(layout: Namespace) -> dict[str, object]:
    fields = msgspec.structs.asdict(layout)
    return {**{name: value for name, value in fields.items() if name != "extra"}, **fields["extra"]}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

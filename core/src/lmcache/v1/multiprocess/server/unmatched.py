"""Layouts that peers push and no engine of this server has: it is said in the log, for else nobody would notice.

What is pushed lies under the key of its own layout. Where prefill and decode differ in anything that the key holds,
pushes arrive and lookups find nothing: safe, and silent.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lmcache.logging import init_logger
from lmcache.v1.keys import DIGEST_BYTES, Namespace
from lmcache.v1.multiprocess.server.sessions import Sessions
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.l2.remote import reason

__all__ = ["Unmatched"]

logger = init_logger(__name__)

_KEPT = 64
_SHOWN = 60
"""Characters of a value."""
_PLACE = {"tp_rank", "pp_rank", "group"}
"""What the parts of one engine differ in, and so not worth a word where anything else differs."""


class Unmatched:
    """Called under the server's lock.

    Args:
        sessions: of the engines that may find what is pushed.
    """

    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions
        self._told: dict[bytes, Namespace] = {}
        """Layouts that peers told of, by digest."""
        self._judged: set[bytes] = set()
        self._strange: set[bytes] = set()
        """Of what was pushed since an engine registered last."""
        self._said: set[str] = set()

    def pushed(self, msg: p.PushReserve) -> None:
        """Somebody pushes: say it if nobody finds that."""
        for layout in msg.layouts:
            self._told[layout.digest()] = layout
        for digest in list(self._told)[:-_KEPT]:
            del self._told[digest]
        self._judged &= self._told.keys()
        self._strange &= self._told.keys()
        new = {key[:DIGEST_BYTES] for key in p.split_keys(msg.keys)} & self._told.keys()
        new -= self._judged
        if new and (engines := self._layouts()):
            for digest in new - engines.keys():
                self._strange.add(digest)
                self._say(self._told[digest], engines)
            self._judged |= new

    def engine_registered(self) -> None:
        """Judge anew."""
        for found in (self._judged, self._strange, self._said):
            found.clear()

    @property
    def count(self) -> int:
        """Layouts that were pushed since an engine registered last, and that no engine has."""
        return len(self._strange)

    def _layouts(self) -> dict[bytes, Namespace]:
        """Those of the engines that are here with all their ranks."""
        return {
            digest: layout
            for engine in self._sessions.engines.values()
            if engine.complete
            for groups in engine.namespaces.values()
            for digest, layout in groups
        }

    def _say(self, there: Namespace, engines: Mapping[bytes, Namespace]) -> None:
        nearest = min(engines.values(), key=lambda known: len(_differing(there, known)))
        names = _differing(there, nearest)
        one, two = _fields(there), _fields(nearest)
        told = [name for name in names if name not in _PLACE] or names
        text = ", ".join(f"{n} {_short(one.get(n))} there and {_short(two.get(n))} here" for n in told)
        if text not in self._said and len(self._said) < _KEPT:
            self._said.add(text)
            logger.warning(
                "a peer pushes KV of a layout that no engine of this server has, so none finds it: %s;"
                " start both engines alike",
                reason(text, 1000),
            )


def _differing(one: Namespace, two: Namespace) -> list[str]:
    first, second = _fields(one), _fields(two)
    return [name for name in sorted({*first, *second}) if first.get(name) != second.get(name)]


def _fields(layout: Namespace) -> dict[str, object]:
    fields = msgspec.structs.asdict(layout)
    return {**{name: value for name, value in fields.items() if name != "extra"}, **fields["extra"]}


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"

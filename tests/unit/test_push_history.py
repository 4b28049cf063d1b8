"""Whatever peers do, in whatever order: what is published is right, and what is taken is theirs."""

from __future__ import annotations

from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from helpers.local import LocalServer
from helpers.pusher import Pusher, key_of, payload_of
from lmcache.v1.protocol import messages as m
from lmcache.v1.protocol import peer as p
from lmcache.v1.storage.shm_pool import PAGE

NAMES = st.lists(st.integers(0, 11), min_size=1, max_size=4, unique=True)
WHO = st.integers(0, 1)
SIZE = PAGE + 7
LIMIT_PAGES = 12
PAGES = 24


class History(RuleBasedStateMachine):
    """Two peers. The model: what each has open, and which of its objects are written as they should be."""

    def __init__(self) -> None:
        super().__init__()
        self.server = LocalServer(pages=PAGES)
        self.pushers = [Pusher(self.server, str(n).encode()) for n in range(2)]
        self.open: list[dict[int, list[Any]]] = [{}, {}]
        """Per peer and lease: [name, written right] of each object that was given room."""

    def lease(self, who: int, pick: int) -> int | None:
        leases = sorted(self.open[who])
        return leases[pick % len(leases)] if leases else None

    @rule(who=WHO, names=NAMES)
    def reserve(self, who: int, names: list[int]) -> None:
        lease, offsets = self.pushers[who].reserve(names, size=SIZE)
        given = [[name, False] for name, offset in zip(names, offsets, strict=True) if offset >= 0]
        if given:
            self.open[who][lease] = given

    @rule(who=WHO, pick=st.integers(0, 9), index=st.integers(0, 3), lie=st.booleans())
    def write(self, who: int, pick: int, index: int, lie: bool) -> None:
        lease = self.lease(who, pick)
        if lease is None:
            return
        given = self.open[who][lease]
        name = given[index % len(given)][0]
        data = payload_of("lie" if lie else name, SIZE)
        assert isinstance(self.pushers[who].write(lease, index % len(given), data), m.Ok)
        given[index % len(given)][1] = not lie

    @rule(who=WHO, pick=st.integers(0, 9))
    def commit(self, who: int, pick: int) -> None:
        lease = self.lease(who, pick)
        if lease is None:
            return
        given = self.open[who].pop(lease)
        there = self.pushers[who].held([name for name, _ in given])
        message = self.pushers[who].commit(lease, [payload_of(name, SIZE) for name, _ in given])
        results = self.pushers[who].ask(message).results
        expected = [(2 if old else 1) if right else 0 for (_, right), old in zip(given, there, strict=True)]
        assert results == expected

    @rule(who=WHO, pick=st.integers(0, 9))
    def abort(self, who: int, pick: int) -> None:
        lease = self.lease(who, pick)
        if lease is not None:
            del self.open[who][lease]
            self.pushers[who].abort(lease)

    @rule(who=WHO)
    def end(self, who: int) -> None:
        self.pushers[who].bye()
        self.open[who].clear()
        self.pushers[who] = Pusher(self.server, str(who).encode())

    @rule(who=WHO, names=NAMES)
    def pull(self, who: int, names: list[int]) -> None:
        pusher, there = self.pushers[who], self.pushers[who].held(names)
        keys = b"".join(map(key_of, names))
        lease = next(pusher._leases)
        found = pusher.ask(p.PullOpen(session=pusher.session, lease=lease, keys=keys, seconds=9.0))
        assert [size >= 0 for size in found.sizes] == there
        pusher.ask(p.PullClose(session=pusher.session, leases=[lease]))

    @rule()
    def clear(self) -> None:
        with self.server.lock:
            self.server.service.l1.clear()

    @invariant()
    def what_is_published_is_right(self) -> None:
        right = {key_of(name): payload_of(name, SIZE) for name in range(12)}
        for key, data in self.server.objects().items():
            assert data == right[key]

    @invariant()
    def what_is_taken_is_what_is_open_or_published(self) -> None:
        held = 2 * PAGE * sum(len(given) for mine in self.open for given in mine.values())
        state = self.server.service.peers.state()
        assert state["reserved_bytes"] == held <= LIMIT_PAGES * PAGE
        assert self.server.usage["reserved_bytes"] == held
        assert self.server.usage["used_bytes"] == held + 2 * PAGE * len(self.server.objects())
        assert self.server.usage["pinned_objects"] == 0

    def teardown(self) -> None:
        for pusher in self.pushers:
            pusher.bye()
        assert self.server.left_over() == {}
        self.server.service.peers.close()
        self.server.close()


TestHistory = History.TestCase
TestHistory.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)

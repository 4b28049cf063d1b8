"""Scheduler side, workers and server together, over random histories of requests and faults.

Whatever happens, in whatever order: no token is sampled from a wrong page, nothing wrong is ever stored,
every request ends, and in the end the server holds nothing for anybody.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from hypothesis import Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from helpers.held_tier import HeldTier
from helpers.local import LocalServer
from helpers.mini_engine import FakeRequest, MiniEngine
from helpers.server import wait_for

CHUNK = 8
PREFIXES = (0, 1000)


class EngineHistory(RuleBasedStateMachine):
    def make_server(self, pages: int) -> LocalServer:
        return LocalServer(pages=pages, chunk_size=CHUNK)

    @initialize(
        pages=st.sampled_from([256, 40]),
        blocks=st.sampled_from([(4,), (4, 2)]),
        ranks=st.integers(1, 2),
        mapped=st.booleans(),
        budget=st.sampled_from([6, 20, 1000]),
        lag=st.integers(0, 1),
        save_decode=st.booleans(),
    )
    def start(
        self,
        pages: int,
        blocks: tuple[int, ...],
        ranks: int,
        mapped: bool,
        budget: int,
        lag: int,
        save_decode: bool,
    ) -> None:
        self.server = self.make_server(pages)
        self.engine = MiniEngine(
            self.server,
            block_sizes=blocks,
            ranks=ranks,
            mapped=mapped,
            budget=budget,
            lag=lag,
            save_decode=save_decode,
            num_blocks=600,
            prefetch_timeout=0.05,
        )
        self.ids = itertools.count()
        for prefix in PREFIXES:
            self.request(prefix, 40, 10)
        self.engine.run()

    # ---- requests

    def request(self, prefix: int, shared: int, own: int, local: int = 0, **fields: Any) -> None:
        number = next(self.ids)
        tokens = [*range(prefix, prefix + shared), *range(number * 100, number * 100 + own)]
        local = min(local, (len(tokens) - 1) // 4 * 4)
        self.engine.add(FakeRequest(f"r{number}", tokens, local=local, **fields))

    @precondition(lambda self: self.engine.unfinished < 12)
    @rule(
        prefix=st.sampled_from(PREFIXES),
        shared=st.sampled_from([40, 32, 31, 24, 9, 1]),
        own=st.integers(0, 20),
        local=st.sampled_from([0, 0, 4, 8, 20]),
        max_tokens=st.integers(1, 9),
        salt=st.sampled_from(["", "", "", "tenant"]),
    )
    def add(self, prefix: int, shared: int, own: int, local: int, max_tokens: int, salt: str) -> None:
        self.request(prefix, shared, own, local, max_tokens=max_tokens, cache_salt=salt)

    @rule()
    def step(self) -> None:
        self.engine.step()

    @rule(steps=st.integers(2, 5))
    def steps(self, steps: int) -> None:
        for _ in range(steps):
            self.engine.step()

    @precondition(lambda self: self.engine.running)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        self.engine.preempt(data.draw(st.sampled_from(self.engine.running)))

    @precondition(lambda self: self.engine.running or self.engine.waiting)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.engine.finish(data.draw(st.sampled_from(self.engine.running + self.engine.waiting)))

    # ---- faults

    @precondition(lambda self: self.engine.unfinished < 12)
    @rule(
        how=st.sampled_from(["take back", "take back", "evict", "restart", "stop"]),
        shared=st.sampled_from([40, 32]),
        own=st.integers(1, 20),
    )
    def something_happens_between_a_lookup_and_its_load(self, how: str, shared: int, own: int) -> None:
        self.engine.mishap = self.fault(how)
        self.request(PREFIXES[0], shared, own, max_tokens=3)

    @rule(how=st.sampled_from(["evict", "restart", "stop"]))
    def something_happens_between_two_steps(self, how: str) -> None:
        self.fault(how)()

    def fault(self, how: str) -> Callable[[], object]:
        return {
            "take back": self.server.take_back,
            "evict": self.server.clear,
            "restart": self.server.start,
            "stop": self.stop_or_continue,
        }[how]

    def stop_or_continue(self) -> None:
        self.server.answers = not self.server.answers

    @precondition(lambda self: not self.engine.clients_are_up)
    @rule()
    def beat(self) -> None:
        self.engine.heartbeat()

    # ---- what must hold

    @invariant()
    def what_is_stored_is_what_it_claims_to_be(self) -> None:
        self.engine.check_store()

    def teardown(self) -> None:
        self.engine.mishap = None
        self.server.answers = True
        self.engine.heartbeat()
        self.engine.run(3000)
        self.engine.check_store()
        self.check_nothing_left()
        assert self.engine.side.tracked_requests == 0
        self.server.clear()
        for name, cached in (("cold", 0), ("warm", 24)):
            request = self.engine.add(FakeRequest(name, list(range(50_000, 50_025))))
            self.engine.run(3000)
            assert request.cached == cached, "the cache is as good as new"
        self.server.close()

    def check_nothing_left(self) -> None:
        assert self.server.left_over() == {}


class TieredHistory(EngineHistory):
    """The same over a tier that outlives servers, and that stops, fails and comes back."""

    def make_server(self, pages: int) -> LocalServer:
        objects: dict[bytes, tuple[bytes, bytes]] = {}
        self.tiers: list[HeldTier] = []

        def adapters() -> list[tuple[str, HeldTier]]:
            self.tiers.append(HeldTier(objects))
            return [("memory", self.tiers[-1])]

        limits = {"l2_load_seconds": 0.2, "l2_store_seconds": 0.2, "l2_prefetch_seconds": 0.3}
        return LocalServer(pages=pages, chunk_size=CHUNK, adapters=adapters, **limits)

    @rule(what=st.sampled_from(["reads", "writes", "fails"]))
    def the_tier_stops_or_goes_on(self, what: str) -> None:
        tier = self.tiers[-1]
        if what == "fails":
            tier.failing = not tier.failing
        else:
            gate = getattr(tier, what)
            (gate.clear if gate.is_set() else gate.set)()

    @rule()
    def all_is_written(self) -> None:
        self.server.service.store.flush(0.05)

    def teardown(self) -> None:
        for tier in self.tiers:
            tier.failing = False
            tier.reads.set()
            tier.writes.set()
        super().teardown()

    def check_nothing_left(self) -> None:
        wait_for(lambda: self.server.left_over() == {}, 10, "all is given back")


TestEngineHistory = EngineHistory.TestCase
TestTieredHistory = TieredHistory.TestCase
TestTieredHistory.settings = settings(
    max_examples=40,
    stateful_step_count=30,
    report_multiple_bugs=False,
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
TestEngineHistory.settings = settings(max_examples=80, stateful_step_count=30, report_multiple_bugs=False)

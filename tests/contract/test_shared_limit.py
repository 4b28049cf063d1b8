"""Two servers over one shared directory with a limit: below it together, never a wrong byte, whoever is killed."""

from __future__ import annotations

import json
import threading
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from helpers.forked_server import ForkedServer
from helpers.server import wait_for
from helpers.stored import blocks_below, temps_below
from helpers.tier_load import Stranger
from lmcache.v1.protocol import messages as m

CHUNKS = 6
ON_DISK = (64 << 10) + 4096
LIMIT = 60 * ON_DISK
KILLS = 4


def a_server(path: Path, number: int) -> ForkedServer:
    """L1 has room for few chunks, so most come from the directory."""
    spec = {"type": "shared_fs", "path": str(path / "kv"), "max_gb": LIMIT / 2**30, "check_seconds": 0.05}
    return ForkedServer(
        path / f"log-{number}", l1_size_gb=0.002, l2_adapter=(json.dumps(spec),), l2_queue_gb=0.001
    )


def tokens(prompt: int) -> list[int]:
    return list(range(prompt * 10_000, prompt * 10_000 + 256 * CHUNKS + 1))


def store(engine: Stranger, prompts: Sequence[int]) -> None:
    for prompt in prompts:
        engine.store(engine.hashes(tokens(prompt)))


def find(engine: Stranger, prompts: Sequence[int]) -> int:
    """Every byte of what is found is compared."""
    return sum(engine.find(engine.hashes(tokens(prompt))) for prompt in prompts)


def taken(path: Path) -> int:
    """Bytes; more than can be if a file went meanwhile."""
    try:
        return blocks_below(path)
    except FileNotFoundError:
        return 1 << 60


def below_the_limit(path: Path) -> None:
    wait_for(lambda: taken(path) <= LIMIT, what="below the limit")


def well(engine: Stranger) -> None:
    (tier,) = engine.ask(m.Status()).fields["l2"]
    assert (tier["state"], tier["errors"], tier["quarantined"], tier["failed"]) == ("up", 0, 0, 0), tier


def test_two_servers_keep_a_directory_below_its_limit_while_both_store_and_load(tmp_path: Path) -> None:
    with a_server(tmp_path, 1) as first, a_server(tmp_path, 2) as second:
        with Stranger(first.address, "a") as a, Stranger(second.address, "b") as b:
            for giver, taker, prompt in ((a, b, 900), (b, a, 901)):
                store(giver, [prompt])
                wait_for(lambda e=giver: _tier(e)["queued_objects"] == 0, what="written behind")
                assert find(taker, [prompt]) == CHUNKS, "each finds what the other stored"

            def work(me: int, engine: Stranger) -> None:
                for prompt in range(30):
                    store(engine, [2 * prompt + me])
                    find(engine, [2 * prompt + 1 - me, 2 * prompt + me, max(0, 2 * prompt - 7)])

            threads = [threading.Thread(target=work, args=pair) for pair in enumerate((a, b))]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join(120)
                assert not thread.is_alive()
            below_the_limit(tmp_path)
            for engine in (a, b):
                well(engine)
                wait_for(
                    lambda e=engine: _tier(e)["used_bytes"] == taken(tmp_path),
                    what="both say how much there is",
                )


def _tier(engine: Stranger) -> dict[str, Any]:
    (tier,) = engine.ask(m.Status()).fields["l2"]
    assert tier["capacity_bytes"] == LIMIT
    return dict(tier)


def test_the_limit_is_kept_whoever_is_killed_in_the_middle_of_it(tmp_path: Path) -> None:
    servers = [a_server(tmp_path, 1), a_server(tmp_path, 2)]
    try:
        for round_ in range(KILLS):
            victim, other = servers[round_ % 2], servers[1 - round_ % 2]
            doomed = Stranger(victim.address, f"v{round_}")
            with closing(doomed.channel), Stranger(other.address, f"o{round_}") as living:
                mine = range(round_ * 100, round_ * 100 + 14)
                theirs = range(round_ * 100 + 50, round_ * 100 + 64)
                store(doomed, mine)
                store(living, theirs[:7])
                victim.kill()  # it looks twenty times a second
                store(living, theirs[7:])
                below_the_limit(tmp_path)
                find(living, [*mine, *theirs])
                wait_for(lambda e=living: _tier(e)["queued_objects"] == 0, what="written behind")
                store(living, [round_ * 100 + 99])
                assert find(living, [round_ * 100 + 99]) == CHUNKS
                well(living)
            servers[round_ % 2] = a_server(tmp_path, round_ + 3)
        for server in servers:
            assert server.end() == 0
        assert len(temps_below(tmp_path)) <= KILLS * 4, "of the killed, for the hourly sweep"
    finally:
        for server in servers:
            server.__exit__()

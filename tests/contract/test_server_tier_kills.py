"""Rounds of kill -9 of a server with a disk tier, at any instant under load: the next server finds the truth.

LMCACHE_TIER_KILL_ROUNDS sets their number, LMCACHE_TIER_KILL_SECONDS how long all may take (on a busy machine there are
fewer then), LMCACHE_KILL_SEED the seed.
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

import pytest

from helpers.forked_server import ForkedServer
from helpers.kill_load import CHUNKS, Load, prompt
from helpers.tier_load import Stranger
from lmcache.v1.protocol import messages as m

pytestmark = pytest.mark.slow

ROUNDS = int(os.environ.get("LMCACHE_TIER_KILL_ROUNDS", "100"))
SECONDS = float(os.environ.get("LMCACHE_TIER_KILL_SECONDS", "60"))
LEAST_ROUNDS = min(ROUNDS, 10)
SEED = int(os.environ.get("LMCACHE_KILL_SEED", "5"))


def disk_truth(folder: Path) -> tuple[int, int]:
    """Objects and bytes of blocks below the directory, and no temporary file."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != "lock"]
    assert all(path.suffix == ".kv" for path in files), files
    return len(files), sum(path.stat().st_blocks * 512 for path in files)


def test_after_every_kill_what_is_found_is_right_and_nothing_else_is_there(tmp_path: Path) -> None:
    random_ = random.Random(SEED)
    folder = tmp_path / "disk"
    adapter = json.dumps({"type": "disk", "path": str(folder), "max_gb": 0.05})
    settings = {"l1_size_gb": 0.03, "l2_adapter": (adapter,)}
    begun: list[int] = []
    numbers = list(range(1_000_000, 0, -1))
    found = survived = done = 0
    until = time.monotonic() + SECONDS
    while done < ROUNDS and (done < LEAST_ROUNDS or time.monotonic() < until):
        done += 1
        with ForkedServer(tmp_path / "log", **settings) as server:
            with Stranger(server.address, "judge") as judge:
                (row,) = judge.ask(m.Status()).fields["l2"]
                objects, used = disk_truth(folder)
                assert (row["objects"], row["used_bytes"]) == (objects, used)
                asked = begun[-6:] + random_.sample(begun, min(3, len(begun)))
                for number in asked:
                    chunks = judge.find(judge.hashes(prompt(number)))
                    found += chunks
                    survived += chunks == CHUNKS
                assert judge.find(judge.hashes(prompt(2_000_000 + random_.randrange(1000)))) == 0, "phantom"
            load = Load(server.address, begun, numbers)
            time.sleep(random_.uniform(0.0, 0.2))
            server.kill()
            load.join()
            assert load.faults == []
    assert found > done, "what was written before a kill is found after it"
    assert survived
    assert "Traceback" not in (tmp_path / "log").read_text()
    print(
        f"{ROUNDS} rounds, {len(begun)} prompts begun, {found} chunks found again, {survived} prompts whole"
    )

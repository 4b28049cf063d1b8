"""What an engine in process acknowledged is found and given by the next call of anybody, while memory is short."""

from __future__ import annotations

import random
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from helpers.engine_rig import CHUNK, Rig, running, settle  # noqa: E402

CLIENTS = 4
TURNS = 60
QUEUED = 16
"""Objects that wait to be written, beyond which a client stores nothing: a queue that is full drops writes."""

PLACES: dict[str, dict[str, Any]] = {
    "a disk of its own": {"max_local_disk_size": 0.05, "local_disk": "{folder}"},
    "a folder that others share": {"remote_url": "fs://{folder}"},
    "both": {"max_local_disk_size": 0.05, "local_disk": "{folder}/a", "remote_url": "fs://{folder}/b"},
}


@pytest.mark.parametrize("layerwise", [False, True], ids=["whole chunks", "layer by layer"])
@pytest.mark.parametrize("place", PLACES)
def test_an_acknowledged_store_is_given_to_everybody_though_l1_has_room_for_a_fraction(
    place: str, layerwise: bool, tmp_path: Path
) -> None:
    settings = {
        key: value.format(folder=tmp_path) if isinstance(value, str) else value
        for key, value in PLACES[place].items()
    }
    acknowledged: list[list[int]] = []
    started = threading.Barrier(CLIENTS)

    def client(rig: Rig, number: int) -> None:
        dice = random.Random(number)
        started.wait(10)
        for turn in range(TURNS):
            settle(lambda: queued(rig) <= QUEUED, "writes to go down")
            prompt = [number, turn, *range(CHUNK * dice.randrange(1, 7) - 2)]
            rig.store(prompt)
            acknowledged.append(prompt)
            for mine in (prompt, dice.choice(acknowledged)):
                name = f"{number}.{turn}"
                assert rig.engine.lookup(mine, pin=True, lookup_id=name) == len(mine)
                assert rig.retrieve(mine, req_id=name) == len(mine)
                rig.engine.lookup_unpin(name)

    def queued(rig: Rig) -> int:
        return sum(tier["queued_objects"] for tier in rig.engine.status()["tiers"])

    with running(None, use_layerwise=layerwise, **settings) as rig:
        with ThreadPoolExecutor(CLIENTS) as pool:
            for done in [pool.submit(client, rig, number) for number in range(CLIENTS)]:
                done.result(120)
        assert sum(tier["loaded"] for tier in rig.engine.status()["tiers"]) > TURNS, (
            "much came back from below"
        )
        for prompt in acknowledged:
            assert rig.retrieve(prompt) == len(prompt)

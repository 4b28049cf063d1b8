"""Engines at once at a server whose memory is full, with nothing below: what one has just stored it finds."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from helpers.forked_server import ForkedServer
from helpers.kill_load import CHUNKS, prompt
from helpers.server import namespace
from helpers.tier_load import Stranger
from lmcache.v1.protocol import messages as m
from lmcache.v1.storage.policies import BUILT_IN

ENGINES = 3
PROMPTS = 60
NAMESPACE = namespace("load", page_bytes=(8192,))
"""A prompt is 6 objects of 128 KiB: some 60 prompts fit into L1."""


@pytest.mark.parametrize("policy", [name for name in BUILT_IN if name != "noop"])
def test_an_acknowledged_store_is_found_by_the_next_lookup_though_memory_is_full(
    policy: str, tmp_path: Path
) -> None:
    def engine(number: int) -> list[str]:
        """What it did not find."""
        lost = []
        with Stranger(server.address, f"e{number}", NAMESPACE) as stranger:
            for turn in range(PROMPTS):
                hashes = stranger.hashes(prompt(1 + number * PROMPTS + turn))
                stored = stranger.store(hashes)
                if (found := stranger.find(hashes, -1.0)) != CHUNKS:
                    lost.append(f"{number}.{turn}: {stored} stored, {found} found")
        return lost

    with ForkedServer(tmp_path / "log", l1_size_gb=0.05, eviction_policy=policy) as server:
        with ThreadPoolExecutor(ENGINES) as pool:
            assert [one for lost in pool.map(engine, range(ENGINES)) for one in lost] == []
        with Stranger(server.address, "tool", NAMESPACE) as tool:
            assert tool.ask(m.Status()).fields["l1"]["evicted"] > 0

"""What storing, looking up and retrieving promise for every request."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")

from helpers.engine_rig import CHUNK, running  # noqa: E402
from lmcache.errors import ConfigError  # noqa: E402
from lmcache.v1.cache_engine.token_database import TokenDatabase, false_prefix  # noqa: E402

pytestmark = pytest.mark.torch

TOKENS = st.lists(st.integers(0, 2**32 - 1), max_size=3 * CHUNK + 1)
MODES = st.fixed_dictionaries({"save_unfull_chunk": st.booleans(), "use_layerwise": st.booleans()})


def whole(count: int, unfull: bool = False) -> int:
    """Tokens of ``count`` that are kept."""
    return count if unfull else count // CHUNK * CHUNK


@settings(max_examples=40)
@given(tokens=TOKENS, modes=MODES)
def test_what_was_stored_is_found_at_once_and_comes_back_exactly(
    tokens: list[int], modes: dict[str, bool]
) -> None:
    with running(**modes) as rig:
        assert rig.engine.lookup(tokens) == 0
        assert rig.retrieve(tokens) == 0
        rig.store(tokens)
        kept = whole(len(tokens), modes["save_unfull_chunk"])
        assert rig.engine.lookup(tokens) == kept
        assert rig.retrieve(tokens) == kept


@settings(max_examples=40)
@given(common=TOKENS, first=TOKENS, second=TOKENS, modes=MODES)
def test_requests_share_the_chunks_of_their_common_prefix_and_no_more(
    common: list[int], first: list[int], second: list[int], modes: dict[str, bool]
) -> None:
    with running(**modes) as rig:
        one, two = [*common, 1, *first], [*common, 2, *second]
        rig.store(one)
        assert rig.engine.lookup(two) == whole(len(common))
        assert rig.retrieve(two) == whole(len(common))


@settings(max_examples=40)
@given(tokens=TOKENS, cut=st.integers(0, 4), modes=MODES)
def test_a_mask_leaves_out_leading_chunks_on_both_ways(
    tokens: list[int], cut: int, modes: dict[str, bool]
) -> None:
    left_out = min(cut * CHUNK, len(tokens))
    mask = [False] * left_out + [True] * (len(tokens) - left_out)
    kept = whole(len(tokens), modes["save_unfull_chunk"])
    with running(**modes) as rig:
        rig.store(tokens, mask=torch.tensor(mask, dtype=torch.bool))
        assert rig.engine.lookup(tokens) == (0 if left_out else kept)
        rig.store(tokens)
        assert rig.retrieve(tokens, mask=mask) == max(0, kept - left_out)


@settings(max_examples=40)
@given(flags=st.lists(st.booleans(), max_size=3 * CHUNK))
def test_a_mask_is_taken_exactly_if_it_is_false_for_whole_chunks_and_then_true(flags: list[bool]) -> None:
    skipped = flags.index(True) if True in flags else len(flags)
    good = all(flags[skipped:]) and (skipped % CHUNK == 0 or skipped == len(flags))
    if good:
        assert false_prefix(flags, len(flags), CHUNK) == skipped
    else:
        with pytest.raises(ValueError, match=r"^mask="):
            false_prefix(flags, len(flags), CHUNK)
    with pytest.raises(ValueError, match="as many as tokens"):
        false_prefix(flags, len(flags) + 1, CHUNK)


@settings(max_examples=40)
@given(tokens=TOKENS, least=st.integers(0, 3 * CHUNK), modes=MODES)
def test_less_than_the_least_is_neither_promised_nor_given(
    tokens: list[int], least: int, modes: dict[str, bool]
) -> None:
    with running(min_retrieve_tokens=least, **modes) as rig:
        rig.store(tokens)
        kept = whole(len(tokens), modes["save_unfull_chunk"])
        expected = kept if kept >= least else 0
        assert rig.engine.lookup(tokens) == expected
        assert rig.retrieve(tokens) == expected


@settings(max_examples=40)
@given(tokens=TOKENS, unfull=st.booleans())
def test_chunks_that_another_process_cut_are_the_same_chunks(tokens: list[int], unfull: bool) -> None:
    with running(save_unfull_chunk=unfull) as rig:
        elsewhere = TokenDatabase(CHUNK, unfull)
        chunks = elsewhere.chunks(tokens, elsewhere.request(None))
        asked: dict[str, Any] = {
            "hashes": [chunk.digest for chunk in chunks],
            "offsets": [chunk.tokens for chunk in chunks],
        }
        assert rig.engine.lookup(**asked) == 0
        rig.store(tokens)
        assert rig.engine.lookup(**asked) == whole(len(tokens), unfull)
        assert rig.engine.lookup(tokens) == rig.engine.lookup(**asked)


def test_chunks_by_their_digests_are_stored_too() -> None:
    with running() as rig:
        tokens = list(range(3 * CHUNK))
        chunks = rig.engine.token_database.chunks(tokens, rig.engine.token_database.request(None))
        slots = torch.arange(len(tokens))
        pages = [torch.rand(2, len(tokens), 8) for _ in range(2)]
        rig.engine.store(
            hashes=[c.digest for c in chunks],
            offsets=[c.tokens for c in chunks],
            kvcaches=pages,
            slot_mapping=slots,
        )
        assert rig.engine.lookup(tokens) == len(tokens)


@pytest.mark.parametrize(
    "asked",
    [
        {},
        {"hashes": [bytes(32)]},
        {"hashes": [bytes(32)], "offsets": []},
        {"hashes": [b"short"], "offsets": [4]},
        {"hashes": [12345], "offsets": [4]},
        {"hashes": [bytes(32)], "offsets": [0]},
        {"tokens": [-1] * CHUNK},
        {"tokens": [2**32]},
        {"tokens": [1], "search_range": ["Nowhere"]},
        {"tokens": [1], "pin": True},
        {"tokens": [1], "request_configs": {"lmcache.cache_salt": 1.5}},
        {"tokens": [1], "request_configs": {"lmcache.media": [[1, 2]]}},
    ],
)
def test_a_question_that_makes_no_sense_is_an_error_in_one_line(asked: dict[str, Any]) -> None:
    with running(save_unfull_chunk=True) as rig:
        with pytest.raises(ConfigError) as caught:
            rig.engine.lookup(**asked)
        assert "expected" in str(caught.value)
        assert "\n" not in str(caught.value)


@settings(max_examples=30)
@given(one=TOKENS, two=TOKENS, modes=MODES)
def test_clear_counts_tokens_whether_it_clears_a_request_or_all(
    one: list[int], two: list[int], modes: dict[str, bool]
) -> None:
    one, two = [1, *one], [2, *two]
    unfull = modes["save_unfull_chunk"]
    with running(**modes) as rig:
        rig.store(one)
        rig.store(two)
        assert rig.engine.clear(one) == whole(len(one), unfull)
        assert rig.engine.clear(one) == 0
        assert rig.engine.lookup(one) == 0
        assert rig.engine.lookup(two) == whole(len(two), unfull)
        assert rig.engine.clear() == whole(len(two), unfull)
        assert rig.engine.lookup(two) == 0


@settings(max_examples=40)
@given(tokens=TOKENS, modes=MODES)
def test_events_tell_each_stored_chunk_once_with_its_own_tokens(
    tokens: list[int], modes: dict[str, bool]
) -> None:
    with running(enable_kv_events=True, **modes) as rig:
        rig.store(tokens)
        rig.store(tokens)
        events = rig.engine.get_kv_events()
        kept = whole(len(tokens), modes["save_unfull_chunk"])
        assert [token for event in events for token in event.token_ids] == tokens[:kept]
        assert all(len(event.token_ids) == event.block_size <= CHUNK for event in events)
        parents = [None, *(event.block_hashes[0] for event in events)]
        assert [event.parent_block_hash for event in events] == parents[: len(events)]
        assert rig.engine.get_kv_events() == []

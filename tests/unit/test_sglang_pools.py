"""What of SGLang's pools is cached and what is refused; slots, salts and settings of its connector."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lmcache.errors import ConfigError, LayoutError

torch = pytest.importorskip("torch")

from helpers.sglang_engine import Slots, names  # noqa: E402 -- needs torch
from lmcache.integration.sglang.identity import build_cache_salt, split_cache_salt  # noqa: E402
from lmcache.integration.sglang.mesh import Mesh  # noqa: E402
from lmcache.integration.sglang.pools import Engine, blocks_of, components, kv_groups  # noqa: E402
from lmcache.integration.sglang.settings import mp_settings  # noqa: E402

pytestmark = pytest.mark.torch

ENGINE = Engine("m", "r", {}, 0, 1, 0, 1)


def groups(slots: Slots, page: int, *tree: str, window: int = 0) -> Any:
    return kv_groups(components(slots, names(*tree), page, window), page, ENGINE)


@pytest.mark.parametrize(
    ("kind", "layers", "page_bytes"),
    [("mha", 4, (128,) * 4), ("mla", 2, (64,) * 2), ("dsa", 4, (64, 64, 12, 12))],
)
def test_a_page_is_its_slots_of_each_layer_and_plane(kind: str, layers: int, page_bytes: Any) -> None:
    slots = Slots(kind, 32, 4)
    (group,) = groups(slots, 4, "FULL")
    assert group.namespace.page_bytes == page_bytes
    assert len(group.namespace.layers) == layers
    assert group.num_blocks == 9
    assert group.null_block == 0


def test_a_sliding_window_is_a_group_of_its_own() -> None:
    full, swa = groups(Slots("swa", 32, 4), 4, "FULL", "SWA", window=8)
    assert (full.namespace.group, swa.namespace.group, swa.namespace.groups) == (0, 1, 2)
    assert swa.namespace.extra["window"] == "8"


def broken(**fields: Any) -> Slots:
    slots = Slots("mha", 32, 4)
    vars(slots.pool).update(fields)
    return slots


@pytest.mark.parametrize(
    ("slots", "tree", "said"),
    [
        (Slots("mha", 32, 4), ("FULL", "MAMBA"), "FULL, MAMBA"),
        (Slots("mha", 32, 4), ("SWA",), "SGLang's tree of SWA"),
        (Slots("mha", 32, 4), ("FULL", "C128"), "C128"),
        (Slots("mha", 32, 4), ("FULL", "SWA"), "swa_kv_pool"),
        (broken(kv_cache_layout="hnd"), ("FULL",), "kv_cache_layout='hnd'"),
        (broken(k_scale_buffer=[torch.zeros(36, 1)]), ("FULL",), "k_scale_buffer"),
        (broken(v_buffer=None), ("FULL",), "k_buffer and v_buffer"),
        (broken(k_buffer=[torch.zeros(2, 36, 4).transpose(0, 1)] * 2), ("FULL",), "contiguous"),
        (broken(index_pools={}), ("FULL",), "compressed"),
        (broken(k_buffer=[torch.zeros(0)], v_buffer=[torch.zeros(0)]), ("FULL",), "at least one layer"),
    ],
)
def test_what_cannot_be_cached_is_refused_in_one_line(slots: Slots, tree: tuple[str, ...], said: str) -> None:
    with pytest.raises(LayoutError) as caught:
        groups(slots, 4, *tree)
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@given(page=st.sampled_from([1, 2, 16]), pages=st.lists(st.integers(0, 40), max_size=12))
def test_blocks_are_the_pages_of_slots(page: int, pages: list[int]) -> None:
    slots = [number * page + i if number else 0 for number in pages for i in range(page)]
    assert blocks_of(torch.tensor(slots, dtype=torch.int32), page) == pages


@given(slots=st.lists(st.integers(0, 30), min_size=4, max_size=4))
def test_slots_that_are_no_page_are_refused(slots: list[int]) -> None:
    is_page = slots == [0] * 4 or (slots[0] % 4 == 0 and slots == list(range(slots[0], slots[0] + 4)))
    if is_page:
        assert blocks_of(torch.tensor(slots), 4) == [slots[0] // 4]
    else:
        with pytest.raises(LayoutError):
            blocks_of(torch.tensor(slots), 4)


PAIRS = st.tuples(st.text(), st.text())


@given(one=PAIRS, other=PAIRS)
def test_different_salts_and_extra_keys_never_become_one(one: Any, other: Any) -> None:
    assert split_cache_salt(build_cache_salt(*one)) == one
    assert (build_cache_salt(*one) == build_cache_salt(*other)) == (one == other)


def test_ranks_without_their_groups_are_refused() -> None:
    with pytest.raises(ConfigError, match="tp_group of 0 ranks"):
        Mesh(2, 0, None)
    with pytest.raises(ConfigError, match="pp_rank=3"):
        Mesh(1, 0, None, 2, 3, None)
    assert Mesh(1, 0, None).leaders(-1, b"x") == (-1, b"x")


# ---- settings


def test_the_file_of_sglangs_own_example_is_read(tmp_path: Path) -> None:
    file = tmp_path / "mp.yaml"
    file.write_text("mp_host: 127.0.0.1\nmp_port: 5556\n")
    assert mp_settings(str(file), {}).address == "tcp://127.0.0.1:5556"
    assert mp_settings(str(file), {"LMCACHE_MP_PORT": "7"}).address == "tcp://127.0.0.1:7"
    assert mp_settings(None, {"LMCACHE_CONFIG_FILE": str(file)}).address == "tcp://127.0.0.1:5556"
    assert mp_settings(None, {}).address == "tcp://127.0.0.1:5555"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("chunk_size: 128", "give it to `lmcache server`"),
        ("mp_hots: x", "did you mean mp_host"),
        ("extra_config: [1]", "expected a map"),
        ("extra_config: {lmcache.mp.mq_timout: 1}", "did you mean lmcache.mp.mq_timeout"),
        ("extra_config: {lmcache.mp.mp_transfer_mode: lmcache_driven}", "expected auto or engine_driven"),
    ],
)
def test_a_wrong_setting_is_one_line(tmp_path: Path, text: str, said: str) -> None:
    file = tmp_path / "mp.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        mp_settings(str(file), {})
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_wrong_variable_is_refused() -> None:
    with pytest.raises(ConfigError, match="port"):
        mp_settings(None, {"LMCACHE_MP_PORT": "none"})

"""Moving keys to other positions, against plain rotations in float64."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from unittest import mock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.v1.platform.base.op_contract import OPS, signature_fault
from lmcache.v1.platform.torch_ops import rope, rotary_embedding_k_fused, rotary_embedding_k_fused_strided

torch = pytest.importorskip("torch")
np = pytest.importorskip("numpy")
pytestmark = pytest.mark.torch

POSITIONS = 64
QUICK = settings(max_examples=25, deadline=None)
#: Largest relative error of one rounding.
EPS = {torch.float32: 2.0**-23, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}


@dataclass(frozen=True)
class Case:
    """One shape of keys, and the style of the rotation."""

    tokens: int
    heads: int
    half: int
    """Of the rotated part of a head."""
    rest: int
    """Elements of a head that are not rotated."""
    gap: int
    """Elements between heads."""
    neox: bool
    dtype: Any
    seed: int

    @property
    def rot_dim(self) -> int:
        return 2 * self.half

    @property
    def head_size(self) -> int:
        return self.rot_dim + self.rest

    @property
    def stride(self) -> int:
        return self.head_size + self.gap


cases = st.builds(
    Case,
    tokens=st.integers(0, 6),
    heads=st.integers(1, 3),
    half=st.integers(1, 5),
    rest=st.integers(0, 3),
    gap=st.integers(0, 3),
    neox=st.booleans(),
    dtype=st.sampled_from(list(EPS)),
    seed=st.integers(0, 2**31),
)


def angles(positions: Any, rot_dim: int) -> Any:
    theta = 10000.0 ** (-2 * np.arange(rot_dim // 2) / rot_dim)
    return np.asarray(positions)[:, None] * theta[None, :]


def table(rot_dim: int, dtype: Any = torch.float32, scale: float = 1.0) -> Any:
    at = angles(range(POSITIONS), rot_dim)
    return torch.tensor(scale * np.concatenate([np.cos(at), np.sin(at)], axis=1)).to(dtype)


def rotated(key: Any, positions: Any, case: Case) -> Any:
    """The rotation as a matrix per pair, in float64; ``key`` is ``[T, NH, stride]``."""
    result = key.copy()
    at = angles(positions, case.rot_dim)
    for i in range(case.half):
        a, b = (i, i + case.half) if case.neox else (2 * i, 2 * i + 1)
        for t in range(len(positions)):
            cos, sin = np.cos(at[t, i]), np.sin(at[t, i])
            turn = np.array([[cos, -sin], [sin, cos]])
            result[t, :, [a, b]] = turn @ key[t, :, [a, b]]
    return result


def draw(case: Case, count: int) -> tuple[Any, list[Any]]:
    """Plain keys in float64, and ``count`` rows of positions."""
    rng = np.random.default_rng(case.seed)
    key = rng.standard_normal((case.tokens, case.heads, case.stride))
    return key, [rng.integers(0, POSITIONS, case.tokens) for _ in range(count)]


def move(key: Any, old: Any, new: Any, case: Case, **kwargs: Any) -> Any:
    """A moved copy, by the form of the op that the gap asks for."""
    moved = key.clone()
    cache = kwargs.get("cache", table(case.rot_dim))
    old, new = torch.tensor(old, dtype=torch.int64), torch.tensor(new, dtype=torch.int64)
    if case.gap:
        rotary_embedding_k_fused_strided(old, new, moved, case.head_size, case.stride, cache, case.neox)
    else:
        rotary_embedding_k_fused(old, new, moved, case.head_size, cache, case.neox)
    return moved


def as_float64(tensor: Any) -> Any:
    return tensor.to(torch.float64).numpy()


def bound(case: Case, key: Any, roundings: int) -> float:
    largest = float(np.abs(key).max()) if key.size else 0.0
    return 2 * largest * (roundings * EPS[case.dtype] + 8 * EPS[torch.float32])


@QUICK
@given(cases)
def test_a_moved_key_is_the_plain_key_rotated_at_the_new_position(case: Case) -> None:
    plain, (old, new) = draw(case, 2)
    cached = torch.tensor(rotated(plain, old, case)).to(case.dtype)
    moved = as_float64(move(cached, old, new, case))
    np.testing.assert_allclose(moved, rotated(plain, new, case), rtol=0, atol=bound(case, plain, 2))


@QUICK
@given(cases)
def test_a_key_that_stays_keeps_every_bit(case: Case) -> None:
    """Whatever the bits say: infinities, every kind of NaN, -0.0."""
    _, (old,) = draw(case, 1)
    size = case.tokens * case.heads * case.stride * case.dtype.itemsize
    bits = torch.randint(
        0, 256, (size,), dtype=torch.uint8, generator=torch.Generator().manual_seed(case.seed)
    )
    key = bits.view(case.dtype).view(case.tokens, case.heads, case.stride)
    assert torch.equal(move(key, old, old, case).view(-1).view(torch.uint8), bits)


def test_minus_zero_and_infinity_stay() -> None:
    case = Case(1, 1, 1, 0, 0, True, torch.float32, 0)
    key = torch.tensor([[[-0.0, float("inf")]]])
    moved = move(key, [3], [3], case)
    assert torch.equal(moved.view(torch.int32), key.view(torch.int32))


@QUICK
@given(cases)
def test_two_moves_are_one(case: Case) -> None:
    key, (a, b, c) = draw(case, 3)
    key = torch.tensor(key).to(case.dtype)
    twice, once = move(move(key, a, b, case), b, c, case), move(key, a, c, case)
    atol = bound(case, as_float64(key), 3)
    np.testing.assert_allclose(as_float64(twice), as_float64(once), rtol=0, atol=atol)


@QUICK
@given(cases)
def test_what_is_not_rotated_keeps_every_bit(case: Case) -> None:
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).to(case.dtype)
    moved = move(key, old, new, case)
    assert torch.equal(moved[..., case.rot_dim :], key[..., case.rot_dim :])


@QUICK
@given(cases)
def test_a_flat_key_is_the_same_memory_as_one_with_heads(case: Case) -> None:
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).to(case.dtype)
    flat = move(key.reshape(case.tokens, case.heads * case.stride), old, new, case)
    expected = move(key, old, new, case)
    atol = bound(case, as_float64(key), 1)  # where lanes of a vector end may change the last bit
    torch.testing.assert_close(flat.view(key.shape), expected, rtol=0, atol=atol)


@QUICK
@given(cases)
def test_a_key_may_be_a_view_into_wider_rows(case: Case) -> None:
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).to(case.dtype)
    wide = torch.full((case.tokens, case.heads, case.stride + 5), 7.0, dtype=case.dtype)
    view = wide[..., 2 : 2 + case.stride]
    view.copy_(key)
    positions = [torch.tensor(p, dtype=torch.int64) for p in (old, new)]
    cache = table(case.rot_dim)
    rotary_embedding_k_fused_strided(*positions, view, case.head_size, case.stride, cache, case.neox)
    torch.testing.assert_close(view, move(key, old, new, case), rtol=0, atol=bound(case, as_float64(key), 1))
    assert bool((wide[..., :2] == 7).all())
    assert bool((wide[..., 2 + case.stride :] == 7).all())


@QUICK
@given(cases, st.integers(1, 20))
def test_tokens_are_moved_alike_in_tiles_of_any_size(case: Case, tile: int) -> None:
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).to(case.dtype)
    with mock.patch.object(rope, "_TILE", tile):
        tiled = move(key, old, new, case)
    torch.testing.assert_close(tiled, move(key, old, new, case), rtol=0, atol=bound(case, as_float64(key), 1))


@pytest.mark.parametrize("neox", [True, False])
def test_a_factor_on_the_table_cancels_out(neox: bool) -> None:
    case = Case(6, 2, 4, 0, 0, neox, torch.float32, 3)
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).float()
    scaled = move(key, old, new, case, cache=table(case.rot_dim, scale=1.37))
    torch.testing.assert_close(scaled, move(key, old, new, case), rtol=0, atol=1e-5)


@pytest.mark.parametrize("neox", [True, False])
def test_a_rounded_table_is_undone_as_it_was_applied(neox: bool) -> None:
    """An engine that rotates with a bfloat16 table: its own error must not add up."""
    case = Case(POSITIONS, 2, 4, 0, 0, neox, torch.float32, 5)
    cache = table(case.rot_dim, torch.bfloat16)
    plain = torch.randn(POSITIONS, 2, 8, generator=torch.Generator().manual_seed(0))
    zero, new = np.zeros(POSITIONS, dtype=np.int64), np.arange(POSITIONS)[::-1].copy()
    moved = move(move(plain, zero, new, case, cache=cache), new, zero, case, cache=cache)
    torch.testing.assert_close(moved, plain, rtol=0, atol=1e-5)


def test_a_narrow_key_is_rounded_once() -> None:
    case = Case(50, 2, 8, 0, 0, True, torch.bfloat16, 11)
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).to(torch.bfloat16)
    moved = move(key, old, new, case)
    exact = rotated(as_float64(key), new - old, case)
    expected = torch.tensor(exact).to(torch.float32).to(torch.bfloat16)
    # float32 arithmetic may fall on the other side of a tie, seldom.
    assert float((moved == expected).float().mean()) > 0.995


def test_integer_types_of_positions_and_of_the_table_may_differ() -> None:
    case = Case(4, 1, 2, 0, 0, True, torch.float16, 1)
    key, (old, new) = draw(case, 2)
    key = torch.tensor(key).to(torch.float16)
    moved = key.clone()
    old32, new64 = torch.tensor(old, dtype=torch.int32), torch.tensor(new, dtype=torch.int64)
    rotary_embedding_k_fused(old32, new64, moved, 4, table(4), True)
    assert torch.equal(moved, move(key, old, new, case))


def good() -> dict[str, Any]:
    return {
        "old_pos": torch.tensor([1, 2]),
        "new_pos": torch.tensor([3, 4]),
        "key": torch.ones(2, 12),
        "head_size": 6,
        "cos_sin_cache": table(4),
        "is_neox": True,
    }


REFUSED = {
    "old_pos beyond the table": (
        {"old_pos": torch.tensor([1, POSITIONS])},
        ValueError,
        "old_pos has 64: expected 0 to 63",
    ),
    "negative new_pos": ({"new_pos": torch.tensor([-1, 0])}, ValueError, "new_pos has -1"),
    "positions of floats": ({"old_pos": torch.tensor([1.0, 2.0])}, TypeError, "old_pos is float32"),
    "positions of another count": ({"new_pos": torch.tensor([3])}, ValueError, "new_pos has shape"),
    "positions in a list": ({"old_pos": [1, 2]}, TypeError, "old_pos: expected a tensor, got list"),
    "keys of another count": ({"key": torch.ones(3, 12)}, ValueError, "key has shape"),
    "keys of one dimension": ({"key": torch.ones(24)}, ValueError, "key has shape"),
    "half a head": ({"key": torch.ones(2, 15)}, ValueError, "multiple of 6"),
    "heads of another size": ({"key": torch.ones(2, 2, 7)}, ValueError, "head=6"),
    "integer keys": ({"key": torch.ones(2, 12, dtype=torch.int8)}, TypeError, "key is int8"),
    "float64 keys": ({"key": torch.ones(2, 12, dtype=torch.float64)}, TypeError, "key is float64"),
    "keys elsewhere": ({"key": torch.ones(2, 12, device="meta")}, ValueError, "key is on meta: expected cpu"),
    "a table wider than a head": ({"cos_sin_cache": table(8)}, ValueError, "rot_dim=8"),
    "an odd table": ({"cos_sin_cache": table(4)[:, :3]}, ValueError, "rot_dim=3"),
    "a table of zeros": ({"cos_sin_cache": torch.zeros(POSITIONS, 4)}, ValueError, "no rotation"),
    "no head": ({"head_size": 0}, ValueError, "head_size=0"),
}


@pytest.mark.parametrize("what", REFUSED)
def test_a_refused_move_names_the_fault_and_leaves_the_key(what: str) -> None:
    change, error, text = REFUSED[what]
    call = {**good(), **change}
    before = call["key"].clone()
    with pytest.raises(error, match=text) as caught:
        rotary_embedding_k_fused(**call)
    assert "\n" not in str(caught.value)
    assert str(caught.value).startswith("rotary_embedding_k_fused: ")
    assert call["key"].device.type == "meta" or torch.equal(call["key"], before)


def test_heads_cannot_lie_closer_than_their_size() -> None:
    call = good()
    with pytest.raises(ValueError, match="head_size=6, head_stride=5"):
        rotary_embedding_k_fused_strided(*list(call.values())[:4], 5, call["cos_sin_cache"], True)


@pytest.mark.parametrize("op", [rotary_embedding_k_fused, rotary_embedding_k_fused_strided])
def test_the_ops_are_called_as_the_contract_says_and_keep_stream_order(op: Any) -> None:
    assert signature_fault(op.__name__, op) == ""
    assert OPS[op.__name__].ordered
    assert op.stream_ordered


def test_off_the_host_no_value_is_read_back() -> None:
    """The meta device has shapes and no values, so reading one would raise."""
    call = {n: v.to("meta") if hasattr(v, "to") else v for n, v in good().items()}
    rotary_embedding_k_fused(**call)
    rotary_embedding_k_fused(**{**call, **{name: call[name][:0] for name in ("old_pos", "new_pos", "key")}})


def test_keys_made_in_inference_mode_are_moved_outside_of_it() -> None:
    old, new, table = torch.arange(4), torch.arange(4) + 7, torch.rand(POSITIONS, 8) + 0.5
    plain = torch.rand(4, 8)
    with torch.inference_mode():
        key = plain.clone()
    for keys in (key, plain):
        rotary_embedding_k_fused(old, new, keys, 8, table, True)
    assert torch.equal(key, plain)

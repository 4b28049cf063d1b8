"""The connector for blending: keys at new positions, gaps, and what a blender may do with the buffers."""

from __future__ import annotations

from typing import Any

import pytest

from lmcache.errors import ConfigError, LayoutError

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.gpu_connector.gpu_connectors import VLLMBufferLayerwiseGPUConnector  # noqa: E402
from lmcache.v1.gpu_connector.lanes import Lane  # noqa: E402
from lmcache.v1.memory_management import AdHocMemoryAllocator, MemoryFormat  # noqa: E402

L, NB, BS, NH, HS = 5, 8, 4, 2, 8
WIDTH = NH * HS


def table(positions: int = 64) -> Any:
    angles = torch.arange(positions).float()[:, None] * (10.0 ** -torch.arange(HS // 2))[None]
    return torch.cat([angles.cos(), angles.sin()], dim=1)


def rotated(keys: Any, positions: Any) -> Any:
    """Keys ``[T, WIDTH]`` at these positions, as complex numbers turned by their angle."""
    half = HS // 2
    split = keys.view(-1, NH, 2, half).double()
    turn = table()[positions].double()
    turn = torch.complex(turn[:, :half], turn[:, half:])[:, None]
    found = torch.complex(split[:, :, 0], split[:, :, 1]) * turn
    return torch.stack([found.real, found.imag], dim=2).float().reshape(keys.shape)


class Rig:
    """Tokens 2..6 and 6..9 of one sequence, stored; loaded at 3..7 and 9..12 of another."""

    OLD, NEW = ([2, 6], [6, 9]), ([3, 9], [7, 12])

    def __init__(self) -> None:
        self.plain = [torch.randn(2, 16, WIDTH) for _ in range(L)]
        self.source = [torch.zeros(2, NB, BS, NH, HS) for _ in range(L)]
        for pages, plain in zip(self.source, self.plain, strict=True):
            pages.view(2, -1, WIDTH)[0, :16] = rotated(plain[0], torch.arange(16))
            pages.view(2, -1, WIDTH)[1, :16] = plain[1]
        self.connector = VLLMBufferLayerwiseGPUConnector(
            WIDTH, L, use_gpu=True, layout_hints={"engine_kv_format": 1}
        )
        self.connector.set_rotary_embedding(table(), HS, is_neox=True)
        self.allocator = AdHocMemoryAllocator()
        lengths = [end - start for start, end in zip(*self.OLD, strict=True)]
        self.objects = [
            [
                self.allocator.allocate(self.connector.get_shape(n), torch.float32, MemoryFormat.KV_2TD)
                for n in lengths
            ]
            for _ in range(L)
        ]
        for _ in self.connector.batched_from_gpu(
            self.objects, *self.OLD, kvcaches=self.source, slot_mapping=torch.arange(16), sync=True
        ):
            pass
        self.target = [torch.full((2, NB, BS, NH, HS), 7.0) for _ in range(L)]
        self.slots = torch.arange(31, 15, -1)  # token t is in slot 31 - t

    def loading(self, **more: Any) -> Any:
        return self.connector.batched_to_gpu(*self.NEW, kvcaches=self.target, slot_mapping=self.slots, **more)

    def found(self, layer: int, token: int) -> Any:
        return self.target[layer].view(2, -1, WIDTH)[:, 31 - token]

    def expected(self, layer: int, token: int) -> Any:
        old = token - 1 if token < 7 else token - 3
        keys, values = self.plain[layer][:, old : old + 1]
        return torch.stack([rotated(keys, torch.tensor([token]))[0], values[0]])

    def drive(self, running: Any, look: Any = None) -> None:
        next(running)
        for layer in range(L):
            running.send(self.objects[layer])
            if look is not None:
                look(layer)
        next(running)


def test_keys_come_back_at_their_new_positions_and_gaps_stay_as_they_are() -> None:
    rig = Rig()
    rig.drive(rig.loading())
    for layer in range(L):
        for token in range(16):
            if token in (3, 4, 5, 6, 9, 10, 11):
                torch.testing.assert_close(rig.found(layer, token), rig.expected(layer, token))
            else:
                assert (rig.found(layer, token) == 7.0).all(), f"token {token} was not named"


def test_get_kv_gives_the_layer_that_was_just_sent_turned_with_zeros_in_the_gap() -> None:
    rig = Rig()

    def look(layer: int) -> None:
        keys, values = rig.connector.get_kv(layer)
        assert keys.shape == values.shape == (9, WIDTH)
        assert rig.connector.current_gap_positions.tolist() == [4, 5]
        for token in (3, 6, 9, 11):
            found = torch.stack([keys[token - 3], values[token - 3]])
            torch.testing.assert_close(found, rig.expected(layer, token))
        assert not keys[4:6].any()
        assert not values[4:6].any()

    rig.drive(rig.loading(), look)


def test_what_a_blender_makes_of_a_layer_reaches_the_pages_gaps_included() -> None:
    rig = Rig()

    def look(layer: int) -> None:
        for part in rig.connector.get_kv(layer):
            part[4:6] = layer + 100.0
            part[0] += 1.0

    rig.drive(rig.loading(), look)
    for layer in range(L):
        for token in (7, 8):
            assert (rig.found(layer, token) == layer + 100.0).all()
        torch.testing.assert_close(rig.found(layer, 3), rig.expected(layer, 3) + 1.0)


def test_a_layer_is_in_a_buffer_until_the_second_step_after_its_own() -> None:
    rig = Rig()
    running = rig.loading()
    with pytest.raises(LayoutError, match=r"get_kv\(0\): layers in the buffers now: \[\]; send it first"):
        rig.connector.get_kv(0)
    next(running)
    running.send(rig.objects[0])
    running.send(rig.objects[1])
    rig.connector.get_kv(0)
    running.send(rig.objects[2])
    with pytest.raises(LayoutError, match=r"layers in the buffers now: \[1, 2\]"):
        rig.connector.get_kv(0)
    running.close()
    with pytest.raises(LayoutError, match=r"layers in the buffers now: \[\]"):
        rig.connector.get_kv(2)


def test_cached_tokens_are_in_the_buffer_but_their_pages_are_left_alone() -> None:
    rig = Rig()
    rig.drive(rig.loading(vllm_cached_tokens=5), rig.connector.get_kv)
    assert (rig.found(0, 4) == 7.0).all()
    torch.testing.assert_close(rig.found(0, 5), rig.expected(0, 5))


def test_keys_of_other_positions_without_a_rotation_are_refused() -> None:
    rig = Rig()
    rig.connector.fused_rotary_emb = None
    running = rig.loading()
    next(running)
    running.send(rig.objects[0])
    with pytest.raises(
        LayoutError, match="layer 0: its keys are rotated for other positions: expected fused_rotary"
    ):
        running.send(rig.objects[1])
    assert {obj.get_ref_count() for layer in rig.objects for obj in layer} == {1}


def test_a_rotation_may_give_new_keys_instead_of_changing_them() -> None:
    rig = Rig()
    turn = rig.connector.fused_rotary_emb
    rig.connector.fused_rotary_emb = lambda old, new, key: turn(old, new, key.clone())
    rig.drive(rig.loading())
    torch.testing.assert_close(rig.found(2, 10), rig.expected(2, 10))


def test_chunks_must_be_in_order_and_it_always_has_its_buffers() -> None:
    rig = Rig()
    with pytest.raises(LayoutError, match="expected them in order, without overlap"):
        rig.connector.batched_to_gpu([3, 6], [7, 9], kvcaches=rig.target, slot_mapping=rig.slots)
    for option in ("use_gpu", "use_double_buffer"):
        with pytest.raises(ConfigError, match=f"{option}=False: expected True"):
            VLLMBufferLayerwiseGPUConnector(WIDTH, L, **{"use_gpu": True, option: False})


def test_a_latent_is_not_turned_as_a_whole() -> None:
    connector = VLLMBufferLayerwiseGPUConnector(WIDTH, L, use_gpu=True, use_mla=True)
    with pytest.raises(LayoutError, match="only a part of a latent is rotated"):
        connector.set_rotary_embedding(table(), HS, is_neox=True)
    assert connector.fused_rotary_emb is None


def test_a_load_that_is_over_asks_the_device_for_nothing_when_it_is_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It may be dropped with the process, when there is nobody left to answer."""
    rig = Rig()
    running = rig.loading()
    rig.drive(running)

    def gone(*_: Any) -> Any:
        raise AssertionError("the device is gone")

    for call in ("follow", "lead", "wait", "mark"):
        monkeypatch.setattr(Lane, call, gone)
    running.close()

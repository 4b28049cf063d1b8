"""Pages on the simulated accelerator, by the same Python as on Neuron; the blocks' ops are the core's."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_neuron._native")

pytestmark = [pytest.mark.torch, pytest.mark.sim]


@pytest.mark.parametrize("count", [1, 7, 8, 45, 300])
def test_pages_go_out_and_come_back_bit_by_bit(sim: Any, count: int) -> None:
    from lmcache_neuron.spec import NeuronDeviceSpec

    move = NeuronDeviceSpec().page_mover
    torch.manual_seed(count)
    bits = [torch.randint(-(1 << 15), 1 << 15, (320, 40), dtype=torch.int16) for _ in range(3)]
    pages = [layer.view(torch.bfloat16).to("sim")[:, :24] for layer in bits]  # blocks lie apart
    host = torch.zeros(3, count, 24, dtype=torch.int16)
    ids = torch.randperm(320)[:count].tolist()
    places = [[host[layer, at].data_ptr() for at in range(count)] for layer in range(3)]
    move(pages, ids, places, True)
    for layer in range(3):
        assert torch.equal(host[layer], bits[layer][ids][:, :24])
    move(pages, ids[::-1], places, False)
    for layer in range(3):
        expected = bits[layer].clone()
        expected[ids[::-1], :24] = host[layer]
        assert torch.equal(pages[layer].cpu().view(torch.int16), expected[:, :24])

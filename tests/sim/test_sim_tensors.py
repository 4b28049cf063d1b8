"""Tensors on the simulated device hold what tensors on the CPU hold, whatever their shape, strides and type."""

from __future__ import annotations

import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.sim

DTYPES = [
    "uint8",
    "int64",
    "float16",
    "bfloat16",
    "float32",
    "float64",
    "bool",
    "float8_e4m3fn",
    "float8_e5m2",
]


@pytest.fixture(autouse=True)
def _device(sim):
    """Every test here needs it."""


def bits(tensor):
    """The bytes, to compare types that have no equal()."""
    return tensor.cpu().contiguous().view(torch.uint8)


def make(dtype, *shape):
    count = torch.Size(shape).numel()
    size = getattr(torch, dtype).itemsize
    values = torch.arange(count * size) % (2 if dtype == "bool" else 120)
    return values.to(torch.uint8).view(getattr(torch, dtype)).view(shape)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_round_trip_keeps_every_byte(dtype):
    host = make(dtype, 5, 7)
    device = host.to("sim")
    assert device.dtype == host.dtype
    assert bits(device).equal(bits(host))
    assert bits(device.to("sim:1")).equal(bits(host))
    assert bits(device[1:4, ::2].clone()).equal(bits(host[1:4, ::2]))


@st.composite
def views(draw):
    """A function that makes the same odd view of a 4 x 6 x 5 tensor, and its shape."""
    order = draw(st.permutations(range(3)))
    steps = [draw(st.integers(1, 2)) for _ in range(3)]
    starts = [draw(st.integers(0, 1)) for _ in range(3)]
    return lambda t: t.permute(*order)[tuple(slice(a, None, s) for a, s in zip(starts, steps, strict=True))]


@settings(max_examples=60)
@given(views(), views(), st.sampled_from(["float32", "int16"]), st.sampled_from(["float32", "int16"]))
def test_copies_between_views_equal_the_cpus(from_view, to_view, from_type, to_type):
    source = torch.arange(120, dtype=getattr(torch, from_type)).view(4, 6, 5)
    target = torch.full((4, 6, 5), -1, dtype=getattr(torch, to_type))
    shape = [min(a, b) for a, b in zip(from_view(source).shape, to_view(target).shape, strict=True)]
    part = tuple(slice(0, n) for n in shape)
    expected = target.clone()
    to_view(expected)[part].copy_(from_view(source)[part])
    on_device = source.to("sim")
    for source_at, target_at in [
        (source, "sim"),
        (on_device, "cpu"),
        (on_device, "sim"),
        (on_device, "sim:1"),
    ]:
        got = target.to(target_at, copy=True)
        to_view(got)[part].copy_(from_view(source_at)[part])
        assert got.cpu().equal(expected), f"{source_at.device} to {target_at}"


def test_a_copy_broadcasts():
    target = torch.zeros(3, 4, device="sim")
    target.copy_(torch.arange(4.0))
    assert target.cpu().equal(torch.arange(4.0).expand(3, 4))


def test_operators_of_a_paged_cache_equal_the_cpus():
    pages = torch.arange(2 * 6 * 4.0).view(2, 6, 4)
    index = torch.tensor([4, 1])
    device, at = pages.to("sim"), index.to("sim")
    assert device.index_select(1, at).cpu().equal(pages.index_select(1, index))
    assert device[:, at].cpu().equal(pages[:, index])
    assert torch.cat([device, device], 1).cpu().equal(torch.cat([pages, pages], 1))
    assert torch.stack([device[0], device[1]]).cpu().equal(pages)
    assert device.narrow(1, 2, 3).contiguous().cpu().equal(pages.narrow(1, 2, 3))
    assert device.unfold(1, 2, 2).contiguous().cpu().equal(pages.unfold(1, 2, 2))
    device.index_copy_(1, at, torch.zeros(2, 2, 4, device="sim"))
    device[0, 5] = 9
    device[:, at[:1]] += 3
    pages.index_copy_(1, index, torch.zeros(2, 2, 4))
    pages[0, 5] = 9
    pages[:, index[:1]] += 3
    assert device.cpu().equal(pages)
    assert device.view(torch.uint8).cpu().equal(pages.view(torch.uint8))
    assert device[0, 5, 1].item() == 9.0
    assert device.flatten().tolist() == pages.flatten().tolist()


def test_arguments_that_do_not_fit_are_refused_before_anything_is_queued():
    device = torch.zeros(4, 3, device="sim")
    at = torch.tensor([0, 1], device="sim")
    with pytest.raises((RuntimeError, IndexError)):
        device.index_copy_(0, at, torch.ones(3, 3, device="sim"))
    with pytest.raises(RuntimeError, match="one device"):
        device.index_copy_(0, at, torch.ones(2, 3))
    with pytest.raises(RuntimeError, match="one device"):
        device.index_select(0, torch.tensor([0]))
    with pytest.raises(IndexError):
        device.index_select(2, at)
    with pytest.raises(RuntimeError, match=r"internal overlap|single memory location"):
        device[:1].expand(4, 3).copy_(torch.ones(4, 3))
    torch.sim.synchronize()
    assert device.cpu().equal(torch.zeros(4, 3))


def test_an_index_out_of_range_is_reported_when_the_host_next_waits():
    device = torch.zeros(4, 3, device="sim")
    device.index_select(0, torch.tensor([9], device="sim"))
    with pytest.raises(RuntimeError, match="out of range"):
        torch.sim.synchronize()
    assert (device + 1).sum().item() == 12


def test_an_operator_in_place_leaves_alone_what_it_does_not_change(kernels):
    """One that copied the tensor to the CPU and back would undo what other streams did meanwhile."""
    device = torch.zeros(64, dtype=torch.uint8, device="sim")
    torch.sim.synchronize()
    stream = torch.sim.Stream()
    with stream.held():
        kernels.add_one(stream.sim_stream, device.data_ptr(), 8, 8)
        device[32:].add_(5)
    stream.synchronize()
    assert device.cpu().tolist() == [1] * 8 + [0] * 24 + [5] * 32


def test_storages_can_be_shared_resized_and_saved():
    device = torch.arange(6.0).to("sim")
    view = torch.empty(0, device="sim").set_(device.untyped_storage(), 2, (2, 2), (2, 1))
    assert view.cpu().tolist() == [[2.0, 3.0], [4.0, 5.0]]
    view += 1
    assert device.cpu().tolist() == [0, 1, 3, 4, 5, 6]
    device.resize_(8)
    assert device[:6].cpu().tolist() == [0, 1, 3, 4, 5, 6]
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    loaded = torch.load(file)
    assert loaded.device == torch.device("sim:0")
    assert loaded.cpu().equal(view.cpu())


def test_a_module_trains_on_it():
    torch.manual_seed(0)
    host = torch.nn.Linear(4, 2)
    device = torch.nn.Linear(4, 2).to("sim")
    device.load_state_dict(host.state_dict())
    data = torch.randn(3, 4)
    for module, batch in ((host, data), (device, data.to("sim"))):
        module(batch).square().sum().backward()
    assert torch.allclose(device.weight.grad.cpu(), host.weight.grad)


def test_torchs_general_functions_know_the_device(sim):
    assert torch.accelerator.current_accelerator() == torch.device("sim")
    assert torch.accelerator.device_count() == sim.device_count() == 2
    with torch.accelerator.device_index(1):
        assert sim.current_device() == 1
        assert torch.empty(2, device="sim").device == torch.device("sim:1")
    with sim.device(1):
        assert torch.zeros(2, device="sim").device.index == 1
    assert sim.current_device() == 0
    assert torch.zeros(2).sim().is_sim
    with pytest.raises(RuntimeError, match="sees 2 simulated devices"):
        torch.empty(2, device="sim:2")

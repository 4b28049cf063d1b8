"""The ops on the native module over the fake driver: the conformance kit's own tests, on memory of the host.

The kit's tests are the functions imported here. What follows them is about the way that is taken: that the kernels
serve what they can, and that the rest goes to the baseline.
"""

# ruff: noqa: F401, F403

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("lmcache_cuda._native")
pytest.importorskip("numpy")

import standin

from lmcache.errors import LayoutError
from lmcache.testing.blocks import GATHER, OP, SCATTER, BlockTransfer
from lmcache.testing.suite.test_block_transfer import *
from lmcache.testing.suite.test_codec import *
from lmcache.testing.suite.test_faults import (
    kind,
    row,
    test_a_block_id_out_of_range_writes_nothing_outside,
    test_a_format_that_is_not_served_is_refused_by_name,
    test_arguments_that_make_no_sense_are_refused_and_nothing_moves,
)
from lmcache.testing.suite.test_memory import (
    test_async_copies_move_every_byte_and_no_other,
    test_async_copies_of_nothing_move_nothing,
    test_where_the_device_sits_is_told_or_not_known,
)
from lmcache.testing.suite.test_slot_transfer import *
from lmcache.v1.kv_layout import kv_format, kv_formats
from lmcache.v1.platform import torch_ops
from lmcache_cuda import runtime
from lmcache_cuda.ops import CudaDeviceOps
from lmcache_cuda.pinning import PIECES

pytestmark = [pytest.mark.torch]


@pytest.fixture(autouse=True)
def on_the_fake() -> Iterator[None]:
    before = dict(vars(runtime))
    standin.install(everything_is_device=True)
    yield
    for name, value in before.items():
        setattr(runtime, name, value)


@pytest.fixture
def ops() -> CudaDeviceOps:
    made = CudaDeviceOps()
    made.ensure_native()
    return made


@pytest.fixture
def device() -> Any:
    return torch.device("cpu")


@pytest.fixture
def dev() -> Any:
    return SimpleNamespace(
        synchronize=lambda: standin.native().stream_synchronize(0, 0), device_count=lambda: 1
    )


@pytest.fixture
def no_baseline(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail where the baseline is asked to move anything."""

    def refuse(*args: Any, **kwargs: Any) -> None:
        raise AssertionError("the baseline was asked")

    for name in (OP, "multi_layer_kv_transfer", "single_layer_kv_transfer", "single_layer_kv_transfer_sgl",
                 "rotary_embedding_k_fused", "rotary_embedding_k_fused_strided", "calculate_cdf", "encode_fast_new",
                 "decode_fast_new", "decode_fast_prefsum"):  # fmt: skip
        monkeypatch.setattr(torch_ops, name, refuse)


# --- who serves --------------------------------------------------------------------------------------------


def test_what_the_contract_has_is_bound_and_nothing_is_refused(ops: CudaDeviceOps) -> None:
    report = ops.binding_report()
    assert report.refused == {}
    assert report.abi == standin.native().LMCACHE_NATIVE_ABI
    assert set(report.absent) == {"execute_cb_retrieve_plan_flat"}
    ordered = {"record_completion_on_stream", "drain_recorded_completions", OP, "lmcache_memcpy_async"}
    assert ordered <= set(report.bound)


@pytest.mark.parametrize("kind", ["tensors", "pointers"])
@pytest.mark.parametrize("way", [GATHER, SCATTER])
def test_tight_blocks_of_every_format_go_to_the_kernels(
    ops: CudaDeviceOps, device: Any, dev: Any, no_baseline: None, kind: str, way: int
) -> None:
    for fmt in ops.supported_formats(OP):
        row = kv_format(fmt)
        if "NP" in row.dims.levels:
            continue
        one = BlockTransfer(ops, device, row, kind, [4, 0, 7, 2], 1, way, "float16")
        one.expect()
        one.run()
        dev.synchronize()
        assert not one.fault(), f"{row.label}: {one.fault()}"


def test_blocks_that_are_padded_go_to_the_kernels_and_their_padding_is_left_alone(
    ops: CudaDeviceOps, device: Any, dev: Any, no_baseline: None
) -> None:
    row = kv_format("NL_X_NB_BS_NH_CS")
    wide = [torch.randn(6, 4 * 2 * 8 + 16) for _ in range(2)]
    pages = [whole[:, :64].view(6, 4, 2, 8) for whole in wide]
    chunk = torch.zeros(1, 2, 8, 16)
    desc = SimpleNamespace(kv_size=1, nl=2, nb=6, bs=4, nh=2, hs=8, element_size=4, block_stride_elems=80)
    ops.multi_layer_block_kv_transfer(pages, [chunk], [5, 2], device, GATHER, desc, 8, row.id)
    dev.synchronize()
    for layer in range(2):
        assert torch.equal(chunk[0, layer], pages[layer][[5, 2]].reshape(8, 16))
    before = [whole.clone() for whole in wide]
    ops.multi_layer_block_kv_transfer(pages, [chunk * 2], [1, 3], device, SCATTER, desc, 8, row.id)
    dev.synchronize()
    for whole, was in zip(wide, before, strict=True):
        assert torch.equal(whole[[1, 3], :64], was[[5, 2], :64] * 2)
        assert torch.equal(whole[:, 64:], was[:, 64:])


def test_pages_that_numbers_cannot_tell_go_to_the_baseline(
    ops: CudaDeviceOps, device: Any, dev: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = kv_format("NL_X_NB_BS_NH_CS")
    pages = [torch.randn(4, 6, 2, 8).transpose(0, 1) for _ in range(2)]  # slots outside blocks
    chunk = torch.zeros(1, 2, 8, 16)
    desc = ops.PageBufferShapeDesc(1, 2, 6, 4, 2, 8, 4, 0)
    asked = []
    real = torch_ops.multi_layer_block_kv_transfer
    monkeypatch.setattr(torch_ops, OP, lambda *args: asked.append(1) or real(*args))
    ops.multi_layer_block_kv_transfer(pages, [chunk], [5, 2], device, GATHER, desc, 8, row.id)
    assert asked == [1]
    assert torch.equal(chunk[0, 1], pages[1][[5, 2]].reshape(8, 16))


@pytest.mark.parametrize("field", ["kv_size", "nl", "nb", "bs", "nh", "hs", "element_size"])
def test_a_descriptor_that_contradicts_the_tensors_is_refused_and_nothing_moves(
    ops: CudaDeviceOps, device: Any, dev: Any, field: str
) -> None:
    one = BlockTransfer(ops, device, kv_format(2), "tensors", [1, 2, 3], 0, SCATTER, "float16")
    desc = one.describe()
    setattr(desc, field, getattr(desc, field) + 1)
    with pytest.raises((LayoutError, ValueError)):
        ops.multi_layer_block_kv_transfer(
            one.pages.tensors, one.objects.tensors, [1, 2, 3], device, SCATTER, desc, one.chunk_size, 2
        )
    dev.synchronize()
    assert not one.fault()


def test_a_bad_id_among_ids_of_the_host_is_refused_and_nothing_moves(
    ops: CudaDeviceOps, device: Any, dev: Any
) -> None:
    one = BlockTransfer(ops, device, kv_format(13), "tensors", [1, 9, 3], 0, SCATTER, "float16")
    for ids in ([1, 9, 3], [1, -1, 3]):
        with pytest.raises(ValueError, match=r"9|-1"):
            ops.multi_layer_block_kv_transfer(
                one.pages.tensors,
                one.objects.tensors,
                ids,
                device,
                SCATTER,
                one.describe(),
                one.chunk_size,
                13,
            )
    dev.synchronize()
    assert not one.fault()


def test_more_layers_than_a_launch_carries_go_over_a_table_on_the_device(
    ops: CudaDeviceOps, device: Any, dev: Any, no_baseline: None
) -> None:
    pages = [torch.randn(3, 2, 1, 4) for _ in range(500)]
    chunk = torch.zeros(1, 500, 2, 4)
    desc = ops.PageBufferShapeDesc(1, 500, 3, 2, 1, 4, 4, 0)
    ops.multi_layer_block_kv_transfer(pages, [chunk], [2], device, GATHER, desc, 2, 13)
    dev.synchronize()
    assert torch.equal(chunk[0], torch.stack([page[2].reshape(2, 4) for page in pages]))


# --- slots, codec ------------------------------------------------------------------------------------------


def test_the_coder_and_the_rotation_are_the_kernels(ops: CudaDeviceOps, no_baseline: None) -> None:
    symbols = torch.randint(0, 16, (2, 64, 3), dtype=torch.uint8)
    cdf = ops.calculate_cdf(symbols, 16)
    out, lengths = torch.zeros(2, 3, 128, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int32)
    ops.encode_fast_new(cdf, symbols, out, lengths)
    back = torch.zeros_like(symbols)
    ops.decode_fast_new(cdf, out, lengths, back)
    assert torch.equal(back, symbols)
    joined = torch.cat([out[i, j, : lengths[i, j]] for i in range(2) for j in range(3)])
    back.zero_()
    ops.decode_fast_prefsum(cdf, joined, lengths.view(-1).cumsum(0).view(2, 3), back)
    assert torch.equal(back, symbols)
    angles = torch.outer(torch.arange(32.0), 100.0 ** (-torch.arange(4) / 4))
    table = torch.cat([angles.cos(), angles.sin()], dim=1)
    key = torch.randn(5, 2, 8)
    was = key.clone()
    old, new = torch.arange(5), torch.arange(5) + 7
    ops.rotary_embedding_k_fused(old, new, key, 8, table, True)
    ops.rotary_embedding_k_fused(new, old, key, 8, table, True)
    assert torch.allclose(key, was, atol=1e-5)


def test_the_coder_gives_the_baselines_bytes_and_its_words(ops: CudaDeviceOps) -> None:
    symbols = torch.randint(0, 7, (2, 33, 4), dtype=torch.int32)
    cdf = ops.calculate_cdf(symbols, 7)
    assert torch.equal(cdf, torch_ops.calculate_cdf(symbols, 7))
    results = []
    for serve in (ops.encode_fast_new, torch_ops.encode_fast_new):
        out, lengths = torch.zeros(2, 4, 80, dtype=torch.uint8), torch.zeros(2, 4, dtype=torch.int64)
        serve(cdf, symbols, out, lengths)
        results.append((out, lengths))
    assert torch.equal(results[0][0], results[1][0])
    assert torch.equal(results[0][1], results[1][1])
    for bad in (
        lambda: ops.calculate_cdf(symbols, 3),
        lambda: ops.encode_fast_new(cdf, symbols + 7, *results[0]),
        lambda: ops.encode_fast_new(cdf, symbols, results[0][0][..., :2].contiguous(), results[0][1]),
        lambda: ops.decode_fast_new(cdf, results[0][0] ^ 255, results[0][1], torch.zeros_like(symbols)),
        lambda: ops.decode_fast_new(cdf, results[0][0], results[0][1] + 100, torch.zeros_like(symbols)),
    ):
        with pytest.raises(ValueError, match="expected"):
            bad()


def test_a_slot_beyond_the_pages_is_refused_where_the_host_can_see_it(
    ops: CudaDeviceOps, device: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(runtime, "is_on_device", lambda tensor: tensor.dtype != torch.int64)
    kv, page = torch.zeros(2, 1, 3, 8), torch.zeros(2, 4, 2, 1, 8)
    for slots in ([0, 8, 1], torch.tensor([0, 8, 1])):
        with pytest.raises(ValueError, match="slot 8: expected below 8"):
            ops.multi_layer_kv_transfer(kv, [page.data_ptr()], slots, device, 8, 0, 1, 2, 8)


# --- copies ------------------------------------------------------------------------------------------------


def test_copies_of_memory_that_was_pinned_in_pieces_are_cut_there(
    ops: CudaDeviceOps, dev: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    host = torch.randint(0, 256, (1000,), dtype=torch.uint8)
    there = standin.device_tensor(torch.zeros(1000, dtype=torch.uint8))
    base = host.data_ptr()
    cuts = [base - 5, base + 100, base + 640, base + 1000]
    calls: list[tuple[int, int, int]] = []

    class Noting(standin.Waiting):
        def memcpy_split_async(self, to: int, source: int, nbytes: int, offset: int, *rest: Any) -> None:
            calls.append((source - base, nbytes, offset))
            standin.native().memcpy_split_async(to, source, nbytes, offset, *rest)

    monkeypatch.setattr(runtime, "native", Noting)
    PIECES.add(cuts)
    try:
        ops.lmcache_memcpy_async(there.data_ptr(), base, 1000, 0, 4096, 1 << 26)
    finally:
        PIECES.remove(cuts)
    dev.synchronize()
    assert calls == [(0, 100, 4096), (100, 540, 4196), (640, 360, 4736)]
    assert torch.equal(there, host)


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        ((2, 0, 1), ValueError),
        ((0, -1, 1), ValueError),
        ((0, 0, 3), ValueError),
        ((0, 0, 0), ValueError),
    ],
)
def test_copies_that_make_no_sense_are_refused(
    ops: CudaDeviceOps, arguments: tuple[int, int, int], error: type[Exception]
) -> None:
    host, there = torch.zeros(8, dtype=torch.uint8), torch.zeros(8, dtype=torch.uint8)
    direction, offset, alignment = arguments
    with pytest.raises(error):
        ops.lmcache_memcpy_async(there, host, 8, direction, offset, alignment)
    with pytest.raises(TypeError):
        ops.lmcache_memcpy_async(there.data_ptr(), host, 8, 0, 0, 1)
    with pytest.raises(ValueError, match="nbytes=9"):
        ops.lmcache_memcpy_async(there, host, 9, 0, 0, 1)


def test_a_host_tensor_is_kept_until_the_device_has_read_it(ops: CudaDeviceOps) -> None:
    import gc
    import weakref

    from peer import Gate

    from lmcache_cuda import keeping

    stream, gate = standin.Stream(), Gate()
    there = standin.device_tensor(torch.zeros(64, dtype=torch.uint8))
    host = torch.full((64,), 7, dtype=torch.uint8)
    kept = weakref.ref(host)
    gate.hold(stream)
    with standin.queued_on(stream):
        standin.native().memcpy_async(there.data_ptr(), host.data_ptr(), 64, stream.cuda_stream, 0)
        keeping.until_done(0, [host])
        del host
        gc.collect()
        keeping.until_done(0, [])
        assert kept() is not None, "torch would give this memory to the next who asks"
        gate.open()
        stream.synchronize()
        keeping.until_done(0, [])
    gc.collect()
    assert kept() is None
    assert (there == 7).all()


# --- completions -------------------------------------------------------------------------------------------


def test_a_completion_comes_with_the_work_before_it_and_not_sooner(ops: CudaDeviceOps) -> None:
    from peer import Gate

    ops.drain_recorded_completions()
    stream, gate = standin.Stream(), Gate()
    gate.hold(stream)
    with standin.queued_on(stream):
        for index in range(64):
            ops.record_completion_on_stream(stream.cuda_stream, "stored", bytes([index]))
    assert ops.drain_recorded_completions() == []
    gate.open()
    stream.synchronize()
    assert ops.drain_recorded_completions() == [("stored", bytes([index])) for index in range(64)]
    for bad in (("x", "k", b""), (0, 7, b""), (0, "k", "text")):
        with pytest.raises(TypeError):
            ops.record_completion_on_stream(*bad)

"""Exported memory seen from a process of its own."""

from __future__ import annotations

import gc
import os
from pathlib import Path
from typing import Any

import pytest

from lmcache.testing import needs, not_shown
from lmcache.testing.peer import PeerFailed, digest, peer
from lmcache.v1.platform.kv_wire import export_kv_caches, import_kv_caches

pytestmark = needs("device", "tensor-ipc")


def _sum(tensor: Any) -> int:
    import torch

    return int(tensor.contiguous().view(torch.uint8).cpu().to(torch.int64).sum())


def _random(device: Any, *shape: int) -> Any:
    import torch

    return torch.randint(0, 256, shape, dtype=torch.uint8).to(device)


def _views(device: Any) -> dict[str, Any]:
    """Tensors as engines cut them: offset, strided, of another type."""
    import torch

    base = _random(device, 8, 16, 64)
    return {
        "whole": _random(device, 4, 32, 16),
        "offset": base[3],
        "strided": base[:, 4:9],
        "transposed": base.transpose(0, 1)[2:7],
        "typed": base.view(-1).view(torch.bfloat16)[128:640].view(4, 128),
    }


@pytest.mark.parametrize("name", ["whole", "offset", "strided", "transposed", "typed"])
def test_the_other_process_sees_the_same_bytes(device: Any, dev: Any, helper: Any, name: str) -> None:
    tensor = _views(device)[name]
    dev.synchronize()
    with helper as other:
        exported = export_kv_caches([tensor])
        (seen,) = other.map(exported)
        exported.close()
    assert seen["digest"] == digest(tensor), "it sees other bytes, or the same at other places"
    assert (seen["shape"], seen["stride"]) == (list(tensor.shape), list(tensor.stride()))
    assert seen["dtype"] == str(tensor.dtype)
    assert seen["device"].partition(":")[0] == device.type


def test_planes_of_a_layer_stay_apart_and_in_order(device: Any, dev: Any, helper: Any) -> None:
    planes = (_random(device, 4, 64), _random(device, 4, 32))
    dev.synchronize()
    with helper as other:
        exported = export_kv_caches([planes])
        assert [seen["digest"] for seen in other.map(exported)] == [digest(plane) for plane in planes]
        exported.close()


def test_a_tensor_stays_on_its_device(device: Any, dev: Any, helper: Any) -> None:
    import torch

    if dev.device_count() < 2:
        not_shown("there is one device only")
    second = torch.device(device.type, 1)
    tensors = [_random(device, 512), _random(second, 512)]
    dev.synchronize()
    with helper as other:
        exported = export_kv_caches(tensors)
        seen = other.map(exported)
        exported.close()
    assert [one["device"] for one in seen] == [str(device), str(second)]
    assert [one["digest"] for one in seen] == [digest(tensor) for tensor in tensors]


def test_several_tensors_of_one_storage_are_several_views(device: Any, dev: Any, helper: Any) -> None:
    base = _random(device, 6, 4, 256)
    layers = [base[index] for index in range(6)]
    dev.synchronize()
    with helper as other:
        exported = export_kv_caches(layers)
        assert [seen["digest"] for seen in other.map(exported)] == [digest(layer) for layer in layers]
        other.ask("fill", index=2, value=7)
        assert [_sum(layer) for layer in layers] == other.sums()
        assert _sum(layers[2]) == 7 * layers[2].numel()
        exported.close()


def test_what_one_writes_the_other_sees(device: Any, dev: Any, helper: Any) -> None:
    tensor = _random(device, 4, 1024)
    dev.synchronize()
    with helper as other:
        exported = export_kv_caches([tensor])
        other.map(exported)
        tensor.fill_(3)
        dev.synchronize()
        assert other.sums() == [3 * tensor.numel()], "it has a copy, or other memory"
        other.ask("fill", index=0, value=9)
        assert _sum(tensor) == 9 * tensor.numel()
        exported.close()


def test_neighbours_of_an_exported_view_are_left_alone(device: Any, dev: Any, helper: Any) -> None:
    base = _random(device, 8, 512)
    before = [_sum(base[index]) for index in range(8)]
    dev.synchronize()
    with helper as other:
        exported = export_kv_caches([base[3]])
        other.map(exported)
        other.ask("fill", index=0, value=0)
        exported.close()
    after = [_sum(base[index]) for index in range(8)]
    assert after == [*before[:3], 0, *before[4:]], "it wrote at another offset"


def test_a_peer_that_dies_leaves_the_memory_usable(device: Any, dev: Any, helper: Any) -> None:
    tensor = _random(device, 64, 64)
    with helper as other:
        other.map(export_kv_caches([tensor]))
        other.kill()
    tensor.fill_(5)
    dev.synchronize()
    assert _sum(tensor) == 5 * tensor.numel()


def test_an_exporter_that_dies_leaves_readers_their_memory_or_an_error(device: Any, helper: Any) -> None:
    with peer() as exporter, helper as other:
        wires = exporter.export(4096, 11)
        assert other.map(wires)[0]["sum"] == 11 * 4096
        exporter.kill()
        try:
            assert other.sums() == [11 * 4096]
        except PeerFailed:
            assert other.process.poll() is None, "reading memory whose owner is gone ends the process"


def test_mapping_and_closing_leaves_nothing_open(device: Any, dev: Any, helper: Any) -> None:
    with helper as other:

        def rounds(count: int) -> None:
            for _ in range(count):  # other memory each time: what is mapped already may be counted only
                tensor = _random(device, 16, 4096)
                exported = export_kv_caches([tensor])
                other.map(exported)
                other.ask("close")
                exported.close()

        rounds(3)
        before = _open(other.process.pid)
        rounds(20)
        after = _open(other.process.pid)
    assert after[0] < before[0] + 20, f"a descriptor is left per round: {before[0]}, then {after[0]}"
    assert after[1] < before[1] + 20, f"a mapping is left per round: {before[1]}, then {after[1]}"


def _open(pid: int) -> tuple[int, int]:
    """Descriptors and mappings of a process."""
    return len(os.listdir(f"/proc/{pid}/fd")), len(Path(f"/proc/{pid}/maps").read_text().splitlines())


@pytest.mark.parametrize("spoiled", ["empty", "cut", "noise"])
def test_a_spoiled_descriptor_is_refused_and_opens_nothing(device: Any, spoiled: str) -> None:
    exported = export_kv_caches([_random(device, 4, 64)])
    wire = exported[0]
    data = {"empty": b"", "cut": wire[: len(wire) // 2], "noise": bytes(255 - byte for byte in wire)}[spoiled]
    with pytest.raises(ValueError, match=r".+"):
        import_kv_caches([data])
    exported.close()


def test_a_descriptor_of_memory_that_is_gone_is_refused(device: Any, helper: Any) -> None:
    tensor = _random(device, 4, 64)
    exported = export_kv_caches([tensor])
    wires = list(exported)
    exported.close()
    del tensor, exported
    gc.collect()
    with helper as other:
        try:
            other.map(wires)
        except PeerFailed:  # refused; a device that keeps exported memory alive may map it
            assert other.process.poll() is None, "mapping memory that is gone ends the process"

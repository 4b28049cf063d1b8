"""Host tensors in two processes: one moves its storage into shared memory, the other maps it."""

from __future__ import annotations

import gc
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from helpers.peer import Peer, check_nothing_left, memfd_descriptors, memfd_mappings, segments
from lmcache.errors import DeviceError
from lmcache.v1.platform import kv_wire
from lmcache.v1.platform.cpu.ipc_wrapper import CpuShmTensorWrapper
from lmcache.v1.platform.cpu.shared_file import FileId, create_file, open_file

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

#: Two layers of planes and one of a single tensor, all but the last in one storage, as vLLM has them.
ENGINE = """
import torch
from lmcache.v1.platform.kv_wire import export_kv_caches
pool = torch.zeros(1 << 16, dtype=torch.int8)
def view(at, dtype):
    return pool[at : at + 4096].view(dtype)
layers = [
    (view(4096, torch.bfloat16).view(4, 16, 32).transpose(0, 1), view(8192, torch.bfloat16).view(4, 16, 32)),
    [view(12288, torch.float32)[::2]],
    torch.zeros(3, 5, dtype=torch.float64),
]
planes = [p for l in layers for p in (l if isinstance(l, (list, tuple)) else [l])]
for n, plane in enumerate(planes):
    plane.copy_(torch.arange(plane.numel(), dtype=torch.float32).view(plane.shape).fmod(250) + n)
exported = export_kv_caches(layers)
out = [data.hex() for data in exported]
"""


@pytest.fixture(scope="module")
def peer() -> Iterator[Peer]:
    """One for all tests that let it live: importing torch takes it seconds."""
    with Peer() as process:
        yield process


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    gc.collect()
    names, before = segments(), (len(memfd_mappings()), len(memfd_descriptors()))
    yield
    gc.collect()
    assert (len(memfd_mappings()), len(memfd_descriptors())) == before
    check_nothing_left(names)


def export(peer: Peer) -> list[bytes]:
    return [bytes.fromhex(text) for text in peer.do(ENGINE)]


def flat(tensors: list[Any]) -> list[Any]:
    return [p for layer in tensors for p in (layer if isinstance(layer, (list, tuple)) else [layer])]


def expected(plane: Any, n: int) -> Any:
    counted = torch.arange(plane.numel(), dtype=torch.float32).view(plane.shape)
    return (counted.fmod(250) + n).to(plane.dtype)


def test_strided_offset_and_shared_storages_and_planes_arrive_as_views(peer: Peer) -> None:
    imported = kv_wire.import_kv_caches(export(peer))
    assert memfd_mappings() == []
    tensors = imported.map()
    assert [type(layer) for layer in tensors] == [tuple, tuple, torch.Tensor]
    planes = flat(tensors)
    assert [p.stride() for p in planes] == [(32, 512, 1), (512, 32, 1), (2,), (5, 1)]
    assert [p.storage_offset() for p in planes] == [2048, 4096, 3072, 0]
    for n, plane in enumerate(planes):
        assert torch.equal(plane, expected(plane, n))
    assert len(memfd_mappings()) == 2  # two storages
    planes[0][15, 3, 31] = 77
    assert peer.do("out = float(pool.view(torch.bfloat16)[2048 + 3 * 512 + 15 * 32 + 31])") == 77
    peer.do("pool.fill_(0)")
    assert not planes[0].any()
    assert not planes[2].any()
    imported.close()


def test_every_tensor_on_a_storage_goes_on_when_one_is_exported() -> None:
    pool = torch.arange(4096, dtype=torch.int16)
    row, whole = pool[100:200], pool.view(64, 64)
    wrapper = CpuShmTensorWrapper.wrap(row)
    again = CpuShmTensorWrapper.wrap([whole, row])
    assert torch.equal(pool, torch.arange(4096, dtype=torch.int16))
    row.fill_(-1)
    assert bool((pool[100:200] == -1).all())
    assert bool((whole.flatten()[100:200] == -1).all())
    assert len(memfd_mappings()) == 1
    mapped = again.to_tensor()[0]
    mapped[0, 0] = 9
    assert int(pool[0]) == 9
    assert wrapper.planes[0].storage_offset == 100
    # The file lives with the storage, not with the wrappers.
    wrapper.close()
    again.close()
    del wrapper, again, mapped, whole, pool
    gc.collect()
    assert len(memfd_mappings()) == 1
    assert bool((row == -1).all())
    del row
    assert memfd_mappings() == []


def end_itself(peer: Peer) -> None:
    peer.end()


def be_killed_but_not_reaped(peer: Peer) -> None:
    peer.kill(reap=False)
    limit = time.monotonic() + 20
    while Path(f"/proc/{peer.pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < limit
        time.sleep(0.01)


@pytest.mark.parametrize("end", [end_itself, be_killed_but_not_reaped])
def test_a_mapping_outlives_its_exporter_and_nothing_new_can_be_opened(end: Callable[[Peer], None]) -> None:
    with Peer() as peer:
        encoded = export(peer)
        imported, late = kv_wire.import_kv_caches(encoded), kv_wire.import_kv_caches(encoded)
        planes = flat(imported.map())
        end(peer)
        for n, plane in enumerate(planes):
            assert torch.equal(plane, expected(plane, n))
            plane.fill_(1)
        with pytest.raises(DeviceError, match=f"process {peer.pid}: (the process has ended|.*denied)"):
            late.map()
        imported.close()
        del planes, plane
        assert memfd_mappings() == []


def test_an_exporter_keeps_one_file_per_storage_and_drops_it_with_the_storage(peer: Peer) -> None:
    export(peer)
    once = len(memfd_descriptors(peer.pid))
    assert peer.do("for _ in range(20): export_kv_caches(layers)\n") is None
    assert len(memfd_descriptors(peer.pid)) == once
    peer.do("del pool, layers, planes, plane, exported, _\nimport gc; gc.collect()")
    assert memfd_descriptors(peer.pid) == []


def test_two_hundred_rounds_leave_neither_a_mapping_nor_a_descriptor(peer: Peer) -> None:
    encoded = export(peer)
    descriptors = len(os.listdir("/proc/self/fd"))
    for _ in range(200):
        imported = kv_wire.import_kv_caches(encoded)
        planes = flat(imported.map())
        assert float(planes[3][0, 1]) == 4
        imported.close()
        del planes
        assert memfd_mappings() == []
    assert len(os.listdir("/proc/self/fd")) == descriptors


def test_one_mapping_serves_all_threads_and_a_tensor_keeps_it_past_close(peer: Peer) -> None:
    encoded = export(peer)
    found: list[Any] = []

    def work() -> None:
        imported = kv_wire.import_kv_caches(encoded)
        found.append((imported, imported.map()))

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({flat(tensors)[0].data_ptr() for _, tensors in found}) == 1
    assert len(memfd_mappings()) == 2
    kept = flat(found[0][1])[3]
    for imported, _ in found:
        imported.close()
        imported.close()
        with pytest.raises(ValueError, match="closed wrapper"):
            imported[0].to_tensor()
    found.clear()
    del imported, _
    assert len(memfd_mappings()) == 1
    assert torch.equal(kept, expected(kept, 3))


def changed(wrapper: CpuShmTensorWrapper, **changes: int) -> CpuShmTensorWrapper:
    data = msgspec.msgpack.decode(msgspec.msgpack.encode(wrapper.to_wire()))
    for plane in data["planes"]:
        plane["file"].update(changes)
        plane["tensor"]["nbytes"] = plane["file"]["nbytes"]
    return CpuShmTensorWrapper.from_wire(data)


def test_what_is_found_must_be_what_was_declared_before_it_is_opened(
    peer: Peer, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened: list[Any] = []
    real_open = os.open

    def watched(path: Any, *args: Any, **kwargs: Any) -> int:
        opened.append(path)
        return real_open(path, *args, **kwargs)

    monkeypatch.setattr(os, "open", watched)
    wrapper = kv_wire.import_kv_caches(export(peer))[0]
    file = wrapper.to_wire()["planes"][0]["file"]
    other = peer.do(
        "import tempfile; f = tempfile.TemporaryFile(); f.write(b'x' * 65536); f.flush(); out = f.fileno()"
    )
    pipe = peer.do("import os; out = os.pipe()[1]")
    faults: list[tuple[dict[str, int], str]] = [
        ({"start_time": file["start_time"] - 1}, "it has ended, and another has its pid"),
        (
            {"ino": file["ino"] + 1},
            f"inode {file['ino']} of 65536 bytes; expected .* inode {file['ino'] + 1}",
        ),
        ({"dev": file["dev"] + 1}, "expected device"),
        ({"nbytes": 1 << 20}, "of 65536 bytes; expected .* of 1048576 bytes"),
        ({"fd": 9999}, "the process has ended or has no descriptor 9999"),
        ({"fd": other}, "expected device"),
        ({"fd": pipe}, "expected device"),
        ({"pid_namespace": 1}, "runs in pid namespace 1, this process in .*use engine_driven"),
        ({"pid": 2**22 + 1}, "has ended"),
    ]
    for changes, says in faults:
        with pytest.raises(DeviceError, match=says) as caught:
            changed(wrapper, **changes).to_tensor()
        assert "\n" not in str(caught.value)
        del caught
        assert memfd_mappings() == []
        assert bool(opened) == ("start_time" in changes)  # all else is seen from outside
        opened.clear()


def test_a_file_that_its_owner_could_shrink_is_not_mapped() -> None:
    fd = os.memfd_create("lmcache-unsealed", os.MFD_ALLOW_SEALING)
    os.ftruncate(fd, 4096)
    sealed = create_file(4096, "lmcache-sealed")
    found = os.fstat(fd)
    unsealed: FileId = msgspec.structs.replace(sealed.identity(), fd=fd, dev=found.st_dev, ino=found.st_ino)
    assert open_file(sealed.identity()) is sealed
    with pytest.raises(DeviceError, match="size is sealed"):
        open_file(unsealed)
    os.close(fd)


def test_of_many_layers_none_stays_mapped_if_one_cannot_be(peer: Peer) -> None:
    imported = kv_wire.import_kv_caches(export(peer))
    imported[2] = changed(imported[2], fd=9999)
    with pytest.raises(DeviceError, match="no descriptor 9999"):
        imported.map()
    assert memfd_mappings() == []
    with pytest.raises(ValueError, match="closed wrapper"):
        imported[0].to_tensor()


def test_imported_memory_is_not_exported_again(peer: Peer) -> None:
    imported = kv_wire.import_kv_caches(export(peer))
    tensors = imported.map()
    with pytest.raises(ValueError, match="imported from another process cannot be exported again"):
        kv_wire.export_kv_caches(tensors)
    fresh = torch.zeros(16)
    with pytest.raises(ValueError, match="imported from another process"):
        kv_wire.export_kv_caches([(fresh, tensors[2][0])])
    address = fresh.data_ptr()
    assert fresh.data_ptr() == address
    imported.close()


def test_what_has_no_host_memory_of_its_own_is_refused_before_anything_moves() -> None:
    good = torch.zeros(16)
    address = good.data_ptr()
    faults: list[tuple[Any, str]] = [
        (torch.zeros(0), "no memory to export"),
        (torch.zeros(3, device="meta"), "on meta"),
        (torch.zeros(3).to_sparse(), "expected a strided tensor"),
        (torch.zeros(3, dtype=torch.complex64), "dtype 'complex64' is unknown"),
        (torch.zeros(8).share_memory_(), r"shared by torch\.multiprocessing"),
        ("tensor", "expected a strided tensor"),
    ]
    for bad, says in faults:
        with pytest.raises(ValueError, match=says):
            CpuShmTensorWrapper.wrap([good, bad])
        assert good.data_ptr() == address
    for planes in ([], [good] * 65):
        with pytest.raises(ValueError, match="planes: expected 1 to 64"):
            CpuShmTensorWrapper.wrap(planes)


def test_memory_that_cannot_be_had_is_said_and_leaves_the_tensor_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tensor = torch.arange(64)
    address = tensor.data_ptr()

    def full(*args: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", full)
    with pytest.raises(DeviceError, match=r"shared memory of 512 bytes cannot be had .*No space left"):
        kv_wire.export_kv_caches([tensor])
    assert (tensor.data_ptr(), int(tensor[63])) == (address, 63)


def test_every_dtype_of_the_list_goes_over(peer: Peer) -> None:
    encoded = peer.do(
        "import torch\nfrom lmcache.v1.platform.base.ipc_wire import DTYPE_BYTES\n"
        "from lmcache.v1.platform.kv_wire import export_kv_caches\n"
        "pool = torch.arange(256, dtype=torch.uint8)\n"
        "names = [name for name in DTYPE_BYTES if hasattr(torch, name)]\n"
        "tensors = [pool.view(getattr(torch, name)) for name in names]\n"
        "out = [data.hex() for data in export_kv_caches(tensors)]"
    )
    imported = kv_wire.import_kv_caches([bytes.fromhex(text) for text in encoded])
    tensors = imported.map()
    assert len(tensors) >= 15
    for tensor, descriptor in zip(tensors, imported.descriptors, strict=True):
        assert str(tensor.dtype) == f"torch.{descriptor.tensors[0].dtype}"
        assert torch.equal(tensor.view(torch.uint8), torch.arange(256, dtype=torch.uint8))
    imported.close()

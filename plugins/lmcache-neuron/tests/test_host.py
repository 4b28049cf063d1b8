"""What this wheel ships of host staging works in it; the whole of it is tested with lmcache-hpu, whose text it is."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

native = pytest.importorskip("lmcache_neuron._native")

import lmcache
from lmcache.v1.platform.base.op_contract import NATIVE_ABI

PLUGIN = Path(__file__).resolve().parents[1]


def test_the_module_has_what_its_stub_declares_and_nothing_else() -> None:
    stub = ast.parse((PLUGIN / "src" / "lmcache_neuron" / "_native.pyi").read_text(encoding="utf-8"))
    declared = {node.name for node in stub.body if isinstance(node, (ast.FunctionDef, ast.ClassDef))}
    declared |= {node.target.id for node in stub.body if isinstance(node, ast.AnnAssign)}
    assert declared == {name for name in dir(native) if not name.startswith("_")}


def test_the_abi_is_the_core_s_and_so_is_the_header() -> None:
    assert native.LMCACHE_NATIVE_ABI == NATIVE_ABI
    core = Path(lmcache.get_include()) / "lmcache" / "abi.h"
    assert (PLUGIN / "csrc" / "sdk" / "lmcache" / "abi.h").read_text() == core.read_text()


def test_rows_go_to_their_places_and_come_back() -> None:
    stage, back, target = (native.HostBuffer(96) for _ in range(3))
    memoryview(stage).cast("B")[:] = bytes(range(96))
    places = [target.address + at for at in (64, 0, 32)]
    native.scatter(stage.address, places, 1, 32, 0)
    moved = bytes(memoryview(target).cast("B"))
    assert moved == bytes([*range(32, 96), *range(32)])
    native.gather(back.address, places, 1, 32, 0)
    assert bytes(memoryview(back).cast("B")) == bytes(range(96))


def test_memory_is_aligned_and_freed_once() -> None:
    address = native.alloc_pinned_ptr(5)
    assert address % native.HOST_ALIGNMENT == 0
    native.free_pinned_ptr(address)
    with pytest.raises(ValueError, match="it is not allocated, or freed already"):
        native.free_pinned_ptr(address)

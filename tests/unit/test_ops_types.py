"""The types that ops take: positions of their fields, integers, what a descriptor refuses."""

from __future__ import annotations

import copy
import dataclasses
import pickle
from enum import IntEnum
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lmcache.errors import LayoutError
from lmcache.v1.platform import ops_types
from lmcache.v1.platform.base.op_contract import CONTRACT_TYPES
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps
from lmcache.v1.platform.ops_types import (
    BatchStep,
    CBGroupSpec,
    KernelGroupSpec,
    LaunchVar,
    PageBufferShapeDesc,
    StagingCopy,
    TransferDirection,
    TransferPhase,
)

#: The order that native code and callers know.
FIELDS = {
    "PageBufferShapeDesc": "kv_size nl nb bs nh hs element_size block_stride_elems",
    "KernelGroupSpec": (
        "paged_buffer_ptrs lmcache_objects_ptrs shape_desc lmcache_chunk_size engine_kv_format block_ids_base "
        "block_ids_capacity"
    ),
    "StagingCopy": "dest src nbytes host_offset",
    "LaunchVar": "group_idx block_ids_offset total_blocks num_objects skip_prefix_n_blocks",
    "BatchStep": "staging launches",
    "DirectCopyGroupSpec": (
        "paged_layer_ptrs shape_desc fmt slots_per_chunk byte_offset_in_object block_ids"
    ),
    "DirectCopyObject": "host_ptr host_offset nbytes chunk_idx skip_prefix_n_blocks",
}
INT32 = st.integers(-(1 << 31), (1 << 31) - 1)
NAMES = tuple(FIELDS["PageBufferShapeDesc"].split())


@pytest.mark.parametrize("name", FIELDS)
def test_fields_have_the_positions_of_the_contract(name: str) -> None:
    cls = getattr(ops_types, name)
    assert tuple(field.name for field in dataclasses.fields(cls)) == tuple(FIELDS[name].split())
    assert getattr(CpuDeviceOps(), name) is cls


def test_a_blend_group_is_twenty_one_scalars_and_its_slots_may_move() -> None:
    spec = CBGroupSpec(*range(21))  # type: ignore[arg-type]
    assert len(dataclasses.fields(spec)) == 21
    spec.slot_mapping_base, spec.slot_mapping_capacity = 4096, 7
    assert (spec.slot_mapping_base, spec.slot_mapping_capacity) == (4096, 7)


def test_a_plan_is_made_by_position_and_compares_by_content() -> None:
    step = BatchStep([StagingCopy(1, 2, 3, 4)], [LaunchVar(0, 0, 4, 1, 0)])
    assert step == copy.deepcopy(step) == pickle.loads(pickle.dumps(step))
    assert step != BatchStep()
    assert BatchStep().staging is not BatchStep().staging
    group = KernelGroupSpec(4096, [1, 2], PageBufferShapeDesc(nl=2), 256, 12, 8192, 64)
    assert (group.lmcache_objects_ptrs, group.shape_desc.nl, group.block_ids_capacity) == ([1, 2], 2, 64)


def test_enumerations_are_integers() -> None:
    assert (TransferDirection.H2D, TransferDirection.D2H) == (0, 1)
    assert (TransferPhase.KERNEL, TransferPhase.STAGING) == (0, 1)
    assert all(issubclass(cls, IntEnum) for cls in (TransferDirection, TransferPhase))


def test_every_type_of_the_contract_that_the_core_has_reads_through_the_ops() -> None:
    ours = CONTRACT_TYPES & {*ops_types.__all__}
    assert CONTRACT_TYPES - ours <= {"EngineKVFormat", "GPUKVFormat"}
    assert all(getattr(CpuDeviceOps(), name) is getattr(ops_types, name) for name in ours)


@given(st.lists(INT32, min_size=8, max_size=8))
def test_a_descriptor_holds_eight_int32_and_survives_a_process(values: list[int]) -> None:
    desc = PageBufferShapeDesc(*values)
    again = pickle.loads(pickle.dumps(desc))
    assert [getattr(again, name) for name in NAMES] == values
    assert again == desc


@example("bs", 1 << 31)
@example("bs", -(1 << 31) - 1)
@given(st.sampled_from(NAMES), st.integers().filter(lambda i: not -(1 << 31) <= i < 1 << 31))
def test_a_descriptor_refuses_what_an_int32_would_wrap(name: str, value: int) -> None:
    desc = PageBufferShapeDesc()
    with pytest.raises(LayoutError, match=rf"PageBufferShapeDesc\.{name}={value}: expected what an int32"):
        setattr(desc, name, value)
    with pytest.raises(LayoutError):
        PageBufferShapeDesc(**{name: value})
    assert desc == PageBufferShapeDesc()


@pytest.mark.parametrize("value", [1.0, "1", None])
def test_a_descriptor_refuses_what_is_no_integer(value: Any) -> None:
    with pytest.raises(TypeError, match=r"PageBufferShapeDesc\.bs=.*expected an integer"):
        PageBufferShapeDesc(bs=value)


def test_other_attributes_of_a_descriptor_are_the_caller_s() -> None:
    desc = PageBufferShapeDesc(bs=16)
    desc.dtype = "torch.float16"  # type: ignore[attr-defined]
    assert desc == PageBufferShapeDesc(bs=16)
    assert pickle.loads(pickle.dumps(desc)).dtype == "torch.float16"

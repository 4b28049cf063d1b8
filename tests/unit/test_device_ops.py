"""The surface of ``DeviceOps``: every op a documented member, declared formats and operands, what may stand in."""

from __future__ import annotations

import inspect
import pydoc
import re
from types import ModuleType
from typing import Any

import pytest

from lmcache.errors import DeviceError
from lmcache.v1.kv_layout import KVFormat, kv_formats
from lmcache.v1.platform import torch_ops
from lmcache.v1.platform.base.device_ops import DeviceOps
from lmcache.v1.platform.base.op_contract import (
    BASE_OPS,
    CONTRACT_OPS,
    FORMAT_OPS,
    NATIVE_ONLY_OPS,
    OPS,
    STREAM_ORDERED_OPS,
    serves,
    stream_ordered,
    takes,
)
from lmcache.v1.platform.base.ops_codec import CodecOps
from lmcache.v1.platform.base.ops_memory import MemoryOps
from lmcache.v1.platform.base.ops_stream import StreamOps
from lmcache.v1.platform.base.ops_transfer import TransferOps
from lmcache.v1.platform.cpu.device_ops import CpuDeviceOps

BLOCK_OP = "multi_layer_block_kv_transfer"
PARTS = (TransferOps, MemoryOps, CodecOps, StreamOps)


def native(**members: Any) -> ModuleType:
    module = ModuleType("foo_native")
    vars(module).update(members)
    return module


def bound(**members: Any) -> DeviceOps:
    ops = DeviceOps()
    ops.bind_native(native(**members))
    return ops


def shape_of(function: Any) -> list[tuple[str, Any, Any]]:
    parameters = inspect.signature(function).parameters.values()
    return [(p.name, p.kind, p.default) for p in parameters if p.name != "self"]


# --- members -----------------------------------------------------------------------------------------------


def test_the_surface_has_thirty_three_ops_in_four_parts_and_six_more_that_are_optional() -> None:
    assert (len(BASE_OPS), len(NATIVE_ONLY_OPS)) == (33, 6)
    declared = [name for part in PARTS for name in vars(part) if not name.startswith("_")]
    assert sorted(declared) == sorted(BASE_OPS)
    assert not [name for name in NATIVE_ONLY_OPS if hasattr(DeviceOps, name) or hasattr(CpuDeviceOps(), name)]


@pytest.mark.parametrize("name", sorted(BASE_OPS))
def test_an_op_is_a_member_with_the_signature_of_the_contract(name: str) -> None:
    parameters = shape_of(getattr(DeviceOps, name))
    required = tuple(p for p, _, default in parameters if default is inspect.Parameter.empty)
    optional = tuple(p for p, _, default in parameters if default is not inspect.Parameter.empty)
    assert (required, optional) == (OPS[name].required, OPS[name].optional)
    assert {kind for _, kind, _ in parameters} <= {inspect.Parameter.POSITIONAL_OR_KEYWORD}


@pytest.mark.parametrize("name", sorted(BASE_OPS))
def test_the_words_of_an_op_name_every_parameter(name: str) -> None:
    words = inspect.getdoc(getattr(DeviceOps, name)) or ""
    described = re.findall(r"^    (\w+): ", words, re.MULTILINE) + re.findall(r"``(\w+)``", words)
    assert {*OPS[name].required, *OPS[name].optional} - {*described} == set()


@pytest.mark.parametrize("name", sorted(BASE_OPS & {*torch_ops.__all__}))
def test_the_baseline_is_called_as_the_member_is(name: str) -> None:
    assert shape_of(getattr(torch_ops, name)) == shape_of(getattr(DeviceOps, name))


def test_the_baseline_has_ops_and_nothing_else() -> None:
    assert {*torch_ops.__all__} <= BASE_OPS


def test_help_shows_the_members_with_their_signatures() -> None:
    text = pydoc.plain(pydoc.render_doc(DeviceOps))
    assert "alloc_numa_ptr(self, size: 'int', numa_id: 'int' = 0) -> 'int'" in text
    assert "Host memory of one NUMA node" in text


# --- who answers -------------------------------------------------------------------------------------------


def test_a_native_function_comes_before_a_method_and_a_method_before_the_baseline() -> None:
    class Ops(DeviceOps):
        def batched_memcpy(self, src: Any, dst: Any, sizes: Any) -> None:
            assert super().batched_memcpy is torch_ops.batched_memcpy
            super().batched_memcpy(src, dst, sizes)
            sizes.append("mine")

    ops, sizes = Ops(), [0]
    ops.batched_memcpy([0], [0], sizes)
    assert sizes == [0, "mine"]
    assert DeviceOps().batched_memcpy is torch_ops.batched_memcpy
    assert "batched_memcpy" in ops.binding_report().overridden
    ops.bind_native(native(batched_memcpy=lambda src, dst, sizes: sizes.append("native")))
    ops.batched_memcpy([], [], sizes)
    assert sizes[2:] == ["native"]
    assert "batched_memcpy" in ops.binding_report().bound


def test_an_op_can_be_called_through_its_class() -> None:
    with pytest.raises(ValueError, match="1 src, 0 dst, 0 sizes"):
        DeviceOps.batched_memcpy(DeviceOps(), [1], [], [])


def test_super_finds_no_op_that_must_not_stand_in() -> None:
    class Ops(DeviceOps):
        def record_completion_on_stream(self, stream_ptr: int, kind: str, payload: bytes) -> None:
            super().record_completion_on_stream(stream_ptr, kind, payload)

    assert hasattr(Ops(), "record_completion_on_stream")
    with pytest.raises(AttributeError, match="no stream-ordered device operation"):
        Ops().record_completion_on_stream(0, "k", b"")


@pytest.mark.parametrize("kind", ["completion", "event"])
def test_what_records_and_what_drains_are_of_one_origin(kind: str) -> None:
    record, drain = f"record_{kind}_on_stream", f"drain_recorded_{kind}s"
    ops = CpuDeviceOps()
    assert hasattr(ops, record)
    assert hasattr(ops, drain)
    ops.bind_native(native(**{record: lambda *args: None}))
    with pytest.raises(AttributeError, match=f"'{drain}': its '{record}' is not the baseline's"):
        getattr(ops, drain)
    assert drain in ops.binding_report().absent
    ops.bind_native(native(**{drain: lambda: ["native"]}))
    assert getattr(ops, drain)() == ["native"]

    class Ops(CpuDeviceOps):
        pass

    setattr(Ops, drain, lambda self: getattr(super(Ops, self), drain)())
    assert getattr(Ops(), drain)() == []
    assert not hasattr(Ops(), record)
    setattr(Ops, record, lambda self, *args: getattr(super(Ops, self), record)(*args))
    arguments = (0, "k", b"") if kind == "completion" else (0, "t", "s", {}, {})
    getattr(Ops(), record)(*arguments)  # who overrides both may build on the baseline's
    assert len(getattr(Ops(), drain)()) == 1


def test_only_marked_ops_are_there_on_an_asynchronous_device() -> None:
    ordered = {name for name in STREAM_ORDERED_OPS & BASE_OPS if hasattr(torch_ops, name)}
    absent = {name for name in ordered if not hasattr(DeviceOps(), name)}
    assert {"record_completion_on_stream", "record_event_on_stream"} <= absent
    assert absent == {n for n in ordered if not getattr(getattr(torch_ops, n), "stream_ordered", False)}
    assert {name for name in ordered if not hasattr(CpuDeviceOps(), name)} == set()


# --- formats -----------------------------------------------------------------------------------------------


def mla_only(row: KVFormat) -> str:
    return "" if row.is_mla else "it has heads"


def mla_ids() -> tuple[int, ...]:
    return tuple(row.id for row in kv_formats() if row.is_mla)


def test_the_baseline_s_mark_says_which_rows_it_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    @serves(mla_only)
    @stream_ordered
    def transfer() -> None: ...

    monkeypatch.setattr(torch_ops, "multi_layer_kv_transfer", transfer, raising=False)
    served = DeviceOps().supported_formats("multi_layer_kv_transfer")
    assert served == mla_ids()
    assert {3, 5, 14, 17} <= {*served}


def test_a_native_module_s_table_says_which_rows_it_serves() -> None:
    class Fmt:
        """A native enumeration: it has an integer and is none."""

        def __int__(self) -> int:
            return 3

    members = {name: lambda *args: None for name in (BLOCK_OP, "multi_layer_kv_transfer")}
    ops = bound(**members, LMCACHE_OP_FORMATS={BLOCK_OP: (13, Fmt(), 12, 13), "not_an_op_yet": [1]})
    assert ops.supported_formats(BLOCK_OP) == (3, 12, 13)
    assert ops.binding_report().refused == {}
    with pytest.raises(
        DeviceError, match=r"multi_layer_kv_transfer: foo_native does not declare.*LMCACHE_OP_FORMATS"
    ):
        ops.supported_formats("multi_layer_kv_transfer")
    ops.bind_native(native(**{BLOCK_OP: members[BLOCK_OP], "LMCACHE_OP_FORMATS": {BLOCK_OP: [0]}}))
    assert ops.supported_formats(BLOCK_OP) == (0,)


def test_a_table_says_nothing_of_an_op_that_another_answers() -> None:
    class Ops(DeviceOps):
        @serves(mla_only)
        def single_layer_kv_transfer(
            self, lmc: Any, paged: Any, slots: Any, direction: int, format: int, token_major: bool = False
        ) -> None: ...

    ops = Ops()
    ops.bind_native(native(LMCACHE_OP_FORMATS={"single_layer_kv_transfer": (1,)}))
    assert ops.supported_formats("single_layer_kv_transfer") == mla_ids()


def test_a_method_that_declares_nothing_is_not_taken_for_what_it_replaces() -> None:
    class Ops(DeviceOps):
        def multi_layer_block_kv_transfer(self, *args: Any) -> None:  # type: ignore[override]
            pass

    with pytest.raises(DeviceError, match=r"Ops\.multi_layer_block_kv_transfer does not declare.*@serves"):
        Ops().supported_formats(BLOCK_OP)


def test_ops_without_formats_and_absent_ops_serve_none() -> None:
    ops = DeviceOps()
    assert [ops.supported_formats(name) for name in sorted(NATIVE_ONLY_OPS)] == [()] * 6
    assert ops.supported_formats("batched_memcpy") == ()
    assert bound(calculate_cdf=lambda symbols, num_bins: None).supported_formats("calculate_cdf") == ()
    assert {"batched_memcpy", "single_layer_kv_transfer_sgl"} & FORMAT_OPS == set()
    assert len(FORMAT_OPS) == 7


@pytest.mark.parametrize(
    ("name", "table", "why"),
    [
        ("LMCACHE_OP_FORMATS", [12], "it is list: expected a dict"),
        ("LMCACHE_OP_FORMATS", {BLOCK_OP: 12}, "not iterable"),
        ("LMCACHE_OP_FORMATS", {BLOCK_OP: "12"}, "expected ids"),
        ("LMCACHE_OP_OPERANDS", {BLOCK_OP: "pointer"}, "expected of tensors, pointers"),
        ("LMCACHE_OP_OPERANDS", {BLOCK_OP: 1}, "not iterable"),
    ],
)
def test_a_table_that_cannot_be_read_is_refused_and_told(name: str, table: Any, why: str) -> None:
    ops = bound(**{name: table, BLOCK_OP: lambda *args: None})
    assert why in ops.binding_report().refused[name]
    with pytest.raises(DeviceError):
        ops.supported_formats(BLOCK_OP)
    assert ops.operand_kinds(BLOCK_OP) == {"pointers"}


# --- operands ----------------------------------------------------------------------------------------------


def test_operands_are_declared_and_not_read_off_annotations() -> None:
    class Ops(DeviceOps):
        def multi_layer_block_kv_transfer(  # type: ignore[override]
            self, paged: int, lmcache_objects_ptrs: list[int], *rest: Any
        ) -> None: ...

        @takes("pointers", "tensors")
        def batched_memcpy(self, src: Any, dst: Any, sizes: Any) -> None: ...

    assert Ops().operand_kinds(BLOCK_OP) == {"tensors"}
    assert Ops().operand_kinds("batched_memcpy") == {"tensors", "pointers"}
    for declared in (("tensors", "pointers"), ["pointers"], "tensors"):
        ops = bound(**{BLOCK_OP: lambda *args: None, "LMCACHE_OP_OPERANDS": {BLOCK_OP: declared}})
        assert ops.operand_kinds(BLOCK_OP) == {*([declared] if isinstance(declared, str) else declared)}
    assert bound(**{BLOCK_OP: lambda *args: None}).operand_kinds(BLOCK_OP) == {"pointers"}
    assert bound(**{BLOCK_OP: takes("tensors")(lambda *args: None)}).operand_kinds(BLOCK_OP) == {"tensors"}


def test_the_baseline_says_what_its_ops_take() -> None:
    ops = DeviceOps()
    assert ops.operand_kinds("alloc_pinned_ptr") == {"pointers"}
    assert ops.operand_kinds("drain_recorded_events") == set()
    assert ops.operand_kinds("execute_object_group_transfer") == set()
    assert ops.operand_kinds("lmcache_memcpy_async") == {"tensors"}
    assert CpuDeviceOps().operand_kinds("lmcache_memcpy_async") == {"tensors", "pointers"}


@pytest.mark.parametrize("op", sorted(FORMAT_OPS - NATIVE_ONLY_OPS))
def test_the_baseline_claims_no_addresses_of_a_device_s_memory(op: str) -> None:
    class OfADevice(DeviceOps):
        device_type = "foo"

    assert DeviceOps().operand_kinds(op) == OfADevice().operand_kinds(op) == {"tensors"}
    assert "tensors" in CpuDeviceOps().operand_kinds(op)
    assert "pointers" in CpuDeviceOps().operand_kinds(BLOCK_OP)


@pytest.mark.parametrize("question", [DeviceOps.supported_formats, DeviceOps.operand_kinds])
def test_a_question_about_no_op_is_refused(question: Any) -> None:
    assert "alloc_ptr" not in CONTRACT_OPS
    with pytest.raises(ValueError, match="'alloc_ptr' is no device operation"):
        question(DeviceOps(), "alloc_ptr")

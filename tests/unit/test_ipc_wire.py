"""IPC descriptors: what travels, what is refused, and that all of a model's layers come over or none."""

from __future__ import annotations

import builtins
import importlib
import os
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lmcache.errors import DeviceError
from lmcache.v1.platform import _device_detect, kv_wire
from lmcache.v1.platform.base import ipc_wire
from lmcache.v1.platform.base.ipc_wire import DTYPE_BYTES, TensorMeta, WireDescriptor, decode, encode
from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper
from lmcache.v1.platform.cpu.ipc_wrapper import CpuShmTensorWrapper

QUICK = settings(max_examples=150)


def meta(**changes: Any) -> dict[str, Any]:
    whole = {"dtype": "float32", "shape": [2, 3], "stride": [3, 1], "storage_offset": 1, "nbytes": 28}
    return {**whole, **changes}


def wire(**changes: Any) -> bytes:
    whole = {"backend": "foo", "wire_version": 1, "tensors": [meta()], "payload": {"handle": b"x"}}
    return msgspec.msgpack.encode({**whole, **changes})


class Tensor:
    """As much of a torch tensor as a descriptor needs."""

    def __init__(self, shape: tuple[int, ...] = (2, 3), device: str = "foo", nbytes: int = 24) -> None:
        self.shape, self.dtype, self.nbytes_ = shape, "torch.float32", nbytes
        self.device = SimpleNamespace(type=device, index=1)

    def stride(self) -> tuple[int, ...]:
        steps, running = [], 1
        for n in reversed(self.shape):
            steps.insert(0, running)
            running *= n
        return tuple(steps)

    def storage_offset(self) -> int:
        return 0

    def untyped_storage(self) -> Any:
        return SimpleNamespace(nbytes=lambda: self.nbytes_)


# --- The descriptor ----------------------------------------------------------------------------------------

PRIMITIVES = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 63), (1 << 64) - 1) | st.floats(allow_nan=False) | st.text()
    | st.binary(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)  # fmt: skip


@QUICK
@given(st.dictionaries(st.text(), PRIMITIVES, max_size=4), st.sampled_from(sorted(DTYPE_BYTES)))
def test_what_is_encoded_is_decoded_again(payload: dict[str, Any], dtype: str) -> None:
    plane = TensorMeta(dtype, (4, 2), (2, 1), 3, 11 * DTYPE_BYTES[dtype], "GPU-00")
    sent = WireDescriptor("foo", 7, (plane,), payload)
    assert decode(encode(sent)) == sent


@QUICK
@given(
    st.lists(st.tuples(st.integers(0, 6), st.integers(0, 9)), max_size=4),
    st.integers(0, 9),
    st.integers(0, 400),
)
def test_a_view_is_accepted_exactly_if_every_element_lies_in_the_allocation(
    axes: list[tuple[int, int]], offset: int, nbytes: int
) -> None:
    shape, stride = tuple(a[0] for a in axes), tuple(a[1] for a in axes)
    places = [offset]
    for n, step in axes:
        places = [place + i * step for place in places for i in range(n)]
    inside = max((place + 1 for place in places), default=offset) * 2 <= nbytes
    call = lambda: TensorMeta("bfloat16", shape, stride, offset, nbytes)  # noqa: E731
    if inside:
        assert call().span <= nbytes
    else:
        with pytest.raises(ValueError, match=f"of an allocation of {nbytes} bytes"):
            call()


HUGE = (1 << 63) - 1


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (wire(extra=1), "unknown field `extra`"),
        (wire(tensors=[meta(extra=1)]), "unknown field `extra`"),
        (wire(tensors=[meta(stride=[-3, 1])]), ">= 0"),
        (wire(tensors=[meta(storage_offset=-1)]), ">= 0"),
        (wire(tensors=[meta(storage_offset=2)]), "ends at byte 32 of an allocation of 28"),
        (wire(tensors=[meta(shape=[HUGE, HUGE], stride=[HUGE, HUGE])]), "of an allocation of 28"),
        (wire(tensors=[meta(shape=[1 << 63, 1])]), "<= 9223372036854775807"),
        (wire(tensors=[meta(shape=[2])]), "differ in length"),
        (wire(tensors=[meta(shape=[1] * 17, stride=[1] * 17)]), "<= 16"),
        (wire(tensors=[meta(dtype="torch.float32")]), "unknown"),
        (wire(tensors=[meta(dtype="complex64")]), "unknown"),
        (wire(tensors=[meta(shape="23")]), "Expected `array`"),
        (wire(tensors=[meta(nbytes=28.0)]), "Expected `int`, got `float`"),
        (wire(tensors=[]), "length >= 1"),
        (wire(tensors=[meta()] * 65), "length <= 64"),
        (wire(backend=""), "length >= 1"),
        (wire(wire_version=True), "Expected `int`"),
        (wire(payload=[1]), "Expected `object`"),
        (wire(payload={"a": msgspec.msgpack.Ext(1, b"pickled")}), "a Ext cannot travel"),
        (wire(payload={"a": {1: 2}}), "text as the keys"),
        (wire(payload={"a": [0] * 10_001}), "at most 10000 values"),
        (wire(payload={"a": [[[[[[[[[1]]]]]]]]]}), "at most 8 levels"),
        (wire(payload={"a": b"x" * (1 << 20)}), "at most 1048576"),
        (wire() + b"\x00", "trailing"),
        (wire()[:-1], "truncated"),
        (b"", "truncated"),
        (b"\x81\xa1a" * 5000, "not an IPC descriptor"),
        (b"\x80\x04\x95\x10", "not an IPC descriptor"),
    ],
)  # fmt: skip
def test_a_malformed_descriptor_is_refused_in_one_line(data: bytes, says: str) -> None:
    with pytest.raises(ValueError, match=says) as caught:
        decode(data)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("value", [object(), 1j, {1}, bytearray(b"x"), {"a": {2: 1}}, 1 << 70, "\ud800"])
def test_what_cannot_travel_is_not_sent(value: Any) -> None:
    with pytest.raises(ValueError, match="IPC payload"):
        encode(WireDescriptor("foo", 1, (TensorMeta(**meta()),), {"a": value}))


VALID = encode(WireDescriptor("cpu", 1, (TensorMeta("int8", (2,), (1,), 0, 4096),), {
    "single": True,
    "planes": [{
        "file": {"pid": os.getpid(), "fd": 0, "start_time": 1, "pid_namespace": 1, "dev": 1, "ino": 1, "nbytes": 4096},
        "tensor": {"dtype": "int8", "shape": [2], "stride": [1], "storage_offset": 0, "nbytes": 4096, "device": 0},
    }],
}))  # fmt: skip


@contextmanager
def nothing_opens() -> Iterator[None]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError(f"opened {args}")

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(os, "open", refuse)
        patch.setattr(os, "stat", refuse)
        patch.setattr(builtins, "open", refuse)
        yield


def test_any_bytes_are_refused_or_decoded_and_open_nothing() -> None:
    assert isinstance(kv_wire.import_kv_caches([VALID])[0], CpuShmTensorWrapper)
    accepted: list[int] = []
    refusals: list[str] = []

    @settings(max_examples=700)
    @given(st.data())
    def fuzz(data: st.DataObject) -> None:
        raw = bytearray(VALID)
        for _ in range(data.draw(st.integers(0, 3))):
            raw[data.draw(st.integers(0, len(raw) - 1))] = data.draw(st.integers(0, 255))
        cut = data.draw(st.integers(0, 40)) if data.draw(st.booleans()) else 0
        try:
            with nothing_opens():
                accepted.append(len(kv_wire.import_kv_caches([bytes(raw[: len(raw) - cut])])))
        except (ValueError, DeviceError) as exc:
            refusals.append(str(exc))

    fuzz()
    assert accepted
    assert refusals
    assert [text for text in refusals if "\n" in text] == []


@QUICK
@given(st.binary(max_size=200))
def test_noise_is_no_descriptor(data: bytes) -> None:
    with pytest.raises(ValueError, match=r"descriptor|IPC payload"):
        decode(data)


# --- Whole models ------------------------------------------------------------------------------------------


class Wrapper(DeviceIPCWrapper):
    """As a vendor writes it: to the contract's five members and no more."""

    device_type, wire_version = "foo", 3
    opened: list[str] = []  # noqa: RUF012
    fault = ""
    mapped: Any = None

    def __init__(self, name: str) -> None:
        self.name = name
        self.opened.append(name)

    @classmethod
    def wrap(cls, value: Any) -> Wrapper:
        if isinstance(value, Tensor) and value.shape == (0,):
            raise KeyError("no\nhandle")
        return cls(f"layer{len(cls.opened)}")

    def to_tensor(self) -> Any:
        if self.fault == self.name:
            raise OSError("map failed")
        return self.mapped

    def to_wire(self) -> dict[str, Any]:
        return {"name": self.name}

    @classmethod
    def from_wire(cls, data: Any) -> Wrapper:
        if set(data) != {"name"}:
            raise ValueError("expected a name")
        return cls(data["name"])

    def close(self) -> None:
        if self.name in self.opened:
            self.opened.remove(self.name)
        if self.fault == "close " + self.name:
            raise RuntimeError("busy")


@pytest.fixture
def foo(monkeypatch: pytest.MonkeyPatch) -> type[Wrapper]:
    """A backend ``foo`` of this process, beside those that it has."""
    spec = SimpleNamespace(
        backend_name="foo", device_type="foo", ipc_wrapper_cls=Wrapper,
        _get_torch_module=lambda: SimpleNamespace(
            get_device_properties=lambda index: SimpleNamespace(uuid=f"u{index}")
        ),
    )  # fmt: skip
    resolve = _device_detect.resolve_wrapper_cls
    monkeypatch.setattr(_device_detect, "get_device_spec", {"foo": spec}.get)
    monkeypatch.setattr(
        _device_detect, "resolve_wrapper_cls", lambda name: Wrapper if name == "foo" else resolve(name)
    )
    monkeypatch.setattr(Wrapper, "opened", [])
    return Wrapper


def test_a_vendor_s_wrapper_travels_as_it_is(foo: type[Wrapper], monkeypatch: pytest.MonkeyPatch) -> None:
    layers = [Tensor(), (Tensor(), Tensor((6,)))]
    exported = kv_wire.export_kv_caches(layers)
    imported = kv_wire.import_kv_caches(exported)
    assert list(imported) == exported.wrappers
    assert imported[0] != imported[1]
    first, second = imported.descriptors
    assert (first.backend, first.wire_version, first.payload) == ("foo", 3, {"name": "layer0"})
    assert [m.shape for m in second.tensors] == [(2, 3), (6,)]
    assert {m.device for m in second.tensors} == {"u1"}
    monkeypatch.setattr(foo, "mapped", property(lambda self: layers[int(self.name[-1])]))
    assert imported.map() == layers
    exported.close()
    imported.close()
    imported.close()
    assert foo.opened == []


def test_of_many_layers_all_are_exported_or_none(foo: type[Wrapper]) -> None:
    faults: list[tuple[list[Any], type[Exception], str]] = [
        ([Tensor(), Tensor(), Tensor((0,))], DeviceError, r"'foo': wrap\(\) .* KeyError: 'no\\nhandle'"),
        ([Tensor(), Tensor(nbytes=4)], ValueError, "of an allocation of 4 bytes"),
        ([Tensor(), Tensor(device="cpu")], ValueError, r"device types \['cpu', 'foo'\]"),
        ([], ValueError, r"device types \[\]"),
        ([Tensor(device="bar")], ValueError, "'bar': no KV-cache wrapper factory"),
    ]
    for layers, kind, says in faults:
        with pytest.raises(kind, match=says):
            kv_wire.export_kv_caches(layers)
        assert foo.opened == []


def test_of_many_layers_all_are_imported_or_none(foo: type[Wrapper]) -> None:
    good = wire(wire_version=3, payload={"name": "layer0"})
    faults: list[tuple[bytes, type[Exception], str]] = [
        (wire(wire_version=3, payload={"name": 1, "more": 2}), ValueError, "expected a name"),
        (
            wire(wire_version=2),
            DeviceError,
            "'foo': the exporter speaks wire version 2, this process 3; install",
        ),
        (wire(backend="os"), DeviceError, "device backend 'os': no such backend.*backends here: cpu"),
        (b"?", ValueError, "not an IPC descriptor"),
    ]
    for bad, kind, says in faults:
        with pytest.raises(kind, match=says):
            kv_wire.import_kv_caches([good, bad])
        assert foo.opened == []


@pytest.mark.parametrize(
    ("fault", "mapped", "says"),
    [
        ("layer1", Tensor(), r"to_tensor\(\) of its IPC wrapper failed: OSError: map failed"),
        ("", Tensor((3, 2)), r"KV layer 0: .* mapped torch.float32\[3, 2\] .*expected float32\[2, 3\]"),
        ("", (Tensor(), Tensor()), "KV layer 0"),
        ("close layer0", None, "KV layer 0|has no attribute"),
    ],
)
def test_of_many_layers_all_are_mapped_or_all_are_closed(
    foo: type[Wrapper], monkeypatch: pytest.MonkeyPatch, fault: str, mapped: Any, says: str
) -> None:
    monkeypatch.setattr(foo, "fault", fault)
    monkeypatch.setattr(foo, "mapped", mapped)
    imported = kv_wire.import_kv_caches(
        [wire(wire_version=3, payload={"name": f"layer{i}"}) for i in range(3)]
    )
    assert len(foo.opened) == 3
    with pytest.raises((DeviceError, AttributeError), match=says):
        imported.map()
    assert foo.opened == []


def test_a_layer_that_is_mapped_on_another_device_is_refused(
    foo: type[Wrapper], monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, elsewhere = Tensor(), Tensor()
    elsewhere.device = SimpleNamespace(type="foo", index=0)
    imported = kv_wire.import_kv_caches(kv_wire.export_kv_caches([layer]))
    monkeypatch.setattr(foo, "mapped", elsewhere)
    with pytest.raises(DeviceError, match=r"KV layer 0: .*'foo' mapped it on .*, which is not device u1"):
        imported.map()


def test_a_payload_that_contradicts_its_descriptor_is_refused() -> None:
    descriptor = decode(VALID)
    other = msgspec.structs.replace(descriptor.tensors[0], shape=(3,))
    with pytest.raises(ValueError, match="layer 0: the payload describes other tensors"):
        kv_wire.import_kv_caches([encode(msgspec.structs.replace(descriptor, tensors=(other,)))])


def test_wrappers_are_equal_only_within_one_exact_class(foo: type[Wrapper]) -> None:
    child: Callable[[str], Wrapper] = type("Child", (Wrapper,), {})
    assert Wrapper("a") == Wrapper("a") != Wrapper("b")
    assert Wrapper("a") != child("a")
    assert len({Wrapper("a"), Wrapper("a"), child("a")}) == 2
    with Wrapper("z") as wrapper:
        assert wrapper.name in foo.opened
    assert "z" not in foo.opened


def test_the_wrapper_that_the_contract_writes_out_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = (Path(__file__).parents[2] / "docs" / "vendors" / "contract.md").read_text()
    code = re.search(r"```python\n(from typing.*?)```", text, re.DOTALL)
    assert code
    calls: list[Any] = []
    mapping = SimpleNamespace(close=lambda: calls.append("close"))
    runtime = SimpleNamespace(
        export_storage=lambda tensor: b"h" * 64,
        open_handle=lambda handle: calls.append(handle) or mapping,
        view=lambda mapped, meta: (mapped, meta.shape),
    )
    monkeypatch.setitem(sys.modules, "lmcache_foo", SimpleNamespace(runtime=runtime))
    (tmp_path / "foo_ipc_wrapper.py").write_text(code[1])
    monkeypatch.syspath_prepend(str(tmp_path))
    cls = importlib.import_module("foo_ipc_wrapper").FooIPCWrapper
    made = cls.wrap(Tensor())
    read = cls.from_wire(decode(encode(WireDescriptor("foo", 1, made.planes, made.to_wire()))).payload)
    assert (read, read.planes, calls) == (made, made.planes, [])
    assert read.to_tensor() == read.to_tensor() == (mapping, (2, 3))
    read.close()
    read.close()
    assert calls == [b"h" * 64, "close"]
    for bad in ({}, {**made.to_wire(), "handle": b"short"}, {**made.to_wire(), "more": 1}):
        with pytest.raises(ValueError, match="IPC payload"):
            cls.from_wire(bad)


def test_limits_are_those_that_the_messages_name() -> None:
    assert (ipc_wire.MAX_DIMS, ipc_wire.MAX_PLANES, ipc_wire.MAX_DEPTH) == (16, 64, 8)

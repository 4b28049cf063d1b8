"""In-process connectors by the wheel's hook, on the SYCL runtime's CPU device: the kernel moves what they move."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import standin
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lmcache.errors import ConfigError, LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector import lanes
from lmcache.v1.gpu_connector import pages as core_pages
from lmcache.v1.kv_layout import kv_format
from lmcache.v1.platform import torch_ops
from lmcache_xpu import connectors, memory, native

pytestmark = [pytest.mark.torch]

LAYERS, BLOCKS, SIZE, HEADS, WIDTH = 2, 5, 4, 2, 8
TOTAL = BLOCKS * SIZE
AXES = {"NB": BLOCKS, "BS": SIZE, "NH": HEADS, "HS": WIDTH, "CS": 2 * WIDTH, "NL": LAYERS, "PBS": TOTAL}
PLAIN = {"use_layerwise": False, "enable_blending": False, "enable_pd": False, "extra_config": None}
BY_LAYER, V3 = {"use_layerwise": True}, {"extra_config": {"use_gpu_connector_v3": True}}
BLENDING = {"use_layerwise": True, "enable_blending": True}
VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG
ROUTES = {
    "VLLMPagedMemXPUConnectorV2": (VLLM, {}),
    "VLLMPagedMemXPUConnectorV3": (VLLM, V3),
    "VLLMPagedMemLayerwiseXPUConnector": (VLLM, BY_LAYER),
    "VLLMBufferLayerwiseXPUConnector": (VLLM, BLENDING),
    "SGLangXPUConnector": (SGLANG, {}),
    "SGLangLayerwiseXPUConnector": (SGLANG, BY_LAYER),
}
FORMATS = {
    VLLM: ("NL_X_TWO_NB_BS_NH_HS", "NL_X_NB_TWO_BS_NH_HS", "NL_X_NB_BS_HS", "NB_NL_TWO_BS_NH_HS"),
    SGLANG: ("TWO_X_NL_X_NBBS_NH_HS", "NL_X_NBBS_ONE_HS", "TWO_X_NL_X_NB_BS_NH_HS"),
}  # fmt: skip
CASES = [(name, fmt) for name, (engine, _) in ROUTES.items() for fmt in FORMATS[engine]]
CASES += [
    (name, "NL_X_NB_NH_BS_CS") for name in ("VLLMPagedMemXPUConnectorV2", "VLLMPagedMemLayerwiseXPUConnector")
]


@pytest.fixture(autouse=True)
def on_the_cpu_device(module: Any, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Tensors of the host are the device's; connectors see them as such, and give the ops addresses."""
    spec = standin.StandinSpec()
    whole = core_pages.PagedLayers.__init__

    def seen_as_the_device_s(self: Any, *given: Any) -> None:
        whole(self, *given)
        self._on_host = False

    monkeypatch.setattr(core_pages.PagedLayers, "__init__", seen_as_the_device_s)
    monkeypatch.setattr(core_pages, "resolve_device_ops", lambda kind: spec.get_ops())
    monkeypatch.setattr(lanes, "spec_of", lambda device: spec)
    with standin.installed(everything_is_device=True):
        yield


@pytest.fixture
def transfers() -> Iterator[list[str]]:
    """The ops for which the kernel was launched."""
    load, seen = native.load, list[str]()
    loaded = load()

    class Watched:
        def __getattr__(self, name: str) -> Any:
            return getattr(loaded, name)

        def transfer(self, op: str, *given: Any, **more: Any) -> None:
            seen.append(op)
            loaded.transfer(op, *given, **more)

    native.load = Watched
    yield seen
    native.load = load  # before the fixture that it was taken from restores its own


def made(name: str, fmt: str) -> Any:
    engine, config = ROUTES[name]
    row = kv_format(fmt)
    heads, width = (1, WIDTH) if row.is_mla else (HEADS, WIDTH)
    metadata = SimpleNamespace(
        kv_shape=(LAYERS, row.kv_size, 16, heads, width), kv_dtype=torch.bfloat16, use_mla=row.is_mla,
        local_worker_id=0, chunk_size=16, kv_layer_groups_manager=None,
    )  # fmt: skip
    spec = standin.StandinSpec()
    return spec.create_gpu_connector(
        SimpleNamespace(**{**PLAIN, **config}), metadata, engine, {"engine_kv_format": row.id}
    )


def pages_of(fmt: str) -> Any:
    row = kv_format(fmt)
    shape = [AXES.get(axis) or int(axis) if axis != "ONE" else 1 for axis in row.dims.axes]

    def level(levels: tuple[str, ...]) -> Any:
        if not levels:
            return torch.randn(shape).to(torch.bfloat16)
        return [level(levels[1:]) for _ in range(2 if levels[0] == "2" else LAYERS)]

    return level(row.dims.levels)


def zeroed(node: Any) -> Any:
    return [zeroed(part) for part in node] if isinstance(node, list) else torch.zeros_like(node)


def by_slot(fmt: str, pages: Any) -> Any:
    """``[KV, NL, slots, hidden]`` by torch's baseline, which shares no code with the kernel."""
    row = kv_format(fmt)
    hidden = WIDTH if row.is_mla else HEADS * WIDTH * (2 if row.is_packed else 1)
    found = torch.zeros(row.kv_size, LAYERS, TOTAL, hidden, dtype=torch.bfloat16)
    torch_ops.multi_layer_kv_transfer(
        found, pages, torch.arange(TOTAL), torch.device("cpu"), TOTAL, 1, row.id
    )
    return found


def drive(connector: Any, objects: Any, starts: list[int], ends: list[int], way: str, **kwargs: Any) -> None:
    if not connector.is_layerwise:
        move = connector.batched_from_gpu if way == "store" else connector.batched_to_gpu
        move(objects, starts, ends, **kwargs)
    elif way == "store":
        assert len(list(connector.batched_from_gpu(objects, starts, ends, sync=True, **kwargs))) == LAYERS + 1
    else:
        running = connector.batched_to_gpu(starts, ends, sync=True, **kwargs)
        next(running)
        for layer in objects:
            running.send(layer)
        next(running)


@pytest.mark.parametrize("name", ROUTES)
def test_the_hook_gives_the_class_of_the_name(name: str) -> None:
    assert type(made(name, FORMATS[ROUTES[name][0]][0])) is getattr(connectors, name)


def test_an_engine_without_a_class_is_left_to_the_core_and_contradictions_are_refused() -> None:
    spec, metadata = standin.StandinSpec(), SimpleNamespace(local_worker_id=0)
    assert spec.create_gpu_connector(SimpleNamespace(**PLAIN), metadata, "another") is None
    with pytest.raises(ConfigError, match="expected use_layerwise=true with it"):
        spec.create_gpu_connector(SimpleNamespace(**{**PLAIN, "enable_blending": True}), metadata, VLLM)


@pytest.mark.parametrize(("name", "fmt"), CASES)
@settings(
    max_examples=3, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture], derandomize=True
)  # fmt: skip
@given(data=st.data())
def test_a_store_and_a_load_into_zeros_restore_exactly_the_named_slots(
    transfers: list[str], name: str, fmt: str, data: st.DataObject
) -> None:
    connector = made(name, fmt)
    slots = [
        slot if data.draw(st.integers(0, 4)) else -1 for slot in data.draw(st.permutations(range(TOTAL)))
    ]
    edges = sorted(data.draw(st.sets(st.integers(0, TOTAL), min_size=2, max_size=4)))
    starts, ends = edges[:-1], edges[1:]
    cached = data.draw(st.integers(0, TOTAL))
    kwargs = {"slot_mapping": torch.tensor(slots)}
    cache = pages_of(fmt)
    connector.initialize_kvcaches_ptr(kvcaches=cache)
    allocator = memory.XPUMemoryAllocator(1 << 20)

    def chunk(tokens: int) -> Any:
        shapes = (
            connector.get_shapes(tokens)
            if hasattr(connector, "get_shapes")
            else [connector.get_shape(tokens)]
        )
        return allocator.allocate([tuple(shape) for shape in shapes], torch.bfloat16)

    lengths = [end - start for start, end in zip(starts, ends, strict=True)]
    objects = (
        [[chunk(n) for n in lengths] for _ in range(LAYERS)]
        if connector.is_layerwise
        else [chunk(n) for n in lengths]
    )
    transfers.clear()
    drive(connector, objects, starts, ends, "store", kvcaches=cache, **kwargs)
    target = zeroed(cache)
    drive(connector, objects, starts, ends, "load", kvcaches=target, vllm_cached_tokens=cached, **kwargs)
    stored = [slots[token] for token in range(starts[0], ends[-1]) if slots[token] >= 0]
    named = [slots[token] for token in range(max(starts[0], cached), ends[-1]) if slots[token] >= 0]
    expected = torch.zeros_like(by_slot(fmt, cache))
    expected[:, :, named] = by_slot(fmt, cache)[:, :, named]
    assert torch.equal(by_slot(fmt, target), expected)
    if not (
        connector.is_layerwise and kv_format(fmt).is_cross_layer
    ):  # a layer's view of all is the baseline's
        assert transfers or not stored, "the kernel was not asked"
    for one in (part for row in objects for part in (row if isinstance(row, list) else [row])):
        assert one.get_ref_count() == 1
        one.ref_count_down()
    assert allocator.live == 0


def test_an_object_of_another_width_is_refused_before_the_kernel_sees_it(transfers: list[str]) -> None:
    """Addresses do not tell how wide a slot is: what is too wide would be read beyond the pages."""
    fmt = "NL_X_TWO_NB_BS_NH_HS"
    connector, cache = made("VLLMPagedMemXPUConnectorV2", fmt), pages_of(fmt)
    allocator = memory.XPUMemoryAllocator(1 << 16)
    for shape, dtype, why in (
        (
            (2, LAYERS, 4, 64),
            torch.bfloat16,
            r"shape \(2, 2, 4, 64\): expected \(2, 2, 4, 16\), or more tokens",
        ),
        (
            (2, LAYERS, 4, HEADS * WIDTH),
            torch.float32,
            r"torch\.float32: expected torch\.bfloat16, as the pages",
        ),
    ):
        obj = allocator.allocate(shape, dtype, connector.memory_format)
        for move in (connector.from_gpu, connector.to_gpu):
            with pytest.raises(LayoutError, match=rf"^memory object of {why}"):
                move(obj, 0, 4, kvcaches=cache, slot_mapping=torch.arange(4))
    assert transfers == []


def test_pages_at_addresses_with_the_highest_bit_have_a_table(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where Intel GPUs have their memory."""
    there = [0xFF00_0000_0000_1000, 0x7F00_0000_0000_1000]
    monkeypatch.setattr(core_pages, "get_group_data_ptrs", lambda *given: there)
    pages = core_pages.PagedLayers(pages_of("NL_X_NB_BS_HS"), kv_format("NL_X_NB_BS_HS"))
    assert [value % (1 << 64) for value in pages._pointers.tolist()] == there


def test_a_store_begins_after_what_the_engine_has_queued(module: Any, queue: int) -> None:
    fmt = "NL_X_TWO_NB_BS_NH_HS"
    connector, cache = made("VLLMPagedMemXPUConnectorV2", fmt), pages_of(fmt)
    late = torch.randn(cache[0].shape).to(torch.bfloat16)
    obj = memory.XPUMemoryAllocator(1 << 16).allocate(tuple(connector.get_shape(TOTAL)), torch.bfloat16)
    with standin.queued_on(queue):
        module.stall(queue, 0.2)
        module.copy_async(queue, cache[0].data_ptr(), late.data_ptr(), late.numel() * 2)
        connector.from_gpu(obj, 0, TOTAL, kvcaches=cache, slot_mapping=torch.arange(TOTAL))
    assert torch.equal(obj.tensor[:, 0], late.view(2, TOTAL, -1))

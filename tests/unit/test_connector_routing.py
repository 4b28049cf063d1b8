"""Which connector an engine gets, and that what cannot be given is refused in one line."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from lmcache.errors import ConfigError, DeviceError
from lmcache.utils import EngineType

torch = pytest.importorskip("torch")
pytestmark = pytest.mark.torch

from lmcache.v1.gpu_connector import CreateGPUConnector, GPUConnectorInterface, gpu_connectors, routing  # noqa: E402
from lmcache.v1.gpu_connector.utils import assert_layerwise_gpu_connector  # noqa: E402

VLLM, SGLANG = EngineType.VLLM, EngineType.SGLANG


def config(**given: Any) -> Any:
    known = {"use_layerwise": False, "enable_blending": False, "enable_pd": False, "extra_config": None}
    return SimpleNamespace(**{**known, **given})


def metadata(**given: Any) -> Any:
    known = {
        "kv_shape": (4, 2, 256, 2, 8), "kv_dtype": torch.bfloat16, "use_mla": False, "local_worker_id": 1,
        "kv_layer_groups_manager": None,
    }  # fmt: skip
    return SimpleNamespace(**{**known, **given})


@pytest.fixture
def accelerator(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A process that has chosen a device which torch knows and which brings no connector of its own."""
    chosen = SimpleNamespace(
        spec=SimpleNamespace(backend_name="xpu", create_gpu_connector=lambda *_: None),
        torch_dev=SimpleNamespace(set_device=lambda index: seen.append(index)),
        device_type="xpu",
    )
    seen: list[int] = []
    chosen.seen = seen
    monkeypatch.setattr(routing, "selected", lambda: chosen)
    return chosen


@pytest.fixture
def host(accelerator: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.delenv("LMCACHE_DEVICE_BACKEND", raising=False)
    accelerator.device_type = "cpu"
    return accelerator


LAYERWISE, V3 = {"use_layerwise": True}, {"extra_config": {"use_gpu_connector_v3": True}}


@pytest.mark.parametrize(
    ("engine", "asked", "name"),
    [
        (VLLM, {}, "VLLMPagedMemGPUConnectorV2"),
        (VLLM, V3, "VLLMPagedMemGPUConnectorV3"),
        (VLLM, LAYERWISE, "VLLMPagedMemLayerwiseGPUConnector"),
        (VLLM, {**LAYERWISE, "enable_blending": True}, "VLLMBufferLayerwiseGPUConnector"),
        (SGLANG, {}, "SGLangGPUConnector"),
        (SGLANG, LAYERWISE, "SGLangLayerwiseGPUConnector"),
    ],
)
@pytest.mark.parametrize("mla", [False, True])
def test_the_configuration_chooses_the_class(
    accelerator: Any, engine: Any, asked: dict[str, Any], name: str, mla: bool
) -> None:
    hints = {"kv_layout": "NHD"}
    found = CreateGPUConnector(config(**asked), metadata(use_mla=mla), engine, hints)
    assert type(found) is getattr(gpu_connectors, name)
    assert (found.hidden_dim_size, found.num_layers, found.use_mla) == (16, 4, mla)
    assert (found.device, found.layout_hints) == (torch.device("xpu", 1), hints)
    assert accelerator.seen == [1]
    assert found.use_gpu


def test_with_pd_objects_are_on_the_device_already(accelerator: Any) -> None:
    assert not CreateGPUConnector(config(enable_pd=True), metadata(), VLLM).use_gpu


def test_the_devices_own_connector_comes_first(accelerator: Any) -> None:
    asked: list[Any] = []
    at: list[Any] = []
    own = gpu_connectors.VLLMPagedMemGPUConnectorV2(16, 4)
    accelerator.spec.create_gpu_connector = lambda *given: (
        asked.append(given),
        at.extend(accelerator.seen),
        own,
    )[2]
    wish, model, hints = config(), metadata(), {"kv_layout": "HND"}
    assert CreateGPUConnector(wish, model, VLLM, hints) is own
    assert asked == [(wish, model, VLLM, hints)]
    assert at == [1], "it is made on its rank's device"
    accelerator.spec.create_gpu_connector = lambda *_: "mine"
    with pytest.raises(DeviceError, match="create_gpu_connector gave str: expected a GPUConnectorInterface"):
        CreateGPUConnector(wish, model, VLLM)


@pytest.mark.parametrize("junk", [gpu_connectors.VLLMPagedMemGPUConnectorV2, object(), 0, False])
def test_what_a_device_gives_that_is_no_connector_is_refused_with_its_name(
    accelerator: Any, junk: Any
) -> None:
    accelerator.spec.create_gpu_connector = lambda *_: junk
    with pytest.raises(DeviceError, match="device backend xpu: create_gpu_connector gave"):
        CreateGPUConnector(config(), metadata(), VLLM)


def test_a_fault_of_the_devices_own_is_one_line_with_its_name_and_a_refusal_stays_as_it_is(
    accelerator: Any,
) -> None:
    def fail(error: Exception) -> Any:
        def create(*_: Any) -> Any:
            raise error

        return create

    accelerator.spec.create_gpu_connector = fail(KeyError("kv_shape"))
    with pytest.raises(
        DeviceError, match="device backend xpu: create_gpu_connector: KeyError: 'kv_shape'"
    ) as caught:
        CreateGPUConnector(config(), metadata(), VLLM)
    assert "\n" not in str(caught.value)
    accelerator.spec.create_gpu_connector = fail(ConfigError("not on this device"))
    with pytest.raises(ConfigError, match=r"^not on this device$"):
        CreateGPUConnector(config(), metadata(), VLLM)


def test_the_host_must_be_asked_for(host: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(RuntimeError, match=r"^No supported cpu connector found\. .*cpu_connector: true"):
        CreateGPUConnector(config(), metadata(), VLLM)
    with pytest.raises(RuntimeError, match="No supported cpu connector found"):
        CreateGPUConnector(config(extra_config={"cpu_connector": False}), metadata(), SGLANG)
    asked = config(extra_config={"cpu_connector": True})
    assert type(CreateGPUConnector(asked, metadata(), VLLM)) is gpu_connectors.VLLMOpaquePagesConnector
    monkeypatch.setenv("LMCACHE_DEVICE_BACKEND", "cpu")
    found = CreateGPUConnector(config(), metadata(), SGLANG)
    assert type(found) is gpu_connectors.SGLangGPUConnector
    assert found.device == torch.device("cpu")
    assert host.seen == [], "the host has one device"


def test_a_layout_that_vllm_declares_on_the_host_is_moved_by_token(host: Any) -> None:
    asked = config(extra_config={"cpu_connector": True}, use_layerwise=True)
    found = CreateGPUConnector(asked, metadata(), VLLM, {"engine_kv_format": 1})
    assert type(found) is gpu_connectors.VLLMPagedMemLayerwiseGPUConnector
    with pytest.raises(ConfigError, match="layerwise with vLLM on the CPU: its pages are opaque"):
        CreateGPUConnector(asked, metadata(), VLLM, {"kv_layout": "HND"})


@pytest.mark.parametrize(
    ("engine", "asked", "text"),
    [
        (VLLM, {"enable_blending": True}, "enable_blending=true: expected use_layerwise=true"),
        (VLLM, {**LAYERWISE, **V3}, "use_layerwise=true with extra_config use_gpu_connector_v3=true"),
        (SGLANG, V3, "engine 'sglang' has no v3 connector in its process; it has: whole, layerwise"),
        (SGLANG, {**LAYERWISE, "enable_blending": True}, "engine 'sglang' has no blending connector"),
        (EngineType.TRTLLM, {}, "engine 'trtllm' has no whole connector in its process; it has: none"),
        (VLLM, {"extra_config": {"cpu_connector": True}}, "the device backend is not the CPU's"),
        (VLLM, {"extra_config": {"cpu_connector": "yes"}}, "cpu_connector='yes': expected true or false"),
    ],
)
def test_what_cannot_be_given_is_refused_in_one_line(
    accelerator: Any, engine: Any, asked: dict[str, Any], text: str
) -> None:
    with pytest.raises(ConfigError, match=text) as caught:
        CreateGPUConnector(config(**asked), metadata(), engine)
    assert "\n" not in str(caught.value)


def test_a_process_without_torch_is_told_what_to_install(accelerator: Any) -> None:
    accelerator.torch_dev = None
    with pytest.raises(DeviceError, match=r"pip install lmcache\[cpu\]"):
        CreateGPUConnector(config(), metadata(), VLLM)


def test_layerwise_connectors_say_so() -> None:
    for name in gpu_connectors.__all__:
        kind = getattr(gpu_connectors, name)
        assert issubclass(kind, GPUConnectorInterface)
        assert kind.is_layerwise == ("Layerwise" in name)
    assert_layerwise_gpu_connector(gpu_connectors.SGLangLayerwiseGPUConnector(16, 4))
    with pytest.raises(ConfigError, match="SGLangGPUConnector does not go layer by layer"):
        assert_layerwise_gpu_connector(gpu_connectors.SGLangGPUConnector(16, 4))


def test_an_option_that_nobody_reads_is_refused() -> None:
    with pytest.raises(ConfigError, match="option 'chunk' is unknown; known: chunk_size"):
        gpu_connectors.VLLMPagedMemGPUConnectorV2(16, 4, chunk=256)
    with pytest.raises(ConfigError, match="num_layers=0: expected a positive integer"):
        gpu_connectors.SGLangGPUConnector(16, 0)

"""Which connector an engine gets: the device's own if its spec has one, else a row of a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lmcache.errors import ConfigError, DeviceError, LMCacheError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.interface import GPUConnectorInterface
from lmcache.v1.platform._device_detect import selected
from lmcache.v1.platform._registry import BACKEND_VARIABLE, variable

if TYPE_CHECKING:
    from lmcache.v1.kv_layout import LayoutHints

__all__ = ["CreateGPUConnector"]

_HOST = "cpu"
_ASK_FOR_HOST = "cpu_connector"
_V3 = "use_gpu_connector_v3"

#: What the configuration asks for, and the class that does it, by engine. What is not here is refused.
_ROUTES = {
    EngineType.VLLM: {
        "whole": "VLLMPagedMemGPUConnectorV2",
        "v3": "VLLMPagedMemGPUConnectorV3",
        "layerwise": "VLLMPagedMemLayerwiseGPUConnector",
        "blending": "VLLMBufferLayerwiseGPUConnector",
        "opaque": "VLLMOpaquePagesConnector",
    },
    EngineType.SGLANG: {
        "whole": "SGLangGPUConnector",
        "layerwise": "SGLangLayerwiseGPUConnector",
    },
}


def CreateGPUConnector(
    config: Any,
    metadata: Any,
    engine: EngineType,
    layout_hints: LayoutHints | None = None,
) -> GPUConnectorInterface:
    """The connector of an engine that runs LMCache in its process.

    Args:
        config: ``use_layerwise``, ``enable_blending``, ``enable_pd`` and ``extra_config`` of it are read.
        metadata: The engine's ``LMCacheMetadata``.
        engine: Which engine.
        layout_hints: What it declares of its layout.

    Raises:
        RuntimeError: The device is the host and nobody asked for that (``extra_config`` ``cpu_connector: true``
            or ``LMCACHE_DEVICE_BACKEND=cpu``); or no backend can be used.
        ConfigError: (a ValueError) The configuration asks for what this engine's or device's connectors do not do.
    """
    import torch

    chosen = selected()
    if chosen.torch_dev is None:
        raise DeviceError(
            "in-process connectors need torch, which cannot be imported: pip install lmcache[cpu]"
        )
    on_host = chosen.device_type == _HOST
    if not on_host:  # first: what a connector makes belongs to this rank's device
        chosen.torch_dev.set_device(metadata.local_worker_id)
    own = _own_connector(chosen.spec, config, metadata, engine, layout_hints)
    if own is not None:
        return own
    _check_host(on_host, _extra(config, _ASK_FOR_HOST))
    feature = _feature(config)
    if on_host and engine == EngineType.VLLM and "engine_kv_format" not in (layout_hints or {}):
        if feature != "whole":
            raise ConfigError(
                f"{feature} with vLLM on the CPU: its pages are opaque and can only be taken whole; expected "
                "use_layerwise, enable_blending and use_gpu_connector_v3 off, or the layout hint engine_kv_format"
            )
        feature = "opaque"
    device = torch.device(_HOST) if on_host else torch.device(chosen.device_type, metadata.local_worker_id)
    connector: GPUConnectorInterface = _class_for(engine, feature).from_metadata(
        metadata, use_gpu=_uses_buffer(config, feature), device=device, layout_hints=layout_hints
    )
    return connector


def _own_connector(spec: Any, *asked: Any) -> GPUConnectorInterface | None:
    """What the device brings; faults of it are one line that names it."""
    where = f"device backend {spec.backend_name}: create_gpu_connector"
    try:
        own = spec.create_gpu_connector(*asked)
    except LMCacheError:  # what it says of the configuration
        raise
    except Exception as exc:
        raise DeviceError(f"{where}: {type(exc).__name__}: {exc}") from exc
    if own is not None and not isinstance(own, GPUConnectorInterface):
        raise DeviceError(f"{where} gave {type(own).__name__}: expected a GPUConnectorInterface")
    return own


def _check_host(on_host: bool, asked: Any) -> None:
    if not isinstance(asked, bool) and asked is not None:
        raise ConfigError(f"extra_config {_ASK_FOR_HOST}={asked!r}: expected true or false")
    if on_host and not asked and variable(BACKEND_VARIABLE) != _HOST:
        raise _NoConnector(
            "No supported cpu connector found. An accelerator's wheel is missing, or else extra_config "
            f"{_ASK_FOR_HOST}: true or {BACKEND_VARIABLE}={_HOST} asks for the CPU's"
        )
    if asked and not on_host:
        raise ConfigError(
            f"extra_config {_ASK_FOR_HOST}=true: the device backend is not the CPU's; expected "
            f"{BACKEND_VARIABLE}={_HOST} with it"
        )


class _NoConnector(LMCacheError, RuntimeError):
    """Nothing was asked for that could be given."""


def _feature(config: Any) -> str:
    """What the configuration asks for.

    Raises:
        ConfigError: Two things that exclude each other.
    """
    layerwise, blending = bool(config.use_layerwise), bool(config.enable_blending)
    v3 = _extra(config, _V3)
    if v3 and layerwise:
        raise ConfigError(f"use_layerwise=true with extra_config {_V3}=true: expected one of the two")
    if blending and not layerwise:
        raise ConfigError("enable_blending=true: expected use_layerwise=true with it")
    return "blending" if blending else "layerwise" if layerwise else "v3" if v3 else "whole"


def _class_for(engine: EngineType, feature: str) -> Any:
    from lmcache.v1.gpu_connector import gpu_connectors

    routes = _ROUTES.get(engine, {})
    if feature not in routes:
        has = ", ".join(name for name in routes if name != "opaque") or "none"
        raise ConfigError(
            f"engine {getattr(engine, 'value', engine)!r} has no {feature} connector in its process; it has: {has}"
        )
    return getattr(gpu_connectors, routes[feature])


def _uses_buffer(config: Any, feature: str) -> bool:
    """A buffer on the device, unless objects are there already (PD); blending works on it, so it always has one."""
    return feature == "blending" or not config.enable_pd


def _extra(config: Any, key: str) -> Any:
    return (config.extra_config or {}).get(key)

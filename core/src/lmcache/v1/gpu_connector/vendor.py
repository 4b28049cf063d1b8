"""For device wheels: connectors of their own by what a configuration asks for, behind ``create_gpu_connector``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.routing import _feature, _uses_buffer

if TYPE_CHECKING:
    from lmcache.v1.gpu_connector.interface import GPUConnectorInterface
    from lmcache.v1.platform.base.device_spec import DeviceSpec

__all__ = ["vendor_connector"]


def vendor_connector(
    spec: DeviceSpec,
    classes: Mapping[tuple[EngineType, str], type[Any]],
    config: Any,
    metadata: Any,
    engine: EngineType,
    layout_hints: Any = None,
) -> GPUConnectorInterface | None:
    """What a spec's ``create_gpu_connector`` may answer with.

    Args:
        spec: The selected device's.
        classes: By engine and feature (``whole``, ``v3``, ``layerwise``, ``blending``); each has ``from_metadata``.
        config, metadata, engine, layout_hints: As the spec was given them.

    Returns:
        A connector on this process's device, or None where ``classes`` has none: the core's routing decides then.

    Raises:
        ConfigError: The configuration asks for two things that exclude each other.
    """
    import torch

    feature = _feature(config)
    chosen = classes.get((engine, feature))
    if chosen is None:
        return None
    spec._get_torch_module().set_device(metadata.local_worker_id)
    made: GPUConnectorInterface = chosen.from_metadata(
        metadata,
        use_gpu=_uses_buffer(config, feature),
        device=torch.device(spec.device_type, metadata.local_worker_id),
        layout_hints=layout_hints,
    )
    return made

"""The cache context for whatever device a worker's KV lies on."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeAlias

from lmcache.utils import EngineType
from lmcache.v1.kv_layer_groups import EngineGroupInfo
from lmcache.v1.kv_layout import LayoutHints
from lmcache.v1.platform._device_detect import get_device_spec
from lmcache.v1.platform.base.cache_context import BaseCacheContext
from lmcache.v1.platform.torch_cache_context import tensors_of, unwrap

__all__ = ["create_cache_context", "restore_backends", "snapshot_backends"]

Factory: TypeAlias = Callable[..., Any]

_overrides: dict[str, Factory] = {}
"""Factories by device type that stand in for a spec's; for tests and notebooks."""


def snapshot_backends() -> dict[str, Factory]:
    """The factories that stand in for those of device specs, by device type."""
    return dict(_overrides)


def restore_backends(state: dict[str, Factory]) -> None:
    """Let the factories of ``state``, and no others, stand in for those of device specs."""
    _overrides.clear()
    _overrides.update(state)


def create_cache_context(
    kv_caches: Sequence[Any],
    lmcache_tokens_per_chunk: int = 256,
    layout_hints: LayoutHints | None = None,
    engine_group_infos: Sequence[EngineGroupInfo] = (),
    engine_type: EngineType = EngineType.VLLM,
    separate_object_groups: bool = True,
    full_sw_kv: bool = False,
) -> BaseCacheContext:
    """Map a worker's KV into this process, through the backend of the device that it lies on.

    Args:
        kv_caches: one IPC wrapper per layer.
        lmcache_tokens_per_chunk: tokens of one stored chunk.
        layout_hints: what the engine declares of its layout.
        engine_group_infos: the engine's KV groups; none: one group of all layers.
        engine_type: whose cache it is.
        separate_object_groups: one object group per sliding window instead of one for all.
        full_sw_kv: store windows in full.

    Raises:
        ValueError: no wrappers, wrappers of several device types, or a type without a cache context.
    """
    if not kv_caches:
        raise ValueError("create_cache_context: expected a non-empty list of KV cache wrappers")
    types = {tensor.device.type for wrapper in kv_caches for tensor in tensors_of(unwrap(wrapper))}
    if len(types) != 1:
        raise ValueError(
            f"create_cache_context: expected all kv_caches to share one device type, got {sorted(types)}"
        )
    factory = _factory(types.pop())
    context: BaseCacheContext = factory(
        kv_caches,
        lmcache_tokens_per_chunk,
        layout_hints,
        engine_group_infos,
        engine_type,
        separate_object_groups,
        full_sw_kv,
    )
    return context


def _factory(device_type: str) -> Factory:
    if device_type in _overrides:
        return _overrides[device_type]
    spec = get_device_spec(device_type)
    if spec is None:
        raise ValueError(
            f"No cache-context class registered for device type {device_type!r}: no single backend serves it;"
            " lmcache device list shows why"
        )

    def create(*args: Any) -> Any:
        try:
            return spec.create_cache_context(*args)
        except NotImplementedError as exc:
            raise ValueError(
                f"No cache-context class registered for device type {device_type!r}: {exc}; use engine_driven"
            ) from exc

    return create

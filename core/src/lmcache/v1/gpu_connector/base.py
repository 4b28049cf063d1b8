"""What all connectors share: the model's sizes, the engine's pages, the lanes, and buffers on the device."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from lmcache.errors import ConfigError, LayoutError
from lmcache.utils import EngineType
from lmcache.v1.gpu_connector.interface import GPUConnectorInterface
from lmcache.v1.gpu_connector.lanes import Lane
from lmcache.v1.gpu_connector.pages import PagedLayers
from lmcache.v1.kv_layout import kv_format, normalize_kv_and_discover_format
from lmcache.v1.platform.torch_ops._paged_operands import same_elements

if TYPE_CHECKING:
    import torch

    from lmcache.v1.kv_layout import LayoutHints

__all__ = ["PagedConnector", "fingerprint", "known_kwargs", "same_count", "torch_dtype"]

_OPTIONS = ("chunk_size", "device", "dtype", "layout_hints", "use_mla")


class PagedConnector(GPUConnectorInterface):
    """A connector of layers that are alike.

    Args:
        hidden_dim_size: Elements of K per token: heads times head size; the latent's width for MLA.
        num_layers: Layers of this rank.
        use_gpu: Go through a buffer on the device: large copies over the link, small ones only on the device.
        chunk_size: Tokens that such a buffer must hold at most; larger objects go directly.
        dtype, device: Of the pages; known from ``kvcaches``, so only compared.
        use_mla: The model caches one latent per token.
        layout_hints: What the engine declares of its layout.

    Raises:
        ConfigError: A size that makes no sense, or an unknown option.
    """

    engine: ClassVar[EngineType] = EngineType.VLLM

    def __init__(self, hidden_dim_size: int, num_layers: int, use_gpu: bool = False, **kwargs: Any) -> None:
        known_kwargs(type(self).__name__, kwargs, _OPTIONS)
        for name, size in (("hidden_dim_size", hidden_dim_size), ("num_layers", num_layers)):
            if type(size) is not int or size < 1:
                raise ConfigError(f"{type(self).__name__}: {name}={size!r}: expected a positive integer")
        self.hidden_dim_size = hidden_dim_size
        self.num_layers = num_layers
        self.use_gpu = use_gpu
        self.chunk_size: int = kwargs.get("chunk_size") or 0
        self.dtype, self.device = torch_dtype(kwargs.get("dtype")), kwargs.get("device")
        self.use_mla = bool(kwargs.get("use_mla"))
        self.layout_hints: LayoutHints | None = kwargs.get("layout_hints")
        self._found: PagedLayers | None = None
        self._mark: Any = None
        self._lanes: dict[str, Lane] = {}
        self._making = threading.Lock()

    @classmethod
    def from_metadata(
        cls,
        metadata: Any,
        use_gpu: bool = False,
        device: torch.device | None = None,
        layout_hints: LayoutHints | None = None,
    ) -> Any:
        """A connector for the sizes of an ``LMCacheMetadata``."""
        num_layers, _, chunk_size, num_kv_heads, head_size = metadata.kv_shape
        return cls(
            num_kv_heads * head_size,
            num_layers,
            use_gpu,
            chunk_size=chunk_size,
            dtype=metadata.kv_dtype,
            device=device,
            use_mla=metadata.use_mla,
            layout_hints=layout_hints,
        )

    @property
    def planes(self) -> int:
        """Of an object: K and V, or the one latent."""
        return 1 if self.use_mla else 2

    @property
    def store_stream(self) -> Any:
        """The stream that stores run on; None before the first, and where the device has none."""
        lane = self._lanes.get("store")
        return lane.stream if lane else None

    @property
    def load_stream(self) -> Any:
        """The stream that loads run on, likewise."""
        lane = self._lanes.get("load")
        return lane.stream if lane else None

    def lane(self, name: str) -> Lane:
        """The lane of a direction, ``store`` or ``load``, on the pages' device."""
        with self._making:  # two lanes of one name would not keep the order that buffers rely on
            if name not in self._lanes:
                self._lanes[name] = Lane(self.pages.device)
            return self._lanes[name]

    @property
    def pages(self) -> PagedLayers:
        """The engine's pages.

        Raises:
            LayoutError: No ``kvcaches`` were given yet.
        """
        if self._found is None:
            raise LayoutError(f"{type(self).__name__}: kvcaches: expected them with the first call, got none")
        return self._found

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Find out how ``kvcaches`` are laid out, once per cache.

        Raises:
            LayoutError: The layout is not told, cannot be moved by token, or is not what the model's sizes say.
        """
        given = kwargs.get("kvcaches")
        if given is None:
            return
        given = list(given.values()) if isinstance(given, Mapping) else given
        mark = fingerprint(given)
        if mark == self._mark:
            return
        nested, fmt = normalize_kv_and_discover_format(given, self.engine, self.layout_hints)
        found = PagedLayers(nested, kv_format(fmt))
        self._check(found)
        if self._found is not None and found.device != self._found.device:
            self._lanes.clear()
        self.kvcaches, self._found, self._mark = nested, found, mark

    def _check(self, found: PagedLayers) -> None:
        row, name = found.row, type(self).__name__
        if row.is_mla != self.use_mla:
            raise LayoutError(
                f"{name}: {row.label} with use_mla={self.use_mla}: expected a cache of "
                f"{'latents' if self.use_mla else 'K and V'}"
            )
        layers = self.num_layers * (2 if row.is_single_kv else 1)
        width = self.hidden_dim_size * (2 if row.is_packed else 1)
        if (found.num_layers, found.hidden) != (layers, width):
            raise LayoutError(
                f"{name}: {row.label} with {found.num_layers} layers of {found.hidden} elements per token: "
                f"expected {layers} of {width}"
            )
        if self.dtype is not None and not same_elements(found.dtype, self.dtype):
            raise LayoutError(
                f"{name}: pages of {found.dtype}: expected {self.dtype}, as the model's metadata says"
            )


def fingerprint(node: Any) -> Any:
    """What tells one cache from another: where each tensor is, and how it is to be read."""
    if isinstance(node, (list, tuple)):
        return tuple(map(fingerprint, node))
    if not hasattr(node, "data_ptr"):
        return id(node)
    return node.data_ptr(), node.device, node.dtype, node.shape, node.stride()


def same_count(objects: Sequence[Any], starts: Sequence[int], ends: Sequence[int]) -> None:
    """
    Raises:
        LayoutError: Not a start and an end for each object.
    """
    if not len(objects) == len(starts) == len(ends):
        raise LayoutError(
            f"{len(objects)} memory objects, {len(starts)} starts, {len(ends)} ends: expected as many of each"
        )


def torch_dtype(dtype: Any) -> Any:
    """torch's element type, for itself or its name; None for None.

    Raises:
        ConfigError: torch has none of that name.
    """
    import torch

    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if (found is not None and not isinstance(found, torch.dtype)) or (found is None and dtype is not None):
        raise ConfigError(f"dtype={dtype!r}: expected an element type of torch, such as 'bfloat16'")
    return found


def known_kwargs(name: str, given: Mapping[str, Any], options: tuple[str, ...]) -> None:
    """
    Raises:
        ConfigError: An option that nobody reads.
    """
    unknown = given.keys() - set(options)
    if unknown:
        raise ConfigError(f"{name}: option {min(unknown)!r} is unknown; known: {', '.join(options)}")

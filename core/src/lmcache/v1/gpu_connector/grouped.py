"""Whole chunks of models whose layers differ: in heads, head size, block size, dtype or format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

from lmcache.errors import LayoutError
from lmcache.v1.gpu_connector.base import fingerprint, torch_dtype
from lmcache.v1.gpu_connector.pages import PagedLayers
from lmcache.v1.gpu_connector.whole import Part, WholeConnector
from lmcache.v1.kv_layer_groups import KernelGroupInfo, KVLayerGroupsManager
from lmcache.v1.kv_layout import kv_format, normalize_and_discover_per_layer_formats
from lmcache.v1.memory.formats import MemoryFormat
from lmcache.v1.platform.torch_ops._paged_operands import same_elements

if TYPE_CHECKING:
    import torch

    from lmcache.v1.kv_layout import LayoutHints
    from lmcache.v1.memory.objects import MemoryObj

__all__ = ["VLLMPagedMemGPUConnectorV3"]


class _Group(NamedTuple):
    pages: PagedLayers
    engine_group: int


class VLLMPagedMemGPUConnectorV3(WholeConnector):
    """An object has one tensor per kernel group of ``metadata.kv_layer_groups_manager``, in its order, each
    ``[2, layers, T, heads * head size]``, or ``[1, …]`` where the group's layout has one plane (``get_shapes``,
    ``get_dtypes``).

    If the metadata has no groups yet they are found with the first ``kvcaches`` and put there. ``slot_mapping`` may
    be a list, one mapping per engine group, where groups have block tables of their own.

    Args:
        metadata: The engine's ``LMCacheMetadata``.
        device: Of the pages.
        use_gpu: As of all connectors.
        layout_hints: What the engine declares of its layout.
    """

    def __init__(
        self,
        metadata: Any,
        device: torch.device | None = None,
        use_gpu: bool = False,
        layout_hints: LayoutHints | None = None,
    ) -> None:
        num_layers, _, chunk_size, heads, head_size = metadata.kv_shape
        super().__init__(
            heads * head_size,
            num_layers,
            use_gpu,
            chunk_size=chunk_size,
            device=device,
            use_mla=metadata.use_mla,
            layout_hints=layout_hints,
        )
        self.metadata = metadata
        self._groups: list[_Group] = []

    @classmethod
    def from_metadata(
        cls,
        metadata: Any,
        use_gpu: bool = False,
        device: torch.device | None = None,
        layout_hints: LayoutHints | None = None,
    ) -> Any:
        """As the constructor, in the order that all connectors share."""
        return cls(metadata, device, use_gpu, layout_hints)

    def initialize_kvcaches_ptr(self, **kwargs: Any) -> None:
        """Find out how ``kvcaches`` are laid out, once per cache.

        Raises:
            LayoutError: A layout is not told, cannot be moved by token, or is not that of the groups.
        """
        given = kwargs.get("kvcaches")
        if given is None:
            return
        given = list(given.values()) if isinstance(given, Mapping) else given
        mark = fingerprint(given)
        if mark == self._mark:
            return
        known = self._known()
        nested, formats = normalize_and_discover_per_layer_formats(
            given, [group.layer_indices for group in known], self.engine, self.layout_hints
        )
        if len(formats) != self.num_layers:
            raise LayoutError(f"KV caches of {len(formats)} layers: expected {self.num_layers}")
        manager = None
        if not known:
            manager = KVLayerGroupsManager(nested, formats, lmcache_tokens_per_chunk=self.chunk_size)
            known = manager.kernel_groups
        groups = [_Group(_pages_of(nested, formats, group), group.engine_group_idx) for group in known]
        devices = {group.pages.device for group in groups}
        if len(devices) > 1:
            raise LayoutError(f"KV caches on {', '.join(sorted(map(str, devices)))}: expected one device")
        if manager is not None:  # now that they are known to serve
            self.metadata.kv_layer_groups_manager = manager
        self.kvcaches, self._groups, self._mark = nested, groups, mark
        self._found = groups[0].pages

    def parts(self, memory_obj: MemoryObj) -> list[Part]:
        """The object's tensors, one per group."""
        count = len(memory_obj.get_shapes())
        if count != len(self._groups) or memory_obj.tensor is None:
            raise LayoutError(
                f"memory object of {count} tensors: expected {len(self._groups)}, one per kernel group; "
                "allocate it with get_shapes"
            )
        return [
            Part(group.pages, memory_obj.get_tensor(index), group.engine_group)
            for index, group in enumerate(self._groups)
        ]

    def _forms(self, tokens: int) -> list[torch.Size]:
        return self.get_shapes(tokens)

    def get_shapes(self, num_tokens: int) -> list[torch.Size]:
        """Shape of each tensor of an object of ``num_tokens`` tokens."""
        import torch

        groups = self._known()
        if not groups:
            return [super().get_shape(num_tokens)]
        return [torch.Size(_shape_of(group, num_tokens)) for group in groups]

    def get_dtypes(self) -> list[torch.dtype]:
        """Element type of each tensor."""
        return [group.dtype for group in self._known()] or [torch_dtype(self.metadata.kv_dtype)]

    @property
    def memory_format(self) -> MemoryFormat:
        """The usual one, if it is that of all groups; ``UNDEFINED`` where their planes differ."""
        planes = {_shape_of(group, 1)[0] for group in self._known()} or {self.planes}
        return super().memory_format if planes == {self.planes} else MemoryFormat.UNDEFINED

    def get_shape(self, num_tokens: int) -> torch.Size:
        """The only shape.

        Raises:
            LayoutError: There are several; see :meth:`get_shapes`.
        """
        shapes = self.get_shapes(num_tokens)
        if len(shapes) > 1:
            raise LayoutError(f"get_shape: {len(shapes)} kernel groups: expected one; use get_shapes")
        return shapes[0]

    def _known(self) -> list[KernelGroupInfo]:
        manager = getattr(self.metadata, "kv_layer_groups_manager", None)
        return list(manager.kernel_groups) if manager is not None else []


def _shape_of(group: KernelGroupInfo, tokens: int) -> tuple[int, int, int, int]:
    """K and V apart, also where pages pack them: an object's axes mean the same whatever the layout."""
    planes, hidden = group.shape_desc.kv_size, group.hidden_dim_size
    if group.engine_kv_format is not None and kv_format(group.engine_kv_format).is_packed:
        planes, hidden = 2, hidden // 2
    return planes, group.num_layers, tokens, hidden


def _pages_of(nested: list[Any], formats: list[Any], group: KernelGroupInfo) -> PagedLayers:
    """The pages of a group.

    Raises:
        LayoutError: Its tokens are not one slot each, or its layers are of several formats.
    """
    found = {int(formats[index]) for index in group.layer_indices}
    where = f"layers {group.layer_indices}"
    if len(found) > 1:
        raise LayoutError(f"{where}: KV formats {sorted(found)} in one kernel group: expected one")
    if group.recurrent_state or group.tokens_per_block != group.slots_per_block:
        raise LayoutError(
            f"{where}: a slot stands for several tokens or for a state: expected one token per slot; use "
            "LMCacheMPConnector, which moves whole pages"
        )
    row = kv_format(found.pop())
    pages = PagedLayers(
        [nested[index] for index in group.layer_indices] if row.is_layer_list else nested, row
    )
    if pages.hidden != group.hidden_dim_size or not same_elements(pages.dtype, group.dtype):
        raise LayoutError(
            f"{where}: {row.label} with {pages.hidden} elements of {pages.dtype} per token: expected "
            f"{group.hidden_dim_size} of {group.dtype}, as their kernel group says"
        )
    return pages

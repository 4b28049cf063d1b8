"""Layers of an engine's paged KV that go together, and the moves between them and objects of tokens.

An object's axes mean what its format says, whatever the layout of the pages: where a page has K and V of a head
side by side and the object has them apart, they are taken apart on the way. So an object that one layout has
filled can be loaded into another of the same sizes.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import TYPE_CHECKING, Any

from lmcache.errors import DeviceError, LayoutError
from lmcache.logging import info_once, init_logger
from lmcache.v1.gpu_connector.hostruns import HostRuns
from lmcache.v1.gpu_connector.slots import Slots
from lmcache.v1.kv_layout import KVFormat, block_stride_elems, get_group_data_ptrs, kv_format, layer_tensors
from lmcache.v1.platform import resolve_device_ops, torch_ops
from lmcache.v1.platform.ops_types import TransferDirection

if TYPE_CHECKING:
    import torch

__all__ = ["PagedLayers", "halves_of"]

logger = init_logger(__name__)

_ALL, _ONE = "multi_layer_kv_transfer", "single_layer_kv_transfer"
_UNILATERAL = "multi_layer_kv_transfer_unilateral"
_PAIRS = "NL_X_TWO_X_NB_BS_NH_HS"
_LAYER_OF = {"NB_NL_TWO_BS_NH_HS": "NL_X_NB_TWO_BS_NH_HS", "NB_NL_TWO_NH_BS_HS": "NL_X_NB_TWO_NH_BS_HS"}
"""What one layer of a tensor of all layers is."""
D2H = TransferDirection.D2H


class PagedLayers:
    """Layers of one format, shape and element type.

    Args:
        nested: Their tensors, nested as ``row`` says and in its axis order.
        row: Their layout.

    Raises:
        LayoutError: Single slots of this layout cannot be reached, or layers differ.
    """

    def __init__(self, nested: Any, row: KVFormat) -> None:
        if not row.token_addressable:
            raise LayoutError(
                f"{row.label}: its pages can only be taken whole, so tokens cannot be moved one by one; use "
                "LMCacheMPConnector, which moves whole pages"
            )
        if not row.is_block_addressable and not row.is_pbs_fused:
            raise LayoutError(f"{row.label}: it has neither blocks nor slots: expected a paged cache")
        self.row, self.nested = row, nested
        self._layers = layer_tensors(nested, row)
        first = self._layers[0]
        kinds = {tuple((tuple(t.shape), t.stride(), t.dtype, t.device) for t in ts) for ts in self._layers}
        if len(kinds) > 1:
            raise LayoutError(
                f"{row.label}: layers of {len(kinds)} kinds: expected all of one shape, dtype and device; "
                "extra_config use_gpu_connector_v3=true serves layers that differ"
            )
        sizes = row.sizes(tuple(first[0].shape))
        self.device, self.dtype = first[0].device, first[0].dtype
        self.num_layers = len(self._layers)
        self.block_size = sizes.get("BS", 0)
        self.num_slots = sizes["PBS"] if row.is_pbs_fused else sizes["NB"] * self.block_size
        self._heads = sizes.get("NH", 1)
        self._head_size = int(first[0].shape[-1]) * (2 if row.dims.axes[-2:] == ("2", "HS") else 1)
        self.hidden = self._heads * self._head_size
        """Elements per slot and plane."""
        if "NP" in row.dims.levels:
            width = sum(int(t.shape[-1]) * t.element_size() for t in first)
            self.hidden = width // first[0].element_size()
        self._ops = resolve_device_ops(self.device.type)
        self._on_host = self.device.type == "cpu"

    # --- all layers ----------------------------------------------------------------------------------------

    def move(self, obj: torch.Tensor, slots: Slots, way: TransferDirection) -> None:
        """Move the slots of all layers; queued on the current stream.

        Args:
            obj: ``[2, L, T, D]``, or ``[1, L, T, D]`` where the layout keeps one plane (for packed K and V either
                form; ``D`` of the second is twice that of the first). Contiguous, on any device.
            slots: At most T of them.
            way: H2D writes pages.

        Raises:
            LayoutError: The object does not fit the pages.
            ValueError: A slot beyond the pages.
        """
        row = self.row
        if obj.dim() == 4 and row.is_single_kv and obj.shape[0] * obj.shape[1] == self.num_layers:
            obj = obj.view(1, self.num_layers, *obj.shape[2:])
        if obj.dim() != 4 or obj.shape[1] != self.num_layers:
            raise LayoutError(
                f"{row.label}: object of shape {tuple(obj.shape)}: expected {self._planes} for K and V, "
                f"{self.num_layers} layers, tokens, hidden"
            )
        if not row.is_packed or obj.shape[0] == 1:
            self._move_all(obj, slots, way)
        elif self._on_host:
            self._move_all(obj, slots, way, apart=True)
        else:
            shape = (obj.shape[1], obj.shape[2], self._heads, 2, obj.shape[3] // self._heads)
            by_plane = obj.view(2, *shape[:3], shape[4])
            self._by_packed(
                by_plane, shape, (3, 0, 1, 2, 4), slots, way,
                lambda packed: self._move_all(packed.view(1, *obj.shape[1:3], -1), slots, way),
            )  # fmt: skip

    def _move_all(self, obj: torch.Tensor, slots: Slots, way: TransferDirection, apart: bool = False) -> None:
        """``apart``: K and V, which the pages pack, are planes of the object; on the host only."""
        if self._on_host and (self._half_runs if apart else self._runs).move(obj, slots, way):
            return
        row, nested = (kv_format(_PAIRS), self._halves) if apart else (self.row, self.nested)
        name = _ALL
        if row.is_kv_list and not self._serves(_ALL) and self._serves(_UNILATERAL):
            name = _UNILATERAL
        call, takes_pointers = self._op(name, row)
        more: tuple[int, ...] = ()
        if takes_pointers:
            self._check_object(obj)
            stride = self._block_stride
            if name == _ALL:
                more = (self.block_size, self._head_size, 0, stride)
        paged = self._pointers if takes_pointers else nested
        call(obj, paged, slots.tensor, self.device, self.num_slots, int(way), row.id, *more)

    # --- one layer -----------------------------------------------------------------------------------------

    def move_layer(
        self, layer: int, obj: torch.Tensor, slots: Slots, way: TransferDirection, token_major: bool
    ) -> None:
        """Move the slots of one layer; queued on the current stream.

        Args:
            layer: Which one.
            obj: ``[T, 2, D]`` if ``token_major``, else ``[2, T, D]``; ``[T, D]`` where the layout keeps one plane.
            slots: At most T.
            way: H2D writes pages.
            token_major: See ``obj``.

        Raises:
            LayoutError, ValueError: As :meth:`move`.
        """
        row = self.row
        if self._on_host:
            self._move_layer_on_host(layer, obj, slots, way, token_major)
        elif not row.is_packed or obj.dim() == 2:
            self._one_op(obj, self._layer(layer), slots.tensor, int(way), self._layer_row.id, token_major)
        else:
            tokens, width = obj.shape[0 if token_major else 1], obj.shape[2] // self._heads
            by_plane = (obj.transpose(0, 1) if token_major else obj).unflatten(2, (self._heads, width))
            self._by_packed(
                by_plane, (tokens, self._heads, 2, width), (2, 0, 1, 3), slots, way,
                lambda packed: self._one_op(
                    packed.view(tokens, -1), self._layer(layer), slots.tensor, int(way), row.id, token_major
                ),
            )  # fmt: skip

    def _move_layer_on_host(
        self, layer: int, obj: torch.Tensor, slots: Slots, way: TransferDirection, token_major: bool
    ) -> None:
        by_plane = obj.unsqueeze(0) if obj.dim() == 2 else obj.transpose(0, 1) if token_major else obj
        apart = self.row.is_packed and obj.dim() == 3
        runs = self._half_runs if apart else self._runs
        if not runs.move(by_plane.unsqueeze(1), slots, way, layer):
            row, paged = (
                (kv_format(_PAIRS), self._halves[layer]) if apart else (self._layer_row, self._layer(layer))
            )
            torch_ops.single_layer_kv_transfer(obj, paged, slots.tensor, way, row.id, token_major)

    def _layer(self, layer: int) -> Any:
        """What the op takes of one layer: a tensor, or K and V, or planes."""
        tensors = self._layers[layer]
        if self.row.is_cross_layer:
            return tensors[0].select(self.row.dims.axes.index("NL"), layer)
        return tensors[0] if len(tensors) == 1 and not self.row.is_kv_second_tuple else list(tensors)

    @cached_property
    def _one_op(self) -> Callable[..., None]:
        """Kernels that read strides off a layer's shape take tight ones only: a part of a tensor of all layers, and
        padded blocks, are torch's."""
        if all(tensor.is_contiguous() for tensor in self._layers[0]) and not self.row.is_cross_layer:
            return self._op(_ONE, self.row)[0]
        return torch_ops.single_layer_kv_transfer

    @cached_property
    def _layer_row(self) -> KVFormat:
        return kv_format(_LAYER_OF[self.row.name]) if self.row.is_cross_layer else self.row

    # --- packed K and V on a device ------------------------------------------------------------------------

    def _by_packed(
        self,
        by_plane: torch.Tensor,
        shape: tuple[int, ...],
        order: tuple[int, ...],
        slots: Slots,
        way: TransferDirection,
        move: Callable[[torch.Tensor], None],
    ) -> None:
        """Move through a buffer on the pages' device whose tokens are packed as the pages are.

        Args:
            by_plane: The object, K and V first.
            shape: Of the buffer.
            order: Permutes the buffer's axes into those of ``by_plane``.
            slots: Which move.
            way: H2D writes pages.
            move: Between the buffer and the pages.
        """
        import torch

        packed = torch.empty(shape, dtype=by_plane.dtype, device=self.device)
        tokens = shape[order[-3]]
        if way is not D2H or slots.may_skip or tokens > len(slots.tensor):
            # Rows that do not move are written back as they were.
            packed.permute(order).copy_(by_plane.to(self.device, non_blocking=True))
        move(packed)
        if way is D2H:
            by_plane.copy_(packed.permute(order).contiguous(), non_blocking=True)

    @cached_property
    def _runs(self) -> HostRuns:
        return HostRuns(self.row, self.nested)

    @cached_property
    def _half_runs(self) -> HostRuns:
        return HostRuns(kv_format(_PAIRS), self._halves)

    @cached_property
    def _halves(self) -> list[tuple[torch.Tensor, torch.Tensor]]:
        return [halves_of(self.row, tensors[0]) for tensors in self._layers]

    # --- which op ------------------------------------------------------------------------------------------

    def _serves(self, name: str) -> bool:
        """Whether the device's op serves the layout; one that declares nothing is asked, and may refuse."""
        try:
            return self.row.id in self._ops.supported_formats(name)
        except DeviceError:
            return True

    def _op(self, name: str, row: KVFormat) -> tuple[Callable[..., None], bool]:
        """The op, and whether to give it addresses. Where the device's own does not serve the layout the torch
        baseline does: it keeps the order of streams on every device."""
        if row is not self.row:
            return getattr(torch_ops, name), False
        if self._serves(name):
            kinds = self._ops.operand_kinds(name)
            use = "pointers" in kinds and ("tensors" not in kinds or not self._on_host)
            return getattr(self._ops, name), use and "NP" not in row.dims.levels
        info_once(
            logger, f"{name}-{row.id}", "%s on %s: %s is left to torch", name, self.device.type, row.label
        )
        return getattr(torch_ops, name), False

    @cached_property
    def _pointers(self) -> torch.Tensor:
        """The table of addresses, int64 on the device, made once."""
        import torch

        listed = get_group_data_ptrs(self.nested, self.row, range(self.num_layers))
        signed = [
            address - (1 << 64 if address >> 63 else 0) for address in listed
        ]  # some devices' are that high
        return torch.tensor(signed, dtype=torch.int64).to(self.device)

    def _check_object(self, obj: torch.Tensor) -> None:
        """Addresses do not tell the width of a slot, so that nothing behind them can compare it."""
        if obj.shape[3] != self.hidden or obj.element_size() != self.dtype.itemsize:
            raise LayoutError(
                f"{self.row.label}: object of {obj.shape[3]} elements of {obj.dtype} per token: expected "
                f"{self.hidden} of {self.dtype}"
            )

    @cached_property
    def _block_stride(self) -> int:
        """Elements between blocks; 0 where the layout says it, as all do that have K and V in two tensors.

        Raises:
            LayoutError: The op takes addresses, and they cannot say how these pages lie.
        """
        strides = [block_stride_elems(self.row, tensor) for tensor in self._layers[0]]
        return strides[0]

    @property
    def _planes(self) -> str:
        return "1 or 2" if self.row.is_packed else str(self.row.kv_size)


def halves_of(row: KVFormat, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of a tensor that packs them, as views ``[NB, BS, NH, HS]``."""
    if row.dims.axes[-1] == "CS":
        if tensor.shape[-1] % 2:
            raise LayoutError(
                f"{row.label}: {tensor.shape[-1]} elements per head: expected K and V of one size"
            )
        parts = tensor.unflatten(-1, (2, -1)).unbind(-2)
    else:
        parts = tensor.unbind(-2)
    key, value = (part.transpose(1, 2) if row.is_hnd else part for part in parts)
    return key, value

"""Ops that move KV between an engine's pages and LMCache's objects, as members of ``DeviceOps``."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.op import op

if TYPE_CHECKING:
    import torch

__all__ = ["TransferOps"]


class TransferOps:
    """All are stream-ordered. What is refused has moved nothing.

    ``direction`` is a ``TransferDirection``: H2D (0) writes the engine's side, D2H (1) reads it. A format is
    the id of a row of ``lmcache.v1.kv_layout``; which ones an op serves is ``supported_formats(op)``.
    """

    @op
    def multi_layer_block_kv_transfer(
        self,
        paged: Any,
        objects: Sequence[Any],
        block_ids: Any,
        device: Any,
        direction: int,
        shape_desc: Any,
        chunk_size: int,
        engine_kv_format: int,
        skip_prefix_n_blocks: int = 0,
    ) -> None:
        """Copy whole blocks between paged KV tensors and chunk objects.

        Args:
            paged: The engine's KV tensors, nested as the format's row says.
            objects: Chunk objects, ``[kv_size, NL, slots, NH * HS]`` (or ``[NL, slots, NH * HS]`` where
                kv_size is 1), same dtype as the pages. Object ``i`` takes the block ids
                ``[i * n, (i + 1) * n)`` with ``n = chunk_size // shape_desc.bs``.
            block_ids: 1-D integers: a list or a tensor. May end before the last object is full.
            device: Where the paged tensors lie.
            direction: H2D (0) writes the pages, D2H (1) reads them.
            shape_desc: ``PageBufferShapeDesc`` of these layers.
            chunk_size: Slots per object, a positive multiple of ``shape_desc.bs``.
            engine_kv_format: Id of the layout's row.
            skip_prefix_n_blocks: The first so many ids are neither read nor written, nor is the part of the
                objects that belongs to them.

        Raises:
            LayoutError: The format is not served, or tensors do not fit the row or the descriptor.
            ValueError: ``chunk_size``, ``skip_prefix_n_blocks``, ``direction`` or a block id is out of range.
        """

    @op
    def multi_layer_kv_transfer(
        self,
        kv: torch.Tensor,
        ptrs: Any,
        slot_mapping: torch.Tensor,
        device: Any,
        page_buffer_size: int,
        direction: int,
        format: int,
        block_size: int = 0,
        head_size: int = 0,
        skip_prefix_n_tokens: int = 0,
        block_stride_elems: int = 0,
    ) -> None:
        """Copy tokens of all layers between pages and one object, slot by slot.

        Args:
            kv: The object, ``[kv_size, L, T, hidden]``.
            ptrs: The engine's layers: tensors, or int64 ``[L]`` of addresses on the device.
            slot_mapping: int64 ``[T]``: the slot of each token, counted over all blocks; negative ones are
                left out.
            device: Where the pages lie.
            page_buffer_size: Slots per layer, ``NB * BS``.
            direction: H2D (0) writes the pages, D2H (1) reads them.
            format: Id of the layout's row.
            block_size: Slots per block, for rows that have blocks; 0 leaves it to the tensors.
            head_size: Elements per head, for rows whose heads stand outside slots; 0 leaves it to the tensors.
            skip_prefix_n_tokens: The first so many tokens are neither read nor written.
            block_stride_elems: Elements between blocks where they are padded; 0 is tight.

        Raises:
            LayoutError: The format is not served, or tensors do not fit it.
            ValueError: A slot, ``direction`` or ``skip_prefix_n_tokens`` is out of range.
        """

    @op
    def multi_layer_kv_transfer_unilateral(
        self,
        kv: torch.Tensor,
        ptrs: Any,
        slots: torch.Tensor,
        device: Any,
        page_buffer_size: int,
        direction: int,
        format: int,
    ) -> None:
        """``multi_layer_kv_transfer`` for engines that keep K and V of a layer in buffers of their own.

        Args:
            kv: The object, ``[kv_size, L, T, hidden]``.
            ptrs: The L buffers of K, then the L buffers of V, each ``[page_buffer_size, hidden]``: tensors, or
                int64 ``[2 * L]`` of addresses on the device. L buffers for MLA.
            slots: int64 ``[T]``: the slot of each token; negative ones are left out.
            device: Where the buffers lie.
            page_buffer_size: Slots per buffer.
            direction: H2D (0) writes the buffers, D2H (1) reads them.
            format: Id of the layout's row.

        Raises:
            LayoutError: The format is not served, or tensors do not fit it.
            ValueError: A slot or ``direction`` is out of range.
        """

    @op
    def single_layer_kv_transfer(
        self,
        lmc: torch.Tensor,
        paged: torch.Tensor,
        slots: torch.Tensor,
        direction: int,
        format: int,
        token_major: bool = False,
    ) -> None:
        """Copy tokens of one layer between pages and an object.

        Args:
            lmc: The object, ``[2, T, hidden]``, or ``[T, 2, hidden]`` if ``token_major``; ``[T, hidden]`` for
                MLA.
            paged: The layer's tensor, as the format's row says.
            slots: int64 ``[T]``: the slot of each token, counted over all blocks; negative ones are left out.
            direction: H2D (0) writes the pages, D2H (1) reads them.
            format: Id of the layout's row.
            token_major: Whether tokens are the first axis of ``lmc``.

        Raises:
            LayoutError: The format is not served, or tensors do not fit it.
            ValueError: A slot or ``direction`` is out of range.
        """

    @op
    def single_layer_kv_transfer_sgl(
        self,
        lmc: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        slots: torch.Tensor,
        direction: int,
        token_major: bool = False,
    ) -> None:
        """``single_layer_kv_transfer`` for a layer whose K and V are two tensors.

        Args:
            lmc: The object, ``[2, T, hidden]``, or ``[T, 2, hidden]`` if ``token_major``.
            k: Pages of K, ``[NB, BS, NH, HS]``.
            v: Pages of V, as ``k``.
            slots: int64 ``[T]``: the slot of each token, counted over all blocks; negative ones are left out.
            direction: H2D (0) writes the pages, D2H (1) reads them.
            token_major: Whether tokens are the first axis of ``lmc``.

        Raises:
            LayoutError: Tensors do not fit each other.
            ValueError: A slot or ``direction`` is out of range.
        """

    @op
    def load_and_reshape_flash(
        self,
        kv: torch.Tensor,
        kcache: torch.Tensor,
        vcache: torch.Tensor,
        slots: torch.Tensor,
        layer: int,
    ) -> None:
        """Gather tokens of one layer from pages into an object of all layers.

        Args:
            kv: The object, ``[2, L, T, hidden]``; its ``layer`` is written.
            kcache: Pages of K, ``[NB, BS, NH, HS]``.
            vcache: Pages of V, as ``kcache``.
            slots: int64 ``[T]``: the slot of each token, counted over all blocks; negative ones are left out.
            layer: Which layer of ``kv``.

        Raises:
            LayoutError: Tensors do not fit each other.
            ValueError: A slot or ``layer`` is out of range.
        """

    @op
    def reshape_and_cache_back_flash(
        self,
        kv: torch.Tensor,
        kcache: torch.Tensor,
        vcache: torch.Tensor,
        slots: torch.Tensor,
        layer: int,
    ) -> None:
        """Scatter tokens of one layer from an object of all layers into pages.

        Args:
            kv: The object, ``[2, L, T, hidden]``; its ``layer`` is read.
            kcache: Pages of K, ``[NB, BS, NH, HS]``.
            vcache: Pages of V, as ``kcache``.
            slots: int64 ``[T]``: the slot of each token, counted over all blocks; negative ones are left out.
            layer: Which layer of ``kv``.

        Raises:
            LayoutError: Tensors do not fit each other.
            ValueError: A slot or ``layer`` is out of range.
        """

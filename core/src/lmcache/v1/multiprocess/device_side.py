"""The server's hands on one worker's device memory (lmcache-driven mode).

A side maps the worker's exported KV through the vendor's cache context and moves whole pages between it and
the pool, on the context's own stream. One thread queues work, another waits for it in the same order, so the
server's request loop does neither. What orders the two processes are events, never a wait for a whole device.

Pages travel as bytes, as they do in engine-driven mode, so both modes store the same objects.
"""

from __future__ import annotations

import itertools
import queue
import threading
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from lmcache.errors import DeviceError, LMCacheError
from lmcache.logging import init_logger
from lmcache.v1.keys import Namespace
from lmcache.v1.storage.shm_pool import PoolView

if TYPE_CHECKING:
    import torch

    from lmcache.v1.platform.base.device_spec import DeviceSpec

logger = init_logger(__name__)

_JOIN_SECONDS = 10.0
_COMPLETION = "lmcache.move"
_TRANSFER = "multi_layer_block_kv_transfer"

_tokens = itertools.count(1)
_completed: set[bytes] = set()
_completed_lock = threading.Lock()


@dataclass(slots=True)
class Part:
    """One KV group's share of a move: chunk ``i`` lies at ``offsets[i]`` of the pool and takes the blocks
    ``[i * n, (i + 1) * n)`` with ``n`` blocks per chunk. The first ``skip`` blocks are left alone."""

    offsets: list[int]
    blocks: list[int]
    skip: int = 0


@dataclass(slots=True)
class Move:
    """A copy to do.

    ``queued`` is called with the exported event of its end, once it is queued; ``done`` once it has ended,
    with an error text or nothing. A move that fails before it is queued is only done. Both are called from
    the side's threads and must not block for long. If a device cannot say whether it has ended, ``done`` is
    never called: it may still be at work.
    """

    direction: Literal["store", "load"]
    parts: list[Part]
    event: bytes
    queued: Callable[[bytes], None]
    done: Callable[[str], None]


class _Run(NamedTuple):
    """Consecutive layers of a KV group with pages of one size: what one call of an op serves."""

    kernel_group: int
    layers: tuple[int, ...]
    offset: int
    """Where they begin in an object of the group, in bytes."""
    nbytes: int
    """Of an object that are theirs."""


@dataclass(slots=True)
class _Fence:
    passed: Callable[[], None]


class DeviceSide:
    """One worker's exported KV.

    Args:
        groups: wire descriptors per KV group and layer, as :class:`DeviceExport` holds them.
        namespaces: the layouts of the groups.
        view: the pool.
        opened: called from the side's thread with an error text, or nothing, once the memory is mapped.
        exporter: the worker's process.
        pin: called from the side's thread with the device's spec, before anything is copied.
    """

    def __init__(
        self,
        groups: Sequence[Sequence[bytes]],
        namespaces: Sequence[Namespace],
        view: PoolView,
        opened: Callable[[str], None],
        exporter: int,
        pin: Callable[[DeviceSpec], None] | None = None,
    ) -> None:
        self._groups = groups
        self._exporter = exporter
        self._pin = pin
        self._runs = _runs(namespaces)
        self._namespaces = namespaces
        self._view = view
        self._opened = opened
        self._moves: queue.SimpleQueue[Move | _Fence | None] = queue.SimpleQueue()
        self._ends: queue.SimpleQueue[tuple[Move, Any, bytes] | _Fence | None] = queue.SimpleQueue()
        self._closing = False
        self._lost = ""
        self._context: Any = None
        self._ops: Any = None
        self._by_tensors = True
        self._threads = [
            threading.Thread(target=self._run, name="lmcache-device", daemon=True),
            threading.Thread(target=self._finish, name="lmcache-device-end", daemon=True),
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, move: Move) -> None:
        """Queue a move. Moves are done in order. One that comes after :meth:`close` fails."""
        self._moves.put(move)

    def fence(self, passed: Callable[[], None]) -> None:
        """Call ``passed`` once every move of before has ended; never if the device cannot say so."""
        self._moves.put(_Fence(passed))

    def close(self) -> None:
        """Let the move under way end, fail the others, unmap. Does not wait for that; see :meth:`join`."""
        self._closing = True
        self._moves.put(None)

    def join(self, seconds: float = _JOIN_SECONDS) -> bool:
        """Wait for the end of the threads after :meth:`close`; False if they did not end."""
        for thread in self._threads:
            thread.join(seconds)
        return not any(thread.is_alive() for thread in self._threads)

    # ---- the thread that queues

    def _run(self) -> None:
        error = _guarded(self._open)
        self._opened(error)
        while (move := self._moves.get()) is not None:
            if isinstance(move, _Fence):
                self._ends.put(move)
                continue
            why = error or self._lost or ("the worker's session has ended" if self._closing else "")
            if not why:
                why = _guarded(lambda move=move: self._check_blocks(move))  # type: ignore[misc]
            if not why:
                why = _guarded(lambda move=move: self._queue(move))  # type: ignore[misc]
                if why and not self._settled(why):
                    continue  # some of it may be queued
            if why:
                move.done(why)
        self._ends.put(None)
        self._threads[1].join()
        if self._context is not None:
            _guarded(self._context.close)
            self._context = self._ops = None  # staging buffers are large
        while not self._moves.empty():
            late = self._moves.get()
            if isinstance(late, _Fence):
                if not self._lost:
                    late.passed()
            elif late is not None:
                late.done("the worker's session has ended")

    def _open(self) -> None:
        from lmcache.utils import EngineType
        from lmcache.v1.kv_layer_groups import EngineGroupInfo
        from lmcache.v1.platform import get_device_spec, get_event_ipc_backend, resolve_device_ops
        from lmcache.v1.platform.cache_context import create_cache_context
        from lmcache.v1.platform.kv_wire import import_kv_caches

        infos = [
            EngineGroupInfo(
                engine_group_id=run.kernel_group,
                layer_indices=run.layers,
                tokens_per_block=namespace.block_size,
            )
            for namespace, runs in zip(self._namespaces, self._runs, strict=True)
            for run in runs
        ]
        chunk_size = self._namespaces[0].chunk_size
        with ExitStack() as undo:
            wires = [wire for group in self._groups for wire in group]
            wrappers = import_kv_caches(wires, self._exporter)
            undo.callback(wrappers.close)
            wrappers.map()  # checks each against its descriptor
            context = create_cache_context(
                wrappers,
                chunk_size,
                {"engine_kv_format": PAGE_FORMAT},
                infos,
                EngineType.VLLM,
                False,
                True,
            )
            undo.callback(context.close)
            self._device = context.device
            self._backend = get_event_ipc_backend(self._device)
            self._backend.check_event_support(self._device)
            spec = get_device_spec(self._device.type)
            if spec is None:
                raise DeviceError(f"device type {self._device.type}: no single backend serves it here")
            self._spec = spec
            if self._pin is not None:
                self._pin(spec)
            self._ops = resolve_device_ops(self._device.type)
            self._by_tensors = "tensors" in self._ops.operand_kinds(
                _TRANSFER
            )  # also imports it: not in a transfer
            self._check_geometry(context)
            undo.pop_all()
        self._context = context

    def _check_geometry(self, context: Any) -> None:
        """What is mapped must make objects of just the registered size."""
        runs = [(index, run) for index, mine in enumerate(self._runs) for run in mine]
        found = [group.layer_indices for group in context.kv_layer_groups_manager.kernel_groups]
        if [tuple(layers) for layers in found] != [run.layers for _, run in runs]:
            raise DeviceError(f"the exported layers go together as {found}: expected {[r for _, r in runs]}")
        for index, run in runs:
            chunk_size = self._namespaces[index].chunk_size
            shape, dtype = context.get_kernel_group_shape_dtype(chunk_size, run.kernel_group)
            nbytes = shape.numel() * dtype.itemsize
            if nbytes != run.nbytes:
                raise DeviceError(
                    f"KV group {index}: the exported memory of layers {list(run.layers)} makes {nbytes} bytes of"
                    f" an object, registered are {run.nbytes}"
                )

    def _check_blocks(self, move: Move) -> None:
        """Before anything moves: an op sees one batch of one group at a time, and may trust what it is given."""
        for group, part in enumerate(move.parts):
            num_blocks = min(self._context.get_shape_desc(run.kernel_group).nb for run in self._runs[group])
            bad = next((block for block in part.blocks[part.skip :] if not 0 <= block < num_blocks), None)
            if bad is not None:
                raise DeviceError(f"KV group {group}: block id {bad}: expected 0 to {num_blocks - 1}")

    def _settled(self, why: str) -> bool:
        """After a failure: wait until the device does nothing for us. False if it cannot say so."""
        error = _guarded(lambda: self._context.stream.synchronize())
        if error:  # it may have told of what failed before; if it can be waited for now, nothing is under way
            error = _guarded(lambda: self._context.stream.synchronize())
        if error:
            self._lost = f"{self._device}: it is not known what the device still does: {why}; {error}"
            logger.error("%s", self._lost)
        return not error

    def _queue(self, move: Move) -> None:
        context, backend, ops = self._context, self._backend, self._ops
        module = self._spec._get_torch_module()
        with module.device(self._device), module.stream(context.stream):
            backend.wait_event(backend.import_event(move.event, self._device), context.stream)
            for group, part in enumerate(move.parts):
                for run in self._runs[group]:
                    self._copy_run(group, run, part, move.direction)
            token = next(_tokens).to_bytes(8, "little")
            ops.record_completion_on_stream(context.cupy_stream.ptr, _COMPLETION, token)
            event = backend.create_event(self._device)
            backend.record_event(event, context.stream)
            handle = backend.export_event(event, self._device)
        if self._ops.is_synchronous:  # it has ended: whoever hears of it finds it published
            self._end(move, event, token)
        else:
            self._ends.put((move, event, token))
        move.queued(handle)

    def _copy_run(self, group: int, run: _Run, part: Part, direction: str) -> None:
        """Queue the copies of some layers, as many chunks at a time as the staging buffers hold."""
        from lmcache.v1.platform.ops_types import TransferDirection

        context = self._context
        per_chunk = self._namespaces[group].blocks_per_chunk
        way = TransferDirection.D2H if direction == "store" else TransferDirection.H2D
        first = part.skip // per_chunk  # chunks before it are skipped whole
        for start in range(first, len(part.offsets), context.max_batch_size):
            stop = min(start + context.max_batch_size, len(part.offsets))
            hosts = [self._host_object(group, run, offset) for offset in part.offsets[start:stop]]
            staged = self._staging(run, hosts)
            blocks = part.blocks[start * per_chunk : stop * per_chunk]
            skip = max(0, part.skip - start * per_chunk)
            if way is TransferDirection.H2D:
                self._stage(hosts, staged, way)
            self._blocks(run, staged, blocks, way, per_chunk, skip)
            if way is TransferDirection.D2H:
                self._stage(staged, hosts, way)

    def _host_object(self, group: int, run: _Run, offset: int) -> torch.Tensor:
        import torch

        chunk_size = self._namespaces[group].chunk_size
        shape, dtype = self._context.get_kernel_group_shape_dtype(chunk_size, run.kernel_group)
        start = offset + run.offset
        data = self._view.data[start : start + run.nbytes]
        return torch.frombuffer(data, dtype=torch.uint8).view(dtype).view(shape)

    def _staging(self, run: _Run, hosts: list[torch.Tensor]) -> list[torch.Tensor]:
        """Where the chunks lie while the device copies its pages: the pool itself if that is the device."""
        if self._device.type == "cpu":
            return hosts
        return [self._context.get_temp_kernel_group_buffer(i, run.kernel_group) for i in range(len(hosts))]

    def _stage(self, sources: list[torch.Tensor], targets: list[torch.Tensor], way: int) -> None:
        for source, target in zip(sources, targets, strict=True):
            if source is not target:
                nbytes = source.numel() * source.element_size()
                self._ops.lmcache_memcpy_async(target, source, nbytes, int(way), 0, 1)

    def _blocks(
        self, run: _Run, objects: list[torch.Tensor], blocks: list[int], way: int, per_chunk: int, skip: int
    ) -> None:
        context, kernel_group = self._context, run.kernel_group
        paged: Any
        operands: Sequence[Any]
        ids: Any
        if self._by_tensors:
            paged = [context.kv_tensors[layer] for layer in run.layers]
            operands, ids = objects, blocks
        else:
            paged = context.get_kernel_group_kv_pointers(kernel_group)
            operands, ids = [chunk.data_ptr() for chunk in objects], context.stage_block_ids(blocks)
        self._ops.multi_layer_block_kv_transfer(
            paged,
            operands,
            ids,
            self._device,
            int(way),
            context.get_shape_desc(kernel_group),
            per_chunk,
            context.get_engine_kv_format(kernel_group),
            skip,
        )

    # ---- the thread that waits

    def _finish(self) -> None:
        while (ended := self._ends.get()) is not None:
            if isinstance(ended, _Fence):
                if not self._lost:
                    ended.passed()
                continue
            self._end(*ended)

    def _end(self, move: Move, event: Any, token: bytes) -> None:
        why = _guarded(lambda: self._wait(event, token))
        if not why or self._settled(why):
            move.done(why)

    def _wait(self, event: Any, token: bytes) -> None:
        """Wait for the end of a move. The device must say it in both ways that it has."""
        self._backend.synchronize_event(event, self._device)
        with _completed_lock:
            _completed.update(
                payload for kind, payload in self._ops.drain_recorded_completions() if kind == _COMPLETION
            )
            if token not in _completed:
                raise DeviceError(
                    f"{self._device}: the event of a transfer has passed, but its completion was not recorded"
                )
            _completed.discard(token)


#: Pages as bytes: a block is one slot of ``page_bytes``, whatever lies in it.
PAGE_FORMAT = "NL_X_NB_BS_HS"


def _runs(namespaces: Sequence[Namespace]) -> list[list[_Run]]:
    """Per KV group, the runs of its layers. An object has its layers one after the other, so a run has one stretch."""
    found: list[list[_Run]] = []
    kernel_groups = itertools.count()
    layer = 0
    for namespace in namespaces:
        mine: list[_Run] = []
        at = 0
        for page, same in itertools.groupby(namespace.page_bytes):
            count = len(list(same))
            nbytes = page * count * namespace.blocks_per_chunk
            mine.append(_Run(next(kernel_groups), tuple(range(layer, layer + count)), at, nbytes))
            layer += count
            at += nbytes
        found.append(mine)
    return found


def _guarded(call: Callable[[], None]) -> str:
    """Run vendor code; what went wrong, in one line, or nothing. A fault costs one worker, not the server."""
    try:
        call()
    except (LMCacheError, ValueError) as exc:  # what a worker sent is refused: no fault of ours to look into
        return str(exc)
    except Exception as exc:
        logger.exception("device transfer")
        return f"{type(exc).__name__}: {exc}"
    return ""

"""The steps of storing and retrieving layer by layer.

The engine's generators drive the connector's, which ``docs/connectors.md`` describes, for N layers:

======== ================================ =============================================================================
step     store (N + 1)                    retrieve (N + 2)
======== ================================ =============================================================================
1        the connector starts layer 1     chunks are found (this step may wait); gives the number of tokens
k <= N   layer k - 1 is done, k starts    layer k - 1 is handed to the connector
N + 1    all layers are done; published   layer N is handed over
N + 2                                     all layers are done; gives the mask
======== ================================ =============================================================================

A generator may be closed, or dropped, after any step: then nothing is published, the connector's generator is closed
before the memory goes, and the memory goes. Where there is nothing to do the steps are the same, and do nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from typing import Any

from lmcache.errors import DeviceError
from lmcache.v1.cache_engine.chunks import Held, give_back

__all__ = ["retrieve_steps", "store_steps"]


def store_steps(
    connector: Any,
    reserve: Callable[[], list[Held]],
    layers: int,
    kwargs: Mapping[str, Any],
    publish: Callable[[list[Held]], None],
) -> Generator[None, None, None]:
    """What ``reserve`` gives has an object per layer of each chunk."""
    held, mover = reserve(), None
    try:
        if held:
            objs = [[objs[layer] for _, objs in held] for layer in range(layers)]
            mover = connector.batched_from_gpu(objs, *_ranges(held), **{"sync": False, **kwargs})
            _step(mover, connector, "batched_from_gpu", layers + 1)
        for _ in range(layers):
            yield
            if mover is not None:
                _step(mover, connector, "batched_from_gpu", layers + 1)
        if mover is not None:
            mover.close()
            publish(held)
    finally:
        _end(mover, held)
    yield


def retrieve_steps(
    connector: Any,
    read: Callable[[], list[Held]],
    layers: int,
    kwargs: Mapping[str, Any],
    mask_of: Callable[[Sequence[Held]], Any],
) -> Generator[Any, None, None]:
    """What ``read`` gives has an object per layer of each chunk."""
    held, mover = read(), None
    try:
        if held:
            mover = connector.batched_to_gpu(*_ranges(held), **{"sync": True, **kwargs})
            _step(mover, connector, "batched_to_gpu", layers + 2)
        for layer in range(layers):
            yield None if layer else sum(chunk.tokens for chunk, _ in held)
            if mover is not None:
                sent = [objs[layer] for _, objs in held]
                _step(mover, connector, "batched_to_gpu", layers + 2, sent)
        yield None
        if mover is not None:
            next(mover, None)  # a vendor's that has no step for it is done by now
        mask = mask_of(held)
    finally:
        _end(mover, held)
    yield mask


def _step(mover: Generator[Any, Any, Any], connector: Any, call: str, steps: int, sent: Any = None) -> None:
    """One step of the connector's.

    Raises:
        DeviceError: It was over. Of a store that would publish what nobody wrote.
    """
    try:
        mover.send(sent)
    except StopIteration:
        raise DeviceError(
            f"{type(connector).__name__}.{call}: it ended early: expected a generator of {steps} steps"
        ) from None


def _ranges(held: Sequence[Held]) -> tuple[list[int], list[int]]:
    return [chunk.start for chunk, _ in held], [chunk.end for chunk, _ in held]


def _end(mover: Generator[Any, Any, Any] | None, held: Sequence[Held]) -> None:
    """Copies end before their memory goes."""
    try:
        if mover is not None:
            mover.close()
    finally:
        give_back(held)

"""The other process of the kit's tests: imports what the test exported, and says what it sees.

One request per line of standard input, one answer per line of standard output, both JSON.
"""

from __future__ import annotations

import base64
import json
import os
import sys
from typing import Any


class _State:
    imported: Any = None
    tensors: Any = ()
    exported: Any = None


def _map(state: _State, asked: dict[str, Any]) -> Any:
    from lmcache.testing.peer import digest
    from lmcache.v1.platform.kv_wire import import_kv_caches

    state.imported = import_kv_caches([base64.b64decode(wire) for wire in asked["wires"]])
    state.tensors = [part for layer in state.imported.map() for part in _parts(layer)]
    return [
        {
            "sum": _sum(tensor), "digest": digest(tensor), "shape": list(tensor.shape), "stride": list(tensor.stride()),
            "dtype": str(tensor.dtype), "device": str(tensor.device),
        }
        for tensor in state.tensors
    ]  # fmt: skip


def _parts(layer: Any) -> list[Any]:
    return list(layer) if isinstance(layer, (list, tuple)) else [layer]


def _sums(state: _State, _: dict[str, Any]) -> Any:
    return [_sum(tensor) for tensor in state.tensors]


def _fill(state: _State, asked: dict[str, Any]) -> None:
    tensor = state.tensors[asked["index"]]
    tensor.fill_(asked["value"])
    _synchronize(tensor)


def _close(state: _State, _: dict[str, Any]) -> None:
    state.tensors = ()
    for held in (state.imported, state.exported):
        if held is not None:
            held.close()
    state.imported = state.exported = None


def _export(state: _State, asked: dict[str, Any]) -> Any:
    import torch

    from lmcache.v1.platform._device_detect import selected
    from lmcache.v1.platform.kv_wire import export_kv_caches

    kind = selected().spec.device_type
    tensor = torch.full((asked["nbytes"],), asked["value"], dtype=torch.uint8).to(kind)
    _synchronize(tensor)
    state.tensors, state.exported = [tensor], export_kv_caches([tensor])
    return [base64.b64encode(wire).decode() for wire in state.exported]


def _export_layers(state: _State, asked: dict[str, Any]) -> Any:
    """Layers as of a worker, with the content of ``lmcache.testing.peer.layers``."""
    from lmcache.testing.peer import layers
    from lmcache.v1.platform._device_detect import selected
    from lmcache.v1.platform.kv_wire import export_kv_caches

    kind = selected().spec.device_type
    state.tensors = [layer.to(kind) for layer in layers(asked["count"], asked["shape"])]
    _synchronize(state.tensors[0])
    state.exported = export_kv_caches(state.tensors)
    return [base64.b64encode(wire).decode() for wire in state.exported]


def _after(state: _State, asked: dict[str, Any]) -> int:
    """What the tensor holds once the exporter's event has passed, as this device's stream sees it."""
    from lmcache.v1.platform import get_device_spec, get_event_ipc_backend

    tensor = state.tensors[0]
    backend = get_event_ipc_backend(tensor.device)
    spec = get_device_spec(tensor.device.type)
    assert spec is not None
    event = backend.import_event(base64.b64decode(asked["event"]), tensor.device)
    backend.wait_event(event, spec.current_stream(tensor.device))
    seen = tensor.clone()
    _synchronize(tensor)
    return _sum(seen)


def _sum(tensor: Any) -> int:
    import torch

    return int(tensor.contiguous().view(torch.uint8).cpu().to(torch.int64).sum())


def _synchronize(tensor: Any) -> None:
    from lmcache.v1.platform import synchronize_device

    synchronize_device(tensor.device)


_ACTIONS = {
    "map": _map,
    "sums": _sums,
    "fill": _fill,
    "close": _close,
    "export": _export,
    "export_layers": _export_layers,
    "after": _after,
}


def main() -> None:
    """Answer requests until the input ends. What a library prints must not be taken for an answer."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    state = _State()
    for line in sys.stdin:
        asked = json.loads(line)
        try:
            reply = {"ok": True, "answer": _ACTIONS[asked["do"]](state, asked)}
        except Exception as exc:
            reply = {"ok": False, "answer": f"{type(exc).__name__}: {exc}"}
        answers.write(json.dumps(reply) + "\n")
        answers.flush()


if __name__ == "__main__":
    main()

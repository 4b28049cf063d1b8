"""What this wheel asks of torch: the only module that names ``torch.xpu``.

Queues and tensors are torch's; what is done with them is the native module's. torch's context is the queue's, so
that its memory is USM of the queue, and what is submitted keeps the order of torch's own work.
"""

from __future__ import annotations

import importlib
from typing import Any

from lmcache_xpu import native

__all__ = ["current_queue", "is_on_device", "is_pinned", "queue_handle", "reaches", "staged"]

DEVICE_TYPE = "xpu"


def current_queue(device: Any = None) -> int:
    """The address of the ``sycl::queue`` on which torch queues now: on ``device``, or on the current one."""
    xpu = importlib.import_module("torch").xpu
    return int(xpu.current_stream(device).sycl_queue)


def queue_handle(stream: Any) -> int:
    """The ``sycl::queue`` of one of torch's streams, or the handle itself.

    Raises:
        TypeError: It is neither.
    """
    handle = getattr(stream, "sycl_queue", stream)
    if isinstance(handle, int):
        return handle
    raise TypeError(f"{stream!r} is no stream: expected one of torch.xpu, or the address of a sycl::queue")


def is_on_device(tensor: Any) -> bool:
    """Whether a tensor is in the device's memory."""
    return bool(tensor.device.type == DEVICE_TYPE)


def is_pinned(queue: int, tensor: Any) -> bool:
    """Whether a host tensor lies in USM, where the device reads and writes it as it is."""
    if tensor.device.type != "cpu":
        return False
    return native.load().usm_kind(queue, tensor.data_ptr()) in ("host", "shared")


def reaches(queue: int, tensor: Any) -> bool:
    """Whether a kernel may be given a tensor's address."""
    return is_on_device(tensor) or is_pinned(queue, tensor)


def staged(tensor: Any, device: Any) -> Any:
    """A contiguous copy of a tensor on the device, queued where torch queues now."""
    torch = importlib.import_module("torch")
    where = torch.device(DEVICE_TYPE) if device is None else torch.device(device)
    return tensor.to(where, copy=True).contiguous()

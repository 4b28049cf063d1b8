"""Between numpy arrays on the host and tensors on the device under test."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

__all__ = ["DTYPES", "Guarded", "flat", "on_device", "same", "to_host"]

DTYPES = ("bfloat16", "float16", "float32", "float8_e4m3fn", "int8", "uint8")
"""Element types that a KV cache may have."""

_GUARD = 4096
_FILL = 0xA5


def flat(node: Any) -> list[Any]:
    """The leaves of nested lists, outermost first."""
    return [leaf for child in node for leaf in flat(child)] if isinstance(node, list) else [node]


class Guarded:
    """Arrays, or lists of them, on the device, each with the same bits and between guards of 4 KiB."""

    def __init__(self, value: Any, device: Any, dtype: torch.dtype) -> None:
        self._wholes: list[Any] = []
        self.tensors = self._put(value, device, dtype)

    def _put(self, value: Any, device: Any, dtype: torch.dtype) -> Any:
        import torch

        if isinstance(value, list):
            return [self._put(part, device, dtype) for part in value]
        bits = np.ascontiguousarray(value).view(np.uint8).reshape(-1)
        guard = np.full(_GUARD, _FILL, dtype=np.uint8)
        whole = torch.from_numpy(np.concatenate([guard, bits, guard])).to(device)
        if whole.device.type == "cpu":
            whole = whole.clone()
        self._wholes.append(whole)
        return whole[_GUARD : _GUARD + bits.size].view(dtype).view(value.shape)

    def intact(self) -> bool:
        """Whether nothing was written beside the tensors."""
        ends = [to_host(part) for whole in self._wholes for part in (whole[:_GUARD], whole[-_GUARD:])]
        return all((end == _FILL).all() for end in ends)


def on_device(value: Any, device: Any, dtype: torch.dtype) -> Any:
    """Arrays, or lists of them, as tensors of ``dtype`` with the same bits. Each is memory of its own."""
    return Guarded(value, device, dtype).tensors


def to_host(tensor: torch.Tensor) -> Any:
    """A tensor's bits as a numpy array of unsigned integers."""
    import torch

    size = tensor.element_size()
    bits = tensor.contiguous().view(torch.uint8).cpu().numpy()
    return bits.reshape(-1).view(f"u{size}").reshape(tuple(tensor.shape))


def same(tensors: Any, arrays: Any) -> bool:
    """Whether tensors (nested as the arrays are) have exactly the arrays' bits."""
    if isinstance(arrays, list):
        return len(tensors) == len(arrays) and all(map(same, tensors, arrays))
    return bool(np.array_equal(to_host(tensors), arrays))

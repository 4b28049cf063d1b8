"""Tensor operands of one call, checked against each other by the names of their dimensions."""

from __future__ import annotations

from typing import Any

__all__ = ["FLOATS", "INDICES", "INTEGERS", "Operands"]

#: Names of dtypes, as attributes of torch.
INTEGERS = ("int8", "uint8", "int16", "int32", "int64")
INDICES = ("int32", "int64")
FLOATS = ("float16", "bfloat16", "float32")


class Operands:
    """What the operands of one call have said so far: the size of each named dimension, and the device."""

    def __init__(self, op: str) -> None:
        self.op = op
        self.sizes: dict[str, int] = {}
        self._device: tuple[str, Any] | None = None

    def add(self, name: str, tensor: Any, dims: str, dtypes: tuple[str, ...]) -> None:
        """Take one more operand.

        Args:
            name: The parameter's name, for errors.
            tensor: What was passed.
            dims: Names of its dimensions, separated by spaces. A name that an earlier operand had must have
                the same size here.
            dtypes: Names of the dtypes that are allowed.

        Raises:
            TypeError: Not a tensor, or of another dtype.
            ValueError: Another number of dimensions, another size, or another device than the operands before.
        """
        if not hasattr(tensor, "element_size"):
            raise TypeError(f"{self.op}: {name}: expected a tensor, got {type(tensor).__name__}")
        dtype = str(tensor.dtype).removeprefix("torch.")
        if dtype not in dtypes:
            raise TypeError(f"{self.op}: {name} is {dtype}: expected {' or '.join(dtypes)}")
        names = dims.split()
        shape = tuple(tensor.shape)
        wanted = [self.sizes.get(dim) for dim in names]
        fits = len(shape) == len(names) and all(
            w in (None, size) for w, size in zip(wanted, shape, strict=True)
        )
        if not fits:
            text = ", ".join(d if w is None else f"{d}={w}" for d, w in zip(names, wanted, strict=True))
            raise ValueError(f"{self.op}: {name} has shape {shape}: expected [{text}]")
        first, device = self._device = self._device or (name, tensor.device)
        if tensor.device != device:
            raise ValueError(f"{self.op}: {name} is on {tensor.device}: expected {device}, where {first} is")
        self.sizes.update(zip(names, shape, strict=True))

"""The device's operations: torch's, blocks in fixed shapes; and host memory natively."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lmcache.logging import init_logger
from lmcache.v1.platform.fixed_shape_ops import FixedShapeOps
from lmcache_neuron import runtime

if TYPE_CHECKING:
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

__all__ = ["NeuronDeviceOps"]

logger = init_logger(__name__)


class NeuronDeviceOps(FixedShapeOps):
    """See :class:`FixedShapeOps`."""

    device_type: ClassVar[str] = "neuron"

    def ensure_native(self) -> None:
        """Bind the native module.

        Raises:
            DeviceError: It does not load, or was built for another core.
        """
        if runtime.native_wanted():
            self.bind_native(runtime.native())
        else:
            logger.warning(
                "LMCACHE_NEURON_NATIVE=off: torch's operations serve, in shapes that follow the request"
            )

    def _mover(self) -> FixedShapeMover | None:
        return runtime.mover() if runtime.native_wanted() else None

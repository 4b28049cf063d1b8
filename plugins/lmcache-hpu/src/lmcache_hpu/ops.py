"""The device's operations: blocks in fixed shapes, host memory natively, and torch's for the rest."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

from lmcache.logging import init_logger
from lmcache.v1.platform.fixed_shape_ops import FixedShapeOps
from lmcache_hpu import runtime, settings

if TYPE_CHECKING:
    from lmcache.v1.platform.fixed_shapes import FixedShapeMover

__all__ = ["HpuDeviceOps"]

logger = init_logger(__name__)


class HpuDeviceOps(FixedShapeOps):
    """See :class:`FixedShapeOps`."""

    device_type: ClassVar[str] = "hpu"

    def ensure_native(self) -> None:
        """Bind the native module.

        Raises:
            DeviceError: It does not load, or was built for another core.
        """
        if settings.native_wanted():
            self.bind_native(runtime.native())
        else:
            logger.warning(
                "LMCACHE_HPU_NATIVE=off: torch's operations serve, in shapes that follow the request"
            )

    def _mover(self) -> FixedShapeMover | None:
        return runtime.mover() if settings.native_wanted() else None

    def _end_step(self) -> None:
        runtime.end_step()

"""A circuit breaker: after some failures in a row nobody is made to wait for the next one."""

from __future__ import annotations

__all__ = ["CLOSED", "OPEN", "Breaker"]

CLOSED, OPEN = "closed", "open"


class Breaker:
    """Counts failures in a row. It opens after ``failures`` of them, or at once when told to, and closes when it
    is told of a success: its owner makes one attempt now and then. Not thread-safe."""

    def __init__(self, failures: int) -> None:
        self._most = max(1, failures)
        self._in_row = 0
        self.opened = 0
        """How often."""
        self.state = CLOSED

    def success(self) -> bool:
        """Something worked; whether that closed it."""
        was, self.state, self._in_row = self.state, CLOSED, 0
        return was is OPEN

    def failure(self, at_once: bool = False) -> bool:
        """Something failed; whether that opened it."""
        self._in_row += 1
        if self.state is OPEN or not (at_once or self._in_row >= self._most):
            return False
        self.state = OPEN
        self.opened += 1
        return True

"""Ops that say when the work on a stream is done, as members of ``DeviceOps``."""

# mypy: disable-error-code="empty-body"

from __future__ import annotations

from lmcache.v1.platform.base.op import op

__all__ = ["StreamOps"]


class StreamOps:
    """A recorder and what drains it go together: where a backend brings one, the baseline's other is absent."""

    @op
    def record_completion_on_stream(self, stream_ptr: int, kind: str, payload: bytes) -> None:
        """Have ``(kind, payload)`` drained once all that is on the stream now is done. Thread-safe.

        Nothing is lost and nothing comes twice: the queue has no bound, and whoever records must drain. The
        baseline records at once, which is right on a synchronous device only; on others it is absent.

        Args:
            stream_ptr: Native handle of the stream.
            kind: What is complete; the caller's word.
            payload: Any bytes, given back as they are.

        Raises:
            TypeError: ``stream_ptr`` is no integer, ``kind`` no str, or ``payload`` no bytes.
        """

    @op
    def drain_recorded_completions(self) -> list[tuple[str, bytes]]:
        """Take all completions that are due, oldest first, in one step. Thread-safe.

        Returns:
            ``(kind, payload)`` of each. Completions of this process only: a forked one begins with none.
        """

    @op
    def record_event_on_stream(
        self, stream_ptr: int, type: str, session: str, texts: dict[str, str], numbers: dict[str, int]
    ) -> None:
        """Note the time at which all that is on the stream now is done, for observers. Thread-safe.

        Events may be lost: the baseline keeps the latest 65,536 and warns once when it drops the oldest. Its
        order is that of ``record_completion_on_stream``, and it is absent where that is.

        Args:
            stream_ptr: Native handle of the stream.
            type: Name of the event.
            session: Whose it is.
            texts: Text by name; copied.
            numbers: Integers by name; copied.

        Raises:
            TypeError: An argument, or a key or value of the mappings, is of another type.
        """

    @op
    def drain_recorded_events(self) -> list[tuple[str, str, float, dict[str, str], dict[str, int]]]:
        """Take all events that are due, oldest first, in one step. Thread-safe.

        Returns:
            ``(type, session, seconds since 1970, texts, numbers)`` of each.
        """

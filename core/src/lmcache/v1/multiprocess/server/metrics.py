"""Prometheus series of the server. All exist from the start, at 0."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, Counter, Gauge

ERROR_CODES = (
    "bad_request", "chunk_size", "device", "internal", "lease_gone", "malformed", "mode", "not_attached",
    "protocol", "stopping", "unknown_request", "unknown_session", "unregistered",
)  # fmt: skip
FRAME_FAULTS = ("frames", "message")


class Metrics:
    """Counters that handlers raise; gauges are read from L1 at scrape time (see ``watch``)."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()

        def counter(name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
            return Counter(f"lmcache_mp_{name}", text, labels, registry=self.registry)

        self.requests = counter("requests", "messages answered")
        self.lookups = counter("lookups_requests", "lookups answered")
        self.lookup_tokens = counter("lookup_requested_tokens", "tokens asked for by lookups")
        self.hit_tokens = counter("lookup_hit_tokens", "tokens found by lookups")
        self.stored_objects = counter("l1_write_chunks", "objects published in L1")
        self.device_stored = counter("device_stored_objects", "objects that the server read off a device")
        self.device_loaded = counter("device_loaded_objects", "objects that the server wrote to a device")
        self.read_bytes = counter("frame_read_bytes", "payload bytes sent in frames")
        self.written_bytes = counter("frame_written_bytes", "payload bytes received in frames")
        self.errors = counter("errors", "requests refused, by code", ("code",))
        self.malformed = counter("malformed_frames", "messages dropped unread, by fault", ("fault",))
        self.undeliverable = counter("undeliverable_replies", "replies whose client was gone")
        for code in ERROR_CODES:
            self.errors.labels(code)
        for fault in FRAME_FAULTS:
            self.malformed.labels(fault)

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge ``lmcache_mp_<name>`` whose value is read when somebody scrapes."""
        Gauge(f"lmcache_mp_{name}", text, registry=self.registry).set_function(read)

"""Prometheus series of the server. All exist from the start, at 0."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from lmcache.v1.storage.accounts import AccountUsage

ERROR_CODES = (
    "bad_request", "chunk_size", "device", "internal", "lease_gone", "malformed", "mode", "not_attached",
    "protocol", "stopping", "unknown_request", "unknown_session", "unregistered",
)  # fmt: skip
FRAME_FAULTS = ("frames", "message")
TIER_GAUGES = {
    "up": "1 while the tier is used, 0 while it is not",
    "objects": "objects that the tier holds; -1 if that is not known",
    "used_bytes": "bytes that they take; -1 if that is not known",
    "capacity_bytes": "bytes that they may take; 0 without a limit, -1 if that is not known",
    "queued_objects": "objects that wait to be written to the tier",
    "queued_bytes": "their bytes, which stay in L1 until then",
    "hung": "calls of the tier that did not return in time, and have not yet",
}
TIER_COUNTERS = {
    "calls": "calls of the tier",
    "errors": "calls that failed, the overdue ones included",
    "overdue": "calls that did not return in time",
    "breaker_opened": "times that the tier was given up for a while",
    "stored": "objects written",
    "stored_bytes": "their bytes",
    "dropped": "objects not written: too many waited, or the tier was down",
    "failed": "objects that the tier failed to write",
    "over_quota": "objects not written: their account has no more room there",
    "loaded": "objects read and found to be what was stored",
    "loaded_bytes": "their bytes",
    "missed": "objects asked for that were not there, or not right",
    "quarantined": "objects that were not what was stored, and were deleted",
    "evicted": "objects that made room for others",
    "deleted": "objects removed, the evicted ones included",
}
"""Names below ``lmcache_mp_l2_``, by which the tiers' status has them, and texts; each has a label ``tier``."""


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
        self.pushed_objects = counter("pushed_objects", "objects published that peers pushed")
        self.pushed_bytes = counter("pushed_bytes", "payload bytes of objects that peers pushed")
        self.push_refused = counter("push_refused_objects", "pushed objects refused for want of room")
        self.push_damaged = counter(
            "push_damaged_objects", "pushed objects dropped because their bytes differ"
        )
        self.errors = counter("errors", "requests refused, by code", ("code",))
        self.malformed = counter("malformed_frames", "messages dropped unread, by fault", ("fault",))
        self.undeliverable = counter("undeliverable_replies", "replies whose client was gone")
        for code in ERROR_CODES:
            self.errors.labels(code)
        for fault in FRAME_FAULTS:
            self.malformed.labels(fault)

    def watch_tiers(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        """Series of each tier below L1, from their status, which is read when somebody scrapes."""
        self.registry.register(_TierCollector(read))

    def watch_accounts(self, read: Callable[[], Iterable[tuple[str, str, AccountUsage]]]) -> None:
        """Series of each account that has a limit, by tier, ``l1`` included. Of others there may be thousands."""
        self.registry.register(_AccountCollector(read))

    def watch(self, name: str, text: str, read: Callable[[], float]) -> None:
        """A gauge ``lmcache_mp_<name>`` whose value is read when somebody scrapes."""
        Gauge(f"lmcache_mp_{name}", text, registry=self.registry).set_function(read)


class _AccountCollector(Collector):
    """Turns accounts with a limit into series."""

    def __init__(self, read: Callable[[], Iterable[tuple[str, str, AccountUsage]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        labels = ("tier", "account")
        used = GaugeMetricFamily(
            "lmcache_mp_account_used_bytes", "bytes that an account with a limit has there", labels=labels
        )
        limit = GaugeMetricFamily(
            "lmcache_mp_account_limit_bytes", "bytes that it may have there", labels=labels
        )
        for tier, account, has in self._read():
            if has.quota_bytes is not None:
                used.add_metric((tier, account), float(has.used_bytes))
                limit.add_metric((tier, account), float(has.quota_bytes))
        yield used
        yield limit


class _TierCollector(Collector):
    """Turns the tiers' status into series."""

    def __init__(self, read: Callable[[], Sequence[Mapping[str, Any]]]) -> None:
        self._read = read

    def collect(self) -> Iterator[Metric]:
        rows = self._read()
        for name, text in TIER_GAUGES.items():
            gauge = GaugeMetricFamily(f"lmcache_mp_l2_{name}", text, labels=("tier",))
            for row in rows:
                value = row["state"] == "up" if name == "up" else row[name]
                gauge.add_metric((str(row["name"]),), float(value))
            yield gauge
        for name, text in TIER_COUNTERS.items():
            counter = CounterMetricFamily(f"lmcache_mp_l2_{name}", text, labels=("tier",))
            for row in rows:
                counter.add_metric((str(row["name"]),), float(row[name]))
            yield counter

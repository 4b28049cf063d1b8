"""An S3-compatible object store, through obstore: an object is one key below the prefix, named by its hex.

The client is asynchronous and runs on a loop of the adapter's own, since only so a request can be given up. What is
sent is a copy, and what arrives is copied to its payload on that loop while the call waits: nothing that goes on in
the client after a call has returned can touch the caller's memory.
"""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from datetime import timedelta
from typing import Any, TypeVar

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from lmcache.v1.storage.l2.adapter import AdapterError, Call, Put, StorageAdapter, Usage, Want
from lmcache.v1.storage.l2.options import read_options
from lmcache.v1.storage.l2.remote import (
    Faults,
    cut_header,
    header_size,
    is_whole,
    probe_at_start,
    reason,
    secret,
)
from lmcache.v1.storage.l2.s3_options import Options

__all__ = ["Options", "S3Adapter", "make"]

T = TypeVar("T")

_LOOK_SECONDS = 0.05
"""How often a wait looks whether the call is over."""
_STREAM = 1 << 20
"""Bytes that arrive before they are copied to the payload."""
_HEADER_GUESS = 4096
_START_SECONDS = 10.0
_NO_BUCKET = "NoSuchBucket"
_PROBE = "0" * 128
"""A key whose absence tells that the bucket is there and lets us in."""


def make(options: Mapping[str, Any]) -> S3Adapter:
    """The adapter of ``{"type": "s3", …}``.

    Raises:
        ConfigError: for a bad option.
        StartupError: if the store cannot be reached or refuses us, unless ``required`` is false.
    """
    read = read_options("s3", Options, options)
    adapter = S3Adapter(read)
    probe_at_start(adapter, lambda: adapter.probe(Call(_START_SECONDS)), read.required, "mend it")
    return adapter


class S3Adapter(StorageAdapter):
    """A prefix in a bucket."""

    shared = True

    def __init__(self, options: Options) -> None:
        self._options = options
        self.threads = options.threads
        self._store = _open(options)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="lmcache-s3", daemon=True)
        self._thread.start()

    # ---- the interface

    def contains(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """HEAD of each."""

        async def ask(key: bytes) -> bool:
            await obstore.head_async(self._store, key.hex())
            return True

        return [bool(found) for found in self._each(keys, ask, call)]

    def store(self, objects: Sequence[Put], call: Call) -> list[bool]:
        """PUT, in several parts above ``part`` bytes; the object appears when it is complete."""

        async def put(item: Put) -> bool:
            value = b"".join((item.header, item.payload))
            try:
                await obstore.put_async(self._store, item.key.hex(), value, chunk_size=self._options.part)
            except FileNotFoundError as exc:  # not the absence of an object, which is no fault
                raise OSError(_said(exc)) from None
            return True

        return [bool(stored) for stored in self._each(objects, put, call)]

    def load(self, wants: Sequence[Want], call: Call) -> list[bytes | None]:
        """GET, streamed to the payload."""

        async def get(want: Want) -> bytes | None:
            found = await obstore.get_async(self._store, want.key.hex())
            size = header_size(found.meta["size"], len(want.payload))
            return await _fill(found.stream(min_chunk_size=_STREAM), size, want.payload) if size else None

        return self._each(wants, get, call)

    def delete(self, keys: Sequence[bytes], call: Call) -> list[bool]:
        """DELETE of each; what was not there is not there any more."""

        async def remove(key: bytes) -> bool:
            await obstore.delete_async(self._store, key.hex())
            return True

        return [gone is not None for gone in self._each(keys, remove, call, absent=True)]

    def headers(self, keys: Sequence[bytes], call: Call) -> list[bytes | None]:
        """The beginning of each object."""

        async def begin(key: bytes) -> bytes | None:
            found = await obstore.get_range_async(self._store, key.hex(), start=0, length=_HEADER_GUESS)
            return cut_header(bytes(found))

        return self._each(keys, begin, call)

    def clear(self, call: Call) -> int:
        """Remove what is below the prefix and named as we name it."""
        count = 0

        async def sweep(_: None) -> bool:
            nonlocal count
            async for found in obstore.list(self._store):
                names = [name for entry in found if _is_ours(name := entry["path"])]
                if names:
                    await obstore.delete_async(self._store, names)
                    count += len(names)
            return True

        if self._each([None], sweep, call) != [True]:
            raise AdapterError(f"{self.describe()}: cleared {count} objects only, then the time was over")
        return count

    def usage(self) -> Usage:
        """Not known: others use the store, too."""
        return Usage(-1, -1, 0)

    def describe(self) -> str:
        """Bucket, prefix and endpoint."""
        endpoint = f" at {self._options.endpoint}" if self._options.endpoint else ""
        return f"s3 {self._options.url}{endpoint}"

    def close(self) -> None:
        """End the loop; requests that still run are given up."""
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(_START_SECONDS)
        if not self._thread.is_alive():
            self._loop.close()

    def probe(self, call: Call) -> None:
        """Whether the store answers, has the bucket and lets us in; raises AdapterError if not."""

        async def ask(key: str) -> bool:
            await obstore.get_async(self._store, key)
            return True

        if self._each([_PROBE], ask, call, absent=True) != [True]:
            raise AdapterError(f"{self.describe()}: no answer within {_START_SECONDS:g} s")

    # ---- batches

    def _each(
        self,
        items: Sequence[Any],
        ask: Callable[[Any], Awaitable[T | None]],
        call: Call,
        absent: T | None = None,
    ) -> list[T | None]:
        """What ``ask`` answers to each item, several at a time; ``absent`` for one that is not there.

        None for an item that failed or was not reached in time; if there is no other answer, an AdapterError says why.
        """
        faults = Faults(self.describe())
        answers: list[T | None] = [None] * len(items)
        gate = asyncio.Semaphore(self._options.requests)

        async def one(index: int) -> None:
            async with gate:
                if call.over:
                    return
                try:
                    answers[index] = await ask(items[index])
                except (BaseError, OSError, ValueError) as exc:
                    if isinstance(exc, FileNotFoundError) and _NO_BUCKET not in str(exc):
                        answers[index] = absent
                    else:
                        faults.add(_said(exc))

        async def every() -> None:
            tasks = [asyncio.ensure_future(one(index)) for index in range(len(items))]
            try:
                while pending := [task for task in tasks if not task.done()]:
                    if call.over:
                        break
                    await asyncio.wait(pending, timeout=min(_LOOK_SECONDS, call.remaining))
                if pending and not call.remaining:
                    faults.add("no answer in time")
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)

        if items and not call.over:
            # Its end is certain once the call is over: a task that is cancelled ends at its next await.
            asyncio.run_coroutine_threadsafe(every(), self._loop).result()
        faults.settle(answers)
        return answers


def _said(exc: Exception) -> str:
    """The reason in a text of obstore: the server's word, else the system's, else its own first paragraph."""
    text = str(exc)
    if found := re.search("<Code>(.*?)</Code>.*?<Message>(.*?)</Message>", text, re.DOTALL):
        return f"{found[1]}: {found[2]}"
    if found := re.search('message: "(.*?)"', text):
        return found[1]
    return reason(text.partition("\n\n")[0].rpartition(" - ")[2])


async def _fill(stream: AsyncIterator[Any], size: int, payload: memoryview) -> bytes | None:
    """Split what arrives into a header of ``size`` bytes and the payload; None if it is another object's."""
    header, filled = bytearray(), 0
    async for chunk in stream:
        view = memoryview(chunk)
        if len(header) < size:
            head, view = view[: size - len(header)], view[size - len(header) :]
            header += head
            if len(header) == size and not is_whole(header):
                return None
        if filled + len(view) > len(payload):
            return None
        payload[filled : filled + len(view)] = view
        filled += len(view)
    return bytes(header) if len(header) == size and filled == len(payload) else None


def _is_ours(name: str) -> bool:
    return len(name) == 128 and not name.strip("0123456789abcdef")


def _open(options: Options) -> Any:
    """The client of obstore. What is not said here it takes from the environment: ``AWS_*``."""
    bucket, prefix = options.place()
    names: dict[str, Any] = {"endpoint": options.endpoint, "region": options.region}
    for name, variable in (
        ("access_key_id", options.access_key_env),
        ("secret_access_key", options.secret_key_env),
        ("token", options.token_env),
    ):
        names[name] = secret(f"--l2-adapter s3: {name}", variable)
    client: dict[str, Any] = {
        "connect_timeout": timedelta(seconds=options.connect_seconds),
        "timeout": timedelta(seconds=options.request_seconds),
        "allow_http": options.allow_http,
    }
    retry: dict[str, Any] = {
        "max_retries": options.retries,
        "retry_timeout": timedelta(seconds=options.request_seconds),
    }
    given = {name: value for name, value in names.items() if value}
    return S3Store(bucket, prefix=prefix or None, client_options=client, retry_config=retry, **given)

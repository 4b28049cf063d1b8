"""Requests to an OpenAI-compatible engine with the standard library's client: JSON in, JSON or events out."""

from __future__ import annotations

import http.client
import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import SplitResult, urlsplit

from lmcache.errors import ConfigError, LMCacheError

_MAX_BODY = 64 << 20
_MAX_LINE = 1 << 20
_SHOWN = 300


class Engine:
    """An engine at a URL.

    Args:
        flag: the flag that the URL came from, for messages.
        timeout: seconds for one request as a whole.
        key_variable: environment variable that holds the API key, if one is wanted.

    Raises:
        ConfigError: for a URL or a variable that cannot be used.
    """

    def __init__(
        self, url: str, timeout: float, flag: str = "--url", key_variable: str | None = None
    ) -> None:
        self._parts = _split(url, flag)
        base = self._parts.path.rstrip("/")
        self._base = base.removesuffix("/v1")  # users write the URL with and without it
        self._timeout = timeout
        self.url = f"{self._parts.scheme}://{self._parts.netloc}{self._base}"
        self._headers = {"Accept": "application/json", "Content-Type": "application/json"}
        if key_variable:
            key = os.environ.get(key_variable)
            if not key or not key.isascii() or not key.isprintable():
                raise ConfigError(
                    f"--api-key-env {key_variable}: expected an environment variable that holds an API key"
                )
            self._headers["Authorization"] = f"Bearer {key}"

    def model(self) -> str:
        """The one model that the engine serves.

        Raises:
            LMCacheError: if it serves none, or several.
        """
        rows = self.json("GET", "/v1/models").get("data")
        names = (
            [str(row["id"]) for row in rows if isinstance(row, dict) and "id" in row]
            if isinstance(rows, list)
            else []
        )
        if len(names) != 1:
            raise LMCacheError(
                f"{self.url} serves {', '.join(names) or 'no model'}: expected one; name it with --model"
            )
        return names[0]

    def json(self, method: str, path: str, body: object = None) -> dict[str, Any]:
        """One request whose answer is a JSON object.

        Raises:
            LMCacheError: one line, for whatever goes wrong.
        """
        with self._request(method, path, body) as (response, _):
            return self._object(response.read(_MAX_BODY), path)

    def events(self, path: str, body: object) -> Iterator[dict[str, Any]]:
        """POST ``body`` and yield the JSON objects of the event stream that answers, as they come.

        Raises:
            LMCacheError: one line, for whatever goes wrong.
        """
        with self._request("POST", path, body) as (response, deadline):
            kind = response.headers.get_content_type()
            if kind != "text/event-stream":
                raise LMCacheError(f"{self.url}{path}: answers with {kind}: expected text/event-stream")
            while line := response.readline(_MAX_LINE):
                if time.monotonic() > deadline:
                    raise TimeoutError
                data = line.strip().removeprefix(b"data:").strip()
                if data == b"[DONE]":
                    return
                if line.startswith(b"data:"):
                    event = self._object(data, path)
                    if "error" in event:
                        raise LMCacheError(f"{self.url}{path}: {_reason(data)}")
                    yield event
            raise LMCacheError(f"{self.url}{path}: the stream ended before its [DONE]")

    @contextmanager
    def _request(
        self, method: str, path: str, body: object
    ) -> Iterator[tuple[http.client.HTTPResponse, float]]:
        where = f"{self.url}{path}"
        https = self._parts.scheme == "https"
        kind = http.client.HTTPSConnection if https else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=self._timeout)
        try:
            data = None if body is None else json.dumps(body).encode()
            deadline = time.monotonic() + self._timeout
            connection.request(method, self._base + path, data, self._headers)
            response = connection.getresponse()
            if response.status != http.client.OK:
                raise LMCacheError(
                    f"{where}: HTTP {response.status} {response.reason}: {_reason(response.read(_MAX_BODY))}"
                )
            yield response, deadline
        except TimeoutError:
            raise LMCacheError(
                f"{where}: no complete answer within {self._timeout:g} s; raise --timeout if it is only slow"
            ) from None
        except (OSError, http.client.HTTPException, UnicodeError) as exc:
            reason = getattr(exc, "strerror", None) or str(exc) or type(exc).__name__
            raise LMCacheError(f"{where}: {reason}; is an OpenAI-compatible engine running there?") from None
        finally:
            connection.close()

    def _object(self, data: bytes, path: str) -> dict[str, Any]:
        try:
            found = json.loads(data)
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, dict):
            raise LMCacheError(f"{self.url}{path}: answers {data[:80]!r}: expected a JSON object")
        return found


def _split(url: str, flag: str) -> SplitResult:
    try:
        parts = urlsplit(url if "://" in url else f"http://{url}")
        port_is_good = parts.port != 0
    except ValueError:
        raise ConfigError(f"{flag} {url}: expected http://HOST:PORT") from None
    if (
        parts.scheme not in ("http", "https")
        or not parts.hostname
        or not port_is_good
        or parts.query
        or "@" in parts.netloc
    ):
        raise ConfigError(f"{flag} {url}: expected http://HOST:PORT")
    if not url.isascii() or not url.isprintable() or " " in url:
        raise ConfigError(f"{flag} {url!r}: expected http://HOST:PORT in printable ASCII")
    return parts


def _reason(body: bytes) -> str:
    """What an error answer says: OpenAI's ``error.message``, FastAPI's ``detail``, or how the body begins."""
    try:
        found = json.loads(body)
    except (ValueError, RecursionError):
        found = None
    if isinstance(found, dict):
        error = found.get("error", found)
        text = error if isinstance(error, str) else (error or {}).get("message") or found.get("detail")
        if text:
            return str(text)[:_SHOWN]
    return body[:_SHOWN].decode("utf-8", "replace") or "no reason given"

"""Options of the S3 adapter."""

from __future__ import annotations

from typing import Annotated
from urllib.parse import SplitResult, urlsplit

import msgspec

from lmcache.v1.storage.l2.options import Size

__all__ = ["Options"]

Seconds = Annotated[float, msgspec.Meta(gt=0, le=600)]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``docs/storage/s3.md``. Keys are secrets, so only names of variables are taken."""

    url: str
    endpoint: str = ""
    region: str = ""
    access_key_env: str = ""
    secret_key_env: str = ""
    token_env: str = ""
    allow_http: bool = False
    part: Size = Size(16 << 20)
    requests: Annotated[int, msgspec.Meta(ge=1, le=256)] = 16
    connect_seconds: Seconds = 2.0
    request_seconds: Seconds = 30.0
    retries: Annotated[int, msgspec.Meta(ge=0, le=20)] = 2
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    required: bool = True

    def __post_init__(self) -> None:
        url = _split(self.url)
        if (
            url is None
            or url.scheme != "s3"
            or not url.netloc
            or "@" in url.netloc
            or url.query
            or url.fragment
        ):
            shown = "…" if {"@", "?"} & set(self.url) else repr(self.url)  # it may hold a key
            raise ValueError(f"url={shown}: expected s3://BUCKET or s3://BUCKET/PREFIX")
        end = _split(self.endpoint)
        if self.endpoint and (
            end is None or end.scheme not in ("http", "https") or {"@", "?"} & set(self.endpoint)
        ):
            shown = "…" if {"@", "?"} & set(self.endpoint) else repr(self.endpoint)
            raise ValueError(f"endpoint={shown}: expected https://HOST:PORT, without user and query")
        if self.endpoint.startswith("http:") and not self.allow_http:
            raise ValueError(
                f'endpoint={self.endpoint!r}: expected https; set "allow_http": true to send in the clear'
            )
        if bool(self.access_key_env) != bool(self.secret_key_env):
            raise ValueError("access_key_env, secret_key_env: expected both or none")
        if self.part < 5 << 20:
            raise ValueError(f"part={self.part}: expected at least 5MiB, the smallest that S3 takes")

    def place(self) -> tuple[str, str]:
        """Bucket and prefix."""
        url = urlsplit(self.url)
        return url.netloc, url.path.strip("/")


def _split(text: str) -> SplitResult | None:
    """None: no URL. What ``urlsplit`` says of it would show a part of it."""
    try:
        return urlsplit(text)
    except ValueError:
        return None

"""Options of the Redis adapter, and what redis-py is told by them."""

from __future__ import annotations

from typing import Annotated, Any
from urllib.parse import urlsplit

import msgspec
from redis.backoff import NoBackoff
from redis.retry import Retry

from lmcache.v1.storage.l2.options import Size
from lmcache.v1.storage.l2.remote import secret

__all__ = ["Options", "client_settings", "place"]


class Options(msgspec.Struct, frozen=True, kw_only=True):
    """See ``docs/storage/redis.md``."""

    url: str
    cluster: bool = False
    username_env: str = ""
    password_env: str = ""
    ca_file: str = ""
    cert_file: str = ""
    key_file: str = ""
    verify: bool = True
    key_prefix: Annotated[str, msgspec.Meta(min_length=1, max_length=200)] = "lmcache:"
    ttl_seconds: Annotated[int, msgspec.Meta(ge=0)] = 0
    piece: Size = Size(32 << 20)
    connect_seconds: Annotated[float, msgspec.Meta(gt=0, le=60)] = 2.0
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    required: bool = True

    def __post_init__(self) -> None:
        try:
            parts = urlsplit(self.url)
            scheme, _ = parts.scheme, parts.port
        except ValueError:
            scheme, parts = "", urlsplit("")
        if scheme not in ("redis", "rediss", "unix") or parts.query or parts.fragment:
            raise ValueError(
                "url: expected redis://HOST:PORT/DB, rediss://… or unix:///PATH, without a query"
            )
        if self.cluster and (scheme == "unix" or parts.path.strip("/") not in ("", "0")):
            raise ValueError("cluster=true: expected redis://HOST:PORT or rediss://…, without a database")
        if scheme != "rediss" and (self.ca_file or self.cert_file or self.key_file or not self.verify):
            raise ValueError("ca_file, cert_file, key_file, verify: expected only with a url rediss://…")
        if bool(self.cert_file) != bool(self.key_file):
            raise ValueError("cert_file, key_file: expected both or none")
        if set(self.key_prefix) & set("{}"):
            raise ValueError(
                f"key_prefix={self.key_prefix!r}: expected no braces, which place keys in a cluster"
            )
        if self.piece < 1 << 16:
            raise ValueError(f"piece={self.piece}: expected at least 64KiB")


def client_settings(options: Options) -> dict[str, Any]:
    """What redis-py's clients take beside the url.

    Raises:
        ConfigError: if a variable that is to hold a secret is not set.
    """
    seconds = options.connect_seconds
    settings: dict[str, Any] = {
        "protocol": 2,
        "decode_responses": False,
        "socket_connect_timeout": seconds,
        "socket_timeout": seconds,
        # The tier around the adapter tries again. A cluster's client needs one more try to follow a failover.
        "retry": Retry(NoBackoff(), 1 if options.cluster else 0),
    }
    if not options.url.startswith("unix:"):
        settings["socket_keepalive"] = True
    for name, variable in (("username", options.username_env), ("password", options.password_env)):
        value = secret(f"--l2-adapter redis: {name}_env", variable)
        if value is not None:
            settings[name] = value
    if options.url.startswith("rediss:"):
        settings["ssl_cert_reqs"] = "required" if options.verify else "none"
        settings["ssl_check_hostname"] = options.verify
        files = {
            "ssl_ca_certs": options.ca_file,
            "ssl_certfile": options.cert_file,
            "ssl_keyfile": options.key_file,
        }
        settings |= {name: path for name, path in files.items() if path}
    return settings


def place(options: Options) -> str:
    """Address and prefix in words, without user and password."""
    url = urlsplit(options.url)
    kind = "redis cluster" if options.cluster else "redis"
    user = "***@" if "@" in url.netloc or options.username_env or options.password_env else ""
    return f"{kind} {url.scheme}://{user}{url.netloc.rpartition('@')[2]}{url.path} {options.key_prefix}*"

"""Where a server is: one spelling for what users write in many."""

from __future__ import annotations

from urllib.parse import urlsplit

from lmcache.errors import ConfigError

DEFAULT_PORT = 5555


def endpoint(host: str, port: int | str | None = None) -> str:
    """A ZeroMQ address ``tcp://host:port`` from ``h``, ``h:1``, ``tcp://h``, ``tcp://h:1``, ``[::1]:1`` and a port.

    Raises:
        ConfigError: for another scheme, a port that is no number within 1..65535, or two different ports.
    """
    text = host.strip()
    if "://" not in text:
        bare = text.startswith("[") or text.count(":") <= 1
        text = f"tcp://{text}" if bare else f"tcp://[{text}]"
    try:
        parts = urlsplit(text)
        in_host = parts.port
    except ValueError as exc:
        raise ConfigError(f"server address {host!r}: {exc}; expected tcp://HOST:PORT") from None
    if parts.scheme != "tcp" or not parts.hostname or parts.path.strip("/"):
        raise ConfigError(f"server address {host!r}: expected tcp://HOST:PORT")
    if in_host == 0:
        raise ConfigError(f"server address {host!r}: expected a port within 1..65535")
    given = parse_port(port) if port not in (None, "") else None
    if in_host and given and in_host != given:
        raise ConfigError(f"server address {host!r} and port {port}: they name two ports; give one")
    # ZeroMQ tries one address only, and "localhost" may resolve to ::1 first, where no server listens by default.
    name = "127.0.0.1" if parts.hostname == "localhost" else parts.hostname
    if ":" in name:
        name = f"[{name}]"
    return f"tcp://{name}:{in_host or given or DEFAULT_PORT}"


def parse_port(port: int | str | None) -> int:
    """A port number within 1..65535.

    Raises:
        ConfigError: for anything else.
    """
    try:
        number = int(str(port))
    except ValueError:
        number = 0
    if not 1 <= number <= 65535:
        raise ConfigError(f"port {port}: expected a number within 1..65535")
    return number

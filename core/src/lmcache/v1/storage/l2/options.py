"""An adapter's options: from the operator's map to a frozen struct, every mistake in one line.

An adapter declares ``class Options(msgspec.Struct, frozen=True, kw_only=True)``. A field is named as the JSON key
is, and its type says what is accepted::

    path: Folder                                           # required: it has no default
    threads: Annotated[int, msgspec.Meta(ge=1, le=64)] = 4
    direct: Literal["auto", "on", "off"] = "auto"
    part: Size = Size(4 << 20)                             # 4194304, "4MiB", "4 MB"

What two fields must agree on is checked in ``__post_init__`` by a ValueError whose text begins with the key.
"""

from __future__ import annotations

import difflib
import math
import os
import re
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args, get_origin

import msgspec

from lmcache.errors import ConfigError

__all__ = ["Folder", "Size", "read_options"]

T = TypeVar("T", bound=msgspec.Struct)

_SIZE = re.compile(r"(\d+(?:\.\d+)?) ?(?:([KMGT])(i?)B?|B)?")
_MAX_PATH = 4095  # Linux' own limit
_KINDS = {
    "array": "a list", "bool": "true or false", "float": "a number", "int": "a whole number", "object": "a map",
    "str": "text",
}  # fmt: skip
"""Types of JSON in an operator's words."""
_QUOTAS = "quotas_gb"
"""Of disk. That others lack it is no slip of the pen, so they say why."""
_SECRET = re.compile("pass|secret|token|credential", re.IGNORECASE)


class Size(int):
    """Bytes: a whole number of at least 0, or text such as ``64MiB`` (powers of 1024) or ``64MB`` (of 1000)."""


class Folder(str):
    """A directory of this host; ``~`` is the home of the user."""


def read_options(kind: str, struct: type[T], options: Mapping[str, Any]) -> T:
    """The ``struct`` that ``options`` describe; ``kind`` is the adapter's ``type``.

    Raises:
        ConfigError: for a key that is unknown (with the nearest) or missing, and for a value that is not
            accepted. Values of keys that sound like a secret are not shown.
    """
    fields = {field.encode_name: field for field in msgspec.structs.fields(struct)}
    values: dict[str, Any] = {}
    for key, value in options.items():
        field = fields.get(key)
        if field is None and key == _QUOTAS:
            raise ConfigError(
                _line(
                    kind,
                    f"{key}: nobody counts here what one account has; limit accounts in l1 or in type disk",
                )
            )
        if field is None:
            close = difflib.get_close_matches(str(key), fields, 1)
            meant = f"did you mean {close[0]}?" if close else f"expected one of {', '.join(fields) or 'none'}"
            raise ConfigError(_line(kind, f"no such option {key!r}; {meant}"))
        try:
            values[field.name] = _read(value, field.type)
        except (msgspec.ValidationError, ValueError) as exc:
            shown = "…" if _SECRET.search(key) or "@" in repr(value) else repr(value)  # user:password@host
            raise ConfigError(_line(kind, f"{key}={shown}: {_expected(field.type, exc)}")) from None
    missing = [name for name, field in fields.items() if field.required and name not in options]
    if missing:
        raise ConfigError(_line(kind, f"{', '.join(missing)}: missing, expected in the options"))
    try:
        return struct(**values)
    except ValueError as exc:
        raise ConfigError(_line(kind, str(exc))) from None


def _line(kind: str, text: str) -> str:
    return f"--l2-adapter {kind}: " + " ".join(text.split())


def _read(value: Any, kind: Any) -> Any:
    found = msgspec.convert(value, kind, dec_hook=_convert)
    if isinstance(found, float) and not math.isfinite(found):
        raise ValueError("expected a finite number")
    return found


def _convert(kind: type[Any], value: Any) -> Any:
    if kind is Folder:
        if not isinstance(value, str) or not value.strip() or "\0" in value or len(value) > _MAX_PATH:
            raise ValueError("expected a directory, e.g. /var/cache/lmcache")
        return Folder(os.path.expanduser(value))
    if kind is not Size:
        raise NotImplementedError(f"option of type {kind!r}")
    if isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return Size(value)
    match = _SIZE.fullmatch(value) if isinstance(value, str) else None
    if match is None:
        raise ValueError("expected bytes as a whole number, or text such as '64MiB' or '64MB'")
    number, unit, binary = match.groups()
    power = " KMGT".index(unit) if unit else 0
    return Size(round(float(number) * (1024 if binary else 1000) ** power))


def _expected(kind: Any, exc: Exception) -> str:
    """What would have been accepted, in words."""
    if get_origin(kind) is Literal:
        return f"expected one of {', '.join(map(str, get_args(kind)))}"
    text = re.sub(", got `.*?`", "", str(exc)).replace("`$", "`")
    text = re.sub("`(.*?)`", lambda kind: _KINDS.get(kind[1], kind[1]), text).replace(" - at ", " at ")
    return text[:1].lower() + text[1:]

"""What adapters for engines on the network share: the length of a header, secrets by name, faults in one line."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Sequence

from lmcache.errors import ConfigError, StartupError, bad_value
from lmcache.logging import init_logger
from lmcache.v1.storage.l2.adapter import AdapterError, StorageAdapter
from lmcache.v1.storage.l2.envelope import MAX_HEADER, PREFIX_BYTES, EnvelopeError, header_length

__all__ = ["Faults", "cut_header", "header_size", "is_whole", "probe_at_start", "reason", "secret"]

logger = init_logger(__name__)

_USER = re.compile(r"://[^\s/@]*@")


def header_size(total: int, payload: int) -> int:
    """Bytes of the header in a value of ``total`` bytes; 0 if such a value cannot be the object."""
    size = total - payload
    return size if PREFIX_BYTES <= size <= MAX_HEADER else 0


def is_whole(header: bytes | bytearray) -> bool:
    """Whether a header is as long as it says itself, so that the payload after it has the length that was wanted.

    One that does not begin like a header passes: whoever verifies it finds that it is damaged, and removes it.
    """
    try:
        return header_length(bytes(header[:PREFIX_BYTES])) == len(header)
    except EnvelopeError:
        return True


def cut_header(begin: bytes) -> bytes | None:
    """The header at the beginning of a value, if all of it is there."""
    try:
        size = header_length(begin[:PREFIX_BYTES])
    except EnvelopeError:
        return None
    return begin[:size] if size <= len(begin) else None


def probe_at_start(adapter: StorageAdapter, probe: Callable[[], object], required: bool, remedy: str) -> None:
    """See whether an engine answers.

    Raises:
        StartupError: it does not, and it is ``required``; the adapter is closed. Else that is one line in the log.
    """
    try:
        probe()
    except AdapterError as exc:
        if required:
            adapter.close()
            raise StartupError(
                f'--l2-adapter {exc}; {remedy}, or set "required": false to go without'
            ) from None
        logger.warning("%s; goes on without, and tries again later", exc)


class Faults:
    """Why objects of a batch failed. A batch of which nothing else is known is an error; else they are answers."""

    def __init__(self, where: str) -> None:
        self._where = where
        self._first = ""

    def add(self, text: str) -> None:
        """An object failed; the first reason of a batch is the one that is told."""
        self._first = self._first or text

    def settle(self, answers: Sequence[object]) -> None:
        """Raise AdapterError with the reason if there was a fault and every answer is None."""
        if self._first and all(answer is None for answer in answers):
            raise AdapterError(f"{self._where}: {reason(self._first)}")


def secret(option: str, variable: str) -> str | None:
    """The value of an environment variable that holds a secret; None where no variable is named.

    Raises:
        ConfigError: if the variable is named and not set.
    """
    if not variable:
        return None
    value = os.environ.get(variable)
    if value is None:
        raise ConfigError(
            bad_value(
                option, variable, "the name of an environment variable that is set", f"export {variable}=…"
            )
        )
    return value


def reason(exc: BaseException | str, limit: int = 300) -> str:
    """What an exception or a text says, in one line of at most ``limit`` characters that can be printed.

    It may be the word of a stranger on its way to a terminal. User and password of an URL are not shown.
    """
    text = _USER.sub("://***@", " ".join(str(exc).split())) or type(exc).__name__
    text = "".join(c if c.isprintable() else "?" for c in text[: limit + 1])
    return text if len(text) <= limit else f"{text[: limit - 1]}…"

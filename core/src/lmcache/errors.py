"""Errors a user or a caller can act on.

Every message is one line that names the thing, the value found, what was expected and, where there is one,
the remedy. ``exit_code`` is what a command line returns when the error ends the process.
"""

from __future__ import annotations

__all__ = ["ConfigError", "DeviceError", "LMCacheError", "LayoutError", "StartupError", "bad_value"]


class LMCacheError(Exception):
    """Base of every error LMCache raises on purpose."""

    exit_code: int = 1


class ConfigError(LMCacheError, ValueError):
    """A setting (flag, variable, config key) has a value that cannot be used."""

    exit_code = 2


class StartupError(LMCacheError):
    """A process could not claim what it needs to start: a port, memory, a file."""

    exit_code = 3


class DeviceError(LMCacheError, RuntimeError):
    """A device backend was asked for and cannot be delivered."""


class LayoutError(LMCacheError, ValueError):
    """A KV layout is unknown, does not fit the tensors given, or cannot serve the operation."""


def bad_value(name: str, value: object, expected: str, remedy: str = "") -> str:
    """One line for a value that cannot be used: ``name=value: expected …; remedy``.

    Args:
        name: The setting as the user wrote it, such as ``--port`` or ``LMCACHE_LOG_LEVEL``.
        value: What was found; shown with ``repr``.
        expected: What would have been accepted.
        remedy: What to do about it, where that is not obvious.
    """
    text = f"{name}={value!r}: expected {expected}"
    return " ".join((f"{text}; {remedy}" if remedy else text).split())

"""Loggers below the ``lmcache`` logger of the standard library.

Python's root logger is left alone. Lines go to stderr as ``LMCache LEVEL [time] message (name)``, unless the
application configured its root logger: then its handlers print our records, and ours keeps quiet, so that
no line appears twice. ``LMCACHE_LOG_LEVEL`` sets the level.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from contextlib import suppress

__all__ = ["info_once", "init_logger", "warn_once"]

_ROOT = "lmcache"
_FORMAT = "LMCache %(levelname)s [%(asctime)s] %(message)s (%(name)s)"
_LEVELS = {
    "DEBUG": logging.DEBUG,
    "INFO": logging.INFO,
    "WARNING": logging.WARNING,
    "WARN": logging.WARNING,
    "ERROR": logging.ERROR,
    "CRITICAL": logging.CRITICAL,
}

_lock = threading.Lock()
_configured = False
_said: set[tuple[str, str]] = set()


class _StderrHandler(logging.Handler):
    """Writes to whatever ``sys.stderr`` is now, so redirection after set-up is honoured."""

    def emit(self, record: logging.LogRecord) -> None:
        if logging.getLogger().handlers:
            return
        try:
            sys.stderr.write(self.format(record) + "\n")
            sys.stderr.flush()
        except Exception:
            with suppress(ValueError):  # it reports to sys.stderr, which somebody may have closed
                self.handleError(record)


def init_logger(name: str) -> logging.Logger:
    """Return the logger for ``name``; pass ``__name__``.

    A name outside the ``lmcache`` package (a plugin's module) becomes a child of the ``lmcache`` logger, so
    that one level and one format hold for all.
    """
    _configure_once()
    if name != _ROOT and not name.startswith(_ROOT + "."):
        name = f"{_ROOT}.{name}"
    return logging.getLogger(name)


def warn_once(logger: logging.Logger, key: str, msg: str, *args: object) -> None:
    """Log ``msg % args`` at WARNING the first time this logger meets ``key`` in this process."""
    _log_once(logger, logging.WARNING, key, msg, args)


def info_once(logger: logging.Logger, key: str, msg: str, *args: object) -> None:
    """Log ``msg % args`` at INFO the first time this logger meets ``key`` in this process."""
    _log_once(logger, logging.INFO, key, msg, args)


def _log_once(logger: logging.Logger, level: int, key: str, msg: str, args: tuple[object, ...]) -> None:
    with _lock:
        if (logger.name, key) in _said:
            return
        _said.add((logger.name, key))
    logger.log(level, msg, *args, stacklevel=3)


def _configure_once() -> None:
    global _configured
    with _lock:
        if _configured:
            return
        _configured = True
    root = logging.getLogger(_ROOT)
    handler = _StderrHandler()
    handler.setFormatter(logging.Formatter(_FORMAT))
    root.addHandler(handler)
    wanted = os.environ.get("LMCACHE_LOG_LEVEL", "").strip().upper()
    if root.level == logging.NOTSET:  # an application that chose a level beforehand keeps it
        root.setLevel(_LEVELS.get(wanted, logging.INFO))
    if wanted and wanted not in _LEVELS:
        root.warning("LMCACHE_LOG_LEVEL=%r: expected one of %s; using INFO", wanted, ", ".join(_LEVELS))

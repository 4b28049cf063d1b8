"""Find the subclasses that the modules of a package define.

Adding an implementation is then adding a module; no list has to be kept. A module that cannot be imported
costs itself only, and is always reported: a failure nobody hears of is a device that vanished.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from types import ModuleType
from typing import TypeVar

from lmcache.logging import init_logger

__all__ = ["discover_subclasses"]

logger = init_logger(__name__)

T = TypeVar("T")
OnError = Callable[[str, BaseException], None]


def discover_subclasses(
    package: ModuleType,
    base: type[T],
    module_filter: Callable[[str], bool] | None = None,
    levels: Sequence[int] = (1, 1),
    on_error: OnError | None = None,
    packages_only: bool = False,
) -> list[type[T]]:
    """Import modules below ``package`` and return the concrete strict subclasses of ``base`` they define.

    Args:
        package: An imported package.
        base: The class whose subclasses are wanted. A class counts where it is defined, not where it is
            imported, so no class is returned twice.
        module_filter: Called with a module's last name; only modules it accepts are imported.
        levels: ``(least, most)`` depth of the modules looked at; 1 is a direct child of ``package``.
        on_error: Called with the module's full name and what its import raised. SystemExit and the like
            count; KeyboardInterrupt passes through. Without it, a warning is logged.
        packages_only: Skip plain modules.

    Returns:
        Classes in order of module name, then of definition.

    Raises:
        ValueError: ``levels`` is not two integers with ``1 <= least <= most``.
    """
    if len(levels) != 2 or not 1 <= levels[0] <= levels[1]:
        raise ValueError(f"levels={levels!r}: expected (least, most) with 1 <= least <= most")
    report = on_error or _warn
    found: list[type[T]] = []
    for name, depth, is_package in _walk(package.__name__, package.__path__, 1, levels[1]):
        short = name.rpartition(".")[2]
        if depth < levels[0] or (packages_only and not is_package):
            continue
        if module_filter is not None and not module_filter(short):
            continue
        try:
            module = importlib.import_module(name)
        except KeyboardInterrupt:
            raise
        except BaseException as exc:
            report(name, exc)
            continue
        found.extend(_defined_in(module, base))
    return found


def _walk(prefix: str, path: Iterable[str], depth: int, most: int) -> Iterator[tuple[str, int, bool]]:
    """Yield (full name, depth, is package) without importing anything."""
    for info in sorted(pkgutil.iter_modules(path), key=lambda item: item.name):
        name = f"{prefix}.{info.name}"
        yield name, depth, info.ispkg
        if info.ispkg and depth < most:
            spec = info.module_finder.find_spec(name, None)
            if spec is not None and spec.submodule_search_locations:
                yield from _walk(name, spec.submodule_search_locations, depth + 1, most)


def _defined_in(module: ModuleType, base: type[T]) -> Iterator[type[T]]:
    for value in vars(module).values():
        if not inspect.isclass(value) or value.__module__ != module.__name__:
            continue
        if issubclass(value, base) and value is not base and not inspect.isabstract(value):
            yield value


def _warn(name: str, exc: BaseException) -> None:
    logger.warning("cannot import %s: %s: %s", name, type(exc).__name__, exc)

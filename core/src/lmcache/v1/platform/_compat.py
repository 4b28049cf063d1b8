"""May this plugin run on this core? Two of the three layers of the compatibility contract.

The range a distribution declares on ``lmcache`` (pip checks it at install time only, and not with
``--no-deps``), and the version of the plugin API that a class pins. The third, the native ABI, is checked
where native code is bound: ``DeviceOps.bind_native``.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from lmcache.v1.platform.base.device_spec import PLUGIN_API

if TYPE_CHECKING:
    from packaging.requirements import Requirement

__all__ = ["CORE", "Mismatch", "api_mismatch", "is_api_pin", "range_mismatch"]

CORE = "lmcache"
_UNKNOWN = "0+unknown"

_RELEASE = re.compile(r"\d+(\.\d+)*")
_CLAUSE = re.compile(r"(>=|<=|>|<)\s*(\d+(?:\.\d+)*)")
_PLAIN = re.compile(rf"{CORE}\s*(?P<clauses>{_CLAUSE.pattern}(\s*,\s*{_CLAUSE.pattern})*)?\s*", re.ASCII)
_COMPARE = {">=": operator.ge, "<=": operator.le, ">": operator.gt, "<": operator.lt}

#: What does not fit, and the command that mends it.
Mismatch = tuple[str, str]


def range_mismatch(requires: Iterable[str], distribution: str, core_version: str) -> Mismatch | None:
    """Whether a requirement on the core excludes the core that runs; None if none does."""
    lines = [line for line in requires if line.lower().lstrip().startswith(CORE)]
    if not lines or core_version == _UNKNOWN:  # run from a source tree: there is nothing to compare with
        return None
    for line in lines:
        if _plainly_allows(line, core_version):
            continue
        requirement = _requirement_on_core(line)
        if requirement is None or requirement.specifier.contains(core_version, prereleases=True):
            continue
        wanted = f"{CORE}{requirement.specifier}"
        return (
            f"it requires {wanted}, and {CORE} {core_version} runs",
            f"pip install '{wanted}'"
            if _core_is_older(requirement, core_version)
            else _upgrade(distribution),
        )
    return None


def _plainly_allows(line: str, core_version: str) -> bool:
    """Whether a requirement in its usual form (``lmcache>=1.2,<2``) allows a final release of the core.

    False says nothing. This spares the usual case the import of ``packaging``, which takes about as long as
    the scan of all installed distributions.
    """
    match = _PLAIN.fullmatch(line)
    if match is None or not _RELEASE.fullmatch(core_version):
        return False
    have = _release(core_version)
    clauses = _CLAUSE.findall(match["clauses"] or "")
    return all(_COMPARE[sign](have, _release(bound)) for sign, bound in clauses)


def _release(version: str) -> tuple[int, ...]:
    """The numbers of a version, so that 1.0 equals 1."""
    numbers = [int(part) for part in version.split(".")]
    while numbers and not numbers[-1]:
        numbers.pop()
    return tuple(numbers)


def _requirement_on_core(line: str) -> Requirement | None:
    # Imported here: a process without plugins never pays for it.
    from packaging.requirements import InvalidRequirement, Requirement
    from packaging.utils import canonicalize_name

    try:
        requirement = Requirement(line)
        applies = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
    except (InvalidRequirement, ValueError):  # pip would not have installed it by this line either
        return None
    return requirement if applies and canonicalize_name(requirement.name) == CORE else None


def _core_is_older(requirement: Requirement, core_version: str) -> bool:
    """Whether a newer core would do; else it is the plugin that is behind."""
    return any(
        clause.operator in (">=", ">", "==", "~=", "===")
        and not clause.contains(core_version, prereleases=True)
        and _is_below(core_version, clause.version)
        for clause in requirement.specifier
    )


def _is_below(core_version: str, bound: str) -> bool:
    from packaging.version import InvalidVersion, Version

    try:
        return Version(core_version) <= Version(bound.removesuffix(".*"))
    except InvalidVersion:
        return False


def is_api_pin(pin: Any) -> bool:
    """Whether ``pin`` is a pair of integers."""
    return isinstance(pin, tuple) and len(pin) == 2 and all(type(part) is int for part in pin)


def api_mismatch(pin: tuple[int, int], distribution: str, core_version: str) -> Mismatch | None:
    """Whether a plugin API that a class pins is not the one spoken here: same major, at most our minor."""
    major, minor = PLUGIN_API
    if pin[0] == major and pin[1] <= minor:
        return None
    note = f"it is written for plugin API {pin[0]}.{pin[1]}, and {CORE} {core_version} has {major}.{minor}"
    return note, f"pip install -U {CORE}" if pin > PLUGIN_API else _upgrade(distribution)


def _upgrade(distribution: str) -> str:
    return f"pip install -U {distribution}"

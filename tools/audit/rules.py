"""The rules: each looks at one thing and yields a sentence for every fault that it sees."""

from __future__ import annotations

import base64
import csv
import hashlib
import re
from collections.abc import Callable, Iterator, Mapping
from fnmatch import fnmatch
from pathlib import Path

from packaging.requirements import InvalidRequirement, Requirement

from audit.images import device_images
from audit.opened import OpenedWheel
from audit.policies import Policy
from lmcache.testing.wheel import glibc_of

__all__ = ["RULES", "audit", "facts"]

_HEADERS = (".h", ".hpp", ".cuh", ".inc")
_SOURCES = (".c", ".cc", ".cpp", ".cu", ".hip", ".cmake", ".o", ".a", ".fatbin", ".ptx", ".cubin", ".co")
_LICENSE_FILE = Path(__file__).resolve().parents[2] / "LICENSE"


def record(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """RECORD names every file once, with its hash."""
    rows = {row[0]: row[1] for row in csv.reader(wheel.text("RECORD").splitlines()) if row}
    for name in sorted({name for name in wheel.files if wheel.files.count(name) > 1}):
        yield f"{name}: more than once in the archive"
    for name in sorted(set(rows) ^ set(wheel.files)):
        yield f"{name}: {'in RECORD only' if name in rows else 'not in RECORD'}"
    for name in sorted(set(rows) & set(wheel.files)):
        kind, _, want = rows[name].partition("=")
        if not name.endswith("/RECORD") and (kind != "sha256" or want != _sha256(wheel.read(name))):
            yield f"{name}: RECORD's hash is not the file's"


def _sha256(data: bytes) -> str:
    return base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()


def packages(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """One top-level package, the plugin's own."""
    tops = {name.partition("/")[0] for name in wheel.files} - {wheel.info, policy.package}
    for top in sorted(tops):
        yield f"top level {top}: expected nothing but {policy.package}"


def stray(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """Nothing but Python, stubs and the module; no sources, no tests, and no headers, which are the core's."""
    for name in wheel.files:
        if not name.startswith(f"{policy.package}/") or name in wheel.natives(policy.module):
            continue
        if name.endswith(_HEADERS):
            yield f"{name}: a header; the SDK's headers are the core's to ship (lmcache.get_include())"
        elif name.endswith(_SOURCES):
            yield f"{name}: left over from the build; list what is installed in CMakeLists.txt"
        elif "/tests/" in name or not any(fnmatch(name.rpartition("/")[2], one) for one in policy.files):
            yield f"{name}: expected only {', '.join(policy.files)} and {policy.module}"


def module(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """The compiled module is there, for the Python that the tags name, and can be imported under its name."""
    found = wheel.natives(policy.module)
    if len(found) != 1:
        yield f"{found}: expected one {policy.module}*.so; a wheel without it is hollow, and must not be built"
    for name in found:
        suffix = name.removeprefix(policy.module)
        want = wheel.python.replace("cp", "cpython-")
        if f".{want}-" not in suffix and ".abi3." not in suffix:
            yield f"{name}: expected it to be for {want}, as the wheel's tag says"
        if f"PyInit_{policy.module.rpartition('/')[2]}".encode() not in wheel.read(name):
            yield f"{name}: no PyInit function in it; was the link with objects of another compiler?"


def tags(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """The tags of name and WHEEL agree, promise a manylinux, and promise no older a system than is needed."""
    told = {tag.rpartition("-")[2] for tag in wheel.tags()}
    if told != set(wheel.platforms):
        yield f"WHEEL says {sorted(told)} and the name {sorted(wheel.platforms)}"
    for platform in wheel.platforms:
        promised = glibc_of(f"x-x-{platform}")
        if not promised:
            yield f"{platform}: expected a manylinux tag; run auditwheel repair"
            continue
        if promised > policy.glibc:
            yield f"{platform}: asks for glibc {_dotted(promised)}: expected {_dotted(policy.glibc)} or older"
        for name, library in wheel.libraries.items():
            if not platform.endswith(f"_{library.machine}"):
                yield f"{name} is {library.machine}: {platform}"
            if (wanted := library.newest("GLIBC")) > promised:
                yield f"{name} needs glibc {_dotted(wanted)}, and {platform} promises {_dotted(promised)}"


def _dotted(version: tuple[int, ...]) -> str:
    return ".".join(map(str, version))


def needed(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """NEEDED libraries are the system's only."""
    for name, why in wheel.unreadable.items():
        yield f"{name}: {why}"
    for name, library in wheel.libraries.items():
        for one in library.needed:
            if any(fnmatch(one, pattern) for pattern in policy.needed):
                continue
            reasons = [why for why, names in policy.denied.items() if any(fnmatch(one, n) for n in names)]
            yield f"{name} needs {one}: {reasons[0] if reasons else f'expected only {policy.needed}'}"


def search(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """No RPATH: nothing is bundled, and nothing is searched for beside what the system knows."""
    for name, library in wheel.libraries.items():
        if library.search:
            yield f"{name}: RPATH {list(library.search)}: expected none"


def size(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """A ceiling, so that growth is noticed and decided on."""
    for what, found, most in (
        ("the wheel", wheel.path.stat().st_size, policy.wheel_bytes),
        ("unpacked", wheel.unpacked, policy.unpacked_bytes),
    ):
        if found > most:
            yield f"{what}: {found} bytes: expected at most {most}; is device code for a new target in it?"


def calls(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """No function that would stop every stream of the device."""
    for name in wheel.natives(policy.module):
        data = wheel.read(name)
        for call in policy.calls:
            if call.encode() + b"\0" in data:
                yield f"{name} knows {call}: expected waits for a stream or an event only"


def images(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """Device code for exactly the targets that the documents promise."""
    found: set[str] = set()
    for name in wheel.files:
        try:
            found.update(device_images(wheel.read(name)))
        except ValueError as exc:
            yield f"{name}: {exc}"
    for target in sorted(policy.images - found):
        yield f"no device code for {target}: was its compiler missing in the build?"
    for target in sorted(found - policy.images):
        yield f"device code for {target}, which the policy does not list"


def metadata(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """Name, and ranges of what it requires: LMCache evaluates its own when it loads the plugin."""
    name = re.sub(r"[-_.]+", "-", wheel.metadata.get("Name", "")).lower()
    if name != policy.distribution:
        yield f"Name {name!r}: expected {policy.distribution}"
    if not wheel.metadata.get("Requires-Python"):
        yield "no Requires-Python"
    wanted = list(_requirements(wheel))
    for one in policy.requires:
        mine = [row for row in wanted if row.name == one and "extra" not in str(row.marker or "")]
        if not any(row.specifier for row in mine):
            yield f"Requires-Dist {one}: expected a range, found {[str(row) for row in mine]}"
    for row in wanted:
        if any(part.operator == "==" for part in row.specifier):
            yield f"Requires-Dist {row}: pinned; the user could take no fix of it"


def _requirements(wheel: OpenedWheel) -> Iterator[Requirement]:
    for line in wheel.metadata.get_all("Requires-Dist", []):
        try:
            yield Requirement(line)
        except InvalidRequirement:
            continue  # the rule misses it, and says so


def entries(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """The entry points name classes of modules that are there."""
    found = dict(re.findall(r"^(\S+)\s*=\s*(\S+)$", wheel.text("entry_points.txt"), re.MULTILINE))
    if found != dict(policy.backends):
        yield f"entry points {found}: expected {dict(policy.backends)}"
    for value in policy.backends.values():
        file = f"{value.partition(':')[0].replace('.', '/')}.py"
        if file not in wheel.files:
            yield f"{value}: no {file} in the wheel"


def licence(wheel: OpenedWheel, policy: Policy) -> Iterator[str]:
    """The licence: its SPDX name in the metadata, its text in .dist-info."""
    told = wheel.metadata.get("License-Expression", "")
    if told != policy.license:
        yield f"License-Expression {told!r}: expected {policy.license!r}"
    files = wheel.metadata.get_all("License-File", [])
    if not files:
        yield "no License-File"
    for file in files:
        if not wheel.text(f"licenses/{file}"):
            yield f"License-File {file}: not in {wheel.info}/licenses"
    if files and wheel.text(f"licenses/{files[0]}") != _LICENSE_FILE.read_text(encoding="utf-8"):
        yield f"{files[0]}: not the text of the repository's LICENSE"


Rule = Callable[[OpenedWheel, Policy], Iterator[str]]

RULES: Mapping[str, Rule] = {
    rule.__name__: rule
    for rule in (
        record, packages, stray, module, tags, needed, search, size, calls, images, metadata, entries, licence,
    )
}  # fmt: skip


def audit(wheel: OpenedWheel, policy: Policy) -> list[str]:
    """Every fault, as `rule: what`."""
    return [f"{name}: {fault}" for name, rule in RULES.items() for fault in rule(wheel, policy)]


def facts(wheel: OpenedWheel) -> Iterator[str]:
    """What a person wants to see of a sound wheel."""
    yield f"{wheel.path.stat().st_size} bytes, {wheel.unpacked} unpacked, {len(wheel.files)} files"
    for name, library in wheel.libraries.items():
        targets = sorted(set(device_images(wheel.read(name))))
        yield f"{name}: glibc {_dotted(library.newest('GLIBC'))}, needs {', '.join(library.needed)}"
        yield f"{name}: device code for {', '.join(targets) or 'nothing'}"

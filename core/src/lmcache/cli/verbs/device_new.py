"""``lmcache device new``: the project of a new device backend, which passes its own tests at once."""

from __future__ import annotations

import argparse
import keyword
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from lmcache.cli.args import add_format
from lmcache.cli.output import clean, emit
from lmcache.errors import ConfigError, LMCacheError

if TYPE_CHECKING:
    import sys

    if sys.version_info >= (3, 11):
        from importlib.resources.abc import Traversable
    else:
        from importlib.abc import Traversable

HELP = "write the project of a new device backend: code, tests, packaging, CI"

STYLES = ("override", "native")
_NAME = re.compile(r"[a-z][a-z0-9]*(_[a-z0-9]+)*", re.ASCII)
_MAX_NAME = 32
_BUILT_IN = ("cpu",)

_WORK_OVERRIDE = """\
```
pip install -e '.[test]'
pytest
python -m build          # a wheel for every Python and platform
```
"""
_WORK_NATIVE = """\
A C++17 compiler is needed; CMake, Ninja and pybind11 come with the build.

```
pip install '.[test]'    # again after a change of the C++ code
pytest
pipx run cibuildwheel    # wheels to publish, one for each Python
```

`_native` is given addresses and integers and links no part of torch: a wheel serves every release of torch.
The copy in `csrc/module.cpp` is the host's. Replace its loops by a launch of your kernel on the current
stream, and let the device's tensors pass `_is_plain` in `ops.py`. Until then the torch baseline serves it.
"""

#: Style: what differs in the README, and the level at which the conformance kit is run.
_TEXTS = {
    "override": {"files": "", "level": "basic", "work": _WORK_OVERRIDE},
    "native": {
        "files": "| `csrc/` | the native module; `strided_copy.h` has the addressing |\n",
        "level": "native",
        "work": _WORK_NATIVE,
    },
}


def add(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments."""
    parser.add_argument("name", metavar="NAME", help="the backend's name: foo")
    parser.add_argument(
        "--torch-device",
        metavar="TYPE",
        help="torch's name of the device, as in torch.device(TYPE) and torch.TYPE (NAME)",
    )
    parser.add_argument(
        "--style",
        choices=STYLES,
        default=STYLES[0],
        help="override: methods in Python; native: also a C++ module (override)",
    )
    parser.add_argument("--directory", default=".", help="the folder to put the project's folder into (.)")
    add_format(parser)


def run(args: argparse.Namespace) -> int:
    """Write the files into a folder that was not there before."""
    name = _checked("NAME", args.name)
    device = name if args.torch_device is None else _checked("--torch-device", args.torch_device)
    project = Path(args.directory, f"lmcache-{name.replace('_', '-')}")
    files = write(project, args.style, values(name, args.style, device))
    data = {"project": str(project), "style": args.style, "files": files}
    text = f"{project}: {len(files)} files\nnext: cd {project} && pip install '.[test]' && pytest"
    emit(args.format, data, "\n".join(clean(line) for line in text.splitlines()))
    return 0


def values(name: str, style: str, device: str) -> dict[str, str]:
    """What replaces ``@key@`` in the templates."""
    import lmcache
    from lmcache.v1.platform.base.device_ops import NATIVE_ABI
    from lmcache.v1.platform.base.device_spec import PLUGIN_API

    running = re.match(r"(\d+)\.(\d+)", lmcache.__version__)
    major, minor = (int(running[1]), int(running[2])) if running and running[1] != "0" else PLUGIN_API
    return {
        "name": name,
        "device": device,
        "NAME": name.upper(),
        "Name": "".join(part.capitalize() for part in name.split("_")),
        "package": f"lmcache_{name}",
        "dist": f"lmcache-{name.replace('_', '-')}",
        "requires": f"lmcache>={major}.{minor},<{major + 1}",
        "api": str(PLUGIN_API),
        "abi": str(NATIVE_ABI),
        **_TEXTS[style],
    }


def write(project: Path, style: str, words: Mapping[str, str]) -> list[str]:
    """Write the project; the files' paths in it.

    Raises:
        ConfigError: if something is there already; it is left alone.
        LMCacheError: if a file cannot be written; nothing is left behind then.
    """
    try:
        project.parent.mkdir(parents=True, exist_ok=True)
    except OSError as exc:
        raise ConfigError(f"--directory {project.parent}: expected a folder ({exc.strerror})") from None
    try:
        project.mkdir()
    except FileExistsError:
        raise ConfigError(f"{project}: is there already; choose another NAME or --directory") from None
    except OSError as exc:
        raise LMCacheError(f"{project}: cannot be made ({exc.strerror})") from None
    try:
        written = []
        for path, template in _templates(style, words):
            target = project / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_filled(template.read_text(encoding="utf-8"), words), encoding="utf-8")
            written.append(path)
    except BaseException as exc:
        shutil.rmtree(project, ignore_errors=True)
        if isinstance(exc, OSError):
            raise LMCacheError(f"{project}: cannot be written ({exc.strerror})") from None
        raise
    return sorted(written)


def _checked(what: str, name: str) -> str:
    if not _NAME.fullmatch(name) or len(name) > _MAX_NAME or keyword.iskeyword(name):
        raise ConfigError(
            f"{what} {name!r}: expected a lowercase identifier of at most {_MAX_NAME} characters, no keyword,"
            " such as foo or foo_2; NAME names the backend, the package and, without --torch-device, torch's device"
        )
    if name in _BUILT_IN:
        raise ConfigError(f"{what} {name!r}: expected a name of your own; that backend is part of lmcache")
    return name


def _templates(style: str, words: Mapping[str, str]) -> Iterator[tuple[str, Traversable]]:
    """Path in the project and template of every file."""
    from importlib.resources import files

    root = files("lmcache.cli.scaffold")
    for part in ("common", style):
        for path, template in _walk(root / part):
            names = [_named(name, words) for name in path]
            yield "/".join(names).removesuffix(".tmpl"), template


def _walk(folder: Traversable, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], Traversable]]:
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            yield from _walk(entry, (*path, entry.name))
        elif entry.name.endswith(".tmpl"):
            yield (*path, entry.name), entry


def _named(name: str, words: Mapping[str, str]) -> str:
    if name == "package":
        return f"src/{words['package']}"
    return f".{name.removeprefix('dot-')}" if name.startswith("dot-") else name


def _filled(text: str, words: Mapping[str, str]) -> str:
    return re.sub(r"@(\w+)@", lambda found: words[found[1]], text)

"""The zoo: one row per wheel, each with one fault (or what looks like one and is none).

The wheel of row ``NAME`` is ``lmcache-zoo-NAME`` 1.0 with the package ``zoo_NAME``, whose entry point of the
same name must come to the state and reason code that the row says. All stand beside ``good``, a healthy one.
"""

from __future__ import annotations

import shutil
import subprocess
import sysconfig
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from zoo import wheels

_SPEC = """
from lmcache.v1.platform.base.device_spec import DeviceSpec


class Spec(DeviceSpec):
    device_type = "{name}"
    backend_name = "{name}"
    torch_module_name = "good"

    def is_available(self):
        return True
"""

# The plain class attributes above are what many a vendor writes instead of properties; both are fine.

_NO_RUN = "raise SystemExit('this module must not be imported')\n"

_CRASH = """
    def is_available(self):
        import ctypes, os
        ctypes.CDLL(os.path.join(os.path.dirname(__file__), "crash.so")).crash()
"""

_UNDEFINED_C = """
extern int no_such_function(void);
void *PyInit__native(void) { return (void *)(long)no_such_function(); }
"""

_CRASH_C = "void crash(void) { *(volatile int *)0 = 1; }\n"

_OPS = """
    @property
    def ops_cls(self):
        from .ops import Ops
        return Ops
"""

_OPS_MODULE = """
from lmcache.v1.platform.base.device_ops import DeviceOps


class Ops(DeviceOps):
    def ensure_native(self):
        from . import _native
        self.bind_native(_native)
"""


def spec(name: str, more: str = "") -> str:
    """Source of a healthy spec called ``name``, with ``more`` in its class or after it."""
    return _SPEC.format(name=name) + more


@dataclass(frozen=True)
class Animal:
    """One wheel."""

    name: str
    code: str
    """Reason code of its record, where it may run."""
    source: str = ""
    """``__init__.py``; a healthy spec if empty."""
    files: Mapping[str, str] = field(default_factory=dict)
    """Other files of its package; what ends in ``.c`` is compiled to ``.so``."""
    entry: str = ""
    """Name of its entry point, where it is not the animal's."""
    value: str = ""
    requires: Sequence[str] = ("lmcache",)
    damage: str = ""
    """What its ``entry_points.txt`` holds after it was installed, since pip would not install it so."""
    dangerous: bool = False
    """It takes the process with it, so the process that uses the core must not load it."""
    doctor: str = ""
    """What ``device doctor`` finds, where that is more than ``device list`` can see."""

    @property
    def package(self) -> str:
        return f"zoo_{self.name.replace('-', '_')}"

    @property
    def distribution(self) -> str:
        return f"lmcache-zoo-{self.name}"

    @property
    def backend(self) -> str:
        return self.entry or self.name

    def build(self, folder: Path) -> Path:
        """Its wheel."""
        value = self.value or f"{self.package}:Spec"
        points = f"[{wheels.GROUP}]\n{self.backend} = {value}\n"
        files: dict[str, str | bytes] = {f"{self.package}/__init__.py": self.source or spec(self.name)}
        for name, content in self.files.items():
            path = f"{self.package}/{name}"
            if name.endswith(".c"):
                files[path.removesuffix(".c") + ".so"] = compiled(folder, name, content)
            else:
                files[path] = content
        native = any(name.endswith(".c") for name in self.files)
        platform = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        tag = f"py3-none-{platform}" if native else "py3-none-any"
        return wheels.build(folder, self.distribution, files, points, self.requires, tag=tag)


def compiler() -> str | None:
    """A C compiler, if there is one."""
    return shutil.which("cc") or shutil.which("gcc")


def compiled(folder: Path, name: str, source: str) -> bytes:
    """A shared library. Symbols it lacks are found missing when it is loaded, not when it is linked."""
    cc = compiler()
    assert cc, "callers leave out what needs a compiler where there is none"
    (folder / name).write_text(source)
    out = folder / f"{name}.so"
    command = [cc, "-shared", "-fPIC", "-O0", "-o", str(out), str(folder / name)]
    subprocess.run(command, check=True, timeout=60)
    return out.read_bytes()


GOOD = Animal("good", "chosen")

ANIMALS = (
    Animal("raises-at-import", "import-raised", "raise RuntimeError('the driver is\\ntoo old')\n"),
    Animal("misses-a-module", "import-raised", "import zoo_runtime_that_is_not_installed\n"),
    Animal("exits-at-import", "import-exited", "raise SystemExit(3)\n"),
    Animal(
        "raises-no-exception",
        "import-raised",
        "class Odd(BaseException):\n    def __str__(self): raise RuntimeError\nraise Odd\n",
    ),
    Animal("sleeps-at-import", "import-timeout", "import time\ntime.sleep(30)\n", dangerous=True),
    Animal(
        "asks-for-the-device",
        "import-asks-for-device",
        "from lmcache import torch_dev\n" + spec("asks-for-the-device"),
    ),
    Animal("has-no-such-class", "entry-point", value="zoo_has_no_such_class:Nobody"),
    Animal(
        "is-an-instance", "not-a-class",
        spec("is-an-instance", "\nspec = Spec()\n"), value="zoo_is_an_instance:spec",
    ),
    Animal(
        "is-a-function", "not-a-class",
        spec("x", "\ndef make(): return Spec()\n"), value="zoo_is_a_function:make",
    ),
    Animal("is-a-module", "not-a-class", spec("is-a-module"), value="zoo_is_a_module"),
    Animal(
        "is-the-base", "not-a-device-spec",
        _NO_RUN, value="lmcache.v1.platform.base.device_spec:DeviceSpec",
    ),
    Animal("is-something-else", "not-a-device-spec", "class Spec: pass\n"),
    Animal(
        "raises-in-constructor",
        "constructor",
        spec("raises-in-constructor", "\n    def __init__(self): raise OSError('no permission')\n"),
    ),
    Animal(
        "needs-arguments", "constructor",
        spec("needs-arguments", "\n    def __init__(self, device): pass\n"),
    ),
    Animal(
        "property-raises",
        "property",
        spec("property-raises", "\n    @property\n    def device_type(self): raise KeyError('FOO_HOME')\n"),
    ),
    Animal("name-mismatch", "name-mismatch", spec("another-name")),
    Animal("uppercase", "name", spec("UPPERCASE"), entry="UPPERCASE"),
    Animal("empty-name", "name", spec("")),
    Animal("name-is-a-number", "name", spec("x", "\n    backend_name = 7\n")),
    Animal(
        "torch-module-is-none", "torch-module-name",
        spec("torch-module-is-none", "\n    torch_module_name = None\n"),
    ),
    Animal("same-as-good", "duplicate", _NO_RUN, entry="good"),
    Animal("same-as-cpu", "duplicate-built-in", _NO_RUN, entry="cpu"),
    Animal("wants-newer-core", "core-version", _NO_RUN, requires=("lmcache>=99",)),
    Animal("wants-older-core", "core-version", _NO_RUN, requires=("numpy>1", "LMCache[cpu]>=0.4,<0.6")),
    Animal("wants-newer-api", "plugin-api", spec("wants-newer-api", "\n    plugin_api = (99, 0)\n")),
    Animal("wants-older-api", "plugin-api", spec("wants-older-api", "\n    plugin_api = (0, 7)\n")),
    Animal("wants-no-api", "plugin-api-pin", spec("wants-no-api", "\n    plugin_api = '1.0'\n")),
    Animal(
        "unreadable-metadata", "metadata", _NO_RUN, entry="lmcache-zoo-unreadable-metadata",
        damage=f"[{wheels.GROUP}]\nthis line has no equals sign\n",
    ),
    Animal("not-here", "not-on-this-host", spec("not-here", "\n    def is_available(self): return False\n")),
    Animal(
        "probe-raises",
        "probe-raised",
        spec("probe-raises", "\n    def is_available(self): raise SystemExit('no license')\n"),
    ),
    Animal(
        "torch-lacks-it", "no-torch-module",
        spec("torch-lacks-it", "\n    torch_module_name = 'lacks_it'\n"),
    ),
    Animal("undefined-symbol", "import-raised", "from . import _native\n", {"_native.c": _UNDEFINED_C}),
    Animal(
        "undefined-symbol-later", "usable", spec("undefined-symbol-later", _OPS),
        {"_native.c": _UNDEFINED_C, "ops.py": _OPS_MODULE}, doctor="undefined symbol: no_such_function",
    ),
    Animal(
        "wants-newer-abi", "usable", spec("wants-newer-abi", _OPS),
        {"_native.py": "LMCACHE_NATIVE_ABI = 99\n", "ops.py": _OPS_MODULE},
        doctor="built for native ABI 99, and this lmcache has native ABI 1; install a newer lmcache",
    ),
    Animal(
        "crashes-in-probe", "probe-crashed", spec("crashes-in-probe", _CRASH),
        {"crash.c": _CRASH_C}, dangerous=True, doctor="killed by SIGSEGV while is_available() ran",
    ),
    Animal(
        "crashes-at-import", "import-crashed",
        "import ctypes, os\nctypes.CDLL(os.path.join(os.path.dirname(__file__), 'crash.so')).crash()\n",
        {"crash.c": _CRASH_C}, dangerous=True,
    ),
    Animal(
        "forks-and-crashes", "import-crashed",
        "import os, time\nif os.fork():\n    os.abort()\ntime.sleep(30)\nos._exit(0)\n", dangerous=True,
    ),
    Animal(
        "writes-everywhere", "usable",
        "import os, stat\nfor fd in range(3, 64):\n    try:\n"
        "        if stat.S_ISFIFO(os.fstat(fd).st_mode): os.write(fd, b'5\\n{}\\n\\xff')\n"
        "    except OSError: pass\n" + spec("writes-everywhere"),
    ),
    Animal("shuts-stderr", "usable", "import sys\nsys.stderr.close()\n" + spec("shuts-stderr")),
    Animal(
        "sets-variables", "usable",
        "import os\nos.environ['LMCACHE_DEVICE_BACKEND'] = 'nonsense'\n" + spec("sets-variables"),
        dangerous=True,
    ),
    Animal(
        "imports-lmcache", "usable",
        "import lmcache\nimport lmcache.v1.platform\n"
        "from lmcache.v1.platform.base.cache_context import BaseCacheContext\n"
        "from lmcache.v1.platform.base.device_ops import DeviceOps\n"
        "from lmcache.v1.platform.base.event_ipc import DefaultEventIPCBackend\n"
        "from lmcache.v1.platform.base.ipc_wrapper import DeviceIPCWrapper\n"
        "from lmcache.v1.platform.base.pin_memory import PinMemoryBackend\n"
        "from lmcache.v1.platform.base_cache_context import BaseCacheContext as Same\n"
        "assert Same is BaseCacheContext\n" + spec("imports-lmcache"),
    ),
)  # fmt: skip

#: Enough of torch for discovery and for a copy of three elements, with a device module for ``good``.
FAKE_TORCH = """
from types import SimpleNamespace

__version__ = "0"
good = SimpleNamespace(is_available=lambda: True, synchronize=lambda device=None: None)
foo = SimpleNamespace(is_available=lambda: True, synchronize=lambda: None)


class tensor:
    def __init__(self, values):
        self._values = list(values)

    def to(self, device):
        return tensor(self._values)

    def tolist(self):
        return self._values
"""

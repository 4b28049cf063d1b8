"""Finding this backend costs next to nothing, in processes that never use it too."""

from __future__ import annotations

import json
import subprocess
import sys

IMPORT = """
import json, sys
import lmcache.v1.platform.base.device_spec
before = set(sys.modules)
from lmcache_musa_style.spec import MusaStyleDeviceSpec
spec = MusaStyleDeviceSpec()
spec.backend_name, spec.device_type, spec.torch_module_name
print(json.dumps(sorted(set(sys.modules) - before)))
"""


def test_importing_and_making_the_spec_imports_nothing_else() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120, check=True)
    assert json.loads(done.stdout) == ["lmcache_musa_style", "lmcache_musa_style.spec"]

"""Write csrc/kernels.spv anew: the SPIR-V that the SYCL runtime's compiler makes of csrc/kernels.cpp and the SDK.

    python ci/make_spirv.py

Needs what the tests need: a built and installed lmcache-xpu of this tree, and a SYCL device of any kind. Rebuild the
wheel afterwards. The bytes hang on the version of the runtime: use the one that pyproject.toml asks for.
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

from lmcache_xpu import native

# The .icd file of intel-opencl-rt names a folder that is not there.
DRIVER = Path(sys.prefix, "lib", "libintelocl.so")
if DRIVER.is_file():
    os.environ.setdefault("OCL_ICD_FILENAMES", str(DRIVER))

TARGET = Path(__file__).resolve().parents[1] / "csrc" / "kernels.spv"


def main() -> None:
    module = native.load()
    queue = module.queue_create(0)
    made = module.compile_spirv(queue)
    state = "unchanged" if TARGET.is_file() and TARGET.read_bytes() == made else "written"
    TARGET.write_bytes(made)
    sys.stdout.write(f"{TARGET.name}: {len(made)} bytes, {state}\n")


if __name__ == "__main__":
    main()

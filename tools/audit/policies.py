"""What the wheel of each plugin must be: one row each."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["POLICIES", "Policy"]

SYSTEM = ("libc.so.6", "libm.so.6", "libdl.so.2", "libpthread.so.0", "librt.so.1", "ld-linux-*.so.*")
CPP = ("libstdc++.so.6", "libgcc_s.so.1")
TORCH = ("libtorch*", "libc10*", "libshm*")
CUDA = ("libcuda.so*", "libcudart*", "libnv*", "libcublas*", "libnccl*")
SYCL = (
    "libsycl*",
    "libur_*",
    "libumf*",
    "libze_*",
    "libOpenCL*",
    "libintelocl*",
    "libimf*",
    "libsvml*",
    "libintlc*",
)
GAUDI = ("libSynapse*", "libhl-thunk*", "libhcl*", "libhabana*")
NEURON = ("libnrt*", "libnccom*", "libneuron*", "libtorchneuron*")
ROCM = ("libamdhip64*", "libhsa*", "libroc*", "librccl*")


@dataclass(frozen=True)
class Policy:
    """What may and what must be in a wheel."""

    distribution: str
    package: str
    """The only top-level package."""
    module: str
    """The compiled module, without what Python appends to the name."""
    backends: Mapping[str, str]
    """Entry points of `lmcache.device_plugins`."""
    needed: tuple[str, ...]
    """Libraries that it may need. Whatever else it needs is a fault."""
    denied: Mapping[str, tuple[str, ...]]
    """Why some may not be needed, for the message; also what `auditwheel repair` must never copy into a wheel."""
    images: frozenset[str]
    """Targets of device code: exactly these."""
    glibc: tuple[int, ...]
    """The newest glibc that a published wheel may ask for: that of the image it is built in."""
    wheel_bytes: int
    unpacked_bytes: int
    calls: tuple[str, ...] = ()
    """Functions of the driver, looked up by name, that the module must not know: they wait for the whole device."""
    requires: tuple[str, ...] = ("lmcache", "torch")
    """Distributions that it must require, with a range."""
    license: str = "Apache-2.0"
    files: tuple[str, ...] = ("*.py", "*.pyi", "py.typed")
    """What else may be in the package, by the end of the name."""

    def excludes(self) -> tuple[str, ...]:
        """Libraries that belong to others."""
        return tuple(pattern for patterns in self.denied.values() for pattern in patterns)


POLICIES: Mapping[str, Policy] = {
    "cuda": Policy(
        distribution="lmcache-cuda",
        package="lmcache_cuda",
        module="lmcache_cuda/_native",
        backends={"cuda": "lmcache_cuda.spec:CudaDeviceSpec", "rocm": "lmcache_cuda.spec:RocmDeviceSpec"},
        needed=(*SYSTEM, *CPP),
        denied={
            "torch's own, which change with every release of it": TORCH,
            "the CUDA runtime's or the driver's, which are opened at run time or not used": CUDA,
            "ROCm's, which are opened at run time": ROCM,
        },
        images=frozenset({"sm_80", "sm_90", "sm_100", "sm_120", "compute_90", "gfx90a", "gfx942"}),
        glibc=(2, 28),
        calls=("cuCtxSynchronize", "cudaDeviceSynchronize", "hipDeviceSynchronize", "hipCtxSynchronize"),
        wheel_bytes=2 << 20,
        unpacked_bytes=6 << 20,
    ),
    "xpu": Policy(
        distribution="lmcache-xpu",
        requires=("lmcache",),  # the default torch is built for CUDA
        package="lmcache_xpu",
        module="lmcache_xpu/_native",
        backends={"xpu": "lmcache_xpu.spec:XpuDeviceSpec"},
        # The runtime by the name of its major version: torch's build for XPU has it in the process already.
        needed=(*SYSTEM, *CPP, "libsycl.so.9"),
        denied={
            "torch's own, which change with every release of it": TORCH,
            "of Intel's runtime, which is under a licence of its own and comes with torch": SYCL,
        },
        images=frozenset({"spirv-1.4"}),
        glibc=(2, 28),
        wheel_bytes=1 << 20,
        unpacked_bytes=3 << 20,
    ),
    "hpu": Policy(
        distribution="lmcache-hpu",
        requires=("lmcache",),  # the default torch is built for CUDA
        package="lmcache_hpu",
        module="lmcache_hpu/_native",
        backends={"hpu": "lmcache_hpu.spec:HpuDeviceSpec"},
        needed=(*SYSTEM, *CPP),
        denied={
            "torch's own, which change with every release of it": TORCH,
            "of Gaudi's software suite, which torch alone uses": GAUDI,
        },
        images=frozenset(),  # the device is reached through torch
        glibc=(2, 28),
        wheel_bytes=1 << 20,
        unpacked_bytes=3 << 20,
    ),
    "neuron": Policy(
        distribution="lmcache-neuron",
        requires=("lmcache",),  # the default torch is built for CUDA
        package="lmcache_neuron",
        module="lmcache_neuron/_native",
        backends={"neuron": "lmcache_neuron.spec:NeuronDeviceSpec"},
        needed=(*SYSTEM, *CPP),
        denied={
            "torch's own, which change with every release of it": TORCH,
            "of the Neuron runtime, which is opened at run time or not used": NEURON,
        },
        images=frozenset(),  # the device is reached through torch
        glibc=(2, 28),
        wheel_bytes=1 << 20,
        unpacked_bytes=3 << 20,
    ),
}

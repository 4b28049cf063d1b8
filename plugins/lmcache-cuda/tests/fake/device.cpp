// Devices, contexts, errors, modules and launches.
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <mutex>
#include <set>

#include "fake.h"

namespace {

constexpr u64 kContext = 0xc0de0000; // of device 0
std::atomic<bool> started{false};

#ifdef FAKE_HIP
thread_local int current = 0;
thread_local int last = 0;
#else
thread_local u64 context = 0;
#endif

long number(const char *name, long otherwise)
{
    const char *given = std::getenv(name);
    return given ? std::atol(given) : otherwise;
}

bool is_device(int device) { return device >= 0 && device < fake::devices(); }

} // namespace

namespace fake {

#ifdef FAKE_HIP
int current_device() { return current; }
#else
int current_device() { return context ? static_cast<int>(context - kContext) : -1; }
#endif

} // namespace fake

API(cuInit, hipInit)(unsigned int)
{
    ENTER();
    if (!fake::devices())
        return LMC_NO_DEVICE;
    started = true;
    return 0;
}

API(cuDriverGetVersion, hipDriverGetVersion)(int *out)
{
    ENTER();
    *out = static_cast<int>(number("FAKE_DRIVER_VERSION", NAME(13000, 60443484)));
    return 0;
}

API(cuDeviceGetCount, hipGetDeviceCount)(int *out)
{
    ENTER();
    *out = fake::devices();
    return started ? 0 : 3;
}

API(cuDeviceGet, hipDeviceGet)(int *out, int ordinal)
{
    ENTER();
    *out = ordinal;
    return is_device(ordinal) ? 0 : 101;
}

API(cuDeviceGetAttribute, hipDeviceGetAttribute)(int *out, int which, int device)
{
    ENTER();
    const long capability = number("FAKE_CAPABILITY", 90);
    if (!is_device(device))
        return 101;
    *out = 1;
    if (which == NAME(75, 23))
        *out = static_cast<int>(capability / 10);
    else if (which == NAME(76, 61))
        *out = static_cast<int>(capability % 10);
    else if (which == NAME(18, 16))
        *out = 0;
    else if (which != NAME(99, 10013) && which != NAME(102, 10013) && which != NAME(103, 10013) && which != NAME(122, 10013))
        return INVALID_VALUE;
    return 0;
}

API(cuDeviceGetName, hipDeviceGetName)(char *out, int room, int device)
{
    ENTER();
    std::snprintf(out, static_cast<size_t>(room), "Fake GPU %d", device);
    return is_device(device) ? 0 : 101;
}

API(cuDeviceGetUuid_v2, hipDeviceGetUuid)(void *out, int device)
{
    ENTER();
    for (int at = 0; at < 16; ++at)
        static_cast<unsigned char *>(out)[at] = static_cast<unsigned char>(0xf0 + at * 16 + device);
    return is_device(device) ? 0 : 101;
}

API(cuDeviceTotalMem_v2, hipDeviceTotalMem)(size_t *out, int device)
{
    ENTER();
    *out = static_cast<size_t>(number("FAKE_MEMORY", 8L << 30));
    return is_device(device) ? 0 : 101;
}

API(cuDeviceGetPCIBusId, hipDeviceGetPCIBusId)(char *out, int room, int device)
{
    ENTER();
    std::snprintf(out, static_cast<size_t>(room), "0000:%02x:00.0", 0x1b + device);
    return is_device(device) ? 0 : 101;
}

// ------------------------------------------------------------------------------------------------------- contexts
#ifdef FAKE_HIP
EXPORT int hipGetDevicePropertiesR0600(void *out, int device)
{
    ENTER();
    std::memset(out, 0, 1472);
    std::strcpy(static_cast<char *>(out) + 1160, "gfx942:sramecc+:xnack-");
    return is_device(device) ? 0 : 101;
}

EXPORT int hipGetDevice(int *out)
{
    ENTER();
    *out = current;
    return 0;
}

EXPORT int hipSetDevice(int device)
{
    ENTER();
    if (!is_device(device))
        return 101;
    current = device;
    return 0;
}

EXPORT int hipGetLastError()
{
    const int code = last;
    last = 0;
    fake::enter("hipGetLastError");
    return code;
}

EXPORT const char *hipGetErrorString(int code) { return code == 2 ? "out of memory" : code == 801 ? "not supported" : "an error"; }
#else
EXPORT int cuDevicePrimaryCtxRetain(u64 *out, int device)
{
    ENTER();
    *out = kContext + static_cast<u64>(device);
    return is_device(device) ? 0 : 101;
}

EXPORT int cuCtxGetCurrent(u64 *out)
{
    ENTER();
    *out = context;
    return 0;
}

EXPORT int cuCtxSetCurrent(u64 given)
{
    ENTER();
    context = given;
    return 0;
}

EXPORT int cuCtxGetDevice(int *out)
{
    ENTER();
    *out = fake::current_device();
    return context ? 0 : INVALID_CONTEXT;
}

EXPORT int cuGetErrorString(int code, const char **out)
{
    *out = code == 2                 ? "out of memory"
           : code == 100             ? "no CUDA-capable device is detected"
           : code == 201             ? "invalid device context"
           : code == LMC_NO_BINARY   ? "no kernel image is available for execution on the device"
           : code == LMC_PTX_TOO_NEW ? "the provided PTX was compiled with an unsupported toolchain."
                                     : "an error of the fake driver";
    return 0;
}
#endif

// -------------------------------------------------------------------------------------------------------- modules
namespace {

struct Kernel {
    const char *name;
    size_t size;
    void (*run)(const void *parameters, const lmc_grid &at);
};

#define RUN(name, type, body) \
    void run_##name(const void *given, const lmc_grid &at) { body(*static_cast<const type *>(given), at); }
LMC_KERNELS(RUN)
#undef RUN

const Kernel kernels[] = {
#define ROW(name, type, body) {#name, sizeof(type), run_##name},
    LMC_KERNELS(ROW)
#undef ROW
};
constexpr int kKernels = sizeof kernels / sizeof kernels[0];

constexpr u64 kModule = 0x40000000, kFunction = 0x50000000; // + 256 * device, + kernel

void run_grid(const Kernel &kernel, const std::string &parameters, const unsigned int *grid)
{
    for (unsigned int z = 0; z < grid[2]; ++z)
        for (unsigned int y = 0; y < grid[1]; ++y)
            for (unsigned int x = 0; x < grid[0]; ++x)
                for (unsigned int thread = 0; thread < grid[3]; ++thread)
                    kernel.run(parameters.data(),
                               lmc_grid{static_cast<int>(x), static_cast<int>(y), static_cast<int>(z),
                                        static_cast<int>(thread), static_cast<int>(grid[0]),
                                        static_cast<int>(grid[1]), static_cast<int>(grid[2]),
                                        static_cast<int>(grid[3])});
}

} // namespace

API(cuModuleLoadData, hipModuleLoadData)(u64 *out, const void *image)
{
    ENTER();
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    if (std::memcmp(image, NAME("\x50\xed\x55\xba", "__CLANG_OFFLOAD_BUNDLE__"), NAME(4, 24)))
        return LMC_INVALID_IMAGE;
    *out = kModule + 256 * static_cast<u64>(fake::current_device());
    return 0;
}

API(cuModuleGetFunction, hipModuleGetFunction)(u64 *out, u64 module, const char *name)
{
    ENTER();
    for (int at = 0; at < kKernels; ++at) {
        if (std::strcmp(name, kernels[at].name))
            continue;
        *out = kFunction + (module - kModule) + static_cast<u64>(at);
        return 0;
    }
    return NOT_FOUND;
}

API(cuLaunchKernel, hipModuleLaunchKernel)
(u64 function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by, unsigned int bz,
 unsigned int shared, u64 stream, void **parameters, void **extra)
{
    ENTER();
    const u64 offset = function - kFunction;
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    if (function < kFunction || offset % 256 >= kKernels || offset / 256 != static_cast<u64>(fake::current_device()))
        return INVALID_HANDLE;
    if (!gx || !gy || !gz || gy > 65535 || gz > 65535 || !bx || bx > LMC_MOST_THREADS || by != 1 || bz != 1 || shared ||
        extra || !parameters || !parameters[0])
        return INVALID_VALUE;
    const Kernel &kernel = kernels[offset % 256];
    const std::string copied(static_cast<const char *>(parameters[0]), kernel.size);
    struct Grid {
        unsigned int size[4];
    } const grid = {{gx, gy, gz, bx}};
    fake::note_launch(kernel.name, grid.size, stream);
    return fake::enqueue(stream, [&kernel, copied, grid] { run_grid(kernel, copied, grid.size); });
}

// Which device a thread works on, and the kernels of each device.
#include <map>
#include <mutex>
#include <vector>

#include "driver.h"

namespace lmc {
namespace {

struct Device {
    u64 context = 0;
    bool has_image = false;
    u64 functions[kernel_count] = {};
};

std::mutex mutex;                      // of the map and what is in it
std::map<int, Device> &devices = *new std::map<int, Device>; // outlives the end of main, when threads may still run

u64 context_of(int device)
{
    const std::lock_guard<std::mutex> lock(mutex);
    Device &at = devices[device];
    if (!at.context) {
        int handle = 0;
        LMC_CALL(device_get, &handle, device);
        LMC_CALL(context_retain, &at.context, handle);
    }
    return at.context;
}

[[noreturn]] void fail_image(int device, int code)
{
    const Image made = image(driver().kind);
    const std::string where = "device " + std::to_string(device);
    if (code == LMC_OUT_OF_MEMORY) // that says nothing of the image
        fail(entry_module_load, code, where + ": no memory is left for the kernels; give the engine less of it");
    if (made.driver_version > driver().version)
        fail(entry_module_load, code,
             where + ": kernels need a driver for CUDA " + std::to_string(made.driver_version / 1000) + "." +
                 std::to_string(made.driver_version % 1000 / 10) + " or later, and this one is for " +
                 std::to_string(driver().version / 1000) + "." + std::to_string(driver().version % 1000 / 10) +
                 "; update NVIDIA's driver");
    fail(entry_module_load, code, where + ": this wheel has kernels for " + made.architectures +
                                      "; build lmcache-cuda from source for this device");
}

void load_image(int device, Device &at)
{
    const Image made = image(driver().kind);
    if (!made.size)
        throw DriverError(std::string("this lmcache-cuda was built without kernels for ") +
                              (driver().kind == kRocm ? "ROCm" : "CUDA") +
                              "; build it with -Ccmake.define.LMCACHE_CUDA_TARGETS='cuda;rocm'",
                          0, "");
    static const char *const names[] = {
#define LMC_NAME(name, type, body) #name,
        LMC_KERNELS(LMC_NAME)
#undef LMC_NAME
    };
    u64 module = 0;
    if (const int code = driver().module_load(&module, made.data))
        fail_image(device, code);
    for (int kernel = 0; kernel < kernel_count; ++kernel)
        LMC_CALL(module_function, &at.functions[kernel], module, names[kernel]);
    at.has_image = true;
}

u64 function_of(int device, Kernel kernel)
{
    const std::lock_guard<std::mutex> lock(mutex);
    Device &at = devices[device];
    if (!at.has_image)
        load_image(device, at);
    return at.functions[kernel];
}

} // namespace

Current::Current(int device) : device_(device)
{
    const Driver &api = driver();
    if (api.kind == kRocm) {
        int now = 0;
        LMC_CALL(context_device, &now);
        if (device < 0)
            device_ = now;
        before_ = static_cast<u64>(now);
        if (device_ == now)
            return;
        LMC_CALL(device_set, device_);
        changed_ = true;
        return;
    }
    LMC_CALL(context_get, &before_);
    if (device < 0 && before_) {
        LMC_CALL(context_device, &device_);
        return;
    }
    device_ = device < 0 ? 0 : device;
    const u64 wanted = context_of(device_);
    if (wanted == before_)
        return;
    LMC_CALL(context_set, wanted);
    changed_ = true;
}

Current::~Current()
{
    if (!changed_)
        return;
    // Nothing can be said of a failure here, and what failed would fail again at the next call.
    if (driver().kind == kRocm)
        (void)driver().device_set(static_cast<int>(before_));
    else
        (void)driver().context_set(before_);
}

int current_device()
{
    const Driver &api = driver();
    int device = -1;
    u64 context = 0;
    if (api.kind == kCuda) {
        LMC_CALL(context_get, &context);
        if (!context)
            return -1;
    }
    LMC_CALL(context_device, &device);
    return device;
}

void launch(Kernel kernel, const void *parameters, const Grid &grid, u64 stream, const Current &on)
{
    void *arguments[] = {const_cast<void *>(parameters)};
    LMC_CALL(launch, function_of(on.device(), kernel), grid.x, grid.y, grid.z, grid.threads, 1, 1, 0, stream, arguments,
             nullptr);
}

} // namespace lmc

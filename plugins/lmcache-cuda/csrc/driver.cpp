#include "driver.h"

#include <dlfcn.h>

#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>

namespace lmc {
namespace {

constexpr int kOldestCuda = 11070; // stream memory operations as they are called here

struct Row {
    const char *names[2];
    bool needed;
};

const Row kRows[] = {
#define LMC_ROW(field, cuda, hip, needed, arguments) {{cuda, hip}, needed != 0},
    LMC_ENTRIES(LMC_ROW)
#undef LMC_ROW
};

const char *const kWords[] = {"cuda", "rocm"};
const char *const kDrivers[] = {"CUDA driver", "ROCm runtime"};

std::mutex mutex; // of all below
Kind kind = kCuda;
Driver *loaded; // never freed: other threads may be in it at exit

// A HIP runtime that is in the process, which is torch's: a second one would not know its memory.
std::string runtime_in_process()
{
    std::unique_ptr<FILE, int (*)(FILE *)> maps(std::fopen("/proc/self/maps", "r"), std::fclose);
    char line[4352];
    while (maps && std::fgets(line, sizeof line, maps.get())) {
        char *path = std::strchr(line, '/');
        if (!path || !std::strstr(path, "/libamdhip64.so"))
            continue;
        path[std::strcspn(path, "\n")] = 0;
        return path;
    }
    return "";
}

void *open_driver(Kind kind, std::string *path)
{
    static const char *const cuda[] = {"libcuda.so.1", nullptr};
    static const char *const rocm[] = {"libamdhip64.so.7", "libamdhip64.so.6", "libamdhip64.so", nullptr};
    *path = kind == kRocm ? runtime_in_process() : "";
    if (!path->empty())
        if (void *handle = dlopen(path->c_str(), RTLD_NOW | RTLD_LOCAL))
            return handle;
    std::string first;
    for (const char *const *name = kind == kRocm ? rocm : cuda; *name; ++name) {
        *path = *name;
        if (void *handle = dlopen(*name, RTLD_NOW | RTLD_LOCAL))
            return handle;
        const char *why = dlerror();
        if (first.empty())
            first = why ? why : *name;
    }
    const char *remedy = kind == kRocm ? "install ROCm 6 or later, or a torch built for ROCm"
                                       : "install NVIDIA's driver, or start the container with access to the GPU";
    throw DriverError("no " + std::string(kDrivers[kind]) + ": " + first + "; " + remedy, 0, "dlopen");
}

void find(void *handle, const Driver &made, Entry entry, int (**field)())
{
    const char *name = kRows[entry].names[made.kind];
    *field = *name ? reinterpret_cast<int (*)()>(dlsym(handle, name)) : nullptr;
    if (*field || !*name || !kRows[entry].needed)
        return;
    throw DriverError(made.path + " has no " + name + ": the " + kDrivers[made.kind] +
                          " is too old; install a newer one",
                      0, name);
}

void start(Driver &made)
{
    // Before it starts a driver has no text for its errors, and no device is the commonest of them.
    if (const int code = made.init(0)) {
        const char *name = kRows[entry_init].names[made.kind];
        if (code == LMC_NO_DEVICE)
            throw DriverError(std::string(name) + ": no device is there, or none is visible to this process", code,
                              name);
        throw DriverError(std::string(name) + ": the " + kDrivers[made.kind] + " does not start (code " +
                              std::to_string(code) + "); see whether " +
                              (made.kind == kRocm ? "rocminfo" : "nvidia-smi") + " works",
                          code, name);
    }
    made.driver_version(&made.version);
    if (made.kind == kCuda && made.version < kOldestCuda)
        throw DriverError("CUDA driver " + std::to_string(made.version / 1000) + "." +
                              std::to_string(made.version % 1000 / 10) +
                              " is too old: expected 11.7 or later; update NVIDIA's driver",
                          0, "cuDriverGetVersion");
}

Driver *load()
{
    std::unique_ptr<Driver> made(new Driver());
    made->kind = kind;
    void *handle = made->handle = open_driver(kind, &made->path);
#define LMC_FIND(field, cuda, hip, needed, arguments) \
    find(handle, *made, entry_##field, reinterpret_cast<int (**)()>(&made->field));
    LMC_ENTRIES(LMC_FIND)
#undef LMC_FIND
    start(*made);
    return made.release();
}

} // namespace

void use(const std::string &word)
{
    const Kind asked = word == kWords[kRocm] ? kRocm : kCuda;
    if (word != kWords[asked])
        throw std::invalid_argument("driver '" + word + "': expected cuda or rocm");
    const std::lock_guard<std::mutex> lock(mutex);
    if (loaded && asked != loaded->kind)
        throw DriverError("driver '" + word + "': this process uses " + kWords[loaded->kind] +
                              " already, and a process has one",
                          0, "");
    kind = asked;
}

Kind chosen_kind()
{
    const std::lock_guard<std::mutex> lock(mutex);
    return kind;
}

const Driver &driver()
{
    static Driver *volatile ready = nullptr;
    if (Driver *seen = __atomic_load_n(&ready, __ATOMIC_ACQUIRE))
        return *seen;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!loaded)
        loaded = load();
    __atomic_store_n(&ready, loaded, __ATOMIC_RELEASE);
    return *loaded;
}

const char *entry_name(Kind kind, Entry entry)
{
    const char *name = kRows[entry].names[kind];
    return *name ? name : kRows[entry].names[1 - kind];
}

void fail(Entry entry, int code, const std::string &hint)
{
    const Driver &api = driver();
    const char *text = nullptr;
    if (api.kind == kRocm) {
        typedef const char *(*Text)(int);
        api.last_error(); // HIP keeps an error for whoever asks next, and that is torch
        if (Text describe = reinterpret_cast<Text>(dlsym(api.handle, "hipGetErrorString")))
            text = describe(code);
    } else if (api.error_text(code, &text)) {
        text = nullptr;
    }
    const std::string name = entry_name(api.kind, entry);
    throw DriverError(name + ": " + (text ? text : "it failed") + " (code " + std::to_string(code) + ")" +
                          (hint.empty() ? "" : "; " + hint),
                      code, name);
}

void fail_missing(Entry entry)
{
    const Driver &api = driver();
    const std::string name = entry_name(api.kind, entry);
    throw DriverError(name + ": " + api.path + " does not have it; install a newer " + kDrivers[api.kind], 0, name);
}

} // namespace lmc

// The driver: loaded once per process with dlopen, and called through a table.
#ifndef LMCACHE_CUDA_DRIVER_H
#define LMCACHE_CUDA_DRIVER_H

#include <stdexcept>
#include <string>

#include "entries.h"
#include "kernels.h"

namespace lmc {

// What becomes the class of set_error_type.
struct DriverError : std::runtime_error {
    int code;
    std::string call;

    DriverError(const std::string &text, int code, const std::string &call)
        : std::runtime_error(text), code(code), call(call)
    {
    }
};

// What becomes LayoutError: operands that do not fit the KV format.
struct LayoutError : std::invalid_argument {
    using std::invalid_argument::invalid_argument;
};

enum Kind { kCuda, kRocm };

enum Entry {
#define LMC_ENUMERATE(field, cuda, hip, needed, arguments) entry_##field,
    LMC_ENTRIES(LMC_ENUMERATE)
#undef LMC_ENUMERATE
        entry_count
};

enum Kernel {
#define LMC_ENUMERATE(name, type, body) kernel_##name,
    LMC_KERNELS(LMC_ENUMERATE)
#undef LMC_ENUMERATE
        kernel_count
};

struct Driver {
    Kind kind;
    std::string path;
    void *handle; // of dlopen
    int version;
#define LMC_FIELD(field, cuda, hip, needed, arguments) int(*field) arguments;
    LMC_ENTRIES(LMC_FIELD)
#undef LMC_FIELD
};

void use(const std::string &kind);
Kind chosen_kind();

// The driver, loaded at the first call. What fails then fails again at the next call, with its reason.
const Driver &driver();

const char *entry_name(Kind kind, Entry entry);
[[noreturn]] void fail(Entry entry, int code, const std::string &hint = "");
[[noreturn]] void fail_missing(Entry entry);

inline void check(int code, Entry entry)
{
    if (code != LMC_SUCCESS)
        fail(entry, code);
}

// CALL(mem_free, ptr): call it, and throw if it fails or is not there.
#define LMC_CALL(field, ...) \
    (::lmc::driver().field ? ::lmc::check(::lmc::driver().field(__VA_ARGS__), ::lmc::entry_##field) \
                           : ::lmc::fail_missing(::lmc::entry_##field))

// Makes a device's primary context current while it lives; -1: whatever is, and device 0 if nothing is.
class Current {
public:
    explicit Current(int device);
    ~Current();
    Current(const Current &) = delete;
    Current &operator=(const Current &) = delete;
    int device() const { return device_; }

private:
    int device_;
    u64 before_ = 0;
    bool changed_ = false;
};

int current_device();

struct Grid {
    unsigned int x, y, z, threads;
};

// Queue a kernel. The image is loaded at a device's first launch.
void launch(Kernel kernel, const void *parameters, const Grid &grid, u64 stream, const Current &on);

// The images of this build; empty where it has none.
struct Image {
    const void *data;
    size_t size;
    const char *architectures;
    int driver_version;
};
Image image(Kind kind);

} // namespace lmc

#endif

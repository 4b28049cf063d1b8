// Direct reads and writes of device tensors by the Neuron runtime, which is opened when it is first needed.
//
// The handles are nrt_tensor_t pointers, as integers. Whoever has one from the runtime may move pages with it; torch
// tensors do not tell theirs.
#ifndef LMCACHE_NEURON_NRT_H
#define LMCACHE_NEURON_NRT_H

#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include <dlfcn.h>
#include <unistd.h>

#include "host/buffer.h"

namespace lmcneuron {

using lmchost::i64;
using lmchost::u64;

// What is called of the runtime, by the types of its nrt.h.
struct Runtime {
    int (*read)(const void *tensor, void *buffer, std::size_t offset, std::size_t size);
    int (*write)(void *tensor, const void *buffer, std::size_t offset, std::size_t size);
    std::size_t (*size)(const void *tensor);
};

struct Status {
    int code;
    const char *text;
};

inline std::string status_text(int code)
{
    static const Status known[] = {
        {1, "failure"},         {2, "invalid argument"},  {3, "invalid handle"},       {4, "out of resources"},
        {5, "timed out"},       {6, "hardware failure"},  {13, "the runtime is not initialized"},
        {14, "the runtime is closed"},
    };
    for (const Status &one : known)
        if (one.code == code)
            return std::string(one.text) + " (NRT status " + std::to_string(code) + ")";
    return "NRT status " + std::to_string(code);
}

template <typename F> void look_up(void *library, const char *name, F *&function)
{
    function = reinterpret_cast<F *>(dlsym(library, name));
    if (!function)
        throw std::runtime_error(std::string("libnrt.so.1 has no ") + name + "; install another release of aws-neuronx-runtime-lib");
}

// The runtime, opened once. What failed is tried again: the library may be installed under a living process.
inline const Runtime &runtime()
{
    static std::mutex lock;
    static bool ready = false;
    static Runtime table;
    const std::lock_guard<std::mutex> mine(lock);
    if (ready)
        return table;
    std::string why;
    void *library = nullptr;
    for (const char *name : {"libnrt.so.1", "/opt/aws/neuron/lib/libnrt.so.1"}) { // the SDK's folder is not on every path
        library = dlopen(name, RTLD_NOW | RTLD_LOCAL);
        if (library)
            break;
        const char *said = dlerror();
        // The second is told of where it is there and does not load: that it is missing says the first already.
        if (why.empty() || access(name, F_OK) == 0)
            why = said ? said : std::string(name) + ": no reason given";
    }
    if (!library)
        throw std::runtime_error("no Neuron runtime: " + why + "; install aws-neuronx-runtime-lib");
    Runtime found = {};
    look_up(library, "nrt_tensor_read", found.read);
    look_up(library, "nrt_tensor_write", found.write);
    look_up(library, "nrt_tensor_get_size", found.size);
    table = found;
    ready = true;
    return table;
}

// Everything is checked before anything moves: that each piece lies within the tensor and has an address.
inline void check(const char *op, const Runtime &nrt, u64 tensor, const std::vector<u64> &offsets,
                  const std::vector<u64> &addresses, i64 bytes)
{
    if (!tensor)
        throw std::invalid_argument(std::string(op) + ": tensor=0: expected the runtime's handle");
    if (bytes < 1 || offsets.size() != addresses.size())
        throw std::invalid_argument(std::string(op) + ": " + std::to_string(offsets.size()) + " offsets, " +
                                    std::to_string(addresses.size()) + " addresses, nbytes=" + std::to_string(bytes) +
                                    ": expected as many of each, and 1 byte or more");
    const u64 size = nrt.size(reinterpret_cast<const void *>(tensor));
    const u64 wanted = static_cast<u64>(bytes);
    for (std::size_t at = 0; at < offsets.size(); ++at) {
        if (wanted > size || offsets[at] > size - wanted)
            throw std::invalid_argument(std::string(op) + ": piece " + std::to_string(at) + ": " + std::to_string(bytes) +
                                        " bytes at offset " + std::to_string(offsets[at]) + ": the tensor has " +
                                        std::to_string(size));
        if (!lmchost::can_be_memory(addresses[at], wanted))
            throw std::invalid_argument(std::string(op) + ": piece " + std::to_string(at) + ": address " +
                                        std::to_string(static_cast<i64>(addresses[at])) + ": no such memory");
    }
}

inline void transfer(bool reads, u64 tensor, const std::vector<u64> &offsets, const std::vector<u64> &addresses, i64 bytes)
{
    const char *op = reads ? "nrt_read" : "nrt_write";
    const Runtime &nrt = runtime();
    check(op, nrt, tensor, offsets, addresses, bytes);
    void *handle = reinterpret_cast<void *>(tensor);
    for (std::size_t at = 0; at < offsets.size(); ++at) {
        void *host = reinterpret_cast<void *>(addresses[at]);
        const auto size = static_cast<std::size_t>(bytes);
        const int code = reads ? nrt.read(handle, host, offsets[at], size) : nrt.write(handle, host, offsets[at], size);
        if (code)
            throw std::runtime_error(std::string(op) + ": piece " + std::to_string(at) + " of " +
                                     std::to_string(offsets.size()) + ": " + status_text(code));
    }
}

} // namespace lmcneuron

#endif

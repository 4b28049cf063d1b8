// Memory that other processes map: by the driver's handles, and by file descriptors.
#include <unistd.h>

#include <cstring>
#include <exception>
#include <map>
#include <mutex>

#include "api.h"

namespace lmc {
namespace {

constexpr unsigned int kLazyPeer = 1; // the one flag of ipc_open
constexpr int kPinned = 1, kDescriptor = 1, kOnDevice = 1, kReadWrite = 3;

struct Mapping {
    u64 handle, size;
};

std::mutex mutex; // of the map
std::map<u64, Mapping> &mappings = *new std::map<u64, Mapping>; // of vmm_alloc and vmm_import_fd, by address

lmc_allocation property(int device)
{
    lmc_allocation made;
    std::memset(&made, 0, sizeof made);
    made.type = kPinned;
    made.handle_types = kDescriptor;
    made.location = {kOnDevice, device};
    return made;
}

u64 round_up(int device, u64 nbytes)
{
    const lmc_allocation made = property(device);
    size_t granularity = 0;
    LMC_CALL(vmm_granularity, &granularity, &made, 0);
    return granularity ? (nbytes + granularity - 1) / granularity * granularity : nbytes;
}

// Give a handle an address. What was done is undone if a step fails, the handle included.
u64 map_handle(int device, u64 handle, u64 size)
{
    const lmc_access access = {{kOnDevice, device}, kReadWrite};
    u64 address = 0;
    bool mapped = false;
    try {
        LMC_CALL(vmm_reserve, &address, size, 0, 0, 0);
        LMC_CALL(vmm_map, address, size, 0, handle, 0);
        mapped = true;
        LMC_CALL(vmm_access, address, size, &access, 1);
    } catch (const DriverError &) {
        if (mapped)
            (void)driver().vmm_unmap(address, size);
        if (address)
            (void)driver().vmm_unreserve(address, size);
        (void)driver().vmm_release(handle);
        throw;
    }
    const std::lock_guard<std::mutex> lock(mutex);
    mappings[address] = {handle, size};
    return address;
}

// The mapping that holds an address, if it is one of these.
bool find_mapping(u64 ptr, u64 *base, Mapping *found)
{
    const std::lock_guard<std::mutex> lock(mutex);
    auto after = mappings.upper_bound(ptr);
    if (after == mappings.begin())
        return false;
    --after;
    if (ptr - after->first >= after->second.size)
        return false;
    *base = after->first;
    *found = after->second;
    return true;
}

} // namespace

lmc_handle64 handle_of(const std::string &bytes)
{
    lmc_handle64 handle;
    if (bytes.size() != sizeof handle.bytes)
        throw std::invalid_argument("a handle of " + std::to_string(bytes.size()) + " bytes: expected 64");
    std::memcpy(handle.bytes, bytes.data(), sizeof handle.bytes);
    return handle;
}

std::tuple<std::string, u64, u64> ipc_export(u64 ptr, int device)
{
    const Current on(device);
    u64 base = 0;
    size_t size = 0;
    lmc_handle64 handle;
    LMC_CALL(mem_range, &base, &size, ptr);
    LMC_CALL(ipc_export, &handle, base);
    return std::make_tuple(std::string(reinterpret_cast<const char *>(handle.bytes), sizeof handle.bytes), ptr - base,
                           static_cast<u64>(size));
}

u64 ipc_open(int device, const std::string &handle)
{
    const lmc_handle64 given = handle_of(handle);
    const Current on(device);
    u64 base = 0;
    LMC_CALL(ipc_open, &base, given, kLazyPeer);
    return base;
}

void ipc_close(int device, u64 base)
{
    const Current on(device);
    LMC_CALL(ipc_close, base);
}

u64 vmm_alloc(int device, u64 nbytes)
{
    if (!nbytes)
        throw std::invalid_argument("vmm_alloc: 0 bytes: expected 1 or more");
    const Current on(device);
    const u64 size = round_up(on.device(), nbytes);
    const lmc_allocation made = property(on.device());
    u64 handle = 0;
    LMC_CALL(vmm_create, &handle, size, &made, 0);
    return map_handle(on.device(), handle, size);
}

std::tuple<int, u64, u64> vmm_export_fd(u64 ptr, int device)
{
    const Current on(device);
    u64 base = 0, retained = 0;
    Mapping mapping = {0, 0};
    if (!find_mapping(ptr, &base, &mapping)) { // somebody else's, such as torch's expandable segments
        size_t size = 0;
        LMC_CALL(mem_range, &base, &size, ptr);
        LMC_CALL(vmm_retain, &retained, ptr);
        mapping = {retained, size};
    }
    int fd = -1;
    const int code = driver().vmm_export ? driver().vmm_export(&fd, mapping.handle, kDescriptor, 0) : LMC_NOT_SUPPORTED;
    if (retained)
        (void)driver().vmm_release(retained);
    if (code)
        fail(entry_vmm_export, code, "this memory was made without file descriptors in mind");
    return std::make_tuple(fd, mapping.size, ptr - base);
}

u64 vmm_import_fd(int device, int fd, u64 nbytes)
{
    const Current on(device);
    if (!nbytes || round_up(on.device(), nbytes) != nbytes)
        throw std::invalid_argument("vmm_import_fd: " + std::to_string(nbytes) +
                                    " bytes: expected the size that the exporter told");
    u64 handle = 0;
    LMC_CALL(vmm_import, &handle, reinterpret_cast<void *>(static_cast<intptr_t>(fd)), kDescriptor);
    return map_handle(on.device(), handle, nbytes);
}

void vmm_free(int device, u64 ptr)
{
    Mapping mapping;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        const auto found = mappings.find(ptr);
        if (found == mappings.end())
            throw std::invalid_argument("vmm_free: " + std::to_string(ptr) +
                                        ": expected an address of vmm_alloc or vmm_import_fd that is not free");
        mapping = found->second;
        mappings.erase(found);
    }
    const Current on(device);
    std::exception_ptr first; // a step that fails must not keep the memory from being given back by the others
    const auto attempt = [&first](const auto &step) {
        try {
            step();
        } catch (const DriverError &) {
            if (!first)
                first = std::current_exception();
        }
    };
    attempt([&] { LMC_CALL(vmm_unmap, ptr, mapping.size); });
    attempt([&] { LMC_CALL(vmm_unreserve, ptr, mapping.size); });
    attempt([&] { LMC_CALL(vmm_release, mapping.handle); });
    if (first)
        std::rethrow_exception(first);
}

} // namespace lmc

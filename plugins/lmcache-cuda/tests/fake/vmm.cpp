// Virtual memory management: handles, addresses and what maps one to the other.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <map>
#include <mutex>

#include "fake.h"

namespace {

constexpr size_t kGranularity = 2 << 20;

struct Handle {
    int fd, device, references;
    size_t size;
    bool shareable;
};

std::mutex &mutex = *new std::mutex;
std::map<u64, Handle> &handles = *new std::map<u64, Handle>;
std::map<u64, u64> &mapped = *new std::map<u64, u64>; // address: handle
std::map<u64, size_t> &reserved = *new std::map<u64, size_t>;
u64 next = 0x900d0000;

u64 new_handle(const Handle &handle)
{
    handles[++next] = handle;
    return next;
}

void release(u64 handle)
{
    const auto found = handles.find(handle);
    if (found == handles.end() || --found->second.references)
        return;
    close(found->second.fd);
    handles.erase(found);
}

bool is_proper(const lmc_allocation *given)
{
    return given->type == 1 && given->location.type == 1 && given->location.id >= 0 &&
           given->location.id < fake::devices();
}

} // namespace

API(cuMemGetAllocationGranularity, hipMemGetAllocationGranularity)(size_t *out, const lmc_allocation *given, int)
{
    ENTER();
    *out = kGranularity;
    return is_proper(given) ? 0 : INVALID_VALUE;
}

API(cuMemCreate, hipMemCreate)(u64 *out, size_t size, const lmc_allocation *given, u64 flags)
{
    ENTER();
    if (!is_proper(given) || !size || size % kGranularity || flags)
        return INVALID_VALUE;
    const int fd = fake::new_memory(size);
    if (fd < 0)
        return LMC_OUT_OF_MEMORY;
    const std::lock_guard<std::mutex> lock(mutex);
    *out = new_handle({fd, given->location.id, 1, size, given->handle_types == 1});
    return 0;
}

API(cuMemRelease, hipMemRelease)(u64 handle)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    if (!handles.count(handle))
        return INVALID_VALUE;
    release(handle);
    return 0;
}

API(cuMemAddressReserve, hipMemAddressReserve)(u64 *out, size_t size, size_t, u64, u64 flags)
{
    ENTER();
    if (!size || size % kGranularity || flags)
        return INVALID_VALUE;
    void *made = mmap(nullptr, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (made == MAP_FAILED)
        return LMC_OUT_OF_MEMORY;
    *out = reinterpret_cast<u64>(made);
    const std::lock_guard<std::mutex> lock(mutex);
    reserved[*out] = size;
    return 0;
}

API(cuMemAddressFree, hipMemAddressFree)(u64 address, size_t size)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = reserved.find(address);
    if (found == reserved.end() || found->second != size || mapped.count(address))
        return INVALID_VALUE;
    munmap(reinterpret_cast<void *>(address), size);
    reserved.erase(found);
    return 0;
}

API(cuMemMap, hipMemMap)(u64 address, size_t size, size_t offset, u64 handle, u64 flags)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = handles.find(handle);
    if (found == handles.end() || !reserved.count(address) || offset || flags || size != found->second.size)
        return INVALID_VALUE;
    if (mmap(reinterpret_cast<void *>(address), size, PROT_NONE, MAP_SHARED | MAP_FIXED, found->second.fd, 0) ==
        MAP_FAILED)
        return LMC_OUT_OF_MEMORY;
    ++found->second.references;
    mapped[address] = handle;
    fake::add_region({address, size, found->second.device, -1, true});
    return 0;
}

API(cuMemUnmap, hipMemUnmap)(u64 address, size_t size)
{
    ENTER();
    fake::Region region;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!mapped.count(address) || !fake::take_region(address, &region) || region.size != size)
        return INVALID_VALUE;
    mmap(reinterpret_cast<void *>(address), size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
         -1, 0);
    release(mapped[address]);
    mapped.erase(address);
    return 0;
}

API(cuMemSetAccess, hipMemSetAccess)(u64 address, size_t size, const lmc_access *access, size_t count)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    if (!mapped.count(address) || count != 1 || access->flags != 3 || access->location.type != 1)
        return INVALID_VALUE;
    return mprotect(reinterpret_cast<void *>(address), size, PROT_READ | PROT_WRITE) ? INVALID_VALUE : 0;
}

API(cuMemExportToShareableHandle, hipMemExportToShareableHandle)(void *out, u64 handle, int type, u64 flags)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = handles.find(handle);
    if (found == handles.end() || type != 1 || flags || !found->second.shareable)
        return INVALID_VALUE;
    *static_cast<int *>(out) = fcntl(found->second.fd, F_DUPFD_CLOEXEC, 0);
    return 0;
}

API(cuMemImportFromShareableHandle, hipMemImportFromShareableHandle)(u64 *out, void *given, int type)
{
    ENTER();
    struct stat status;
    const int theirs = static_cast<int>(reinterpret_cast<intptr_t>(given));
    if (type != 1 || fstat(theirs, &status))
        return INVALID_VALUE;
    const int fd = fcntl(theirs, F_DUPFD_CLOEXEC, 0);
    const std::lock_guard<std::mutex> lock(mutex);
    *out = new_handle({fd, fake::current_device(), 1, static_cast<size_t>(status.st_size), true});
    return 0;
}

API(cuMemRetainAllocationHandle, hipMemRetainAllocationHandle)(u64 *out, u64 address)
{
    ENTER();
    fake::Region region;
    const std::lock_guard<std::mutex> lock(mutex);
    if (!fake::find_region(address, &region) || !mapped.count(region.base))
        return INVALID_VALUE;
    *out = mapped[region.base];
    ++handles[*out].references;
    return 0;
}

// Memory: each allocation is a memfd, so that other processes can map it.
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "fake.h"

namespace fake {
namespace {

constexpr size_t kPage = 4096;

std::mutex &mutex = *new std::mutex;
std::map<u64, Region> &regions = *new std::map<u64, Region>;
std::map<u64, size_t> &registered = *new std::map<u64, size_t>;
std::map<int, size_t> &used = *new std::map<int, size_t>; // bytes, by device

size_t round_up(size_t size) { return (size + kPage - 1) / kPage * kPage; }

template <typename Map> typename Map::iterator at_or_before(Map &map, u64 key)
{
    auto found = map.upper_bound(key);
    return found == map.begin() ? map.end() : --found;
}

// Whether [ptr, ptr + n) leaves the piece of memory that it begins in.
bool leaves(u64 ptr, size_t nbytes)
{
    const auto region = at_or_before(regions, ptr);
    if (region != regions.end() && ptr - region->first < region->second.size)
        return ptr - region->first + nbytes > region->second.size;
    const auto pinned = at_or_before(registered, ptr);
    if (pinned != registered.end() && ptr - pinned->first < pinned->second)
        return ptr - pinned->first + nbytes > pinned->second; // a driver refuses a copy across two
    return false;
}

size_t limit()
{
    const char *given = std::getenv("FAKE_MEMORY");
    return given ? static_cast<size_t>(std::atoll(given)) : static_cast<size_t>(8) << 30;
}

} // namespace

int new_memory(size_t size)
{
    const int fd = memfd_create("fake-device", MFD_CLOEXEC);
    if (fd >= 0 && ftruncate(fd, static_cast<off_t>(round_up(size)))) {
        close(fd);
        return -1;
    }
    return fd;
}

u64 map_memory(int fd, size_t size)
{
    char *around = static_cast<char *>(
        mmap(nullptr, round_up(size) + 2 * kPage, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0));
    if (around == MAP_FAILED)
        return 0;
    void *made = mmap(around + kPage, round_up(size), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED, fd, 0);
    return made == MAP_FAILED ? 0 : reinterpret_cast<u64>(made);
}

void unmap_memory(u64 base, size_t size) { munmap(reinterpret_cast<void *>(base - kPage), round_up(size) + 2 * kPage); }

int open_of(int pid, int fd)
{
    const std::string path = "/proc/" + std::to_string(pid) + "/fd/" + std::to_string(fd);
    return open(path.c_str(), O_RDWR | O_CLOEXEC);
}

bool find_region(u64 ptr, Region *out)
{
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = at_or_before(regions, ptr);
    if (found == regions.end() || ptr - found->first >= found->second.size)
        return false;
    *out = found->second;
    return true;
}

void add_region(const Region &region)
{
    const std::lock_guard<std::mutex> lock(mutex);
    regions[region.base] = region;
}

bool take_region(u64 base, Region *out)
{
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = regions.find(base);
    if (found == regions.end())
        return false;
    *out = found->second;
    regions.erase(found);
    return true;
}

int check_copy(u64 to, u64 from, size_t nbytes)
{
    const std::lock_guard<std::mutex> lock(mutex);
    return leaves(to, nbytes) || leaves(from, nbytes) ? INVALID_VALUE : 0;
}

} // namespace fake

using fake::Region;

API(cuMemAlloc_v2, hipMalloc)(u64 *out, size_t size)
{
    ENTER();
    const int device = fake::current_device();
    if (device < 0)
        return INVALID_CONTEXT;
    {
        const std::lock_guard<std::mutex> lock(fake::mutex);
        if (!size || fake::used[device] + size > fake::limit())
            return size ? int(LMC_OUT_OF_MEMORY) : int(INVALID_VALUE);
        fake::used[device] += size;
    }
    const int fd = fake::new_memory(size);
    *out = fd < 0 ? 0 : fake::map_memory(fd, size);
    if (!*out)
        return LMC_OUT_OF_MEMORY;
    fake::add_region({*out, size, device, fd, true});
    return 0;
}

API(cuMemFree_v2, hipFree)(u64 ptr)
{
    ENTER();
    Region region;
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    if (!fake::take_region(ptr, &region))
        return INVALID_VALUE;
    fake::unmap_memory(region.base, region.size);
    close(region.fd);
    const std::lock_guard<std::mutex> lock(fake::mutex);
    fake::used[region.device] -= region.size;
    return 0;
}

API(cuMemGetInfo_v2, hipMemGetInfo)(size_t *left, size_t *total)
{
    ENTER();
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    const std::lock_guard<std::mutex> lock(fake::mutex);
    *total = fake::limit();
    *left = *total - fake::used[fake::current_device()];
    return 0;
}

API(cuMemGetAddressRange_v2, hipMemGetAddressRange)(u64 *base, size_t *size, u64 ptr)
{
    ENTER();
    Region region;
    if (!fake::find_region(ptr, &region))
        return NAME(INVALID_VALUE, NOT_FOUND);
    *base = region.base;
    *size = region.size;
    return 0;
}

// --------------------------------------------------------------------------------------------------- host memory
API(cuMemHostRegister_v2, hipHostRegister)(u64 ptr, size_t size, unsigned int)
{
    ENTER();
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    const std::lock_guard<std::mutex> lock(fake::mutex);
    const auto before = fake::at_or_before(fake::registered, ptr);
    const auto after = fake::registered.lower_bound(ptr);
    if (before != fake::registered.end() && ptr < before->first + before->second)
        return LMC_HOST_ALREADY_REGISTERED;
    if (after != fake::registered.end() && after->first < ptr + size)
        return LMC_HOST_ALREADY_REGISTERED;
    fake::registered[ptr] = size;
    return 0;
}

API(cuMemHostUnregister, hipHostUnregister)(u64 ptr)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(fake::mutex);
    return fake::registered.erase(ptr) ? 0 : 713;
}

API(cuMemHostAlloc, hipHostMalloc)(u64 *out, size_t size, unsigned int)
{
    ENTER();
    void *made = nullptr;
    if (posix_memalign(&made, 4096, size))
        return LMC_OUT_OF_MEMORY;
    *out = reinterpret_cast<u64>(made);
    const std::lock_guard<std::mutex> lock(fake::mutex);
    fake::registered[*out] = size;
    return 0;
}

API(cuMemFreeHost, hipHostFree)(u64 ptr)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(fake::mutex);
    if (!fake::registered.erase(ptr))
        return INVALID_VALUE;
    std::free(reinterpret_cast<void *>(ptr));
    return 0;
}

// ----------------------------------------------------------------------------------------------------------- IPC
API(cuIpcGetMemHandle, hipIpcGetMemHandle)(lmc_handle64 *out, u64 ptr)
{
    ENTER();
    Region region;
    if (!fake::find_region(ptr, &region) || !region.own || region.fd < 0)
        return INVALID_VALUE;
    const fake::Place place = {"FAKEMEM", getpid(), region.fd, region.size, region.base, region.device};
    std::memset(out, 0, sizeof *out);
    std::memcpy(out, &place, sizeof place);
    return 0;
}

API(cuIpcOpenMemHandle_v2, hipIpcOpenMemHandle)(u64 *out, lmc_handle64 handle, unsigned int flags)
{
    ENTER();
    fake::Place place;
    std::memcpy(&place, &handle, sizeof place);
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    if (std::strcmp(place.magic, "FAKEMEM") || flags != 1)
        return INVALID_VALUE;
    if (place.pid == getpid())
        return INVALID_CONTEXT; // as the driver: a process opens none of its own
    const int fd = fake::open_of(place.pid, place.fd);
    if (fd < 0)
        return INVALID_VALUE;
    *out = fake::map_memory(fd, place.size);
    fake::add_region({*out, place.size, place.device, fd, false});
    return *out ? 0 : LMC_OUT_OF_MEMORY;
}

API(cuIpcCloseMemHandle, hipIpcCloseMemHandle)(u64 base)
{
    ENTER();
    Region region;
    if (!fake::take_region(base, &region))
        return INVALID_VALUE;
    fake::unmap_memory(base, region.size);
    close(region.fd);
    return 0;
}

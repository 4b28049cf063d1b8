// Memory of the device and of the host, and copies between.
#include <algorithm>

#include "api.h"

namespace lmc {
namespace {

constexpr int kAnyKind = 4; // hipMemcpyDefault
constexpr u64 kPage = 4096;

void check_size(const char *what, u64 nbytes)
{
    if (!nbytes)
        throw std::invalid_argument(std::string(what) + ": 0 bytes: expected 1 or more");
}

// Why memory of the host cannot be pinned, where the driver's own word does not tell.
std::string pinning_hint(u64 ptr, u64 nbytes, int code)
{
    if (code == LMC_OUT_OF_MEMORY)
        return std::to_string(nbytes) + " bytes: raise the limit on locked memory (ulimit -l; LimitMEMLOCK of a "
                                        "service; --ulimit memlock=-1 of a container), or pin less";
    if (code == LMC_HOST_ALREADY_REGISTERED)
        return "something of the " + std::to_string(nbytes) + " bytes at " + std::to_string(ptr) +
               " is pinned already; unregister that first";
    return "";
}

} // namespace

u64 mem_alloc(int device, u64 nbytes)
{
    check_size("mem_alloc", nbytes);
    const Current on(device);
    u64 ptr = 0;
    const int code = driver().mem_alloc(&ptr, nbytes);
    if (code == LMC_OUT_OF_MEMORY) {
        size_t left = 0, total = 0;
        if (driver().mem_info(&left, &total) == LMC_SUCCESS)
            fail(entry_mem_alloc, code, std::to_string(nbytes) + " bytes asked for, " + std::to_string(left) +
                                            " of " + std::to_string(total) + " free on device " +
                                            std::to_string(on.device()));
    }
    check(code, entry_mem_alloc);
    return ptr;
}

void mem_free(int device, u64 ptr)
{
    const Current on(device);
    LMC_CALL(mem_free, ptr);
}

std::pair<u64, u64> mem_info(int device)
{
    const Current on(device);
    size_t left = 0, total = 0;
    LMC_CALL(mem_info, &left, &total);
    return {left, total};
}

std::pair<u64, u64> address_range(u64 ptr, int device)
{
    const Current on(device);
    u64 base = 0;
    size_t size = 0;
    LMC_CALL(mem_range, &base, &size, ptr);
    return {base, size};
}

void memset_async(u64 ptr, int value, u64 nbytes, u64 stream, int device)
{
    if (value < 0 || value > 255)
        throw std::invalid_argument("memset_async: value " + std::to_string(value) + ": expected a byte, 0 to 255");
    const Current on(device);
    if (nbytes)
        LMC_CALL(memset, ptr, static_cast<unsigned char>(value), nbytes, stream);
}

// ---------------------------------------------------------------------------------------------------- copies
void queue_copy(const Copy &copy, u64 stream)
{
    if (!copy.nbytes)
        return;
    if (driver().kind == kRocm)
        LMC_CALL(memcpy_kind, copy.to, copy.from, copy.nbytes, kAnyKind, stream);
    else
        LMC_CALL(memcpy, copy.to, copy.from, copy.nbytes, stream);
}

void memcpy_async(u64 dst, u64 src, u64 nbytes, u64 stream, int device)
{
    const Current on(device);
    queue_copy({dst, src, nbytes}, stream);
}

void check_alignment(u64 alignment)
{
    if (!alignment || alignment & (alignment - 1))
        throw std::invalid_argument("host alignment " + std::to_string(alignment) + ": expected a power of two");
}

void cut_copy(std::vector<Copy> &out, u64 dst, u64 src, u64 nbytes, u64 host_offset, u64 alignment)
{
    if (alignment < kPage) { // nothing is pinned in pieces as small as that
        if (nbytes)
            out.push_back({dst, src, nbytes});
        return;
    }
    for (u64 done = 0; done < nbytes;) {
        const u64 piece = std::min(alignment - (host_offset + done) % alignment, nbytes - done);
        out.push_back({dst + done, src + done, piece});
        done += piece;
    }
}

void memcpy_split_async(u64 dst, u64 src, u64 nbytes, u64 host_offset, u64 alignment, int direction, u64 stream,
                        int device)
{
    check_alignment(alignment);
    if (direction != LMC_H2D && direction != LMC_D2H)
        throw std::invalid_argument("direction " + std::to_string(direction) + ": expected 0 (H2D) or 1 (D2H)");
    std::vector<Copy> copies;
    cut_copy(copies, dst, src, nbytes, host_offset, alignment);
    const Current on(device);
    for (const Copy &copy : copies)
        queue_copy(copy, stream);
}

bool batch_memcpy_native() { return driver().memcpy_batch || driver().memcpy_batch_failing; }

namespace {

int queue_batch_natively(std::vector<u64> dsts, std::vector<u64> srcs, std::vector<size_t> sizes, u64 stream)
{
    // In the stream's order on both sides: what the host holds may change once the stream is past the copies.
    lmc_copy_attributes attributes = {1, {0, 0}, {0, 0}, 0};
    size_t first = 0, failed = 0;
    if (driver().memcpy_batch)
        return driver().memcpy_batch(dsts.data(), srcs.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                                     stream);
    return driver().memcpy_batch_failing(dsts.data(), srcs.data(), sizes.data(), sizes.size(), &attributes, &first, 1,
                                         &failed, stream);
}

void queue_each(const std::vector<Copy> &copies, u64 stream)
{
    for (const Copy &copy : copies)
        queue_copy(copy, stream);
}

} // namespace

void queue_batch(const std::vector<Copy> &copies, u64 stream)
{
    // The driver refuses the default stream (0, and its names 1 and 2) for a batch.
    if (copies.size() < 2 || stream < 3 || !batch_memcpy_native())
        return queue_each(copies, stream);
    std::vector<u64> dsts, srcs;
    std::vector<size_t> sizes;
    for (const Copy &copy : copies) {
        if (!copy.nbytes)
            continue;
        dsts.push_back(copy.to);
        srcs.push_back(copy.from);
        sizes.push_back(copy.nbytes);
    }
    if (sizes.empty())
        return;
    const int code = queue_batch_natively(std::move(dsts), std::move(srcs), std::move(sizes), stream);
    if (code == LMC_NOT_SUPPORTED) // some memory is copied one by one only
        return queue_each(copies, stream);
    check(code, driver().memcpy_batch ? entry_memcpy_batch : entry_memcpy_batch_failing);
}

void memcpy_batch_async(std::vector<u64> dsts, std::vector<u64> srcs, std::vector<size_t> sizes, u64 stream, int device)
{
    if (dsts.size() != srcs.size() || dsts.size() != sizes.size())
        throw std::invalid_argument("memcpy_batch_async: " + std::to_string(dsts.size()) + " dsts, " +
                                    std::to_string(srcs.size()) + " srcs, " + std::to_string(sizes.size()) +
                                    " sizes: expected as many of each");
    std::vector<Copy> copies;
    for (size_t at = 0; at < sizes.size(); ++at) {
        if (sizes[at] >> 63)
            throw std::invalid_argument("memcpy_batch_async: copy " + std::to_string(at) +
                                        ": a negative size: expected 0 or more");
        copies.push_back({dsts[at], srcs[at], sizes[at]});
    }
    const Current on(device);
    queue_batch(copies, stream);
}

// -------------------------------------------------------------------------------------------- memory of the host
void host_register(u64 ptr, u64 nbytes, unsigned int flags, int device)
{
    check_size("host_register", nbytes);
    const Current on(device);
    if (const int code = driver().host_register(ptr, nbytes, flags))
        fail(entry_host_register, code, pinning_hint(ptr, nbytes, code));
}

void host_unregister(u64 ptr, int device)
{
    const Current on(device);
    LMC_CALL(host_unregister, ptr);
}

u64 host_alloc(u64 nbytes, unsigned int flags, int device)
{
    check_size("host_alloc", nbytes);
    const Current on(device);
    u64 ptr = 0;
    if (const int code = driver().host_alloc(&ptr, nbytes, flags))
        fail(entry_host_alloc, code, pinning_hint(0, nbytes, code));
    return ptr;
}

void host_free(u64 ptr, int device)
{
    const Current on(device);
    LMC_CALL(host_free, ptr);
}

} // namespace lmc

// Host memory for staging: aligned, in huge pages where the kernel gives them, and locked where the process may.
#ifndef LMCACHE_HOST_BUFFER_H
#define LMCACHE_HOST_BUFFER_H

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <stdexcept>
#include <string>

#include <sys/mman.h>

namespace lmchost {

using i64 = std::int64_t;
using u64 = std::uint64_t;

constexpr std::size_t kAlignment = std::size_t(2) << 20; // a huge page: also more than any DMA engine asks for

// Whether an address can be the beginning of so many bytes of this process: its memory lies in the lower half.
inline bool can_be_memory(u64 address, u64 bytes)
{
    const u64 end = static_cast<u64>(INT64_MAX);
    return address && address <= end && bytes <= end - address;
}

// The system has no memory to give; MemoryError in Python.
class NoMemory : public std::bad_alloc {
public:
    NoMemory(std::size_t bytes, int why)
        : text_("HostBuffer: " + std::to_string(bytes) + " bytes: " + std::strerror(why) +
                "; ask for less, or free memory of the host")
    {
    }

    const char *what() const noexcept override { return text_.c_str(); }

private:
    std::string text_;
};

// Whether all of it is locked now. What was locked of a range that cannot be locked whole is let go again.
inline bool lock_memory(u64 address, std::size_t bytes)
{
    void *at = reinterpret_cast<void *>(address);
    if (!address || !bytes)
        return false;
    if (mlock(at, bytes) == 0)
        return true;
    munlock(at, bytes);
    return false;
}

// Zeroed memory that begins at a multiple of kAlignment.
class Buffer {
public:
    Buffer(std::size_t bytes, bool lock) : bytes_(bytes)
    {
        if (bytes < 1 || bytes > SIZE_MAX - 2 * kAlignment)
            throw std::invalid_argument("HostBuffer: " + std::to_string(bytes) + " bytes: expected 1 or more");
        const std::size_t rounded = (bytes + kAlignment - 1) / kAlignment * kAlignment;
        mapped_ = rounded + kAlignment;
        base_ = mmap(nullptr, mapped_, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (base_ == MAP_FAILED)
            throw NoMemory(bytes, errno);
        const auto start = reinterpret_cast<std::uintptr_t>(base_);
        address_ = (start + kAlignment - 1) / kAlignment * kAlignment;
        madvise(reinterpret_cast<void *>(address_), rounded, MADV_HUGEPAGE); // a wish: plain pages do as well
        locked_ = lock && lock_memory(address_, bytes_);
    }

    ~Buffer() { munmap(base_, mapped_); } // which unlocks, too

    Buffer(const Buffer &) = delete;
    Buffer &operator=(const Buffer &) = delete;

    u64 address() const { return address_; }
    std::size_t bytes() const { return bytes_; }
    bool locked() const { return locked_; }

private:
    void *base_ = nullptr;
    std::size_t mapped_ = 0, bytes_ = 0;
    u64 address_ = 0;
    bool locked_ = false;
};

// Buffers that are known by their address until they are taken out again.
class Allocations {
public:
    u64 keep(std::unique_ptr<Buffer> made)
    {
        const u64 address = made->address();
        const std::lock_guard<std::mutex> mine(lock_);
        live_[address] = std::move(made);
        return address;
    }

    std::unique_ptr<Buffer> take(u64 address)
    {
        const std::lock_guard<std::mutex> mine(lock_);
        const auto found = live_.find(address);
        if (found == live_.end()) {
            char text[32];
            std::snprintf(text, sizeof text, "%#llx", static_cast<unsigned long long>(address));
            throw std::invalid_argument("free_pinned_ptr: pointer " + std::string(text) +
                                        ": it is not allocated, or freed already");
        }
        std::unique_ptr<Buffer> taken = std::move(found->second);
        live_.erase(found);
        return taken;
    }

private:
    std::mutex lock_;
    std::map<u64, std::unique_ptr<Buffer>> live_;
};

} // namespace lmchost

#endif

// A driver that needs no device: libcuda.so.1, or with FAKE_HIP libamdhip64.so, on host memory and threads.
//
// What tests turn: see control.cpp. Every entry of the driver begins with ENTER(), which counts it and fails it if asked.
#ifndef LMCACHE_FAKE_H
#define LMCACHE_FAKE_H

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <string>

#include "../../csrc/entries.h"
#include "../../csrc/kernels.h"

#ifdef FAKE_HIP
#define NAME(cuda, hip) hip
#else
#define NAME(cuda, hip) cuda
#endif
#define EXPORT extern "C" __attribute__((visibility("default")))
#define API(cuda, hip) EXPORT int NAME(cuda, hip)
#define ENTER()                              \
    if (const int asked = fake::enter(__func__)) \
    return asked

enum { INVALID_VALUE = 1, INVALID_CONTEXT = 201, INVALID_HANDLE = 400, NOT_FOUND = 500 };

namespace fake {

int enter(const char *name); // 0, or the code that the test wants
int devices();
bool held();                 // streams wait while this is so
void wait_while_held();
void delay();

int current_device();        // -1: the thread has none

struct Region {              // memory that the driver knows
    u64 base;
    size_t size;
    int device, fd;          // fd: what other processes map; -1: nothing
    bool own;                // made by this process, not mapped from another
};
bool find_region(u64 ptr, Region *out);
void add_region(const Region &region);
bool take_region(u64 base, Region *out);
int check_copy(u64 to, u64 from, size_t nbytes);

int new_memory(size_t size); // a descriptor
u64 map_memory(int fd, size_t size); // with pages around it that nobody may touch
void unmap_memory(u64 base, size_t size);
int open_of(int pid, int fd);

int enqueue(u64 stream, std::function<void()> work);

struct Place { // 64 bytes that another process opens
    char magic[8];
    int pid, fd;
    u64 size, nonce;
    int device;
};
static_assert(sizeof(Place) <= 64, "a handle");

void note_launch(const char *name, const unsigned int *grid, u64 stream);

} // namespace fake

#endif

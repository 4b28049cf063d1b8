// What one process tells another about memory or an event: 64 bytes, opaque to everybody else.
#pragma once

#include <stddef.h>
#include <string.h>

#include "common.hpp"

namespace sim {

struct Handle {
  static constexpr uint32_t kMagic = 0x314d4953;  // "SIM1"
  enum Kind : uint16_t { Memory = 1, Event = 2 };

  uint32_t magic;
  uint16_t kind;
  uint16_t physical;  // number of the device on this machine
  int32_t pid;
  int32_t fd;
  uint64_t start;  // of the process
  uint64_t nonce;  // of the file behind fd
  uint64_t id;     // allocation, or generation of the event's slot
  uint64_t where;  // offset of the block, or index of the slot
  uint64_t bytes;  // of the allocation, or how often the slot was recorded before the event
  uint64_t check;

  uint64_t sum() const {
    uint64_t value = 0x9e3779b97f4a7c15ull;
    const auto* bytes_of = reinterpret_cast<const unsigned char*>(this);
    for (size_t i = 0; i < offsetof(Handle, check); ++i) value = (value ^ bytes_of[i]) * 0x100000001b3ull;
    return value;
  }

  void write(uint8_t* out) {
    magic = kMagic;
    check = sum();
    memcpy(out, this, sizeof *this);
  }

  static Handle read(const uint8_t* in, Kind kind, const char* what) {
    Handle handle;
    memcpy(&handle, in, sizeof handle);
    if (handle.magic != kMagic || handle.check != handle.sum() || handle.kind != kind) {
      fail(LMCACHE_SIM_INVALID_VALUE, "%s handle: these 64 bytes are none of a simulated device's %s", what, what);
    }
    return handle;
  }

  Process owner() const { return {pid, start}; }
};
static_assert(sizeof(Handle) == LMCACHE_SIM_HANDLE_BYTES, "the layout crosses processes");

inline int physical_of(int ordinal) { return settings().physical[static_cast<size_t>(ordinal)]; }

inline int ordinal_of(int physical, const char* what) {
  const auto& all = settings().physical;
  for (size_t i = 0; i < all.size(); ++i)
    if (all[i] == physical) return static_cast<int>(i);
  fail(LMCACHE_SIM_INVALID_VALUE, "%s is on the machine's device %d, which this process does not see "
       "(LMCACHE_SIM_VISIBLE_DEVICES, LMCACHE_SIM_DEVICES)", what, physical);
}

}  // namespace sim

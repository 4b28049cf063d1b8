// Device memory: an arena per device, the table of all allocations, and the guards around them.
//
// An arena is a file without a name. In it every allocation is
//     [header page][pages of data, the slack filled with the pattern][guard page]
// so that whoever writes past either end hits the pattern, and a process that maps the allocation sees in the
// header whether it still exists. The file is mapped once, for kernels; device addresses are a range of the
// same size that faults (or, unprotected, the mapping itself).
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <string>

#include "common.hpp"
#include "stream.hpp"

namespace sim {

constexpr uint64_t kPage = 4096;
constexpr unsigned char kPattern = 0xA5;

inline uint64_t whole_pages(uint64_t bytes) { return (bytes + kPage - 1) / kPage * kPage; }

struct BlockHeader {
  uint64_t magic;
  std::atomic<uint64_t> id;  // 0 once freed
  uint64_t bytes;
};

struct ArenaHeader {
  uint64_t magic;
  uint64_t nonce;
};

constexpr uint64_t kArenaMagic = 0x414d49536568634dull;
constexpr uint64_t kBlockMagic = 0x6b636f6c426d6953ull;

// An allocation, of this process or of another one that is mapped here.
struct Region {
  int device = 0;
  uint64_t base = 0;   // device address
  uint64_t bytes = 0;  // as asked for
  uint64_t id = 0;
  uint64_t nonce = 0;     // of the arena
  uint64_t offset = 0;    // of the header page in the arena
  char* alias = nullptr;  // where kernels find `base`
  BlockHeader* header = nullptr;
  bool imported = false;
  uint64_t opened = 0;  // how often, through handles
  bool freed = false;   // waits for the work that was queued before
};

struct ArenaFile {
  int fd;
  uint64_t nonce;
};

ArenaFile arena_file(int device);

uint64_t allocate(int device, uint64_t bytes);
void release(uint64_t base);
lmcache_sim_memory_info memory_info(int device);
void reset_peak(int device);

Region region_at(uint64_t address);  // of a live allocation; throws
// Where kernels find [address, address + bytes); null, with the reason, if that is not in one allocation.
char* translate(uint64_t address, uint64_t bytes, Error* why);
void check_range(uint64_t address, uint64_t bytes, const char* what);

// All guards of a device, and damage that was found when memory was freed. Repairs what it reports.
std::optional<std::string> find_damage(int device);

// Allocations of other processes; see ipc.cpp.
uint64_t add_import(Region region);  // its base; one that is there already is counted instead
uint64_t open_again(uint64_t nonce, uint64_t id);  // 0 if it is not there
void close_import(uint64_t base);

void host_register(const void* memory, uint64_t bytes);
void host_unregister(const void* memory);
bool host_is_registered(const void* memory);

// The device address range and the mapping for kernels of `bytes` of a file.
struct Mapping {
  char* alias;
  uint64_t base;
};
Mapping map_file(int fd, uint64_t offset, uint64_t bytes);
void unmap(const Mapping& mapping, uint64_t bytes);

}  // namespace sim

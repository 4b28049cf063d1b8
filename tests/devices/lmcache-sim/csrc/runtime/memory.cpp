#include "memory.hpp"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>

#include <algorithm>
#include <list>
#include <shared_mutex>

namespace sim {

namespace {

constexpr int64_t kFullPatienceNs = 2000000000;  // how long a full device waits for memory that is being freed

struct Arena {
  Descriptor file;
  uint64_t nonce;
  uint64_t size;
  Mapping mapping;
  std::map<uint64_t, uint64_t> free;  // offset -> bytes
  lmcache_sim_memory_info info{};
  std::optional<std::string> damage;  // first that was found when memory was freed

  Arena(Descriptor&& memory, uint64_t bytes) : file(std::move(memory)), nonce(random_u64()), size(bytes) {
    mapping = map_file(file.get(), 0, size);
    auto* header = reinterpret_cast<ArenaHeader*>(mapping.alias);
    header->nonce = nonce;
    header->magic = kArenaMagic;
    free[kPage] = size - kPage;
    info.capacity = settings().memory;
  }
};

struct Pending {
  uint64_t base;
  Fence fence;
};

struct State {
  std::shared_mutex table_mutex;  // for `regions`; taken after `mutex`
  std::mutex mutex;               // for all else
  std::map<uint64_t, Region> regions;
  std::vector<std::unique_ptr<Arena>> arenas;
  std::list<Pending> pending;
  std::map<uint64_t, uint64_t> host;  // registered host memory: address -> bytes
  uint64_t next_id = 1;
};

State& state() {
  static State* const all = new State();
  return *all;
}

Arena& arena_of(int device) {
  State& all = state();
  all.arenas.resize(std::max(all.arenas.size(), static_cast<size_t>(device) + 1));
  auto& arena = all.arenas[static_cast<size_t>(device)];
  if (!arena) {
    // Addresses are four times the memory, so that guards and gaps never make a device full before its bytes do.
    const uint64_t size = whole_pages(settings().memory) * 4 + kPage;
    arena = std::make_unique<Arena>(anonymous_file("lmcache-sim-memory", size), size);
  }
  return *arena;
}

uint64_t data_bytes(const Region& region) { return whole_pages(region.bytes); }
uint64_t block_bytes(const Region& region) { return data_bytes(region) + 2 * kPage; }

// The first byte from `at` to `end` that is not the pattern.
const char* first_damage(const char* at, const char* end) {
  for (; at < end; ++at)
    if (static_cast<unsigned char>(*at) != kPattern) return at;
  return nullptr;
}

// Whether the guards of an allocation are whole; they are repaired.
std::optional<std::string> check_region(const Region& region) {
  char* const front = region.alias - kPage + sizeof(BlockHeader);
  char* const back = region.alias + region.bytes;
  char* const end = region.alias + data_bytes(region) + kPage;
  const char* hit = first_damage(back, end);
  const char* where = "after";
  uint64_t distance = hit == nullptr ? 0 : static_cast<uint64_t>(hit - back);
  if (hit == nullptr) {
    hit = first_damage(front, region.alias);
    where = "before";
    distance = hit == nullptr ? 0 : static_cast<uint64_t>(region.alias - hit);
  }
  if (hit == nullptr && region.header->id == region.id) return std::nullopt;
  memset(back, kPattern, static_cast<size_t>(end - back));
  memset(front, kPattern, static_cast<size_t>(region.alias - front));
  region.header->magic = kBlockMagic;
  region.header->bytes = region.bytes;
  region.header->id = region.id;
  char text[200];
  snprintf(text, sizeof text,
           "guard of sim:%d damaged: %llu bytes %s the allocation of %llu bytes at %#llx were written to",
           region.device, static_cast<unsigned long long>(distance), where,
           static_cast<unsigned long long>(region.bytes), static_cast<unsigned long long>(region.base));
  return std::string(text);
}

void give_back(Arena& arena, uint64_t offset, uint64_t bytes) {
  fallocate(arena.file.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, static_cast<off_t>(offset),
            static_cast<off_t>(bytes));
  auto next = arena.free.lower_bound(offset);
  if (next != arena.free.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = arena.free.erase(next);
  }
  if (next != arena.free.begin()) {
    auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  arena.free[offset] = bytes;
}

// The range of `bytes` that fits best; 0 if none does.
uint64_t take(Arena& arena, uint64_t bytes) {
  auto best = arena.free.end();
  for (auto at = arena.free.begin(); at != arena.free.end(); ++at)
    if (at->second >= bytes && (best == arena.free.end() || at->second < best->second)) best = at;
  if (best == arena.free.end()) return 0;
  const auto [offset, length] = *best;
  arena.free.erase(best);
  if (length > bytes) arena.free[offset + bytes] = length - bytes;
  return offset;
}

void finish_release(const Region& region) {
  if (region.imported) {
    unmap({region.alias - kPage, region.base - kPage}, block_bytes(region));
    return;
  }
  Arena& arena = arena_of(region.device);
  if (auto damage = check_region(region); damage && !arena.damage) arena.damage = damage;
  region.header->id = 0;
  arena.info.reserved -= data_bytes(region);
  give_back(arena, region.offset, block_bytes(region));
}

// Ends what was freed and is no longer used by queued work. Under `mutex`.
void collect() {
  State& all = state();
  for (auto at = all.pending.begin(); at != all.pending.end();) {
    if (!at->fence.passed()) {
      ++at;
      continue;
    }
    const std::unique_lock<std::shared_mutex> table(all.table_mutex);
    auto found = all.regions.find(at->base);
    finish_release(found->second);
    all.regions.erase(found);
    at = all.pending.erase(at);
  }
}

// Under `mutex`, with the table not held.
void retire(std::map<uint64_t, Region>::iterator found) {
  State& all = state();
  Region& region = found->second;
  if (!region.imported) {
    Arena& arena = arena_of(region.device);
    arena.info.allocated -= data_bytes(region);
    --arena.info.allocations;
  } else {
    --arena_of(region.device).info.imported;
  }
  {
    const std::unique_lock<std::shared_mutex> table(all.table_mutex);
    region.freed = true;
  }
  all.pending.push_back({region.base, Fence::now()});
  collect();
}

bool make_room(Arena& arena, uint64_t bytes) {
  State& all = state();
  collect();
  const int64_t deadline = now_ns() + kFullPatienceNs;
  while (arena.info.reserved + bytes > arena.info.capacity && !all.pending.empty()) {
    if (!all.pending.front().fence.wait(deadline)) break;
    collect();
  }
  return arena.info.reserved + bytes <= arena.info.capacity;
}

std::map<uint64_t, Region>::iterator find_region(uint64_t address) {
  State& all = state();
  auto found = all.regions.upper_bound(address);
  if (found == all.regions.begin()) return all.regions.end();
  --found;
  return address - found->first < std::max<uint64_t>(found->second.bytes, 1) ? found : all.regions.end();
}

std::string range_text(uint64_t address, uint64_t bytes) {
  char text[80];
  snprintf(text, sizeof text, "[%#llx, +%llu)", static_cast<unsigned long long>(address),
           static_cast<unsigned long long>(bytes));
  return text;
}

}  // namespace

Mapping map_file(int fd, uint64_t offset, uint64_t bytes) {
  void* alias = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd,
                     static_cast<off_t>(offset));
  if (alias == MAP_FAILED) fail(LMCACHE_SIM_SYSTEM, "cannot map device memory: %s", strerror(errno));
  madvise(alias, bytes, MADV_DONTDUMP);
  if (!settings().protect) return {static_cast<char*>(alias), reinterpret_cast<uint64_t>(alias)};
  void* base = mmap(nullptr, bytes, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (base == MAP_FAILED) {
    munmap(alias, bytes);
    fail(LMCACHE_SIM_SYSTEM, "cannot reserve device addresses: %s", strerror(errno));
  }
  return {static_cast<char*>(alias), reinterpret_cast<uint64_t>(base)};
}

void unmap(const Mapping& mapping, uint64_t bytes) {
  munmap(mapping.alias, bytes);
  if (settings().protect) munmap(reinterpret_cast<void*>(mapping.base), bytes);
}

ArenaFile arena_file(int device) {
  const std::lock_guard<std::mutex> hold(state().mutex);
  Arena& arena = arena_of(device);
  return {arena.file.get(), arena.nonce};
}

uint64_t allocate(int device, uint64_t bytes) {
  device_at(device);
  if (bytes == 0 || bytes > (1ull << 46)) {
    fail(LMCACHE_SIM_INVALID_VALUE, "allocation of %llu bytes: expected at least 1, and fewer than 2^46",
         static_cast<unsigned long long>(bytes));
  }
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  Arena& arena = arena_of(device);
  const uint64_t data = whole_pages(bytes);
  const uint64_t offset = make_room(arena, data) ? take(arena, data + 2 * kPage) : 0;
  if (offset == 0) {
    fail(LMCACHE_SIM_OUT_OF_MEMORY,
         "sim:%d is out of memory: tried to allocate %llu bytes, %llu of %llu are in use "
         "(LMCACHE_SIM_MEMORY sets the size)",
         device, static_cast<unsigned long long>(bytes), static_cast<unsigned long long>(arena.info.reserved),
         static_cast<unsigned long long>(arena.info.capacity));
  }
  Region region;
  region.device = device;
  region.base = arena.mapping.base + offset + kPage;
  region.bytes = bytes;
  region.id = all.next_id++;
  region.nonce = arena.nonce;
  region.offset = offset;
  region.alias = arena.mapping.alias + offset + kPage;
  region.header = reinterpret_cast<BlockHeader*>(region.alias - kPage);
  memset(region.alias - kPage, kPattern, kPage);
  memset(region.alias + bytes, kPattern, data - bytes + kPage);
  region.header->magic = kBlockMagic;
  region.header->bytes = bytes;
  region.header->id = region.id;
  arena.info.allocated += data;
  arena.info.reserved += data;
  arena.info.peak = std::max(arena.info.peak, arena.info.allocated);
  ++arena.info.allocations;
  const std::unique_lock<std::shared_mutex> table(all.table_mutex);
  all.regions[region.base] = region;
  return region.base;
}

void release(uint64_t base) {
  if (was_forked()) return;  // the memory is the parent's
  enter();
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  auto found = all.regions.find(base);
  if (found == all.regions.end() || found->second.freed || found->second.imported) {
    fail(LMCACHE_SIM_INVALID_VALUE, "free of %#llx: expected the address of a live allocation of this process",
         static_cast<unsigned long long>(base));
  }
  retire(found);
}

lmcache_sim_memory_info memory_info(int device) {
  device_at(device);
  const std::lock_guard<std::mutex> hold(state().mutex);
  collect();
  return arena_of(device).info;
}

void reset_peak(int device) {
  device_at(device);
  const std::lock_guard<std::mutex> hold(state().mutex);
  Arena& arena = arena_of(device);
  arena.info.peak = arena.info.allocated;
}

Region region_at(uint64_t address) {
  enter();
  State& all = state();
  const std::shared_lock<std::shared_mutex> table(all.table_mutex);
  auto found = find_region(address);
  if (found == all.regions.end() || found->second.freed) {
    fail(LMCACHE_SIM_INVALID_VALUE, "address %#llx: expected one in a live allocation of a simulated device",
         static_cast<unsigned long long>(address));
  }
  return found->second;
}

char* translate(uint64_t address, uint64_t bytes, Error* why) {
  State& all = state();
  const std::shared_lock<std::shared_mutex> table(all.table_mutex);
  auto found = find_region(address);
  if (found == all.regions.end()) {
    *why = {LMCACHE_SIM_ILLEGAL_ADDRESS, "illegal address: " + range_text(address, bytes) + " is in no allocation"};
    return nullptr;
  }
  const Region& region = found->second;
  if (bytes > region.bytes - (address - region.base)) {
    *why = {LMCACHE_SIM_ILLEGAL_ADDRESS, "illegal address: " + range_text(address, bytes) +
                                             " leaves its allocation " + range_text(region.base, region.bytes)};
    return nullptr;
  }
  if (region.imported && (region.header->id != region.id || region.header->magic != kBlockMagic)) {
    *why = {LMCACHE_SIM_PEER_LOST, "stale mapping: the owner has freed the allocation of another process at " +
                                       range_text(region.base, region.bytes)};
    return nullptr;
  }
  return region.alias + (address - region.base);
}

void check_range(uint64_t address, uint64_t bytes, const char* what) {
  const Region region = region_at(address);
  Error why{0, ""};
  if (bytes > region.bytes - (address - region.base) || translate(address, bytes, &why) == nullptr) {
    fail(LMCACHE_SIM_INVALID_VALUE, "%s %s: %s", what, range_text(address, bytes).c_str(),
         why.code ? why.text.c_str() : ("leaves its allocation " + range_text(region.base, region.bytes)).c_str());
  }
}

std::optional<std::string> find_damage(int device) {
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  collect();
  Arena& arena = arena_of(device);
  std::optional<std::string> first;
  first.swap(arena.damage);
  for (const auto& entry : all.regions) {
    if (entry.second.device != device || entry.second.imported) continue;
    auto damage = check_region(entry.second);
    if (!first) first = damage;
  }
  return first;
}

uint64_t open_again(uint64_t nonce, uint64_t id) {
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  const std::unique_lock<std::shared_mutex> table(all.table_mutex);
  for (auto& entry : all.regions) {
    Region& region = entry.second;
    if (region.nonce != nonce || region.id != id || region.freed) continue;
    ++region.opened;
    return region.base;
  }
  return 0;
}

uint64_t add_import(Region region) {
  if (const uint64_t known = open_again(region.nonce, region.id); known != 0) {
    unmap({region.alias - kPage, region.base - kPage}, block_bytes(region));
    return known;
  }
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  const std::unique_lock<std::shared_mutex> table(all.table_mutex);
  region.imported = true;
  region.opened = 1;
  all.regions[region.base] = region;
  ++arena_of(region.device).info.imported;
  return region.base;
}

void close_import(uint64_t base) {
  if (was_forked()) return;
  enter();
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  auto found = all.regions.find(base);
  if (found == all.regions.end() || found->second.freed || found->second.opened == 0) {
    fail(LMCACHE_SIM_INVALID_VALUE, "close of %#llx: expected the base of memory that was opened and not yet closed",
         static_cast<unsigned long long>(base));
  }
  if (--found->second.opened == 0 && found->second.imported) retire(found);
}

void host_register(const void* memory, uint64_t bytes) {
  enter();
  const uint64_t start = reinterpret_cast<uint64_t>(memory);
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  auto next = all.host.upper_bound(start);
  const bool before = next != all.host.begin() && std::prev(next)->first + std::prev(next)->second > start;
  const bool after = next != all.host.end() && next->first < start + bytes;
  if (memory == nullptr || bytes == 0 || before || after) {
    fail(LMCACHE_SIM_INVALID_VALUE, "register of host memory %s: expected a range that is not registered yet",
         range_text(start, bytes).c_str());
  }
  all.host[start] = bytes;
}

void host_unregister(const void* memory) {
  enter();
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  if (all.host.erase(reinterpret_cast<uint64_t>(memory)) == 0) {
    fail(LMCACHE_SIM_INVALID_VALUE, "unregister of host memory %p: expected the start of a registered range", memory);
  }
}

bool host_is_registered(const void* memory) {
  const uint64_t address = reinterpret_cast<uint64_t>(memory);
  State& all = state();
  const std::lock_guard<std::mutex> hold(all.mutex);
  auto next = all.host.upper_bound(address);
  return next != all.host.begin() && address < std::prev(next)->first + std::prev(next)->second;
}

}  // namespace sim

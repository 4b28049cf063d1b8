#include "ipc.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include "handle.hpp"
#include "memory.hpp"

namespace sim {

namespace {

// Whether the file behind the handle is still the arena that it was.
void check_arena(int fd, const Handle& handle) {
  ArenaHeader header{};
  if (pread(fd, &header, sizeof header, 0) != sizeof header || header.magic != kArenaMagic ||
      header.nonce != handle.nonce) {
    fail(LMCACHE_SIM_PEER_LOST, "cannot open memory of process %d: its descriptor %d is something else by now",
         handle.pid, handle.fd);
  }
}

}  // namespace

uint64_t export_memory(uint64_t address, uint8_t* out) {
  const Region region = region_at(address);
  if (region.imported) {
    fail(LMCACHE_SIM_INVALID_VALUE, "export of %#llx: it belongs to another process, which has to export it",
         static_cast<unsigned long long>(address));
  }
  const Process self = this_process();
  const ArenaFile file = arena_file(region.device);
  Handle handle{};
  handle.kind = Handle::Memory;
  handle.physical = static_cast<uint16_t>(physical_of(region.device));
  handle.pid = self.pid;
  handle.start = self.start;
  handle.fd = file.fd;
  handle.nonce = file.nonce;
  handle.id = region.id;
  handle.where = region.offset;
  handle.bytes = region.bytes;
  handle.write(out);
  return address - region.base;
}

uint64_t open_memory(const uint8_t* bytes) {
  enter();
  const Handle handle = Handle::read(bytes, Handle::Memory, "memory");
  if (const uint64_t known = open_again(handle.nonce, handle.id); known != 0) return known;
  const Process self = this_process();
  if (handle.pid == self.pid && handle.start == self.start) {
    fail(LMCACHE_SIM_PEER_LOST, "cannot open memory of process %d: it has been freed there", handle.pid);
  }
  Region region;
  region.device = ordinal_of(handle.physical, "the memory");
  const Descriptor file = open_of(handle.owner(), handle.fd, O_RDWR, "memory");
  check_arena(file.get(), handle);
  const uint64_t size = static_cast<uint64_t>(lseek(file.get(), 0, SEEK_END));
  const uint64_t mapped = whole_pages(handle.bytes) + 2 * kPage;
  if (handle.where % kPage != 0 || handle.where > size || handle.bytes > size || mapped > size - handle.where) {
    fail(LMCACHE_SIM_INVALID_VALUE, "memory handle: its range is not inside the memory of process %d", handle.pid);
  }
  const Mapping mapping = map_file(file.get(), handle.where, mapped);
  region.base = mapping.base + kPage;
  region.alias = mapping.alias + kPage;
  region.header = reinterpret_cast<BlockHeader*>(mapping.alias);
  region.bytes = handle.bytes;
  region.id = handle.id;
  region.nonce = handle.nonce;
  region.offset = handle.where;
  if (region.header->magic != kBlockMagic || region.header->id != handle.id || region.header->bytes != handle.bytes) {
    unmap(mapping, mapped);
    fail(LMCACHE_SIM_PEER_LOST, "cannot open memory of process %d: it has been freed there", handle.pid);
  }
  return add_import(region);
}

}  // namespace sim

#include "event.hpp"

#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include <map>
#include <vector>

#include "handle.hpp"

namespace sim {

namespace {

constexpr uint32_t kSlots = 65536;
constexpr uint64_t kBytes = kSlots * sizeof(EventSlot);
constexpr int64_t kLookNs = 50000000;  // how often a waiter looks whether the owner still lives

// Slot 0 is the header: its generation holds the file's number.
struct Pool {
  Descriptor file;
  EventSlot* slots;
  uint64_t nonce;
  Process self;
  std::mutex mutex;
  std::vector<uint32_t> free;
  uint32_t fresh = 1;
  std::map<uint32_t, std::weak_ptr<Event>> live;

  Pool() : file(anonymous_file("lmcache-sim-events", kBytes)), nonce(random_u64()), self(this_process()) {
    void* memory = mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file.get(), 0);
    if (memory == MAP_FAILED) fail(LMCACHE_SIM_SYSTEM, "cannot map events: %s", strerror(errno));
    slots = static_cast<EventSlot*>(memory);
    slots[0].generation = nonce;
  }
};

Pool& pool() {
  static Pool* const made = new Pool();
  return *made;
}

void futex_wait(EventSlot* slot, uint32_t value, int64_t nanoseconds) {
  timespec limit;
  limit.tv_sec = nanoseconds / 1000000000;
  limit.tv_nsec = nanoseconds % 1000000000;
  syscall(SYS_futex, &slot->wake, FUTEX_WAIT, value, &limit, nullptr, 0);
}

void futex_wake(EventSlot* slot) {
  ++slot->wake;
  syscall(SYS_futex, &slot->wake, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

}  // namespace

struct Peer {
  Process owner;
  EventSlot* slots = nullptr;
  ~Peer() {
    if (slots != nullptr) munmap(slots, kBytes);
  }
};

namespace {

std::shared_ptr<Peer> peer_of(const Handle& handle) {
  static std::mutex* const mutex = new std::mutex();
  static auto* const peers = new std::map<uint64_t, std::weak_ptr<Peer>>();
  const std::lock_guard<std::mutex> hold(*mutex);
  for (auto at = peers->begin(); at != peers->end();) at = at->second.expired() ? peers->erase(at) : std::next(at);
  if (auto known = (*peers)[handle.nonce].lock()) return known;
  const Descriptor file = open_of(handle.owner(), handle.fd, O_RDONLY, "an event");
  void* memory = mmap(nullptr, kBytes, PROT_READ, MAP_SHARED, file.get(), 0);
  if (memory == MAP_FAILED) fail(LMCACHE_SIM_SYSTEM, "cannot map events of process %d: %s", handle.pid, strerror(errno));
  auto peer = std::make_shared<Peer>();
  peer->owner = handle.owner();
  peer->slots = static_cast<EventSlot*>(memory);
  // A descriptor that now means something else maps, too: another size of file faults, another file differs.
  if (lseek(file.get(), 0, SEEK_END) != static_cast<off_t>(kBytes) || peer->slots[0].generation != handle.nonce) {
    fail(LMCACHE_SIM_PEER_LOST, "cannot open an event of process %d: its descriptor %d is something else by now",
         handle.pid, handle.fd);
  }
  (*peers)[handle.nonce] = peer;
  return peer;
}

}  // namespace

std::shared_ptr<Event> Event::create(int device) {
  device_at(device);
  Pool& all = pool();
  const std::lock_guard<std::mutex> hold(all.mutex);
  uint32_t index = 0;
  if (!all.free.empty()) {
    index = all.free.back();
    all.free.pop_back();
  } else if (all.fresh < kSlots) {
    index = all.fresh++;
  } else {
    fail(LMCACHE_SIM_OUT_OF_MEMORY, "more than %u events at a time: destroy some", kSlots - 1);
  }
  EventSlot* slot = all.slots + index;
  std::shared_ptr<Event> event(new Event(slot, index, ++slot->generation, device));
  event->first_ = event->seen_ = slot->recorded;  // what is recorded by now belongs to the slot's earlier events
  all.live[index] = event;
  return event;
}

std::shared_ptr<Event> Event::import(const uint8_t* bytes) {
  enter();
  const Handle handle = Handle::read(bytes, Handle::Event, "event");
  const int device = ordinal_of(handle.physical, "the event");
  if (handle.where == 0 || handle.where >= kSlots) {
    fail(LMCACHE_SIM_INVALID_VALUE, "event handle: slot %llu does not exist", static_cast<unsigned long long>(handle.where));
  }
  const auto index = static_cast<uint32_t>(handle.where);
  const bool own = handle.nonce == pool().nonce;
  std::shared_ptr<Peer> peer = own ? nullptr : peer_of(handle);
  EventSlot* slot = (own ? pool().slots : peer->slots) + index;
  if (slot->generation != handle.id) {
    fail(LMCACHE_SIM_PEER_LOST, "cannot open an event of process %d: it has been destroyed there", handle.pid);
  }
  if (own) {
    const std::lock_guard<std::mutex> hold(pool().mutex);
    if (auto event = pool().live[index].lock()) return event;
    fail(LMCACHE_SIM_PEER_LOST, "cannot open an event of process %d: it has been destroyed there", handle.pid);
  }
  std::shared_ptr<Event> event(new Event(slot, index, handle.id, device));
  event->peer_ = std::move(peer);
  event->first_ = handle.bytes;
  event->seen_ = slot->recorded;
  return event;
}

Event::~Event() {
  if (peer_ || was_forked()) return;
  Pool& all = pool();
  const std::lock_guard<std::mutex> hold(all.mutex);
  ++slot_->generation;
  futex_wake(slot_);
  all.live.erase(index_);
  all.free.push_back(index_);
}

void Event::record(Stream& stream) {
  if (peer_) {
    fail(LMCACHE_SIM_INVALID_VALUE, "record of an event of process %d: only its owner can record it", peer_->owner.pid);
  }
  const std::lock_guard<std::mutex> hold(mutex_);
  const uint64_t number = slot_->recorded + 1;
  stream.enqueue({Task::Record, [self = shared_from_this(), number](int status) { self->reach(number, status != 0); },
                  nullptr});
  slot_->recorded = number;
  seen_ = number;
}

void Event::reach(uint64_t number, bool failed) {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (failed && slot_->failed < number) slot_->failed = number;
  early_.insert(number);
  while (!early_.empty() && *early_.begin() == slot_->reached + 1) {
    slot_->reached_ns = now_ns();
    slot_->reached = *early_.begin();
    early_.erase(early_.begin());
  }
  futex_wake(slot_);
}

uint64_t Event::wanted() {
  const std::lock_guard<std::mutex> hold(mutex_);
  if (peer_) {
    const uint64_t recorded = slot_->recorded;
    if (slot_->generation == generation_) seen_ = recorded;
  }
  return seen_;
}

int Event::outcome(uint64_t number) {
  if (slot_->reached >= number) {
    if (number != first_ && slot_->failed >= number) {
      fail(LMCACHE_SIM_KERNEL_FAILED, "the work before the event failed; its stream has the reason");
    }
    return LMCACHE_SIM_OK;
  }
  if (!peer_) return LMCACHE_SIM_NOT_READY;
  const bool destroyed = slot_->generation != generation_;
  if ((destroyed || !is_alive(peer_->owner)) && slot_->reached < number) {
    fail(LMCACHE_SIM_PEER_LOST, "an event of process %d was never reached: %s", peer_->owner.pid,
         destroyed ? "it has been destroyed there" : "that process has ended");
  }
  return LMCACHE_SIM_NOT_READY;
}

void Event::block(uint64_t number) {
  for (;;) {
    const uint32_t wake = slot_->wake;
    if (outcome(number) == LMCACHE_SIM_OK) return;
    if (is_shutting_down()) fail(LMCACHE_SIM_SYSTEM, "the process is ending");
    futex_wait(slot_, wake, kLookNs);
  }
}

void Event::wait_on(Stream& stream) {
  const uint64_t number = wanted();
  stream.enqueue({Task::Wait,
                  [self = shared_from_this(), number](int) {
                    try {
                      self->block(number);
                    } catch (const Error& error) {
                      current_stream()->set_error(error.code, error.text);
                    }
                  },
                  nullptr});
}

int Event::query() { return outcome(wanted()); }
void Event::synchronize() { block(wanted()); }
int64_t Event::reached_ns() { return slot_->reached_ns; }

void Event::export_to(uint8_t* out) {
  if (peer_) {
    fail(LMCACHE_SIM_INVALID_VALUE, "export of an event of process %d: only its owner can export it", peer_->owner.pid);
  }
  Pool& all = pool();
  Handle handle{};
  handle.kind = Handle::Event;
  handle.physical = static_cast<uint16_t>(physical_of(device_));
  handle.pid = all.self.pid;
  handle.start = all.self.start;
  handle.fd = all.file.get();
  handle.nonce = all.nonce;
  handle.id = generation_;
  handle.where = index_;
  handle.bytes = first_;
  handle.write(out);
}

}  // namespace sim

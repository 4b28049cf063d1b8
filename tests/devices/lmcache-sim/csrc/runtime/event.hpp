// Events: two counters in memory that other processes can map, how often recorded and how often reached.
#pragma once

#include <memory>
#include <mutex>
#include <set>
#include <string>

#include "common.hpp"
#include "stream.hpp"

namespace sim {

// 64 bytes of shared memory. Counters only grow, even when a slot serves another event.
struct EventSlot {
  std::atomic<uint64_t> generation;  // odd while an event lives in it
  std::atomic<uint64_t> recorded;
  std::atomic<uint64_t> reached;
  std::atomic<uint64_t> failed;       // the last record before which work had failed
  std::atomic<int64_t> reached_ns;    // on the clock that all processes share
  std::atomic<uint32_t> wake;         // what waiters sleep on
  uint32_t unused[5];
};
static_assert(sizeof(EventSlot) == 64, "the layout is shared between processes");

struct Peer;  // another process's slots, mapped for reading

class Event : public std::enable_shared_from_this<Event> {
 public:
  static std::shared_ptr<Event> create(int device);
  static std::shared_ptr<Event> import(const uint8_t* handle);
  ~Event();

  int device() const { return device_; }
  void record(Stream& stream);
  void wait_on(Stream& stream);  // the stream waits for what is recorded by now
  int query();                   // 0 or LMCACHE_SIM_NOT_READY; throws what failed
  void synchronize();
  int64_t reached_ns();  // of a completed event
  void export_to(uint8_t* handle);

 private:
  Event(EventSlot* slot, uint32_t index, uint64_t generation, int device)
      : slot_(slot), index_(index), generation_(generation), device_(device) {}
  uint64_t wanted();                // the last record, as far as it is known here
  int outcome(uint64_t wanted);     // as query, for a record
  void block(uint64_t wanted);      // until there is an outcome; throws what failed
  void reach(uint64_t number, bool failed);

  EventSlot* slot_;
  uint32_t index_;
  uint64_t generation_;
  int device_;
  std::shared_ptr<Peer> peer_;  // null: an event of this process
  std::mutex mutex_;
  std::set<uint64_t> early_;  // records reached before an older one on another stream
  uint64_t first_ = 0;        // records up to this one belong to earlier events of the slot
  uint64_t seen_ = 0;         // the last record that is known here
};

}  // namespace sim

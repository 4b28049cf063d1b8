// Devices as far as they do work: streams, each a thread that takes tasks from a queue, and their errors.
#pragma once

#include <condition_variable>
#include <deque>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <utility>
#include <vector>

#include "common.hpp"

namespace sim {

struct Task {
  enum Kind { Work, Callback, Record, Wait, Sleep };
  Kind kind;
  // Gets the stream's state: 0, or the code of what failed before. Work, Wait and Sleep run only after 0.
  std::function<void(int status)> run;
  std::function<void()> release;  // may be empty; called by a host thread, later
};

class Stream;

struct Device {
  int ordinal = 0;
  std::mutex mutex;           // for what follows
  Error error{0, ""};         // lasts until it is cleared
  int64_t link_free_ns = 0;   // when the link has moved all that was charged to it
  std::vector<std::unique_ptr<Stream>> streams;  // 0 is the default stream; filled once, then read only
  std::atomic<unsigned> next_stream{0};
};

class Stream {
 public:
  Stream(Device& device, int id);

  Device& device() const { return device_; }
  lmcache_sim_stream handle() const;

  void enqueue(Task task);
  void synchronize();  // throws what failed, and forgets it unless it lasts
  int query();         // 0 or LMCACHE_SIM_NOT_READY; throws what failed
  void wait_idle();
  void pause(bool paused);
  void set_delay(int64_t microseconds) { delay_us_ = microseconds; }

  void set_error(int code, const std::string& text);
  void clear_error();
  int status();

  // How much was asked for and done; for work that has to follow all that was queued at some moment.
  std::pair<uint64_t, uint64_t> progress();
  void release_done();
  bool stop(int64_t deadline_ns);  // whether nothing runs at the end

 private:
  void run();
  void execute(Task& task);
  void start_thread();
  void raise_pending();

  Device& device_;
  const int id_;
  std::mutex mutex_;
  std::condition_variable changed_;
  std::deque<Task> queue_;
  std::vector<std::function<void()>> done_;  // releases that wait for a host thread
  Error error_{0, ""};
  uint64_t enqueued_ = 0;
  uint64_t completed_ = 0;
  bool paused_ = false;
  bool stopped_ = false;
  bool running_ = false;
  bool started_ = false;
  std::atomic<int64_t> delay_us_{0};
};

constexpr int kStreamsPerDevice = 33;  // the default one and a pool of 32

Device& device_at(int ordinal);
Stream& stream_at(lmcache_sim_stream handle);
Stream* current_stream();  // of a kernel; null on other threads
Error lasting_error(Device& device);
void set_lasting_error(Device& device, int code, const std::string& text);
void charge_link(uint64_t bytes);

// A moment in all streams' queues.
class Fence {
 public:
  static Fence now();
  bool passed() const;
  bool wait(int64_t deadline_ns) const;  // whether it passed in time

 private:
  std::vector<std::pair<Stream*, uint64_t>> marks_;
};

void release_done();  // on all streams; called by host threads
void synchronize(Device& device);  // all of its streams; throws the first of their errors
void shutdown();
bool is_shutting_down();

}  // namespace sim

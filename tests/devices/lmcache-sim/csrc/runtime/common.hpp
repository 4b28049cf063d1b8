// What every part of the driver needs: errors, settings, the clock, and who a process is.
#pragma once

#include <atomic>
#include <cstdint>
#include <string>
#include <vector>

#include "lmcache_sim.h"

namespace sim {

// Thrown inside, turned into a code and a line of text at the C boundary.
struct Error {
  int code;
  std::string text;
};

#if defined(__GNUC__)
__attribute__((format(printf, 2, 3)))
#endif
[[noreturn]] void fail(int code, const char* format, ...);

void set_last_error(const Error& error);
const char* last_error();  // of this thread

// Settings of the environment, read once, on first use.
struct Settings {
  std::vector<int> physical;  // ordinal -> number of the device on this machine
  uint64_t memory = 0;        // bytes per device
  bool protect = true;        // device addresses fault on the host
};

const Settings& settings();

// Limits that may change while work is running.
struct Tunables {
  std::atomic<int64_t> delay_us{0};
  std::atomic<int64_t> link_latency_us{0};
  std::atomic<double> link_gbps{0};
};

Tunables& tunables();

int64_t now_ns();
void sleep_until_ns(int64_t deadline);

// A process is its number and the time it started, so that a number used again is not mistaken for it.
struct Process {
  int32_t pid = 0;
  uint64_t start = 0;
};

Process this_process();
bool is_alive(const Process& process);
uint64_t random_u64();

// Called at the head of every function that touches devices: refuses forked children, reads the settings.
void enter();
bool was_used();
bool was_forked();

// A descriptor that closes itself.
class Descriptor {
 public:
  explicit Descriptor(int fd = -1) : fd_(fd) {}
  Descriptor(Descriptor&& other) noexcept : fd_(other.fd_) { other.fd_ = -1; }
  Descriptor& operator=(Descriptor&&) = delete;
  ~Descriptor();
  int get() const { return fd_; }

 private:
  int fd_;
};

// Memory that other processes may map: a file without a name, of `bytes` zeros.
Descriptor anonymous_file(const char* name, uint64_t bytes);

// Opens descriptor `fd` of another process. `what` is the thing, for the error.
Descriptor open_of(const Process& owner, int fd, int flags, const char* what);

}  // namespace sim

#include "common.hpp"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/random.h>
#include <time.h>
#include <unistd.h>

#include <limits>
#include <mutex>

namespace sim {

namespace {

constexpr int kMostDevices = 16;

std::atomic<bool> used{false};
std::atomic<bool> forked{false};

std::string& last_error_text() {
  thread_local std::string text;
  return text;
}

// The number in variable `name`, which must be in [low, high] and may be followed by a unit of bytes.
double number(const char* name, double fallback, double low, double high, bool bytes = false) {
  const char* text = getenv(name);
  if (text == nullptr || *text == '\0') return fallback;
  char* end = nullptr;
  double value = strtod(text, &end);
  const struct { const char* unit; double factor; } units[] = {
      {"", 1}, {"B", 1}, {"KiB", 1024.0}, {"MiB", 1048576.0}, {"GiB", 1073741824.0}};
  bool known = false;
  for (const auto& row : units) {
    if (end == text || strcmp(end, row.unit) != 0 || (!bytes && *end != '\0')) continue;
    value *= row.factor;
    known = true;
    break;
  }
  if (!known || !(value >= low && value <= high)) {
    fail(LMCACHE_SIM_INVALID_VALUE, "%s=%s: expected a number from %g to %g%s", name, text, low, high,
         bytes ? ", in bytes or with KiB, MiB or GiB" : "");
  }
  return value;
}

std::vector<int> visible_devices(int count) {
  std::vector<int> found;
  const char* text = getenv("LMCACHE_SIM_VISIBLE_DEVICES");
  if (text == nullptr || *text == '\0') {
    for (int i = 0; i < count; ++i) found.push_back(i);
    return found;
  }
  for (const char* at = text;; ++at) {
    char* end = nullptr;
    const long device = strtol(at, &end, 10);
    const bool seen = [&] {
      for (int other : found)
        if (other == device) return true;
      return false;
    }();
    if (end == at || device < 0 || device >= count || seen || (*end != ',' && *end != '\0')) {
      fail(LMCACHE_SIM_INVALID_VALUE,
           "LMCACHE_SIM_VISIBLE_DEVICES=%s: expected different numbers from 0 to %d, separated by commas", text,
           count - 1);
    }
    found.push_back(static_cast<int>(device));
    if (*end == '\0') return found;
    at = end;
  }
}

Settings read_settings() {
  Settings read;
  const int count = static_cast<int>(number("LMCACHE_SIM_DEVICES", 2, 0, kMostDevices));
  read.physical = visible_devices(count);
  read.memory = static_cast<uint64_t>(number("LMCACHE_SIM_MEMORY", 4.0 * (1u << 30), 1 << 20, 1ull << 40, true));
  read.protect = number("LMCACHE_SIM_PROTECT", 1, 0, 1) != 0;
  tunables().delay_us = static_cast<int64_t>(number("LMCACHE_SIM_DELAY_US", 0, 0, 1e9));
  tunables().link_latency_us = static_cast<int64_t>(number("LMCACHE_SIM_LINK_US", 0, 0, 1e9));
  tunables().link_gbps = number("LMCACHE_SIM_LINK_GBPS", 0, 0, 1e6);
  return read;
}

// The start time of a process, in clock ticks since boot; 0 if it has ended, even if nobody waited for it.
uint64_t start_time(int32_t pid) {
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/stat", pid);
  FILE* file = fopen(path, "re");
  if (file == nullptr) return 0;
  char line[1024];
  const size_t got = fread(line, 1, sizeof line - 1, file);
  fclose(file);
  line[got] = '\0';
  const char* at = strrchr(line, ')');  // the name before it may hold anything
  if (at == nullptr || at[1] != ' ') return 0;
  const char state = at[2];
  if (state == 'Z' || state == 'X') return 0;
  at += 2;
  for (int field = 3; field < 22 && at != nullptr; ++field) {
    at = strchr(at, ' ');
    if (at != nullptr) ++at;
  }
  return at == nullptr ? 0 : strtoull(at, nullptr, 10);
}

}  // namespace

void fail(int code, const char* format, ...) {
  char text[512];
  va_list arguments;
  va_start(arguments, format);
  vsnprintf(text, sizeof text, format, arguments);
  va_end(arguments);
  throw Error{code, text};
}

void set_last_error(const Error& error) { last_error_text() = error.text; }
const char* last_error() { return last_error_text().c_str(); }

const Settings& settings() {
  static const Settings* const read = new Settings(read_settings());
  return *read;
}

Tunables& tunables() {
  static Tunables* const all = new Tunables();
  return *all;
}

int64_t now_ns() {
  timespec now;
  clock_gettime(CLOCK_MONOTONIC, &now);
  return int64_t{now.tv_sec} * 1000000000 + now.tv_nsec;
}

void sleep_until_ns(int64_t deadline) {
  timespec until;
  until.tv_sec = deadline / 1000000000;
  until.tv_nsec = deadline % 1000000000;
  while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &until, nullptr) == EINTR) {
  }
}

Process this_process() {
  Process self;
  self.pid = getpid();
  self.start = start_time(self.pid);
  return self;
}

bool is_alive(const Process& process) { return process.start != 0 && start_time(process.pid) == process.start; }

uint64_t random_u64() {
  uint64_t value = 0;
  while (value == 0) {
    if (getrandom(&value, sizeof value, 0) != sizeof value) value = 0;
  }
  return value;
}

void enter() {
  if (forked) {
    fail(LMCACHE_SIM_FORKED,
         "this process was forked from one that had used the simulated device, whose threads it lacks: "
         "start it with spawn instead of fork");
  }
  settings();
  if (!used.exchange(true)) pthread_atfork(nullptr, nullptr, [] { forked = true; });
}

bool was_used() { return used; }
bool was_forked() { return forked; }

Descriptor::~Descriptor() {
  if (fd_ >= 0) close(fd_);
}

Descriptor anonymous_file(const char* name, uint64_t bytes) {
  Descriptor file(memfd_create(name, MFD_CLOEXEC));
  if (file.get() < 0 || ftruncate(file.get(), static_cast<off_t>(bytes)) != 0) {
    fail(LMCACHE_SIM_SYSTEM, "%s: cannot reserve %llu bytes: %s", name, static_cast<unsigned long long>(bytes),
         strerror(errno));
  }
  return file;
}

Descriptor open_of(const Process& owner, int fd, int flags, const char* what) {
  if (!is_alive(owner)) {
    fail(LMCACHE_SIM_PEER_LOST, "cannot open %s of process %d: that process has ended", what, owner.pid);
  }
  char path[64];
  snprintf(path, sizeof path, "/proc/%d/fd/%d", owner.pid, fd);
  Descriptor file(open(path, flags | O_CLOEXEC));
  if (file.get() < 0) {
    const int reason = errno;
    const bool gone = reason == ENOENT || !is_alive(owner);
    fail(gone ? LMCACHE_SIM_PEER_LOST : LMCACHE_SIM_SYSTEM, "cannot open %s of process %d: %s", what, owner.pid,
         gone ? "that process has ended" : strerror(reason));
  }
  return file;
}

}  // namespace sim

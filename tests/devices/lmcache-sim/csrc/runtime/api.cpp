// The C functions of lmcache_sim.h: arguments checked, errors turned into codes, nothing else.
#include <string.h>

#include <unordered_set>

#include "event.hpp"
#include "handle.hpp"
#include "ipc.hpp"
#include "memory.hpp"
#include "stream.hpp"

struct lmcache_sim_event_s {
  std::shared_ptr<sim::Event> event;
};

namespace {

using sim::Error;
using sim::Stream;
using sim::Task;

template <typename F>
int attempt(F&& body) {
  try {
    return body();
  } catch (const Error& error) {
    sim::set_last_error(error);
    return error.code;
  } catch (const std::exception& error) {
    sim::set_last_error({LMCACHE_SIM_SYSTEM, error.what()});
    return LMCACHE_SIM_SYSTEM;
  }
}

template <typename F>
int done(F&& body) {
  return attempt([&] {
    body();
    return static_cast<int>(LMCACHE_SIM_OK);
  });
}

std::mutex& events_mutex() {
  static auto* const mutex = new std::mutex();
  return *mutex;
}

std::unordered_set<lmcache_sim_event>& events() {
  static auto* const all = new std::unordered_set<lmcache_sim_event>();
  return *all;
}

lmcache_sim_event remember(std::shared_ptr<sim::Event> event) {
  const std::lock_guard<std::mutex> hold(events_mutex());
  return *events().insert(new lmcache_sim_event_s{std::move(event)}).first;
}

std::shared_ptr<sim::Event> event_at(lmcache_sim_event handle) {
  sim::enter();
  const std::lock_guard<std::mutex> hold(events_mutex());
  if (events().count(handle) == 0) sim::fail(LMCACHE_SIM_INVALID_VALUE, "event %p: expected a live event", static_cast<void*>(handle));
  return handle->event;
}

int64_t checked_delay(int64_t microseconds) {
  if (microseconds < 0 || microseconds > 1000000000) {
    sim::fail(LMCACHE_SIM_INVALID_VALUE, "delay of %lld microseconds: expected 0 to 10^9", static_cast<long long>(microseconds));
  }
  return microseconds;
}

// A device address as the kernel that runs on this thread may use it.
char* in_kernel(uint64_t address, uint64_t bytes) {
  Error why{0, ""};
  char* found = sim::translate(address, bytes, &why);
  if (found == nullptr) throw why;
  return found;
}

void copy_now(uint64_t to, uint64_t from, uint64_t bytes, int kind) {
  const void* source = kind == LMCACHE_SIM_H2D ? reinterpret_cast<const void*>(from) : in_kernel(from, bytes);
  void* target = kind == LMCACHE_SIM_D2H ? reinterpret_cast<void*>(to) : in_kernel(to, bytes);
  memmove(target, source, bytes);
  if (kind != LMCACHE_SIM_D2D) sim::charge_link(bytes);
}

}  // namespace

extern "C" {

const char* lmcache_sim_last_error(void) { return sim::last_error(); }

int lmcache_sim_device_count(void) {
  int count = -1;
  done([&] { count = static_cast<int>(sim::settings().physical.size()); });
  return count;
}

int lmcache_sim_device_uuid(int device, uint8_t out[LMCACHE_SIM_UUID_BYTES]) {
  return done([&] {
    sim::device_at(device);
    static const uint8_t prefix[] = {'l', 'm', 'c', 'a', 'c', 'h', 'e', '-', 's', 'i', 'm', 0, 0, 0, 0};
    memcpy(out, prefix, sizeof prefix);
    out[LMCACHE_SIM_UUID_BYTES - 1] = static_cast<uint8_t>(sim::physical_of(device));
  });
}

int lmcache_sim_synchronize(int device) {
  return done([&] { sim::synchronize(sim::device_at(device)); });
}

int lmcache_sim_device_error(int device) {
  return done([&] {
    const Error lasting = sim::lasting_error(sim::device_at(device));
    if (lasting.code != 0) throw lasting;
  });
}

int lmcache_sim_clear_error(int device) {
  return done([&] {
    sim::Device& found = sim::device_at(device);
    for (auto& stream : found.streams) {
      stream->wait_idle();
      stream->clear_error();
    }
    sim::set_lasting_error(found, 0, "");
  });
}

int lmcache_sim_used(void) { return sim::was_used() && !sim::was_forked(); }
void lmcache_sim_shutdown(void) { sim::shutdown(); }

int lmcache_sim_malloc(int device, uint64_t bytes, uint64_t* address) {
  return done([&] {
    sim::release_done();
    *address = sim::allocate(device, bytes);
  });
}

int lmcache_sim_free(uint64_t address) {
  return done([&] { sim::release(address); });
}

int lmcache_sim_get_memory_info(int device, lmcache_sim_memory_info* info) {
  return done([&] {
    sim::release_done();
    *info = sim::memory_info(device);
  });
}

int lmcache_sim_reset_peak(int device) {
  return done([&] { sim::reset_peak(device); });
}

int lmcache_sim_get_pointer_info(uint64_t address, lmcache_sim_pointer_info* info) {
  return done([&] {
    const sim::Region region = sim::region_at(address);
    *info = {region.device, region.imported ? 1 : 0, region.base, region.bytes, region.id};
  });
}

int lmcache_sim_check_guards(int device) {
  return done([&] {
    sim::synchronize(sim::device_at(device));
    if (auto damage = sim::find_damage(device)) throw Error{LMCACHE_SIM_GUARD_DAMAGED, *damage};
  });
}

int lmcache_sim_host_register(void* memory, uint64_t bytes) {
  return done([&] { sim::host_register(memory, bytes); });
}

int lmcache_sim_host_unregister(void* memory) {
  return done([&] { sim::host_unregister(memory); });
}

int lmcache_sim_host_is_registered(const void* memory) { return sim::host_is_registered(memory); }

int lmcache_sim_default_stream(int device, lmcache_sim_stream* stream) {
  return done([&] { *stream = sim::device_at(device).streams[0]->handle(); });
}

int lmcache_sim_new_stream(int device, int /*priority: all threads are equal*/, lmcache_sim_stream* stream) {
  return done([&] {
    sim::Device& found = sim::device_at(device);
    *stream = found.streams[1 + found.next_stream++ % (sim::kStreamsPerDevice - 1)]->handle();
  });
}

int lmcache_sim_stream_device(lmcache_sim_stream stream) {
  int device = -1;
  done([&] { device = sim::stream_at(stream).device().ordinal; });
  return device;
}

int lmcache_sim_stream_query(lmcache_sim_stream stream) {
  return attempt([&] { return sim::stream_at(stream).query(); });
}

int lmcache_sim_stream_synchronize(lmcache_sim_stream stream) {
  return done([&] { sim::stream_at(stream).synchronize(); });
}

int lmcache_sim_set_delay(int64_t microseconds) {
  return done([&] {
    sim::settings();
    sim::tunables().delay_us = checked_delay(microseconds);
  });
}

int lmcache_sim_stream_set_delay(lmcache_sim_stream stream, int64_t microseconds) {
  return done([&] { sim::stream_at(stream).set_delay(checked_delay(microseconds)); });
}

int lmcache_sim_stream_pause(lmcache_sim_stream stream) {
  return done([&] { sim::stream_at(stream).pause(true); });
}

int lmcache_sim_stream_resume(lmcache_sim_stream stream) {
  return done([&] { sim::stream_at(stream).pause(false); });
}

int lmcache_sim_stream_sleep(lmcache_sim_stream stream, int64_t microseconds) {
  return done([&] {
    checked_delay(microseconds);
    sim::stream_at(stream).enqueue(
        {Task::Sleep, [=](int) { sim::sleep_until_ns(sim::now_ns() + microseconds * 1000); }, nullptr});
  });
}

int lmcache_sim_set_link(double gigabytes_per_second, int64_t latency_microseconds) {
  return done([&] {
    if (!(gigabytes_per_second >= 0 && gigabytes_per_second <= 1e6)) {
      sim::fail(LMCACHE_SIM_INVALID_VALUE, "link of %g GB/s: expected 0 to 10^6", gigabytes_per_second);
    }
    sim::settings();
    sim::tunables().link_latency_us = checked_delay(latency_microseconds);
    sim::tunables().link_gbps = gigabytes_per_second;
  });
}

int lmcache_sim_launch(lmcache_sim_stream stream, lmcache_sim_kernel kernel, const void* args, size_t size) {
  return done([&] {
    const auto* bytes = static_cast<const unsigned char*>(args);
    std::vector<unsigned char> copy(bytes, bytes + size);
    sim::stream_at(stream).enqueue(
        {Task::Work, [kernel, copy = std::move(copy)](int) mutable { kernel(copy.data()); }, nullptr});
  });
}

int lmcache_sim_launch_owned(lmcache_sim_stream stream, lmcache_sim_kernel kernel, void* arg,
                             void (*release)(void*)) {
  return done([&] {
    sim::stream_at(stream).enqueue({Task::Work, [=](int) { kernel(arg); }, [=] { release(arg); }});
  });
}

int lmcache_sim_memcpy_async(lmcache_sim_stream stream, uint64_t to, uint64_t from, uint64_t bytes, int kind) {
  return done([&] {
    Stream& on = sim::stream_at(stream);
    if (kind < LMCACHE_SIM_H2D || kind > LMCACHE_SIM_D2D) {
      sim::fail(LMCACHE_SIM_INVALID_VALUE, "copy of kind %d: expected H2D, D2H or D2D", kind);
    }
    if (bytes == 0) return;
    if (kind != LMCACHE_SIM_H2D) sim::check_range(from, bytes, "copy from");
    if (kind != LMCACHE_SIM_D2H) sim::check_range(to, bytes, "copy to");
    on.enqueue({Task::Work, [=](int) { copy_now(to, from, bytes, kind); }, nullptr});
  });
}

int lmcache_sim_memset_async(lmcache_sim_stream stream, uint64_t to, int value, uint64_t bytes) {
  return done([&] {
    Stream& on = sim::stream_at(stream);
    if (bytes == 0) return;
    sim::check_range(to, bytes, "fill of");
    on.enqueue({Task::Work, [=](int) { memset(in_kernel(to, bytes), value, bytes); }, nullptr});
  });
}

int lmcache_sim_host_func(lmcache_sim_stream stream, lmcache_sim_host_fn function, void* arg) {
  return done([&] {
    sim::stream_at(stream).enqueue({Task::Callback, [=](int status) { function(arg, status); }, nullptr});
  });
}

void* lmcache_sim_translate(uint64_t address, uint64_t bytes) {
  Error why{0, ""};
  char* found = sim::translate(address, bytes, &why);
  if (found == nullptr) {
    sim::set_last_error(why);
    if (Stream* stream = sim::current_stream()) stream->set_error(why.code, why.text);
  }
  return found;
}

void lmcache_sim_charge_link(uint64_t bytes) { sim::charge_link(bytes); }

void lmcache_sim_fail(const char* reason) {
  if (Stream* stream = sim::current_stream()) stream->set_error(LMCACHE_SIM_KERNEL_FAILED, reason);
}

int lmcache_sim_event_create(int device, lmcache_sim_event* event) {
  return done([&] { *event = remember(sim::Event::create(device)); });
}

int lmcache_sim_event_destroy(lmcache_sim_event event) {
  return done([&] {
    event_at(event);
    {
      const std::lock_guard<std::mutex> hold(events_mutex());
      events().erase(event);
    }
    delete event;
  });
}

int lmcache_sim_event_device(lmcache_sim_event event) {
  int device = -1;
  done([&] { device = event_at(event)->device(); });
  return device;
}

int lmcache_sim_event_record(lmcache_sim_event event, lmcache_sim_stream stream) {
  return done([&] { event_at(event)->record(sim::stream_at(stream)); });
}

int lmcache_sim_stream_wait_event(lmcache_sim_stream stream, lmcache_sim_event event) {
  return done([&] { event_at(event)->wait_on(sim::stream_at(stream)); });
}

int lmcache_sim_event_query(lmcache_sim_event event) {
  return attempt([&] { return event_at(event)->query(); });
}

int lmcache_sim_event_synchronize(lmcache_sim_event event) {
  return done([&] { event_at(event)->synchronize(); });
}

int lmcache_sim_event_elapsed(lmcache_sim_event begin, lmcache_sim_event end, double* milliseconds) {
  return attempt([&] {
    const auto first = event_at(begin), second = event_at(end);
    if (first->query() != LMCACHE_SIM_OK || second->query() != LMCACHE_SIM_OK) {
      sim::set_last_error({LMCACHE_SIM_NOT_READY, "elapsed time between events: both must have been reached"});
      return static_cast<int>(LMCACHE_SIM_NOT_READY);
    }
    *milliseconds = static_cast<double>(second->reached_ns() - first->reached_ns()) / 1e6;
    return static_cast<int>(LMCACHE_SIM_OK);
  });
}

int lmcache_sim_event_export(lmcache_sim_event event, uint8_t handle[LMCACHE_SIM_HANDLE_BYTES]) {
  return done([&] { event_at(event)->export_to(handle); });
}

int lmcache_sim_event_import(const uint8_t handle[LMCACHE_SIM_HANDLE_BYTES], lmcache_sim_event* event) {
  return done([&] { *event = remember(sim::Event::import(handle)); });
}

int lmcache_sim_ipc_export(uint64_t address, uint8_t handle[LMCACHE_SIM_HANDLE_BYTES], uint64_t* offset) {
  return done([&] { *offset = sim::export_memory(address, handle); });
}

int lmcache_sim_ipc_open(const uint8_t handle[LMCACHE_SIM_HANDLE_BYTES], uint64_t* base) {
  return done([&] { *base = sim::open_memory(handle); });
}

int lmcache_sim_ipc_close(uint64_t base) {
  return done([&] { sim::close_import(base); });
}

}  // extern "C"

#include "stream.hpp"

#include <pthread.h>
#include <signal.h>

#include <algorithm>
#include <exception>
#include <thread>

#include "faults.hpp"

namespace sim {

namespace {

std::atomic<bool> shutting_down{false};
thread_local Stream* running_stream = nullptr;
thread_local uint64_t charged_bytes = 0;

using Devices = std::vector<std::unique_ptr<Device>>;

Devices& devices() {
  static Devices* const all = [] {
    auto* made = new Devices();
    for (size_t i = 0; i < settings().physical.size(); ++i) {
      made->push_back(std::make_unique<Device>());
      Device& device = *made->back();
      device.ordinal = static_cast<int>(i);
      for (int id = 0; id < kStreamsPerDevice; ++id) device.streams.push_back(std::make_unique<Stream>(device, id));
    }
    return made;
  }();
  return *all;
}

template <typename F>
void each_stream(F&& visit) {
  for (auto& device : devices())
    for (auto& stream : device->streams) visit(*stream);
}

// When the link has moved what the last task charged: bytes in the order of their tasks, then the latency.
int64_t link_deadline(Device& device, int64_t began) {
  const double gbps = tunables().link_gbps;
  int64_t end = began;
  if (gbps > 0 && charged_bytes > 0) {
    const std::lock_guard<std::mutex> hold(device.mutex);
    end = std::max(began, device.link_free_ns) + static_cast<int64_t>(static_cast<double>(charged_bytes) / gbps);
    device.link_free_ns = end;
  }
  return end + tunables().link_latency_us * 1000;
}

}  // namespace

Device& device_at(int ordinal) {
  enter();
  Devices& all = devices();
  if (ordinal < 0 || static_cast<size_t>(ordinal) >= all.size()) {
    fail(LMCACHE_SIM_INVALID_VALUE, "device %d: this process sees %zu simulated devices, counted from 0", ordinal,
         all.size());
  }
  return *all[static_cast<size_t>(ordinal)];
}

Stream& stream_at(lmcache_sim_stream handle) {
  enter();
  const uint64_t device = handle >> 16, id = handle & 0xffff;
  Devices& all = devices();
  if (device == 0 || device > all.size() || id >= kStreamsPerDevice) {
    fail(LMCACHE_SIM_INVALID_VALUE, "stream handle %#llx: expected one that the simulated device gave out",
         static_cast<unsigned long long>(handle));
  }
  return *all[device - 1]->streams[id];
}

Stream* current_stream() { return running_stream; }
void charge_link(uint64_t bytes) { charged_bytes += bytes; }
bool is_shutting_down() { return shutting_down; }

Error lasting_error(Device& device) {
  const std::lock_guard<std::mutex> hold(device.mutex);
  return device.error;
}

void set_lasting_error(Device& device, int code, const std::string& text) {
  const std::lock_guard<std::mutex> hold(device.mutex);
  if (code == 0 || device.error.code == 0) device.error = {code, text};
}

Stream::Stream(Device& device, int id) : device_(device), id_(id) {}

lmcache_sim_stream Stream::handle() const {
  return (static_cast<uint64_t>(device_.ordinal + 1) << 16) | static_cast<uint64_t>(id_);
}

void Stream::start_thread() {
  install_fault_handler();
  sigset_t all, before;
  sigfillset(&all);
  for (int fault : {SIGSEGV, SIGBUS, SIGFPE, SIGILL}) sigdelset(&all, fault);
  pthread_sigmask(SIG_SETMASK, &all, &before);  // signals are for the program's own threads
  std::thread([this] { run(); }).detach();
  pthread_sigmask(SIG_SETMASK, &before, nullptr);
  started_ = true;
}

void Stream::enqueue(Task task) {
  const Error lasting = lasting_error(device_);
  if (lasting.code != 0 && task.kind != Task::Callback) throw lasting;
  release_done();
  const std::lock_guard<std::mutex> hold(mutex_);
  if (!started_) start_thread();
  queue_.push_back(std::move(task));
  ++enqueued_;
  changed_.notify_all();
}

void Stream::run() {
  running_stream = this;
  std::unique_lock<std::mutex> hold(mutex_);
  for (;;) {
    changed_.wait(hold, [this] { return !queue_.empty() && !paused_ && !stopped_; });
    Task task = std::move(queue_.front());
    queue_.pop_front();
    running_ = true;
    hold.unlock();
    execute(task);
    if (!task.release) task.run = nullptr;  // what events it holds may go with it
    hold.lock();
    if (task.release) done_.push_back(std::move(task.release));
    running_ = false;
    ++completed_;
    changed_.notify_all();
  }
}

void Stream::execute(Task& task) {
  const bool real = task.kind == Task::Work || task.kind == Task::Callback;
  if (const int64_t delay = delay_us_ + tunables().delay_us; real && delay > 0) {
    sleep_until_ns(now_ns() + delay * 1000);
  }
  const int before = status();
  if (before != 0 && task.kind != Task::Callback && task.kind != Task::Record) return;
  if (task.kind != Task::Work) {
    task.run(before);
    return;
  }
  const int64_t began = now_ns();
  charged_bytes = 0;
  try {
    if (!run_guarded(task.run)) {
      char text[160];
      snprintf(text, sizeof text,
               "illegal address: a kernel on sim:%d touched %p, which is not memory that it may use; "
               "kernels translate device addresses",
               device_.ordinal, last_fault_address());
      set_lasting_error(device_, LMCACHE_SIM_ILLEGAL_ADDRESS, text);
    }
  } catch (const Error& error) {
    set_error(error.code, error.text);
  } catch (const std::exception& error) {
    set_error(LMCACHE_SIM_KERNEL_FAILED, error.what());
  }
  const int64_t until = link_deadline(device_, began);
  if (until > now_ns()) sleep_until_ns(until);
}

int Stream::status() {
  if (const int lasting = lasting_error(device_).code; lasting != 0) return lasting;
  const std::lock_guard<std::mutex> hold(mutex_);
  return error_.code;
}

void Stream::set_error(int code, const std::string& text) {
  if (code == LMCACHE_SIM_ILLEGAL_ADDRESS) set_lasting_error(device_, code, text);
  const std::lock_guard<std::mutex> hold(mutex_);
  if (error_.code == 0 && code != LMCACHE_SIM_ILLEGAL_ADDRESS) error_ = {code, text};
}

void Stream::clear_error() {
  const std::lock_guard<std::mutex> hold(mutex_);
  error_ = {0, ""};
}

void Stream::raise_pending() {
  const Error lasting = lasting_error(device_);
  if (lasting.code != 0) throw lasting;
  Error pending{0, ""};
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    std::swap(pending, error_);
  }
  if (pending.code != 0) throw pending;
}

void Stream::wait_idle() {
  std::unique_lock<std::mutex> hold(mutex_);
  const uint64_t until = enqueued_;
  changed_.wait(hold, [&] { return completed_ >= until || stopped_; });
}

void Stream::synchronize() {
  wait_idle();
  release_done();
  raise_pending();
}

int Stream::query() {
  const auto [asked, done] = progress();
  release_done();
  if (done < asked) return LMCACHE_SIM_NOT_READY;
  raise_pending();
  return LMCACHE_SIM_OK;
}

std::pair<uint64_t, uint64_t> Stream::progress() {
  const std::lock_guard<std::mutex> hold(mutex_);
  return {enqueued_, stopped_ ? enqueued_ : completed_};
}

void Stream::pause(bool paused) {
  const std::lock_guard<std::mutex> hold(mutex_);
  paused_ = paused;
  changed_.notify_all();
}

void Stream::release_done() {
  std::vector<std::function<void()>> done;
  {
    const std::lock_guard<std::mutex> hold(mutex_);
    done.swap(done_);
  }
  for (auto& release : done) release();
}

bool Stream::stop(int64_t deadline_ns) {
  std::unique_lock<std::mutex> hold(mutex_);
  stopped_ = true;
  changed_.notify_all();
  while (running_ && now_ns() < deadline_ns) changed_.wait_for(hold, std::chrono::milliseconds(20));
  return !running_;
}

Fence Fence::now() {
  Fence fence;
  each_stream([&](Stream& stream) {
    const auto [asked, done] = stream.progress();
    if (done < asked) fence.marks_.emplace_back(&stream, asked);
  });
  return fence;
}

bool Fence::passed() const {
  return std::all_of(marks_.begin(), marks_.end(),
                     [](const auto& mark) { return mark.first->progress().second >= mark.second; });
}

bool Fence::wait(int64_t deadline_ns) const {
  while (!passed()) {
    if (now_ns() > deadline_ns) return false;
    sleep_until_ns(now_ns() + 100000);
  }
  return true;
}

void synchronize(Device& device) {
  Error first{0, ""};
  for (auto& stream : device.streams) {
    try {
      stream->synchronize();
    } catch (const Error& error) {
      if (first.code == 0) first = error;
    }
  }
  if (first.code != 0) throw first;
}

void release_done() {
  each_stream([](Stream& stream) { stream.release_done(); });
}

void shutdown() {
  shutting_down = true;
  if (!was_used() || was_forked()) return;
  const int64_t deadline = now_ns() + 1000000000;
  each_stream([&](Stream& stream) { stream.stop(deadline); });
}

}  // namespace sim

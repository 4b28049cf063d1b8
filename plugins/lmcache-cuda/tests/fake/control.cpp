// What tests turn and read. From the environment when the driver is loaded, and by the functions below.
//
//   FAKE_DEVICES (2)  FAKE_DRIVER_VERSION (13000)  FAKE_CAPABILITY (90)  FAKE_MEMORY (bytes per device, 8 GiB)
//   FAKE_FAIL         "cuInit=100;cuMemAlloc_v2=2@3": always; the fourth call only
//   FAKE_DELAY_US     every piece of work on a stream takes so much longer
#include <condition_variable>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>
#include <thread>
#include <vector>

#include "fake.h"

namespace fake {
namespace {

struct Fault {
    int code;
    long after, times; // calls that go well first; failures then, -1 without end
};

struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::map<std::string, Fault> faults;
    std::map<std::string, long> calls;
    std::string launches, out;
    bool held = false;
    std::atomic<long> delay_us{0};
};

void read_faults(State &state)
{
    const char *text = std::getenv("FAKE_FAIL");
    while (text && *text) {
        const size_t length = std::strcspn(text, ";");
        const std::string one(text, length);
        const size_t equal = one.find('='), at = one.find('@');
        state.faults[one.substr(0, equal)] = {std::atoi(one.c_str() + equal + 1),
                                              at == std::string::npos ? 0 : std::atol(one.c_str() + at + 1),
                                              at == std::string::npos ? -1 : 1};
        text += length + (text[length] == ';');
    }
}

State &state()
{
    static State *const made = [] {
        State *fresh = new State();
        read_faults(*fresh);
        const char *delay = std::getenv("FAKE_DELAY_US");
        fresh->delay_us = delay ? std::atol(delay) : 0;
        return fresh;
    }();
    return *made;
}

} // namespace

int enter(const char *name)
{
    const std::lock_guard<std::mutex> lock(state().mutex);
    ++state().calls[name];
    const auto found = state().faults.find(name);
    if (found == state().faults.end() || found->second.times == 0)
        return 0;
    Fault &fault = found->second;
    if (fault.after-- > 0)
        return 0;
    fault.after = 0;
    if (fault.times > 0)
        --fault.times;
    return fault.code;
}

int devices()
{
    const char *given = std::getenv("FAKE_DEVICES");
    return given ? std::atoi(given) : 2;
}

void wait_while_held()
{
    std::unique_lock<std::mutex> lock(state().mutex);
    state().changed.wait(lock, [] { return !state().held; });
}

void delay()
{
    if (const long us = state().delay_us)
        std::this_thread::sleep_for(std::chrono::microseconds(us));
}

void note_launch(const char *name, const unsigned int *grid, u64 stream)
{
    const std::lock_guard<std::mutex> lock(state().mutex);
    std::string line = name;
    for (int at = 0; at < 4; ++at)
        line += " " + std::to_string(grid[at]);
    state().launches += line + " " + std::to_string(stream) + "\n";
}

} // namespace fake

// The call after the next `after` fails with `code`, and so many of that name, -1 all.
EXPORT void fake_fail(const char *name, int code, long after, long times)
{
    const std::lock_guard<std::mutex> lock(fake::state().mutex);
    fake::state().faults[name] = {code, after, times};
}

// As it was when it was loaded, but for what is allocated and queued.
EXPORT void fake_reset()
{
    const std::lock_guard<std::mutex> lock(fake::state().mutex);
    fake::state().faults.clear();
    fake::state().calls.clear();
    fake::state().launches.clear();
    fake::state().held = false;
    fake::state().delay_us = 0;
    fake::state().changed.notify_all();
}

EXPORT long fake_calls(const char *name)
{
    const std::lock_guard<std::mutex> lock(fake::state().mutex);
    return fake::state().calls[name];
}

// A line per launch: name, grid x y z, threads, stream. Empties the list; valid until the next call.
EXPORT const char *fake_launches()
{
    const std::lock_guard<std::mutex> lock(fake::state().mutex);
    fake::state().out.swap(fake::state().launches);
    fake::state().launches.clear();
    return fake::state().out.c_str();
}

EXPORT void fake_delay(long us) { fake::state().delay_us = us; }

// While held, streams begin nothing more.
EXPORT void fake_hold(int on)
{
    const std::lock_guard<std::mutex> lock(fake::state().mutex);
    fake::state().held = on != 0;
    fake::state().changed.notify_all();
}

// What streams have reached: a host function on the stream records it, and whoever asks drains it.
//
// The driver's threads run these functions, so they touch neither Python nor the driver.
#include <pthread.h>

#include <chrono>
#include <deque>
#include <memory>
#include <mutex>

#include "api.h"

namespace lmc {
namespace {

constexpr size_t kMostEvents = 1 << 16;

struct Reached {
    std::mutex mutex;
    std::deque<Completion> completions;
    std::deque<Event> events;
    u64 dropped = 0;
};

void before_fork();
void in_parent();
void in_child();

// Never destroyed: the driver's threads may record until the process is gone.
Reached &reached()
{
    static Reached *const all = [] {
        Reached *made = new Reached();
        pthread_atfork(before_fork, in_parent, in_child);
        return made;
    }();
    return *all;
}

void before_fork() { reached().mutex.lock(); }
void in_parent() { reached().mutex.unlock(); }

void in_child() // what the parent recorded is the parent's to drain
{
    reached().completions.clear();
    reached().events.clear();
    reached().mutex.unlock();
}

void reach_completion(void *given)
{
    const std::unique_ptr<Completion> completion(static_cast<Completion *>(given));
    const std::lock_guard<std::mutex> lock(reached().mutex);
    reached().completions.push_back(std::move(*completion));
}

void reach_event(void *given)
{
    const std::unique_ptr<Event> event(static_cast<Event *>(given));
    event->time = wall_clock();
    const std::lock_guard<std::mutex> lock(reached().mutex);
    if (reached().events.size() == kMostEvents) {
        reached().events.pop_front();
        ++reached().dropped;
    }
    reached().events.push_back(std::move(*event));
}

template <typename T> std::vector<T> drain(std::deque<T> Reached::*which)
{
    std::deque<T> taken;
    {
        const std::lock_guard<std::mutex> lock(reached().mutex);
        taken.swap(reached().*which);
    }
    return std::vector<T>(std::make_move_iterator(taken.begin()), std::make_move_iterator(taken.end()));
}

template <typename T> void record(u64 stream, T &&item, void (*reach)(void *), int device)
{
    reached(); // before the driver's thread needs it
    std::unique_ptr<T> owned(new T(std::move(item)));
    const Current on(device);
    LMC_CALL(stream_host, stream, reach, owned.get());
    (void)owned.release(); // the function's
}

} // namespace

double wall_clock()
{
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

void record_completion(u64 stream, Completion &&completion, int device)
{
    record<Completion>(stream, std::move(completion), reach_completion, device);
}

void record_event(u64 stream, Event &&event, int device)
{
    record<Event>(stream, std::move(event), reach_event, device);
}

std::vector<Completion> drain_completions() { return drain(&Reached::completions); }
std::vector<Event> drain_events() { return drain(&Reached::events); }

u64 dropped_events()
{
    const std::lock_guard<std::mutex> lock(reached().mutex);
    return reached().dropped;
}

} // namespace lmc

// Points that queues reach: marks, which are asked for, and stalls, which hold a queue until they are released.
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>

#include "api.h"

namespace lmc {
namespace {

struct Gate {
    std::mutex lock;
    std::condition_variable opened;
    bool open = false;
};

struct Points {
    std::mutex lock;
    u64 next = 1;
    std::vector<std::pair<u64, sycl::event>> marks;
    std::map<u64, std::shared_ptr<Gate>> gates;
};

// Leaked on purpose: the runtime may be gone when static objects are destroyed.
Points &points()
{
    static Points *const all = new Points;
    return *all;
}

bool is_done(const sycl::event &event)
{
    return event.get_info<sycl::info::event::command_execution_status>() ==
           sycl::info::event_command_status::complete;
}

} // namespace

u64 mark(u64 handle)
{
    try {
        const sycl::event reached = queue_of(handle).ext_oneapi_submit_barrier();
        const std::lock_guard<std::mutex> held(points().lock);
        points().marks.emplace_back(points().next, reached);
        return points().next++;
    } catch (const sycl::exception &fault) {
        throw DeviceError(std::string("mark: SYCL: ") + fault.what());
    }
}

std::vector<u64> passed()
{
    std::vector<u64> out;
    std::vector<std::pair<u64, sycl::event>> waiting;
    const std::lock_guard<std::mutex> held(points().lock);
    for (auto &[number, event] : points().marks) {
        if (is_done(event))
            out.push_back(number);
        else
            waiting.emplace_back(number, event);
    }
    points().marks.swap(waiting);
    return out;
}

u64 stall(u64 handle, double seconds)
{
    if (!(seconds > 0 && seconds <= 600))
        throw std::invalid_argument("stall of " + std::to_string(seconds) + " seconds: expected above 0, at most 600");
    const auto gate = std::make_shared<Gate>();
    u64 ticket;
    {
        const std::lock_guard<std::mutex> held(points().lock);
        ticket = points().next++;
        points().gates[ticket] = gate;
    }
    try {
        queue_of(handle).submit([&](sycl::handler &group) {
            group.host_task([gate, ticket, seconds] {
                {
                    std::unique_lock<std::mutex> held(gate->lock);
                    gate->opened.wait_for(held, std::chrono::duration<double>(seconds), [&] { return gate->open; });
                }
                const std::lock_guard<std::mutex> all(points().lock);
                points().gates.erase(ticket);
            });
        });
    } catch (const sycl::exception &fault) {
        throw DeviceError(std::string("stall: SYCL: ") + fault.what());
    }
    return ticket;
}

void release(u64 ticket)
{
    std::shared_ptr<Gate> gate;
    {
        const std::lock_guard<std::mutex> held(points().lock);
        const auto found = points().gates.find(ticket);
        if (found == points().gates.end())
            return; // its time is up already
        gate = found->second;
    }
    const std::lock_guard<std::mutex> held(gate->lock);
    gate->open = true;
    gate->opened.notify_all();
}

} // namespace lmc

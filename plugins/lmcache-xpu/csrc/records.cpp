// What queues have reached: a host task on the queue notes it, and whoever asks takes it.
#include <chrono>
#include <mutex>

#include "api.h"

namespace lmc {
namespace {

constexpr int kChannels = 2;

struct Reached {
    std::mutex lock;
    std::vector<Record> records[kChannels];
};

// Leaked on purpose: a host task may end after static objects are gone.
Reached &reached()
{
    static Reached *const all = new Reached;
    return *all;
}

double now()
{
    return std::chrono::duration<double>(std::chrono::system_clock::now().time_since_epoch()).count();
}

int checked(int channel)
{
    if (channel < 0 || channel >= kChannels)
        throw std::invalid_argument("channel " + std::to_string(channel) + ": expected 0 or 1");
    return channel;
}

} // namespace

void record(u64 handle, int channel, std::string kind, std::string payload)
{
    checked(channel);
    try {
        queue_of(handle).submit([&](sycl::handler &group) {
            group.host_task([channel, kind = std::move(kind), payload = std::move(payload)] {
                const std::lock_guard<std::mutex> held(reached().lock);
                reached().records[channel].push_back({kind, payload, now()});
            });
        });
    } catch (const sycl::exception &fault) {
        throw DeviceError(std::string("record: SYCL: ") + fault.what());
    }
}

std::vector<Record> drain(int channel)
{
    std::vector<Record> taken;
    const std::lock_guard<std::mutex> held(reached().lock);
    taken.swap(reached().records[checked(channel)]);
    return taken;
}

} // namespace lmc

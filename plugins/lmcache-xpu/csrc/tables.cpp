// Tables of integers for launches: written on the host, copied to the device on the queue, used again when the launch
// is done. As many as are under way at once; they live as long as the process.
#include "tables.h"

#include <mutex>

namespace lmc {
namespace {

struct Pool {
    std::mutex lock;
    std::vector<Tables *> all;
};

Pool &pool()
{
    static Pool *const only = new Pool;
    return *only;
}

bool is_done(const sycl::event &event)
{
    return event.get_info<sycl::info::event::command_execution_status>() ==
           sycl::info::event_command_status::complete;
}

size_t rounded(size_t values)
{
    size_t room = 512;
    while (room < values)
        room *= 2;
    return room;
}

Tables *made(const sycl::queue &queue, size_t room)
{
    u64 *const host = sycl::malloc_host<u64>(room, queue);
    u64 *const device = host ? sycl::malloc_device<u64>(room, queue) : nullptr;
    if (!device) {
        if (host)
            sycl::free(host, queue);
        throw DeviceError("no room for a table of " + std::to_string(room) + " addresses; free device memory");
    }
    return new Tables{queue.get_context(), queue.get_device(), room, host, device, sycl::event(), true};
}

} // namespace

Tables *take_tables(const sycl::queue &queue, size_t values)
{
    const std::lock_guard<std::mutex> held(pool().lock);
    for (Tables *one : pool().all)
        if (!one->taken && one->room >= values && one->context == queue.get_context() &&
            one->device_of == queue.get_device() && is_done(one->done)) {
            one->taken = true;
            return one;
        }
    Tables *const fresh = made(queue, rounded(values));
    pool().all.push_back(fresh);
    return fresh;
}

void give_back(Tables *tables, const sycl::event &done)
{
    const std::lock_guard<std::mutex> held(pool().lock);
    tables->done = done;
    tables->taken = false;
}

i64 count_tables()
{
    const std::lock_guard<std::mutex> held(pool().lock);
    return static_cast<i64>(pool().all.size());
}

} // namespace lmc

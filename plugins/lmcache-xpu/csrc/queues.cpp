// Queues, USM and copies. Objects of the runtime that live as long as the process are leaked on purpose: the runtime
// may be gone when static objects are destroyed.
#include "api.h"

#include <map>
#include <mutex>

#include <unistd.h>

namespace lmc {
namespace {

// What usm_alloc has given and nobody has freed. Leaked on purpose.
struct Memory {
    std::mutex lock;
    std::map<u64, sycl::context> live;
};

Memory &memory()
{
    static Memory *const all = new Memory;
    return *all;
}

// The runtime's threads are not in a process that was forked after their start: what waits for them waits for ever.
void check_process()
{
    static const pid_t first = getpid();
    if (getpid() != first)
        throw DeviceError("SYCL was used before this process was forked, and cannot be used in it: start processes by "
                          "spawn");
}

void *pointer(u64 address) { return reinterpret_cast<void *>(address); }

// The first fault of the calls, in the runtime's words.
template <typename Call> auto runtime(const char *what, Call call) -> decltype(call())
{
    try {
        return call();
    } catch (const sycl::exception &fault) {
        throw DeviceError(std::string(what) + ": SYCL: " + fault.what());
    }
}

} // namespace

sycl::queue &queue_of(u64 handle)
{
    check_process();
    if (!handle)
        throw std::invalid_argument("queue 0: expected the address of a sycl::queue, as torch's sycl_queue has it");
    sycl::queue &queue = *reinterpret_cast<sycl::queue *>(handle);
    if (!queue.is_in_order())
        throw std::invalid_argument("a queue without order: expected an in-order queue, as torch's are");
    return queue;
}

std::vector<std::string> devices()
{
    check_process();
    std::vector<std::string> names;
    for (const sycl::device &device : runtime("devices", [] { return sycl::device::get_devices(); }))
        names.push_back(device.get_info<sycl::info::device::name>());
    return names;
}

u64 queue_create(int index, bool in_order)
{
    check_process();
    return runtime("queue_create", [index, in_order] {
        const std::vector<sycl::device> all = sycl::device::get_devices();
        if (index < 0 || index >= static_cast<int>(all.size()))
            throw DeviceError("device " + std::to_string(index) + ": the SYCL runtime has " +
                              std::to_string(all.size()) + "; install a device's driver");
        const sycl::device &device = all[static_cast<size_t>(index)];
        sycl::queue *const made = in_order ? new sycl::queue(device, {sycl::property::queue::in_order()})
                                           : new sycl::queue(device);
        return reinterpret_cast<u64>(made);
    });
}

void queue_destroy(u64 handle)
{
    runtime("queue_destroy", [handle] { queue_of(handle).wait_and_throw(); });
    delete reinterpret_cast<sycl::queue *>(handle);
}

void queue_wait(u64 handle)
{
    runtime("queue_wait", [handle] { queue_of(handle).wait_and_throw(); });
}

bool queue_is_idle(u64 handle)
{
    return runtime("queue_is_idle", [handle] { return queue_of(handle).ext_oneapi_empty(); });
}

std::string queue_device(u64 handle)
{
    return runtime("queue_device",
                   [handle] { return queue_of(handle).get_device().get_info<sycl::info::device::name>(); });
}

u64 usm_alloc(u64 handle, i64 bytes, const std::string &kind)
{
    const std::string asked = kind + " memory of " + std::to_string(bytes) + " bytes";
    if (bytes < 1)
        throw std::invalid_argument(asked + ": expected 1 byte or more");
    sycl::usm::alloc wanted;
    if (kind == "host")
        wanted = sycl::usm::alloc::host;
    else if (kind == "device")
        wanted = sycl::usm::alloc::device;
    else if (kind == "shared")
        wanted = sycl::usm::alloc::shared;
    else
        throw std::invalid_argument(asked + ": expected host, device or shared");
    constexpr size_t page = 4096;
    const sycl::queue &queue = queue_of(handle);
    void *given = runtime("usm_alloc", [&] {
        return sycl::aligned_alloc(page, static_cast<size_t>(bytes), queue, wanted);
    });
    if (!given)
        throw DeviceError(asked + ": the device has no room for it; free some, or ask for less");
    const std::lock_guard<std::mutex> held(memory().lock);
    memory().live.emplace(reinterpret_cast<u64>(given), queue.get_context());
    return reinterpret_cast<u64>(given);
}

// Of its own context: the queue that it was made for may be gone. The runtime itself takes any address, twice as well.
void usm_free(u64 address)
{
    check_process();
    std::map<u64, sycl::context>::node_type taken;
    {
        const std::lock_guard<std::mutex> held(memory().lock);
        taken = memory().live.extract(address);
    }
    if (taken.empty())
        throw std::invalid_argument("address " + std::to_string(address) +
                                    ": expected USM that usm_alloc gave, and that is not freed yet");
    runtime("usm_free", [&] { sycl::free(pointer(address), taken.mapped()); });
}

std::string usm_kind(u64 handle, u64 address)
{
    switch (runtime("usm_kind", [&] { return sycl::get_pointer_type(pointer(address), queue_of(handle).get_context()); })) {
    case sycl::usm::alloc::host:
        return "host";
    case sycl::usm::alloc::device:
        return "device";
    case sycl::usm::alloc::shared:
        return "shared";
    default:
        return "unknown";
    }
}

void copy_async(u64 handle, u64 to, u64 from, i64 bytes)
{
    if (bytes < 0)
        throw std::invalid_argument("copy of " + std::to_string(bytes) + " bytes: expected 0 or more");
    for (const u64 address : {to, from})
        if (bytes && (!address || address + static_cast<u64>(bytes) < address))
            throw std::invalid_argument("copy of " + std::to_string(bytes) + " bytes: address " +
                                        std::to_string(address) + ": no such memory");
    if (bytes)
        runtime("copy_async", [&] {
            queue_of(handle).memcpy(pointer(to), pointer(from), static_cast<size_t>(bytes));
        });
}

} // namespace lmc

// Streams, events, and words that streams write and wait for.
#include "api.h"

namespace lmc {
namespace {

constexpr unsigned int kNonBlocking = 1;                              // of a stream
constexpr unsigned int kBlockingSync = 1, kNoTiming = 2, kInterprocess = 4; // of an event
constexpr unsigned int kAtLeast = 0;                                  // of stream_wait

bool is_done(int code, Entry entry)
{
    if (code == LMC_NOT_READY) {
        if (driver().kind == kRocm)
            driver().last_error(); // HIP keeps even this one
        return false;
    }
    check(code, entry);
    return true;
}

} // namespace

u64 stream_create(int device, int priority)
{
    const Current on(device);
    u64 stream = 0;
    LMC_CALL(stream_create, &stream, kNonBlocking, priority);
    return stream;
}

void stream_destroy(u64 stream, int device)
{
    const Current on(device);
    LMC_CALL(stream_destroy, stream);
}

void stream_synchronize(u64 stream, int device)
{
    const Current on(device);
    LMC_CALL(stream_synchronize, stream);
}

bool stream_query(u64 stream, int device)
{
    const Current on(device);
    return is_done(driver().stream_query(stream), entry_stream_query);
}

void stream_wait_event(u64 stream, u64 event, int device)
{
    const Current on(device);
    LMC_CALL(stream_wait_event, stream, event, 0);
}

std::pair<int, int> stream_priority_range(int device)
{
    const Current on(device);
    int least = 0, greatest = 0;
    LMC_CALL(stream_priorities, &least, &greatest);
    return {least, greatest};
}

u64 event_create(int device, bool interprocess, bool timing)
{
    if (interprocess && timing)
        throw std::invalid_argument("event_create: interprocess=True, timing=True: expected at most one of them");
    const Current on(device);
    u64 event = 0;
    // Whoever waits for an event on the host sleeps: the engine needs the core.
    LMC_CALL(event_create, &event,
             kBlockingSync | (timing ? 0u : kNoTiming) | (interprocess ? kInterprocess : 0u));
    return event;
}

void event_destroy(u64 event, int device)
{
    const Current on(device);
    LMC_CALL(event_destroy, event);
}

void event_record(u64 event, u64 stream, int device)
{
    const Current on(device);
    LMC_CALL(event_record, event, stream);
}

bool event_query(u64 event, int device)
{
    const Current on(device);
    return is_done(driver().event_query(event), entry_event_query);
}

void event_synchronize(u64 event, int device)
{
    const Current on(device);
    LMC_CALL(event_synchronize, event);
}

double event_elapsed_ms(u64 start, u64 end, int device)
{
    const Current on(device);
    float milliseconds = 0;
    LMC_CALL(event_elapsed, &milliseconds, start, end);
    return milliseconds;
}

std::string event_export(u64 event, int device)
{
    const Current on(device);
    lmc_handle64 handle;
    LMC_CALL(event_export, &handle, event);
    return std::string(reinterpret_cast<const char *>(handle.bytes), sizeof handle.bytes);
}

u64 event_open(int device, const std::string &handle)
{
    const lmc_handle64 given = handle_of(handle);
    const Current on(device);
    u64 event = 0;
    LMC_CALL(event_open, &event, given);
    return event;
}

void stream_write_u64(u64 stream, u64 address, u64 value, int device)
{
    const Current on(device);
    LMC_CALL(stream_write, stream, address, value, 0);
}

void stream_wait_u64_geq(u64 stream, u64 address, u64 value, int device)
{
    const Current on(device);
    if (driver().kind == kRocm)
        LMC_CALL(stream_wait_masked, stream, address, value, kAtLeast, ~static_cast<u64>(0));
    else
        LMC_CALL(stream_wait, stream, address, value, kAtLeast);
}

} // namespace lmc

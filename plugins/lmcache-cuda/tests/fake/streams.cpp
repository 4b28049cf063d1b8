// Streams are threads with a queue; events are pairs of counters, in memory that other processes may map.
#include <linux/futex.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <climits>
#include <condition_variable>
#include <cstring>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <thread>

#include "fake.h"

namespace {

class Stream {
public:
    // The thread owns the stream, too: work that is queued when a stream is destroyed is still done.
    static std::shared_ptr<Stream> start()
    {
        const std::shared_ptr<Stream> made = std::make_shared<Stream>();
        std::thread([made] { made->work(); }).detach(); // the driver's threads outlive main, too
        return made;
    }

    void push(std::function<void()> work)
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        queue_.push_back(std::move(work));
        ++pushed_;
        changed_.notify_all();
    }

    void stop()
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        stopped_ = true;
        changed_.notify_all();
    }

    bool idle()
    {
        const std::lock_guard<std::mutex> lock(mutex_);
        return done_ == pushed_;
    }

    void wait()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        const unsigned long until = pushed_;
        changed_.wait(lock, [&] { return done_ >= until; });
    }

private:
    void work()
    {
        std::unique_lock<std::mutex> lock(mutex_);
        for (;;) {
            changed_.wait(lock, [&] { return stopped_ || !queue_.empty(); });
            if (queue_.empty())
                return;
            const std::function<void()> next = std::move(queue_.front());
            queue_.pop_front();
            lock.unlock();
            fake::wait_while_held();
            fake::delay();
            next();
            lock.lock();
            ++done_;
            changed_.notify_all();
        }
    }

    std::mutex mutex_;
    std::condition_variable changed_;
    std::deque<std::function<void()>> queue_;
    unsigned long pushed_ = 0, done_ = 0;
    bool stopped_ = false;
};

std::mutex &mutex = *new std::mutex;
std::map<u64, std::shared_ptr<Stream>> &streams = *new std::map<u64, std::shared_ptr<Stream>>;
std::map<int, std::shared_ptr<Stream>> &defaults = *new std::map<int, std::shared_ptr<Stream>>;
u64 next = 0x57000000;

// Null: there is no such stream, or it is the default one and the thread has no device.
std::shared_ptr<Stream> find(u64 stream)
{
    const std::lock_guard<std::mutex> lock(mutex);
    if (stream > 2) {
        const auto found = streams.find(stream);
        return found == streams.end() ? nullptr : found->second;
    }
    if (fake::current_device() < 0)
        return nullptr;
    std::shared_ptr<Stream> &one = defaults[fake::current_device()];
    if (!one)
        one = Stream::start();
    return one;
}

int missing(u64 stream) { return stream > 2 ? INVALID_HANDLE : INVALID_CONTEXT; }

} // namespace

int fake::enqueue(u64 stream, std::function<void()> work)
{
    const std::shared_ptr<Stream> found = find(stream);
    if (!found)
        return missing(stream);
    found->push(std::move(work));
    return 0;
}

API(cuStreamCreateWithPriority, hipStreamCreateWithPriority)(u64 *out, unsigned int flags, int priority)
{
    ENTER();
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    if (flags > 1 || priority > 0 || priority < -5)
        return INVALID_VALUE;
    const std::lock_guard<std::mutex> lock(mutex);
    *out = next += 16;
    streams[*out] = Stream::start();
    return 0;
}

API(cuStreamDestroy_v2, hipStreamDestroy)(u64 stream)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = streams.find(stream);
    if (found == streams.end())
        return INVALID_HANDLE;
    found->second->stop();
    streams.erase(found);
    return 0;
}

API(cuStreamSynchronize, hipStreamSynchronize)(u64 stream)
{
    ENTER();
    const std::shared_ptr<Stream> found = find(stream);
    if (!found)
        return missing(stream);
    found->wait();
    return 0;
}

API(cuStreamQuery, hipStreamQuery)(u64 stream)
{
    ENTER();
    const std::shared_ptr<Stream> found = find(stream);
    if (!found)
        return missing(stream);
    return found->idle() ? 0 : LMC_NOT_READY;
}

API(cuCtxGetStreamPriorityRange, hipDeviceGetStreamPriorityRange)(int *least, int *greatest)
{
    ENTER();
    *least = 0;
    *greatest = -5;
    return 0;
}

API(cuLaunchHostFunc, hipLaunchHostFunc)(u64 stream, void (*function)(void *), void *given)
{
    ENTER();
    return fake::enqueue(stream, [function, given] { function(given); });
}

// -------------------------------------------------------------------------------------------------------- copies
API(cuMemsetD8Async, hipMemsetD8Async)(u64 ptr, unsigned char value, size_t size, u64 stream)
{
    ENTER();
    if (const int code = fake::check_copy(ptr, ptr, size))
        return code;
    return fake::enqueue(stream, [=] { std::memset(reinterpret_cast<void *>(ptr), value, size); });
}

#ifdef FAKE_HIP
EXPORT int hipMemcpyAsync(u64 to, u64 from, size_t size, int kind, u64 stream)
{
    ENTER();
    if (kind != 4)
        return INVALID_VALUE;
#else
EXPORT int cuMemcpyAsync(u64 to, u64 from, size_t size, u64 stream)
{
    ENTER();
#endif
    if (const int code = fake::check_copy(to, from, size))
        return code;
    return fake::enqueue(stream, [=] {
        std::memcpy(reinterpret_cast<void *>(to), reinterpret_cast<const void *>(from), size);
    });
}

#if !defined(FAKE_HIP) && !defined(FAKE_OLD)
EXPORT int cuMemcpyBatchAsync_v2(u64 *to, u64 *from, size_t *sizes, size_t count, lmc_copy_attributes *attributes,
                                 size_t *firsts, size_t attribute_count, u64 stream)
{
    ENTER();
    if (stream < 3 || attribute_count != 1 || firsts[0] != 0 || attributes->order != 1)
        return INVALID_VALUE;
    for (size_t at = 0; at < count; ++at)
        if (!sizes[at] || fake::check_copy(to[at], from[at], sizes[at]))
            return INVALID_VALUE;
    for (size_t at = 0; at < count; ++at) {
        const u64 into = to[at], out_of = from[at];
        const size_t size = sizes[at];
        const int code = fake::enqueue(stream, [=] {
            std::memcpy(reinterpret_cast<void *>(into), reinterpret_cast<const void *>(out_of), size);
        });
        if (code)
            return code;
    }
    return 0;
}
#endif

// -------------------------------------------------------------------------------------------------------- events
namespace {

struct Counters { // never goes away while somebody waits: it is not unmapped
    std::atomic<unsigned int> recorded, completed;
    std::atomic<long> nanoseconds;
};

struct Event {
    Counters *counters;
    int fd;
    unsigned int flags;
    bool imported;
};

std::map<u64, Event> &events = *new std::map<u64, Event>;

bool find_event(u64 event, Event *out)
{
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = events.find(event);
    if (found == events.end())
        return false;
    *out = found->second;
    return true;
}

u64 add_event(const Event &event)
{
    const std::lock_guard<std::mutex> lock(mutex);
    events[next += 16] = event;
    return next;
}

void wait_for(Counters *counters, unsigned int until)
{
    for (;;) {
        const unsigned int now = counters->completed;
        if (static_cast<int>(now - until) >= 0)
            return;
        const timespec most = {1, 0};
        syscall(SYS_futex, &counters->completed, FUTEX_WAIT, now, &most, nullptr, 0);
    }
}

Counters *map_counters(int fd)
{
    void *made = mmap(nullptr, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    return made == MAP_FAILED ? nullptr : static_cast<Counters *>(made);
}

} // namespace

API(cuEventCreate, hipEventCreateWithFlags)(u64 *out, unsigned int flags)
{
    ENTER();
    if (fake::current_device() < 0)
        return INVALID_CONTEXT;
    if (flags > 7 || ((flags & 4) && !(flags & 2)))
        return INVALID_VALUE;
    const int fd = fake::new_memory(4096);
    Counters *counters = map_counters(fd);
    if (!counters)
        return LMC_OUT_OF_MEMORY;
    *out = add_event({counters, fd, flags, false});
    return 0;
}

API(cuEventDestroy_v2, hipEventDestroy)(u64 event)
{
    ENTER();
    const std::lock_guard<std::mutex> lock(mutex);
    const auto found = events.find(event);
    if (found == events.end())
        return INVALID_HANDLE;
    close(found->second.fd);
    events.erase(found);
    return 0;
}

API(cuEventRecord, hipEventRecord)(u64 event, u64 stream)
{
    ENTER();
    Event found;
    if (!find_event(event, &found))
        return INVALID_HANDLE;
    Counters *counters = found.counters;
    const unsigned int number = ++counters->recorded;
    return fake::enqueue(stream, [counters, number] {
        counters->nanoseconds = std::chrono::steady_clock::now().time_since_epoch().count();
        counters->completed = number;
        syscall(SYS_futex, &counters->completed, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
    });
}

API(cuStreamWaitEvent, hipStreamWaitEvent)(u64 stream, u64 event, unsigned int flags)
{
    ENTER();
    Event found;
    if (!find_event(event, &found) || flags)
        return INVALID_HANDLE;
    Counters *counters = found.counters;
    const unsigned int until = counters->recorded;
    return fake::enqueue(stream, [counters, until] { wait_for(counters, until); });
}

API(cuEventQuery, hipEventQuery)(u64 event)
{
    ENTER();
    Event found;
    if (!find_event(event, &found))
        return INVALID_HANDLE;
    return found.counters->completed == found.counters->recorded ? 0 : LMC_NOT_READY;
}

API(cuEventSynchronize, hipEventSynchronize)(u64 event)
{
    ENTER();
    Event found;
    if (!find_event(event, &found))
        return INVALID_HANDLE;
    wait_for(found.counters, found.counters->recorded);
    return 0;
}

API(cuEventElapsedTime, hipEventElapsedTime)(float *out, u64 start, u64 end)
{
    ENTER();
    Event from, to;
    if (!find_event(start, &from) || !find_event(end, &to) || (from.flags & 2) || (to.flags & 2))
        return INVALID_HANDLE;
    if (from.counters->completed != from.counters->recorded || to.counters->completed != to.counters->recorded)
        return LMC_NOT_READY;
    *out = static_cast<float>(to.counters->nanoseconds - from.counters->nanoseconds) / 1e6f;
    return 0;
}

API(cuIpcGetEventHandle, hipIpcGetEventHandle)(lmc_handle64 *out, u64 event)
{
    ENTER();
    Event found;
    if (!find_event(event, &found) || !(found.flags & 4) || found.imported)
        return INVALID_HANDLE;
    const fake::Place place = {"FAKEEVT", getpid(), found.fd, 4096, event, fake::current_device()};
    std::memset(out, 0, sizeof *out);
    std::memcpy(out, &place, sizeof place);
    return 0;
}

API(cuIpcOpenEventHandle, hipIpcOpenEventHandle)(u64 *out, lmc_handle64 handle)
{
    ENTER();
    fake::Place place;
    std::memcpy(&place, &handle, sizeof place);
    if (std::strcmp(place.magic, "FAKEEVT") || place.pid == getpid())
        return INVALID_VALUE;
    const int fd = fake::open_of(place.pid, place.fd);
    Counters *counters = fd < 0 ? nullptr : map_counters(fd);
    if (!counters)
        return INVALID_VALUE;
    *out = add_event({counters, fd, 6, true});
    return 0;
}

// --------------------------------------------------------------------------------------- words of memory
API(cuStreamWriteValue64_v2, hipStreamWriteValue64)(u64 stream, u64 address, u64 value, unsigned int flags)
{
    ENTER();
    if (flags || address % 8)
        return INVALID_VALUE;
    return fake::enqueue(stream, [=] { __atomic_store_n(reinterpret_cast<u64 *>(address), value, __ATOMIC_RELEASE); });
}

#ifdef FAKE_HIP
EXPORT int hipStreamWaitValue64(u64 stream, u64 address, u64 value, unsigned int flags, u64 mask)
{
    ENTER();
    if (mask != ~0ull)
        return INVALID_VALUE;
#else
EXPORT int cuStreamWaitValue64_v2(u64 stream, u64 address, u64 value, unsigned int flags)
{
    ENTER();
#endif
    if (flags || address % 8)
        return INVALID_VALUE;
    return fake::enqueue(stream, [=] {
        const u64 *word = reinterpret_cast<const u64 *>(address);
        while (static_cast<int64_t>(__atomic_load_n(word, __ATOMIC_ACQUIRE) - value) < 0)
            std::this_thread::sleep_for(std::chrono::microseconds(50));
    });
}

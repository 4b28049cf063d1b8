// What streams have reached: recorded by a callback on the stream, drained by whoever asks.
#include <lmcache_sim.h>

#include <deque>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

namespace {

struct Completion {
    std::string kind, payload;
};

std::mutex mutex;
std::deque<Completion> reached;

// After work that failed nothing is told: it is not complete.
void reach(void *given, int status)
{
    std::unique_ptr<Completion> completion(static_cast<Completion *>(given));
    if (status != LMCACHE_SIM_OK) return;
    const std::lock_guard<std::mutex> lock(mutex);
    reached.push_back(std::move(*completion));
}

void put(std::vector<char> &out, const std::string &text)
{
    const uint64_t size = text.size();
    const char *raw = reinterpret_cast<const char *>(&size);
    out.insert(out.end(), raw, raw + sizeof size);
    out.insert(out.end(), text.begin(), text.end());
}

} // namespace

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

SIM_EXPORT int lmcache_sim_plugin_record(uint64_t stream, const char *kind, uint64_t kind_bytes, const char *payload,
                                         uint64_t payload_bytes)
{
    auto completion = std::make_unique<Completion>();
    completion->kind.assign(kind, kind_bytes);
    completion->payload.assign(payload, payload_bytes);
    const int code = lmcache_sim_host_func(stream, reach, completion.get());
    if (code == LMCACHE_SIM_OK) (void)completion.release(); // the callback's
    return code;
}

// Takes all that is due: size and bytes of each kind and payload in turn. The memory is this thread's until its
// next call.
SIM_EXPORT const char *lmcache_sim_plugin_drain(uint64_t *bytes)
{
    thread_local std::vector<char> out;
    std::deque<Completion> taken;
    {
        const std::lock_guard<std::mutex> lock(mutex);
        taken.swap(reached);
    }
    out.clear();
    for (const Completion &completion : taken) {
        put(out, completion.kind);
        put(out, completion.payload);
    }
    *bytes = out.size();
    return out.data();
}

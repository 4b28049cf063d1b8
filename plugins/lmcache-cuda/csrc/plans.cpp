// execute_object_group_transfer: staging copies and launches, batch by batch, all checked before the first is queued.
#include <algorithm>
#include <atomic>
#include <list>
#include <memory>
#include <mutex>

#include "api.h"

namespace lmc {
namespace {

const char *const kOp = "execute_object_group_transfer";

struct Batch {
    std::vector<Copy> copies;
    std::vector<Planned> launches;
};

// --------------------------------------------------------------------------------------------------- timing
// The end of a call: when it was reached, by the clock and by an event. Shared by its phases and the stream.
struct End {
    u64 event = 0;
    std::atomic<double> time{0};
};

struct Phase {
    Timing timing;
    u64 start = 0, end = 0;
    std::shared_ptr<End> call;
};

std::mutex timed_mutex;
std::list<Phase> &timed = *new std::list<Phase>;

void reach_end(void *given)
{
    const std::unique_ptr<std::shared_ptr<End>> call(static_cast<std::shared_ptr<End> *>(given));
    (*call)->time = wall_clock();
}

class Clock { // does nothing where no timing is asked for
public:
    Clock(const PlanCall &call, const Current &on) : call_(call), on_(on) {}
    Clock(const Clock &) = delete;
    Clock &operator=(const Clock &) = delete;

    ~Clock() // of a call that failed on its way: nobody will ask for its phases
    {
        for (const Phase &phase : phases_)
            for (const u64 event : {phase.start, phase.end})
                if (event)
                    (void)driver().event_destroy(event);
        if (!phases_.empty() && end_->event)
            (void)driver().event_destroy(end_->event);
    }

    template <typename Work> void phase(int phase, u64 nbytes, Work work)
    {
        if (!call_.timed)
            return work();
        phases_.emplace_back();
        Phase &made = phases_.back();
        made.timing.phase = phase;
        made.timing.direction = call_.direction;
        made.timing.device = on_.device();
        made.timing.nbytes = nbytes;
        made.timing.session = call_.session;
        made.call = end_;
        made.start = mark();
        work();
        made.end = mark();
    }

    void finish()
    {
        if (phases_.empty())
            return;
        end_->event = mark();
        std::unique_ptr<std::shared_ptr<End>> given(new std::shared_ptr<End>(end_));
        LMC_CALL(stream_host, call_.stream, reach_end, given.get());
        (void)given.release(); // the stream's
        const std::lock_guard<std::mutex> lock(timed_mutex);
        timed.splice(timed.end(), phases_);
    }

private:
    u64 mark() const
    {
        const u64 event = event_create(on_.device(), false, true);
        const int code = driver().event_record(event, call_.stream);
        if (code)
            (void)driver().event_destroy(event);
        check(code, entry_event_record);
        return event;
    }

    const PlanCall &call_;
    const Current &on_;
    std::list<Phase> phases_;
    std::shared_ptr<End> end_ = std::make_shared<End>();
};

Timing read(const Phase &phase)
{
    const int device = phase.timing.device;
    Timing timing = phase.timing;
    timing.milliseconds = event_elapsed_ms(phase.start, phase.end, device);
    timing.end = phase.call->time - event_elapsed_ms(phase.end, phase.call->event, device) / 1e3;
    timing.start = timing.end - timing.milliseconds / 1e3;
    event_destroy(phase.start, device);
    event_destroy(phase.end, device);
    return timing;
}

// ----------------------------------------------------------------------------------------------------- checks
Planned plan_launch(const PlanCall &call, const Launch &launch)
{
    const i64 groups = static_cast<i64>(call.groups.size());
    if (launch.group < 0 || launch.group >= groups)
        throw std::invalid_argument(std::string(kOp) + ": group " + std::to_string(launch.group) +
                                    " of a launch: expected 0 to " + std::to_string(groups - 1));
    const Group &group = call.groups[static_cast<size_t>(launch.group)];
    if (launch.offset < 0 || launch.blocks < 0 || launch.offset > group.ids_capacity - launch.blocks)
        throw std::invalid_argument(std::string(kOp) + ": block ids " + std::to_string(launch.offset) + " to " +
                                    std::to_string(launch.offset + launch.blocks) + ": expected within the " +
                                    std::to_string(group.ids_capacity) + " that there is room for");
    if (launch.objects < 0 || launch.objects > static_cast<i64>(group.objects.size()))
        throw std::invalid_argument(std::string(kOp) + ": " + std::to_string(launch.objects) +
                                    " objects of a launch: expected 0 to " + std::to_string(group.objects.size()));
    TransferCall made = TransferCall();
    made.op = kOp;
    made.format = group.format;
    made.direction = call.direction;
    made.shape = group.shape;
    made.pages.address = group.pages;
    made.page_alignment = group.page_alignment;
    made.ids.address = group.ids + 8 * static_cast<u64>(launch.offset);
    made.ids.count = launch.blocks;
    made.objects.assign(group.objects.begin(), group.objects.begin() + launch.objects);
    made.object_slots = group.chunk_size;
    made.skip = launch.skip;
    return plan_transfer(made);
}

Batch check_step(const PlanCall &call, const Step &step)
{
    Batch batch;
    for (const Staging &copy : step.staging)
        cut_copy(batch.copies, copy.dest, copy.src, copy.nbytes, copy.host_offset, call.host_alignment);
    for (const Launch &launch : step.launches)
        batch.launches.push_back(plan_launch(call, launch));
    return batch;
}

u64 bytes_of(const Planned &planned)
{
    const lmc_transfer &t = planned.transfer;
    return static_cast<u64>(t.units - t.skip) * static_cast<u64>(t.planes) * static_cast<u64>(t.layers) *
           static_cast<u64>(t.rows) * static_cast<u64>(t.heads) * static_cast<u64>(t.run);
}

void queue_step(const Batch &batch, const PlanCall &call, const Current &on, Clock &clock)
{
    u64 staged = 0, moved = 0;
    for (const Copy &copy : batch.copies)
        staged += copy.nbytes;
    for (const Planned &planned : batch.launches)
        moved += bytes_of(planned);
    const auto stage = [&] {
        if (staged)
            clock.phase(1, staged, [&] {
                for (const Copy &copy : batch.copies)
                    queue_copy(copy, call.stream);
            });
    };
    if (call.direction == LMC_H2D)
        stage();
    if (moved)
        clock.phase(0, moved, [&] {
            for (const Planned &planned : batch.launches)
                queue_transfer(planned, call.stream, on);
        });
    if (call.direction == LMC_D2H)
        stage();
}

} // namespace

void execute_plan(const PlanCall &call)
{
    check_alignment(call.host_alignment);
    if (call.direction != LMC_H2D && call.direction != LMC_D2H)
        throw std::invalid_argument(std::string(kOp) + ": direction " + std::to_string(call.direction) +
                                    ": expected 0 (H2D) or 1 (D2H)");
    std::vector<Batch> batches;
    for (const Step &step : call.steps)
        batches.push_back(check_step(call, step));
    if (batches.empty())
        return;
    const Current on(call.device);
    Clock clock(call, on);
    for (const Batch &batch : batches)
        queue_step(batch, call, on, clock);
    clock.finish();
}

std::vector<Timing> pop_timings()
{
    std::list<Phase> due;
    {
        const std::lock_guard<std::mutex> lock(timed_mutex);
        for (auto at = timed.begin(); at != timed.end();) {
            const auto next = std::next(at);
            if (at->call->time != 0)
                due.splice(due.end(), timed, at);
            at = next;
        }
    }
    std::vector<Timing> timings;
    for (auto at = due.begin(); at != due.end(); ++at) {
        timings.push_back(read(*at));
        const auto next = std::next(at);
        if (next == due.end() || next->call != at->call)
            event_destroy(at->call->event, at->timing.device);
    }
    return timings;
}

} // namespace lmc

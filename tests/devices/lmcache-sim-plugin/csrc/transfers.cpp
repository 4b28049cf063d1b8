// Transfers between paged KV and objects: the core's kernel bodies, run on the device's streams.
//
// Addresses of the device are numbers here. The plan is made on the host, where all that can be checked is; the
// kernel translates what it touches, as the device's other kernels do, and so faults where they would.
#include <lmcache/kv_body.h>
#include <lmcache/transfer.h>

#include <lmcache_sim.h>

#include <algorithm>
#include <memory>
#include <new>
#include <vector>

// Integers either in device memory, or on the host, from where they travel with the launch.
struct sim_table {
    uint64_t device;
    const lmc_u64 *host;
    int32_t count;
};

struct sim_call {
    uint64_t stream;
    int32_t format, direction;
    int32_t shape[8]; // PageBufferShapeDesc, in its order
    sim_table pages, objects, ids;
    int32_t object_slots, skip;
    int32_t by_slot, token_major;
    int32_t objects_on_host;
};

namespace {

constexpr int kDriver = -1;    // lmcache_sim_last_error() has the text
constexpr int kPointers = -2;  // another number of pages than the format has

struct Table {
    uint64_t device;
    int count;
    std::vector<lmc_u64> host;

    explicit Table(const sim_table &given) : device(given.device), count(given.count)
    {
        if (!device && count) host.assign(given.host, given.host + count);
    }

    const lmc_u64 *open() const
    {
        if (!device || !count) return host.data();
        return static_cast<const lmc_u64 *>(lmcache_sim_translate(device, 8ull * count));
    }
};

struct Job {
    lmc_layout layout;
    lmc_object object;
    lmc_transfer transfer;
    Table pages, objects, ids;
    bool by_slot, objects_on_host;

    explicit Job(const sim_call &call)
        : pages(call.pages), objects(call.objects), ids(call.ids), by_slot(call.by_slot != 0),
          objects_on_host(call.objects_on_host != 0)
    {
    }

    int plan(int direction, int skip, lmc_u64 alignment)
    {
        if (by_slot) return lmc_slot_transfer(&transfer, &layout, &object, direction, ids.count, skip, alignment);
        return lmc_block_transfer(&transfer, &layout, &object, direction, objects.count, ids.count, skip, alignment);
    }
};

lmc_shape_desc shape_of(const int32_t (&numbers)[8])
{
    lmc_shape_desc shape = LMC_INIT(lmc_shape_desc);
    shape.kv_size = numbers[0];
    shape.nl = numbers[1];
    shape.nb = numbers[2];
    shape.bs = numbers[3];
    shape.nh = numbers[4];
    shape.hs = numbers[5];
    shape.element_size = numbers[6];
    shape.block_stride_elems = numbers[7];
    return shape;
}

// Bytes from where a unit of a plane of a layer begins to its last.
lmc_i64 unit_span(const lmc_transfer &t, lmc_i64 row, lmc_i64 head)
{
    return (t.rows - 1) * row + (t.heads - 1) * head + t.run;
}

lmc_i64 page_span(const lmc_transfer &t, lmc_i64 last_id)
{
    return (t.planes - 1) * t.page_kv + (t.layers - 1) * t.page_layer +
           lmc_slot_block(last_id, t.units_per_block) * t.page_block +
           (t.units_per_block > 1 ? (t.units_per_block - 1) * t.page_slot : 0) + unit_span(t, t.page_row, t.page_head);
}

lmc_i64 object_span(const lmc_transfer &t, int units)
{
    return t.object_first + (t.planes - 1) * t.object_kv + (t.layers - 1) * t.object_layer +
           (units - 1) * t.object_unit + unit_span(t, t.object_row, t.object_head);
}

// Where this process finds each of a table's addresses; empty if one is none, which the device then reports.
std::vector<lmc_u64> opened(const lmc_u64 *addresses, int count, lmc_i64 bytes)
{
    std::vector<lmc_u64> found;
    for (int at = 0; at < count; ++at) {
        void *memory = lmcache_sim_translate(addresses[at], static_cast<uint64_t>(bytes));
        if (memory == nullptr) return {};
        found.push_back(reinterpret_cast<lmc_u64>(memory));
    }
    return found;
}

void run(void *given)
{
    Job &job = *static_cast<Job *>(given);
    const lmc_transfer plan = job.transfer; // in bytes of the element size; the addresses may allow more
    const lmc_u64 *ids = job.ids.open(), *pages = job.pages.open();
    if (ids == nullptr || pages == nullptr) return;
    const lmc_i64 *signed_ids = reinterpret_cast<const lmc_i64 *>(ids);
    if (!job.by_slot && !lmc_ids_in_range(&plan, signed_ids))
        return lmcache_sim_fail("multi_layer_block_kv_transfer: a block id is out of range; nothing was moved");
    lmc_i64 last = -1;
    for (int at = plan.skip; at < plan.units; ++at)
        if (!plan.limit || signed_ids[at] < plan.limit) last = std::max(last, signed_ids[at]);
    if (last < 0) return; // no id names anything
    const int units = std::min(plan.units_per_object, plan.units);
    const std::vector<lmc_u64> paged = opened(pages, job.pages.count, page_span(plan, last));
    std::vector<lmc_u64> objects = job.objects.host;
    if (!job.objects_on_host) objects = opened(objects.data(), job.objects.count, object_span(plan, units));
    if (paged.empty() || objects.empty()) return;
    const lmc_u64 alignment =
        lmc_alignment_of(paged.data(), job.pages.count) | lmc_alignment_of(objects.data(), job.objects.count);
    if (job.plan(plan.direction, plan.skip, alignment) != LMC_OK)
        return lmcache_sim_fail("a transfer that was planned cannot be planned again");
    if (job.objects_on_host) {
        const lmc_i64 unit = static_cast<lmc_i64>(plan.rows) * plan.heads * plan.run;
        lmcache_sim_charge_link(static_cast<uint64_t>(unit * plan.planes * plan.layers * (plan.units - plan.skip)));
    }
    lmc_kv_transfer_body(job.transfer, paged, objects, signed_ids, lmc_grid{0, 0, 0, 0, 1, 1, 1, 1});
}

void release(void *job) { delete static_cast<Job *>(job); }

int prepare(Job &job, const sim_call &call)
{
    const lmc_shape_desc shape = shape_of(call.shape);
    int error = lmc_layout_init(&job.layout, call.format, &shape);
    if (!error)
        error = call.token_major ? lmc_object_init_token_major(&job.object, &job.layout, call.object_slots)
                                 : lmc_object_init(&job.object, &job.layout, call.object_slots);
    if (!error) error = job.plan(call.direction, call.skip, static_cast<lmc_u64>(shape.element_size));
    if (error) return error;
    const lmc_layout &layout = job.layout;
    const int pointers = layout.ptr_first + (layout.num_layers - 1) * layout.ptr_layer +
                         (layout.shape[0] - 1) * layout.ptr_kv + 1;
    return pointers == job.pages.count ? LMC_OK : kPointers;
}

} // namespace

#define SIM_EXPORT extern "C" __attribute__((visibility("default")))

SIM_EXPORT int lmcache_sim_plugin_abi() { return LMCACHE_NATIVE_ABI; }

// LMC_OK, one of the SDK's answers, or one of the negative ones above; whatever it is, nothing was queued then.
SIM_EXPORT int lmcache_sim_plugin_transfer(const sim_call *call)
{
    auto job = std::make_unique<Job>(*call);
    if (const int error = prepare(*job, *call)) return error;
    if (job->transfer.skip == job->transfer.units) return LMC_OK;
    if (lmcache_sim_launch_owned(call->stream, run, job.get(), release) != LMCACHE_SIM_OK) return kDriver;
    (void)job.release(); // the stream's
    return LMC_OK;
}

SIM_EXPORT const char *lmcache_sim_plugin_error_text(int error)
{
    if (error == kDriver) return lmcache_sim_last_error();
    if (error == kPointers) return "another number of addresses than the KV format has tensors";
    return lmc_error_text(error);
}

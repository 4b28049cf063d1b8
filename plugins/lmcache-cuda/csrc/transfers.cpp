// Transfers of blocks and of slots: checked and planned by the SDK on the host, then launched.
#include <lmcache/transfer.h>

#include <algorithm>
#include <unordered_set>

#include "api.h"

namespace lmc {
namespace {

constexpr i64 kMostPages = 384; // of the pool; the rest is for ids and objects

std::string op_text(const char *op) { return std::string(op) + ": "; }

// A transfer of planes of their own widths sees the table of all of them.
i64 table_size(const TransferCall &call, const lmc_layout &layout)
{
    return call.widths.empty() ? lmc_num_pointers(&layout)
                               : static_cast<i64>(layout.num_layers) * static_cast<i64>(call.widths.size());
}

void check_pages(const TransferCall &call, const lmc_layout &layout)
{
    const i64 expected = table_size(call, layout), given = call.pages.size();
    if (given != expected && (given >= 0 || !call.pages.address))
        throw LayoutError(op_text(call.op) + std::to_string(given) + " addresses of pages: expected " +
                          std::to_string(expected) + ", the tensors of KV format " + std::to_string(call.format));
}

void check_ids(const TransferCall &call, const lmc_transfer &planned)
{
    if (call.ids.address || call.by_slot)
        return;
    for (int at = planned.skip; at < planned.units; ++at) {
        const i64 id = static_cast<i64>(call.ids.values[static_cast<size_t>(at)]);
        if (id < 0 || (planned.limit && id >= planned.limit))
            throw std::invalid_argument(op_text(call.op) + "block id " + std::to_string(id) + ": expected 0 " +
                                        (planned.limit ? "to " + std::to_string(planned.limit - 1) : "or more"));
    }
}

// Threads run in no order: of an id that is written several times only the last is kept, as the baseline does.
void keep_last(std::vector<u64> &ids, const lmc_transfer &planned)
{
    std::unordered_set<u64> seen;
    for (int at = planned.units; at-- > planned.skip;)
        if (!seen.insert(ids[static_cast<size_t>(at)]).second)
            ids[static_cast<size_t>(at)] = ~static_cast<u64>(0);
}

lmc_object object_of(const TransferCall &call, const lmc_layout &layout)
{
    lmc_object object;
    const int slots = static_cast<int>(std::min<i64>(std::max<i64>(call.object_slots, 0), LMC_INT_MAX));
    check_answer(call.op, call.format,
                 call.token_major ? lmc_object_init_token_major(&object, &layout, slots)
                                  : lmc_object_init(&object, &layout, slots));
    return object;
}

// How many ids from `begin` on fit into a launch.
i64 ids_of_launch(const Planned &planned, i64 begin)
{
    const i64 per_object = planned.transfer.units_per_object;
    const i64 room = LMC_POOL - static_cast<i64>(planned.pages.values.size());
    const i64 fit = planned.ids.address ? (room - 1) * per_object : (room - 2) * per_object / (per_object + 1);
    return std::min<i64>(fit, planned.transfer.units - begin);
}

void fill_pool(lmc_move &move, const Planned &planned)
{
    const auto copy = [&move](const u64 *from, i64 count, int at) {
        std::copy(from, from + count, move.pool + at);
        return at + static_cast<int>(count);
    };
    const int last = (move.t.units - 1) / move.t.units_per_object;
    int at = copy(planned.pages.values.data(), static_cast<i64>(planned.pages.values.size()), move.pages_at = 0);
    move.first_object = move.t.skip / move.t.units_per_object;
    move.objects_at = at;
    at = copy(planned.objects.data() + move.first_object, last - move.first_object + 1, at);
    if (planned.ids.address)
        return;
    move.first_id = move.t.skip;
    move.ids_at = at;
    copy(planned.ids.values.data() + move.first_id, move.t.units - move.t.skip, at);
}

} // namespace

void check_answer(const char *op, int format, int answer)
{
    if (answer == LMC_OK)
        return;
    const std::string text = op_text(op) + "KV format " + std::to_string(format) + ": " + lmc_error_text(answer);
    if (answer == LMC_E_RANGE)
        throw std::invalid_argument(text);
    throw LayoutError(text);
}

lmc_layout layout_of(const TransferCall &call)
{
    lmc_layout layout;
    const int planes = static_cast<int>(call.widths.size());
    check_answer(call.op, call.format,
                 planes ? lmc_layout_init_plane(&layout, call.format, &call.shape, call.plane, planes,
                                                call.widths.data())
                        : lmc_layout_init(&layout, call.format, &call.shape));
    return layout;
}

Planned plan_transfer(const TransferCall &call)
{
    const lmc_layout layout = layout_of(call);
    check_pages(call, layout);
    const lmc_object object = object_of(call, layout);
    const i64 ids = call.ids.size(), skip = call.skip;
    if (ids < 0 || ids > LMC_INT_MAX || skip < 0)
        throw std::invalid_argument(op_text(call.op) + std::to_string(ids) + " ids, the first " +
                                    std::to_string(skip) + " left alone: expected 0 or more, and their number " +
                                    "for a table in device memory");
    const int objects = static_cast<int>(call.objects.size());
    const int number = static_cast<int>(ids), left = static_cast<int>(std::min(skip, ids));
    // What is not known here, the kernel looks at.
    const u64 alignment =
        call.page_alignment | lmc_alignment_of(call.objects.data(), objects) |
        lmc_alignment_of(call.pages.values.data(), static_cast<int>(call.pages.values.size()));
    Planned planned = {LMC_INIT(lmc_transfer), call.pages, call.ids, call.objects};
    check_answer(call.op, call.format,
                 call.by_slot ? lmc_slot_transfer(&planned.transfer, &layout, &object, call.direction, number, left,
                                                  alignment)
                              : lmc_block_transfer(&planned.transfer, &layout, &object, call.direction, objects, number,
                                                   left, alignment));
    check_ids(call, planned.transfer);
    if (call.direction == LMC_H2D && !call.ids.address)
        keep_last(planned.ids.values, planned.transfer);
    return planned;
}

void queue_transfer(const Planned &planned, u64 stream, const Current &on)
{
    const lmc_transfer &all = planned.transfer;
    const unsigned int vecs = static_cast<unsigned int>(lmc_unit_vecs(all));
    const unsigned int threads = std::min((vecs + 31) / 32 * 32, static_cast<unsigned int>(LMC_MOST_THREADS));
    for (i64 begin = all.skip; begin < all.units;) {
        lmc_move move = lmc_move();
        move.t = all;
        move.t.skip = static_cast<int>(begin);
        move.t.units = static_cast<int>(begin + ids_of_launch(planned, begin));
        move.pages = planned.pages.address;
        move.ids = planned.ids.address;
        fill_pool(move, planned);
        launch(kernel_lmcache_move, &move,
               {static_cast<unsigned int>(move.t.units - move.t.skip),
                std::min(static_cast<unsigned int>(all.layers), 65535u), static_cast<unsigned int>(all.planes),
                threads},
               stream, on);
        begin = move.t.units;
    }
}

void transfer(const TransferCall &call)
{
    const Planned planned = plan_transfer(call);
    const i64 pages = static_cast<i64>(planned.pages.values.size());
    if (pages > kMostPages)
        throw std::invalid_argument(op_text(call.op) + std::to_string(pages) + " addresses of pages: expected at most " +
                                    std::to_string(kMostPages) + ", or a table in device memory");
    if (planned.transfer.skip == planned.transfer.units)
        return;
    const Current on(call.device);
    queue_transfer(planned, call.stream, on);
}

} // namespace lmc

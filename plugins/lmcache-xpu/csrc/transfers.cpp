// Transfers of blocks and of slots: checked and planned by the SDK on the host, then launched on the queue.
#include <algorithm>
#include <cstring>
#include <unordered_set>

#include "tables.h"

namespace lmc {
namespace {

void check_answer(const TransferCall &call, int answer)
{
    if (answer == LMC_OK)
        return;
    const std::string text = call.op + ": KV format " + std::to_string(call.format) + ": " + lmc_error_text(answer);
    if (answer == LMC_E_RANGE)
        throw std::invalid_argument(text);
    throw LayoutError(text);
}

void check_pages(const TransferCall &call, const lmc_layout &layout)
{
    // A plane of its own width sees the table of all of them.
    const i64 expected = call.widths.empty()
                             ? lmc_num_pointers(&layout)
                             : static_cast<i64>(layout.num_layers) * static_cast<i64>(call.widths.size());
    if (call.pages.size() != expected)
        throw LayoutError(call.op + ": " + std::to_string(call.pages.size()) + " addresses of pages: expected " +
                          std::to_string(expected) + ", the tensors of KV format " + std::to_string(call.format));
}

void check_addresses(const TransferCall &call, const char *what, const std::vector<u64> &addresses)
{
    const auto null = std::find(addresses.begin(), addresses.end(), 0);
    if (null != addresses.end())
        throw std::invalid_argument(call.op + ": " + what + "[" + std::to_string(null - addresses.begin()) +
                                    "] is address 0: expected memory that the device reaches");
}

void check_ids(const TransferCall &call, const lmc_transfer &planned)
{
    if (call.ids.address)
        return;
    for (int at = planned.skip; at < planned.units; ++at) {
        const i64 id = static_cast<i64>(call.ids.values[static_cast<size_t>(at)]);
        const bool beyond = planned.limit && id >= planned.limit;
        if (beyond || (id < 0 && !call.by_slot))
            throw std::invalid_argument(call.op + ": " + (call.by_slot ? "slot " : "block id ") + std::to_string(id) +
                                        ": expected below " + std::to_string(planned.limit) + ", 0 or more");
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
    check_answer(call, call.token_major ? lmc_object_init_token_major(&object, &layout, slots)
                                        : lmc_object_init(&object, &layout, slots));
    return object;
}

lmc_transfer planned_of(const TransferCall &call)
{
    lmc_layout layout;
    lmc_transfer planned;
    const int planes = static_cast<int>(call.widths.size());
    check_answer(call, planes ? lmc_layout_init_plane(&layout, call.format, &call.shape, call.plane, planes,
                                                      call.widths.data())
                              : lmc_layout_init(&layout, call.format, &call.shape));
    check_pages(call, layout);
    const lmc_object object = object_of(call, layout);
    check_addresses(call, "pages", call.pages.values);
    check_addresses(call, "objects", call.objects);
    const i64 ids = call.ids.size();
    if (ids < 0 || ids > LMC_INT_MAX || call.skip < 0)
        throw std::invalid_argument(call.op + ": " + std::to_string(ids) + " ids, the first " +
                                    std::to_string(call.skip) + " left alone: expected 0 or more");
    const int number = static_cast<int>(ids), skip = static_cast<int>(std::min(call.skip, ids));
    const int objects = static_cast<int>(call.objects.size());
    // Of addresses that are on the device nothing is known here but that elements are aligned.
    const u64 pages = call.pages.address
                          ? static_cast<u64>(call.shape.element_size)
                          : lmc_alignment_of(call.pages.values.data(), static_cast<int>(call.pages.values.size()));
    const u64 alignment = pages | lmc_alignment_of(call.objects.data(), objects);
    check_answer(call, call.by_slot ? lmc_slot_transfer(&planned, &layout, &object, call.direction, number, skip,
                                                        alignment)
                                    : lmc_block_transfer(&planned, &layout, &object, call.direction, objects, number,
                                                         skip, alignment));
    check_ids(call, planned);
    return planned;
}

// The values of a table at `at`, which it moves on; or where the device has them already.
const u64 *put(const Table &table, const Tables &room, size_t &at)
{
    if (table.address)
        return reinterpret_cast<const u64 *>(table.address);
    std::copy(table.values.begin(), table.values.end(), room.host + at);
    const u64 *const there = room.device + at;
    at += table.values.size();
    return there;
}

void queue_transfer(const TransferCall &call, const lmc_transfer &planned, const Table &ids)
{
    sycl::queue &queue = queue_of(call.queue);
    Table objects;
    objects.values = call.objects;
    Tables *const room =
        take_tables(queue, call.pages.values.size() + objects.values.size() + ids.values.size());
    sycl::event last;
    try {
        size_t used = 0;
        const u64 *const page_table = put(call.pages, *room, used);
        const u64 *const object_table = put(objects, *room, used);
        const i64 *const id_table = reinterpret_cast<const i64 *>(put(ids, *room, used));
        last = queue.memcpy(room->device, room->host, used * sizeof(u64));
        last = launch_move(queue, planned, page_table, object_table, id_table);
    } catch (...) {
        give_back(room, last);
        throw;
    }
    give_back(room, last);
}

} // namespace

void transfer(const TransferCall &call)
{
    const lmc_transfer planned = planned_of(call);
    queue_of(call.queue);
    if (planned.skip == planned.units)
        return;
    Table ids = call.ids;
    if (call.direction == LMC_H2D && !ids.address)
        keep_last(ids.values, planned);
    try {
        queue_transfer(call, planned, ids);
    } catch (const sycl::exception &fault) {
        throw DeviceError(call.op + ": SYCL: " + fault.what());
    }
}

} // namespace lmc

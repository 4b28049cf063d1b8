// execute_direct_copy_transfer: pages to and from objects by the copy engines, without staging.
#include <lmcache/transfer.h>

#include <algorithm>

#include "api.h"

namespace lmc {
namespace {

const char *const kOp = "execute_direct_copy_transfer";

std::string text(const std::string &what) { return std::string(kOp) + ": " + what; }

TransferCall call_of(const DirectCall &call, const DirectGroup &group)
{
    TransferCall made = TransferCall();
    made.op = kOp;
    made.format = group.format;
    made.direction = call.direction;
    made.shape = group.shape;
    made.pages.values = group.pages;
    made.object_slots = group.slots_per_chunk;
    return made;
}

// The ids of one object: its stretch of the group's, which may be short at the end.
std::vector<u64> stretch(const DirectGroup &group, const DirectObject &object)
{
    const i64 per_object = group.slots_per_chunk / group.shape.bs, all = static_cast<i64>(group.ids.size());
    if (object.chunk < 0 || object.chunk > all / std::max<i64>(per_object, 1))
        throw std::invalid_argument(text("chunk " + std::to_string(object.chunk) + ": expected one that " +
                                         std::to_string(all) + " block ids have"));
    const i64 begin = object.chunk * per_object;
    return std::vector<u64>(group.ids.begin() + begin, group.ids.begin() + std::min(all, begin + per_object));
}

// Copies of one unit, joined to the one before where both sides go on.
void add_copy(std::vector<Copy> &copies, const Copy &copy)
{
    if (!copies.empty()) {
        Copy &last = copies.back();
        if (last.to + last.nbytes == copy.to && last.from + last.nbytes == copy.from) {
            last.nbytes += copy.nbytes;
            return;
        }
    }
    copies.push_back(copy);
}

void add_plane(std::vector<Copy> &copies, const Planned &planned, u64 object, int kv, int layer)
{
    const lmc_transfer &t = planned.transfer;
    const int table = lmc_pointer_index(kv, layer, t.ptr_first, t.ptr_layer, t.ptr_kv);
    for (int unit = t.skip; unit < t.units; ++unit) {
        const i64 block = static_cast<i64>(planned.ids.values[static_cast<size_t>(unit)]);
        if (block < 0) // written again later
            continue;
        const u64 page = planned.pages.values[static_cast<size_t>(table)] +
                         static_cast<u64>(lmc_page_offset(kv, layer, block, 0, 0, 0, t.page_kv, t.page_layer,
                                                          t.page_block, 0, 0));
        const u64 here = object + static_cast<u64>(lmc_object_offset(kv, layer, unit, 0, t.object_first, t.object_kv,
                                                                     t.object_layer, t.object_unit, 0));
        const u64 nbytes = static_cast<u64>(t.run);
        add_copy(copies, t.direction == LMC_D2H ? Copy{here, page, nbytes} : Copy{page, here, nbytes});
    }
}

void check_object(const DirectGroup &group, const DirectObject &object, const lmc_transfer &t)
{
    const u64 end = static_cast<u64>(group.offset) + static_cast<u64>((t.planes - 1) * t.object_kv) +
                    static_cast<u64>((t.layers - 1) * t.object_layer) + static_cast<u64>(t.units * t.object_unit);
    if (group.offset < 0 || end > object.nbytes)
        throw std::invalid_argument(text("an object of " + std::to_string(object.nbytes) +
                                         " bytes: a group of it ends at byte " + std::to_string(end)));
}

std::vector<Copy> copies_of(const DirectCall &call, const DirectObject &object)
{
    if (object.skips.size() != call.groups.size())
        throw std::invalid_argument(text(std::to_string(object.skips.size()) + " numbers of blocks to leave alone: " +
                                         "expected one for each of " + std::to_string(call.groups.size()) + " groups"));
    std::vector<Copy> copies;
    for (size_t at = 0; at < call.groups.size(); ++at) {
        const DirectGroup &group = call.groups[at];
        TransferCall made = call_of(call, group);
        layout_of(made); // refuses a shape without slots before it is divided by
        made.ids.values = stretch(group, object);
        made.skip = object.skips[at];
        made.objects.assign(1, object.host + static_cast<u64>(group.offset));
        const Planned planned = plan_transfer(made);
        if (planned.transfer.rows != 1 || planned.transfer.heads != 1)
            throw LayoutError(text("KV format " + std::to_string(group.format) +
                                   ": a page is not one piece of an object; use multi_layer_block_kv_transfer"));
        check_object(group, object, planned.transfer);
        for (int kv = 0; kv < planned.transfer.planes; ++kv)
            for (int layer = 0; layer < planned.transfer.layers; ++layer)
                add_plane(copies, planned, made.objects[0], kv, layer);
    }
    return copies;
}

} // namespace

bool direct_format(int format)
{
    lmc_shape_desc shape = LMC_INIT(lmc_shape_desc);
    lmc_layout layout;
    lmc_object object;
    lmc_transfer t;
    shape.nl = shape.bs = shape.nb = 2;
    shape.hs = 8;
    shape.element_size = 2;
    for (shape.kv_size = 1; shape.kv_size <= 2; ++shape.kv_size)
        for (shape.nh = 2; shape.nh >= 1; --shape.nh) // without an axis of heads only one is allowed
            if (!lmc_layout_init(&layout, format, &shape) && !lmc_object_init(&object, &layout, 2) &&
                !lmc_block_transfer(&t, &layout, &object, LMC_D2H, 1, 1, 0, 0))
                return t.rows == 1 && t.heads == 1;
    return false;
}

void execute_direct(const DirectCall &call)
{
    check_alignment(call.host_alignment);
    std::vector<std::vector<Copy>> batches;
    for (const DirectObject &object : call.objects) {
        std::vector<Copy> cut;
        for (const Copy &copy : copies_of(call, object)) {
            const u64 host = call.direction == LMC_D2H ? copy.to : copy.from;
            cut_copy(cut, copy.to, copy.from, copy.nbytes, object.host_offset + (host - object.host),
                     call.host_alignment);
        }
        batches.push_back(cut);
    }
    if (batches.empty())
        return;
    const Current on(call.device);
    for (const std::vector<Copy> &batch : batches)
        queue_batch(batch, call.stream);
}

} // namespace lmc

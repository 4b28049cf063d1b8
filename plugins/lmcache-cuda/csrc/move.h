// One launch that moves pages to or from objects: the SDK's arithmetic and copies, and where the tables are.
#ifndef LMCACHE_CUDA_MOVE_H
#define LMCACHE_CUDA_MOVE_H

#include <lmcache/kv_body.h>

// Integers that travel with a launch: parameters of a kernel, HIP's 256 hidden ones included, are at most 4096 bytes.
#define LMC_POOL 448

// Entry i is values[i - first]: a launch may bring a part of a table.
struct lmc_part {
    const lmc_u64 *values;
    int first;

    LMC_DEVICE lmc_u64 operator[](int index) const { return values[index - first]; }
};

struct lmc_move {
    lmc_transfer t;
    lmc_u64 pages, ids;                 // tables in device memory; 0: in the pool
    int pages_at, ids_at, objects_at;   // where in the pool each begins
    int first_id, first_object;         // what its first entry is
    int reserved;
    lmc_u64 pool[LMC_POOL];
};

static_assert(sizeof(lmc_move) + 256 <= 4096, "the parameters of a kernel");

// A contiguous run: four copies under way per thread, which a loop with divisions does not reach.
LMC_FN void lmc_move_run(LMC_GLOBAL unsigned char *to, const LMC_GLOBAL unsigned char *from, int vecs, int thread,
                         int threads)
{
    LMC_GLOBAL lmc_vec16 *into = reinterpret_cast<LMC_GLOBAL lmc_vec16 *>(to);
    const LMC_GLOBAL lmc_vec16 *out_of = reinterpret_cast<const LMC_GLOBAL lmc_vec16 *>(from);
    int i = thread;
    for (; i + 3 * threads < vecs; i += 4 * threads) {
        const lmc_vec16 a = out_of[i], b = out_of[i + threads];
        const lmc_vec16 c = out_of[i + 2 * threads], d = out_of[i + 3 * threads];
        into[i] = a;
        into[i + threads] = b;
        into[i + 2 * threads] = c;
        into[i + 3 * threads] = d;
    }
    for (; i < vecs; i += threads)
        into[i] = out_of[i];
}

// One plane of one unit, as wide as the plan and the page's address allow: where the table of pages is in device memory
// the host has not seen its addresses.
LMC_FN void lmc_move_plane(const lmc_transfer &t, LMC_GLOBAL unsigned char *page, LMC_GLOBAL unsigned char *object,
                           const lmc_grid &at)
{
    const lmc_u64 all = reinterpret_cast<lmc_u64>(page) | static_cast<lmc_u64>(t.vec);
    const int vec = static_cast<int>(all & (~all + 1)); // the lowest bit
    if (vec == 16 && t.rows == 1 && t.heads == 1)
        return t.direction == LMC_D2H ? lmc_move_run(object, page, t.run / 16, at.thread, at.threads)
                                      : lmc_move_run(page, object, t.run / 16, at.thread, at.threads);
    switch (vec) {
    case 16:
        return lmc_move_unit<lmc_vec16>(t, page, object, at.thread, at.threads);
    case 8:
        return lmc_move_unit<lmc_vec8>(t, page, object, at.thread, at.threads);
    case 4:
        return lmc_move_unit<lmc_vec4>(t, page, object, at.thread, at.threads);
    case 2:
        return lmc_move_unit<lmc_vec2>(t, page, object, at.thread, at.threads);
    default:
        return lmc_move_unit<lmc_vec1>(t, page, object, at.thread, at.threads);
    }
}

LMC_FN void lmc_move_unit_planes(const lmc_transfer &t, const lmc_part &pages, lmc_u64 object, lmc_i64 id, int unit,
                                 const lmc_grid &at)
{
    const lmc_i64 block = lmc_slot_block(id, t.units_per_block);
    const int slot = lmc_slot_in_block(id, t.units_per_block);
    for (int kv = at.z; kv < t.planes; kv += at.size_z)
        for (int layer = at.y; layer < t.layers; layer += at.size_y) {
            const int table = lmc_pointer_index(kv, layer, t.ptr_first, t.ptr_layer, t.ptr_kv);
            const lmc_i64 there = lmc_page_offset(kv, layer, block, slot, 0, 0, t.page_kv, t.page_layer, t.page_block,
                                                  t.page_slot, 0);
            const lmc_i64 here = lmc_object_offset(kv, layer, unit % t.units_per_object, 0, t.object_first,
                                                   t.object_kv, t.object_layer, t.object_unit, 0);
            lmc_move_plane(t, lmc_address(pages[table], there), lmc_address(object, here), at);
        }
}

LMC_FN void lmc_move_body(const lmc_move &m, const lmc_grid &at)
{
    const lmc_transfer &t = m.t;
    const lmc_part pages = {m.pages ? reinterpret_cast<const lmc_u64 *>(m.pages) : m.pool + m.pages_at, 0};
    const lmc_part ids = {m.ids ? reinterpret_cast<const lmc_u64 *>(m.ids) : m.pool + m.ids_at, m.first_id};
    const lmc_part objects = {m.pool + m.objects_at, m.first_object};
    for (int unit = t.skip + at.x; unit < t.units; unit += at.size_x) {
        const lmc_i64 id = static_cast<lmc_i64>(ids[unit]);
        if (id >= 0 && (!t.limit || id < t.limit))
            lmc_move_unit_planes(t, pages, objects[unit / t.units_per_object], id, unit, at);
    }
}

#endif

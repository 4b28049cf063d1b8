/* Kernel bodies: one text for CUDA, HIP, SYCL and plain C++14. No standard library, no exceptions.
 *
 * A kernel is one line that says where in the grid it is:
 *
 *   __global__ void move(lmc_transfer t, const lmc_u64 *pages, const lmc_u64 *objects, const lmc_i64 *ids)
 *   {
 *       lmc_grid at = {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z, (int)threadIdx.x,
 *                      (int)gridDim.x, (int)gridDim.y, (int)gridDim.z, (int)blockDim.x};
 *       lmc_kv_transfer_body(t, pages, objects, ids, at);
 *   }
 *
 * Any grid and any number of threads is right, 1 included. The natural one is x = units - skip, y = layers,
 * z = planes, and as many threads as lmc_unit_vecs(t) has use for. Tables may be anything that is indexed by int
 * and gives integers: device memory, or an array inside a structure that is passed by value.
 */
#ifndef LMCACHE_KV_BODY_H
#define LMCACHE_KV_BODY_H

#include "kv_index.h"
#include "layout.h"

/* Where in a launch the caller is, and how large the launch is. */
struct lmc_grid {
    int x, y, z, thread;
    int size_x, size_y, size_z, threads;
};

#if defined(__GNUC__) && !defined(__NVCC__)
#define LMC_ALIAS __attribute__((may_alias)) /* bytes of any type are moved */
#define LMC_ALIAS_16 __attribute__((may_alias, aligned(16)))
#else
#define LMC_ALIAS
#define LMC_ALIAS_16 alignas(16)
#endif

/* What one thread moves at once. */
typedef unsigned char lmc_vec1;
typedef unsigned short LMC_ALIAS lmc_vec2;
typedef unsigned int LMC_ALIAS lmc_vec4;
typedef lmc_u64 LMC_ALIAS lmc_vec8;
struct LMC_ALIAS_16 lmc_vec16 {
    lmc_u64 low, high;
};

/* Copies of one unit, one layer and one plane: threads beyond that have nothing to do. */
LMC_FN int lmc_unit_vecs(const lmc_transfer &t) { return t.run / t.vec * t.rows * t.heads; }

LMC_FN LMC_GLOBAL unsigned char *lmc_address(lmc_u64 base, lmc_i64 offset)
{
    return reinterpret_cast<LMC_GLOBAL unsigned char *>(base) + offset;
}

/* Move one unit of one plane, thread by thread; `page` and `object` are where it begins. */
template <typename Vec>
LMC_FN void lmc_move_unit(const lmc_transfer &t, LMC_GLOBAL unsigned char *page,
                          LMC_GLOBAL unsigned char *object, int thread, int threads)
{
    const int inner = t.run / static_cast<int>(sizeof(Vec));
    const int total = inner * t.rows * t.heads;
    for (int i = thread; i < total; i += threads) {
        const int row = lmc_walk_row(i, t.heads, inner);
        const int head = lmc_walk_head(i, t.heads, inner);
        const lmc_i64 byte = lmc_walk_inner(i, inner) * static_cast<lmc_i64>(sizeof(Vec));
        LMC_GLOBAL unsigned char *there = page + row * t.page_row + head * t.page_head + byte;
        LMC_GLOBAL unsigned char *here = object + row * t.object_row + head * t.object_head + byte;
        if (t.direction == LMC_D2H)
            *reinterpret_cast<LMC_GLOBAL Vec *>(here) = *reinterpret_cast<const LMC_GLOBAL Vec *>(there);
        else
            *reinterpret_cast<LMC_GLOBAL Vec *>(there) = *reinterpret_cast<const LMC_GLOBAL Vec *>(here);
    }
}

template <typename Vec, typename Pages, typename Objects, typename Ids>
LMC_FN void lmc_move_units(const lmc_transfer &t, const Pages &pages, const Objects &objects, const Ids &ids,
                           const lmc_grid &at)
{
    for (int unit = t.skip + at.x; unit < t.units; unit += at.size_x) {
        const lmc_i64 id = static_cast<lmc_i64>(ids[unit]);
        if (id < 0 || (t.limit && id >= t.limit))
            continue;
        const lmc_i64 block = lmc_slot_block(id, t.units_per_block);
        const int slot = lmc_slot_in_block(id, t.units_per_block);
        const lmc_u64 base = static_cast<lmc_u64>(objects[unit / t.units_per_object]);
        const int position = unit % t.units_per_object;
        for (int kv = at.z; kv < t.planes; kv += at.size_z)
            for (int layer = at.y; layer < t.layers; layer += at.size_y) {
                const int table = lmc_pointer_index(kv, layer, t.ptr_first, t.ptr_layer, t.ptr_kv);
                const lmc_i64 there = lmc_page_offset(kv, layer, block, slot, 0, 0, t.page_kv, t.page_layer,
                                                      t.page_block, t.page_slot, 0);
                const lmc_i64 here = lmc_object_offset(kv, layer, position, 0, t.object_first, t.object_kv,
                                                       t.object_layer, t.object_unit, 0);
                lmc_move_unit<Vec>(t, lmc_address(static_cast<lmc_u64>(pages[table]), there),
                                   lmc_address(base, here), at.thread, at.threads);
            }
    }
}

/* Every transfer between pages and objects: blocks or slots, any format, either way.
 *
 * pages: addresses of the format's tensors, in the order of lmc_layout_init.
 * objects: addresses of the objects; one for a transfer by slots.
 * ids: block ids or flat slot numbers, t.units of them.
 */
template <typename Pages, typename Objects, typename Ids>
LMC_FN void lmc_kv_transfer_body(const lmc_transfer &t, const Pages &pages, const Objects &objects,
                                 const Ids &ids, const lmc_grid &at)
{
    switch (t.vec) {
    case 16:
        return lmc_move_units<lmc_vec16>(t, pages, objects, ids, at);
    case 8:
        return lmc_move_units<lmc_vec8>(t, pages, objects, ids, at);
    case 4:
        return lmc_move_units<lmc_vec4>(t, pages, objects, ids, at);
    case 2:
        return lmc_move_units<lmc_vec2>(t, pages, objects, ids, at);
    default:
        return lmc_move_units<lmc_vec1>(t, pages, objects, ids, at);
    }
}

/* Copy bytes that do not overlap, 16 at once where both sides are aligned alike. A grid of x: all else idles. */
LMC_FN void lmc_copy_body(LMC_GLOBAL unsigned char *to, const LMC_GLOBAL unsigned char *from, lmc_i64 count,
                          const lmc_grid &at)
{
    if (at.y || at.z)
        return;
    const lmc_i64 first = static_cast<lmc_i64>(at.x) * at.threads + at.thread;
    const lmc_i64 step = static_cast<lmc_i64>(at.size_x) * at.threads;
    const lmc_u64 low = reinterpret_cast<lmc_u64>(to), other = reinterpret_cast<lmc_u64>(from);
    lmc_i64 head = (low - other) % 16 ? count : static_cast<lmc_i64>((16 - low % 16) % 16);
    head = head < count ? head : count;
    const lmc_i64 wide = (count - head) / 16;
    for (lmc_i64 i = first; i < head; i += step)
        to[i] = from[i];
    for (lmc_i64 i = first; i < wide; i += step)
        reinterpret_cast<LMC_GLOBAL lmc_vec16 *>(to + head)[i] =
            reinterpret_cast<const LMC_GLOBAL lmc_vec16 *>(from + head)[i];
    for (lmc_i64 i = head + wide * 16 + first; i < count; i += step)
        to[i] = from[i];
}

/* Keys of `tokens` tokens whose rotary embedding is to be of other positions. Strides are in elements. */
struct lmc_rope {
    int tokens, heads;
    int rotated;    /* leading elements of a head that are rotated: the cache's row is as long */
    int interleaved; /* 1: pairs are neighbours; 0: (i, i + rotated / 2), as in NeoX */
    lmc_i64 token_stride, head_stride;
    lmc_i64 element_stride; /* from one element of a head to the next; 0 means 1 */
    lmc_i64 positions;      /* rows of the table: a token of a position outside it stays; 0 means: not looked at */
};

/* What a pair is multiplied by, as a complex number: z[new] / z[old]. A factor that all of the table has, as YaRN's,
 * cancels out. */
struct lmc_rope_turn {
    float c, s;
};

LMC_FN lmc_rope_turn lmc_rope_turn_of(float c0, float s0, float c1, float s1)
{
    const float norm = c0 * c0 + s0 * s0;
    const lmc_rope_turn turn = {(c1 * c0 + s1 * s0) / norm, (s1 * c0 - c1 * s0) / norm};
    return turn;
}

LMC_FN bool lmc_rope_moves(const lmc_rope &r, lmc_i64 was, lmc_i64 is)
{
    return was != is && was >= 0 && is >= 0 && (!r.positions || (was < r.positions && is < r.positions));
}

/* Keys of the old positions become keys of the new, in place and in float, rounded once. A key whose position stays
 * keeps every bit. A grid of x (tokens).
 *
 * keys, table: pointers, or anything whose [lmc_i64] reads as float and, for keys, takes one.
 * table: [positions, rotated], the cosines of a position's half and then its sines.
 */
template <typename Keys, typename Table, typename Positions>
LMC_FN void lmc_rope_body(const lmc_rope &r, const Keys &keys, const Table &table, const Positions &old_positions,
                          const Positions &new_positions, const lmc_grid &at)
{
    const int half = at.y || at.z ? 0 : r.rotated / 2; /* in place: once only */
    const lmc_i64 step = r.element_stride ? r.element_stride : 1;
    for (int token = at.x; token < r.tokens; token += at.size_x) {
        const lmc_i64 was = old_positions[token], is = new_positions[token];
        if (!lmc_rope_moves(r, was, is))
            continue;
        for (int i = at.thread; i < half * r.heads; i += at.threads) {
            const int pair = i % half;
            const lmc_i64 head = token * r.token_stride + i / half * r.head_stride;
            const lmc_i64 a = head + (r.interleaved ? 2 * pair : pair) * step;
            const lmc_i64 b = head + (r.interleaved ? 2 * pair + 1 : pair + half) * step;
            const lmc_i64 from = was * r.rotated + pair, to = is * r.rotated + pair;
            const lmc_rope_turn turn =
                lmc_rope_turn_of(static_cast<float>(table[from]), static_cast<float>(table[from + half]),
                                 static_cast<float>(table[to]), static_cast<float>(table[to + half]));
            const float x = static_cast<float>(keys[a]), y = static_cast<float>(keys[b]);
            keys[a] = x * turn.c - y * turn.s;
            keys[b] = y * turn.c + x * turn.s;
        }
    }
}

#endif

/* The index arithmetic and the structures in OpenCL C: a gather byte by byte, without the C++ body.
 * The emulation includes this file, too, with the qualifiers and builtins made its own. */

#include <lmcache/kv_index.h>
#include <lmcache/layout.h>

typedef char transfer_is_168_bytes[sizeof(lmc_transfer) == 168 ? 1 : -1];
typedef char layout_is_128_bytes[sizeof(lmc_layout) == 128 ? 1 : -1];

#ifndef HAS_BUILTINS /* a clang without its OpenCL header */
unsigned long get_group_id(unsigned int axis);
unsigned long get_local_id(unsigned int axis);
unsigned long get_local_size(unsigned int axis);
#endif

__kernel void gather(lmc_transfer t, __global const lmc_u64 *pages, __global unsigned char *object,
                     __global const lmc_i64 *ids)
{
    const int unit = (int)get_group_id(0), layer = (int)get_group_id(1), kv = (int)get_group_id(2);
    const lmc_i64 block = lmc_slot_block(ids[unit], t.units_per_block);
    const int slot = lmc_slot_in_block(ids[unit], t.units_per_block);
    __global const unsigned char *page = (__global const unsigned char *)
        pages[lmc_pointer_index(kv, layer, t.ptr_first, t.ptr_layer, t.ptr_kv)];
    const int total = t.rows * t.heads * t.run;
    int i;
    for (i = (int)get_local_id(0); i < total; i += (int)get_local_size(0)) {
        const int row = lmc_walk_row(i, t.heads, t.run), head = lmc_walk_head(i, t.heads, t.run);
        const lmc_i64 inner = lmc_walk_inner(i, t.run) + row * t.page_row;
        const lmc_i64 there = lmc_page_offset(kv, layer, block, slot, head, inner, t.page_kv, t.page_layer,
                                              t.page_block, t.page_slot, t.page_head);
        const lmc_i64 here = lmc_object_offset(kv, layer, unit, head, lmc_walk_inner(i, t.run), t.object_kv,
                                               t.object_layer, t.object_unit, t.object_head);
        object[t.object_first + here + row * t.object_row] = page[there];
    }
}

/* Where things lie: index arithmetic of paged KV memory and of chunk objects, nothing else.
 *
 * Integers in, integers out, no pointers, no structures: C99, C++14 and OpenCL C. Offsets and strides may be in
 * bytes, elements or vectors, as long as one call uses one unit. Sizes are `int`; whatever may pass 2^31 is
 * `lmc_i64`.
 */
#ifndef LMCACHE_KV_INDEX_H
#define LMCACHE_KV_INDEX_H

#include "abi.h"

/* Offset in paged memory, from the tensor that holds the plane, by the strides of the canonical view
 * [KV, NB, BS, NH, W] and of layers. Axes that a layout lacks have stride 0. */
LMC_FN lmc_i64 lmc_page_offset(int kv, int layer, lmc_i64 block, int slot, int head, lmc_i64 inner,
                               lmc_i64 kv_stride, lmc_i64 layer_stride, lmc_i64 block_stride,
                               lmc_i64 slot_stride, lmc_i64 head_stride)
{
    return kv * kv_stride + layer * layer_stride + block * block_stride + slot * slot_stride +
           head * head_stride + inner;
}

/* Offset in an object, by its strides. */
LMC_FN lmc_i64 lmc_object_offset(int kv, int layer, lmc_i64 slot, int head, lmc_i64 inner, lmc_i64 kv_stride,
                                 lmc_i64 layer_stride, lmc_i64 slot_stride, lmc_i64 head_stride)
{
    return kv * kv_stride + layer * layer_stride + slot * slot_stride + head * head_stride + inner;
}

/* Offset in a tight chunk object [KV, NL, T, NH * W]. */
LMC_FN lmc_i64 lmc_chunk_offset(int kv, int layer, lmc_i64 slot, int head, lmc_i64 inner, int num_layers,
                                lmc_i64 slots, int num_heads, lmc_i64 width)
{
    const lmc_i64 row = num_heads * width;
    return lmc_object_offset(kv, layer, slot, head, inner, num_layers * slots * row, slots * row, row, width);
}

/* Index of a plane's tensor in the pointer table; the three numbers come from the layout. */
LMC_FN int lmc_pointer_index(int kv, int layer, int ptr_first, int ptr_layer, int ptr_kv)
{
    return ptr_first + layer * ptr_layer + kv * ptr_kv;
}

/* The block of a flat slot number, and the slot inside it. */
LMC_FN lmc_i64 lmc_slot_block(lmc_i64 slot, int block_size) { return slot / block_size; }
LMC_FN int lmc_slot_in_block(lmc_i64 slot, int block_size) { return (int)(slot % block_size); }

/* Step `index` of a walk over [rows, heads, inner], innermost fastest. */
LMC_FN int lmc_walk_row(int index, int heads, int inner) { return index / inner / heads; }
LMC_FN int lmc_walk_head(int index, int heads, int inner) { return index / inner % heads; }
LMC_FN int lmc_walk_inner(int index, int inner) { return index % inner; }

#endif

/* Plan transfers on the host: check them, and turn them into the bytes that a kernel walks. C99 and C++14. */
#ifndef LMCACHE_TRANSFER_H
#define LMCACHE_TRANSFER_H

#include "layout.h"

/* An object [KV, NL, slots, row]: what whole-block transfers and multi_layer_kv_transfer use. */
LMC_HOST_FN int lmc_object_init(lmc_object *out, const lmc_layout *layout, int slots)
{
    lmc_object made = LMC_INIT(lmc_object);
    if (!LMC_KNOWS(layout))
        return LMC_E_VERSION;
    if (slots < 1)
        return LMC_E_OBJECT;
    made.slots = slots;
    made.row_width = layout->row_width;
    made.slot_stride = layout->row_width;
    made.layer_stride = made.slot_stride * slots;
    made.kv_stride = made.layer_stride;
    if (lmc_grow(&made.kv_stride, layout->num_layers))
        return LMC_E_OBJECT;
    *out = made;
    return LMC_OK;
}

/* An object of one layer, token-major: [slots, KV, row]. */
LMC_HOST_FN int lmc_object_init_token_major(lmc_object *out, const lmc_layout *layout, int slots)
{
    int error = lmc_object_init(out, layout, slots);
    if (error)
        return error;
    if (layout->num_layers != 1)
        return LMC_E_OBJECT;
    out->kv_stride = layout->row_width;
    out->slot_stride = (lmc_i64)layout->row_width * layout->shape[0];
    out->layer_stride = 0;
    return LMC_OK;
}

/* Entries that a layout reads of the table of pages: a shorter one must be refused. */
LMC_HOST_FN lmc_i64 lmc_num_pointers(const lmc_layout *layout)
{
    const lmc_i64 layers = layout->num_layers - 1, planes = layout->shape[0] - 1;
    return layout->ptr_first + layers * layout->ptr_layer + planes * layout->ptr_kv + 1;
}

/* All addresses in one number that tells their common alignment. */
LMC_HOST_FN lmc_u64 lmc_alignment_of(const lmc_u64 *addresses, int count)
{
    lmc_u64 all = 0;
    while (count-- > 0)
        all |= addresses[count];
    return all;
}

/* The widest copy, up to 16 bytes, that divides every number in `all`. */
LMC_HOST_FN int lmc_widest(lmc_u64 all)
{
    int vec = 16;
    while (vec > 1 && all % (lmc_u64)vec)
        vec /= 2;
    return vec;
}

/* Cut a unit of `slots` slots into the longest runs that are contiguous on both sides. */
LMC_HOST_FN void lmc_cut_runs(lmc_transfer *out, const lmc_layout *layout, const lmc_object *object, int slots)
{
    const lmc_i64 bytes = layout->element_size;
    lmc_i64 run = layout->shape[4];
    out->rows = slots;
    out->heads = layout->shape[3];
    if (out->heads == 1 || layout->strides[3] == run) {
        run *= out->heads;
        out->heads = 1;
        if (layout->strides[2] == run && object->slot_stride == run) {
            run *= out->rows;
            out->rows = 1;
        }
    }
    out->run = (int)(run * bytes);
    if (out->rows > 1) {
        out->page_row = layout->strides[2] * bytes;
        out->object_row = object->slot_stride * bytes;
    }
    if (out->heads > 1) {
        out->page_head = layout->strides[3] * bytes;
        out->object_head = layout->shape[4] * bytes;
    }
}

/* Whether a layout, which may be made by hand, can be walked. */
LMC_HOST_FN int lmc_check_layout(const lmc_layout *layout)
{
    const int *shape = layout->shape;
    lmc_i64 plane = layout->element_size;
    int at, error = LMC_OK;
    if (!LMC_KNOWS(layout))
        return LMC_E_VERSION;
    if (layout->strides[4] != 1)
        return LMC_E_STRIDE;
    if (plane < 1 || layout->num_layers < 1 || shape[0] < 1 || shape[1] < 0)
        return LMC_E_SHAPE;
    for (at = 2; at < 5 && !error; ++at)
        error = shape[at] < 1 ? LMC_E_SHAPE : lmc_grow(&plane, shape[at]);
    if (error || plane > LMC_INT_MAX / 2 || layout->plane_bytes != plane)
        return LMC_E_SHAPE;
    if (layout->column < 0 || (lmc_i64)shape[3] * shape[4] > layout->row_width - layout->column)
        return LMC_E_SHAPE;
    return LMC_OK;
}

/* What transfers of blocks and of slots have in common; `slots` per unit. */
LMC_HOST_FN int lmc_transfer_init(lmc_transfer *out, const lmc_layout *layout, const lmc_object *object,
                                  int direction, int slots, int units, int skip, lmc_u64 alignment)
{
    const lmc_i64 bytes = layout->element_size;
    lmc_transfer made = LMC_INIT(lmc_transfer);
    if (direction != LMC_H2D && direction != LMC_D2H)
        return LMC_E_RANGE;
    if (units < 0 || units > LMC_INT_MAX / 2 || skip < 0)
        return LMC_E_RANGE;
    if (object->row_width != layout->row_width)
        return LMC_E_OBJECT;
    made.direction = direction;
    made.planes = layout->shape[0];
    made.layers = layout->num_layers;
    made.units = units;
    made.skip = skip < units ? skip : units;
    made.units_per_object = object->slots / slots;
    made.units_per_block = layout->shape[2] / slots;
    made.limit = (lmc_i64)layout->shape[1] * made.units_per_block;
    made.ptr_first = layout->ptr_first;
    made.ptr_layer = layout->ptr_layer;
    made.ptr_kv = layout->ptr_kv;
    lmc_cut_runs(&made, layout, object, slots);
    made.page_kv = layout->strides[0] * bytes;
    made.page_layer = layout->layer_stride * bytes;
    made.page_block = layout->strides[1] * bytes;
    made.page_slot = made.units_per_block > 1 ? layout->strides[2] * bytes : 0;
    made.object_first = layout->column * bytes;
    made.object_kv = made.planes > 1 ? object->kv_stride * bytes : 0;
    made.object_layer = made.layers > 1 ? object->layer_stride * bytes : 0;
    made.object_unit = object->slot_stride * slots * bytes;
    made.vec = lmc_widest(alignment | (lmc_u64)(made.run | made.page_kv | made.page_layer | made.page_block |
                                                made.page_slot | made.page_row | made.page_head |
                                                made.object_first | made.object_kv | made.object_layer |
                                                made.object_unit | made.object_row | made.object_head));
    *out = made;
    return LMC_OK;
}

/* Plan multi_layer_block_kv_transfer: id i goes to object i / n at block i % n, n = chunk_slots / BS.
 *
 * alignment: lmc_alignment_of all pointers, pages' and objects'. The element size serves where they are unknown.
 */
LMC_HOST_FN int lmc_block_transfer(lmc_transfer *out, const lmc_layout *layout, const lmc_object *object,
                                   int direction, int num_objects, int num_ids, int skip_blocks,
                                   lmc_u64 alignment)
{
    int error = LMC_KNOWS(object) ? lmc_check_layout(layout) : LMC_E_VERSION;
    if (error)
        return error;
    if (object->slots < 1 || object->slots % layout->shape[2])
        return LMC_E_OBJECT;
    if (num_objects < 0 || (lmc_i64)num_objects * (object->slots / layout->shape[2]) < num_ids)
        return LMC_E_RANGE;
    return lmc_transfer_init(out, layout, object, direction, layout->shape[2], num_ids, skip_blocks, alignment);
}

/* Plan a transfer by slot mapping: token i of the one object goes to the flat slot ids[i], block * BS + slot.
 * Negative ids, and those beyond the last block, are left alone. */
LMC_HOST_FN int lmc_slot_transfer(lmc_transfer *out, const lmc_layout *layout, const lmc_object *object,
                                  int direction, int num_tokens, int skip_tokens, lmc_u64 alignment)
{
    int error = LMC_KNOWS(object) ? lmc_check_layout(layout) : LMC_E_VERSION;
    if (error)
        return error;
    if (layout->whole_pages)
        return LMC_E_WHOLE;
    if (num_tokens > object->slots)
        return LMC_E_OBJECT;
    return lmc_transfer_init(out, layout, object, direction, 1, num_tokens, skip_tokens, alignment);
}

/* Whether every id that a transfer will read names a unit. A kernel leaves the others alone, so whoever has the
 * ids on the host asks first: bytes that were never written must not be published. */
LMC_HOST_FN int lmc_ids_in_range(const lmc_transfer *transfer, const lmc_i64 *ids)
{
    int at;
    for (at = transfer->skip; at < transfer->units; ++at)
        if (ids[at] < 0 || (transfer->limit && ids[at] >= transfer->limit))
            return 0;
    return 1;
}

#endif

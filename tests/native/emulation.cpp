// The SDK's kernel bodies on the host: loops stand for a device's grid, ctypes calls in.

#include <lmcache/kv_body.h>
#include <lmcache/transfer.h>

namespace {

// Call body(grid) for every thread of a launch of {x, y, z, threads}.
template <typename Body> void launch(const int *size, Body body)
{
    for (int z = 0; z < size[2]; ++z)
        for (int y = 0; y < size[1]; ++y)
            for (int x = 0; x < size[0]; ++x)
                for (int thread = 0; thread < size[3]; ++thread)
                    body(lmc_grid{x, y, z, thread, size[0], size[1], size[2], size[3]});
}

lmc_shape_desc shape_of(const int *numbers)
{
    lmc_shape_desc shape = LMC_INIT(lmc_shape_desc);
    int *fields[] = {&shape.kv_size, &shape.nl, &shape.nb, &shape.bs,
                     &shape.nh, &shape.hs, &shape.element_size, &shape.block_stride_elems};
    for (int i = 0; i < 8; ++i)
        *fields[i] = numbers[i];
    return shape;
}

// widths is null but for a format of planes; then `plane` of `planes` is meant.
int layout_of(lmc_layout *out, int format, const int *numbers, int plane, int planes, const int *widths)
{
    const lmc_shape_desc shape = shape_of(numbers);
    return widths ? lmc_layout_init_plane(out, format, &shape, plane, planes, widths)
                  : lmc_layout_init(out, format, &shape);
}

// The OpenCL kernel, with this thread's place in the grid for its builtins.
lmc_grid here;
unsigned long get_group_id(unsigned int axis) { return axis == 0 ? here.x : axis == 1 ? here.y : here.z; }
unsigned long get_local_id(unsigned int) { return here.thread; }
unsigned long get_local_size(unsigned int) { return here.threads; }

#define HAS_BUILTINS
#define __kernel
#define __global
#include "kernel.cl"

} // namespace

extern "C" {

// What a transfer is, as ctypes passes it.
struct emu_request {
    int format, direction, by_slot, token_major;
    int shape[8];
    int plane, planes;
    const int *widths;
    const lmc_u64 *pages;
    int num_pages, num_objects;
    const lmc_u64 *objects;
    const lmc_i64 *ids;
    int num_ids, skip, object_slots;
    int grid[4];
    int opencl; // run the OpenCL kernel: a gather into one object, over the natural grid
    int vec;    // answer: the width that was chosen
};

int emu_transfer(emu_request *r)
{
    lmc_layout layout;
    lmc_object object;
    lmc_transfer t;
    int error = layout_of(&layout, r->format, r->shape, r->plane, r->planes, r->widths);
    if (!error)
        error = r->token_major ? lmc_object_init_token_major(&object, &layout, r->object_slots)
                               : lmc_object_init(&object, &layout, r->object_slots);
    const lmc_u64 alignment =
        lmc_alignment_of(r->pages, r->num_pages) | lmc_alignment_of(r->objects, r->num_objects);
    if (!error)
        error = r->by_slot
                    ? lmc_slot_transfer(&t, &layout, &object, r->direction, r->num_ids, r->skip, alignment)
                    : lmc_block_transfer(&t, &layout, &object, r->direction, r->num_objects, r->num_ids,
                                         r->skip, alignment);
    if (error)
        return error;
    r->vec = t.vec;
    if (r->opencl) {
        const int natural[] = {t.units, t.layers, t.planes, r->grid[3]};
        launch(natural, [&](const lmc_grid &at) {
            here = at;
            gather(t, r->pages, lmc_address(r->objects[0], 0), r->ids);
        });
        return LMC_OK;
    }
    launch(r->grid, [&](const lmc_grid &at) { lmc_kv_transfer_body(t, r->pages, r->objects, r->ids, at); });
    return LMC_OK;
}

int emu_layout(lmc_layout *out, int format, const int *shape, int plane, int planes, const int *widths)
{
    return layout_of(out, format, shape, plane, planes, widths);
}

int emu_layout_of_desc(lmc_layout *out, int format, const lmc_shape_desc *shape)
{
    return lmc_layout_init(out, format, shape);
}

int emu_block_plan(lmc_transfer *out, const lmc_layout *layout, const lmc_object *object, int direction,
                   int num_objects, int num_ids, int skip, lmc_u64 alignment)
{
    return lmc_block_transfer(out, layout, object, direction, num_objects, num_ids, skip, alignment);
}

int emu_slot_plan(lmc_transfer *out, const lmc_layout *layout, const lmc_object *object, int direction,
                  int num_tokens, int skip, lmc_u64 alignment)
{
    return lmc_slot_transfer(out, layout, object, direction, num_tokens, skip, alignment);
}

int emu_object(lmc_object *out, const lmc_layout *layout, int slots)
{
    return lmc_object_init(out, layout, slots);
}

int emu_ids_in_range(const lmc_transfer *transfer, const lmc_i64 *ids) { return lmc_ids_in_range(transfer, ids); }

const char *emu_error_text(int error) { return lmc_error_text(error); }

lmc_i64 emu_chunk_offset(int kv, int layer, lmc_i64 slot, int head, lmc_i64 inner, int num_layers, lmc_i64 slots,
                         int num_heads, lmc_i64 width)
{
    return lmc_chunk_offset(kv, layer, slot, head, inner, num_layers, slots, num_heads, width);
}

void emu_copy(unsigned char *to, const unsigned char *from, lmc_i64 count, const int *grid)
{
    launch(grid, [&](const lmc_grid &at) { lmc_copy_body(to, from, count, at); });
}

void emu_rope(float *keys, const float *table, const lmc_i64 *was, const lmc_i64 *is, const lmc_rope *rope,
              const int *grid)
{
    launch(grid, [&](const lmc_grid &at) { lmc_rope_body(*rope, keys, table, was, is, at); });
}

int emu_native_abi() { return LMCACHE_NATIVE_ABI; }

unsigned int emu_size(int which)
{
    const unsigned int sizes[] = {sizeof(lmc_shape_desc), sizeof(lmc_layout), sizeof(lmc_object),
                                  sizeof(lmc_transfer)};
    return sizes[which];
}
}

/* Layouts and transfers as structures of plain integers.
 *
 *   lmc_shape_desc   sizes of a group of layers, as the op's caller gives them
 *   lmc_layout       where every element of paged memory lies; made from a format's id and a shape
 *   lmc_object       where every element of a chunk object lies
 *   lmc_transfer     one copy between the two, all in bytes: what a kernel gets (transfer.h makes it)
 *
 * Each begins with its size and version, and every function that reads one checks them: a module that was
 * compiled with other headers is refused instead of believed. Never pass them as C++ types of a binding; pass
 * integers and fill them in your own code.
 *
 * C99 and C++14; in OpenCL C, the structures alone.
 */
#ifndef LMCACHE_LAYOUT_H
#define LMCACHE_LAYOUT_H

#include "abi.h"

#define LMC_STRUCT_VERSION 1

/* What functions answer. All but LMC_OK mean that nothing was written to the result. */
#define LMC_OK 0
#define LMC_E_VERSION 1 /* a structure's size or version is not this header's */
#define LMC_E_FORMAT 2  /* no format has this id */
#define LMC_E_BLOCKS 3  /* the format has no blocks */
#define LMC_E_PLANES 4  /* planes of their own widths: use lmc_layout_init_plane, and only then */
#define LMC_E_SHAPE 5   /* a size is out of range or contradicts the format */
#define LMC_E_STRIDE 6  /* blocks would overlap, or the format's blocks cannot be padded */
#define LMC_E_OBJECT 7  /* an object is too small, or of another row width */
#define LMC_E_RANGE 8   /* direction, counts or skip out of range */
#define LMC_E_WHOLE 9   /* pages of this format may only be moved whole */

/* The eight numbers of PageBufferShapeDesc, by the same names. */
typedef struct lmc_shape_desc {
    unsigned int size, version;
    int kv_size;            /* planes: 2 where K and V are apart, else 1 */
    int nl;                 /* layers */
    int nb;                 /* blocks; 0: unknown, then block ids are not checked */
    int bs;                 /* slots per block */
    int nh;                 /* heads; 1 for MLA */
    int hs;                 /* elements per head and slot; of K and V together where packed */
    int element_size;       /* bytes: 1, 2, 4 or 8 */
    int block_stride_elems; /* elements between blocks where they are padded; 0: tight */
} lmc_shape_desc;

/* Paged memory as [KV, NB, BS, NH, W] per layer. Strides are in elements; an axis that is absent from a tensor
 * has stride 0. The tensor of (layer, kv) is at ptr_first + layer * ptr_layer + kv * ptr_kv of the table. */
typedef struct lmc_layout {
    unsigned int size, version;
    int format;       /* id of the row */
    int whole_pages;  /* 1: pages may not be cut; set it, too, where only the engine knows its packing */
    int num_layers;
    int element_size; /* bytes */
    int shape[5];     /* KV, NB, BS, NH, W */
    int ptr_first, ptr_layer, ptr_kv;
    int row_width;    /* elements of one slot in an object's row; NH * W unless planes share the row */
    int column;       /* first of these that belongs to this layout */
    int reserved;
    lmc_i64 strides[5];
    lmc_i64 layer_stride;
    lmc_i64 plane_bytes; /* one plane of one layer of one block */
} lmc_layout;

/* A chunk object. Strides are in elements; heads and widths are always tight. */
typedef struct lmc_object {
    unsigned int size, version;
    int slots;     /* slots that an object holds */
    int row_width; /* elements per slot */
    lmc_i64 kv_stride, layer_stride, slot_stride;
} lmc_object;

/* One launch. A unit is what an id names: a block, or one slot of a flat slot number. */
typedef struct lmc_transfer {
    unsigned int size, version;
    int direction;        /* LMC_H2D or LMC_D2H */
    int vec;              /* bytes that one thread moves at once: 1, 2, 4, 8 or 16 */
    int planes, layers;   /* grid z and y */
    int units, skip;      /* ids given; how many of them, from the first, are left alone */
    int units_per_object;
    int units_per_block;  /* 1 for blocks, BS for slots */
    int rows, heads, run; /* a unit is rows * heads runs of `run` bytes, contiguous on both sides */
    int ptr_first, ptr_layer, ptr_kv;
    lmc_i64 limit;        /* ids from here on are left alone; 0: unknown */
    lmc_i64 page_kv, page_layer, page_block, page_slot, page_row, page_head; /* bytes */
    lmc_i64 object_first, object_kv, object_layer, object_unit, object_row, object_head;
} lmc_transfer;

/* The direction of a transfer, as TransferDirection has it. */
#define LMC_H2D 0 /* objects to pages */
#define LMC_D2H 1 /* pages to objects */

#ifndef LMC_OPENCL

#include "kv_formats.h"

#define LMC_INT_MAX 0x7fffffff

/* Give a structure its size and version, and zeros for the rest: lmc_shape_desc shape = LMC_INIT(lmc_shape_desc); */
#ifdef __cplusplus
template <typename S> LMC_HOST_FN S lmc_new()
{
    S made = S();
    made.size = sizeof(S);
    made.version = LMC_STRUCT_VERSION;
    return made;
}
#define LMC_INIT(type) lmc_new<type>()
#else
#define LMC_INIT(type) {.size = sizeof(type), .version = LMC_STRUCT_VERSION}
#endif

#define LMC_KNOWS(s) ((s)->size == sizeof(*(s)) && (s)->version == LMC_STRUCT_VERSION)

/* A sentence for an answer. */
LMC_HOST_FN const char *lmc_error_text(int error)
{
    static const char *const texts[] = {
        "done",
        "a structure is of another version of lmcache's headers; build all parts against one",
        "no KV format has this id",
        "the KV format has no blocks",
        "planes have their own widths: describe each plane by itself",
        "a size is out of range or contradicts the KV format",
        "the block stride is too small, or blocks of this KV format cannot be padded",
        "an object is too small or has another row width than the layout",
        "direction, count, skip or chunk size is out of range",
        "pages of this KV format may only be moved whole",
    };
    return error >= 0 && error < (int)(sizeof(texts) / sizeof(texts[0])) ? texts[error] : "unknown answer";
}

/* running *= factor, unless that passes 2^62. */
LMC_HOST_FN int lmc_grow(lmc_i64 *running, lmc_i64 factor)
{
    const lmc_i64 most = (lmc_i64)1 << 62;
    if (factor > 0 && *running > most / factor)
        return LMC_E_SHAPE;
    *running *= factor;
    return LMC_OK;
}

LMC_HOST_FN int lmc_contains(const char *text, char letter)
{
    for (; *text; ++text)
        if (*text == letter)
            return 1;
    return 0;
}

/* Elements from one block to the next, when `tight` of them hold a block. */
LMC_HOST_FN int lmc_block_stride(const lmc_shape_desc *shape, lmc_i64 tight, lmc_i64 *stride)
{
    *stride = shape->block_stride_elems ? shape->block_stride_elems : tight;
    return *stride < tight ? LMC_E_STRIDE : LMC_OK;
}

/* Strides of one axis, given the elements inside it; `running` then counts the axis in, too. */
LMC_HOST_FN int lmc_lay_axis(lmc_layout *out, char axis, const lmc_shape_desc *shape, lmc_i64 *running)
{
    int error;
    switch (axis) {
    case 'W':
        out->strides[4] = *running;
        return lmc_grow(running, out->shape[4]);
    case 'H':
        out->strides[3] = *running;
        return lmc_grow(running, shape->nh);
    case 'S':
        out->strides[2] = *running;
        return lmc_grow(running, shape->bs);
    case 'P': /* blocks are cut from one axis, so nothing can stand between them */
        out->strides[2] = *running;
        error = lmc_grow(running, shape->bs);
        out->strides[1] = *running;
        if (shape->block_stride_elems && shape->block_stride_elems != *running)
            return LMC_E_STRIDE;
        return error ? error : lmc_grow(running, shape->nb);
    case 'B':
        error = lmc_block_stride(shape, *running, &out->strides[1]);
        *running = out->strides[1];
        return error ? error : lmc_grow(running, shape->nb);
    case '2':
        out->strides[0] = *running;
        return *running ? lmc_grow(running, 2) : LMC_E_SHAPE; /* the number of blocks must be known here */
    case 'L':
        out->layer_stride = *running;
        return *running ? lmc_grow(running, shape->nl) : LMC_E_SHAPE;
    default:
        return LMC_E_BLOCKS;
    }
}

/* Whether the shape can be one of this format. */
LMC_HOST_FN int lmc_check_shape(const lmc_format_row *row, const lmc_shape_desc *shape)
{
    const int pair = lmc_contains(row->axes, '2') || lmc_contains(row->levels, '2');
    const int size = shape->element_size;
    lmc_i64 page = size;
    if (shape->kv_size != 1 + pair || shape->nl < 1 || shape->nb < 0 || shape->block_stride_elems < 0)
        return LMC_E_SHAPE;
    if (shape->bs < 1 || shape->nh < 1 || shape->hs < 1 || (size != 1 && size != 2 && size != 4 && size != 8))
        return LMC_E_SHAPE;
    if (shape->nh != 1 && !lmc_contains(row->axes, 'H'))
        return LMC_E_SHAPE;
    if (lmc_grow(&page, shape->bs) || lmc_grow(&page, shape->nh) || lmc_grow(&page, shape->hs))
        return LMC_E_SHAPE;
    return page > LMC_INT_MAX / 2 ? LMC_E_SHAPE : LMC_OK; /* offsets within a plane are ints */
}

/* The layout of a row whose planes are `width` wide, the plane `plane` of `planes`. */
LMC_HOST_FN int lmc_lay_out(lmc_layout *out, const lmc_format_row *row, const lmc_shape_desc *shape, int width,
                            int plane, int planes)
{
    lmc_layout made = LMC_INIT(lmc_layout);
    lmc_i64 running = 1;
    int at = 0, error = LMC_OK;
    made.format = row->id;
    made.whole_pages = row->whole_pages;
    made.num_layers = shape->nl;
    made.element_size = shape->element_size;
    made.shape[0] = shape->kv_size;
    made.shape[1] = shape->nb;
    made.shape[2] = shape->bs;
    made.shape[3] = shape->nh;
    made.shape[4] = width;
    made.row_width = shape->nh * shape->hs;
    made.plane_bytes = (lmc_i64)shape->bs * shape->nh * width * shape->element_size;
    while (row->axes[at])
        ++at;
    while (at-- > 0 && !error)
        error = lmc_lay_axis(&made, row->axes[at], shape, &running);
    if (error)
        return error;
    made.ptr_first = plane;
    if (row->levels[0] == 'L') /* per layer: one tensor, K and V, or its planes */
        made.ptr_layer = row->levels[1] == '2' ? 2 : planes;
    else if (row->levels[0] == '2') /* K of all layers, then V */
        made.ptr_layer = 1;
    if (lmc_contains(row->levels, '2'))
        made.ptr_kv = row->levels[0] == 'L' ? 1 : shape->nl;
    *out = made;
    return LMC_OK;
}

/* Describe paged memory of format `format`.
 *
 * Pointers, wherever transfers ask for them, are those of the format's tensors: per layer; K of all layers and
 * then V where the format is a pair of lists; K and V per layer where layers are pairs; one where a single tensor
 * holds all layers.
 */
LMC_HOST_FN int lmc_layout_init(lmc_layout *out, int format, const lmc_shape_desc *shape)
{
    const lmc_format_row *row = lmc_format(format);
    int error;
    if (!LMC_KNOWS(shape))
        return LMC_E_VERSION;
    if (!row)
        return LMC_E_FORMAT;
    if (lmc_contains(row->axes, 'T'))
        return LMC_E_BLOCKS;
    if (lmc_contains(row->levels, 'N'))
        return LMC_E_PLANES;
    error = lmc_check_shape(row, shape);
    return error ? error : lmc_lay_out(out, row, shape, shape->hs, 0, 1);
}

/* Describe one plane of a format whose layers are `planes` tensors of these widths; their sum is shape->hs.
 * Each plane is a transfer of its own into its columns of the objects; pointers go plane by plane per layer. */
LMC_HOST_FN int lmc_layout_init_plane(lmc_layout *out, int format, const lmc_shape_desc *shape, int plane,
                                      int planes, const int *widths)
{
    const lmc_format_row *row = lmc_format(format);
    lmc_i64 total = 0, column = 0;
    int at, error;
    if (!LMC_KNOWS(shape))
        return LMC_E_VERSION;
    if (!row)
        return LMC_E_FORMAT;
    if (!lmc_contains(row->levels, 'N') || plane < 0 || plane >= planes)
        return LMC_E_PLANES;
    for (at = 0; at < planes; ++at) {
        if (widths[at] < 1)
            return LMC_E_PLANES;
        column += at < plane ? widths[at] : 0;
        total += widths[at];
    }
    if (total != shape->hs)
        return LMC_E_PLANES;
    error = lmc_check_shape(row, shape);
    if (!error)
        error = lmc_lay_out(out, row, shape, widths[plane], plane, planes);
    if (!error)
        out->column = (int)column;
    return error;
}

#endif /* LMC_OPENCL */

#endif

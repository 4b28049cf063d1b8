/* The C headers in C99, and the sizes that other compilers must agree on. */

#include <lmcache/abi.h>
#include <lmcache/kv_index.h>
#include <lmcache/layout.h>
#include <lmcache/transfer.h>

typedef char shape_desc_is_forty_bytes[sizeof(lmc_shape_desc) == 40 ? 1 : -1];
typedef char layout_is_128_bytes[sizeof(lmc_layout) == 128 ? 1 : -1];
typedef char object_is_forty_bytes[sizeof(lmc_object) == 40 ? 1 : -1];
typedef char transfer_is_168_bytes[sizeof(lmc_transfer) == 168 ? 1 : -1];

int check(void)
{
    lmc_shape_desc shape = LMC_INIT(lmc_shape_desc);
    lmc_layout layout;
    return lmc_layout_init(&layout, 1, &shape) + (int)lmc_chunk_offset(0, 0, 1, 0, 0, 1, 1, 1, 1);
}

// The SDK's rotation of keys, with the types of elements told at run time.
#ifndef LMCACHE_CUDA_ROTATE_H
#define LMCACHE_CUDA_ROTATE_H

#include <lmcache/kv_body.h>

#include "numbers.h"

struct lmc_rotate {
    lmc_rope rope;
    lmc_u64 old_positions, new_positions, keys, table;
    int position_type, key_type, table_type, reserved;
};

struct lmc_float_place {
    lmc_u64 base;
    lmc_i64 index;
    int type;

    LMC_DEVICE operator float() const { return lmc_load_float(base, index, type); }
    LMC_DEVICE void operator=(float value) const { lmc_store_float(base, index, type, value); }
};

struct lmc_floats {
    lmc_u64 base;
    int type;

    LMC_DEVICE lmc_float_place operator[](lmc_i64 index) const { return lmc_float_place{base, index, type}; }
};

struct lmc_ints {
    lmc_u64 base;
    int type;

    LMC_DEVICE lmc_i64 operator[](lmc_i64 index) const { return lmc_load_int(base, index, type); }
};

// A grid of x: tokens.
LMC_FN void lmc_rotate_body(const lmc_rotate &r, const lmc_grid &at)
{
    const lmc_floats keys = {r.keys, r.key_type}, table = {r.table, r.table_type};
    const lmc_ints was = {r.old_positions, r.position_type}, is = {r.new_positions, r.position_type};
    lmc_rope_body(r.rope, keys, table, was, is, at);
}

#endif

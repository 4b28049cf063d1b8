// Every kernel: its name in the image, its one parameter, and its body. The device code, the host code and the fake
// driver of the tests read this list.
#ifndef LMCACHE_CUDA_KERNELS_H
#define LMCACHE_CUDA_KERNELS_H

#include "cachegen.h"
#include "move.h"
#include "rotate.h"

struct lmc_copy {
    lmc_u64 to, from;
    lmc_i64 count;
};

LMC_FN void lmc_plain_copy_body(const lmc_copy &c, const lmc_grid &at)
{
    lmc_copy_body(lmc_address(c.to, 0), lmc_address(c.from, 0), c.count, at);
}

#define LMC_MOST_THREADS 256

#define LMC_KERNELS(KERNEL)                                 \
    KERNEL(lmcache_move, lmc_move, lmc_move_body)           \
    KERNEL(lmcache_copy, lmc_copy, lmc_plain_copy_body)     \
    KERNEL(lmcache_rotate, lmc_rotate, lmc_rotate_body)     \
    KERNEL(lmcache_cdf, lmc_cachegen, lmc_cdf_body)         \
    KERNEL(lmcache_measure, lmc_cachegen, lmc_measure_body) \
    KERNEL(lmcache_encode, lmc_cachegen, lmc_encode_body)   \
    KERNEL(lmcache_decode, lmc_cachegen, lmc_decode_body)

#endif

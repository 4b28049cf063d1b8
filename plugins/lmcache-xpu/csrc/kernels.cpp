// The device code: compiled ahead by ci/make_spirv.py, or by the SYCL runtime where a device does not take that.
#include <sycl/sycl.hpp>

#include "lmcache/kv_body.h"

namespace syclex = sycl::ext::oneapi::experimental;

// SYCL counts from the outside in: its last dimension is the one of neighbours.
static inline lmc_grid lmc_here()
{
    const sycl::nd_item<3> at = sycl::ext::oneapi::this_work_item::get_nd_item<3>();
    return lmc_grid{(int)at.get_group(2),       (int)at.get_group(1),       (int)at.get_group(0),
                    (int)at.get_local_id(2),    (int)at.get_group_range(2), (int)at.get_group_range(1),
                    (int)at.get_group_range(0), (int)at.get_local_range(2)};
}

extern "C" SYCL_EXT_ONEAPI_FUNCTION_PROPERTY((syclex::nd_range_kernel<3>))
void lmcache_move(lmc_transfer transfer, const lmc_u64 *pages, const lmc_u64 *objects, const lmc_i64 *ids)
{
    lmc_kv_transfer_body(transfer, pages, objects, ids, lmc_here());
}

// The bodies as kernels of CUDA, HIP and SYCL front ends. Compiled, not run.

#include <lmcache/kv_body.h>
#include <lmcache/transfer.h>

#if defined(__NVCC__)
#define KERNEL extern "C" __global__ void
#define GRID                                                                                                  \
    {(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z, (int)threadIdx.x,                                     \
     (int)gridDim.x, (int)gridDim.y, (int)gridDim.z, (int)blockDim.x}
#elif defined(__HIP__)
#define KERNEL extern "C" __attribute__((global)) void
#define GRID                                                                                                  \
    {(int)__builtin_amdgcn_workgroup_id_x(), (int)__builtin_amdgcn_workgroup_id_y(),                          \
     (int)__builtin_amdgcn_workgroup_id_z(), (int)__builtin_amdgcn_workitem_id_x(), 64, 8, 2, 256}
#endif

#ifdef KERNEL
KERNEL move(lmc_transfer t, const lmc_u64 *pages, const lmc_u64 *objects, const lmc_i64 *ids)
{
    const lmc_grid at = GRID;
    lmc_kv_transfer_body(t, pages, objects, ids, at);
}

KERNEL rotate(lmc_rope r, float *keys, const float *table, const lmc_i64 *was, const lmc_i64 *is)
{
    const lmc_grid at = GRID;
    lmc_rope_body(r, keys, table, was, is, at);
}

KERNEL copy(unsigned char *to, const unsigned char *from, lmc_i64 count)
{
    const lmc_grid at = GRID;
    lmc_copy_body(to, from, count, at);
}
#else // SYCL: a functor is the kernel
struct Move {
    lmc_transfer t;
    const lmc_u64 *pages, *objects;
    const lmc_i64 *ids;
    lmc_grid at;
    void operator()() const { lmc_kv_transfer_body(t, pages, objects, ids, at); }
};

template <typename Name, typename Kernel> __attribute__((sycl_kernel)) void single_task(const Kernel &kernel)
{
    kernel();
}

void submit(const Move &move) { single_task<class MoveName>(move); }
#endif

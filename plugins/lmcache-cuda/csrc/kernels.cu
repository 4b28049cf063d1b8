// The device code: nvcc makes the fatbin of it, clang the code objects for AMD (-x hip, without ROCm's headers).
#if defined(__HIP__)
#define __global__ __attribute__((global))
#define __launch_bounds__(threads) __attribute__((amdgpu_flat_work_group_size(1, threads)))
#define LMC_DEVICE __attribute__((device))

#include "kernels.h"

__attribute__((device)) static inline lmc_grid lmc_here()
{
    // The implicit arguments of code object version 5: how many groups there are, at their beginning.
    const auto *sizes = (const __attribute__((address_space(4))) unsigned int *)__builtin_amdgcn_implicitarg_ptr();
    return lmc_grid{(int)__builtin_amdgcn_workgroup_id_x(), (int)__builtin_amdgcn_workgroup_id_y(),
                    (int)__builtin_amdgcn_workgroup_id_z(), (int)__builtin_amdgcn_workitem_id_x(),
                    (int)sizes[0], (int)sizes[1], (int)sizes[2], (int)__builtin_amdgcn_workgroup_size_x()};
}

// Taking the address of a parameter would copy it to every thread's own memory; it lies in the segment of arguments.
#define LMC_KERNEL(name, type, body)                                                             \
    extern "C" __global__ __launch_bounds__(LMC_MOST_THREADS) void name(type)                    \
    {                                                                                            \
        body(*(const type *)__builtin_amdgcn_kernarg_segment_ptr(), lmc_here());                 \
    }
#else
#define LMC_DEVICE __device__

#include "kernels.h"

static __device__ inline lmc_grid lmc_here()
{
    return lmc_grid{(int)blockIdx.x, (int)blockIdx.y, (int)blockIdx.z, (int)threadIdx.x,
                    (int)gridDim.x,  (int)gridDim.y,  (int)gridDim.z,  (int)blockDim.x};
}

#define LMC_KERNEL(name, type, body)                                                                            \
    extern "C" __global__ void __launch_bounds__(LMC_MOST_THREADS) name(const __grid_constant__ type parameters) \
    {                                                                                                           \
        body(parameters, lmc_here());                                                                           \
    }
#endif

LMC_KERNELS(LMC_KERNEL)

/* What every header of the SDK rests on: versions, integer types and the words that differ between compilers.
 *
 * Needs no other header, and is C99, C++14 and OpenCL C (1.2 and later) alike. Define a hook before the first
 * header of the SDK is included to replace it:
 *
 *   LMC_DEVICE  qualifiers of a function that may run on the device
 *   LMC_INLINE  linkage of the SDK's functions
 *   LMC_GLOBAL  address space of the memory that transfers read and write
 */
#ifndef LMCACHE_ABI_H
#define LMCACHE_ABI_H

/* How integers, buffers and structures cross into native code. A module exports this number by this name, and
 * the core refuses a module whose number is not its own. */
#define LMCACHE_NATIVE_ABI 1

/* Version of the core that these headers came with. */
#define LMCACHE_VERSION_MAJOR 1
#define LMCACHE_VERSION_MINOR 0
#define LMCACHE_VERSION_PATCH 0

#if defined(__OPENCL_VERSION__) || defined(__OPENCL_C_VERSION__)
#define LMC_OPENCL 1
#endif

/* 64 bits on every compiler, and one type on all but OpenCL C, which has no `long long`. (`int64_t` is `long`
 * for some host compilers, where device code says `long long`: templates and overloads would then differ.) */
#ifdef LMC_OPENCL
typedef long lmc_i64;
typedef unsigned long lmc_u64;
#else
typedef long long lmc_i64;
typedef unsigned long long lmc_u64;
#endif

typedef char lmc_int_has_32_bits[sizeof(int) == 4 ? 1 : -1];
typedef char lmc_i64_has_64_bits[sizeof(lmc_i64) == 8 ? 1 : -1];

#ifndef LMC_DEVICE
#if defined(__NVCC__)
#define LMC_DEVICE __host__ __device__
#elif defined(__HIP__) || defined(__CUDA__)
#define LMC_DEVICE __attribute__((host)) __attribute__((device))
#else
#define LMC_DEVICE
#endif
#endif

#ifndef LMC_INLINE
#define LMC_INLINE static inline
#endif

#ifndef LMC_GLOBAL
#ifdef LMC_OPENCL
#define LMC_GLOBAL __global
#else
#define LMC_GLOBAL
#endif
#endif

/* A function for host and device; one for the host only. */
#define LMC_FN LMC_DEVICE LMC_INLINE
#define LMC_HOST_FN LMC_INLINE

#endif

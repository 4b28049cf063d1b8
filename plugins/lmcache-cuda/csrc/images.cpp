// The kernels as the compilers left them, in the module's read-only data: on a page's boundary, as compilers place
// code objects in programs. CMake defines paths and what is in them.
#include "driver.h"

#define LMC_INCBIN(symbol, file)                        \
    asm(".pushsection .rodata.lmcache, \"a\"\n"         \
        ".balign 4096\n"                                \
        #symbol "_begin:\n"                             \
        ".incbin \"" file "\"\n"                        \
        #symbol "_end:\n"                               \
        ".byte 0\n"                                     \
        ".popsection\n");                               \
    extern "C" const char symbol##_begin[] __attribute__((visibility("hidden"))); \
    extern "C" const char symbol##_end[] __attribute__((visibility("hidden")))

#ifdef LMCACHE_CUDA_IMAGE
LMC_INCBIN(lmcache_cuda_image, LMCACHE_CUDA_IMAGE);
#endif
#ifdef LMCACHE_ROCM_IMAGE
LMC_INCBIN(lmcache_rocm_image, LMCACHE_ROCM_IMAGE);
#endif

#ifndef LMCACHE_CUDA_ARCHITECTURES
#define LMCACHE_CUDA_ARCHITECTURES ""
#endif
#ifndef LMCACHE_ROCM_ARCHITECTURES
#define LMCACHE_ROCM_ARCHITECTURES ""
#endif
#ifndef LMCACHE_CUDA_DRIVER_VERSION
#define LMCACHE_CUDA_DRIVER_VERSION 0
#endif

namespace lmc {

Image image(Kind kind)
{
#ifdef LMCACHE_CUDA_IMAGE
    if (kind == kCuda)
        return {lmcache_cuda_image_begin, static_cast<size_t>(lmcache_cuda_image_end - lmcache_cuda_image_begin),
                LMCACHE_CUDA_ARCHITECTURES, LMCACHE_CUDA_DRIVER_VERSION};
#endif
#ifdef LMCACHE_ROCM_IMAGE
    if (kind == kRocm)
        return {lmcache_rocm_image_begin, static_cast<size_t>(lmcache_rocm_image_end - lmcache_rocm_image_begin),
                LMCACHE_ROCM_ARCHITECTURES, 0};
#endif
    (void)kind;
    return {nullptr, 0, "", 0};
}

} // namespace lmc

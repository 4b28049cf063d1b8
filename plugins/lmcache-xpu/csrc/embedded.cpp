// The kernel as SPIR-V, and the texts that it is made of: bytes of files, put into the module by the assembler.
#include "embedded.h"

#define EMBED(symbol, path)                                                                                   \
    __asm__(".section .rodata\n" #symbol "_begin:\n.incbin \"" path "\"\n" #symbol "_end:\n.byte 0\n.previous\n"); \
    extern "C" const char symbol##_begin[] __attribute__((visibility("hidden")));                             \
    extern "C" const char symbol##_end[] __attribute__((visibility("hidden")));

EMBED(lmc_spirv, LMCACHE_XPU_SOURCES "/kernels.spv")
EMBED(lmc_kernels, LMCACHE_XPU_SOURCES "/kernels.cpp")
EMBED(lmc_abi, LMCACHE_XPU_SOURCES "/sdk/lmcache/abi.h")
EMBED(lmc_formats, LMCACHE_XPU_SOURCES "/sdk/lmcache/kv_formats.h")
EMBED(lmc_index, LMCACHE_XPU_SOURCES "/sdk/lmcache/kv_index.h")
EMBED(lmc_layouts, LMCACHE_XPU_SOURCES "/sdk/lmcache/layout.h")
EMBED(lmc_body, LMCACHE_XPU_SOURCES "/sdk/lmcache/kv_body.h")

namespace lmc {

std::string embedded_spirv() { return {lmc_spirv_begin, lmc_spirv_end}; }

std::string embedded_kernels() { return {lmc_kernels_begin, lmc_kernels_end}; }

std::vector<std::pair<std::string, std::string>> embedded_headers()
{
    return {
        {"lmcache/abi.h", {lmc_abi_begin, lmc_abi_end}},
        {"lmcache/kv_formats.h", {lmc_formats_begin, lmc_formats_end}},
        {"lmcache/kv_index.h", {lmc_index_begin, lmc_index_end}},
        {"lmcache/layout.h", {lmc_layouts_begin, lmc_layouts_end}},
        {"lmcache/kv_body.h", {lmc_body_begin, lmc_body_end}},
    };
}

} // namespace lmc

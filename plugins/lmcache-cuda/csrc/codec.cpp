// Launches of the kernels that compute on content, and of the plain copy.
#include <algorithm>

#include "api.h"

namespace lmc {
namespace {

constexpr i64 kMostGroups = 1 << 16; // kernels loop beyond that

unsigned int up_to(i64 most, i64 count) { return static_cast<unsigned int>(std::min(most, std::max<i64>(1, count))); }

i64 groups(i64 count, i64 of) { return (count + of - 1) / of; }

} // namespace

void copy_kernel(u64 dst, u64 src, u64 nbytes, u64 stream, int device)
{
    if (!nbytes)
        return;
    const lmc_copy parameters = {dst, src, static_cast<lmc_i64>(nbytes)};
    const i64 per_group = LMC_MOST_THREADS * 16;
    const Current on(device);
    launch(kernel_lmcache_copy, &parameters,
           {up_to(kMostGroups, groups(static_cast<i64>(nbytes), per_group)), 1, 1, LMC_MOST_THREADS}, stream, on);
}

void rotate(const lmc_rotate &parameters, u64 stream, int device)
{
    const i64 pairs = static_cast<i64>(parameters.rope.rotated / 2) * parameters.rope.heads;
    if (!parameters.rope.tokens || !pairs)
        return;
    const Current on(device);
    launch(kernel_lmcache_rotate, &parameters,
           {up_to(kMostGroups, parameters.rope.tokens), 1, 1, up_to(LMC_MOST_THREADS, groups(pairs, 32) * 32)}, stream, on);
}

void cachegen(Kernel kernel, const lmc_cachegen &parameters, u64 stream, int device)
{
    const i64 streams = static_cast<i64>(parameters.layers) * parameters.channels;
    if (!streams)
        return;
    constexpr int threads = 64; // streams are few, and each runs long: spread them over the device
    const Current on(device);
    launch(kernel, &parameters, {up_to(kMostGroups, groups(streams, threads)), 1, 1, threads}, stream, on);
}

} // namespace lmc

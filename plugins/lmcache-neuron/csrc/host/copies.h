// Copies between a staging buffer and many places of host memory, shared among a few plain threads.
//
// Nothing here knows Python or a device, so that it is tested by itself and shipped by several plugins.
#ifndef LMCACHE_HOST_COPIES_H
#define LMCACHE_HOST_COPIES_H

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <exception>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include <sched.h>

#include "buffer.h"

namespace lmchost {

constexpr i64 kBytesPerThread = i64(4) << 20; // fewer than that do not pay for a thread
constexpr int kMostThreads = 4;               // memory is saturated; the engine computes on the other cores
constexpr int kMostWanted = 64;               // of threads that are asked for by number

inline int cores()
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

// How many threads share work of so many bytes; `wanted` above 0 decides.
inline int threads_for(i64 bytes, i64 items, int wanted)
{
    const i64 most = wanted > 0 ? std::min(wanted, kMostWanted) : std::min<i64>({kMostThreads, cores(), bytes / kBytesPerThread});
    return static_cast<int>(std::max<i64>(1, std::min(most, items)));
}

// Call part(first, last) on stretches of 0..items, one per thread. A thread that cannot be had is done without.
template <typename Part> void shared_out(i64 items, int threads, const Part &part)
{
    std::vector<std::thread> helpers;
    const i64 step = (items + threads - 1) / threads;
    i64 first = 0;
    helpers.reserve(static_cast<std::size_t>(threads));
    for (int at = 1; at < threads && first + step < items; ++at, first += step) {
        try {
            helpers.emplace_back([&part, first, step] { part(first, first + step); });
        } catch (const std::exception &) { // std::system_error, or no memory for what a thread needs
            break; // this thread does the rest
        }
    }
    part(first, items);
    for (std::thread &helper : helpers)
        helper.join();
}

// Rows of a stage lie one after the other; each is `pieces` pieces that lie `stride` bytes apart at its address.
struct Rows {
    u64 stage;
    i64 pieces, piece_bytes, stride;

    i64 row_bytes() const { return pieces * piece_bytes; }
};

// Everything is checked before anything moves.
inline void check(const char *op, const Rows &rows, const std::vector<u64> &addresses)
{
    const auto fail = [op](const std::string &name, i64 value, const std::string &expected) {
        throw std::invalid_argument(std::string(op) + ": " + name + "=" + std::to_string(value) + ": expected " +
                                    expected);
    };
    if (rows.pieces < 1)
        fail("pieces", rows.pieces, "1 or more");
    if (rows.piece_bytes < 1 || rows.piece_bytes > INT64_MAX / rows.pieces)
        fail("piece_bytes", rows.piece_bytes, "1 or more, and a row within 63 bits");
    if (rows.pieces > 1 && rows.stride < rows.piece_bytes)
        fail("stride", rows.stride, "at least the " + std::to_string(rows.piece_bytes) + " bytes of a piece");
    if (rows.pieces > 1 && rows.stride > (INT64_MAX - rows.piece_bytes) / (rows.pieces - 1))
        fail("stride", rows.stride, "a row's pieces within 63 bits");
    const i64 count = static_cast<i64>(addresses.size());
    if (count > INT64_MAX / rows.row_bytes() || !can_be_memory(rows.stage, static_cast<u64>(count * rows.row_bytes())))
        fail("stage", static_cast<i64>(rows.stage), "an address of " + std::to_string(count) + " rows");
    const u64 span = static_cast<u64>((rows.pieces - 1) * rows.stride + rows.piece_bytes);
    for (std::size_t at = 0; at < addresses.size(); ++at)
        if (addresses[at] && !can_be_memory(addresses[at], span))
            fail("addresses[" + std::to_string(at) + "]", static_cast<i64>(addresses[at]),
                 "an address of " + std::to_string(span) + " bytes, or 0");
}

// Move rows between a stage and their addresses. A row whose address is 0 is left alone: it is padding.
template <bool ToStage>
void move_rows(const Rows &rows, const std::vector<u64> &addresses, int threads)
{
    const i64 count = static_cast<i64>(addresses.size()), bytes = rows.row_bytes();
    const auto part = [&](i64 first, i64 last) {
        for (i64 row = first; row < last; ++row) {
            if (!addresses[static_cast<std::size_t>(row)])
                continue;
            auto *stage = reinterpret_cast<unsigned char *>(rows.stage) + row * bytes;
            auto *place = reinterpret_cast<unsigned char *>(addresses[static_cast<std::size_t>(row)]);
            for (i64 at = 0; at < rows.pieces; ++at) {
                unsigned char *here = stage + at * rows.piece_bytes, *there = place + at * rows.stride;
                std::memcpy(ToStage ? here : there, ToStage ? there : here, static_cast<std::size_t>(rows.piece_bytes));
            }
        }
    };
    shared_out(count, threads_for(count * bytes, count, threads), part);
}

// Whether any target shares bytes with a source or with another target: then the order of copies is part of the call.
inline bool order_matters(const std::vector<u64> &src, const std::vector<u64> &dst, const std::vector<u64> &sizes)
{
    struct Span {
        u64 begin, end;
        bool written;
    };
    std::vector<Span> spans;
    spans.reserve(2 * sizes.size());
    for (std::size_t at = 0; at < sizes.size(); ++at)
        if (sizes[at]) {
            spans.push_back({src[at], src[at] + sizes[at], false});
            spans.push_back({dst[at], dst[at] + sizes[at], true});
        }
    std::sort(spans.begin(), spans.end(), [](const Span &one, const Span &other) { return one.begin < other.begin; });
    u64 read_to = 0, written_to = 0; // the furthest ends so far
    for (const Span &one : spans) {
        if (one.begin < written_to || (one.written && one.begin < read_to))
            return true;
        u64 &to = one.written ? written_to : read_to;
        to = std::max(to, one.end);
    }
    return false;
}

// Copies of their own sizes. Threads get stretches of about as many bytes each; where copies overlap, one thread makes
// them in their order, as the contract's baseline does.
inline void copy_each(const std::vector<u64> &src, const std::vector<u64> &dst, const std::vector<u64> &sizes)
{
    if (order_matters(src, dst, sizes)) {
        for (std::size_t at = 0; at < sizes.size(); ++at)
            std::memmove(reinterpret_cast<void *>(dst[at]), reinterpret_cast<const void *>(src[at]),
                         static_cast<std::size_t>(sizes[at]));
        return;
    }
    std::vector<u64> ends(sizes.size());
    u64 total = 0;
    for (std::size_t at = 0; at < sizes.size(); ++at)
        ends[at] = total += sizes[at];
    // A stretch of bytes, which may begin and end within a copy: one large copy is shared out as well.
    const auto part = [&](i64 first, i64 last) {
        u64 from = static_cast<u64>(first);
        std::size_t at = static_cast<std::size_t>(std::upper_bound(ends.begin(), ends.end(), from) - ends.begin());
        for (; at < sizes.size() && from < static_cast<u64>(last); ++at) {
            const u64 inside = from - (ends[at] - sizes[at]);
            const u64 bytes = std::min(ends[at], static_cast<u64>(last)) - from;
            std::memcpy(reinterpret_cast<void *>(dst[at] + inside), reinterpret_cast<const void *>(src[at] + inside),
                        static_cast<std::size_t>(bytes));
            from += bytes;
        }
    };
    if (total)
        shared_out(static_cast<i64>(total), threads_for(static_cast<i64>(total), static_cast<i64>(total), 0), part);
}

} // namespace lmchost

#endif

// CacheGen's coder, one thread per stream: docs/cachegen.md specifies the bits.
//
// Stream i is layer i / C, channel i % C. Tables are int16 [streams, bins + 1]; symbols [L, T, C]. Each stream says in
// `status` how it went, and whoever launched looks there before it uses what was written.
#ifndef LMCACHE_CUDA_CACHEGEN_H
#define LMCACHE_CUDA_CACHEGEN_H

#include <lmcache/kv_body.h>

#include "numbers.h"

enum lmc_stream_status { LMC_STREAM_OK, LMC_STREAM_BAD_CDF, LMC_STREAM_BAD_SYMBOL, LMC_STREAM_DAMAGED };

struct lmc_cachegen {
    lmc_u64 symbols, cdf, status;
    lmc_u64 data, sizes; // bytes; int64 per stream: their number, or where a stream to decode begins
    lmc_u64 ends;        // int64 per stream: the first byte behind a stream to decode
    lmc_u64 counts;      // int32 [bins, streams]: room for calculate_cdf
    lmc_i64 capacity;    // bytes of a stream's row
    int layers, tokens, channels, bins;
    int symbol_type, reserved;
};

LMC_FN int lmc_streams(const lmc_cachegen &g) { return g.layers * g.channels; }

LMC_FN lmc_i64 lmc_symbol_at(const lmc_cachegen &g, int stream, int token)
{
    return (static_cast<lmc_i64>(stream / g.channels) * g.tokens + token) * g.channels + stream % g.channels;
}

LMC_FN void lmc_set_status(const lmc_cachegen &g, int stream, int status)
{
    reinterpret_cast<unsigned char *>(g.status)[stream] = (unsigned char)status;
}

// Entry `at` of a stream's table, as unsigned; the last is 65536, which has no room in 16 bits.
LMC_FN unsigned int lmc_cdf(const lmc_cachegen &g, int stream, int at)
{
    if (at == g.bins)
        return 65536u;
    return reinterpret_cast<const unsigned short *>(g.cdf)[static_cast<lmc_i64>(stream) * (g.bins + 1) + at];
}

LMC_FN int lmc_is_cdf(const lmc_cachegen &g, int stream)
{
    const lmc_i64 row = static_cast<lmc_i64>(stream) * (g.bins + 1);
    if (reinterpret_cast<const unsigned short *>(g.cdf)[row + g.bins] || lmc_cdf(g, stream, 0))
        return 0;
    for (int at = 0; at < g.bins; ++at)
        if (lmc_cdf(g, stream, at + 1) <= lmc_cdf(g, stream, at))
            return 0;
    return 1;
}

// ------------------------------------------------------------------------------------------------ frequencies
LMC_FN void lmc_cdf_stream(const lmc_cachegen &g, int stream)
{
    int *counts = reinterpret_cast<int *>(g.counts);
    const int streams = lmc_streams(g);
    short *row = reinterpret_cast<short *>(g.cdf) + static_cast<lmc_i64>(stream) * (g.bins + 1);
    int status = LMC_STREAM_OK;
    for (int bin = 0; bin < g.bins; ++bin)
        counts[static_cast<lmc_i64>(bin) * streams + stream] = 0;
    for (int token = 0; token < g.tokens; ++token) {
        const lmc_i64 symbol = lmc_load_int(g.symbols, lmc_symbol_at(g, stream, token), g.symbol_type);
        if (symbol < 0 || symbol >= g.bins)
            status = LMC_STREAM_BAD_SYMBOL;
        else
            ++counts[symbol * streams + stream];
    }
    const lmc_i64 total = g.tokens ? g.tokens : g.bins; // without tokens all symbols are alike
    lmc_i64 below = 0;
    for (int bin = 0; bin <= g.bins; ++bin) {
        row[bin] = (short)(unsigned short)((bin + below * (65536 - g.bins) / total) & 0xffff);
        if (bin < g.bins)
            below += g.tokens ? counts[static_cast<lmc_i64>(bin) * streams + stream] : 1;
    }
    lmc_set_status(g, stream, status);
}

// ------------------------------------------------------------------------------------------------- encoding
// Codes a stream from its last symbol. Bytes go backwards from `end`, or nowhere where that is null; their number.
LMC_FN lmc_i64 lmc_encode_stream(const lmc_cachegen &g, int stream, unsigned char *end)
{
    unsigned int state = 0;
    lmc_i64 bytes = 0;
    for (int token = g.tokens - 1; token >= 0; --token) {
        const int symbol = (int)lmc_load_int(g.symbols, lmc_symbol_at(g, stream, token), g.symbol_type);
        const unsigned int low = lmc_cdf(g, stream, symbol), freq = lmc_cdf(g, stream, symbol + 1) - low;
        while (state >= freq << 15) { // freq is at most 65535
            ++bytes;
            if (end)
                end[-bytes] = (unsigned char)state;
            state >>= 8;
        }
        state = ((state / freq) << 16) + state % freq + low;
    }
    for (; state; state >>= 8) {
        ++bytes;
        if (end)
            end[-bytes] = (unsigned char)state;
    }
    return bytes;
}

LMC_FN void lmc_measure_stream(const lmc_cachegen &g, int stream)
{
    int status = lmc_is_cdf(g, stream) ? LMC_STREAM_OK : LMC_STREAM_BAD_CDF;
    for (int token = 0; token < g.tokens && !status; ++token) {
        const lmc_i64 symbol = lmc_load_int(g.symbols, lmc_symbol_at(g, stream, token), g.symbol_type);
        if (symbol < 0 || symbol >= g.bins)
            status = LMC_STREAM_BAD_SYMBOL;
    }
    reinterpret_cast<lmc_i64 *>(g.sizes)[stream] = status ? -1 : lmc_encode_stream(g, stream, nullptr);
    lmc_set_status(g, stream, status);
}

LMC_FN void lmc_write_stream(const lmc_cachegen &g, int stream)
{
    const lmc_i64 size = reinterpret_cast<const lmc_i64 *>(g.sizes)[stream];
    if (size >= 0 && size <= g.capacity) // what cannot be coded has size -1
        lmc_encode_stream(g, stream, reinterpret_cast<unsigned char *>(g.data) + stream * g.capacity + size);
}

// ------------------------------------------------------------------------------------------------- decoding
struct lmc_reader {
    const unsigned char *at, *end;
    unsigned int state;

    LMC_DEVICE void refill(int most)
    {
        for (; most > 0 && state < 1u << 23 && at < end; --most)
            state = state << 8 | *at++;
    }
};

// The last entry that is at most `slot`.
LMC_FN int lmc_find_symbol(const lmc_cachegen &g, int stream, unsigned int slot)
{
    int symbol = 0, bins = g.bins;
    while (bins > 1) {
        const int half = bins / 2;
        if (lmc_cdf(g, stream, symbol + half) <= slot)
            symbol += half;
        bins -= half;
    }
    return symbol;
}

LMC_FN void lmc_decode_stream(const lmc_cachegen &g, int stream)
{
    const unsigned char *data = reinterpret_cast<const unsigned char *>(g.data);
    lmc_reader from = {data + reinterpret_cast<const lmc_i64 *>(g.sizes)[stream],
                       data + reinterpret_cast<const lmc_i64 *>(g.ends)[stream], 0};
    if (!lmc_is_cdf(g, stream))
        return lmc_set_status(g, stream, LMC_STREAM_BAD_CDF);
    const int begins_with_zero = from.at < from.end && *from.at == 0;
    from.refill(4);
    for (int token = 0; token < g.tokens; ++token) {
        const unsigned int slot = from.state & 0xffffu;
        const int symbol = lmc_find_symbol(g, stream, slot);
        const unsigned int low = lmc_cdf(g, stream, symbol), freq = lmc_cdf(g, stream, symbol + 1) - low;
        lmc_store_int(g.symbols, lmc_symbol_at(g, stream, token), g.symbol_type, symbol);
        from.state = freq * (from.state >> 16) + slot - low;
        from.refill(2);
    }
    lmc_set_status(g, stream, from.state || begins_with_zero ? LMC_STREAM_DAMAGED : LMC_STREAM_OK);
}

// --------------------------------------------------------------------------------------------------- bodies
// A grid of x: 1-D over streams.
template <typename Each> LMC_FN void lmc_each_stream(const lmc_cachegen &g, const lmc_grid &at, Each each)
{
    if (at.y || at.z)
        return;
    for (int stream = at.x * at.threads + at.thread; stream < lmc_streams(g); stream += at.size_x * at.threads)
        each(g, stream);
}

LMC_FN void lmc_cdf_body(const lmc_cachegen &g, const lmc_grid &at) { lmc_each_stream(g, at, lmc_cdf_stream); }
LMC_FN void lmc_measure_body(const lmc_cachegen &g, const lmc_grid &at) { lmc_each_stream(g, at, lmc_measure_stream); }
LMC_FN void lmc_encode_body(const lmc_cachegen &g, const lmc_grid &at) { lmc_each_stream(g, at, lmc_write_stream); }
LMC_FN void lmc_decode_body(const lmc_cachegen &g, const lmc_grid &at) { lmc_each_stream(g, at, lmc_decode_stream); }

#endif

// Thin loops over tiles for the CPU; the work is in items.h. Included once by each of
// cpu_portable.cpp, cpu_v3.cpp and cpu_v4.cpp, which say for which processor and name the table.
#include "cpu_table.h"
#include "items.h"

namespace {

// A tile's worth of values: the caller's where the tile is whole, else a zero-padded copy.
template <class T>
struct Padded {
    alignas(64) T values[CPD_TILE];

    __attribute__((always_inline)) const T* read(const T* x, i64 n) {
        if (n >= CPD_TILE) return x;
        memset(values, 0, sizeof values);
        memcpy(values, x, (size_t)n * sizeof(T));
        return values;
    }
    __attribute__((always_inline)) T* target(T* out, i64 n) { return n >= CPD_TILE ? out : values; }
    __attribute__((always_inline)) void write(T* out, i64 n) {
        if (n < CPD_TILE) memcpy(out, values, (size_t)n * sizeof(T));
    }
};

CPD_FN u32 largest_lane(U v) {
    u32 most = 0;
    for (int lane = 0; lane < CPD_GROUP; ++lane) most = v[lane] > most ? v[lane] : most;
    return most;
}

CPD_FN u32 sum_lanes(I v) {
    u32 sum = 0;
    for (int lane = 0; lane < CPD_GROUP; ++lane) sum += (u32)v[lane];
    return sum;
}

// How many of n values are not finite: where a tile is padded, the padding does not count.
inline u32 nonfinite_in(const float* x, i64 n) {
    u32 found = 0;
    for (i64 i = 0; i < n; ++i) {
        u32 bits;
        memcpy(&bits, x + i, sizeof bits);
        found += (bits & 0x7fffffff) >= CPD_INF;
    }
    return found;
}

CPD_FN u32 amax_tile(const float* x) {
    return largest_lane(larger(amax_column(x, CPD_TILE, 0), amax_column(x, CPD_TILE, CPD_GROUP)));
}

template <bool NEAREST, bool COUNT>
CPD_FN void encode_tile(const Cast& cast, u8 shift, Key key, u64 index, const float* x, i64 n,
                        u32* words, u32* counts) {
    Counts c = {};
    int k = shift == CPD_SHIFT_NONFINITE ? 0 : shift - CPD_SHIFT_BIAS;
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
        encode_column<NEAREST, COUNT>(cast, k, x, n, words, lane, key, index, c);
    if (COUNT) {
        counts[0] = sum_lanes(c.saturated);
        counts[1] = sum_lanes(c.underflowed);
        counts[2] = sum_lanes(c.nonfinite);
    }
}

template <bool NEAREST, bool COUNT>
CPD_FN void encode_loop(const Cast& cast, bool fit, Key key, u64 offset, const float* x, i64 n,
                        u32* words, u8* shifts, u32* counts) {
    Padded<float> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const float* tile = pad.read(x + t * CPD_TILE, n - t * CPD_TILE);
        if (fit) shifts[t] = fitting_shift(cast, amax_tile(tile));
        encode_tile<NEAREST, COUNT>(cast, shifts[t], key, offset + t * CPD_TILE, tile, CPD_TILE,
                                    words + t * CPD_LANES * width(cast), counts + 3 * t);
    }
}

template <bool NEAREST, bool COUNT>
CPD_FN void hop_loop(const Cast& cast, bool fit, Key key, u64 offset, const u32* words_in,
                     const u8* shifts_in, const float* x, i64 n, u32* words, u8* shifts,
                     u32* counts) {
    Padded<float> pad;
    alignas(64) float sum[CPD_TILE];
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const float* tile = pad.read(x + t * CPD_TILE, n - t * CPD_TILE);
        i64 first = t * CPD_LANES * width(cast);
        U most = lanes(0);
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            most = larger(most, sum_column(cast, shifts_in[t], words_in + first, lane, tile,
                                           CPD_TILE, sum, CPD_TILE));
        i64 left = n - t * CPD_TILE;
        if (left < CPD_TILE) memset(sum + left, 0, (size_t)(CPD_TILE - left) * sizeof(float));
        if (fit) shifts[t] = fitting_shift(cast, largest_lane(most));
        encode_tile<NEAREST, COUNT>(cast, shifts[t], key, offset + t * CPD_TILE, sum, CPD_TILE,
                                    words + first, counts + 3 * t);
    }
}

void encode(const Cast& given, int k, Key key, u64 offset, const float* x, i64 n, u32* codes) {
    const Cast cast = given;  // a copy, which no store can change
    Encoder e = make_encoder(cast, k);
    Padded<float> pad;
    Padded<u32> pad_codes;
    Counts counts;
    for (i64 t = 0; t < n; t += CPD_TILE) {
        const float* tile = pad.read(x + t, n - t);
        u32* out = pad_codes.target(codes + t, n - t);
        for (int i = 0; i < CPD_TILE; i += CPD_GROUP) {
            F value = load(tile, i, CPD_TILE);
            U code = cast.rounding == CPD_NEAREST
                         ? encode_value<true, false>(cast, e, value, key, offset + t + i, counts)
                         : encode_value<false, false>(cast, e, value, key, offset + t + i, counts);
            store(out, i, CPD_TILE, code);
        }
        pad_codes.write(codes + t, n - t);
    }
}

void decode(const Cast& given, int k, const u32* codes, i64 n, float* out) {
    const Cast cast = given;  // a copy, which no store can change
    Decoder d = make_decoder(cast, k);
    Padded<u32> pad;
    Padded<float> pad_out;
    for (i64 t = 0; t < n; t += CPD_TILE) {
        const u32* tile = pad.read(codes + t, n - t);
        float* target = pad_out.target(out + t, n - t);
        for (int i = 0; i < CPD_TILE; i += CPD_GROUP)
            store(target, i, CPD_TILE, decode_code(cast, d, load(tile, i, CPD_TILE)));
        pad_out.write(out + t, n - t);
    }
}

void pack(int bits, const u32* codes, i64 n, u32* words) {
    Padded<u32> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const u32* tile = pad.read(codes + t * CPD_TILE, n - t * CPD_TILE);
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            pack_column(tile, CPD_TILE, bits, words + t * CPD_LANES * bits, lane);
    }
}

void unpack(int bits, const u32* words, i64 n, u32* codes) {
    Padded<u32> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        i64 left = n - t * CPD_TILE;
        u32* out = codes + t * CPD_TILE;
        u32* tile = pad.target(out, left);
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            unpack_column(words + t * CPD_LANES * bits, bits, tile, CPD_TILE, lane);
        pad.write(out, left);
    }
}

void amax_tiles(const float* x, i64 n, u32* amax) {
    Padded<float> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t)
        amax[t] = amax_tile(pad.read(x + t * CPD_TILE, n - t * CPD_TILE));
}

void encode_tiles(const Cast& given, bool fit, Key key, u64 offset, const float* x, i64 n,
                  u32* words, u8* shifts, u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    if (cast.rounding == CPD_NEAREST && counts)
        encode_loop<true, true>(cast, fit, key, offset, x, n, words, shifts, counts);
    else if (cast.rounding == CPD_NEAREST)
        encode_loop<true, false>(cast, fit, key, offset, x, n, words, shifts, counts);
    else if (counts)
        encode_loop<false, true>(cast, fit, key, offset, x, n, words, shifts, counts);
    else
        encode_loop<false, false>(cast, fit, key, offset, x, n, words, shifts, counts);
}

i64 decode_tiles(const Cast& given, const u32* words, const u8* shifts, float* out, i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad;
    i64 nonfinite = 0;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        i64 left = n - t * CPD_TILE;
        float* target = pad.target(out + t * CPD_TILE, left);
        I count = {};
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            decode_column(cast, shifts[t], words + t * CPD_LANES * width(cast), lane, target,
                          CPD_TILE, count);
        u32 found = sum_lanes(count);
        nonfinite += found && left < CPD_TILE ? nonfinite_in(target, left) : found;
        pad.write(out + t * CPD_TILE, left);
    }
    return nonfinite;
}

void decode_add_tiles(const Cast& given, const u32* words, const u8* shifts, const float* x,
                      float* out, i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad, pad_out;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        i64 left = n - t * CPD_TILE;
        const float* tile = pad.read(x + t * CPD_TILE, left);
        float* target = pad_out.target(out + t * CPD_TILE, left);
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            sum_column(cast, shifts[t], words + t * CPD_LANES * width(cast), lane, tile, CPD_TILE,
                       target, CPD_TILE);
        pad_out.write(out + t * CPD_TILE, left);
    }
}

void decode_add_encode_tiles(const Cast& given, bool fit, Key key, u64 offset, const u32* words_in,
                             const u8* shifts_in, const float* x, i64 n, u32* words, u8* shifts,
                             u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    if (cast.rounding == CPD_NEAREST && counts)
        hop_loop<true, true>(cast, fit, key, offset, words_in, shifts_in, x, n, words, shifts,
                             counts);
    else if (cast.rounding == CPD_NEAREST)
        hop_loop<true, false>(cast, fit, key, offset, words_in, shifts_in, x, n, words, shifts,
                              counts);
    else if (counts)
        hop_loop<false, true>(cast, fit, key, offset, words_in, shifts_in, x, n, words, shifts,
                              counts);
    else
        hop_loop<false, false>(cast, fit, key, offset, words_in, shifts_in, x, n, words, shifts,
                               counts);
}

}  // namespace

#include "cpu_integers.h"

extern const Loops CPD_TABLE = {CPD_TABLE_NAME,
                                encode,
                                decode,
                                pack,
                                unpack,
                                amax_tiles,
                                encode_tiles,
                                decode_tiles,
                                decode_add_tiles,
                                decode_add_encode_tiles,
                                add_integers_tiles,
                                add_encode_integers_tiles,
                                decode_integers_tiles,
                                pack_trits,
                                unpack_trits};

// Loops of exact sums for the CPU; a part of cpu_loops.h, which includes it.
#include "integers.h"
#include "trits.h"

namespace {

// Words of a tile of integers of bits bits, or of codes if bits is 0.
CPD_FN i64 words_of_tile(const Cast& cast, int bits) {
    return CPD_LANES * (bits ? bits : width(cast));
}

void add_integers_tiles(const Cast& given, const u32* a, int bits_a, const u32* b, int bits_b,
                        i64 tiles, u32* words, int bits) {
    const Cast cast = given;  // a copy, which no store can change
    for (i64 t = 0; t < tiles; ++t)
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            add_integers_column(cast, a + t * words_of_tile(cast, bits_a), bits_a,
                                b + t * words_of_tile(cast, bits_b), bits_b,
                                words + t * CPD_LANES * bits, bits, lane);
}

template <int WAY, bool COUNT>
void integers_hop_loop(const Cast& given, Key key, u64 offset, const u32* words_in, int bits_in,
                       const u8* shifts, const float* x, i64 n, u32* words, int bits, u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const float* tile = pad.read(x + t * CPD_TILE, n - t * CPD_TILE);
        Counts c = {};
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            add_encode_integers_column<WAY, COUNT>(
                cast, shifts[t] - CPD_SHIFT_BIAS, words_in + t * words_of_tile(cast, bits_in),
                bits_in, tile, CPD_TILE, words + t * CPD_LANES * bits, bits, lane, key,
                offset + t * CPD_TILE, c);
        if (COUNT) write_counts(c, counts + 3 * t);
    }
}

void add_encode_integers_tiles(const Cast& cast, Key key, u64 offset, const u32* words_in,
                               int bits_in, const u8* shifts, const float* x, i64 n, u32* words,
                               int bits, u32* counts) {
    CPD_PICK(integers_hop_loop, cast, counts)
    (cast, key, offset, words_in, bits_in, shifts, x, n, words, bits, counts);
}

i64 decode_integers_tiles(const Cast& given, const u32* words, int bits, const u8* shifts,
                          float* out, i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad;
    i64 nonfinite = 0;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        i64 left = n - t * CPD_TILE;
        float* target = pad.target(out + t * CPD_TILE, left);
        I count = {};
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            decode_integers_column(cast, shifts[t] - CPD_SHIFT_BIAS,
                                   words + t * words_of_tile(cast, bits), bits, lane, target,
                                   CPD_TILE, count);
        u32 found = sum_lanes(count);
        nonfinite += found && left < CPD_TILE ? nonfinite_in(target, left) : found;
        pad.write(out + t * CPD_TILE, left);
    }
    return nonfinite;
}

void pack_trits(const u32* words, i64 tiles, u8* trits) {
    for (i64 t = 0; t < tiles; ++t)
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            pack_trits_column(words + t * 2 * CPD_LANES, trits + t * CPD_TRIT_BYTES, lane);
}

void unpack_trits(const u8* trits, i64 tiles, u32* words) {
    for (i64 t = 0; t < tiles; ++t)
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            unpack_trits_column(trits + t * CPD_TRIT_BYTES, words + t * 2 * CPD_LANES, lane);
}

}  // namespace

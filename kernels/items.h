// One work item of every operation: a column of a tile, CPD_GROUP lanes wide and 32 rows long.
#ifndef CPD_ITEMS_H
#define CPD_ITEMS_H

#include "bitpack.h"
#include "float_format.h"
#include "random.h"

// Per lane, how many values saturated, became zero or were not finite.
struct Counts {
    I saturated, underflowed, nonfinite;
};

// NEAREST: rounding to nearest, else towards zero or stochastic. COUNT: whether counts are kept.
// INSIDE: all values are finite and none overflows.
template <bool NEAREST, bool COUNT, bool INSIDE>
CPD_FN U encode_value(const Cast& cast, const Encoder& e, F x, Key key, u64 index, Counts& counts) {
    U u = bits_of(x);
    U a = u & 0x7fffffffu;
    U code;
    if (NEAREST) {
        code = round_nearest(cast, e, a);
    } else {
        U random = cast.rounding == CPD_STOCHASTIC ? random31(key, index) : lanes(0);
        code = round_random(cast, e, a, random >> cast.man);
    }
    Events events;
    code = finish_code<INSIDE>(cast, u, code, events);
    if (COUNT) {
        counts.saturated -= events.saturated;
        counts.underflowed -= events.underflowed;
        counts.nonfinite -= events.nonfinite;
    }
    return code;
}

// x: the tile's values, the first n of them real; index: of the tile's first value.
// ahead: values that will be read soon.
template <bool NEAREST, bool COUNT, bool INSIDE>
CPD_FN void encode_column(const Cast& cast, int k, const float* x, i64 n, u32* words, int lane,
                          Key key, u64 index, Counts& counts, const float* ahead) {
    Encoder e = make_encoder(cast, k);
    Packer packer = make_packer(words, lane);
    int bits = width(cast);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) {
        U code =
            encode_value<NEAREST, COUNT, INSIDE>(cast, e, load(x, i, n), key, index + i, counts);
        put(packer, code, bits);
        expect(ahead + i);
    }
}

// The column's values; a marked tile is NaN throughout. nonfinite counts what is not finite.
struct Reader {
    Decoder decoder;
    Unpacker unpacker;
    int bits;
    bool marked;
};

CPD_FN Reader make_reader(const Cast& cast, u8 shift, const u32* words, int lane) {
    bool marked = shift == CPD_SHIFT_NONFINITE;
    int k = marked ? 0 : shift - CPD_SHIFT_BIAS;
    return Reader{make_decoder(cast, k), make_unpacker(words, lane), width(cast), marked};
}

CPD_FN F read(const Cast& cast, Reader& r) {
    F value = decode_code(cast, r.decoder, take(r.unpacker, r.bits));
    return r.marked ? from_bits(lanes(CPD_NAN)) : value;
}

// out = the decoded column; nonfinite counts its values that are not finite.
CPD_FN void decode_column(const Cast& cast, u8 shift, const u32* words, int lane, float* out, i64 n,
                          I& nonfinite) {
    Reader reader = make_reader(cast, shift, words, lane);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) {
        F value = read(cast, reader);
        I finite = less(bits_of(value) & 0x7fffffffu, lanes(CPD_INF));
        nonfinite -= ~finite & inside(i, n);
        store(out, i, n, value);
    }
}

// out = x + the decoded column, zero from value n on; returns max|out| as float32 bits.
// room: how many values out holds, n or a whole tile.
CPD_FN U sum_column(const Cast& cast, u8 shift, const u32* words, int lane, const float* x, i64 n,
                    float* out, i64 room) {
    Reader reader = make_reader(cast, shift, words, lane);
    U most = lanes(0);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) {
        F sum = add(load(x, i, n), read(cast, reader));
        sum = inside(i, n) ? sum : F{};
        most = larger(most, bits_of(sum) & 0x7fffffffu);
        store(out, i, room, sum);
    }
    return most;
}

// max|x| of the column as float32 bits.
CPD_FN U amax_column(const float* x, i64 n, int lane) {
    U most = lanes(0);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES)
        most = larger(most, bits_of(load(x, i, n)) & 0x7fffffffu);
    return most;
}

// Pack codes, or unpack them.
CPD_FN void pack_column(const u32* codes, i64 n, int bits, u32* words, int lane) {
    Packer packer = make_packer(words, lane);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) put(packer, load(codes, i, n), bits);
}

CPD_FN void unpack_column(const u32* words, int bits, u32* codes, i64 n, int lane) {
    Unpacker unpacker = make_unpacker(words, lane);
    u32 mask = bits == 32 ? ~0u : (1u << bits) - 1;
    for (int i = lane; i < CPD_TILE; i += CPD_LANES)
        store(codes, i, n, take(unpacker, bits) & mask);
}

#endif

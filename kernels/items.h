// One work item of every operation: a column of a tile, CPD_GROUP lanes wide and 32 rows long.
#ifndef CPD_ITEMS_H
#define CPD_ITEMS_H

#include "bitpack.h"
#include "float_format.h"
#include "random.h"
#include "table_format.h"

// Per lane, the number of values that saturated, became zero or were not finite.
struct Counts {
    I saturated, underflowed, nonfinite;
};

// The constants of a way to find codes, with one shift.
template <int WAY, class V>
CPD_FN auto make_encoder_of(const Cast& cast, V k) {
    if constexpr (WAY == CPD_BY_TABLE)
        return make_table_encoder(cast, k);
    else
        return make_encoder(cast, k);
}

// WAY: of enum Way. COUNT: whether counts are kept. KNOWN: properties of the values, not used by
// direction or table. step: from a lane's place in the random stream to that of the next lane.
template <int WAY, bool COUNT, int KNOWN, class E>
CPD_FN U encode_value(const Cast& cast, const E& e, F x, Key key, u64 index, Counts& counts,
                      u32 step = 1) {
    U u = bits_of(x);
    U a = u & CPD_MAGNITUDE;
    U code, overflow = lanes(cast.overflow_code);
    Events events;
    if constexpr (WAY == CPD_BY_TABLE) {
        code = table_code(cast, e, x, key, index, step, events);
    } else {
        if constexpr (WAY == CPD_BY_NEAREST) {
            code = round_nearest(cast, e, a);
        } else if constexpr (WAY == CPD_BY_ADDING) {
            U random = cast.rounding == CPD_STOCHASTIC
                           ? random31(key, index, step) & cast.random_mask
                           : lanes(0);
            code = round_random(cast, e, a, random >> cast.man);
        } else {
            code = round_directed(cast, e, u);
            overflow = less(u, lanes(0)) ? lanes(cast.overflow_below) : overflow;
        }
        code = finish_code<KNOWN>(cast, u, code, overflow, events);
    }
    if (COUNT) {
        counts.saturated -= events.saturated;
        counts.underflowed -= events.underflowed;
        counts.nonfinite -= events.nonfinite;
    }
    return code;
}

// x: the tile's values, the first n of them real; index: of the tile's first value.
// ahead: values to be prefetched.
template <int WAY, bool COUNT, bool INSIDE, class E>
CPD_FN void encode_rows(const Cast& cast, const E& e, Packer& packer, Rows rows, const float* x,
                        i64 n, Key key, u64 index, Counts& counts, const float* ahead) {
    auto code = [&](int i) {
        expect(ahead + i);
        return encode_value<WAY, COUNT, INSIDE>(cast, e, load(x, i, n), key, index + i, counts);
    };
    if constexpr (WAY == CPD_BY_NEAREST && !COUNT)
        put_each(packer, width(cast), rows, code);
    else  // other ways do more work, so that a constant width saves little
        put_each_of(packer, width(cast), rows, code);
}

// A whole column with the shift k.
template <int WAY, bool COUNT, bool INSIDE>
CPD_FN void encode_column(const Cast& cast, int k, const float* x, i64 n, u32* words, int lane,
                          Key key, u64 index, Counts& counts, const float* ahead) {
    Packer packer = make_packer(words, lane);
    encode_rows<WAY, COUNT, INSIDE>(cast, make_encoder_of<WAY>(cast, (u32)k), packer,
                                    all_rows(lane), x, n, key, index, counts, ahead);
}

// A column of blocks, each with its own shift: shifts are [block][lane].
template <int WAY, bool COUNT, bool INSIDE>
CPD_FN void encode_blocks(const Cast& cast, int blocks, const u8* shifts, const float* x, i64 n,
                          u32* words, int lane, Key key, u64 index, Counts& counts,
                          const float* ahead) {
    Packer packer = make_packer(words, lane);
    for (int b = 0; b < blocks; ++b) {
        U stored = load_bytes(shifts + b * CPD_LANES + lane);
        U k = equal(stored, lanes(CPD_SHIFT_NONFINITE)) ? lanes(0) : stored - CPD_SHIFT_BIAS;
        encode_rows<WAY, COUNT, INSIDE>(cast, make_encoder_of<WAY>(cast, k), packer,
                                        rows_of(lane, blocks, b), x, n, key, index, counts, ahead);
    }
}

// Parameters to decode rows with one shift; marked ones are all NaN.
// M: bool, or I if each lane has its own shift.
template <class D, class M>
struct Scale {
    D decoder;
    M marked;
};

// TABLE: whether the format is given by a table.
template <bool TABLE, class V, class M>
CPD_FN auto make_scale(const Cast& cast, V k, M marked) {
    if constexpr (TABLE)
        return Scale<TableDecoderOf<V>, M>{make_table_decoder(cast, k), marked};
    else
        return Scale<DecoderOf<V>, M>{make_decoder(cast, k), marked};
}

template <bool TABLE>
CPD_FN auto scale_of(const Cast& cast, u8 shift) {
    bool marked = shift == CPD_SHIFT_NONFINITE;
    return make_scale<TABLE>(cast, marked ? 0u : shift - (u32)CPD_SHIFT_BIAS, marked);
}

// The scale of block b of a column, by its lanes' shifts.
template <bool TABLE>
CPD_FN auto scale_of_block(const Cast& cast, const u8* shifts, int lane, int b) {
    U stored = load_bytes(shifts + b * CPD_LANES + lane);
    I marked = equal(stored, lanes(CPD_SHIFT_NONFINITE));
    U k = marked ? lanes(0) : stored - CPD_SHIFT_BIAS;
    return make_scale<TABLE>(cast, k, marked);
}

template <class D, class M>
CPD_FN F number_of(const Cast& cast, const Scale<D, M>& scale, U code) {
    F value = decode_code(cast, scale.decoder, code);
    return scale.marked ? from_bits(lanes(CPD_NAN)) : value;
}
template <class D, class M>
CPD_FN F read(const Cast& cast, const Scale<D, M>& scale, Unpacker& unpacker) {
    return number_of(cast, scale, take(unpacker, width(cast)));
}

// out = the decoded rows; returns max|out| as float32 bits.
template <class D, class M>
CPD_FN U decode_rows(const Cast& cast, const Scale<D, M>& scale, Unpacker& unpacker, Rows rows,
                     float* out, i64 n) {
    U most = lanes(0);
    take_each(unpacker, width(cast), rows, [&](int i, U code) {
        F value = number_of(cast, scale, code);
        most = larger(most, bits_of(value) & CPD_MAGNITUDE);
        store(out, i, n, value);
    });
    return most;
}

template <bool TABLE>
CPD_FN U decode_column(const Cast& cast, u8 shift, const u32* words, int lane, float* out, i64 n) {
    Unpacker unpacker = make_unpacker(words, lane);
    return decode_rows(cast, scale_of<TABLE>(cast, shift), unpacker, all_rows(lane), out, n);
}

template <bool TABLE>
CPD_FN U decode_blocks(const Cast& cast, int blocks, const u8* shifts, const u32* words, int lane,
                       float* out, i64 n) {
    Unpacker unpacker = make_unpacker(words, lane);
    U most = lanes(0);
    for (int b = 0; b < blocks; ++b)
        most = larger(most, decode_rows(cast, scale_of_block<TABLE>(cast, shifts, lane, b),
                                        unpacker, rows_of(lane, blocks, b), out, n));
    return most;
}

// out = x + the decoded rows, zero from value n on; returns max|out| as float32 bits.
// room: how many values out holds, n or a whole tile.
template <class D, class M>
CPD_FN U sum_rows(const Cast& cast, const Scale<D, M>& scale, Unpacker& unpacker, Rows rows,
                  const float* x, i64 n, float* out, i64 room) {
    U most = lanes(0);
    take_each(unpacker, width(cast), rows, [&](int i, U code) {
        F sum = add(load(x, i, n), number_of(cast, scale, code));
        sum = inside(i, n) ? sum : F{};
        most = larger(most, bits_of(sum) & CPD_MAGNITUDE);
        store(out, i, room, sum);
    });
    return most;
}

template <bool TABLE>
CPD_FN U sum_column(const Cast& cast, u8 shift, const u32* words, int lane, const float* x, i64 n,
                    float* out, i64 room) {
    Unpacker unpacker = make_unpacker(words, lane);
    return sum_rows(cast, scale_of<TABLE>(cast, shift), unpacker, all_rows(lane), x, n, out, room);
}

// most: of each block.
template <bool TABLE>
CPD_FN void sum_blocks(const Cast& cast, int blocks, const u8* shifts, const u32* words, int lane,
                       const float* x, i64 n, float* out, i64 room, U* most) {
    Unpacker unpacker = make_unpacker(words, lane);
    for (int b = 0; b < blocks; ++b)
        most[b] = sum_rows(cast, scale_of_block<TABLE>(cast, shifts, lane, b), unpacker,
                           rows_of(lane, blocks, b), x, n, out, room);
}

// max|x| of the rows as float32 bits.
CPD_FN U amax_rows(const float* x, i64 n, Rows rows) {
    U most = lanes(0);
    for (int i = rows.first; i < rows.stop; i += CPD_LANES)
        most = larger(most, bits_of(load(x, i, n)) & CPD_MAGNITUDE);
    return most;
}

CPD_FN void amax_blocks(int blocks, const float* x, i64 n, int lane, U* most) {
    for (int b = 0; b < blocks; ++b) most[b] = amax_rows(x, n, rows_of(lane, blocks, b));
}

CPD_FN U amax_column(const float* x, i64 n, int lane) { return amax_rows(x, n, all_rows(lane)); }

// A stored shift to OCP's E8M0 and back: 2^(e - 127) is 2^-k, and 255 marks NaN in both.
CPD_FN u8 flipped_shift(u8 shift) {
    return shift == CPD_SHIFT_NONFINITE ? shift : (u8)(2 * CPD_SHIFT_BIAS - shift);
}

// Stores the shifts that fit the largest magnitudes of a column's blocks; returns the largest.
CPD_FN U fit_blocks(const Cast& cast, int blocks, const U* most, u8* shifts, int lane) {
    U all = lanes(0);
    for (int b = 0; b < blocks; ++b) {
        store_bytes(shifts + b * CPD_LANES + lane, fitting_shifts(cast, most[b]));
        all = larger(all, most[b]);
    }
    return all;
}

// Pack codes, or unpack them.
CPD_FN void pack_column(const u32* codes, i64 n, int bits, u32* words, int lane) {
    Packer packer = make_packer(words, lane);
    put_each(packer, bits, all_rows(lane), [&](int i) { return load(codes, i, n); });
}

CPD_FN void unpack_column(const u32* words, int bits, u32* codes, i64 n, int lane) {
    Unpacker unpacker = make_unpacker(words, lane);
    u32 mask = bits == 32 ? ~0u : (1u << bits) - 1;
    take_each(unpacker, bits, all_rows(lane),
              [&](int i, U code) { store(codes, i, n, code & mask); });
}

#endif

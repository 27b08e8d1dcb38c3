// Exact sums: the numbers of a format as integers, multiples of its smallest number, in two's
// complement with as many bits as a sum can need. Columns as in items.h.
#ifndef CPD_INTEGERS_H
#define CPD_INTEGERS_H

#include "items.h"

// The integers of a column: of bits bits, or if bits is 0 those of the format's codes.
struct IntegerReader {
    Decoder decoder;  // returns multiples of the smallest number, below 2^31 and so exact
    Unpacker unpacker;
    int bits;
};

CPD_FN IntegerReader make_integer_reader(const Cast& cast, const u32* words, int bits, int lane) {
    int smallest = scaled_emin(cast, 0) - cast.man;  // its exponent
    return IntegerReader{make_decoder(cast, (u32)smallest), make_unpacker(words, lane), bits};
}

CPD_FN U integer_of(const Cast& cast, const Decoder& d, U code) {
    return truncate(decode_code(cast, d, code));
}

CPD_FN U read_integer(const Cast& cast, IntegerReader& r) {
    if (r.bits == 0) return integer_of(cast, r.decoder, take(r.unpacker, width(cast)));
    int above = 32 - r.bits;
    return (U)((I)(take(r.unpacker, r.bits) << above) >> above);  // extends the sign
}

CPD_FN u32 mask_of(int bits) { return bits == 32 ? ~0u : (1u << bits) - 1; }

// The sum of two columns, of bits bits.
CPD_FN void add_integers_column(const Cast& cast, const u32* a, int bits_a, const u32* b,
                                int bits_b, u32* words, int bits, int lane) {
    IntegerReader one = make_integer_reader(cast, a, bits_a, lane);
    IntegerReader other = make_integer_reader(cast, b, bits_b, lane);
    Packer packer = make_packer(words, lane);
    u32 mask = mask_of(bits);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) {
        U sum = read_integer(cast, one) + read_integer(cast, other);
        put(packer, sum & mask, bits);
    }
}

// The sum of a column and of x rounded to the format; x, n, index as for encode_column.
template <int WAY, bool COUNT>
CPD_FN void add_encode_integers_column(const Cast& cast, int k, const u32* words_in, int bits_in,
                                       const float* x, i64 n, u32* words, int bits, int lane,
                                       Key key, u64 index, Counts& counts) {
    const int far = far_of(cast, k);
    const F factor = normal_power(lanes((u32)far));
    const auto e = make_encoder_of<WAY>(cast, (u32)(k - far));
    IntegerReader reader = make_integer_reader(cast, words_in, bits_in, lane);
    Packer packer = make_packer(words, lane);
    u32 mask = mask_of(bits);
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) {
        F value = load(x, i, n);
        if (far) value = moved(value, factor);
        U code = encode_value<WAY, COUNT, false>(cast, e, value, key, index + i, counts);
        U sum = read_integer(cast, reader) + integer_of(cast, reader.decoder, code);
        put(packer, sum & mask, bits);
    }
}

// float32 bits of 2^exponent, -149..127.
CPD_FN u32 power_of_two(int exponent) {
    return exponent < -126 ? 1u << (exponent + 149) : (u32)(exponent + 127) << 23;
}

// out = the integers times the smallest number, scaled by 2^-k. Only the conversion to float32
// rounds: the product is exact, as no smallest number is below float32's, 2^-149.
CPD_FN void decode_integers_column(const Cast& cast, int k, const u32* words, int bits, int lane,
                                   float* out, i64 n, I& nonfinite) {
    IntegerReader reader = make_integer_reader(cast, words, bits, lane);
    F step = from_bits(lanes(power_of_two(scaled_emin(cast, k) - cast.man)));
    for (int i = lane; i < CPD_TILE; i += CPD_LANES) {
        F value = multiply(to_float(read_integer(cast, reader)), step);
        I finite = less(bits_of(value) & CPD_MAGNITUDE, lanes(CPD_INF));
        nonfinite -= ~finite & inside(i, n);
        store(out, i, n, value);
    }
}

#endif

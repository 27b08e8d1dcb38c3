// float32 to codes of a small format and back, for values scaled by 2^k, without multiplying:
// the shift k changes the constants. All code is exact for shifts in
// FloatFormat.near_min..near_max; farther shifts belong to values near the limits of float32. These
// values are scaled first.
#ifndef CPD_FLOAT_FORMAT_H
#define CPD_FLOAT_FORMAT_H

#include "cpd.h"

CPD_FN int width(const Cast& cast) { return 1 + cast.exp + cast.man; }

CPD_FN Way way_of(const Cast& cast) {
    if (cast.table) return CPD_BY_TABLE;
    return cast.rounding == CPD_NEAREST ? CPD_BY_NEAREST
           : cast.rounding >= CPD_UP    ? CPD_BY_DIRECTION
                                        : CPD_BY_ADDING;
}

// Exponent of the smallest normal number of the format, before the scaling by 2^k.
CPD_FN int scaled_emin(const Cast& cast, int k) { return 2 - ((1 << cast.exp) >> 1) - k; }

// Constants that depend on the shift are V: u32, one for all lanes, or U, one for each.
template <class V>
CPD_FN V scaled_emin_of(const Cast& cast, V k) {
    return (u32)scaled_emin(cast, 0) - k;
}

// The largest k with amax * 2^k <= max, as stored; amax as float32 bits.
CPD_FN u8 fitting_shift(const Cast& cast, u32 amax) {
    if (amax >= CPD_INF) return CPD_SHIFT_NONFINITE;
    if (amax == 0) return CPD_SHIFT_BIAS;
    int exponent = (int)(amax >> 23) - 127;
    int k = cast.emax - exponent - ((amax & 0x7fffff) > cast.max_significand ? 1 : 0);
    k = k < cast.shift_min ? cast.shift_min : k > cast.shift_max ? cast.shift_max : k;
    return (u8)(k + CPD_SHIFT_BIAS);
}

// Whether no number up to amax, scaled by the shift that fits it, is above the largest of the
// format. False only if the smallest allowed shift is too large, or amax is not finite.
CPD_FN bool stays_inside(const Cast& cast, u32 amax, u8 shift) {
    int exponent = (int)(amax >> 23) - 127;
    int k = cast.emax - exponent - ((amax & 0x7fffff) > cast.max_significand ? 1 : 0);
    return amax < CPD_INF && (amax == 0 || shift - CPD_SHIFT_BIAS <= k);
}

// The largest k of each lane with amax * 2^k <= max, as stored.
CPD_FN U fitting_shifts(const Cast& cast, U amax) {
    U above = (U)less(lanes(cast.max_significand), amax & 0x7fffffu);  // -1 if it is
    U k = lanes((u32)(cast.emax + 127)) - (amax >> 23) + above;
    k = larger(smaller(k, lanes((u32)cast.shift_max)), lanes((u32)cast.shift_min));
    k = less(lanes(0), amax) ? k : lanes(0);
    return less(amax, lanes(CPD_INF)) ? k + CPD_SHIFT_BIAS : lanes(CPD_SHIFT_NONFINITE);
}

// The largest amax that stays inside with the shift that fits it: for more, the least is too large.
CPD_FN u32 largest_inside(const Cast& cast) {
    return ((u32)(cast.emax - cast.shift_min + 127) << 23) | cast.max_significand;
}

#define CPD_FAR 64  // values with far shifts are scaled by 2^CPD_FAR or its inverse

// The exponent by which values with the shift k are scaled towards 1 before they are encoded, so
// that the rest of the shift is near; 0 if k is near.
CPD_FN int far_of(const Cast& cast, int k) {
    return k > cast.near_max ? CPD_FAR : k < cast.near_min ? -CPD_FAR : 0;
}

// 2^exponent of the lanes, a normal number.
CPD_FN F normal_power(U exponent) { return from_bits((exponent + 127u) << 23); }

// x times 2^CPD_FAR, its inverse or 1, rounded so that its code is that of the exact product: a
// result beyond float32 stays too large, and one that would vanish is not zero. NaN and infinity
// stay.
CPD_FN F moved(F x, F factor) {
    U u = bits_of(x), a = u & CPD_MAGNITUDE;
    U there = smaller(bits_of(multiply(from_bits(a), factor)), lanes(CPD_INF - 1));
    there = larger(there, smaller(a, lanes(1)));
    return from_bits((less(a, lanes(CPD_INF)) ? there : a) | (u & 0x80000000u));
}

// The inverse, for decoded values: rounded once, if it is subnormal.
CPD_FN F moved_back(F x, F factor) {
    U u = bits_of(x);
    I finite = less(u & CPD_MAGNITUDE, lanes(CPD_INF));
    return from_bits(finite ? bits_of(multiply(x, factor)) : u);
}

// The constants of encoding with one shift.
template <class V>
struct EncoderOf {
    int drop;       // mantissa bits that are cut off a normal number
    u32 half;       // added before cutting: half a unit less one bit, and ...
    u32 odd;        // ... the lowest bit kept, so that ties go to even
    V rebias;       // subtracted after cutting
    V normal_from;  // float32 bits of the smallest value that becomes a normal number
    F spacing;      // adding it rounds a smaller value to a multiple of the smallest number
    V emin_field;   // exponent field of float32 at the format's smallest normal number
    V to_fixed;     // added to float32 bits: times 2^(31 - emin)
    V least_fixed;  // float32 bits that become 1/2 by to_fixed
    bool is_tiny;   // whether to_fixed and least_fixed cannot be used, in a lane at least
};

typedef EncoderOf<u32> Encoder;

#define CPD_FIXED_FROM 33  // to_fixed and least_fixed are valid for this emin_field and larger ones

template <class V>
CPD_FN EncoderOf<V> make_encoder(const Cast& cast, V k) {
    V emin = scaled_emin_of(cast, k);
    EncoderOf<V> e;
    e.drop = 23 - cast.man;
    // With no mantissa bit every significand is odd (1), so ties go up; with all 23 none is cut.
    e.half = cast.man == 23 ? 0 : (1u << (e.drop - 1)) - (cast.man > 0);
    e.odd = cast.man > 0 && cast.man < 23;
    e.rebias = (emin + 126u) << cast.man;
    // At float32's smallest exponent cutting bits is correct for subnormal numbers too, but with
    // no mantissa bit the tie below the smallest number must go down, to zero.
    e.normal_from = (emin + 127u) << 23;
    if (cast.man > 0) e.normal_from = emin == (u32)-126 ? V{} : e.normal_from;
    e.spacing = from_bits(lanes((emin + (u32)(23 + 127 - cast.man)) << 23));
    e.emin_field = emin + 127u;
    e.to_fixed = (31u - emin) << 23;
    e.least_fixed = (emin + 95u) << 23;
    e.is_tiny = any(e.emin_field < (u32)CPD_FIXED_FROM);
    return e;
}

// Magnitude bits a to the code of the nearest number, not yet limited to max_code.
template <class V>
CPD_FN U round_nearest(const Cast& cast, const EncoderOf<V>& e, U a) {
    U normal = ((a + e.half + ((a >> e.drop) & e.odd)) >> e.drop) - e.rebias;
    U small = bits_of(add(from_bits(a), e.spacing)) - bits_of(e.spacing);
    return less(a, lanes(e.normal_from)) ? small : normal;
}

// Bits u to a code, rounded up, down or to odd: the bits that are cut off may be anywhere.
template <class V>
CPD_FN U round_directed(const Cast& cast, const EncoderOf<V>& e, U u) {
    U a = u & CPD_MAGNITUDE, exponent = a >> 23, zero = lanes(0), emin = lanes(e.emin_field);
    U field = larger(exponent, lanes(1));
    U significand = (a & 0x7fffffu) | (less(zero, exponent) ? lanes(0x800000u) : zero);
    U cut = smaller(larger(emin - field, zero) + (u32)e.drop, lanes(31));
    U kept = significand >> cut;
    U code = kept + ((larger(field, emin) - emin) << cast.man);
    I negative = less(u, zero);
    I away = cast.rounding == CPD_ODD  ? equal(code & 1u, zero)
             : cast.rounding == CPD_UP ? ~negative
                                       : negative;
    return code - (U)(away & ~equal(kept << cut, significand));
}

// round_random if the fixed point below exceeds float32: shifts each lane by its own count.
template <class V>
CPD_FN U round_random_tiny(const Cast& cast, const EncoderOf<V>& e, U a, U random) {
    U exponent = a >> 23;
    U zero = lanes(0), emin = lanes(e.emin_field), bits = lanes(31u - (u32)cast.man);
    U field = larger(exponent, lanes(1));
    U significand = (a & 0x7fffffu) | (less(zero, exponent) ? lanes(0x800000u) : zero);
    U cut = larger(emin - field, zero) + (u32)e.drop;
    U last = smaller(cut, bits);  // bits beyond are cut first
    U kept = significand >> smaller(cut - last, lanes(31));
    U rounded = (kept + (random >> (bits - last))) >> last;
    return rounded + ((larger(field, emin) - emin) << cast.man);
}

// Magnitude bits a to a code, rounded up if the part cut off plus random reaches one unit; random
// has 31 - man bits, and the part cut off has as many significant ones.
template <class V>
CPD_FN U round_random(const Cast& cast, const EncoderOf<V>& e, U a, U random) {
    if (e.is_tiny) return round_random_tiny(cast, e, a, random);
    int bits = 31 - cast.man;
    U normal = ((a + (random >> (bits - e.drop))) >> e.drop) - e.rebias;
    // A small number times 2^(31 - emin) is an integer of 31 bits, man of them before the point.
    U fixed = truncate(from_bits(larger(a, lanes(e.least_fixed)) + e.to_fixed));
    U small = (fixed + random) >> bits;
    return less(a, lanes(e.normal_from)) ? small : normal;
}

// Masks of lanes that saturated, became zero, or were not finite: -1 if so.
struct Events {
    I saturated, underflowed, nonfinite;
};

// Known properties of all values: finite and none overflows, or finite and those that overflow
// become the largest number.
enum Known { CPD_ANYTHING = 0, CPD_INSIDE = 1, CPD_SATURATES = 2 };

// The code with its sign, special values and overflow settled.
// overflow: the code of x if it overflows.
template <int KNOWN>
CPD_FN U finish_code(const Cast& cast, U x_bits, U code, U overflow, Events& events) {
    U a = x_bits & CPD_MAGNITUDE;
    U sign = (x_bits & 0x80000000u) >> (32 - width(cast));
    I over = less(lanes(cast.max_code), code);
    events.saturated = KNOWN == CPD_SATURATES ? over : I{};
    events.nonfinite = I{};
    events.underflowed = equal(code, lanes(0)) & less(lanes(0), a);
    if (KNOWN == CPD_SATURATES) code = smaller(code, lanes(cast.max_code));
    if (KNOWN != CPD_ANYTHING || !perhaps(over)) return code | sign;
    I finite = less(a, lanes(CPD_INF));
    U special = (finite ? overflow : lanes(cast.inf_code)) | sign;
    special = less(lanes(CPD_INF), a) ? lanes(cast.nan_code) : special;  // NaN has no sign
    events.saturated = over & finite;
    events.nonfinite = ~finite;
    return over ? special : code | sign;
}

// The constants of decoding with one shift.
template <class V>
struct DecoderOf {
    int drop, to_sign;
    u32 magnitude;  // mask of a code without its sign
    V rebias;       // added to the bits of a normal number
    V normal_from;  // the smallest code of a normal number
    F smallest_normal;
};
typedef DecoderOf<u32> Decoder;

template <class V>
CPD_FN DecoderOf<V> make_decoder(const Cast& cast, V k) {
    V emin = scaled_emin_of(cast, k);
    DecoderOf<V> d;
    d.drop = 23 - cast.man;
    d.to_sign = 32 - width(cast);
    d.magnitude = (1u << (width(cast) - 1)) - 1;
    d.rebias = (emin + 126u) << 23;
    d.normal_from = emin == (u32)-126 ? V{} : V{} + (1u << cast.man);
    d.smallest_normal = from_bits(lanes((emin + 127u) << 23));
    return d;
}

// The number of a code.
template <class V>
CPD_FN F decode_code(const Cast& cast, const DecoderOf<V>& d, U code) {
    U m = code & d.magnitude;
    U bits = (m << d.drop) + d.rebias;
    // Read as a number with a leading 1; subtracting that 1 gives the subnormal number.
    F small = subtract(from_bits(bits + 0x800000u), d.smallest_normal);
    bits = less(m, lanes(d.normal_from)) ? bits_of(small) : bits;
    U special = less(m, lanes(cast.first_nan)) ? lanes(CPD_INF) : lanes(CPD_NAN);
    bits = less(lanes(cast.max_code), m) ? special : bits;
    return from_bits(bits | ((code << d.to_sign) & 0x80000000u));
}

#endif

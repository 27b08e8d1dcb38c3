// Codes of formats given by a table of numbers, by a search among the limits between them.
// ops/tables.py makes the table and specifies the codes.
#ifndef CPD_TABLE_FORMAT_H
#define CPD_TABLE_FORMAT_H

#include "float_format.h"
#include "random.h"

#define CPD_SEARCH_HEADER 15
#define CPD_SEARCH_SHIFT 17       // of an entry: above the limits before its bucket
#define CPD_MOST_KEY 0x7f7fffffu  // of the largest float32

// Keys are float32 bits without sign, negative for negative numbers.
struct Search {
    int steps;           // of the search in a bucket
    int low_bits;        // of a key below its bucket's
    u32 first, buckets;  // the number of the first bucket, and how many a sign has
    const int* entries;  // of each bucket: the limits before it, and a shift; see place_of
    const int* limits;   // sorted; a number's place is the count of limits that its key has reached
    const int* codes;    // by place
    const int* values;   // float32 bits by code
    const int* numbers;  // float32 bits by place, and infinity
    u32 least, most;     // keys of the first and of the last number
    u32 zero, inf_below;  // codes of zero, ~0 if there is none, and of -infinity
    u32 code, mask;       // the first number's code if those of the others follow, else ~0
    int shifted;          // whether entries have shifts
};

CPD_FN Search make_search(const int* t) {
    return Search{t[0],      t[1],       (u32)t[2],  (u32)t[3],  t + CPD_SEARCH_HEADER,
                  t + t[4],  t + t[5],   t + t[6],   t + t[7],   (u32)t[8],
                  (u32)t[9], (u32)t[10], (u32)t[11], (u32)t[12], (u32)t[13],
                  t[14]};
}

// V: u32, one shift for all lanes, or U, one for each.
template <class V>
struct TableEncoderOf {
    Search search;
    V k;
};

template <class V>
struct TableDecoderOf {
    const int* values;
    u32 mask;
    F scale;  // 2^-k
};

// 2^k, k from -127 on, for which it is subnormal.
CPD_FN F power_of(U k) {
    U field = k + 127u;
    return from_bits(less(lanes(0), field) ? field << 23 : lanes(0x400000u));
}

template <class V>
CPD_FN TableEncoderOf<V> make_table_encoder(const Cast& cast, V k) {
    return TableEncoderOf<V>{make_search(cast.table), k};
}

template <class V>
CPD_FN TableDecoderOf<V> make_table_decoder(const Cast& cast, V k) {
    u32 mask = (1u << width(cast)) - 1;
    return TableDecoderOf<V>{make_search(cast.table).values, mask, power_of(lanes(0u - k))};
}

template <class V>
CPD_FN F decode_code(const Cast&, const TableDecoderOf<V>& d, U code) {
    return multiply(from_bits(gather(d.values, code & d.mask)), d.scale);
}

// The bits of a magnitude times 2^k, as if float32 had no least exponent, limited to 1 .. those of
// the largest number; 0 for 0.
CPD_FN U scaled_magnitude(U a, U k) {
    I zero = equal(a, lanes(0)), subnormal = less(a, lanes(0x800000u)) & ~zero;
    if (any(subnormal)) a = subnormal ? bits_of(to_float(a)) - (149u << 23) : a;
    U field = (U)((I)a >> 23) + k;
    U scaled = less(field, lanes(1)) ? lanes(1) : a + (k << 23);
    scaled = less(lanes(254), field) ? lanes(CPD_MOST_KEY) : scaled;
    return zero ? lanes(0) : scaled;  // 2^-127 is 0 by now, too
}

// The number of limits that a key has reached: those before its bucket, then the number that its
// lower bits give by the bucket's shift, then those that a search finds after them.
CPD_FN U place_of(const Search& s, U magnitude, U key) {
    U least = lanes(s.first << s.low_bits), most = lanes(((s.first + s.buckets) << s.low_bits) - 1);
    U inside = larger(smaller(magnitude, most), least);
    I negative = less(key, lanes(0));
    U bucket = (inside >> s.low_bits) - s.first;
    U place = gather(s.entries, negative ? bucket + s.buckets : bucket);
    if (s.shifted) {
        U behind = (negative ? ~inside : inside) & ((1u << s.low_bits) - 1);
        place = (place & ((1u << CPD_SEARCH_SHIFT) - 1)) + (behind >> (place >> CPD_SEARCH_SHIFT));
    }
    for (u32 step = (1u << s.steps) >> 1; step; step >>= 1)
        place = less(key, gather(s.limits, place + (step - 1))) ? place : place + step;
    return place;
}

// Whether x * 2^k is rounded up from the number at its place, with this random number.
CPD_FN I rises(const Search& s, F x, U k, U place, U random) {
    W below = wide(from_bits(gather(s.numbers, place)));
    W gap = subtract(wide(from_bits(gather(s.numbers, place + 1u))), below);
    W scaled = multiply(wide(x), wide(power_of(k)));
    W share = multiply(wide(lanes(0x80000000u) - random), wide(power_of(lanes(0u - 31u))));
    return reaches(subtract(scaled, below), multiply(gap, share));
}

template <class V>
CPD_FN U table_code(const Cast& cast, const TableEncoderOf<V>& e, F x, Key key, u64 index, u32 step,
                    Events& events) {
    const Search& s = e.search;
    U u = bits_of(x), a = u & CPD_MAGNITUDE, k = lanes(e.k);
    U magnitude = scaled_magnitude(a, k);
    I negative = less(u, lanes(0));
    U signed_key = negative ? lanes(0) - magnitude : magnitude;
    U place = place_of(s, magnitude, signed_key);
    if (cast.rounding == CPD_STOCHASTIC)
        place -= (U)rises(s, x, k, place, random31(key, index, step) & cast.random_mask);
    U code = s.code == ~0u ? gather(s.codes, place) : (place + s.code) & s.mask;
    I too_large = less(lanes(s.most), signed_key), too_small = less(signed_key, lanes(s.least));
    I finite = less(a, lanes(CPD_INF));
    code = too_large ? lanes(cast.overflow_code) : code;
    code = too_small ? lanes(cast.overflow_below) : code;
    U special = negative ? lanes(s.inf_below) : lanes(cast.inf_code);
    special = less(lanes(CPD_INF), a) ? lanes(cast.nan_code) : special;
    events.saturated = (too_large | too_small) & finite;
    events.underflowed = equal(code, lanes(s.zero)) & less(lanes(0), a) & finite;
    events.nonfinite = ~finite;
    return finite ? code : special;
}

#endif

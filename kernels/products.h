// Sums of products whose roundings are chosen: one lane an output, in float32 where that gives the
// bits of the specification, else in float64 (arithmetic of ops/products.py).
#ifndef CPD_PRODUCTS_H
#define CPD_PRODUCTS_H

#include "numbers.h"
#include "products_how.h"

enum { CPD_ANY = -1 };  // a way of rounding that is known when the loop runs

// A Rounding in the numbers that it is done in.
template <class N>
struct Rounder {
    typedef typename Number<N>::Bits Bits;
    N least, scale;      // the smallest normal number; times a power of two: what is added
    Bits kept, flipped;  // of x: which bits, and then which are turned over
    Bits parity;         // 1 where the last bit of a code is that of its exponent
    Bits cut;            // bits that stay when random ones have been added
    Bits max, over, under, inf, nan;
    typename Number<N>::Draws drop;  // bits of a draw that do not count
    int way;
};

template <class N>
CPD_FN N power_of_two(int exponent) {
    typedef Number<N> K;
    return number(fill<N>((typename K::Int)(exponent + K::bias) << K::mantissa));
}
// Bits of a number of float32 that is no subnormal of it.
template <class N>
CPD_FN typename Number<N>::Bits bits_from(u32 bits) {
    typedef Number<N> K;
    const int moved = K::mantissa - 23;
    typename K::Int field = (bits >> 23) + (K::bias - 127), fraction = bits & 0x7fffffu;
    if (bits >= CPD_INF) field = 2 * K::bias + 1;
    if (!bits) field = 0;
    return fill<N>((field << K::mantissa) | (fraction << moved));
}

// The bits of infinity, which are those of the exponent.
template <class N>
CPD_FN typename Number<N>::Bits infinity() {
    return bits_from<N>(CPD_INF);
}

template <class N>
CPD_FN Rounder<N> make_rounder(const Rounding& r) {
    typedef Number<N> K;
    typedef typename K::Int Int;
    Rounder<N> to;
    const int grain = r.man + r.random_bits;  // bits after the point of what is added
    to.least = number(bits_from<N>(r.least));
    to.scale = power_of_two<N>(K::mantissa - 1 - grain);
    to.scale = add(to.scale, add(to.scale, to.scale));  // so that no sum leaves its power of two
    to.kept = r.magnitude ? ~sign_bit<N>() : fill<N>(-1);
    to.flipped = r.flipped ? sign_bit<N>() : fill<N>(0);
    to.parity = fill<N>(r.man == 0);
    to.cut = fill<N>(-((Int)1 << r.random_bits));
    to.max = bits_from<N>(r.max), to.over = bits_from<N>(r.over), to.under = bits_from<N>(r.under);
    to.inf = bits_from<N>(r.inf), to.nan = bits_from<N>(r.nan);
    to.way = r.way;
    to.drop = typename K::Draws{} + (u32)(32 - r.random_bits);
    return to;
}

// The largest power of two up to |x|; 0 of a subnormal number, infinity of what is not finite.
template <class N>
CPD_FN N power_under(N x) {
    return number(raw(x) & infinity<N>());
}

// value, x rounded, with x's sign, and with what becomes of it where it is too large, or x is not
// finite.
template <class N>
CPD_FN N settled(const Rounder<N>& to, N x, N value) {
    typedef typename Number<N>::Bits Bits;
    Bits sign = raw(x) & sign_bit<N>(), a = raw(x) & ~sign_bit<N>(),
         v = raw(value) & ~sign_bit<N>();
    Bits infinite = more(a, infinity<N>() - 1), over = more(v, to.max) | infinite;
    Bits special = pick(more(fill<N>(0), sign), to.under, to.over);
    special = pick(infinite, to.inf, special) | sign;
    special = pick(more(a, infinity<N>()), to.nan, special);
    return number(pick(over, special, v | sign));
}

// x rounded, float32 to nearest alone. CHECK: else x is finite and below the power of two of the
// largest number. top: becomes the largest power of two under any x. draw: 32 random bits. A number
// is added whose last bit is worth what the last bit of the result is: it rounds to nearest, or
// shows on which side x is.
template <int WAY, bool CHECK, class N>
CPD_FN N rounded(const Rounder<N>& to, N x, N& top, typename Number<N>::Draws draw) {
    typedef typename Number<N>::Bits Bits;
    if constexpr (WAY == CPD_ANY) {
        if (to.way == CPD_ROUND_NEAREST) return rounded<CPD_ROUND_NEAREST, CHECK>(to, x, top, draw);
        if constexpr ((int)Number<N>::mantissa == 52) {
            if (to.way == CPD_ROUND_FLOOR) return rounded<CPD_ROUND_FLOOR, CHECK>(to, x, top, draw);
            if (to.way == CPD_ROUND_RANDOM)
                return rounded<CPD_ROUND_RANDOM, CHECK>(to, x, top, draw);
            if (to.way == CPD_ROUND_ODD) return rounded<CPD_ROUND_ODD, CHECK>(to, x, top, draw);
        }
    }
    if (WAY == CPD_AS_IS || WAY == CPD_ANY) return x;
    N power = power_under(x);
    if (!CHECK) top = larger(top, power);
    N unit = larger(power, to.least);
    N y = WAY == CPD_ROUND_NEAREST ? x : number((raw(x) & to.kept) ^ to.flipped);
    N fixed = add_exact(y, unit, to.scale);
    N value = subtract_exact(fixed, unit, to.scale);
    if constexpr (WAY != CPD_ROUND_NEAREST && WAY != CPD_AS_IS && WAY != CPD_ANY) {
        Bits whole = raw(fixed) + above(value, y);  // not above y
        if (WAY == CPD_ROUND_RANDOM) whole = (whole + widened(draw >> to.drop, N{})) & to.cut;
        if (WAY == CPD_ROUND_ODD) {
            Bits exponent = (raw(unit) ^ raw(to.least)) >> (int)Number<N>::mantissa;
            Bits inexact = above(value, y) | above(y, value);
            whole += inexact & ~(whole ^ (exponent & to.parity)) & 1;
        }
        value = subtract_exact(number(whole), unit, to.scale);
    }
    if (CHECK) return settled(to, x, value);
    return with_sign(value, x);
}

// Everything that the sums of one matrix are made with.
template <class N>
struct Steps {
    Rounder<N> product, sum, between;
};

template <class N>
CPD_FN Steps<N> make_steps(const Products& how) {
    return {make_rounder<N>(how.product), make_rounder<N>(how.sum), make_rounder<N>(how.between)};
}

// A sum so far, and with kahan what it has too much.
template <class N>
struct Sum {
    N total, rest;
};

// What was largest before rounding: of products and of sums.
template <class N>
struct Tops {
    N product, sum;
};

CPD_FN S sum_of(S a, S b, bool) { return add(a, b); }
CPD_FN D sum_of(D a, D b, bool odd) { return odd ? odd_sum(a, b) : add(a, b); }
template <class N>
CPD_FN N negated(N x) {
    return number(raw(x) ^ sign_bit<N>());
}

// draws: one for each of the roundings, CPD_SUM to CPD_REST.
template <int WAY, bool ODD, bool KAHAN, bool CHECK, class N>
CPD_FN void add_term(const Rounder<N>& to, Sum<N>& sum, N term, N& top,
                     const typename Number<N>::Draws* draws) {
    if (!KAHAN) {
        sum.total = rounded<WAY, CHECK>(to, sum_of(sum.total, term, ODD), top, draws[CPD_SUM]);
        return;
    }
    N own = sum_of(term, negated(sum.rest), ODD);
    own = rounded<WAY, CHECK>(to, own, top, draws[CPD_TERM]);
    N total = rounded<WAY, CHECK>(to, sum_of(sum.total, own, ODD), top, draws[CPD_SUM]);
    N gained = sum_of(total, negated(sum.total), ODD);
    gained = rounded<WAY, CHECK>(to, gained, top, draws[CPD_GAINED]);
    N rest = sum_of(gained, negated(own), ODD);
    sum.rest = rounded<WAY, CHECK>(to, rest, top, draws[CPD_REST]);
    sum.total = total;
}

#endif

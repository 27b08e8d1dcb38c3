// Sums of products with chosen roundings: one lane an output, in float32 if that gives the bits of
// the specification, else in float64 (arithmetic of ops/products.py).
#ifndef CPD_PRODUCTS_H
#define CPD_PRODUCTS_H

#include "numbers.h"
#include "products_how.h"

enum { CPD_ANY = -1 };  // a way of rounding that is chosen at run time

// A Rounding as constants of the type that it is computed in.
template <class N>
struct Rounder {
    typedef typename Number<N>::Bits Bits;
    N least, scale;      // the smallest normal number; factor of a power of two that is added
    Bits kept, flipped;  // masks of x: bits that are kept, and bits that are then inverted
    Bits parity;         // 1 if the last bit of a code is that of its exponent
    Bits cut;            // bits that are kept after random ones have been added to those below
    Bits max, over, under, inf, nan;
    Bits minus;      // the sign bit that a sum of exactly zero may have
    int drop, lift;  // bits of a draw that are not used; shift of the others
    int way;
};

template <class N>
CPD_FN N power_of_two(int exponent) {
    typedef Number<N> K;
    return number(fill<N>((typename K::Int)(exponent + K::bias) << K::mantissa));
}
// The bits of a number of float32 that is not subnormal.
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
    const int behind = K::mantissa - r.man;  // bits that are cut off; no more random ones count
    const int random_bits = r.random_bits < behind ? r.random_bits : behind;
    to.least = number(bits_from<N>(r.least));
    to.scale = power_of_two<N>(behind - 1);
    to.scale = add(to.scale, add(to.scale, to.scale));  // so that no sum leaves its power of two
    to.kept = r.magnitude ? ~sign_bit<N>() : fill<N>(-1);
    to.flipped = r.flipped ? sign_bit<N>() : fill<N>(0);
    to.parity = fill<N>(r.man == 0);
    to.cut = fill<N>(-((Int)1 << behind));
    to.max = bits_from<N>(r.max), to.over = bits_from<N>(r.over), to.under = bits_from<N>(r.under);
    to.inf = bits_from<N>(r.inf), to.nan = bits_from<N>(r.nan);
    to.minus = r.way == CPD_ROUND_FLOOR && !r.magnitude && !r.flipped ? sign_bit<N>() : fill<N>(0);
    to.way = r.way;
    to.drop = 32 - random_bits, to.lift = behind - random_bits;
    return to;
}

// The largest power of two up to |x|; 0 for a subnormal number, infinity if x is not finite.
template <class N>
CPD_FN N power_under(N x) {
    return number(raw(x) & infinity<N>());
}

// value, x rounded, with the sign of x, and the results for numbers that are too large or not
// finite.
template <class N>
CPD_FN N settled(const Rounder<N>& to, N x, N value) {
    typedef typename Number<N>::Bits Bits;
    Bits sign = raw(x) & sign_bit<N>(), a = raw(x) & ~sign_bit<N>(),
         v = raw(value) & ~sign_bit<N>();
    Bits infinite = more(a, infinity<N>() - 1), over = more(v, to.max) | infinite;
    if (is_none(over)) return with_sign(value, x);
    Bits special = pick(more(fill<N>(0), sign), to.under, to.over);
    special = pick(infinite, to.inf, special) | sign;
    special = pick(more(a, infinity<N>()), to.nan, special);
    return number(pick(over, special, v | sign));
}

// x rounded by a draw of 32 random bits, which are added to the bits of |x| that are cut off. To
// smaller values the smallest normal number is added first, so that these bits have one place.
template <bool CHECK, class N>
CPD_FN N rounded_at_random(const Rounder<N>& to, N x, N& top, typename Number<N>::Draws draw) {
    typedef typename Number<N>::Bits Bits;
    Bits a = raw(x) & ~sign_bit<N>();
    if (!CHECK) top = larger(top, power_under(x));  // infinity for NaN, and stays the largest
    N least = number(more(raw(to.least), a) & raw(to.least));
    Bits added = widened(draw >> to.drop, N{}) << to.lift;
    Bits whole = (raw(sum_below(number(a), least)) + added) & to.cut;
    N value = subtract(number(whole), least);
    return CHECK ? settled(to, x, value) : with_sign(value, x);
}

// x rounded. Without CHECK, x must be finite and below the power of two of the largest number. top:
// becomes the largest power of two under any x. A number is added whose last bit has the value of
// the result's last bit: the sum rounds to nearest, or down.
template <int WAY, bool CHECK, class N>
CPD_FN N rounded(const Rounder<N>& to, N x, N& top, typename Number<N>::Draws draw) {
    typedef typename Number<N>::Bits Bits;
    if constexpr (WAY == CPD_ROUND_RANDOM) return rounded_at_random<CHECK>(to, x, top, draw);
    if constexpr (WAY == CPD_ANY) {
        if (to.way == CPD_ROUND_NEAREST) return rounded<CPD_ROUND_NEAREST, CHECK>(to, x, top, draw);
        if constexpr (Number<N>::any_way) {
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
    N fixed =
        WAY == CPD_ROUND_NEAREST ? add_exact(y, unit, to.scale) : add_below(y, unit, to.scale);
    N value = subtract_exact(fixed, unit, to.scale);
    if constexpr (WAY == CPD_ROUND_ODD) {
        Bits exponent = (raw(unit) ^ raw(to.least)) >> (int)Number<N>::mantissa;
        Bits even = ~(raw(fixed) ^ (exponent & to.parity)) & 1;
        value = subtract_exact(number(raw(fixed) + (above(y, value) & even)), unit, to.scale);
    }
    if (CHECK) return settled(to, x, value);
    return with_sign(value, x);
}

// All parameters of the sums of one matrix.
template <class N>
struct Steps {
    Rounder<N> product, sum, between;
};

template <class N>
CPD_FN Steps<N> make_steps(const Products& how) {
    return {make_rounder<N>(how.product), make_rounder<N>(how.sum), make_rounder<N>(how.between)};
}

// A partial sum, and with kahan its excess.
template <class N>
struct Sum {
    N total, rest;
};

// The largest values before rounding: of products and of sums.
template <class N>
struct Tops {
    N product, sum;
};

// a + b. Rounded down, a sum that is exactly zero is -0 unless both are +0: IEEE 754-2019, 6.3.
template <int WAY, class N>
CPD_FN N sum_of(const Rounder<N>& to, N a, N b, bool odd) {
    typedef typename Number<N>::Bits Bits;
    N sum = odd && Number<N>::any_way ? odd_sum(a, b) : add(a, b);
    if (WAY != CPD_ROUND_FLOOR && !(WAY == CPD_ANY && Number<N>::any_way)) return sum;
    Bits some = more(raw(sum) & ~sign_bit<N>(), fill<N>(0));
    return number(raw(sum) | (~some & (raw(a) | raw(b)) & to.minus));
}
template <class N>
CPD_FN N negated(N x) {
    return number(raw(x) ^ sign_bit<N>());
}

// draws: one for each of the roundings, CPD_SUM to CPD_REST.
template <int WAY, bool ODD, bool KAHAN, bool CHECK, class N>
CPD_FN void add_term(const Rounder<N>& to, Sum<N>& sum, N term, N& top,
                     const typename Number<N>::Draws* draws) {
    if (!KAHAN) {
        sum.total =
            rounded<WAY, CHECK>(to, sum_of<WAY>(to, sum.total, term, ODD), top, draws[CPD_SUM]);
        return;
    }
    N own = sum_of<WAY>(to, term, negated(sum.rest), ODD);
    own = rounded<WAY, CHECK>(to, own, top, draws[CPD_TERM]);
    N total = rounded<WAY, CHECK>(to, sum_of<WAY>(to, sum.total, own, ODD), top, draws[CPD_SUM]);
    N gained = sum_of<WAY>(to, total, negated(sum.total), ODD);
    gained = rounded<WAY, CHECK>(to, gained, top, draws[CPD_GAINED]);
    N rest = sum_of<WAY>(to, gained, negated(own), ODD);
    sum.rest = rounded<WAY, CHECK>(to, rest, top, draws[CPD_REST]);
    sum.total = total;
}

#endif

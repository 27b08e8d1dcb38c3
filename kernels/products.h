// Sums of products whose roundings are chosen: one lane an output, in float32 where that gives the
// bits of the specification (Products.single of ops/products.py), else in float64.
#ifndef CPD_PRODUCTS_H
#define CPD_PRODUCTS_H

#include "cpd.h"
#include "products_how.h"
#include "random.h"

CPD_FN F plus_sign(U magnitude, U of) { return from_bits(magnitude | (of & 0x80000000u)); }

// What a magnitude above the largest number becomes: a, the exact one, may be infinite or NaN.
CPD_FN F settled(const Rounding& to, U u) {
    U a = u & 0x7fffffffu;
    U value = less(a, lanes(CPD_INF)) ? lanes(to.over) : lanes(to.inf);
    return less(lanes(CPD_INF), a) ? from_bits(lanes(to.nan)) : plus_sign(value, u);
}

// To the nearest number. A power of two is added whose last bit is worth what the last bit of the
// number is, so that the addition rounds; taking it off is exact.
CPD_FN F round_number(const Rounding& to, F x, const Products&, u64, u64) {
    if (to.identity) return x;
    U u = bits_of(x), a = u & 0x7fffffffu;
    // Of infinity and NaN this is some tiny number, beside which they stay what they are.
    F power = from_bits(larger(u & CPD_INF, lanes(to.least)) + ((u32)(23 - to.man) << 23));
    U rounded = bits_of(subtract(add(from_bits(a), power), power));
    I over = less(lanes(to.max), rounded);
    F value = plus_sign(rounded, u);
    if (!any(over)) return value;
    return over ? settled(to, u) : value;
}

CPD_FN F exact_sum(F a, F b) { return add(a, b); }
CPD_FN F exact_product(F a, F b) { return multiply(a, b); }
CPD_FN F negated(F x) { return from_bits(bits_of(x) ^ 0x80000000u); }

// The same in float64, for any rounding: sums are rounded to odd, so that rounding them again gives
// what rounding the exact sum would.
CPD_FN D exact_sum(D a, D b) {
    D total = add(a, b);
    D part = subtract(total, a);
    D rest = add(subtract(a, subtract(total, part)), subtract(b, part));
    L bits = bits_of(total);
    L inexact = above(rest, D{}) | above(D{}, rest);  // none where it is NaN, beside infinity
    L step = ((bits_of(rest) ^ bits) >> 63) | 1;      // -1 towards zero, 1 away from it
    return from_bits(bits + (inexact & ((bits & 1) - 1) & step));
}
CPD_FN D exact_product(D a, D b) { return multiply(a, b); }
CPD_FN D negated(D x) { return from_bits(bits_of(x) ^ ((L{} + 1) << 63)); }

#define CPD_FIELD 0x7ff0000000000000ll  // exponent bits of float64

CPD_FN D power_of_two(L exponent) { return from_bits((exponent + 1023) << 52); }

CPD_CALLED void round_wide(const Rounding& to, D& x, const Products& how, u64 number, u64 index) {
    L u = bits_of(x), a = u & 0x7fffffffffffffffll;
    L exponent = (a >> 52) - 1023, least = L{} + ((i64)(to.least >> 23) - 127);
    L finite = above(L{} + CPD_FIELD, a);
    exponent = above(exponent, least) ? exponent : least;
    exponent = finite ? exponent : least;
    D magnitude = from_bits(finite ? a : L{}), value;
    if (to.rounding == CPD_NEAREST) {
        D power = power_of_two(exponent + (52 - to.man));
        value = subtract(add(magnitude, power), power);
    } else {
        // An integer of 32 bits: those of the number, and those that are compared with the random.
        L fixed = truncate(multiply(magnitude, power_of_two(31 - exponent)));
        if (to.rounding == CPD_STOCHASTIC)
            fixed += widened(random31(how.key, number + index) >> to.man);
        value = multiply(to_double(fixed >> (31 - to.man)), power_of_two(exponent - to.man));
    }
    L over = above(value, widened(from_bits(lanes(to.max)))) | ~finite;
    L sign = u & ((L{} + 1) << 63);
    value = from_bits(bits_of(value) | sign);
    x = value;
    if (!any(over)) return;
    D special = widened(from_bits(lanes(to.over)));
    special = finite ? special : widened(from_bits(lanes(to.inf)));
    special = from_bits(bits_of(special) | sign);
    special = above(a, L{} + CPD_FIELD) ? widened(from_bits(lanes(to.nan))) : special;
    x = over ? special : value;
}

CPD_FN D round_number(const Rounding& to, D x, const Products& how, u64 number, u64 index) {
    round_wide(to, x, how, number, index);
    return x;
}

// A sum so far, and with kahan what it has too much.
template <class N>
struct Sum {
    N total, rest;
};

// step: see CPD_DRAWS; outputs: by which random bits are numbered; index: of the first lane's.
template <bool KAHAN, class N>
CPD_FN void add_term(const Products& how, const Rounding& to, Sum<N>& sum, N term, u64 step,
                     u64 outputs, u64 index) {
    u64 number = CPD_DRAWS * step * outputs;
    if (!KAHAN) {
        sum.total = round_number(to, exact_sum(sum.total, term), how, number, index);
        return;
    }
    N own = round_number(to, exact_sum(term, negated(sum.rest)), how, number + CPD_TERM * outputs,
                         index);
    N total = round_number(to, exact_sum(sum.total, own), how, number, index);
    N gained = round_number(to, exact_sum(total, negated(sum.total)), how,
                            number + CPD_GAINED * outputs, index);
    sum.rest =
        round_number(to, exact_sum(gained, negated(own)), how, number + CPD_REST * outputs, index);
    sum.total = total;
}

template <class N>
CPD_FN N term_of(const Products& how, N a, N b, u64 step, u64 outputs, u64 index) {
    N product = exact_product(a, b);
    if (how.exact) return product;
    return round_number(how.product, product, how, (CPD_DRAWS * step + CPD_PRODUCT) * outputs,
                        index);
}

#endif

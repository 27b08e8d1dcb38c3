// How sums of products are rounded, as the kernels see it: Products of ops/products.py.
#ifndef CPD_PRODUCTS_HOW_H
#define CPD_PRODUCTS_HOW_H

#include "cast.h"

enum { CPD_SUM = 0, CPD_TERM = 1, CPD_GAINED = 2, CPD_REST = 3, CPD_PRODUCT = 4, CPD_DRAWS = 8 };
// What is computed in; ODD: sums are rounded to odd.
enum { CPD_FLOAT32 = 0, CPD_FLOAT64 = 1, CPD_FLOAT64_ODD = 2, CPD_FLOAT32_ODD = 3 };
// What a rounding is made of: nothing is to be done, or the nearest number, or the one that is not
// above, or this when random bits have been added, or the odd code of the two beside.
enum {
    CPD_AS_IS = 0,
    CPD_ROUND_NEAREST = 1,
    CPD_ROUND_FLOOR = 2,
    CPD_ROUND_RANDOM = 3,
    CPD_ROUND_ODD = 4
};

#define CPD_PANEL 16  // columns that the CPU's loops take together

// A Cast as rounding values, not codes, needs it; bits of float32.
struct Rounding {
    int man, way;
    int magnitude, flipped;  // of |x|; of -x
    int random_bits;         // so many of a draw are added
    u32 least;               // exponent field of the smallest normal number
    u32 max, over, under;    // the largest number; what is above it and below its negative becomes
    u32 inf, nan;            // what infinity and NaN become
};
#define CPD_ROUNDING_NUMBERS 11

struct Products {
    Rounding product, sum, between;  // exact products are as they are
    int arithmetic, pairwise, kahan;
    i64 chunk;  // terms of a chunk; 0: there are none
    Key key;
};

#endif

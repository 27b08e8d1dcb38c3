// Roundings of sums of products, as kernels need them: Products of ops/products.py.
#ifndef CPD_PRODUCTS_HOW_H
#define CPD_PRODUCTS_HOW_H

#include "cast.h"

enum { CPD_SUM = 0, CPD_TERM = 1, CPD_GAINED = 2, CPD_REST = 3, CPD_PRODUCT = 4, CPD_DRAWS = 8 };
// The type of the arithmetic; ODD: sums are rounded to odd.
enum { CPD_FLOAT32 = 0, CPD_FLOAT64 = 1, CPD_FLOAT64_ODD = 2, CPD_FLOAT32_ODD = 3 };
// Ways of rounding: none, to the nearest number, to the one that is not above, to this after random
// bits have been added, or to the neighbour with an odd code.
enum {
    CPD_AS_IS = 0,
    CPD_ROUND_NEAREST = 1,
    CPD_ROUND_FLOOR = 2,
    CPD_ROUND_RANDOM = 3,
    CPD_ROUND_ODD = 4
};

#define CPD_PANEL 16  // columns that the CPU's loops take together

// A Cast for rounding to values instead of codes; bits of float32.
struct Rounding {
    int man, way;
    int magnitude, flipped;  // whether |x| is rounded instead of x; whether -x is
    int random_bits;         // number of bits of a draw that are added
    u32 least;               // exponent field of the smallest normal number
    u32 max, over, under;    // the largest number; results for larger ones and for their negatives
    u32 inf, nan;            // results for infinity and NaN
};
#define CPD_ROUNDING_NUMBERS 11

struct Products {
    Rounding product, sum, between;  // product: none if products are exact
    int arithmetic, pairwise, kahan;
    i64 chunk;  // terms of a chunk; 0: there are no chunks
    Key key;
};

#endif

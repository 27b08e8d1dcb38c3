// How sums of products are rounded, as the kernels see it: Products of ops/products.py.
#ifndef CPD_PRODUCTS_HOW_H
#define CPD_PRODUCTS_HOW_H

#include "cast.h"

enum { CPD_SUM = 0, CPD_TERM = 1, CPD_GAINED = 2, CPD_REST = 3, CPD_PRODUCT = 4, CPD_DRAWS = 8 };

// A Cast as rounding values, not codes, needs it; bits of float32, or of float64 (wide).
struct Rounding {
    int man, rounding, identity;  // identity: of float32 in float32, nothing is to be done
    u32 least;                    // exponent field of the smallest normal number
    u32 max, over, inf, nan;      // the largest number; what is above it, infinite or NaN becomes
};

struct Products {
    Rounding product, sum, between;
    int exact;  // products are exact
    int pairwise, kahan;
    i64 chunk;  // terms of a chunk; 0: there are none
    Key key;
};

#endif

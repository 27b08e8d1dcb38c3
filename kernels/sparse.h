// Selection by magnitude: float32 bits without the sign, compared as integers.
// ops/reference_sparse.py specifies it.
#ifndef CPD_SPARSE_H
#define CPD_SPARSE_H

#include "cpd.h"

#define CPD_MAGNITUDE 0x7fffffffu

// Negative where a magnitude is above bits.
CPD_FN I is_above(F x, U bits) { return (I)(bits - (bits_of(x) & CPD_MAGNITUDE)); }

// The bucket, 2^shift wide, of a magnitude from low on; those below low give a large number.
CPD_FN u32 bucket_of(u32 bits, u32 low, int shift) {
    return ((bits & CPD_MAGNITUDE) - low) >> shift;
}

#endif

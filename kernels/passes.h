// The terms of sums, as TERMS of ops/cpu.py numbers them, and the result of sums by sign.
#ifndef CPD_PASSES_H
#define CPD_PASSES_H

#include "cast.h"

enum { CPD_VALUES, CPD_MAGNITUDES, CPD_SQUARES };

// The sums of values below 0 and of the others.
struct Parts {
    double below, above;
};

// Bits of the index in a code of AdaComp, by its bytes: see compress/adacomp.py.
#define CPD_BIN_BITS(bytes) ((bytes) == 1 ? 6 : 14)

#endif

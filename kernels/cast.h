// A format and its rounding as the kernels see them.
#ifndef CPD_CAST_H
#define CPD_CAST_H

#ifdef __CUDACC__  // NVRTC has no <stdint.h>
typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;
#else
#include <stdint.h>
typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;
#endif

#define CPD_TILE 1024            // values in a tile
#define CPD_LANES 32             // lanes of a tile; value row * CPD_LANES + lane belongs to lane
#define CPD_SHIFT_BIAS 127       // a shift k is stored as k + 127
#define CPD_SHIFT_NONFINITE 255  // instead of a shift: the tile has NaN or infinity
#define CPD_TRIT_BYTES 205       // of a tile of ternary values, five in a byte
#define CPD_BUCKETS 2048         // of one pass of a radix selection, at most

// A lane's column of a tile may be cut into blocks, equal parts with a shift each. 0 blocks: one
// shift for the whole tile.
#define CPD_MOST_BLOCKS 2

#define CPD_SHIFTS_OF_TILE(blocks) ((blocks) ? CPD_LANES * (blocks) : 1)

enum { CPD_NEAREST = 0, CPD_ZERO = 1, CPD_STOCHASTIC = 2, CPD_UP = 3, CPD_DOWN = 4, CPD_ODD = 5 };

// Ways to find a code, for each of which the loops are compiled.
enum Way { CPD_BY_NEAREST, CPD_BY_ADDING, CPD_BY_DIRECTION, CPD_BY_TABLE };

// A Cast of formats.py, as numbers.
struct Cast {
    int exp, man, rounding;
    u32 max_code;       // of the largest finite number
    u32 inf_code;       // of infinity
    u32 nan_code;       // of NaN
    u32 overflow_code;  // of positive numbers that are too large
    u32 first_nan;  // codes from here on decode to NaN, those between max_code and it to infinity
    int shift_min, shift_max, emax;
    u32 max_significand;     // fraction bits of the largest number as float32
    u32 overflow_below;      // as overflow_code, of negative numbers
    u32 random_mask;         // of the 31 bits of a draw that are used
    int near_min, near_max;  // shifts beyond these are far: values are scaled first
    int ocp;           // whether blocks are 32 neighbours, and bytes those of OCP's Microscaling
    const int* table;  // as table_format.h reads it; null for formats of exp and man
};

// A stream of random bits.
struct Key {
    u32 low, high;
};

#endif

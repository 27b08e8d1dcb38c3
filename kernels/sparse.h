// Selection by magnitude: float32 bits without the sign, compared as integers.
// ops/reference.py specifies it.
#ifndef CPD_SPARSE_H
#define CPD_SPARSE_H

#include "cpd.h"

// Negative where a magnitude is above bits.
CPD_FN I is_above(F x, U bits) { return (I)(bits - (bits_of(x) & CPD_MAGNITUDE)); }

// The bucket, 2^shift wide, of a magnitude from low on; a large number for those below low.
CPD_FN u32 bucket_of(u32 bits, u32 low, int shift) {
    return ((bits & CPD_MAGNITUDE) - low) >> shift;
}

// Streams of bits are packed in runs of 32 codes, which fill as many words as a code has bits.
#define CPD_RUN 32

// Writes up to CPD_RUN codes of width bits, one after the other, into words.
CPD_FN void pack_run(const u32* codes, int n, int width, u32* words) {
    u32 mask = (u32)(((u64)1 << width) - 1);
    u64 open = 0;
    int filled = 0;
    for (int i = 0; i < n; ++i) {
        open |= (u64)(codes[i] & mask) << filled;
        filled += width;
        if (filled < 32) continue;
        *words++ = (u32)open;
        open >>= 32;
        filled -= 32;
    }
    if (filled) *words = (u32)open;
}

// Reads up to CPD_RUN codes that pack_run wrote: each on its own, without waiting for the last one.
CPD_FN void unpack_run(const u32* words, int n, int width, u32* codes) {
    const u32 mask = (u32)(((u64)1 << width) - 1);
    const int last = (n * width - 1) / 32;
    if (!width) words = codes, codes[0] = 0;  // there are no words
    for (int i = 0; i < n; ++i) {
        const int bit = i * width, at = bit / 32;
        const u64 two = words[at < last ? at : last] | (u64)words[at < last ? at + 1 : last] << 32;
        codes[i] = (u32)(two >> bit % 32) & mask;
    }
}

#endif

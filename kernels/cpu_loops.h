// The loops over tiles that the Python module calls. x and out: n floats; words: 32-bit words of
// whole tiles; shifts: one byte a tile. See ops/reference.py, which specifies each.
#ifndef CPD_CPU_LOOPS_H
#define CPD_CPU_LOOPS_H

#include "float_format.h"
#include "random.h"

void cpd_encode(const Cast& cast, int k, Key key, u64 offset, const float* x, i64 n, u32* codes);
void cpd_decode(const Cast& cast, int k, const u32* codes, i64 n, float* out);
void cpd_pack(int bits, const u32* codes, i64 n, u32* words);
void cpd_unpack(int bits, const u32* words, i64 n, u32* codes);
void cpd_amax_tiles(const float* x, i64 n, u32* amax);

// fit: choose and write the shifts, else read them. counts: three a tile, or null.
void cpd_encode_tiles(const Cast& cast, bool fit, Key key, u64 offset, const float* x, i64 n,
                      u32* words, u8* shifts, u32* counts);
i64 cpd_decode_tiles(const Cast& cast, const u32* words, const u8* shifts, float* out, i64 n);
void cpd_decode_add_tiles(const Cast& cast, const u32* words, const u8* shifts, const float* x,
                          float* out, i64 n);
void cpd_decode_add_encode_tiles(const Cast& cast, bool fit, Key key, u64 offset,
                                 const u32* words_in, const u8* shifts_in, const float* x, i64 n,
                                 u32* words, u8* shifts, u32* counts);

// The name of the clone that the loops above run as.
const char* cpd_clone();

#endif

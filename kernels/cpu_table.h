// The loops over tiles that the Python module calls, compiled once for each generation of
// processors. x and out: n floats; words: 32-bit words of whole tiles; shifts: one byte a tile, or
// if blocks is not 0 one for each of the blocks of each lane's column, [tile][block][lane].
// ops/reference.py specifies each.
#ifndef CPD_CPU_TABLE_H
#define CPD_CPU_TABLE_H

#include "blocks.h"
#include "cast.h"
#include "passes.h"
#include "pools.h"
#include "products_how.h"
#include "steps.h"

struct Loops {
    const char* name;
    void (*encode)(const Cast& cast, int k, Key key, u64 offset, const float* x, i64 n, u32* codes);
    void (*decode)(const Cast& cast, int k, const u32* codes, i64 n, float* out);
    void (*pack)(int bits, const u32* codes, i64 n, u32* words);
    void (*unpack)(int bits, const u32* words, i64 n, u32* codes);
    void (*amax_tiles)(const float* x, i64 n, u32* amax);
    // fit: choose and write the shifts, else read them. counts: three a tile, or null.
    void (*encode_tiles)(const Cast& cast, int blocks, bool fit, Key key, u64 offset,
                         const float* x, i64 n, u32* words, u8* shifts, u32* counts);
    // One tile, with the largest magnitude of x; a tile from ahead on is prefetched.
    void (*encode_tile)(const Cast& cast, u8 shift, u32 amax, Key key, u64 offset, const float* x,
                        u32* words, const float* ahead);
    i64 (*decode_tiles)(const Cast& cast, int blocks, const u32* words, const u8* shifts,
                        float* out, i64 n);
    void (*decode_add_tiles)(const Cast& cast, int blocks, const u32* words, const u8* shifts,
                             const float* x, float* out, i64 n);
    // out: n floats, the decoded words, or null; returns the number of them that is not finite.
    i64 (*decode_add_encode_tiles)(const Cast& cast, int blocks, bool fit, Key key, u64 offset,
                                   const u32* words_in, const u8* shifts_in, const float* x, i64 n,
                                   u32* words, u8* shifts, float* out, u32* counts);
    // Exact sums: integers of bits bits, or codes of the cast if bits is 0; whole tiles.
    void (*add_integers_tiles)(const Cast& cast, const u32* a, int bits_a, const u32* b, int bits_b,
                               i64 tiles, u32* words, int bits);
    void (*add_encode_integers_tiles)(const Cast& cast, Key key, u64 offset, const u32* words_in,
                                      int bits_in, const u8* shifts, const float* x, i64 n,
                                      u32* words, int bits, u32* counts);
    i64 (*decode_integers_tiles)(const Cast& cast, const u32* words, int bits, const u8* shifts,
                                 float* out, i64 n);
    void (*pack_trits)(const u32* words, i64 tiles, u8* trits);
    void (*unpack_trits)(const u8* trits, i64 tiles, u32* words);
    // Selection: words hold a bit for each value or place, counts and starts one of each 32 words.
    void (*mark_above)(u32 bits, const float* x, i64 n, u32* words);
    void (*count_digits)(u32 low, int shift, u32 buckets, const float* x, i64 n, u32* counts);
    void (*count_bits)(const u32* words, i64 n, u32* counts);
    void (*unpack_bitmap)(const u32* words, i64 n, u32 first, const u32* starts, u32* out, i64 end);
    // Of a tile of n values; both arrays have room for a group more. Returns the number above bits.
    i64 (*collect_tile)(u32 bits, const float* x, i64 n, u32 first, u32* places, float* values);
    // Passes of compression methods. sum = x + factor * kept, and if more is given total = sum +
    // more; return the bits of the largest magnitude of the last.
    u32 (*accumulate)(const float* x, const float* kept, float factor, const float* more, i64 n,
                      float* sum, float* total);
    // The same for a tile, with the places, counted from first, and the values of the last sum that
    // are above bits; their arrays have room for a group more than n. count: written.
    u32 (*accumulate_above)(u32 above, const float* x, const float* kept, float factor,
                            const float* more, i64 n, float* sum, float* total, u32 first,
                            u32* places, float* values, i64* count);
    // Values at the set bits of words, which become 0; and the reverse. Return their number.
    i64 (*take_marked)(const u32* words, float* x, i64 n, float* values);
    i64 (*put_marked)(const u32* words, const float* values, i64 n, float* x);
    u32 (*scale)(bool divide, const float* x, float by, float limit, i64 n, float* out);
    u32 (*largest_of)(const float* x, i64 n);
    double (*sum_in_pairs)(int of, const float* x, i64 n, double center);
    Parts (*parts_of)(const float* x, i64 n, const float* ahead);
    void (*take_signs)(const float* x, float below, float above, i64 n, float* rest,
                       const float* ahead);
    i64 (*pack_signs)(const float* x, i64 n, i64 first, u8* out);
    u32 (*mean_signs)(const u8* const* packed, const float* const* pairs, i64 ranks, i64 row,
                      i64 first, float divisor, i64 n, float* out);
    // Of a bin whose largest x is highest, the codes of the values but zeros at which x + more *
    // rate reaches it; codes has room for a group more than n. Returns their number.
    i64 (*leaders_of)(const float* x, const float* rate, float more, u32 highest, i64 n,
                      int code_bytes, void* codes);
    void (*add_levels)(int bits, const u32* words, const float* by, float* sum);
    i64 (*leader_of)(const float* x, i64 n);
    void (*row_products)(const float* m, i64 n, i64 columns, const float* rows, i64 count,
                         float* out);
    void (*column_products)(const float* m, i64 n, i64 columns, const float* rows, i64 count,
                            float* out);
    u32 (*outer_row)(const float* firsts, i64 stride, const float* seconds, i64 count, i64 columns,
                     float* out);
    // memcpy without the processor's string instructions, which take 10 times as long on an AMD
    // Zen 4 if the target's offset in a page is up to 16 bytes after that of the source.
    void (*copy)(u8* out, const u8* x, i64 size);
    // memcpy that bypasses the caches: overwritten lines are not read. Others may be notified only
    // after end_stream.
    void (*stream_on)(u8* out, const u8* x, i64 size);
    // CPD_PANEL columns from column on of out[m][n], by a[m][k] and b[k][n]; panel: room for k *
    // CPD_PANEL floats; index: of out[0][0], of so many outputs.
    void (*matmul)(const Products& how, const float* a, i64 m, i64 k, const float* b, i64 n,
                   i64 column, float* panel, float* out, u64 index, u64 outputs);
    // Optimisers: w, g, m, v are n weights of a row, their gradients, first and second moments.
    // The first, third and fourth write sums over them, in the order of ops/steps.py.
    void (*square_sums)(const float* w, const float* g, i64 n, LayerSums* sums);
    void (*momentum_step)(const Momentum& by, float* w, const float* g, float* m, i64 n);
    void (*lamb_sums)(const Moments& by, float decay, const float* w, const float* g, float* m,
                      float* v, i64 n, LayerSums* sums);
    void (*adamp_sums)(const Moments& by, const float* w, const float* g, float* m, float* v, i64 n,
                       LayerSums* sums);
    void (*move_weights)(const Moments& by, const LayerMove& move, float* w, const float* m,
                         const float* v, i64 n);
    // The autoencoder's filters of a block, of float32 and float64. Its fields x and again, and its
    // responses and their slopes, are strided views; outputs: [batch][width].
    void (*reconstruct_block[2])(const BlockShape& of, const void* weight, const void* x,
                                 void* responses, void* outputs, void* room);
    // Adds an image's outputs to its field.
    void (*add_field[2])(const BlockShape& of, const void* outputs, void* again);
    void (*descend_block[2])(const BlockShape& of, const BlockStep& by, void* weight, void* moving,
                             const void* x, const void* again, const void* responses,
                             const void* slopes, void* room);
    // Between them, for n values of each cell or for n cells of one row.
    double (*pool_cells[2])(const PoolShape& of, const void* responses, void* out, i64 n,
                            void* room);
    void (*subtract_row[2])(double by, const void* x, void* again, i64 n, double* sums);
};

// Compilers other than gcc, other processors and sanitisers get only the portable loops.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(CPD_PORTABLE)
#define CPD_HAS_X86_CLONES
extern const Loops cpd_loops_v3, cpd_loops_v4;
#endif
extern const Loops cpd_loops_portable;

#endif

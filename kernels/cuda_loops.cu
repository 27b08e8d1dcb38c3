// All kernels for the GPU: those of the codec, and here thin loops, a warp a tile and a thread a
// lane, or a thread a value; the work is in items.h, integers.h and trits.h. Same names and meaning
// as in cpu_table.h; ops/gpu.py launches them.
#include "cuda_codec.h"
#include "integers.h"
#include "trits.h"

namespace {

// Words of a tile of integers of bits bits, or of codes if bits is 0.
__device__ i64 words_of_tile(const Cast& cast, int bits) {
    return CPD_LANES * (bits ? bits : width(cast));
}

}  // namespace

extern "C" {

__global__ void encode(const int* cast_numbers, int k, u32 key_low, u32 key_high, u64 offset,
                       const float* x, i64 n, u32* codes) {
    Cast cast = load_cast(cast_numbers);
    Key key{key_low, key_high};
    Counts counts;
    i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const int far = far_of(cast, k);
    const F factor = normal_power((u32)far);
    by_way(cast, [&](auto way) {
        const auto e = make_encoder_of<way.value>(cast, (u32)(k - far));
        for (i64 i = first; i < n; i += stride)
            codes[i] = encode_value<way.value, false, false>(cast, e, moved(x[i], factor), key,
                                                             offset + i, counts);
    });
}

__global__ void decode(const int* cast_numbers, int k, const u32* codes, i64 n, float* out) {
    Cast cast = load_cast(cast_numbers);
    i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    const int far = far_of(cast, k);
    const F back = normal_power(0u - (u32)far);
    by_table(cast, [&](auto table) {
        const auto d = make_scale<table.value>(cast, (u32)(k - far), false).decoder;
        for (i64 i = first; i < n; i += stride)
            out[i] = moved_back(decode_code(cast, d, codes[i]), back);
    });
}

__global__ void pack(int bits, const u32* codes, i64 n, u32* words) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride())
        pack_column(codes + t * CPD_TILE, n - t * CPD_TILE, bits, words + t * CPD_LANES * bits,
                    lane_of_thread());
}

__global__ void unpack(int bits, const u32* words, i64 n, u32* codes) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride())
        unpack_column(words + t * CPD_LANES * bits, bits, codes + t * CPD_TILE, n - t * CPD_TILE,
                      lane_of_thread());
}

__global__ void amax_tiles(const float* x, i64 n, u32* amax) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        u32 most = 0;
        each_of_tile(n, t, [&](i64 i) { most = larger(most, bits_of(x[i]) & CPD_MAGNITUDE); });
        most = warp_largest(most);
        if (lane_of_thread() == 0) amax[t] = most;
    }
}

__global__ void add_integers_tiles(const int* cast_numbers, const u32* a, int bits_a, const u32* b,
                                   int bits_b, i64 tiles, u32* words, int bits) {
    Cast cast = load_cast(cast_numbers);
    for (i64 t = first_tile(); t < tiles; t += tile_stride())
        add_integers_column(cast, a + t * words_of_tile(cast, bits_a), bits_a,
                            b + t * words_of_tile(cast, bits_b), bits_b,
                            words + t * CPD_LANES * bits, bits, lane_of_thread());
}

__global__ void add_encode_integers_tiles(const int* cast_numbers, u32 key_low, u32 key_high,
                                          u64 offset, const u32* words_in, int bits_in,
                                          const u8* shifts, const float* x, i64 n, u32* words,
                                          int bits, u32* counts) {
    Cast cast = load_cast(cast_numbers);
    Key key{key_low, key_high};
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        Counts c = {};
        const u32* in = words_in + t * words_of_tile(cast, bits_in);
        u32* out = words + t * CPD_LANES * bits;
        i64 first = t * CPD_TILE;
        int k = shifts[t] - CPD_SHIFT_BIAS, lane = lane_of_thread();
        by_way(cast, [&](auto way) {
            add_encode_integers_column<way.value, true>(cast, k, in, bits_in, x + first, n - first,
                                                        out, bits, lane, key, offset + first, c);
        });
        if (counts) write_counts(c, counts + 3 * t);
    }
}

__global__ void decode_integers_tiles(const int* cast_numbers, const u32* words, int bits,
                                      const u8* shifts, float* out, i64 n, u64* nonfinite) {
    Cast cast = load_cast(cast_numbers);
    I count = 0;
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride())
        decode_integers_column(cast, shifts[t] - CPD_SHIFT_BIAS,
                               words + t * words_of_tile(cast, bits), bits, lane_of_thread(),
                               out + t * CPD_TILE, n - t * CPD_TILE, count);
    add_count(count, nonfinite);
}

__global__ void pack_trits(const u32* words, i64 tiles, u8* trits) {
    for (i64 t = first_tile(); t < tiles; t += tile_stride())
        pack_trits_column(words + t * 2 * CPD_LANES, trits + t * CPD_TRIT_BYTES, lane_of_thread());
}

__global__ void unpack_trits(const u8* trits, i64 tiles, u32* words) {
    for (i64 t = first_tile(); t < tiles; t += tile_stride())
        unpack_trits_column(trits + t * CPD_TRIT_BYTES, words + t * 2 * CPD_LANES,
                            lane_of_thread());
}

// Float arithmetic that rounds as NumPy's and keeps subnormal numbers: CuPy's own is compiled with
// -ftz=true.
__global__ void add_floats(const float* a, const float* b, float* out, i64 n) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        out[i] = add(a[i], b[i]);
}

__global__ void subtract_floats(const float* a, const float* b, float* out, i64 n) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        out[i] = subtract(a[i], b[i]);
}

__global__ void multiply_floats(const float* a, float b, float* out, i64 n) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        asm("mul.rn.f32 %0, %1, %2;" : "=f"(out[i]) : "f"(a[i]), "f"(b));
}

__global__ void divide_floats(const float* a, float b, float* out, i64 n) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += stride)
        asm("div.rn.f32 %0, %1, %2;" : "=f"(out[i]) : "f"(a[i]), "f"(b));
}

}  // extern "C"

#include "cuda_moves.h"
#include "cuda_products.h"
#include "cuda_sparse.h"
#include "cuda_sums.h"
//
#include "cuda_passes.h"
//
#include "cuda_two_scales.h"

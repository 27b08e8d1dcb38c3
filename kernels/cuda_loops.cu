// Thin loops over tiles for the GPU, a warp a tile and a thread a lane; the work is in items.h,
// integers.h and trits.h.
// Same names and meaning as in cpu_table.h; ops/gpu.py launches them.
#include "integers.h"
#include "trits.h"

#define CPD_WARPS 4  // of a block

namespace {

__device__ Cast load_cast(const int* numbers) {
    return Cast{numbers[0],       numbers[1],       numbers[2],
                (u32)numbers[3],  (u32)numbers[4],  (u32)numbers[5],
                (u32)numbers[6],  (u32)numbers[7],  numbers[8],
                numbers[9],       numbers[10],      (u32)numbers[11],
                (u32)numbers[12], (u32)numbers[13], numbers[14] ? numbers + 15 : nullptr};
}

// Calls a function of a Way, or of whether the format is given by a table, as a constant.
template <int N>
struct Constant {
    static constexpr int value = N;
};
template <class Body>
__device__ void by_way(const Cast& cast, Body body) {
    switch (way_of(cast)) {
        case CPD_BY_NEAREST:
            return body(Constant<CPD_BY_NEAREST>{});
        case CPD_BY_ADDING:
            return body(Constant<CPD_BY_ADDING>{});
        case CPD_BY_DIRECTION:
            return body(Constant<CPD_BY_DIRECTION>{});
        case CPD_BY_TABLE:
            return body(Constant<CPD_BY_TABLE>{});
    }
}
template <class Body>
__device__ void by_table(const Cast& cast, Body body) {
    cast.table ? body(Constant<1>{}) : body(Constant<0>{});
}

__device__ int lane_of_thread() { return threadIdx.x % CPD_LANES; }

// The first tile of this warp, and how far to the next.
__device__ i64 first_tile() { return (i64)blockIdx.x * CPD_WARPS + threadIdx.x / CPD_LANES; }
__device__ i64 tile_stride() { return (i64)gridDim.x * CPD_WARPS; }

__device__ u32 warp_largest(u32 value) {
    for (int step = CPD_LANES / 2; step; step /= 2)
        value = max(value, __shfl_xor_sync(0xffffffffu, value, step));
    return value;
}

__device__ u32 warp_sum(u32 value) {
    for (int step = CPD_LANES / 2; step; step /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

__device__ void write_counts(const Counts& c, u32* counts) {
    if (!counts) return;
    u32 saturated = warp_sum(c.saturated);
    u32 underflowed = warp_sum(c.underflowed);
    u32 nonfinite = warp_sum(c.nonfinite);
    if (lane_of_thread() == 0) {
        counts[0] = saturated;
        counts[1] = underflowed;
        counts[2] = nonfinite;
    }
}

// Encodes a tile of n values and writes its counts, if wanted. The shifts are in memory, or where
// fit says so they are chosen by most, the largest magnitudes of the lane's blocks, and written.
// Returns the shift where the tile has one.
__device__ u8 encode_tile(const Cast& cast, int blocks, bool fit, const u32* most, u8* shifts,
                          Key key, u64 index, const float* x, i64 n, u32* words, u32* counts) {
    Counts c = {};
    const int lane = lane_of_thread();
    u8 shift = CPD_SHIFT_BIAS;
    if (blocks) {
        if (fit) fit_blocks(cast, blocks, most, shifts, lane);  // a thread reads what it wrote
        by_way(cast, [&](auto way) {
            encode_blocks<way.value, true, false>(cast, blocks, shifts, x, n, words, lane, key,
                                                  index, c, x);
        });
    } else {
        shift = fit ? fitting_shift(cast, warp_largest(*most)) : *shifts;
        if (fit && lane == 0) *shifts = shift;
        const int k = shift == CPD_SHIFT_NONFINITE ? 0 : shift - CPD_SHIFT_BIAS;
        by_way(cast, [&](auto way) {
            encode_column<way.value, true, false>(cast, k, x, n, words, lane, key, index, c, x);
        });
    }
    write_counts(c, counts);
    return shift;
}

// The sum of x and a decoded tile, zero from value n on; most: of the lane's blocks.
__device__ void sum_tile(const Cast& cast, int blocks, const u8* shifts, const u32* words,
                         const float* x, i64 n, float* out, i64 room, u32* most) {
    const int lane = lane_of_thread();
    by_table(cast, [&](auto table) {
        if (blocks)
            sum_blocks<table.value>(cast, blocks, shifts, words, lane, x, n, out, room, most);
        else
            *most = sum_column<table.value>(cast, *shifts, words, lane, x, n, out, room);
    });
}

__device__ void decode_tile(const Cast& cast, int blocks, const u8* shifts, const u32* words,
                            float* out, i64 n, I& nonfinite) {
    const int lane = lane_of_thread();
    by_table(cast, [&](auto table) {
        if (blocks)
            decode_blocks<table.value>(cast, blocks, shifts, words, lane, out, n, nonfinite);
        else
            decode_column<table.value>(cast, *shifts, words, lane, out, n, nonfinite);
    });
}

// Words of a tile of integers of bits bits, or of codes where bits is 0.
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
    by_way(cast, [&](auto way) {
        const auto e = make_encoder_of<way.value>(cast, (u32)k);
        for (i64 i = first; i < n; i += stride)
            codes[i] =
                encode_value<way.value, false, false>(cast, e, x[i], key, offset + i, counts);
    });
}

__global__ void decode(const int* cast_numbers, int k, const u32* codes, i64 n, float* out) {
    Cast cast = load_cast(cast_numbers);
    i64 first = (i64)blockIdx.x * blockDim.x + threadIdx.x, stride = (i64)gridDim.x * blockDim.x;
    by_table(cast, [&](auto table) {
        const auto d = make_scale<table.value>(cast, (u32)k, false).decoder;
        for (i64 i = first; i < n; i += stride) out[i] = decode_code(cast, d, codes[i]);
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
        u32 most = amax_column(x + t * CPD_TILE, n - t * CPD_TILE, lane_of_thread());
        most = warp_largest(most);
        if (lane_of_thread() == 0) amax[t] = most;
    }
}

__global__ void encode_tiles(const int* cast_numbers, int blocks, int fit, u32 key_low,
                             u32 key_high, u64 offset, const float* x, i64 n, u32* words,
                             u8* shifts, u32* counts) {
    Cast cast = load_cast(cast_numbers);
    Key key{key_low, key_high};
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        const float* tile = x + t * CPD_TILE;
        i64 left = n - t * CPD_TILE;
        u32 most[CPD_MOST_BLOCKS];
        if (fit) amax_blocks(blocks ? blocks : 1, tile, left, lane_of_thread(), most);
        encode_tile(cast, blocks, fit, most, shifts + t * CPD_SHIFTS_OF_TILE(blocks), key,
                    offset + t * CPD_TILE, tile, left, words + t * CPD_LANES * width(cast),
                    counts ? counts + 3 * t : nullptr);
    }
}

__global__ void decode_tiles(const int* cast_numbers, int blocks, const u32* words,
                             const u8* shifts, float* out, i64 n, u64* nonfinite) {
    Cast cast = load_cast(cast_numbers);
    I count = 0;
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride())
        decode_tile(cast, blocks, shifts + t * CPD_SHIFTS_OF_TILE(blocks),
                    words + t * CPD_LANES * width(cast), out + t * CPD_TILE, n - t * CPD_TILE,
                    count);
    if (count) atomicAdd(nonfinite, (u64)count);
}

__global__ void decode_add_tiles(const int* cast_numbers, int blocks, const u32* words,
                                 const u8* shifts, const float* x, float* out, i64 n) {
    Cast cast = load_cast(cast_numbers);
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        i64 left = n - t * CPD_TILE;
        u32 most[CPD_MOST_BLOCKS];
        sum_tile(cast, blocks, shifts + t * CPD_SHIFTS_OF_TILE(blocks),
                 words + t * CPD_LANES * width(cast), x + t * CPD_TILE, left, out + t * CPD_TILE,
                 left, most);
    }
}

__global__ void decode_add_encode_tiles(const int* cast_numbers, int blocks, int fit, u32 key_low,
                                        u32 key_high, u64 offset, const u32* words_in,
                                        const u8* shifts_in, const float* x, i64 n, u32* words,
                                        u8* shifts, float* out, u64* nonfinite, u32* counts) {
    __shared__ float sums[CPD_WARPS][CPD_TILE];
    float* sum = sums[threadIdx.x / CPD_LANES];  // a thread reads only what it wrote itself
    Cast cast = load_cast(cast_numbers);
    Key key{key_low, key_high};
    I count = 0;
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        i64 first = t * CPD_LANES * width(cast);
        u8* own = shifts + t * CPD_SHIFTS_OF_TILE(blocks);
        u32 most[CPD_MOST_BLOCKS];
        sum_tile(cast, blocks, shifts_in + (own - shifts), words_in + first, x + t * CPD_TILE,
                 n - t * CPD_TILE, sum, CPD_TILE, most);
        u8 shift = encode_tile(cast, blocks, fit, most, own, key, offset + t * CPD_TILE, sum,
                               CPD_TILE, words + first, counts ? counts + 3 * t : nullptr);
        if (out)  // a thread reads the words, and shifts of blocks, that it wrote itself
            decode_tile(cast, blocks, blocks ? own : &shift, words + first, out + t * CPD_TILE,
                        n - t * CPD_TILE, count);
    }
    if (count) atomicAdd(nonfinite, (u64)count);
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
        write_counts(c, counts ? counts + 3 * t : nullptr);
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
    if (count) atomicAdd(nonfinite, (u64)count);
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

#include "cuda_products.h"
#include "cuda_sparse.h"
#include "cuda_sums.h"

// Selection for the GPU, a warp a tile of values or 32 words of bits; a part of cuda_loops.cu,
// which includes it.
#include "sparse.h"

namespace {

// The sum over the lanes before this one.
__device__ u32 sum_before(u32 value) {
    u32 sum = value;
    for (int step = 1; step < CPD_LANES; step *= 2) {
        u32 other = __shfl_up_sync(ALL_LANES, sum, step);
        if (lane_of_thread() >= step) sum += other;
    }
    return sum - value;
}

// This lane's word of a tile of places; none beyond n words.
__device__ u32 word_of_tile(const u32* words, i64 n, i64 tile) {
    i64 i = tile * CPD_LANES + lane_of_thread();
    return i < n ? words[i] : 0u;
}

}  // namespace

extern "C" {

__global__ void mark_above(u32 bits, const float* x, i64 n, u32* words) {
    int lane = lane_of_thread();
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        u32 mine = 0;
        for (int row = 0; row < CPD_TILE / CPD_LANES; ++row) {
            i64 i = t * CPD_TILE + row * CPD_LANES + lane;
            u32 word = __ballot_sync(ALL_LANES, i < n && is_above(x[i], bits) < 0);
            if (row == lane) mine = word;
        }
        i64 w = t * CPD_LANES + lane;
        if (w * 32 < n) words[w] = mine;
    }
}

__global__ void count_bits(const u32* words, i64 n, u32* counts) {
    for (i64 t = first_tile(); t * CPD_LANES < n; t += tile_stride()) {
        u32 count = warp_sum(__popc(word_of_tile(words, n, t)));
        if (lane_of_thread() == 0) counts[t] = count;
    }
}

__global__ void unpack_bitmap(const u32* words, i64 n, const u32* starts, u32* places, i64 end) {
    for (i64 t = first_tile(); t * CPD_LANES < n; t += tile_stride()) {
        u32 word = word_of_tile(words, n, t);
        i64 at = (i64)starts[t] + sum_before(__popc(word));
        u32 first = (u32)(t * CPD_TILE) + 32 * lane_of_thread();
        for (; word && at < end; word &= word - 1) places[at++] = first + __ffs((int)word) - 1;
    }
}

// words: zeros at first
__global__ void pack_bitmap(const u32* indices, i64 m, u32* words, i64 n) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < m; i += stride)
        if (indices[i] / 32 < n) atomicOr(words + indices[i] / 32, 1u << indices[i] % 32);
}

// Streams of bits, a lane a run of 32 codes. starts: the first word of each tile
__global__ void pack_stream(const u32* codes, i64 n, const u8* widths, const i64* starts,
                            u32* words) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        i64 i = t * CPD_TILE + CPD_RUN * lane_of_thread();
        u32* to = words + starts[t] + widths[t] * lane_of_thread();
        if (i < n) pack_run(codes + i, n - i < CPD_RUN ? (int)(n - i) : CPD_RUN, widths[t], to);
    }
}

__global__ void unpack_stream(const u32* words, const u8* widths, const i64* starts, u32* codes,
                              i64 n) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        i64 i = t * CPD_TILE + CPD_RUN * lane_of_thread();
        const u32* from = words + starts[t] + widths[t] * lane_of_thread();
        if (i < n) unpack_run(from, n - i < CPD_RUN ? (int)(n - i) : CPD_RUN, widths[t], codes + i);
    }
}

// Each warp counts in a table of its own, and adds it to counts at the end.
__global__ void count_digits(u32 low, int shift, u32 buckets, const float* x, i64 n, u32* counts) {
    __shared__ u32 tables[CPD_WARPS][CPD_BUCKETS];
    u32* table = tables[threadIdx.x / CPD_LANES];
    for (u32 b = lane_of_thread(); b < buckets; b += CPD_LANES) table[b] = 0;
    __syncwarp();
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride())
        in_batches(
            t * CPD_TILE, t * CPD_TILE + values_of_tile(n, t),
            [&](i64 i) { return bucket_of(bits_of(x[i]), low, shift); },
            [&](i64, u32 bucket) {
                if (bucket < buckets) atomicAdd(table + bucket, 1u);
            });
    __syncwarp();
    for (u32 b = lane_of_thread(); b < buckets; b += CPD_LANES)
        if (table[b]) atomicAdd(counts + b, table[b]);
}

// Indices are distinct; those from n on are left out.
__global__ void gather(const float* x, i64 n, const u32* indices, i64 m, float* values) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < m; i += stride)
        values[i] = indices[i] < n ? x[indices[i]] : 0.0f;
}

__global__ void scatter_add(float* total, i64 n, const u32* indices, i64 m, const float* values) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < m; i += stride)
        if (indices[i] < n) total[indices[i]] = add(total[indices[i]], values[i]);
}

__global__ void clear(float* x, i64 n, const u32* indices, i64 m) {
    i64 stride = (i64)gridDim.x * blockDim.x;
    for (i64 i = (i64)blockIdx.x * blockDim.x + threadIdx.x; i < m; i += stride)
        if (indices[i] < n) x[indices[i]] = 0.0f;
}

}  // extern "C"

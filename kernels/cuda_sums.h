// Sums and products in NumPy's order of additions, a thread a sum; a part of cuda_loops.cu, which
// includes it. ops/reference.py specifies them.
#include "passes.h"

namespace {

// More terms of sums: values that are not below 0, with zeros for the others, and the reverse.
enum { CPD_ABOVE = CPD_SQUARES + 1, CPD_BELOW };  // ops/gpu.py has the same order

// Whether x < 0, for subnormal numbers too.
__device__ bool is_below(float x) {
    const u32 bits = bits_of(x);
    return bits > 0x80000000u && bits <= 0xff800000u;
}

// The term of a value, exact except for the square of a difference. -ftz=true would flush subnormal
// numbers in a conversion of C++.
__device__ double term(int of, double center, float x) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
    if (of == CPD_MAGNITUDES) return fabs(wide);
    if (of == CPD_SQUARES) return (wide - center) * (wide - center);
    if (of == CPD_ABOVE) return is_below(x) ? 0.0 : wide;
    if (of == CPD_BELOW) return is_below(x) ? wide : 0.0;
    return wide;
}

const i64 LEAF = 128;  // values that NumPy sums without halving them
const int INNER = 7;   // levels of a tree that a block sums, a thread a leaf

struct alignas(16) Four {
    float of[4];
};

// The sum of up to LEAF values: eight sums side by side, then these in pairs, then the remainder.
// ALIGNED: whether v is at a multiple of 16 bytes
template <bool ALIGNED>
__device__ double sum_leaf(int of, double center, const float* v, i64 n) {
    i64 i = 0;
    double sum = -0.0;
    if (n >= 8) {
        double side[8];
#pragma unroll 4
        for (; i < n - n % 8; i += 8) {
            float x[8];
            if (ALIGNED) {
                const Four first = *(const Four*)(v + i), second = *(const Four*)(v + i + 4);
                for (int k = 0; k < 4; ++k) x[k] = first.of[k], x[4 + k] = second.of[k];
            } else {
                for (int k = 0; k < 8; ++k) x[k] = v[i + k];
            }
            for (int k = 0; k < 8; ++k)
                side[k] = i ? side[k] + term(of, center, x[k]) : term(of, center, x[k]);
        }
        sum = ((side[0] + side[1]) + (side[2] + side[3])) +
              ((side[4] + side[5]) + (side[6] + side[7]));
    }
    for (; i < n; ++i) sum += term(of, center, v[i]);
    return sum;
}

__device__ double leaf_of(int of, double center, const float* v, i64 n) {
    return (u64)v % 16 ? sum_leaf<false>(of, center, v, n) : sum_leaf<true>(of, center, v, n);
}

// A node of the tree by which NumPy sums values: depth halvings from all of them.
struct Node {
    i64 start, size;
    int depth;
    bool is_there;
};

__device__ i64 half_of(i64 size) { return size / 2 / 8 * 8; }

// The number of halvings on the longest path: if halves differ in size, the second is larger.
__device__ int depth_of(i64 size) {
    int depth = 0;
    for (; size > LEAF; ++depth) size -= half_of(size);
    return depth;
}

// The node at the end of a path of some levels: its bits, from the highest, choose a half. If the
// tree ends before the path, only the path with zeros from there on has the node.
__device__ Node walk(Node node, i64 path, int levels) {
    for (int level = levels - 1; level >= 0; --level) {
        const bool second = path >> level & 1;
        if (node.size <= LEAF) {
            node.is_there &= !second;
            continue;
        }
        const i64 half = half_of(node.size);
        node.start += second ? half : 0;
        node.size = second ? node.size - half : half;
        ++node.depth;
    }
    return node;
}

__device__ i64 first_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ i64 thread_stride() { return (i64)gridDim.x * blockDim.x; }

// The row of value i of n in rows of columns values: a division of 64 bits takes long.
__device__ i64 row_of(i64 i, i64 columns, i64 n) {
    return n < (i64)1 << 32 ? (u32)i / (u32)columns : i / columns;
}

// The number of the run, by their ends, that has value i.
__device__ i64 run_of(const i64* ends, i64 runs, i64 i) {
    i64 low = 0, high = runs - 1;
    while (low < high) {
        i64 middle = (low + high) / 2;
        if (ends[middle] > i)
            high = middle;
        else
            low = middle + 1;
    }
    return low;
}

// Calls a function with the parts of runs in each tile of this warp: start, stop and the run's
// number.
template <class Body>
__device__ void each_part_of_run(i64 n, const i64* ends, i64 runs, Body body) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        const i64 stop = t * CPD_TILE + values_of_tile(n, t);
        i64 run = run_of(ends, runs, t * CPD_TILE);
        for (i64 start = t * CPD_TILE; start < stop; ++run) {
            const i64 end = ends[run] < stop ? ends[run] : stop;
            if (end > start) body(start, end, run), start = end;
        }
    }
}

// Writes a function of each value and its run's number to out, which may be x.
template <class Number, class Body>
__device__ void by_run(const float* x, i64 n, const i64* ends, i64 runs, const Number* each,
                       float* out, Body body) {
    each_part_of_run(n, ends, runs, [&](i64 start, i64 stop, i64 run) {
        const Number number = each[run];
        const auto load = [&](i64 i) { return x[i]; };
        in_batches(start, stop, load, [&](i64 i, float value) { out[i] = body(value, number); });
    });
}

}  // namespace

extern "C" {

// Sums of up to LEAF values, a thread a sum.
__global__ void leaf_sums(int of, double center, const float* x, const i64* starts,
                          const i64* stops, i64 leaves, double* sums) {
    for (i64 leaf = first_thread(); leaf < leaves; leaf += thread_stride())
        sums[leaf] = leaf_of(of, center, x + starts[leaf], stops[leaf] - starts[leaf]);
}

// Sums of the lowest INNER levels of parts' trees, a block each: the blocks of a part are
// consecutive, up to its number in ends.
__global__ void tree_sums(int of, double center, const float* x, const i64* starts,
                          const i64* stops, const i64* ends, i64 parts, i64 count, double* sums) {
    __shared__ double side[1 << INNER];
    const int thread = threadIdx.x;
    for (i64 b = blockIdx.x; b < count; b += gridDim.x) {
        const i64 part = run_of(ends, parts, b), first = part ? ends[part - 1] : 0;
        const i64 size = stops[part] - starts[part];
        const int depth = depth_of(size), inner = depth < INNER ? depth : INNER;
        const int outer = depth - inner;
        Node node = walk(Node{starts[part], size, 0, true}, b - first, outer);
        node = walk(node, thread, inner);
        const bool is_leaf = thread < 1 << inner && node.is_there;
        side[thread] = is_leaf ? leaf_of(of, center, x + node.start, node.size) : 0.0;
        __syncthreads();
        for (int level = inner - 1; level >= 0; --level) {
            const int step = 1 << (inner - 1 - level);
            if (thread < 1 << inner && thread % (2 * step) == 0 && node.depth > outer + level)
                side[thread] += side[thread + step];
            __syncthreads();
        }
        if (thread == 0) sums[b] = side[0];
        __syncthreads();
    }
}

// Sums of the levels above, a block a part; they overwrite those of tree_sums.
__global__ void join_sums(const i64* starts, const i64* stops, const i64* ends, i64 parts,
                          double* sums, double* totals) {
    for (i64 part = blockIdx.x; part < parts; part += gridDim.x) {
        double* own = sums + (part ? ends[part - 1] : 0);
        const i64 size = stops[part] - starts[part];
        const int depth = depth_of(size), outer = depth < INNER ? 0 : depth - INNER;
        for (int level = outer - 1; level >= 0; --level) {
            for (i64 path = threadIdx.x; path < (i64)1 << level; path += blockDim.x) {
                const Node node = walk(Node{0, size, 0, true}, path, level);
                const i64 at = path << (outer - level);
                if (node.is_there && node.size > LEAF)
                    own[at] += own[at + ((i64)1 << (outer - level - 1))];
            }
            __syncthreads();
        }
        if (threadIdx.x == 0) totals[part] = own[0];
    }
}

__global__ void multiply_runs(const float* x, i64 n, const float* each, const i64* ends, i64 runs,
                              float* out) {
    by_run(x, n, ends, runs, each, out, [](float value, float by) { return multiply(value, by); });
}

__global__ void divide_runs(const float* x, i64 n, const float* each, const i64* ends, i64 runs,
                            float* out) {
    by_run(x, n, ends, runs, each, out, [](float value, float by) {
        float found;
        asm("div.rn.f32 %0, %1, %2;" : "=f"(found) : "f"(value), "f"(by));
        return found;
    });
}

// The largest magnitude of each run as float32 bits; most begins with zeros.
__global__ void run_maxima(const float* x, i64 n, const i64* ends, i64 runs, u32* most) {
    each_part_of_run(n, ends, runs, [&](i64 start, i64 stop, i64 run) {
        u32 found = 0;
        for (i64 i = start + lane_of_thread(); i < stop; i += CPD_LANES)
            found = larger(found, bits_of(x[i]) & CPD_MAGNITUDE);
        found = warp_largest(found);
        if (lane_of_thread() == 0) atomicMax(most + run, found);
    });
}

// out[r][i] = sum over j of m[i][j] * rows[r][j], four sums side by side, a thread each: of 16
// products the last four come first, and the last four are padded with zeros.
__global__ void row_products(const float* m, i64 n, i64 columns, const float* rows, i64 count,
                             float* out) {
    const int s = threadIdx.x % 4;
    const i64 all = (n * count + 7) / 8 * 8;  // of whole warps
    for (i64 at = first_thread() / 4; at < all; at += thread_stride() / 4) {
        const i64 i = at / count, r = at % count;
        const bool is_one = i < n;
        const float *a = m + (is_one ? i : 0) * columns, *b = rows + r * columns;
        float side = 0.0f;
        i64 j = 0;
        for (; j + 16 <= columns; j += 16)
            for (int k = 12; k >= 0; k -= 4) side = add(multiply(a[j + k + s], b[j + k + s]), side);
        for (; j < columns; j += 4)
            side = add(multiply(load(a, j + s, columns), load(b, j + s, columns)), side);
        side = add(side, from_bits(__shfl_xor_sync(ALL_LANES, bits_of(side), 1)));
        side = add(side, from_bits(__shfl_xor_sync(ALL_LANES, bits_of(side), 2)));
        if (is_one && s == 0) out[r * n + i] = add(side, 0.0f);
    }
}

// out[r][j] = sum over i of m[i][j] * rows[r][i], in the order of i.
__global__ void column_products(const float* m, i64 n, i64 columns, const float* rows, i64 count,
                                float* out) {
    for (i64 at = first_thread(); at < columns * count; at += thread_stride()) {
        const float *a = m + at % columns, *b = rows + at / columns * n;
        float sum = 0.0f, next[64];
        i64 i = 0;
        for (; i + 64 <= n; i += 64) {  // all loads first: each addition depends on the last
#pragma unroll
            for (int k = 0; k < 64; ++k) next[k] = a[(i + k) * columns];
#pragma unroll
            for (int k = 0; k < 64; ++k) sum = add(multiply(next[k], b[i + k]), sum);
        }
        for (; i < n; ++i) sum = add(multiply(a[i * columns], b[i]), sum);
        out[at] = sum;
    }
}

// total[i][j] = sum over r of firsts[r][i] * seconds[r][j], in the order of r.
__global__ void outer(float* total, i64 n, i64 columns, const float* firsts, const float* seconds,
                      i64 count) {
    for (i64 at = first_thread(); at < n * columns; at += thread_stride()) {
        const i64 i = row_of(at, columns, n * columns), j = at - i * columns;
        float sum = 0.0f;
        for (i64 r = 0; r < count; ++r)
            sum = add(sum, multiply(firsts[r * n + i], seconds[r * columns + j]));
        total[at] = sum;
    }
}

}  // extern "C"

// Matrix products for the GPU, a thread an output; a part of cuda_loops.cu, which includes it.
#include "products.h"

#define CPD_SIDE 16  // columns of a block's outputs, and terms that are in shared memory at once
#define CPD_ROWS 8   // rows of a block's outputs

namespace {

enum { CPD_ASCENDING, CPD_COMPENSATED, CPD_PAIRWISE };

__device__ Rounding load_rounding(const int* n) {
    return Rounding{n[0],      n[1],      n[2],      n[3],      n[4],      (u32)n[5],
                    (u32)n[6], (u32)n[7], (u32)n[8], (u32)n[9], (u32)n[10]};
}

__device__ Products load_products(const int* n, Key key) {
    const int* rest = n + 3 * CPD_ROUNDING_NUMBERS;
    return Products{load_rounding(n),
                    load_rounding(n + CPD_ROUNDING_NUMBERS),
                    load_rounding(n + 2 * CPD_ROUNDING_NUMBERS),
                    rest[0],
                    rest[1],
                    rest[2],
                    rest[3],
                    key};
}

__device__ float as_number(float x, float) { return x; }
__device__ double as_number(float x, double) { return widened(x); }
__device__ float as_float(float x) {
    return less(CPD_INF, bits_of(x) & CPD_MAGNITUDE) ? from_bits(lanes(CPD_NAN)) : x;
}
__device__ float as_float(double x) { return as_float(narrowed(x)); }

// The sum of one output, to which terms are added in order.
template <class N, int HOW>
struct Running {
    Sum<N> all, chunk;  // all: the sums of chunks
    N stack[HOW == CPD_PAIRWISE ? 64 : 1];
    int height;
    u64 step;  // of the next addition that belongs to no term
    Key key;
    u64 outputs, index;

    __device__ N term(const Steps<N>& s, N a, N b, i64 i) const {
        u32 random[CPD_PRODUCT + 1] = {};
        draw(s.product, CPD_PRODUCT, CPD_PRODUCT, (u64)i, random);
        N top = {};
        return rounded<CPD_ANY, true>(s.product, multiply(a, b), top, random[CPD_PRODUCT]);
    }
    __device__ void take(const Products& how, const Steps<N>& s, N term, i64 i, i64 k) {
        if (HOW == CPD_PAIRWISE) {
            Sum<N> one = {};
            add(s.sum, one, term, (u64)i);
            stack[height++] = one.total;
            int pairs = i + 1 < k ? __ffsll(i + 1) - 1 : height - 1;
            for (; pairs > 0; --pairs, --height, ++step) {
                Sum<N> both = {stack[height - 2], N{}};
                add(s.sum, both, stack[height - 1], step);
                stack[height - 2] = both.total;
            }
            return;
        }
        add(s.sum, chunk, term, (u64)i);
        if (how.chunk ? (i + 1) % how.chunk && i + 1 < k : i + 1 < k) return;
        if (how.chunk)
            add(s.between, all, chunk.total, step++);
        else
            all = chunk;
        chunk = Sum<N>{};
    }
    __device__ void add(const Rounder<N>& to, Sum<N>& sum, N term, u64 number) const {
        const bool kahan = HOW == CPD_COMPENSATED;
        u32 random[CPD_PRODUCT + 1] = {};
        draw(to, CPD_SUM, kahan ? CPD_REST : CPD_SUM, number, random);
        N top = {};
        add_term<CPD_ANY, true, kahan, true>(to, sum, term, top, random);
    }
    __device__ void draw(const Rounder<N>& to, int first, int last, u64 number, u32* random) const {
        if (to.way != CPD_ROUND_RANDOM) return;
        for (int r = first; r <= last; ++r)
            random[r] = random32(key, (CPD_DRAWS * number + (u64)r) * outputs + index, 0u, 1u);
    }
    __device__ N total() const { return HOW == CPD_PAIRWISE ? stack[0] : all.total; }
};

// CPD_ROWS x CPD_SIDE outputs of one matrix, from row and column on.
template <class N, int HOW>
__device__ void multiply_block(const Products& how, const float* a, const float* b, i64 m, i64 k,
                               i64 n, i64 row, i64 column, float* out, u64 first, u64 outputs) {
    __shared__ float rows[CPD_ROWS][CPD_SIDE], columns[CPD_SIDE][CPD_SIDE];
    const int x = threadIdx.x % CPD_SIDE, y = threadIdx.x / CPD_SIDE;
    const i64 i = row + y, j = column + x;
    const Steps<N> steps = make_steps<N>(how);
    Running<N, HOW> sum = {};
    sum.step = (u64)k, sum.key = how.key, sum.outputs = outputs;
    sum.index = first + (u64)(i * n + j);
    for (i64 start = 0; start < k; start += CPD_SIDE) {
        rows[y][x] = i < m && start + x < k ? a[i * k + start + x] : 0.0f;
        for (int r = y; r < CPD_SIDE; r += CPD_ROWS)
            columns[r][x] = start + r < k && j < n ? b[(start + r) * n + j] : 0.0f;
        __syncthreads();
        for (int t = 0; t < CPD_SIDE && start + t < k; ++t) {
            N left = as_number(rows[y][t], N{}), right = as_number(columns[t][x], N{});
            sum.take(how, steps, sum.term(steps, left, right, start + t), start + t, k);
        }
        __syncthreads();
    }
    if (i < m && j < n) out[i * n + j] = as_float(sum.total());
}

template <class N, int HOW>
__device__ void multiply(const Products& how, const float* a, const float* b, i64 batch, i64 m,
                         i64 k, i64 n, float* out) {
    i64 across = (n + CPD_SIDE - 1) / CPD_SIDE, down = (m + CPD_ROWS - 1) / CPD_ROWS;
    for (i64 t = blockIdx.x; t < batch * across * down; t += gridDim.x) {
        i64 each = t / (across * down), row = t / across % down * CPD_ROWS;
        multiply_block<N, HOW>(how, a + each * m * k, b + each * k * n, m, k, n, row,
                               t % across * CPD_SIDE, out + each * m * n, (u64)(each * m * n),
                               (u64)(batch * m * n));
    }
}

template <class N>
__device__ void multiply_as(const Products& how, const float* a, const float* b, i64 batch, i64 m,
                            i64 k, i64 n, float* out) {
    if (how.pairwise)
        multiply<N, CPD_PAIRWISE>(how, a, b, batch, m, k, n, out);
    else if (how.kahan)
        multiply<N, CPD_COMPENSATED>(how, a, b, batch, m, k, n, out);
    else
        multiply<N, CPD_ASCENDING>(how, a, b, batch, m, k, n, out);
}

}  // namespace

extern "C" {

// how_numbers: of the struct Products without the key. Blocks of CPD_ROWS * CPD_SIDE threads.
__global__ void matmul(const int* how_numbers, u32 key_low, u32 key_high, const float* a,
                       const float* b, i64 batch, i64 m, i64 k, i64 n, float* out) {
    const Products how = load_products(how_numbers, Key{key_low, key_high});
    if (how.arithmetic != CPD_FLOAT32)
        multiply_as<double>(how, a, b, batch, m, k, n, out);
    else
        multiply_as<float>(how, a, b, batch, m, k, n, out);
}

}  // extern "C"

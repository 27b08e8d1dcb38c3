// Sums and products in NumPy's order of additions, a thread a sum; the rest of cuda_loops.cu, which
// includes it. ops/reference.py specifies them.
#include "passes.h"

namespace {

// What is added of a value, exact but for the square of a difference. -ftz=true would flush
// subnormal numbers in a conversion of C++.
__device__ double term(int of, double center, float x) {
    double wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
    if (of == CPD_MAGNITUDES) return fabs(wide);
    if (of == CPD_SQUARES) return (wide - center) * (wide - center);
    return wide;
}

__device__ i64 first_thread() { return (i64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ i64 thread_stride() { return (i64)gridDim.x * blockDim.x; }

// Which of some runs, which end at ends, has value i.
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

}  // namespace

extern "C" {

// Sums of up to 128 values: eight side by side, then these in pairs, then what is left over.
__global__ void leaf_sums(int of, double center, const float* x, const i64* starts,
                          const i64* sizes, i64 leaves, double* sums) {
    for (i64 leaf = first_thread(); leaf < leaves; leaf += thread_stride()) {
        const float* v = x + starts[leaf];
        i64 n = sizes[leaf], i = 0;
        double sum = -0.0;
        if (n >= 8) {
            double side[8];
            for (int k = 0; k < 8; ++k) side[k] = term(of, center, v[k]);
            for (i = 8; i < n - n % 8; i += 8)
                for (int k = 0; k < 8; ++k) side[k] += term(of, center, v[i + k]);
            sum = ((side[0] + side[1]) + (side[2] + side[3])) +
                  ((side[4] + side[5]) + (side[6] + side[7]));
        }
        for (; i < n; ++i) sum += term(of, center, v[i]);
        sums[leaf] = sum;
    }
}

__global__ void multiply_runs(const float* x, i64 n, const float* each, const i64* ends, i64 runs,
                              float* out) {
    for (i64 i = first_thread(); i < n; i += thread_stride())
        out[i] = multiply(x[i], each[run_of(ends, runs, i)]);
}

__global__ void divide_runs(const float* x, i64 n, const float* each, const i64* ends, i64 runs,
                            float* out) {
    for (i64 i = first_thread(); i < n; i += thread_stride())
        asm("div.rn.f32 %0, %1, %2;" : "=f"(out[i]) : "f"(x[i]), "f"(each[run_of(ends, runs, i)]));
}

// out[r][i] = sum over j of m[i][j] * rows[r][j], four sums side by side: of 16 products the last
// four come first, and what is missing at the end is zeros.
__global__ void row_products(const float* m, i64 n, i64 columns, const float* rows, i64 count,
                             float* out) {
    for (i64 at = first_thread(); at < n * count; at += thread_stride()) {
        const float *a = m + at % n * columns, *b = rows + at / n * columns;
        float side[4] = {};
        i64 j = 0;
        for (; j + 16 <= columns; j += 16)
            for (int k = 12; k >= 0; k -= 4)
                for (int s = 0; s < 4; ++s)
                    side[s] = add(multiply(a[j + k + s], b[j + k + s]), side[s]);
        for (; j < columns; j += 4)
            for (int s = 0; s < 4; ++s)
                side[s] = add(multiply(load(a, j + s, columns), load(b, j + s, columns)), side[s]);
        out[at] = add(add(add(side[0], side[1]), add(side[2], side[3])), 0.0f);
    }
}

// out[r][j] = sum over i of m[i][j] * rows[r][i], in the order of i.
__global__ void column_products(const float* m, i64 n, i64 columns, const float* rows, i64 count,
                                float* out) {
    for (i64 at = first_thread(); at < columns * count; at += thread_stride()) {
        const float *a = m + at % columns, *b = rows + at / columns * n;
        float sum = 0.0f;
        for (i64 i = 0; i < n; ++i) sum = add(multiply(a[i * columns], b[i]), sum);
        out[at] = sum;
    }
}

// total[i][j] = sum over r of firsts[r][i] * seconds[r][j], in the order of r.
__global__ void outer(float* total, i64 n, i64 columns, const float* firsts, const float* seconds,
                      i64 count) {
    for (i64 at = first_thread(); at < n * columns; at += thread_stride()) {
        float sum = 0.0f;
        for (i64 r = 0; r < count; ++r)
            sum = add(sum,
                      multiply(firsts[r * n + at / columns], seconds[r * columns + at % columns]));
        total[at] = sum;
    }
}

}  // extern "C"

// Loops between the autoencoder's passes over its blocks, for the CPU: pools of responses, and the
// differences of the reconstruction from the image; a part of cpu_loops.h, which includes it.
#include "pools.h"

namespace {

template <class T>
CPD_FN double sum_of_lanes(Vector<T> x) {
    T sum;
    store_lane_sums<T, 1>(&x, &sum);
    return sum;
}

// A row of pools, for one register of n values of each cell, or all its lanes. sums, slopes: memory
// for a register of each cell.
template <class T, bool SOME>
CPD_TILE_FN double pool_row(const PoolShape& of, const T* r, T* to, i64 n, Vector<T>* sums,
                            Vector<T>* slopes) {
    const i64 cells = (of.columns - 1) * of.step + of.size;
    const Vector<T> epsilon = all_lanes((T)of.epsilon), by = all_lanes((T)of.by);
    for (i64 c = 0; c < cells; ++c) {
        Vector<T> sum = {};
        for (i64 k = 0; k < of.size; ++k) {
            const Vector<T> x = loaded<SOME>(r + k * of.row + c * of.column, n);
            sum = fused(x, x, sum);
        }
        sums[c] = sum, slopes[c] = Vector<T>{};
    }
    Vector<T> total = {};
    for (i64 c = 0; c < of.columns; ++c) {
        Vector<T> pool = epsilon;
        for (i64 k = 0; k < of.size; ++k) pool += sums[c * of.step + k];
        pool = square_root(pool);
        total += pool;
        if (of.pooled) {
            stored<SOME>(to + c * of.to_column, pool, n);
            continue;
        }
        pool = by / pool;
        for (i64 k = 0; k < of.size; ++k) slopes[c * of.step + k] += pool;
    }
    if (!of.pooled)
        for (i64 k = 0; k < of.size; ++k)
            for (i64 c = 0; c < cells; ++c) {
                T* slope = to + k * of.to_row + c * of.to_column;
                stored<SOME>(slope, loaded<SOME>(slope, n) + slopes[c], n);
            }
    if constexpr (SOME)  // the other lanes have pools of zeros
        for (i64 lane = n; lane < lanes_of<T>; ++lane) total[lane] = 0;
    return sum_of_lanes<T>(total);
}

// Returns the sum of pools for n values of each cell; room: two registers for each cell of a row.
template <class T>
double pool_cells(const PoolShape& of, const void* responses, void* out, i64 n, void* room) {
    const i64 all = lanes_of<T>, cells = (of.columns - 1) * of.step + of.size;
    Vector<T>*sums = (Vector<T>*)room, *slopes = sums + cells;
    double sum = 0;
    for (i64 row = 0; row < of.rows; ++row) {
        const T* r = (const T*)responses + row * of.step * of.row;
        T* to = (T*)out + row * (of.pooled ? 1 : of.step) * of.to_row;
        i64 i = 0;
        for (; i + all <= n; i += all)
            sum += pool_row<T, false>(of, r + i, to + i, 0, sums, slopes);
        if (i < n) sum += pool_row<T, true>(of, r + i, to + i, n - i, sums, slopes);
    }
    return sum;
}

template <class T, bool SOME>
CPD_FN void subtract_some(Vector<T> by, const T* x, T* y, i64 n, Vector<T>* squares) {
    const Vector<T> given = loaded<SOME>(x, n), rest = fused(by, given, loaded<SOME>(y, n));
    stored<SOME>(y, rest, n);
    squares[0] = fused(rest, rest, squares[0]), squares[1] = fused(given, given, squares[1]);
}
// again -= by * x; adds the squares of the n differences, and those of x, to sums.
template <class T>
void subtract_row(double by, const void* given, void* again, i64 n, double* sums) {
    const T* x = (const T*)given;
    T* y = (T*)again;
    const Vector<T> factor = all_lanes((T)-by);
    Vector<T> squares[2] = {};
    i64 i = 0;
    for (; i + lanes_of<T> <= n; i += lanes_of<T>)
        subtract_some<T, false>(factor, x + i, y + i, 0, squares);
    if (i < n) subtract_some<T, true>(factor, x + i, y + i, n - i, squares);
    for (int k = 0; k < 2; ++k) sums[k] += sum_of_lanes<T>(squares[k]);
}

}  // namespace

// Loops of matrix products for the CPU; the rest of cpu_loops.h, which includes it.
#include "products.h"

namespace {

// Rows of a that go through a panel together: their sums do not wait for one another.
#if defined(CPD_AVX512)
const int ROWS = 4;
#else
const int ROWS = 2;  // where a group takes two registers or four
#endif
const int LEVELS = 64;  // of a pairwise sum

CPD_FN F each_lane(float x, F) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return from_bits(lanes(bits));
}
CPD_FN D each_lane(float x, D) { return widened(each_lane(x, F{})); }
CPD_FN F number(F x, F) { return x; }
CPD_FN D number(F x, D) { return widened(x); }
// Processors differ in the sign of NaN.
CPD_FN F float_of(F x) {
    return less(lanes(CPD_INF), bits_of(x) & 0x7fffffffu) ? from_bits(lanes(CPD_NAN)) : x;
}
CPD_FN F float_of(D x) { return float_of(narrowed(x)); }

// R rows of a and a panel of b: k rows of CPD_GROUP columns.
struct Part {
    const float *a, *panel;
    i64 k, n;
    u64 index, outputs;
};

template <class N, int R, bool KAHAN>
void sum_ascending(const Products& given, const Part& part, N* totals) {
    const Products how = given;  // copies, which no store can change
    const Part p = part;
    const i64 chunk = how.chunk ? how.chunk : p.k;
    Sum<N> all[R] = {};
    for (i64 first = 0, step = p.k; first < p.k; first += chunk, ++step) {
        Sum<N> sums[R] = {};
        i64 stop = p.k - first < chunk ? p.k : first + chunk;
        for (i64 i = first; i < stop; ++i) {
            N b = number(load(p.panel, i * CPD_GROUP, 0), N{});
            for (int r = 0; r < R; ++r) {
                u64 index = p.index + (u64)(r * p.n);
                N term =
                    term_of(how, each_lane(p.a[r * p.k + i], N{}), b, (u64)i, p.outputs, index);
                add_term<KAHAN>(how, how.sum, sums[r], term, (u64)i, p.outputs, index);
            }
        }
        for (int r = 0; r < R; ++r)
            if (!how.chunk)
                all[r] = sums[r];
            else
                add_term<KAHAN>(how, how.between, all[r], sums[r].total, (u64)step, p.outputs,
                                p.index + (u64)(r * p.n));
    }
    for (int r = 0; r < R; ++r) totals[r] = all[r].total;
}

template <class N, int R, bool>
void sum_pairwise(const Products& given, const Part& part, N* totals) {
    const Products how = given;
    const Part p = part;
    N stack[LEVELS][R] = {};
    int height = 0;
    u64 step = (u64)p.k;
    for (i64 i = 0; i < p.k; ++i) {
        N b = number(load(p.panel, i * CPD_GROUP, 0), N{});
        for (int r = 0; r < R; ++r) {
            u64 index = p.index + (u64)(r * p.n);
            Sum<N> one = {};
            N term = term_of(how, each_lane(p.a[r * p.k + i], N{}), b, (u64)i, p.outputs, index);
            add_term<false>(how, how.sum, one, term, (u64)i, p.outputs, index);
            stack[height][r] = one.total;
        }
        ++height;
        int pairs = i + 1 < p.k ? __builtin_ctzll((u64)i + 1) : height - 1;
        for (; pairs > 0; --pairs, --height, ++step)
            for (int r = 0; r < R; ++r) {
                Sum<N> both = {stack[height - 2][r], N{}};
                add_term<false>(how, how.sum, both, stack[height - 1][r], step, p.outputs,
                                p.index + (u64)(r * p.n));
                stack[height - 2][r] = both.total;
            }
    }
    for (int r = 0; r < R; ++r) totals[r] = stack[0][r];
}

template <class N, int R>
void multiply_rows(const Products& how, const Part& part, i64 columns, float* out) {
    N totals[R];
    auto sum = how.pairwise ? sum_pairwise<N, R, false>
               : how.kahan  ? sum_ascending<N, R, true>
                            : sum_ascending<N, R, false>;
    sum(how, part, totals);
    for (int r = 0; r < R; ++r) {
        F row = float_of(totals[r]);
        memcpy(out + r * part.n, &row, (size_t)columns * sizeof(float));
    }
}

// R: rows that go together while there are as many.
template <class N, int R>
void multiply_panel(const Products& how, Part part, i64 m, i64 columns, float* out) {
    for (i64 i = 0; i < m;) {
        i64 rows = m - i >= R ? R : 1;
        (rows == R ? multiply_rows<N, R> : multiply_rows<N, 1>)(how, part, columns, out);
        i += rows, out += rows * part.n, part.a += rows * part.k,
            part.index += (u64)(rows * part.n);
    }
}

// A panel is k * CPD_GROUP floats to work in.
void matmul(const Products& how, bool wide, const float* a, i64 m, i64 k, const float* b, i64 n,
            i64 column, float* panel, float* out, u64 index, u64 outputs) {
    i64 columns = n - column < CPD_GROUP ? n - column : CPD_GROUP;
    memset(panel, 0, (size_t)(k * CPD_GROUP) * sizeof(float));
    for (i64 i = 0; i < k; ++i)
        memcpy(panel + i * CPD_GROUP, b + i * n + column, (size_t)columns * sizeof(float));
    Part part = {a, panel, k, n, index + (u64)column, outputs};
    (wide ? multiply_panel<D, 1> : multiply_panel<F, ROWS>)(how, part, m, columns, out + column);
}

}  // namespace

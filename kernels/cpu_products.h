// Loops of matrix products for the CPU; a part of cpu_loops.h, which includes it.
#include "products.h"

namespace {

// Rows of a that go through a panel together: their sums are independent.
#if CPD_REGISTER == 64
const int ROWS = 8;
#else
const int ROWS = 4;
#endif
const int LEVELS = 64;  // of a pairwise sum

// Processors differ in the sign of NaN.
template <class N>
CPD_FN void store_row(N x, i64 columns, float* out) {
    auto floats = to_float32(x);
    typedef int Bits CPD_VECTOR(sizeof floats);
    Bits bits = (Bits)floats;
    bits = (bits & (int)CPD_MAGNITUDE) > (int)CPD_INF ? Bits{} + (int)CPD_NAN : bits;
    memcpy(out, &bits, (size_t)columns * sizeof(float));
}

// Rows of a and some columns of a panel of b, which has k rows of CPD_PANEL columns.
struct Part {
    const float *rows[ROWS], *panel;
    i64 k;
    Key key;
    u64 index[ROWS], outputs;  // of the first column; they number random bits
};

// Random bits for one step: for each row those of the roundings CPD_SUM to CPD_PRODUCT.
template <class N>
struct Draws {
    typedef typename Number<N>::Draws Bits;
    enum { lanes = Number<N>::lanes, together = ROWS * lanes };
    Bits of[CPD_PRODUCT + 1][ROWS] = {};
    u32 places[together];  // of the outputs, from that of the first on
    bool apart;            // whether a place may be above 32 bits

    void start(const Part& p) {
        u64 last = 0;
        for (int i = 0; i < together; ++i) {
            last = p.index[i / lanes] - p.index[0] + (u64)(i % lanes);
            places[i] = (u32)last;
        }
        apart = last >> 32;
    }
    // For a rounding of this step: the index of each output of each row, hashed.
    void draw(const Part& p, u64 step, int rounding) {
        typedef typename Number<S>::Draws Many;
        const u64 first = (CPD_DRAWS * step + (u64)rounding) * p.outputs + p.index[0];
        const u32 low = (u32)first, high = (u32)(first >> 32), most = places[together - 1];
        char* random = reinterpret_cast<char*>(of[rounding]);
        if (apart || low + most < low) {
            u32 each[together];
            for (int i = 0; i < together; ++i)
                each[i] = random32(
                    p.key, first - p.index[0] + p.index[i / lanes] + (u64)(i % lanes), 0u, 1);
            memcpy(random, each, sizeof each);
        } else {
            const u32 one = low + first_key(p.key, high);
            const Many two = Many{} + second_key(p.key, high);
#pragma GCC unroll 8
            for (int i = 0; i < together; i += (int)Number<S>::lanes) {
                Many at;
                memcpy(&at, places + i, sizeof at);
                at = hashed(at + one, two);
                memcpy(random + i * (int)sizeof(u32), &at, sizeof at);
            }
        }
    }
    // The bits of a row, by rounding.
    struct Row {
        Bits of[CPD_PRODUCT + 1];
    };
    inline __attribute__((always_inline)) Row row(int r) const {
        return {{of[CPD_SUM][r], of[CPD_TERM][r], of[CPD_GAINED][r], of[CPD_REST][r],
                 of[CPD_PRODUCT][r]}};
    }
    // way: what a loop is compiled for, or CPD_ANY
    inline __attribute__((always_inline)) void step(const Part& p, int product,
                                                    const Rounder<N>& of_product, int sum,
                                                    const Rounder<N>& of_sum, bool kahan,
                                                    u64 number) {
        if (is_random(product, of_product)) draw(p, number, CPD_PRODUCT);
        if (is_random(sum, of_sum))
            for (int rounding = CPD_SUM; rounding <= (kahan ? CPD_REST : CPD_SUM); ++rounding)
                draw(p, number, rounding);
    }
    static bool is_random(int way, const Rounder<N>& to) {
        return (way == CPD_ANY ? to.way : way) == CPD_ROUND_RANDOM;
    }
};

template <class N, int PRODUCT, int SUM, bool ODD, bool KAHAN, bool CHECK>
void sum_ascending(const Products& how, const Steps<N>& given, const Part& part, N* totals,
                   Tops<N>& largest) {
    const Steps<N> s = given;  // copies, which no store can change
    const Part p = part;
    Tops<N> tops = largest;
    Draws<N> draws;
    draws.start(p);
    const i64 chunk = how.chunk ? how.chunk : p.k;
    Sum<N> all[ROWS] = {};
    for (i64 first = 0, step = p.k; first < p.k; first += chunk, ++step) {
        Sum<N> sums[ROWS] = {};
        i64 stop = p.k - first < chunk ? p.k : first + chunk;
        for (i64 i = first; i < stop; ++i) {
            draws.step(p, PRODUCT, s.product, SUM, s.sum, KAHAN, (u64)i);
            N b = read(p.panel + i * CPD_PANEL, N{});
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                N product = multiply(each(p.rows[r] + i, N{}), b);
                const auto drawn = draws.row(r);
                N term = rounded<PRODUCT, CHECK>(s.product, product, tops.product,
                                                 drawn.of[CPD_PRODUCT]);
                add_term<SUM, ODD, KAHAN, CHECK>(s.sum, sums[r], term, tops.sum, drawn.of);
            }
        }
        if (how.chunk) draws.step(p, CPD_AS_IS, s.product, CPD_ANY, s.between, KAHAN, (u64)step);
        for (int r = 0; r < ROWS; ++r)
            if (!how.chunk)
                all[r] = sums[r];
            else
                add_term<CPD_ANY, ODD, KAHAN, true>(s.between, all[r], sums[r].total, tops.sum,
                                                    draws.row(r).of);
    }
    for (int r = 0; r < ROWS; ++r) totals[r] = all[r].total;
    largest = tops;
}

template <class N, int PRODUCT, int SUM, bool ODD, bool, bool CHECK>
void sum_pairwise(const Products&, const Steps<N>& given, const Part& part, N* totals,
                  Tops<N>& largest) {
    const Steps<N> s = given;
    const Part p = part;
    Tops<N> tops = largest;
    Draws<N> draws;
    draws.start(p);
    N stack[LEVELS][ROWS] = {};
    int height = 0;
    u64 step = (u64)p.k;
    for (i64 i = 0; i < p.k; ++i) {
        draws.step(p, PRODUCT, s.product, SUM, s.sum, false, (u64)i);
        N b = read(p.panel + i * CPD_PANEL, N{});
#pragma GCC unroll 8
        for (int r = 0; r < ROWS; ++r) {
            Sum<N> one = {};
            N product = multiply(each(p.rows[r] + i, N{}), b);
            const auto drawn = draws.row(r);
            N term =
                rounded<PRODUCT, CHECK>(s.product, product, tops.product, drawn.of[CPD_PRODUCT]);
            add_term<SUM, ODD, false, CHECK>(s.sum, one, term, tops.sum, drawn.of);
            stack[height][r] = one.total;
        }
        ++height;
        int pairs = i + 1 < p.k ? __builtin_ctzll((u64)i + 1) : height - 1;
        for (; pairs > 0; --pairs, --height, ++step) {
            draws.step(p, CPD_AS_IS, s.product, SUM, s.sum, false, step);
#pragma GCC unroll 8
            for (int r = 0; r < ROWS; ++r) {
                Sum<N> both = {stack[height - 2][r], N{}};
                add_term<SUM, ODD, false, CHECK>(s.sum, both, stack[height - 1][r], tops.sum,
                                                 draws.row(r).of);
                stack[height - 2][r] = both.total;
            }
        }
    }
    for (int r = 0; r < ROWS; ++r) totals[r] = stack[0][r];
    largest = tops;
}

template <class N>
using SumOf = void (*)(const Products&, const Steps<N>&, const Part&, N*, Tops<N>&);

// Loops for one pair of roundings, unchecked and checked.
template <class N>
struct Loop {
    int product, sum, arithmetic;
    SumOf<N> ascending[2], kahan[2], pairwise[2];
};

// Compensated and pairwise sums have loops of their own only if all roundings are to nearest. Loops
// that choose the way at run time always check.
template <class N, int PRODUCT, int SUM, int ARITHMETIC>
constexpr Loop<N> loops_for() {
    constexpr bool odd = ARITHMETIC >= CPD_FLOAT64_ODD, any = SUM == CPD_ANY;
    constexpr bool nearest = PRODUCT == CPD_ROUND_NEAREST && SUM == CPD_ROUND_NEAREST;
    constexpr bool to_odd = !nearest && ARITHMETIC != CPD_FLOAT32;
    constexpr int WAY = nearest ? (int)CPD_ROUND_NEAREST : (int)CPD_ANY;
    return {PRODUCT,
            SUM,
            ARITHMETIC,
            {sum_ascending<N, PRODUCT, SUM, odd, false, any>,
             sum_ascending<N, PRODUCT, SUM, odd, false, true>},
            {sum_ascending<N, WAY, WAY, to_odd, true, !nearest>,
             sum_ascending<N, WAY, WAY, to_odd, true, true>},
            {sum_pairwise<N, WAY, WAY, to_odd, false, !nearest>,
             sum_pairwise<N, WAY, WAY, to_odd, false, true>}};
}

// The first that fits is used: CPD_ANY fits all, and also rounds exact sums to odd.
constexpr Loop<S> LOOPS_S[] = {
    loops_for<S, CPD_AS_IS, CPD_AS_IS, CPD_FLOAT32>(),
    loops_for<S, CPD_ROUND_NEAREST, CPD_ROUND_NEAREST, CPD_FLOAT32>(),
    loops_for<S, CPD_AS_IS, CPD_ROUND_NEAREST, CPD_FLOAT32>(),
    loops_for<S, CPD_ANY, CPD_ANY, CPD_FLOAT32>(),
    loops_for<S, CPD_ROUND_FLOOR, CPD_ROUND_FLOOR, CPD_FLOAT32_ODD>(),
    loops_for<S, CPD_AS_IS, CPD_ROUND_FLOOR, CPD_FLOAT32_ODD>(),
    loops_for<S, CPD_ROUND_RANDOM, CPD_ROUND_RANDOM, CPD_FLOAT32_ODD>(),
    loops_for<S, CPD_AS_IS, CPD_ROUND_RANDOM, CPD_FLOAT32_ODD>(),
    loops_for<S, CPD_ROUND_ODD, CPD_ROUND_ODD, CPD_FLOAT32_ODD>(),
    loops_for<S, CPD_ANY, CPD_ANY, CPD_FLOAT32_ODD>(),
};
constexpr Loop<D> LOOPS_D[] = {
    loops_for<D, CPD_ROUND_NEAREST, CPD_ROUND_NEAREST, CPD_FLOAT64>(),
    loops_for<D, CPD_AS_IS, CPD_ROUND_NEAREST, CPD_FLOAT64>(),
    loops_for<D, CPD_AS_IS, CPD_ROUND_NEAREST, CPD_FLOAT64_ODD>(),
    loops_for<D, CPD_ROUND_FLOOR, CPD_ROUND_FLOOR, CPD_FLOAT64_ODD>(),
    loops_for<D, CPD_AS_IS, CPD_ROUND_FLOOR, CPD_FLOAT64_ODD>(),
    loops_for<D, CPD_ROUND_RANDOM, CPD_ROUND_RANDOM, CPD_FLOAT64_ODD>(),
    loops_for<D, CPD_AS_IS, CPD_ROUND_RANDOM, CPD_FLOAT64_ODD>(),
    loops_for<D, CPD_ROUND_ODD, CPD_ROUND_ODD, CPD_FLOAT64_ODD>(),
    loops_for<D, CPD_ANY, CPD_ANY, CPD_FLOAT64_ODD>(),
};

bool fits(int way, int wanted) { return way == CPD_ANY || way == wanted; }

template <class N>
const SumOf<N>* loop_of(const Products& how, const Loop<N>* loops) {
    while (!(fits(loops->product, how.product.way) && fits(loops->sum, how.sum.way) &&
             how.arithmetic <= loops->arithmetic))
        ++loops;
    return how.pairwise ? loops->pairwise : how.kahan ? loops->kahan : loops->ascending;
}

// The power of two from which on a number may be above the largest of the format.
template <class N>
CPD_FN bool is_below(N top, const Rounding& r) {
    if (r.way == CPD_AS_IS) return true;
    auto reached = more(raw(top), bits_from<N>(r.max & CPD_INF) - 1);
    for (int lane = 0; lane < (int)Number<N>::lanes; ++lane)
        if (reached[lane]) return false;
    return true;
}

// Rows go through a panel unchecked first. If a number was too large they go again, checked, as do
// all that follow.
template <class N>
void multiply_panel(const Products& how, const Loop<N>* loops, const float* a, i64 m, i64 k,
                    const float* panel, i64 columns, i64 n, float* out, u64 index, u64 outputs) {
    const SumOf<N>* loop = loop_of(how, loops);
    const Steps<N> steps = make_steps<N>(how);
    bool checked = false;
    for (i64 row = 0; row < m; row += ROWS) {
        Part part;
        part.panel = panel, part.k = k, part.key = how.key, part.outputs = outputs;
        for (int r = 0; r < ROWS; ++r) {  // beyond the last row, the last row is repeated
            i64 i = row + r < m ? row + r : m - 1;
            part.rows[r] = a + i * k, part.index[r] = index + (u64)(i * n);
        }
        N totals[ROWS];
        Tops<N> tops = {};
        loop[checked](how, steps, part, totals, tops);
        if (!is_below(tops.product, how.product) || !is_below(tops.sum, how.sum))
            checked = true, loop[1](how, steps, part, totals, tops);
        for (int r = 0; r < ROWS && row + r < m; ++r)
            store_row(totals[r], columns, out + (row + r) * n);
    }
}

template <class N>
void multiply_columns(const Products& how, const Loop<N>* loops, const float* a, i64 m, i64 k,
                      const float* panel, i64 columns, i64 n, float* out, u64 index, u64 outputs) {
    const i64 lanes = Number<N>::lanes;
    for (i64 c = 0; c < columns; c += lanes)
        multiply_panel(how, loops, a, m, k, panel + c, columns - c < lanes ? columns - c : lanes, n,
                       out + c, index + (u64)c, outputs);
}

// A panel is k * CPD_PANEL floats to work in.
void matmul(const Products& how, const float* a, i64 m, i64 k, const float* b, i64 n, i64 column,
            float* panel, float* out, u64 index, u64 outputs) {
    i64 columns = n - column < CPD_PANEL ? n - column : CPD_PANEL;
    memset(panel, 0, (size_t)(k * CPD_PANEL) * sizeof(float));
    for (i64 i = 0; i < k; ++i)
        memcpy(panel + i * CPD_PANEL, b + i * n + column, (size_t)columns * sizeof(float));
    if (how.arithmetic == CPD_FLOAT32 || how.arithmetic == CPD_FLOAT32_ODD)
        multiply_columns(how, LOOPS_S, a, m, k, panel, columns, n, out + column,
                         index + (u64)column, outputs);
    else
        multiply_columns(how, LOOPS_D, a, m, k, panel, columns, n, out + column,
                         index + (u64)column, outputs);
}

}  // namespace

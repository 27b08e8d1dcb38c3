// Loops of optimisers' steps for the CPU; a part of cpu_loops.h, which includes it.
#include "steps.h"

namespace {

const int SUM_LANES = 16;    // value i of a row's part is added to sum i % SUM_LANES
const int STEP_CHUNK = 64;   // values of an array that are prefetched at once
const int STEP_AHEAD = 512;  // values by which data is prefetched

CPD_FN i64 chunk_of(i64 left) { return left < STEP_CHUNK ? left : STEP_CHUNK; }

// Prefetches a chunk of values: the processor's own prefetching stops at each page.
CPD_FN void expect_chunk(const float* x) {
    for (int i = 0; i < STEP_CHUNK; i += 16) expect(x + STEP_AHEAD + i);
}

// Sums of products of two float32, which are exact in float64.
struct ProductSum {
    enum { lanes = CPD_REGISTER / 8, registers = SUM_LANES / lanes };
    D parts[registers] = {};

    CPD_INLINE void add_group(const float* a, const float* b) {
#pragma GCC unroll 8
        for (int r = 0; r < registers; ++r) {
            HalfF x, y;
            memcpy(&x, a + r * lanes, sizeof x);
            memcpy(&y, b + r * lanes, sizeof y);
            parts[r] = parts[r] + widened(x) * widened(y);
        }
    }
    CPD_INLINE double total() const {
        double sums[SUM_LANES];
        memcpy(sums, parts, sizeof sums);
        for (int half = SUM_LANES / 2; half; half /= 2)
            for (int i = 0; i < half; ++i) sums[i] = sums[i] + sums[i + half];
        return sums[0];
    }
};

// The values after whole groups of n, padded with zeros.
struct LastGroup {
    float values[SUM_LANES] = {};
    CPD_INLINE LastGroup(const float* x, i64 n) {
        memcpy(values, x + n / SUM_LANES * SUM_LANES, (size_t)(n % SUM_LANES) * sizeof(float));
    }
};

// Adds sums over n values: for CPD_ADAMP all four, for others those of w and w, and of g and g.
template <bool ALL>
struct RowSums {
    ProductSum weights, gradients, both, steps;

    CPD_INLINE void add_group(const float* w, const float* g, const float* s) {
        weights.add_group(w, w);
        gradients.add_group(g, g);
        if (ALL) both.add_group(w, g), steps.add_group(w, s);
    }
    template <bool FETCH>
    CPD_INLINE void add_values(const float* w, const float* g, const float* s, i64 n) {
        RowSums sums = *this;  // a copy, which stays in registers
        for (i64 i = 0; i + SUM_LANES <= n; i += SUM_LANES) {
            if (FETCH) expect(w + i + STEP_AHEAD), expect(g + i + STEP_AHEAD);
            sums.add_group(w + i, g + i, s + i);
        }
        if (n % SUM_LANES) {
            LastGroup last_w(w, n), last_g(g, n), last_s(s, n);
            sums.add_group(last_w.values, last_g.values, last_s.values);
        }
        *this = sums;
    }
    CPD_INLINE LayerSums totals() const {
        return {weights.total(), gradients.total(), both.total(), steps.total()};
    }
};

void square_sums(const float* w, const float* g, i64 n, LayerSums* sums) {
    RowSums<false> found;
    found.add_values<true>(w, g, g, n);
    *sums = found.totals();
}

// Calls body(arrays) with the arrays at each group of n values; the remainder is copied, and the
// first WRITTEN arrays are copied back.
template <int WRITTEN, int COUNT, class Body>
CPD_FN void each_group(const float* const (&arrays)[COUNT], i64 n, const Body& body) {
    float* at[COUNT];
    for (int k = 0; k < COUNT; ++k) at[k] = const_cast<float*>(arrays[k]);
    i64 i = 0;
    for (; i + CPD_GROUP <= n; i += CPD_GROUP) {
        body(at);
#pragma GCC unroll 5
        for (int k = 0; k < COUNT; ++k) at[k] += CPD_GROUP;
    }
    if (i == n) return;
    const size_t left = (size_t)(n - i) * sizeof(float);
    float values[COUNT][CPD_GROUP] = {}, *rest[COUNT];
    for (int k = 0; k < COUNT; ++k) rest[k] = (float*)memcpy(values[k], at[k], left);
    body(rest);
    for (int k = 0; k < WRITTEN; ++k) memcpy(at[k], values[k], left);
}

CPD_FN F read(const float* x) { return load(x, 0, CPD_GROUP); }
CPD_FN void write(float* x, F value) { store(x, 0, CPD_GROUP, value); }

void momentum_step(const Momentum& by, float* w, const float* g, float* m, i64 n) {
    const F beta = from_float(by.beta), a = from_float(by.a), b = from_float(by.b),
            c = from_float(by.c);
    for (i64 i = 0; i < n; i += STEP_CHUNK) {
        expect_chunk(w + i), expect_chunk(g + i), expect_chunk(m + i);
        each_group<2>({w + i, m + i, g + i}, chunk_of(n - i), [=](float* const* x) {
            F weight = read(x[0]);
            F next = beta * read(x[1]) + (a * read(x[2]) + c * weight);
            write(x[0], weight - b * next);
            write(x[1], next);
        });
    }
}

// Moments with the same numbers in all lanes.
struct Adam {
    F beta1, gain1, beta2, gain2, first, second, eps, scale;

    CPD_INLINE explicit Adam(const Moments& f)
        : beta1(from_float(f.beta1)),
          gain1(from_float(f.gain1)),
          beta2(from_float(f.beta2)),
          gain2(from_float(f.gain2)),
          first(from_float(f.first)),
          second(from_float(f.second)),
          eps(from_float(f.eps)),
          scale(from_float(f.scale)) {}
    CPD_INLINE F step(F m, F v) const {
        F below = square_root(v) * second + eps, found = m * first / below;
        return from_bits(bits_of(found) & (U)(below != F{}));
    }
    // Writes the new moments, and returns the step.
    CPD_INLINE F next(float* m, float* v, F g) const {
        g = scale * g;
        F first_moment = beta1 * read(m) + gain1 * g;
        F second_moment = beta2 * read(v) + gain2 * g * g;
        write(m, first_moment), write(v, second_moment);
        return step(first_moment, second_moment);
    }
};

// The new moments of n values; sums: of weights and of steps with decay.
void lamb_sums(const Moments& by, float decay, const float* w, const float* g, float* m, float* v,
               i64 n, LayerSums* sums) {
    const Adam adam(by);
    const F share = from_float(decay);
    RowSums<false> found;
    alignas(64) float steps[STEP_CHUNK];
    for (i64 i = 0; i < n; i += STEP_CHUNK) {
        const i64 some = chunk_of(n - i);
        expect_chunk(w + i), expect_chunk(g + i), expect_chunk(m + i), expect_chunk(v + i);
        each_group<3>({steps, m + i, v + i, g + i, w + i}, some, [=](float* const* x) {
            write(x[0], adam.next(x[1], x[2], read(x[3])) + share * read(x[4]));
        });
        found.add_values<false>(w + i, steps, steps, some);
    }
    *sums = found.totals();
}

// The new moments of n values; sums: all four.
void adamp_sums(const Moments& by, const float* w, const float* g, float* m, float* v, i64 n,
                LayerSums* sums) {
    const Adam adam(by);
    RowSums<true> found;
    alignas(64) float steps[STEP_CHUNK];
    for (i64 i = 0; i < n; i += STEP_CHUNK) {
        const i64 some = chunk_of(n - i);
        expect_chunk(w + i), expect_chunk(g + i), expect_chunk(m + i), expect_chunk(v + i);
        each_group<3>({steps, m + i, v + i, g + i}, some,
                      [=](float* const* x) { write(x[0], adam.next(x[1], x[2], read(x[3]))); });
        found.add_values<false>(w + i, g + i, steps, some);
    }
    *sums = found.totals();
}

void move_weights(const Moments& by, const LayerMove& move, float* w, const float* m,
                  const float* v, i64 n) {
    const Adam adam(by);
    const F keep = from_float(move.keep), rate = from_float(move.rate),
            along = from_float(move.along);
    for (i64 i = 0; i < n; i += STEP_CHUNK) {
        expect_chunk(w + i), expect_chunk(m + i), expect_chunk(v + i);
        each_group<1>({w + i, m + i, v + i}, chunk_of(n - i), [=](float* const* x) {
            F weight = read(x[0]);
            F step = adam.step(read(x[1]), read(x[2])) + along * weight;
            write(x[0], keep * weight - rate * step);
        });
    }
}

}  // namespace

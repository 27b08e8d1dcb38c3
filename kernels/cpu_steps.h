// Loops of optimisers' steps for the CPU; the rest of cpu_loops.h, which includes it.
#include "steps.h"

namespace {

const int SUM_LANES = 16;    // value i of a row's part is added to sum i % SUM_LANES
const int STEP_CHUNK = 512;  // values between two looks at the same memory, which L1 keeps

// Of products of two float32, which are exact in float64.
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

// What is left of n values after whole groups, and zeros.
struct LastGroup {
    float values[SUM_LANES] = {};
    CPD_INLINE LastGroup(const float* x, i64 n) {
        memcpy(values, x + n / SUM_LANES * SUM_LANES, (size_t)(n % SUM_LANES) * sizeof(float));
    }
};

// Add sums over n values: CPD_ADAMP's all four, of others of w and w, and of g and g.
template <bool ALL>
struct RowSums {
    ProductSum weights, gradients, both, steps;

    CPD_INLINE void add_group(const float* w, const float* g, const float* s) {
        weights.add_group(w, w);
        gradients.add_group(g, g);
        if (ALL) both.add_group(w, g), steps.add_group(w, s);
    }
    CPD_INLINE void add_values(const float* w, const float* g, const float* s, i64 n) {
        RowSums sums = *this;  // a copy, which stays in registers
        for (i64 i = 0; i + SUM_LANES <= n; i += SUM_LANES) sums.add_group(w + i, g + i, s + i);
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
    found.add_values(w, g, g, n);
    *sums = found.totals();
}

void momentum_step(const Momentum& by, float* __restrict w, const float* __restrict g,
                   float* __restrict m, i64 n) {
    const Momentum f = by;
    for (i64 i = 0; i < n; ++i) {
        float next = f.beta * m[i] + (f.a * g[i] + f.c * w[i]);
        m[i] = next;
        w[i] = w[i] - f.b * next;
    }
}

CPD_FN float adam_step(const Moments& f, float m, float v) {
    float below = __builtin_sqrtf(v) * f.second + f.eps, step = m * f.first / below;
    return below == 0 ? 0.0f : step;
}

CPD_FN void next_moments(const Moments& f, const float* __restrict g, float* __restrict m,
                         float* __restrict v, float* __restrict steps, i64 n) {
    for (i64 i = 0; i < n; ++i) {
        float slope = f.scale * g[i];
        float first = f.beta1 * m[i] + f.gain1 * slope;
        float second = f.beta2 * v[i] + f.gain2 * slope * slope;
        m[i] = first, v[i] = second;
        steps[i] = adam_step(f, first, second);
    }
}

CPD_FN void add_decay(float decay, const float* __restrict w, float* __restrict steps, i64 n) {
    for (i64 i = 0; i < n; ++i) steps[i] = steps[i] + decay * w[i];
}

// The new moments of n values; sums: of weights and of steps with decay.
void lamb_sums(const Moments& by, float decay, const float* w, const float* g, float* m, float* v,
               i64 n, LayerSums* sums) {
    const Moments f = by;
    RowSums<false> found;
    alignas(64) float steps[STEP_CHUNK];
    for (i64 i = 0; i < n; i += STEP_CHUNK) {
        i64 some = n - i < STEP_CHUNK ? n - i : STEP_CHUNK;
        next_moments(f, g + i, m + i, v + i, steps, some);
        add_decay(decay, w + i, steps, some);
        found.add_values(w + i, steps, steps, some);
    }
    *sums = found.totals();
}

// The new moments of n values; sums: all four.
void adamp_sums(const Moments& by, const float* w, const float* g, float* m, float* v, i64 n,
                LayerSums* sums) {
    const Moments f = by;
    RowSums<true> found;
    alignas(64) float steps[STEP_CHUNK];
    for (i64 i = 0; i < n; i += STEP_CHUNK) {
        i64 some = n - i < STEP_CHUNK ? n - i : STEP_CHUNK;
        next_moments(f, g + i, m + i, v + i, steps, some);
        found.add_values(w + i, g + i, steps, some);
    }
    *sums = found.totals();
}

void move_weights(const Moments& by, const LayerMove& move, float* __restrict w,
                  const float* __restrict m, const float* __restrict v, i64 n) {
    const Moments f = by;
    const LayerMove how = move;
    for (i64 i = 0; i < n; ++i) {
        float step = adam_step(f, m[i], v[i]) + how.along * w[i];
        w[i] = how.keep * w[i] - how.rate * step;
    }
}

}  // namespace

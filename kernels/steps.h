// Steps of optimisers that adapt to layers, except their loops over values: the parameters of a
// step from a layer's sums and numbers. ops/steps.py specifies them.
#ifndef CPD_STEPS_H
#define CPD_STEPS_H

#include <float.h>
#include <math.h>

#include "cast.h"

#define CPD_PART 32768  // values of a row whose products are summed at a time

enum { CPD_LARS, CPD_LARC, CPD_NOVOGRAD, CPD_LAMB, CPD_ADAMP, CPD_RULES };

// Of a layer, in the order of Numbers of ops/steps.py.
struct LayerNumbers {
    double rate, decay, beta1, beta2, eps, adapts, trust, first, second, scale, most, delta, share,
        norm;
};

// m = beta * m + (a * g + c * w), w = w - b * m
struct Momentum {
    float beta, a, b, c;
};

// m = beta1 * m + gain1 * g, v = beta2 * v + (gain2 * g) * g, for g times scale; the step is
// (m * first) / (sqrt(v) * second + eps), and 0 instead of a division by 0.
struct Moments {
    float beta1, gain1, beta2, gain2, first, second, eps, scale;
};

// w = keep * w - rate * (step + along * w)
struct LayerMove {
    float keep, rate, along;
};

// Sums over a row: of weights and weights, gradients and gradients, and so on, as a rule needs
// them.
struct LayerSums {
    double weights, gradients, both, steps;
};

inline Momentum lars_of(const LayerNumbers& l, const LayerSums& sums) {
    double ratio = 1;
    if (l.adapts) {
        double weights = sqrt(sums.weights), gradients = sqrt(sums.gradients);
        double above = l.trust * weights;
        double below = gradients > 0 ? gradients + l.decay * weights : gradients;
        if (above * below != 0) ratio = above / below;
    }
    double rate = l.rate * ratio;
    return {(float)l.beta1, (float)rate, 1.0f, (float)(rate * l.decay)};
}

inline Momentum larc_of(const LayerNumbers& l, const LayerSums& sums) {
    double share = 1;
    if (l.adapts) {
        double weights = sqrt(sums.weights), gradients = sqrt(sums.gradients);
        double above = l.trust * weights;
        double below = gradients > 0 ? gradients + l.decay * weights : gradients;
        double local = above > 0 && below > 0 ? above / below : l.rate;
        share = l.rate > 0 ? local / l.rate : 0;
        if (share > 1) share = 1;
    }
    return {(float)l.beta1, (float)share, (float)l.rate, (float)(share * l.decay)};
}

// Also writes the layer's norm.
inline Momentum novograd_of(LayerNumbers& l, const LayerSums& sums) {
    double now = sqrt(sums.gradients);
    if (l.norm >= 0) now = sqrt(l.beta2 * (l.norm * l.norm) + (1 - l.beta2) * sums.gradients);
    l.norm = (float)now;
    double below = l.norm + l.eps, a = below == 0 ? 0 : 1 / below;
    if (a > FLT_MAX) a = FLT_MAX;
    return {(float)l.beta1, (float)a, (float)l.rate, (float)l.decay};
}

inline Moments moments_of(const LayerNumbers& l) {
    return {(float)l.beta1, (float)(1 - l.beta1), (float)l.beta2, (float)(1 - l.beta2),
            (float)l.first, (float)l.second,      (float)l.eps,   (float)l.scale};
}

// sums.gradients: of the steps with decay
inline LayerMove lamb_of(const LayerNumbers& l, const LayerSums& sums) {
    double ratio = 1;
    if (l.adapts) {
        double weights = sqrt(sums.weights), steps = sqrt(sums.gradients);
        if (weights * steps != 0) ratio = weights / steps;
        if (ratio > l.most) ratio = l.most;
    }
    return {1.0f, (float)(l.rate * ratio), (float)l.decay};
}

// Whether a step is free along these weights of n values.
inline bool is_free(const LayerNumbers& l, const LayerSums& sums, i64 n) {
    double lengths = sqrt(sums.weights) * sqrt(sums.gradients);
    if (lengths < DBL_MIN) lengths = DBL_MIN;
    return fabs(sums.both) / lengths < l.delta / sqrt((double)n);
}

// Of weights along which the step is free, or not; free rows are all of a layer, or none.
inline LayerMove adamp_of(const LayerNumbers& l, const LayerSums& sums, bool free) {
    double along = free && sums.weights != 0 ? sums.steps / sums.weights : 0;
    if (along > FLT_MAX) along = FLT_MAX;
    if (along < -FLT_MAX) along = -FLT_MAX;
    double decay = free ? l.decay * l.share : l.decay;
    return {(float)(1 - l.rate * decay), (float)l.rate, (float)-along};
}

#endif

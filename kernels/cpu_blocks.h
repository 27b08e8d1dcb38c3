// Loops of the autoencoder's filters for the CPU, block by block; a part of cpu_loops.h, which
// includes it. Sums are in another order for each width of registers: last bits differ.
#include <cmath>

#include "blocks.h"

namespace {

template <class T>
struct VectorOf;
template <>
struct VectorOf<float> {
    typedef F Type;
    typedef EachLane Each;
};
template <>
struct VectorOf<double> {
    typedef D Type;
    typedef EachOfHalf Each;
};
template <class T>
using Vector = typename VectorOf<T>::Type;
template <class T>
constexpr int lanes_of = CPD_REGISTER / (int)sizeof(T);
// The sums of a tile fill most registers: of ACROSS images, or filters, by DOWN others.
template <class T>
constexpr int ACROSS = CPD_REGISTER == 64 ? 8
                       : lanes_of<T> < 4  ? lanes_of<T>
                                          : 4;
const int DOWN = 3;

// a * b + c, rounded once if the processor can.
CPD_FN F fused(F a, F b, F c) {
#if CPD_REGISTER == 64
    return _mm512_fmadd_ps(a, b, c);
#elif CPD_REGISTER == 32
    return _mm256_fmadd_ps(a, b, c);
#else
    return a * b + c;
#endif
}
CPD_FN D fused(D a, D b, D c) {
#if CPD_REGISTER == 64
    return _mm512_fmadd_pd(a, b, c);
#elif CPD_REGISTER == 32
    return _mm256_fmadd_pd(a, b, c);
#else
    return a * b + c;
#endif
}

// Not 0 + x, which differs for x = -0, so that g++ would add instead of only loading.
template <class T>
CPD_FN Vector<T> all_lanes(T x) {
    return x - Vector<T>{};
}

// Keeps g++ from loading a value anew for each product: loads would then take longer than products.
template <class V>
CPD_FN V in_register(V x) {
#if CPD_REGISTER == 64
    asm("" : "+v"(x));
#elif defined(CPD_X86)
    asm("" : "+x"(x));
#endif
    return x;
}

// The first n values from x on, 1 to all lanes, followed by zeros.
CPD_FN F some_of(const float* x, i64 n) {
#if CPD_REGISTER == 64
    return _mm512_maskz_loadu_ps((__mmask16)((1u << n) - 1), x);
#elif CPD_REGISTER == 32
    return _mm256_maskload_ps(x, (__m256i)((I)lane_numbers() < (int)n));
#else
    F found = {};
    for (i64 i = 0; i < n; ++i) found[i] = x[i];
    return found;
#endif
}
CPD_FN D some_of(const double* x, i64 n) {
#if CPD_REGISTER == 64
    return _mm512_maskz_loadu_pd((__mmask8)((1u << n) - 1), x);
#elif CPD_REGISTER == 32
    return _mm256_maskload_pd(x, (__m256i)(DBits{0, 1, 2, 3} < n));
#else
    D found = {};
    for (i64 i = 0; i < n; ++i) found[i] = x[i];
    return found;
#endif
}
CPD_FN void write_some(float* x, F values, i64 n) {
#if CPD_REGISTER == 64
    _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), values);
#elif CPD_REGISTER == 32
    _mm256_maskstore_ps(x, (__m256i)((I)lane_numbers() < (int)n), values);
#else
    for (i64 i = 0; i < n; ++i) x[i] = values[i];
#endif
}
CPD_FN void write_some(double* x, D values, i64 n) {
#if CPD_REGISTER == 64
    _mm512_mask_storeu_pd(x, (__mmask8)((1u << n) - 1), values);
#elif CPD_REGISTER == 32
    _mm256_maskstore_pd(x, (__m256i)(DBits{0, 1, 2, 3} < n), values);
#else
    for (i64 i = 0; i < n; ++i) x[i] = values[i];
#endif
}

// SOME: only the first n values; otherwise all lanes.
template <bool SOME, class T>
CPD_FN Vector<T> loaded(const T* x, i64 n) {
    if constexpr (SOME) return some_of(x, n);
    Vector<T> found;
    memcpy(&found, x, sizeof found);
    return found;
}
template <bool SOME, class T>
CPD_FN void stored(T* x, Vector<T> values, i64 n) {
    if constexpr (SOME) return write_some(x, values, n);
    memcpy(x, &values, sizeof values);
}

// Lanes whose number has the bit STEP are sums of two of b, the others of a.
template <int STEP, class V, int... LANE>
CPD_FN V folded(V a, V b, Numbers<LANE...>) {
    constexpr int all = sizeof...(LANE);
    return __builtin_shufflevector(a, b, (LANE & STEP ? all + LANE : LANE)...) +
           __builtin_shufflevector(a, b, (LANE & STEP ? all + (LANE ^ STEP) : LANE ^ STEP)...);
}
// Writes the sum of the lanes of each of C vectors.
template <class T, int C>
CPD_FN void store_lane_sums(const Vector<T>* sums, T* out) {
    typedef typename VectorOf<T>::Each Each;
    constexpr int all = lanes_of<T>;
    Vector<T> v[C];
#pragma GCC unroll 8
    for (int i = 0; i < C; ++i) v[i] = sums[i];
    if constexpr (C > 1)
#pragma GCC unroll 4
        for (int i = 0; i < C; i += 2) v[i] = folded<1>(v[i], v[i + 1], Each{});
    if constexpr (C > 2)
#pragma GCC unroll 2
        for (int i = 0; i < C; i += 4) v[i] = folded<2>(v[i], v[i + 2], Each{});
    if constexpr (C > 4) v[0] = folded<4>(v[0], v[4], Each{});
    if constexpr (C < 2 && all > 1) v[0] = folded<1>(v[0], v[0], Each{});
    if constexpr (C < 4 && all > 2) v[0] = folded<2>(v[0], v[0], Each{});
    if constexpr (C < 8 && all > 4) v[0] = folded<4>(v[0], v[0], Each{});
    if constexpr (all > 8) v[0] = folded<8>(v[0], v[0], Each{});
    memcpy(out, v, C * sizeof(T));
}

// out[r * row + c] = the sum of w[r][i] x[c][i]; w: R rows of n; x: C rows of width, zeros from n
// on.
template <class T, int R, int C>
CPD_TILE_FN void dots(const T* w, i64 n, const T* x, i64 width, T* out, i64 row) {
    Vector<T> sums[R][C] = {};
    i64 i = 0;
    for (; i + lanes_of<T> <= n; i += lanes_of<T>) {
        Vector<T> rows[R];
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) rows[r] = loaded<false>(w + r * n + i, 0);
#pragma GCC unroll 8
        for (int c = 0; c < C; ++c) {
            const Vector<T> image = in_register(loaded<false>(x + c * width + i, 0));
#pragma GCC unroll 8
            for (int r = 0; r < R; ++r) sums[r][c] = fused(rows[r], image, sums[r][c]);
        }
    }
    if (i < n) {
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector<T> row = some_of(w + r * n + i, n - i);
#pragma GCC unroll 8
            for (int c = 0; c < C; ++c)
                sums[r][c] = fused(row, loaded<false>(x + c * width + i, 0), sums[r][c]);
        }
    }
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) store_lane_sums<T, C>(sums[r], out + r * row);
}

// Rows that are needed for the next block, of two arrays by turns. They are prefetched one for each
// step of a product: the processor seems to drop some of many prefetches at once.
template <class T>
struct Ahead {
    const T* at[2];
    i64 row, count;  // values from an array's row to its next, and rows of both arrays
    template <int V>
    CPD_INLINE void prefetch(i64 i) const {
        const T* x = at[i & 1] + i / 2 * row;
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) __builtin_prefetch(x + v * lanes_of<T>, 0, 2);
    }
};

// sums[r][v] = the sum over i < k of a[r * row + i * step] b[i * width + register v].
// SOME: of one register, n values
template <class T, int R, int V, bool SOME>
CPD_FN void rank_k(const T* a, i64 row, i64 step, const T* b, i64 width, i64 k, i64 n,
                   const Ahead<T>& ahead, Vector<T> (&sums)[R][V]) {
    for (i64 i = k; i < ahead.count; ++i) ahead.template prefetch<V>(i);
    for (i64 i = 0; i < k; ++i, a += step, b += width) {
        if (i < ahead.count) ahead.template prefetch<V>(i);
        Vector<T> rows[V];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) rows[v] = loaded<SOME>(b + v * lanes_of<T>, n);
#pragma GCC unroll 8
        for (int r = 0; r < R; ++r) {
            const Vector<T> factor = in_register(all_lanes(a[r * row]));
#pragma GCC unroll 8
            for (int v = 0; v < V; ++v) sums[r][v] = fused(factor, rows[v], sums[r][v]);
        }
    }
}

// Copies a field out of the window, to a row for each image, with zeros at the end; writes
// up to a register beyond the last row.
template <class T>
void cut(const BlockShape& of, const T* window, T* x) {
    for (i64 image = 0; image < of.batch; ++image, x += of.width) {
        for (i64 k = 0; k < of.pieces; ++k) {
            const T* from = window + image * of.image + k * of.piece;
            T* to = x + k * of.run;
            __builtin_prefetch(from + of.run + CPD_FIELD_VALUES - 1);  // for the next block's field
            i64 i = 0;
            for (; i + lanes_of<T> <= of.run; i += lanes_of<T>)
                stored<false>(to + i, loaded<false>(from + i, 0), 0);
            if (i < of.run) stored<false>(to + i, some_of(from + i, of.run - i), 0);
        }
        for (i64 i = of.pieces * of.run; i < of.width; ++i) x[i] = 0;
    }
}

// The transpose: adds an image's values to the window.
template <class T>
void add_field(const BlockShape& of, const void* values, void* window) {
    for (i64 k = 0; k < of.pieces; ++k) {
        const T* from = (const T*)values + k * of.run;
        T* to = (T*)window + k * of.piece;
        i64 i = 0;
        for (; i + lanes_of<T> <= of.run; i += lanes_of<T>)
            stored<false>(to + i, loaded<false>(to + i, 0) + loaded<false>(from + i, 0), 0);
        if (i < of.run)
            write_some(to + i, some_of(to + i, of.run - i) + some_of(from + i, of.run - i),
                       of.run - i);
    }
}

// to = W x, from an image on; to: maps rows
template <class T, int C = ACROSS<T>>
void respond(const BlockShape& of, const T* w, const T* x, i64 image, T* to, i64 row) {
    const i64 n = of.inputs;
    for (; image + C <= of.batch; image += C) {
        const T* y = x + image * of.width;
        i64 j = 0;
        for (; j + DOWN <= of.maps; j += DOWN)
            dots<T, DOWN, C>(w + j * n, n, y, of.width, to + j * row + image, row);
        for (; j < of.maps; ++j)
            dots<T, 1, C>(w + j * n, n, y, of.width, to + j * row + image, row);
    }
    if constexpr (C > 1) respond<T, C / 2>(of, w, x, image, to, row);
}

template <class T, int C, int V, bool SOME>
CPD_TILE_FN void overlay_tile(const BlockShape& of, const T* w, const T* r, i64 image, i64 i,
                              T* y) {
    Vector<T> sums[C][V] = {};
    const T* next = w + of.maps * of.inputs + i;
    rank_k<T, C, V, SOME>(r + image, 1, of.map, w + i, of.inputs, of.maps, of.inputs - i,
                          {{next, next + of.inputs}, 2 * of.inputs, image ? 0 : of.maps}, sums);
#pragma GCC unroll 8
    for (int c = 0; c < C; ++c)
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v)
            stored<false>(y + (image + c) * of.width + i + v * lanes_of<T>, sums[c][v], 0);
}
// y = W^T r, from an image on; y: rows of width
template <class T, int C = ACROSS<T>>
void overlay(const BlockShape& of, const T* w, const T* r, i64 image, T* y) {
    const i64 one = lanes_of<T>;
    for (; image + C <= of.batch; image += C) {
        i64 i = 0;
        for (; i + DOWN * one <= of.inputs; i += DOWN * one)
            overlay_tile<T, C, DOWN, false>(of, w, r, image, i, y);
        for (; i + one <= of.inputs; i += one) overlay_tile<T, C, 1, false>(of, w, r, image, i, y);
        if (i < of.inputs) overlay_tile<T, C, 1, true>(of, w, r, image, i, y);
    }
    if constexpr (C > 1) overlay<T, C / 2>(of, w, r, image, y);
}

// Computes a block's responses, and its filters' outputs for them, in rows of width.
template <class T>
void reconstruct_block(const BlockShape& of, const void* weight, const void* window,
                       void* responses, void* outputs, void* room) {
    const T* w = (const T*)weight;
    T *x = (T*)room, *r = (T*)responses;
    cut(of, (const T*)window, x);
    respond(of, w, x, 0, r, of.map);
    overlay(of, w, (const T*)r, 0, (T*)outputs);
}

template <class T>
struct Move {
    const T *factors, *fields, *along;  // [maps][2 batch], [2 batch][width], [maps]
    T *w, *moving;
    T rate, momentum;
};
// New momentum of a tile; adds the squares of the new filters, not yet of length 1, to squares.
template <class T, int R, int V, bool SOME>
CPD_TILE_FN void descend_tile(const BlockShape& of, const Move<T>& d, i64 j, i64 i,
                              Vector<T>* squares) {
    Vector<T> sums[R][V] = {};
    const i64 k = 2 * of.batch, n = of.inputs - i;
    const i64 row = of.inputs, block = of.maps * row;
    T *w = d.w + j * row + i, *moving = d.moving + j * row + i;
    rank_k<T, R, V, false>(d.factors + j * k, k, 1, d.fields + i, of.width, k, n,
                           {{w + block, moving + block}, row, 2 * R}, sums);
    const Vector<T> momentum = all_lanes(d.momentum), rate = all_lanes(-d.rate);
    const T* along = d.along + j;
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r, w += row, moving += row) {
        const Vector<T> factor = all_lanes(along[r]);
        Vector<T> sum = squares[r];
#pragma GCC unroll 8
        for (int v = 0; v < V; ++v) {
            const i64 at = v * lanes_of<T>;
            const Vector<T> old = loaded<SOME>(w + at, n);
            const Vector<T> m =
                fused(factor, old, fused(momentum, loaded<SOME>(moving + at, n), sums[r][v]));
            stored<SOME>(moving + at, m, n);
            const Vector<T> moved = fused(rate, m, old);
            sum = fused(moved, moved, sum);
        }
        squares[r] = sum;
    }
}
template <class T, int R = ACROSS<T>>
void descend_rows(const BlockShape& of, const Move<T>& d, i64 j) {
    const i64 one = lanes_of<T>;
    const Vector<T> rate = all_lanes(-d.rate);
    for (; j + R <= of.maps; j += R) {
        Vector<T> squares[R] = {};
        i64 i = 0;
        for (; i + DOWN * one <= of.inputs; i += DOWN * one)
            descend_tile<T, R, DOWN, false>(of, d, j, i, squares);
        for (; i + one <= of.inputs; i += one) descend_tile<T, R, 1, false>(of, d, j, i, squares);
        if (i < of.inputs) descend_tile<T, R, 1, true>(of, d, j, i, squares);
        T lengths[R];
        store_lane_sums<T, R>(squares, lengths);
        for (int r = 0; r < R; ++r) {
            T *w = d.w + (j + r) * of.inputs, *moving = d.moving + (j + r) * of.inputs;
            const Vector<T> by = all_lanes(1 / std::sqrt(lengths[r]));
            for (i = 0; i + one <= of.inputs; i += one)
                stored<false>(
                    w + i, fused(rate, loaded<false>(moving + i, 0), loaded<false>(w + i, 0)) * by,
                    0);
            if (const i64 n = of.inputs - i)
                write_some(w + i, fused(rate, some_of(moving + i, n), some_of(w + i, n)) * by, n);
        }
    }
    if constexpr (R > 1) descend_rows<T, R / 2>(of, d, j);
}

// The factors of fields in a filter's gradient, 2 batch, for its responses, its pools' slopes and
// s = W g; along: the gradient's part along the filter, with the opposite sign.
template <class T>
CPD_FN void factors_of(const BlockShape& of, T by, const T* responses, const T* slopes, const T* s,
                       T* factors, T* along) {
    const Vector<T> alpha = all_lanes(by);
    Vector<T> sum = {};
    for (i64 i = 0; i < of.batch; i += lanes_of<T>) {
        const i64 n = of.batch - i < lanes_of<T> ? of.batch - i : lanes_of<T>;
        const Vector<T> response = some_of(responses + i, n), back = alpha * some_of(s + i, n);
        const Vector<T> slope = fused(some_of(slopes + i, n), response, back);
        write_some(factors + i, alpha * response, n);
        write_some(factors + of.batch + i, slope, n);
        sum = sum - response * (slope + back);
    }
    store_lane_sums<T, 1>(&sum, along);
}

template <class T>
void descend_block(const BlockShape& of, const BlockStep& by, void* weight, void* moving,
                   const void* window, const void* again, const void* responses, const void* slopes,
                   void* room) {
    const i64 n = of.batch;
    T *g = (T*)room, *x = g + n * of.width, *factors = x + (n + 1) * of.width,
      *s = factors + 2 * of.maps * n, *along = s + of.maps * n;
    cut(of, (const T*)again, g);
    cut(of, (const T*)window, x);
    respond(of, (const T*)weight, (const T*)g, 0, s, n);
    for (i64 j = 0; j < of.maps; ++j)
        factors_of(of, (T)by.alpha, (const T*)responses + j * of.map,
                   (const T*)slopes + j * of.slopes_map, s + j * n, factors + 2 * j * n, along + j);
    const Move<T> d = {factors, g, along, (T*)weight, (T*)moving, (T)by.rate, (T)by.momentum};
    descend_rows<T>(of, d, 0);
}

}  // namespace

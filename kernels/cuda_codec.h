// The codec of tiles for the GPU, a warp a tile and a thread a lane, whose 32 values stay in
// registers. Same names and meaning as in cpu_table.h; ops/gpu.py launches these kernels.
//
// It is compiled once for casts that are arguments, and again for a constant cast if
// ops/cuda_source.py defines CPD_FIXED_*: then the compiler knows all of a How except the table.
#ifndef CPD_CUDA_CODEC_H
#define CPD_CUDA_CODEC_H

#include "cuda_float8.h"
#include "items.h"

#define CPD_WARPS 4                        // of a block
#define CPD_COLUMN (CPD_TILE / CPD_LANES)  // values of a lane

#ifdef CPD_FIXED_CAST
#define CPD_UNROLL 32
#else
#define CPD_UNROLL 1  // a column is in local memory: unrolled code would be long
#endif

namespace {

const u32 ALL_LANES = 0xffffffffu;

__device__ Cast load_cast(const int* numbers) {
    return Cast{numbers[0],       numbers[1],       numbers[2],
                (u32)numbers[3],  (u32)numbers[4],  (u32)numbers[5],
                (u32)numbers[6],  (u32)numbers[7],  numbers[8],
                numbers[9],       numbers[10],      (u32)numbers[11],
                (u32)numbers[12], (u32)numbers[13], numbers[14],
                numbers[15],      numbers[16],      numbers[17] ? numbers + 18 : nullptr};
}

// Calls a function with a constant: the Way of a cast, or whether its format is given by a table.
template <int N>
struct Constant {
    static constexpr int value = N;
};
template <class Body>
__device__ void by_way(const Cast& cast, Body body) {
    switch (way_of(cast)) {
        case CPD_BY_NEAREST:
            return body(Constant<CPD_BY_NEAREST>{});
        case CPD_BY_ADDING:
            return body(Constant<CPD_BY_ADDING>{});
        case CPD_BY_DIRECTION:
            return body(Constant<CPD_BY_DIRECTION>{});
        case CPD_BY_TABLE:
            return body(Constant<CPD_BY_TABLE>{});
    }
}
template <class Body>
__device__ void by_table(const Cast& cast, Body body) {
    cast.table ? body(Constant<1>{}) : body(Constant<0>{});
}

__device__ int lane_of_thread() { return threadIdx.x % CPD_LANES; }

// The first tile of this warp, and the distance to its next.
__device__ i64 first_tile() { return (i64)blockIdx.x * CPD_WARPS + threadIdx.x / CPD_LANES; }
__device__ i64 tile_stride() { return (i64)gridDim.x * CPD_WARPS; }

__device__ int values_of_tile(i64 n, i64 t) {
    return n - t * CPD_TILE < CPD_TILE ? (int)(n - t * CPD_TILE) : CPD_TILE;
}

// Calls a function of the numbers of this lane's values of a tile.
template <class Body>
__device__ void each_of_tile(i64 n, i64 t, Body body) {
    const i64 first = t * CPD_TILE + lane_of_thread();
    if (values_of_tile(n, t) == CPD_TILE) {
#pragma unroll 8
        for (int r = 0; r < CPD_COLUMN; ++r) body(first + r * CPD_LANES);
    } else {
        for (i64 i = first; i < n; i += CPD_LANES) body(i);
    }
}

// Calls use(i, load(i)) for this lane's values from start to stop, at most a tile. A whole tile is
// loaded in batches before any of a batch is used: no load waits for a store, which it might be of.
template <class Load, class Use>
__device__ void in_batches(i64 start, i64 stop, Load load, Use use) {
    const int batch = 8;
    const i64 first = start + lane_of_thread();
    if (stop - start == CPD_TILE) {
        for (int r = 0; r < CPD_COLUMN; r += batch) {
            decltype(load(first)) loaded[batch];
#pragma unroll
            for (int k = 0; k < batch; ++k) loaded[k] = load(first + (r + k) * CPD_LANES);
#pragma unroll
            for (int k = 0; k < batch; ++k) use(first + (r + k) * CPD_LANES, loaded[k]);
        }
    } else {
        for (i64 i = first; i < stop; i += CPD_LANES) use(i, load(i));
    }
}

__device__ u32 warp_largest(u32 value) {
    for (int step = CPD_LANES / 2; step; step /= 2)
        value = max(value, __shfl_xor_sync(ALL_LANES, value, step));
    return value;
}

__device__ u32 warp_sum(u32 value) {
    for (int step = CPD_LANES / 2; step; step /= 2)
        value += __shfl_xor_sync(ALL_LANES, value, step);
    return value;
}

// Adds the counts of the lanes of a warp to a total, by one write: writes to one address are
// serialised.
__device__ void add_count(I count, u64* total) {
    const u32 all = warp_sum((u32)count);
    if (all && lane_of_thread() == 0) atomicAdd(total, (u64)all);
}

__device__ void write_counts(const Counts& c, u32* counts) {
    u32 saturated = warp_sum(c.saturated);
    u32 underflowed = warp_sum(c.underflowed);
    u32 nonfinite = warp_sum(c.nonfinite);
    if (lane_of_thread() == 0) {
        counts[0] = saturated;
        counts[1] = underflowed;
        counts[2] = nonfinite;
    }
}

// The parameters of a launch. If blocks is not 0, each part of a column has a shift of its own.
struct How {
    Cast cast;
    int blocks;
    bool fit, counted;

    __device__ int parts() const { return blocks ? blocks : 1; }
    __device__ int rows_of_part() const { return CPD_COLUMN / parts(); }
    __device__ i64 words_of_tile() const { return CPD_LANES * width(cast); }
    __device__ i64 shifts_of_tile() const { return CPD_SHIFTS_OF_TILE(blocks); }
    // A lane's first value and word, and the step to the next: 1 for OCP's blocks.
    __device__ int first_value() const { return lane_of_thread() * (cast.ocp ? CPD_COLUMN : 1); }
    __device__ int value_step() const { return cast.ocp ? 1 : CPD_LANES; }
    __device__ int first_word() const { return lane_of_thread() * (cast.ocp ? width(cast) : 1); }
};

__device__ How make_how(const int* cast_numbers, int blocks, bool fit, bool counted) {
    Cast cast = load_cast(cast_numbers);
#ifdef CPD_FIXED_CAST
    cast = Cast{CPD_FIXED_CAST, CPD_FIXED_TABLE ? cast_numbers + 18 : nullptr};
    blocks = CPD_FIXED_BLOCKS;
#endif
#ifdef CPD_FIXED_FIT
    fit = CPD_FIXED_FIT, counted = CPD_FIXED_COUNTED;
#endif
    return How{cast, blocks, fit, counted};
}

// The values of a lane, and the shift of each part as it is stored.
struct Column {
    float rows[CPD_COLUMN];
    u32 shifts[CPD_MOST_BLOCKS];
};

// Calls a function with 0 .. count - 1.
template <class Body>
__device__ __forceinline__ void each(int count, Body body) {
#pragma unroll CPD_UNROLL
    for (int i = 0; i < count; ++i) body(i);
}

// Whether row r of this lane is one of the n values of a tile.
__device__ bool has_row(const How& how, int r, int n) {
    return r * how.value_step() < n - how.first_value();
}

// Values from n on, beyond the end of the last tile, read as zero and are not written.
__device__ void load_column(const How& how, Column& c, const float* x, int n) {
    x += how.first_value();
    const int step = how.value_step();
    if (n == CPD_TILE) {
        each(CPD_COLUMN, [&](int r) { c.rows[r] = x[r * step]; });
    } else {
        each(CPD_COLUMN, [&](int r) { c.rows[r] = has_row(how, r, n) ? x[r * step] : 0.0f; });
    }
}

__device__ void store_column(const How& how, const Column& c, float* out, int n) {
    out += how.first_value();
    const int step = how.value_step();
    if (n == CPD_TILE) {
        each(CPD_COLUMN, [&](int r) { out[r * step] = c.rows[r]; });
    } else {
        each(CPD_COLUMN, [&](int r) {
            if (has_row(how, r, n)) out[r * step] = c.rows[r];
        });
    }
}

__device__ void clear_beyond(const How& how, Column& c, int n) {
    if (n == CPD_TILE) return;
    each(CPD_COLUMN, [&](int r) {
        if (!has_row(how, r, n)) c.rows[r] = 0.0f;
    });
}

__device__ void load_shifts(const How& how, Column& c, const u8* shifts) {
    if (how.blocks) shifts += lane_of_thread();
    each(how.parts(), [&](int b) {
        const u8 stored = shifts[b * CPD_LANES];
        c.shifts[b] = how.cast.ocp ? flipped_shift(stored) : stored;
    });
}

// The bits of the largest magnitude of part b of a lane; for NaN any above those of infinity.
__device__ u32 largest_of_part(const How& how, const Column& c, int b) {
    const int rows = how.rows_of_part();
#if CPD_HAS_FLOAT8
    if (is_float8(how.cast)) {
        F most = 0.0f;
        each(rows, [&](int r) { most = larger_magnitude(most, c.rows[b * rows + r]); });
        return bits_of(most);
    }
#endif
    u32 most = 0;  // twice the magnitude: masked values would be kept in 32 more registers
    each(rows, [&](int r) { most = max(most, bits_of(c.rows[b * rows + r]) << 1); });
    most >>= 1;
    return most;
}

// Whether lane is true in all lanes of the warp.
__device__ bool all_lanes(bool lane) { return __ballot_sync(ALL_LANES, lane) == ALL_LANES; }

// Chooses the shifts and writes them; returns whether no value of the warp will overflow.
__device__ bool fit_column(const How& how, Column& c, u8* shifts) {
    const int lane = lane_of_thread();
    u32 all = 0;
    each(how.parts(), [&](int b) {
        u32 most = largest_of_part(how, c, b);
        if (!how.blocks) most = warp_largest(most);
        c.shifts[b] = fitting_shifts(how.cast, most);
        const u8 stored = (u8)c.shifts[b];
        if (how.blocks || lane == 0)
            shifts[b * CPD_LANES + lane] = how.cast.ocp ? flipped_shift(stored) : stored;
        all = larger(all, most);
    });
    const bool inside = all <= largest_inside(how.cast) && !how.cast.ocp;  // OCP's saturate
    return all_lanes(inside);
}

// The shift of a part: values are first scaled by 2^far, and the rest is near, see float_format.h.
struct Shift {
    bool marked;
    int far;
    u32 near;
};

__device__ Shift shift_of(const How& how, const Column& c, int b) {
    const bool marked = c.shifts[b] == CPD_SHIFT_NONFINITE;
    const u32 k = marked ? 0 : c.shifts[b] - CPD_SHIFT_BIAS;
    const int far = far_of(how.cast, (int)k);
    return Shift{marked, far, k - (u32)far};
}

template <int WAY, bool INSIDE>
__device__ void pack_rows(const How& how, Column& c, u32* words, Key key, u64 index,
                          Counts& counts) {
    const int rows = how.rows_of_part(), lane = lane_of_thread();
    Packer packer = make_packer(words, how.first_word(), how.value_step());
    each(how.parts(), [&](int b) {
        const Shift shift = shift_of(how, c, b);
        if (shift.far) {
            const F factor = normal_power((u32)shift.far);
            each(rows, [&](int r) { c.rows[b * rows + r] = moved(c.rows[b * rows + r], factor); });
        }
        const auto e = make_encoder_of<WAY>(how.cast, shift.near);
        each(rows, [&](int r) {
            const u64 i = index + ((b * rows + r) * CPD_LANES + lane);
            put(packer,
                encode_value<WAY, true, INSIDE>(how.cast, e, c.rows[b * rows + r], key, i, counts),
                width(how.cast));
        });
    });
}

#if CPD_HAS_FLOAT8

// Whether all shifts of the warp are near, so that 2^k and its inverse are normal numbers.
__device__ bool all_near(const How& how, const Column& c) {
    bool near = true;
    each(how.parts(), [&](int b) { near = near && !shift_of(how, c, b).far; });
    return all_lanes(near);
}

// Whether no value of the warp overflows with given shifts.
__device__ bool stays_inside(const How& how, const Column& c) {
    bool inside = true;
    each(how.parts(), [&](int b) {
        inside = inside && stays_inside(how.cast, largest_of_part(how, c, b), (u8)c.shifts[b]);
    });
    return all_lanes(inside);
}

// pack_rows of values that are known to stay inside, by near shifts.
__device__ void pack_float8(const How& how, const Column& c, u32* words) {
    const int rows = how.rows_of_part();
    words += how.first_word();
    each(how.parts(), [&](int b) {
        const F factor = normal_power(shift_of(how, c, b).near);
        each(rows / 4, [&](int w) {
            u32 halves[2];
            each(2, [&](int h) {
                const float* two = c.rows + b * rows + 4 * w + 2 * h;
                halves[h] = two_codes(how.cast, multiply(two[0], factor), multiply(two[1], factor));
            });
            words[(b * rows / 4 + w) * how.value_step()] = halves[0] | halves[1] << 16;
        });
    });
}

// Calls a function with each row's number, its value without the shift, and the exact factor of the
// shift; returns false, before any call, if other code must decode the tile.
template <class Body>
__device__ bool float8_rows(const How& how, const Column& c, const u32* words, Body body) {
    const int rows = how.rows_of_part();
    u32 loaded[CPD_COLUMN / 4], other = 0;
    words += how.first_word();
    each(CPD_COLUMN / 4, [&](int w) {
        loaded[w] = words[w * how.value_step()];
        other |= beyond_largest(how.cast, loaded[w]);
    });
    each(how.parts(), [&](int b) {
        const Shift shift = shift_of(how, c, b);
        other |= shift.marked || shift.far;
    });
    if (other) return false;
    each(how.parts(), [&](int b) {
        const F factor = normal_power(0u - shift_of(how, c, b).near);
        each(rows / 4, [&](int i) {
            const int w = b * rows / 4 + i;
            each(2, [&](int h) {
                const u32 two = two_halves(how.cast, loaded[w] >> 16 * h);
                body(4 * w + 2 * h, widened_half(two), factor);
                body(4 * w + 2 * h + 1, widened_half(two >> 16), factor);
            });
        });
    });
    return true;
}

#endif

// Encodes a column and writes the tile's counts, if wanted.
__device__ void encode_column(const How& how, Column& c, u8* shifts, u32* words, Key key, u64 index,
                              u32* counts) {
    Counts found = {};
    bool inside = false;
    if (how.fit)
        inside = fit_column(how, c, shifts);
    else
        load_shifts(how, c, shifts);
#if CPD_HAS_FLOAT8
    const bool is_nearest = way_of(how.cast) == CPD_BY_NEAREST && !how.cast.ocp;
    if (is_float8(how.cast) && is_nearest && !how.counted)
        if ((how.fit ? inside : stays_inside(how, c)) && all_near(how, c))
            return pack_float8(how, c, words);
#endif
    by_way(how.cast, [&](auto way) {
        constexpr bool knows = way.value == CPD_BY_NEAREST || way.value == CPD_BY_ADDING;
        if (knows && inside)
            pack_rows<way.value, knows>(how, c, words, key, index, found);
        else
            pack_rows<way.value, false>(how, c, words, key, index, found);
    });
    if (how.counted) write_counts(found, counts);
}

// Calls a function with each row's number and value.
template <class Body>
__device__ void decode_rows(const How& how, const Column& c, const u32* words, Body body) {
    const int rows = how.rows_of_part();
    Unpacker unpacker = make_unpacker(words, how.first_word(), how.value_step());
    by_table(how.cast, [&](auto table) {
        constexpr bool is_table = table.value;
        each(how.parts(), [&](int b) {
            const Shift shift = shift_of(how, c, b);
            const auto scale = make_scale<is_table>(how.cast, shift.near, shift.marked);
            if (shift.far) {
                const F back = normal_power(0u - (u32)shift.far);
                each(rows, [&](int r) {
                    body(b * rows + r, moved_back(read(how.cast, scale, unpacker), back));
                });
            } else {
                each(rows, [&](int r) { body(b * rows + r, read(how.cast, scale, unpacker)); });
            }
        });
    });
}

// Decodes a tile into out; adds the number of its values that are not finite to nonfinite.
__device__ void decode_column(const How& how, Column& c, const u32* words, float* out, int n,
                              I& nonfinite) {
#if CPD_HAS_FLOAT8
    auto scaled = [&](int r, float number, float factor) { c.rows[r] = multiply(number, factor); };
    if (is_float8(how.cast) && float8_rows(how, c, words, scaled))  // finite, all of them
        return store_column(how, c, out, n);
#endif
    decode_rows(how, c, words, [&](int r, float value) { c.rows[r] = value; });
    clear_beyond(how, c, n);
    each(CPD_COLUMN, [&](int r) { nonfinite += (bits_of(c.rows[r]) & CPD_MAGNITUDE) >= CPD_INF; });
    store_column(how, c, out, n);
}

// Adds the values of words to a column.
__device__ void decode_sums(const How& how, Column& c, const u32* words) {
#if CPD_HAS_FLOAT8
    auto sum = [&](int r, float number, float factor) {
        c.rows[r] = fused(number, factor, c.rows[r]);
    };
    if (is_float8(how.cast) && float8_rows(how, c, words, sum)) return;
#endif
    decode_rows(how, c, words, [&](int r, float value) { c.rows[r] = add(c.rows[r], value); });
}

// The sums of x and a decoded tile, zero from value n on.
__device__ void sum_column(const How& how, Column& c, const u8* shifts, const u32* words,
                           const float* x, int n) {
    load_column(how, c, x, n);
    load_shifts(how, c, shifts);
    decode_sums(how, c, words);
    clear_beyond(how, c, n);
}

}  // namespace

// At most 64 registers a thread, so that an SM can hold half of its threads.
#define CPD_BOUNDED __launch_bounds__(CPD_WARPS* CPD_LANES, 8)

extern "C" {

#ifndef CPD_FIXED_FIT
CPD_BOUNDED __global__ void decode_tiles(const int* cast_numbers, int blocks, const u32* words,
                                         const u8* shifts, float* out, i64 n, u64* nonfinite) {
    const How how = make_how(cast_numbers, blocks, false, false);
    I count = 0;
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        Column c;
        load_shifts(how, c, shifts + t * how.shifts_of_tile());
        decode_column(how, c, words + t * how.words_of_tile(), out + t * CPD_TILE,
                      values_of_tile(n, t), count);
    }
    add_count(count, nonfinite);
}

CPD_BOUNDED __global__ void decode_add_tiles(const int* cast_numbers, int blocks, const u32* words,
                                             const u8* shifts, const float* x, float* out, i64 n) {
    const How how = make_how(cast_numbers, blocks, false, false);
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        Column c;
        sum_column(how, c, shifts + t * how.shifts_of_tile(), words + t * how.words_of_tile(),
                   x + t * CPD_TILE, values_of_tile(n, t));
        store_column(how, c, out + t * CPD_TILE, values_of_tile(n, t));
    }
}
#endif

#if !defined(CPD_FIXED_CAST) || defined(CPD_FIXED_FIT)
CPD_BOUNDED __global__ void encode_tiles(const int* cast_numbers, int blocks, int fit, u32 key_low,
                                         u32 key_high, u64 offset, const float* x, i64 n,
                                         u32* words, u8* shifts, u32* counts) {
    const How how = make_how(cast_numbers, blocks, fit, counts);
    const Key key{key_low, key_high};
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        Column c;
        load_column(how, c, x + t * CPD_TILE, values_of_tile(n, t));
        encode_column(how, c, shifts + t * how.shifts_of_tile(), words + t * how.words_of_tile(),
                      key, offset + t * CPD_TILE, counts + 3 * t);
    }
}

CPD_BOUNDED __global__ void decode_add_encode_tiles(const int* cast_numbers, int blocks, int fit,
                                                    u32 key_low, u32 key_high, u64 offset,
                                                    const u32* words_in, const u8* shifts_in,
                                                    const float* x, i64 n, u32* words, u8* shifts,
                                                    float* out, u64* nonfinite, u32* counts) {
    const How how = make_how(cast_numbers, blocks, fit, counts);
    const Key key{key_low, key_high};
    I count = 0;
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        const i64 first = t * how.words_of_tile(), shift = t * how.shifts_of_tile();
        Column c;
        sum_column(how, c, shifts_in + shift, words_in + first, x + t * CPD_TILE,
                   values_of_tile(n, t));
        encode_column(how, c, shifts + shift, words + first, key, offset + t * CPD_TILE,
                      counts + 3 * t);
        if (out)  // a thread reads the words that it wrote itself
            decode_column(how, c, words + first, out + t * CPD_TILE, values_of_tile(n, t), count);
    }
    add_count(count, nonfinite);
}
#endif

}  // extern "C"

#endif

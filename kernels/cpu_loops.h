// Thin loops over tiles for the CPU; the work is in items.h. Included once by each of
// cpu_portable.cpp, cpu_v3.cpp and cpu_v4.cpp, which choose the processor and name the table.
#include "cpu_table.h"
#include "items.h"

// Number of tiles by which data is prefetched: with all other data they fit in L1.
#define CPD_AHEAD 4
#define CPD_HOP_AHEAD 2

namespace {

// The values of a tile: the caller's if the tile is whole, else a zero-padded copy.
template <class T>
struct Padded {
    alignas(64) T values[CPD_TILE];

    CPD_INLINE const T* read(const T* x, i64 n) {
        if (n >= CPD_TILE) return x;
        memset(values, 0, sizeof values);
        memcpy(values, x, (size_t)n * sizeof(T));
        return values;
    }
    CPD_INLINE T* target(T* out, i64 n) { return n >= CPD_TILE ? out : values; }
    CPD_INLINE void write(T* out, i64 n) {
        if (n < CPD_TILE) memcpy(out, values, (size_t)n * sizeof(T));
    }
};

// The largest lane, by halves: its latency is on the way to every tile's shift.
template <int STEP = CPD_GROUP / 2>
CPD_FN u32 largest_lane(U v) {
    v = larger(v, crossed<STEP>(v, EachLane{}));
    if constexpr (STEP > 1) return largest_lane<STEP / 2>(v);
    return v[0];
}

CPD_FN u32 sum_lanes(I v) {
    u32 sum = 0;
    for (int lane = 0; lane < CPD_GROUP; ++lane) sum += (u32)v[lane];
    return sum;
}

CPD_FN void write_counts(const Counts& c, u32* counts) {
    counts[0] = sum_lanes(c.saturated);
    counts[1] = sum_lanes(c.underflowed);
    counts[2] = sum_lanes(c.nonfinite);
}

// The number of values of n that are not finite, without the padding of a tile.
inline u32 nonfinite_in(const float* x, i64 n) {
    u32 found = 0;
    for (i64 i = 0; i < n; ++i) {
        u32 bits;
        memcpy(&bits, x + i, sizeof bits);
        found += (bits & CPD_MAGNITUDE) >= CPD_INF;
    }
    return found;
}

CPD_FN u32 amax_tile(const float* x) {
    U most = lanes(0);
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
        most = larger(most, amax_column(x, CPD_TILE, lane));
    return largest_lane(most);
}

// Whether there are loops for values that are known to stay inside the format.
constexpr bool knows_inside(int way) { return way == CPD_BY_NEAREST || way == CPD_BY_ADDING; }

// Calls a loop with template arguments: the way to find codes, and whether counts are kept.
#define CPD_PICK_WAY(loop, cast, COUNT)                                 \
    (way_of(cast) == CPD_BY_NEAREST     ? loop<CPD_BY_NEAREST, COUNT>   \
     : way_of(cast) == CPD_BY_ADDING    ? loop<CPD_BY_ADDING, COUNT>    \
     : way_of(cast) == CPD_BY_DIRECTION ? loop<CPD_BY_DIRECTION, COUNT> \
                                        : loop<CPD_BY_TABLE, COUNT>)
#define CPD_PICK(loop, cast, counts) \
    (counts ? CPD_PICK_WAY(loop, cast, true) : CPD_PICK_WAY(loop, cast, false))

// A tile with far shifts, see float_format.h: it is scaled first, so that its shifts are near.
struct Near {
    alignas(64) float values[CPD_TILE];
    alignas(64) u8 shifts[CPD_LANES * CPD_MOST_BLOCKS];
};

CPD_FN bool is_far(const Cast& cast, u8 shift) {
    return shift != CPD_SHIFT_NONFINITE && far_of(cast, shift - CPD_SHIFT_BIAS);
}

// Whether a shift of a tile is far; it may be true for a mark of NaN.
CPD_FN bool any_far(const Cast& cast, int blocks, const u8* shifts) {
    if (!blocks) return is_far(cast, *shifts);
    const u8 least = (u8)(cast.near_min + CPD_SHIFT_BIAS);
    const u8 span = (u8)(cast.near_max - cast.near_min);
    typedef u8 Bytes CPD_VECTOR(16);
    typedef u64 Halves CPD_VECTOR(16);
    Halves found = {};
    for (int i = 0; i < CPD_LANES * blocks; i += (int)sizeof(Bytes)) {
        Bytes stored;
        memcpy(&stored, shifts + i, sizeof stored);
        found |= (Halves)((stored - least) > span);
    }
    return found[0] | found[1];
}

// Writes the near shifts, and calls body(first, stride, stop, factor) for values of one shift.
template <class Body>
CPD_FN void each_shift(const Cast& cast, int blocks, const u8* shifts, u8* near, Body body) {
    const int rows = CPD_TILE / (blocks ? blocks : 1);
    for (int i = 0; i < CPD_SHIFTS_OF_TILE(blocks); ++i) {
        bool marked = shifts[i] == CPD_SHIFT_NONFINITE;
        int far = marked ? 0 : far_of(cast, shifts[i] - CPD_SHIFT_BIAS);
        near[i] = (u8)(shifts[i] - far);
        int first = blocks ? i / CPD_LANES * rows + i % CPD_LANES : 0;
        int stop = blocks ? (i / CPD_LANES + 1) * rows : CPD_TILE;
        body(first, blocks ? CPD_LANES : 1, stop, far);
    }
}

CPD_FN F from_float(float x) {  // adding to zeros would lose the sign of zero
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return from_bits(lanes(bits));
}

// Scales a whole tile to near shifts.
__attribute__((noinline, cold)) void move_near(const Cast& cast, int blocks, const u8* shifts,
                                               const float* x, Near& near) {
    each_shift(cast, blocks, shifts, near.shifts, [&](int first, int stride, int stop, int far) {
        for (int i = first; i < stop; i += stride)
            near.values[i] = moved(from_float(x[i]), normal_power(lanes((u32)far)))[0];
    });
}

// Scales a tile that was decoded with near shifts back.
__attribute__((noinline, cold)) void move_back(const Cast& cast, int blocks, const u8* shifts,
                                               float* x) {
    u8 near[CPD_LANES * CPD_MOST_BLOCKS];
    each_shift(cast, blocks, shifts, near, [&](int first, int stride, int stop, int far) {
        for (int i = first; i < stop; i += stride)
            x[i] = moved_back(from_float(x[i]), normal_power(lanes(0u - (u32)far)))[0];
    });
}

__attribute__((noinline, cold)) void near_shifts(const Cast& cast, int blocks, const u8* shifts,
                                                 u8* near) {
    each_shift(cast, blocks, shifts, near, [](int, int, int, int) {});
}

template <int WAY, bool COUNT, bool INSIDE>
CPD_TILE_FN void encode_tile(const Cast& given, u8 shift, Key key, u64 index, const float* x,
                             u32* words, u32* counts, const float* ahead) {
    const Cast cast = given;  // a copy, which no store can change
    Counts c = {};
    int k = shift == CPD_SHIFT_NONFINITE ? 0 : shift - CPD_SHIFT_BIAS;
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
        encode_column<WAY, COUNT, INSIDE>(cast, k, x, CPD_TILE, words, lane, key, index, c, ahead);
    if (COUNT) write_counts(c, counts);
}

template <int WAY, bool COUNT>
__attribute__((noinline, cold)) void encode_far(const Cast& cast, u8 shift, Key key, u64 index,
                                                const float* x, u32* words, u32* counts) {
    Near near;
    move_near(cast, 0, &shift, x, near);
    encode_tile<WAY, COUNT, false>(cast, near.shifts[0], key, index, near.values, words, counts, x);
}

// Encodes a tile by its shift and its largest magnitude, CPD_INF if that is not known.
template <int WAY, bool COUNT>
CPD_FN void encode_by(const Cast& cast, u8 shift, u32 amax, Key key, u64 index, const float* x,
                      u32* words, u32* counts, const float* ahead) {
    if (__builtin_expect(is_far(cast, shift), 0))
        return encode_far<WAY, COUNT>(cast, shift, key, index, x, words, counts);
    if (knows_inside(WAY) && stays_inside(cast, amax, shift))
        encode_tile<WAY, COUNT, knows_inside(WAY)>(cast, shift, key, index, x, words, counts,
                                                   ahead);
    else
        encode_tile<WAY, COUNT, false>(cast, shift, key, index, x, words, counts, ahead);
}

// Chooses the shift of a tile with this largest magnitude if it is to fit, and encodes the tile.
template <int WAY, bool COUNT>
CPD_FN void encode_fitting(const Cast& cast, bool fit, u32 amax, Key key, u64 index, const float* x,
                           u32* words, u8& shift, u32* counts, const float* ahead) {
    if (fit) shift = fitting_shift(cast, amax);
    encode_by<WAY, COUNT>(cast, shift, fit ? amax : CPD_INF, key, index, x, words, counts, ahead);
}

template <int WAY, bool COUNT>
void tile_loop(const Cast& cast, u8 shift, u32 amax, Key key, u64 index, const float* x, u32* words,
               const float* ahead) {
    encode_by<WAY, COUNT>(cast, shift, amax, key, index, x, words, nullptr, ahead);
}

// The largest magnitude is found one tile ahead: another tile is encoded during its latency and
// that of memory.
template <int WAY, bool COUNT>
void encode_loop(const Cast& given, bool fit, Key key, u64 offset, const float* x, i64 n,
                 u32* words, u8* shifts, u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad;
    const float* next = pad.read(x, n);
    u32 next_amax = fit && n > 0 ? amax_tile(next) : 0;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const float* tile = next;
        u32 amax = next_amax;
        i64 left = n - (t + 1) * CPD_TILE;
        if (left > 0) next = pad.read(x + (t + 1) * CPD_TILE, left);
        if (left > 0 && fit) next_amax = amax_tile(next);
        encode_fitting<WAY, COUNT>(cast, fit, amax, key, offset + t * CPD_TILE, tile,
                                   words + t * CPD_LANES * width(cast), shifts[t], counts + 3 * t,
                                   x + (t + CPD_AHEAD) * CPD_TILE);
    }
}

// out = the decoded tile, n values; returns how many are not finite. blocks: 0 for one shift.
template <bool TABLE>
CPD_TILE_FN i64 decode_tile(const Cast& given, int blocks, const u8* shifts, const u32* words,
                            float* out, i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad;
    float* target = pad.target(out, n);
    U most = lanes(0);
    u8 near[CPD_LANES * CPD_MOST_BLOCKS];
    const u8* used = shifts;
    const bool far = any_far(cast, blocks, shifts);
    if (__builtin_expect(far, 0)) near_shifts(cast, blocks, shifts, near), used = near;
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
        if (blocks)
            most = larger(most,
                          decode_blocks<TABLE>(cast, blocks, used, words, lane, target, CPD_TILE));
        else
            most = larger(most, decode_column<TABLE>(cast, *used, words, lane, target, CPD_TILE));
    if (__builtin_expect(far, 0)) move_back(cast, blocks, shifts, target);
    pad.write(out, n);
    if (!far && !perhaps(less(lanes(CPD_INF - 1), most))) return 0;
    return nonfinite_in(target, n < CPD_TILE ? n : CPD_TILE);
}

// sum = x + a decoded tile whose shifts are far, a whole tile.
template <bool TABLE>
__attribute__((noinline, cold)) void sum_far(const Cast& cast, int blocks, const u8* shifts,
                                             const u32* words, const float* x, float* sum) {
    alignas(64) float decoded[CPD_TILE];
    decode_tile<TABLE>(cast, blocks, shifts, words, decoded, CPD_TILE);
    for (int i = 0; i < CPD_TILE; ++i) sum[i] = x[i] + decoded[i];
}

// The largest magnitudes of the blocks of a tile's columns as float32 bits; only the first of each
// if the tile has one shift.
struct Most {
    U of[CPD_LANES / CPD_GROUP][CPD_MOST_BLOCKS];
};

// sum = x + the decoded tile, a whole one.
template <bool TABLE>
CPD_TILE_FN void sum_tile(const Cast& given, int blocks, const u8* shifts, const u32* words,
                          const float* x, float* sum, Most& most) {
    const Cast cast = given;  // a copy, which no store can change
    const bool far = any_far(cast, blocks, shifts);
    if (__builtin_expect(far, 0)) sum_far<TABLE>(cast, blocks, shifts, words, x, sum);
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP) {
        U* column = most.of[lane / CPD_GROUP];
        if (far)
            amax_blocks(blocks ? blocks : 1, sum, CPD_TILE, lane, column);
        else if (blocks)
            sum_blocks<TABLE>(cast, blocks, shifts, words, lane, x, CPD_TILE, sum, CPD_TILE,
                              column);
        else
            *column = sum_column<TABLE>(cast, *shifts, words, lane, x, CPD_TILE, sum, CPD_TILE);
    }
}

// The same for n values, zero-padded, and one shift; returns max|sum| as float32 bits.
template <bool TABLE>
u32 sum_padded(const Cast& cast, u8 shift, const u32* words, const float* x, i64 n, float* sum) {
    Padded<float> pad;
    Most most;
    sum_tile<TABLE>(cast, 0, &shift, words, pad.read(x, n), sum, most);
    if (n < CPD_TILE) {  // without the decoded padding of the words
        memset(sum + n, 0, (size_t)(CPD_TILE - n) * sizeof(float));
        return amax_tile(sum);
    }
    U all = lanes(0);
    for (const U* column : most.of) all = larger(all, *column);
    return largest_lane(all);
}

// Prefetches a tile's words into the cache; they may lie beyond the array.
CPD_FN void expect_words(const u32* words, i64 count) {
    for (i64 i = 0; i < count; i += 16) expect((const float*)(words + i));
}

template <int WAY, bool COUNT>
void hop_loop(const Cast& given, bool fit, Key key, u64 offset, const u32* words_in,
              const u8* shifts_in, const float* x, i64 n, u32* words, u8* shifts, u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    alignas(64) float sums[2][CPD_TILE];
    const i64 stride = CPD_LANES * width(cast);
    constexpr bool table = WAY == CPD_BY_TABLE;
    u32 next_amax = n > 0 ? sum_padded<table>(cast, shifts_in[0], words_in, x, n, sums[0]) : 0;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        u32 amax = next_amax;
        i64 done = t * CPD_TILE, next = done + CPD_TILE;
        expect_words(words_in + (t + CPD_HOP_AHEAD) * stride, stride);
        if (next < n)
            next_amax = sum_padded<table>(cast, shifts_in[t + 1], words_in + (t + 1) * stride,
                                          x + next, n - next, sums[(t + 1) % 2]);
        encode_fitting<WAY, COUNT>(cast, fit, amax, key, offset + done, sums[t % 2],
                                   words + t * stride, shifts[t], counts + 3 * t,
                                   x + done + CPD_HOP_AHEAD * CPD_TILE);
    }
}

template <int WAY, bool COUNT, bool INSIDE>
CPD_TILE_FN void encode_tile_of_blocks(const Cast& given, int blocks, const u8* shifts, Key key,
                                       u64 index, const float* x, u32* words, u32* counts,
                                       const float* ahead) {
    const Cast cast = given;  // a copy, which no store can change
    Counts c = {};
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
        encode_blocks<WAY, COUNT, INSIDE>(cast, blocks, shifts, x, CPD_TILE, words, lane, key,
                                          index, c, ahead);
    if (COUNT) write_counts(c, counts);
}

// Encodes x, or if words_in is not null its sum with their values, for blocks of each lane with
// shifts of their own. Lanes are independent, so the largest magnitude is not found a tile ahead.
template <int WAY, bool COUNT>
void blocks_loop(const Cast& given, int blocks, bool fit, Key key, u64 offset, const u32* words_in,
                 const u8* shifts_in, const float* x, i64 n, u32* words, u8* shifts, u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    const i64 stride = CPD_LANES * width(cast);
    Padded<float> pad;
    alignas(64) float sum[CPD_TILE];
    Near near;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const i64 left = n - t * CPD_TILE, shift = t * CPD_LANES * blocks;
        const float *tile = pad.read(x + t * CPD_TILE, left), *ahead = x + (t + 1) * CPD_TILE;
        Most most;
        U all = lanes(0);
        const bool know_most = words_in && left >= CPD_TILE;
        if (words_in) {
            expect_words(words_in + (t + CPD_HOP_AHEAD) * stride, stride);
            sum_tile<WAY == CPD_BY_TABLE>(cast, blocks, shifts_in + shift, words_in + t * stride,
                                          tile, sum, most);
            // Without the decoded padding of the words.
            if (left < CPD_TILE) memset(sum + left, 0, (size_t)(CPD_TILE - left) * sizeof(float));
            tile = sum;
        }
        for (int lane = 0; fit && lane < CPD_LANES; lane += CPD_GROUP) {
            U* largest = most.of[lane / CPD_GROUP];
            if (!know_most) amax_blocks(blocks, tile, CPD_TILE, lane, largest);
            all = larger(all, fit_blocks(cast, blocks, largest, shifts + shift, lane));
        }
        const bool inside =
            knows_inside(WAY) && fit && !any(less(lanes(largest_inside(cast)), all));
        auto encode = inside ? encode_tile_of_blocks<WAY, COUNT, knows_inside(WAY)>
                             : encode_tile_of_blocks<WAY, COUNT, false>;
        const u8* used = shifts + shift;
        if (__builtin_expect(any_far(cast, blocks, used), 0)) {
            move_near(cast, blocks, used, tile, near);
            used = near.shifts, tile = near.values;
        }
        encode(cast, blocks, used, key, offset + t * CPD_TILE, tile, words + t * stride,
               counts + 3 * t, ahead + CPD_HOP_AHEAD * CPD_TILE);
    }
}

}  // namespace

#include "cpu_ocp.h"

namespace {

template <int WAY, bool>
void encode_values(const Cast& given, int k, Key key, u64 offset, const float* x, i64 n,
                   u32* codes) {
    const Cast cast = given;  // a copy, which no store can change
    const int far = far_of(cast, k);
    const u8 shift = (u8)(k + CPD_SHIFT_BIAS);
    const auto e = make_encoder_of<WAY>(cast, (u32)(k - far));
    Padded<float> pad;
    Padded<u32> pad_codes;
    Near near;
    Counts counts;
    for (i64 t = 0; t < n; t += CPD_TILE) {
        const float* tile = pad.read(x + t, n - t);
        if (far) move_near(cast, 0, &shift, tile, near), tile = near.values;
        u32* out = pad_codes.target(codes + t, n - t);
        for (int i = 0; i < CPD_TILE; i += CPD_GROUP) {
            F value = load(tile, i, CPD_TILE);
            store(out, i, CPD_TILE,
                  encode_value<WAY, false, false>(cast, e, value, key, offset + t + i, counts));
        }
        pad_codes.write(codes + t, n - t);
    }
}

void encode(const Cast& cast, int k, Key key, u64 offset, const float* x, i64 n, u32* codes) {
    CPD_PICK_WAY(encode_values, cast, false)(cast, k, key, offset, x, n, codes);
}

template <bool TABLE>
void decode_values(const Cast& given, int k, const u32* codes, i64 n, float* out) {
    const Cast cast = given;  // a copy, which no store can change
    const int far = far_of(cast, k);
    const u8 shift = (u8)(k + CPD_SHIFT_BIAS);
    const auto d = make_scale<TABLE>(cast, (u32)(k - far), false).decoder;
    Padded<u32> pad;
    Padded<float> pad_out;
    for (i64 t = 0; t < n; t += CPD_TILE) {
        const u32* tile = pad.read(codes + t, n - t);
        float* target = pad_out.target(out + t, n - t);
        for (int i = 0; i < CPD_TILE; i += CPD_GROUP)
            store(target, i, CPD_TILE, decode_code(cast, d, load(tile, i, CPD_TILE)));
        if (far) move_back(cast, 0, &shift, target);
        pad_out.write(out + t, n - t);
    }
}

void decode(const Cast& cast, int k, const u32* codes, i64 n, float* out) {
    (cast.table ? decode_values<true> : decode_values<false>)(cast, k, codes, n, out);
}

void pack(int bits, const u32* codes, i64 n, u32* words) {
    Padded<u32> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const u32* tile = pad.read(codes + t * CPD_TILE, n - t * CPD_TILE);
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            pack_column(tile, CPD_TILE, bits, words + t * CPD_LANES * bits, lane);
    }
}

void unpack(int bits, const u32* words, i64 n, u32* codes) {
    Padded<u32> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        i64 left = n - t * CPD_TILE;
        u32* out = codes + t * CPD_TILE;
        u32* tile = pad.target(out, left);
        for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP)
            unpack_column(words + t * CPD_LANES * bits, bits, tile, CPD_TILE, lane);
        pad.write(out, left);
    }
}

void amax_tiles(const float* x, i64 n, u32* amax) {
    Padded<float> pad;
    for (i64 t = 0; t * CPD_TILE < n; ++t)
        amax[t] = amax_tile(pad.read(x + t * CPD_TILE, n - t * CPD_TILE));
}

void encode_tiles(const Cast& cast, int blocks, bool fit, Key key, u64 offset, const float* x,
                  i64 n, u32* words, u8* shifts, u32* counts) {
    if (cast.ocp) CPD_PICK(ocp_loop, cast, counts)
    (cast, blocks, fit, key, offset, nullptr, nullptr, x, n, words, shifts, counts);
    else if (blocks) CPD_PICK(blocks_loop, cast, counts)(cast, blocks, fit, key, offset, nullptr,
                                                         nullptr, x, n, words, shifts, counts);
    else CPD_PICK(encode_loop, cast, counts)(cast, fit, key, offset, x, n, words, shifts, counts);
}

void encode_known(const Cast& cast, u8 shift, u32 amax, Key key, u64 offset, const float* x,
                  u32* words, const float* ahead) {
    CPD_PICK_WAY(tile_loop, cast, false)(cast, shift, amax, key, offset, x, words, ahead);
}

template <bool TABLE>
i64 decode_loop(const Cast& given, int blocks, const u32* words, const u8* shifts, float* out,
                i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    i64 nonfinite = 0;
    for (i64 t = 0; t * CPD_TILE < n; ++t)
        nonfinite += decode_tile<TABLE>(cast, blocks, shifts + t * CPD_SHIFTS_OF_TILE(blocks),
                                        words + t * CPD_LANES * width(cast), out + t * CPD_TILE,
                                        n - t * CPD_TILE);
    return nonfinite;
}

i64 decode_tiles(const Cast& cast, int blocks, const u32* words, const u8* shifts, float* out,
                 i64 n) {
    if (cast.ocp) return decode_ocp(cast, words, shifts, nullptr, out, n);
    return (cast.table ? decode_loop<true> : decode_loop<false>)(cast, blocks, words, shifts, out,
                                                                 n);
}

template <bool TABLE>
void add_loop(const Cast& given, int blocks, const u32* words, const u8* shifts, const float* x,
              float* out, i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    Padded<float> pad, pad_out;
    Most most;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        i64 left = n - t * CPD_TILE;
        const float* tile = pad.read(x + t * CPD_TILE, left);
        float* target = pad_out.target(out + t * CPD_TILE, left);
        const u32* in = words + t * CPD_LANES * width(cast);
        const u8* used = shifts + t * CPD_SHIFTS_OF_TILE(blocks);
        sum_tile<TABLE>(cast, blocks, used, in, tile, target, most);
        pad_out.write(out + t * CPD_TILE, left);
    }
}

void decode_add_tiles(const Cast& cast, int blocks, const u32* words, const u8* shifts,
                      const float* x, float* out, i64 n) {
    if (cast.ocp) return (void)decode_ocp(cast, words, shifts, x, out, n);
    (cast.table ? add_loop<true> : add_loop<false>)(cast, blocks, words, shifts, x, out, n);
}

// Decodes while the words are in the cache, but not tile by tile: stores that wait for memory would
// delay those of the words.
i64 decode_add_encode_tiles(const Cast& cast, int blocks, bool fit, Key key, u64 offset,
                            const u32* words_in, const u8* shifts_in, const float* x, i64 n,
                            u32* words, u8* shifts, float* out, u32* counts) {
    auto one = CPD_PICK(hop_loop, cast, counts);
    auto several = CPD_PICK(blocks_loop, cast, counts);
    if (cast.ocp) several = CPD_PICK(ocp_loop, cast, counts);
    const i64 most = out ? 64 * CPD_TILE : n;
    i64 nonfinite = 0;
    for (i64 i = 0; i < n; i += most) {
        i64 m = n - i < most ? n - i : most, t = i / CPD_TILE, w = t * CPD_LANES * width(cast);
        i64 s = t * CPD_SHIFTS_OF_TILE(blocks);
        u32* counted = counts ? counts + 3 * t : counts;
        if (blocks)
            several(cast, blocks, fit, key, offset + i, words_in + w, shifts_in + s, x + i, m,
                    words + w, shifts + s, counted);
        else
            one(cast, fit, key, offset + i, words_in + w, shifts_in + s, x + i, m, words + w,
                shifts + s, counted);
        if (out) nonfinite += decode_tiles(cast, blocks, words + w, shifts + s, out + i, m);
    }
    return nonfinite;
}

void copy(u8* out, const u8* x, i64 size) {
    typedef u8 Line __attribute__((vector_size(CPD_REGISTER), aligned(1), may_alias));
    for (; size >= 4 * CPD_REGISTER;
         size -= 4 * CPD_REGISTER, x += 4 * CPD_REGISTER, out += 4 * CPD_REGISTER) {
        Line lines[4];
        for (int i = 0; i < 4; ++i) lines[i] = ((const Line*)x)[i];
        for (int i = 0; i < 4; ++i) ((Line*)out)[i] = lines[i];
    }
    memcpy(out, x, (size_t)size);
}

void stream_on(u8* out, const u8* x, i64 size) {
    const i64 line = 64, head = (i64)(-(uintptr_t)out % line);
    if (head < size) {
        memcpy(out, x, (size_t)head);
        out += head, x += head, size -= head;
        for (; size >= line; out += line, x += line, size -= line)
            for (i64 i = 0; i < line; i += CPD_REGISTER) store_past_caches(out + i, x + i);
    }
    memcpy(out, x, (size_t)size);
}

}  // namespace

#include "cpu_blocks.h"
#include "cpu_integers.h"
#include "cpu_pools.h"
#include "cpu_products.h"
#include "cpu_sparse.h"
#include "cpu_steps.h"
//
#include "cpu_passes.h"

extern const Loops CPD_TABLE = {CPD_TABLE_NAME,
                                encode,
                                decode,
                                pack,
                                unpack,
                                amax_tiles,
                                encode_tiles,
                                encode_known,
                                decode_tiles,
                                decode_add_tiles,
                                decode_add_encode_tiles,
                                add_integers_tiles,
                                add_encode_integers_tiles,
                                decode_integers_tiles,
                                pack_trits,
                                unpack_trits,
                                mark_above,
                                count_digits,
                                count_bits,
                                unpack_bitmap,
                                collect_tile,
                                accumulate,
                                accumulate_above,
                                take_marked,
                                put_marked,
                                scale,
                                largest_of,
                                sum_in_pairs,
                                parts_of,
                                take_signs,
                                pack_signs,
                                mean_signs,
                                leaders_of,
                                add_levels,
                                leader_of,
                                row_products,
                                column_products,
                                outer_row,
                                copy,
                                stream_on,
                                matmul,
                                square_sums,
                                momentum_step,
                                lamb_sums,
                                adamp_sums,
                                move_weights,
                                {reconstruct_block<float>, reconstruct_block<double>},
                                {add_field<float>, add_field<double>},
                                {descend_block<float>, descend_block<double>},
                                {pool_cells<float>, pool_cells<double>},
                                {subtract_row<float>, subtract_row<double>}};

// Passes over gradients for the GPU, a warp a tile; a part of cuda_loops.cu, which includes it.

namespace {

struct Terms {
    float x, kept, more;
};

// The lowest byte, its bits in reverse.
__device__ u8 reversed(u32 bits) {
    bits = (bits >> 1 & 0x55u) | (bits & 0x55u) << 1;
    bits = (bits >> 2 & 0x33u) | (bits & 0x33u) << 2;
    return (u8)((bits >> 4 & 0x0fu) | (bits & 0x0fu) << 4);
}

}  // namespace

extern "C" {

// sum = x + factor * kept, and if more is given total = sum + more; amax: of the last, per tile
__global__ void accumulate(const float* x, const float* kept, float factor, const float* more,
                           i64 n, float* sum, float* total, u32* amax) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        u32 most = 0;
        const i64 start = t * CPD_TILE, stop = start + values_of_tile(n, t);
        const auto load = [&](i64 i) { return Terms{x[i], kept[i], more ? more[i] : 0.0f}; };
        in_batches(start, stop, load, [&](i64 i, Terms terms) {
            F value = add(terms.x, multiply(factor, terms.kept));  // by 1 it stays as it is
            sum[i] = value;
            if (more) total[i] = value = add(value, terms.more);
            most = larger(most, bits_of(value) & CPD_MAGNITUDE);
        });
        most = warp_largest(most);
        if (lane_of_thread() == 0) amax[t] = most;
    }
}

// out = x cut to its run's limit, limits being the bits of positive numbers; NaN stays as it is.
__global__ void cut_runs(const float* x, i64 n, const u32* limits, const i64* ends, i64 runs,
                         float* out) {
    by_run(x, n, ends, runs, limits, out, [](float value, u32 limit) {
        const u32 bits = bits_of(value), magnitude = bits & CPD_MAGNITUDE;
        const u32 cut = magnitude > CPD_INF ? magnitude : smaller(magnitude, limit);
        return from_bits(cut | (bits & ~CPD_MAGNITUDE));
    });
}

// The position of the first of the largest magnitudes of each chunk, a warp a chunk; chunk_values
// is below 2^32.
__global__ void chunk_leaders(const float* x, i64 n, i64 chunk_values, i64 chunks, i64* places) {
    for (i64 c = first_tile(); c < chunks; c += tile_stride()) {
        const float* v = x + c * chunk_values;
        const i64 rest = n - c * chunk_values, size = rest < chunk_values ? rest : chunk_values;
        u32 most = 0, at = ~0u;
        for (i64 i = lane_of_thread(); i < size; i += CPD_LANES) {
            const u32 a = bits_of(v[i]) & CPD_MAGNITUDE;
            if (a > most || at == ~0u) most = a, at = (u32)i;
        }
        const u32 first = ~warp_largest(most == warp_largest(most) ? ~at : 0);
        if (lane_of_thread() == 0) places[c] = first;
    }
}

// sum = x + kept; highest: of each bin the bits of the sum's largest magnitude; words: a bit for
// each value that is not 0 and reaches it when rate * x is added, and else zeros. A warp a bin.
__global__ void bin_leaders(const float* x, const float* kept, float rate, i64 n, i64 bin_values,
                            i64 bins, float* sum, u32* highest, u32* words) {
    for (i64 b = first_tile(); b < bins; b += tile_stride()) {
        const i64 first = b * bin_values + lane_of_thread();
        const i64 stop = n - b * bin_values < bin_values ? n : (b + 1) * bin_values;
        u32 most = 0;
        for (i64 i = first; i < stop; i += CPD_LANES) {
            sum[i] = add(x[i], kept[i]);
            most = larger(most, bits_of(sum[i]) & CPD_MAGNITUDE);
        }
        most = warp_largest(most);
        if (lane_of_thread() == 0) highest[b] = most;
        for (i64 i = first; i < stop; i += CPD_LANES) {
            const u32 reached = bits_of(add(multiply(x[i], rate), sum[i])) & CPD_MAGNITUDE;
            if (reached >= most && bits_of(sum[i]) & CPD_MAGNITUDE)
                atomicOr(words + i / 32, 1u << i % 32);
        }
    }
}

// signs: a bit for each value of x, plus more if that is given and then written to total: the
// highest of a byte first, set unless the value is below 0. counts: of each row's set bits, zeros
// at first; amax: of each tile. A warp a tile.
__global__ void pack_signs(const float* x, const float* more, i64 columns, i64 n, float* total,
                           u8* signs, u32* counts, u32* amax) {
    const int lane = lane_of_thread();
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        i64 row = row_of(t * CPD_TILE, columns, n), end = (row + 1) * columns;
        u32 most = 0;
        for (i64 i = t * CPD_TILE; i < n && i < (t + 1) * CPD_TILE; i += CPD_LANES) {
            const i64 own = i + lane;
            float value = load(x, own, n);
            if (more) store(total, own, n, value = add(value, load(more, own, n)));
            most = larger(most, bits_of(value) & CPD_MAGNITUDE);
            const bool set = own < n && !is_below(value);
            const u32 word = __ballot_sync(ALL_LANES, set);
            if (lane < 4 && i + 8 * lane < n) signs[i / 8 + lane] = reversed(word >> 8 * lane);
            for (; i >= end; end += columns) ++row;
            if (i + CPD_LANES <= end || n <= end) {
                if (lane == 0) atomicAdd(counts + row, (u32)__popc(word));
            } else if (set) {
                atomicAdd(counts + row_of(own, columns, n), 1u);
            }
        }
        most = warp_largest(most);
        if (lane == 0) amax[t] = most;
    }
}

// Adds to each value the mean of its row's pair (below, above) for its sign: a bit, from the
// highest of a byte, tells whether the sign is above.
__global__ void add_signs(const u8* signs, const float* pairs, i64 columns, i64 n, float* out) {
    for (i64 i = first_thread(); i < n; i += thread_stride()) {
        const i64 row = row_of(i, columns, n);
        out[i] = add(out[i], pairs[2 * row + (signs[i / 8] >> (7 - i % 8) & 1)]);
    }
}

// out = x minus the mean of its row's pair (below, above) for its sign.
__global__ void subtract_signs(const float* x, const float* pairs, i64 columns, i64 n, float* out) {
    for (i64 i = first_thread(); i < n; i += thread_stride()) {
        const i64 row = row_of(i, columns, n);
        out[i] = subtract(x[i], pairs[2 * row + !is_below(x[i])]);
    }
}

}  // extern "C"

// Passes over gradients for the GPU, a warp a tile; the rest of cuda_loops.cu, which includes it.

extern "C" {

// sum = x + factor * kept, and where more is given total = sum + more; amax: of the last, per tile
__global__ void accumulate(const float* x, const float* kept, float factor, const float* more,
                           i64 n, float* sum, float* total, u32* amax) {
    for (i64 t = first_tile(); t * CPD_TILE < n; t += tile_stride()) {
        u32 most = 0;
        for (i64 i = t * CPD_TILE + lane_of_thread(); i < n && i < (t + 1) * CPD_TILE;
             i += CPD_LANES) {
            F value = add(x[i], multiply(factor, kept[i]));  // by 1 it stays as it is
            sum[i] = value;
            if (more) total[i] = value = add(value, more[i]);
            most = larger(most, bits_of(value) & CPD_MAGNITUDE);
        }
        most = warp_largest(most);
        if (lane_of_thread() == 0) amax[t] = most;
    }
}

// out = x cut to its run's limit, limits being the bits of positive numbers; NaN stays as it is.
__global__ void cut_runs(const float* x, i64 n, const u32* limits, const i64* ends, i64 runs,
                         float* out) {
    for (i64 i = first_thread(); i < n; i += thread_stride()) {
        const u32 bits = bits_of(x[i]), limit = limits[run_of(ends, runs, i)];
        const u32 magnitude = bits & CPD_MAGNITUDE;
        const u32 cut = magnitude > CPD_INF ? magnitude : smaller(magnitude, limit);
        out[i] = from_bits(cut | (bits & ~CPD_MAGNITUDE));
    }
}

}  // extern "C"

// NVFP4 for the GPU: a thread a block of 16, or a value; a part of cuda_loops.cu, which includes
// it. ops/two_scales.py specifies each.
#define CPD_BLOCK 16        // values of a block
#define CPD_SPREAD 2688.0f  // the largest element times the largest scale
#define CPD_FLOAT_MAX 0x7f7fffffu
#define CPD_SCALE_MAX 0x43e00000u  // 448

namespace {

CPD_FN F divide(F a, F b) {
    F ratio;
    asm("div.rn.f32 %0, %1, %2;" : "=f"(ratio) : "f"(a), "f"(b));
    return ratio;
}

// The smaller of a number from 0 on, or infinity, and a limit, both as bits.
CPD_FN F at_most(F x, u32 limit) { return from_bits(smaller(bits_of(x), lanes(limit))); }

CPD_FN F spread_of(u32 amax) {
    return amax ? at_most(divide(CPD_SPREAD, from_bits(amax)), CPD_FLOAT_MAX) : 1.0f;
}

// The bits of the largest magnitude of a block; above those of infinity if it has a NaN.
__device__ u32 amax_of_block(const float* x, i64 n) {
    u32 most = 0;
    for (int i = 0; i < CPD_BLOCK && i < n; ++i) most = larger(most, bits_of(x[i]) & 0x7fffffffu);
    return most;
}

}  // namespace

extern "C" {

// amax: 0 at first; the bits of the largest magnitude in blocks that are finite.
__global__ void amax_two_scales(const float* x, i64 n, u32* amax) {
    u32 most = 0;
    for (i64 b = first_thread(); b * CPD_BLOCK < n; b += thread_stride()) {
        const u32 found = amax_of_block(x + b * CPD_BLOCK, n - b * CPD_BLOCK);
        if (found < CPD_INF) most = larger(most, found);
    }
    most = warp_largest(most);
    if (lane_of_thread() == 0) atomicMax(amax, most);
}

// scale_numbers: the cast of a block's scale
__global__ void encode_two_scales(const int* cast_numbers, const int* scale_numbers, u32 key_low,
                                  u32 key_high, u64 offset, const float* x, i64 n, const u32* amax,
                                  u32* words, u8* scales, float* scale) {
    const Cast cast = load_cast(cast_numbers), by = load_cast(scale_numbers);
    const auto to = make_encoder_of<CPD_BY_NEAREST>(by, 0u);
    const auto back = make_decoder(by, 0u);
    const Key key{key_low, key_high};
    const F spread = spread_of(*amax), all = divide(1.0f, spread);
    Counts counts;
    if (first_thread() == 0) *scale = all;
    by_way(cast, [&](auto way) {
        const auto e = make_encoder_of<way.value>(cast, 0u);
        for (i64 b = first_thread(); b * CPD_BLOCK < n; b += thread_stride()) {
            const i64 first = b * CPD_BLOCK, left = n - first;
            const u32 most = amax_of_block(x + first, left);
            const bool marked = most >= CPD_INF;
            const F largest = from_bits(marked ? 0u : most);
            const F wanted = at_most(multiply(divide(largest, 6.0f), spread), CPD_SCALE_MAX);
            const U code =
                encode_value<CPD_BY_NEAREST, false, CPD_INSIDE>(by, to, wanted, key, 0, counts);
            const F step = multiply(decode_code(by, back, code), all);
            const F factor = at_most(divide(1.0f, step), CPD_FLOAT_MAX);
            u32 two[2] = {};
            for (int i = 0; i < CPD_BLOCK; ++i) {
                const F value = i < left && !marked ? multiply(x[first + i], factor) : 0.0f;
                const U element = encode_value<way.value, false, CPD_ANYTHING>(
                    cast, e, value, key, offset + (u64)(first + i), counts);
                two[i / 8] |= element << i % 8 * 4;
            }
            words[2 * b] = two[0], words[2 * b + 1] = two[1];
            scales[b] = (u8)(marked ? by.nan_code : code);
        }
    });
}

// more: added to the numbers, unless null
__global__ void decode_two_scales(const int* cast_numbers, const int* scale_numbers,
                                  const u32* words, const u8* scales, const float* scale,
                                  const float* more, float* out, i64 n, u64* nonfinite) {
    const Cast cast = load_cast(cast_numbers), by = load_cast(scale_numbers);
    const auto element = make_decoder(cast, 0u), back = make_decoder(by, 0u);
    I count = 0;
    for (i64 i = first_thread(); i < n; i += thread_stride()) {
        const F step = multiply(decode_code(by, back, (U)scales[i / CPD_BLOCK]), *scale);
        const U code = words[i / 8] >> i % 8 * 4 & 15u;
        F value = multiply(decode_code(cast, element, code), step);
        if (more) value = add(more[i], value);
        out[i] = value;
        count += (bits_of(value) & 0x7fffffffu) >= CPD_INF;
    }
    if (count) atomicAdd(nonfinite, (u64)count);
}

}  // extern "C"

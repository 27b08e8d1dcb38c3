// The types and functions of cpd.h on the CPU: the lanes of a register. Only this file knows its
// width, and the instructions that g++ 12 does not find itself.
#ifndef CPD_CPU_REGISTERS_H
#define CPD_CPU_REGISTERS_H

#include <string.h>

#include <utility>

// Inlined by force: a call would pass these vectors through memory.
#define CPD_INLINE __attribute__((always_inline))
#define CPD_FN static inline CPD_INLINE
// Work on a tile is a function of its own: loops that share it are compiled faster.
#define CPD_TILE_FN static __attribute__((noinline))

// Bytes of a register of the target processor. cpu_v3.cpp and cpu_v4.cpp define 32 (AVX2) and 64
// (AVX-512); all processors have 16. g++ lowers comparisons of wider vectors lane by lane.
#ifndef CPD_REGISTER
#define CPD_REGISTER 16
#endif
#if CPD_REGISTER > 16 || defined(__SSE2__)
#define CPD_X86
#include <immintrin.h>
#endif

#define CPD_GROUP (CPD_REGISTER / 4)
#define CPD_VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef float F CPD_VECTOR(CPD_REGISTER);
typedef u32 U CPD_VECTOR(CPD_REGISTER);
typedef int I CPD_VECTOR(CPD_REGISTER);
typedef double D CPD_VECTOR(CPD_REGISTER);
typedef i64 DBits CPD_VECTOR(CPD_REGISTER);
typedef float HalfF CPD_VECTOR(CPD_REGISTER / 2);  // as many as there are in D
typedef u32 HalfU CPD_VECTOR(CPD_REGISTER / 2);

// The lanes 0, 1, ... as template arguments: g++ shuffles by constants only.
template <int... LANE>
using Numbers = std::integer_sequence<int, LANE...>;
typedef std::make_integer_sequence<int, CPD_GROUP> EachLane;
typedef std::make_integer_sequence<int, CPD_GROUP / 2> EachOfHalf;

CPD_FN U bits_of(F x) { return (U)x; }
CPD_FN F from_bits(U u) { return (F)u; }
template <class N>
CPD_FN N add(N a, N b) {
    return a + b;
}
template <class N>
CPD_FN N subtract(N a, N b) {
    return a - b;
}
template <class N>
CPD_FN N multiply(N a, N b) {
    return a * b;
}
CPD_FN U truncate(F x) { return (U) __builtin_convertvector(x, I); }
CPD_FN F to_float(U integer) { return __builtin_convertvector((I)integer, F); }
CPD_FN I less(U a, U b) { return (I)a < (I)b; }
CPD_FN I equal(U a, U b) { return (I)a == (I)b; }
CPD_FN U lanes(U each) { return each; }
CPD_FN bool any(bool all) { return all; }

template <int... LANE>
CPD_FN U lane_numbers(Numbers<LANE...>) {
    return U{LANE...};
}
CPD_FN U lane_numbers() { return lane_numbers(EachLane{}); }
// Each lane's value is that of the lane whose number differs by STEP, a power of two.
template <int STEP, int... LANE>
CPD_FN U crossed(U v, Numbers<LANE...>) {
    return __builtin_shufflevector(v, v, (LANE ^ STEP)...);
}

// Prefetches the cache line of x; x may lie beyond the array.
CPD_FN void expect(const float* x) { __builtin_prefetch(x); }
// The loops pad incomplete tiles, so n is ignored.
CPD_FN I inside(i64, i64) { return ~I{}; }
CPD_FN F load(const float* x, i64 i, i64) {
    F value;
    memcpy(&value, x + i, sizeof value);
    return value;
}
#if CPD_REGISTER == 64
// The n values, 1 or more, from x on, followed by zeros.
CPD_FN F load_some(const float* x, i64 n) {
    return _mm512_maskz_loadu_ps((__mmask16)(n < CPD_GROUP ? (1u << n) - 1 : 0xffff), x);
}
// Writes the first n lanes; all of them without a mask, which takes less time.
CPD_FN void store_some(float* x, i64 n, F value) {
    if (n >= CPD_GROUP)
        memcpy(x, &value, sizeof value);
    else
        _mm512_mask_storeu_ps(x, (__mmask16)((1u << n) - 1), value);
}
// Writes the lanes of mask, followed by arbitrary values, and returns the number of these lanes.
CPD_FN i64 store_lanes(u32 mask, U places, F values, u32* to, float* out) {
    const __m512i packed = _mm512_maskz_compress_epi32((__mmask16)mask, (__m512i)places);
    const F numbers = _mm512_maskz_compress_ps((__mmask16)mask, values);
    memcpy(to, &packed, sizeof packed), memcpy(out, &numbers, sizeof numbers);
    return __builtin_popcount(mask);
}
// The same for the low bytes of values.
CPD_FN i64 store_lanes(u32 mask, U values, u8* out) {
    const __m512i packed = _mm512_maskz_compress_epi32((__mmask16)mask, (__m512i)values);
    _mm_storeu_si128((__m128i*)out, _mm512_maskz_cvtepi32_epi8(0xffff, packed));
    return __builtin_popcount(mask);
}
CPD_FN i64 store_lanes(u32 mask, U values, uint16_t* out) {
    const __m512i packed = _mm512_maskz_compress_epi32((__mmask16)mask, (__m512i)values);
    _mm256_storeu_si256((__m256i*)out, _mm512_maskz_cvtepi32_epi16(0xffff, packed));
    return __builtin_popcount(mask);
}
#endif
// Copies a register's bytes; out, at a multiple of them, is not read into the caches.
CPD_FN void store_past_caches(u8* out, const u8* x) {
#if CPD_REGISTER == 64
    _mm512_stream_si512((__m512i*)out, _mm512_loadu_si512(x));
#elif CPD_REGISTER == 32
    _mm256_stream_si256((__m256i*)out, _mm256_loadu_si256((const __m256i*)x));
#elif defined(CPD_X86)
    _mm_stream_si128((__m128i*)out, _mm_loadu_si128((const __m128i*)x));
#else
    memcpy(out, x, CPD_REGISTER);
#endif
}
CPD_FN void store(float* x, i64 i, i64, F value) { memcpy(x + i, &value, sizeof value); }
CPD_FN U load(const u32* x, i64 i, i64) {
    U value;
    memcpy(&value, x + i, sizeof value);
    return value;
}
CPD_FN void store(u32* x, i64 i, i64, U value) { memcpy(x + i, &value, sizeof value); }

// A byte of each lane.
CPD_FN U load_bytes(const u8* x) {
#if CPD_REGISTER == 64
    return (U)_mm512_maskz_cvtepu8_epi32(0xffff, _mm_loadu_si128((const __m128i*)x));
#elif CPD_REGISTER == 32
    return (U)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)x));
#elif defined(CPD_X86)
    int bytes;
    memcpy(&bytes, x, sizeof bytes);
    const __m128i zero = {}, pairs = _mm_unpacklo_epi8(_mm_cvtsi32_si128(bytes), zero);
    return (U)_mm_unpacklo_epi16(pairs, zero);
#else
    U value;
    for (int lane = 0; lane < CPD_GROUP; ++lane) value[lane] = x[lane];
    return value;
#endif
}
// value: below 256
CPD_FN void store_bytes(u8* x, U value) {
#if CPD_REGISTER == 64
    _mm_storeu_si128((__m128i*)x, _mm512_maskz_cvtepi32_epi8(0xffff, (__m512i)value));
#elif CPD_REGISTER == 32
    const __m128i low = _mm256_castsi256_si128((__m256i)value),
                  high = _mm256_extracti128_si256((__m256i)value, 1),
                  pairs = _mm_packus_epi32(low, high);
    _mm_storel_epi64((__m128i*)x, _mm_packus_epi16(pairs, pairs));
#elif defined(CPD_X86)
    const __m128i pairs = _mm_packs_epi32((__m128i)value, (__m128i)value);
    const int bytes = _mm_cvtsi128_si32(_mm_packus_epi16(pairs, pairs));
    memcpy(x, &bytes, sizeof bytes);
#else
    for (int lane = 0; lane < CPD_GROUP; ++lane) x[lane] = (u8)value[lane];
#endif
}

CPD_FN U gather(const int* table, U place) {
#if CPD_REGISTER == 64
    return (U)__builtin_ia32_gathersiv16si(I{}, table, (I)place, (short)-1, 4);
#elif CPD_REGISTER == 32
    return (U)__builtin_ia32_gathersiv8si(I{}, table, (I)place, ~I{}, 4);
#else
    U found;
    for (int lane = 0; lane < CPD_GROUP; ++lane) found[lane] = (u32)table[place[lane]];
    return found;
#endif
}

CPD_FN F square_root(F x) {
#if CPD_REGISTER == 64
    return _mm512_maskz_sqrt_ps(0xffff, x);
#elif CPD_REGISTER == 32
    return _mm256_sqrt_ps(x);
#elif defined(CPD_X86)
    return _mm_sqrt_ps(x);
#else
    for (int lane = 0; lane < CPD_GROUP; ++lane) x[lane] = __builtin_sqrtf(x[lane]);
    return x;
#endif
}

CPD_FN D square_root(D x) {
#if CPD_REGISTER == 64
    return _mm512_maskz_sqrt_pd(0xff, x);
#elif CPD_REGISTER == 32
    return _mm256_sqrt_pd(x);
#elif defined(CPD_X86)
    return _mm_sqrt_pd(x);
#else
    for (int lane = 0; lane < CPD_GROUP / 2; ++lane) x[lane] = __builtin_sqrt(x[lane]);
    return x;
#endif
}

// The signs of all lanes, the first lane's the lowest bit.
CPD_FN u32 signs(I v) {
#if CPD_REGISTER == 64
    return (u32)__builtin_ia32_cvtd2mask512(v);
#elif CPD_REGISTER == 32
    return (u32)_mm256_movemask_ps((F)v);
#elif defined(CPD_X86)
    return (u32)_mm_movemask_ps((F)v);
#else
    u32 bits = 0;
    for (int lane = 0; lane < CPD_GROUP; ++lane) bits |= (u32)v[lane] >> 31 << lane;
    return bits;
#endif
}
CPD_FN bool any(I mask) { return signs(mask) != 0; }
// For rare cases: whether any lane is set, which the GPU does not check.
CPD_FN bool perhaps(I mask) { return __builtin_expect(any(mask), 0); }

#if CPD_REGISTER == 64  // g++ 12 does these by halves
CPD_FN D widened(HalfF x) { return _mm512_maskz_cvtps_pd(0xff, x); }
CPD_FN DBits widened(HalfU x) { return (DBits)_mm512_maskz_cvtepu32_epi64(0xff, (__m256i)x); }
#else
CPD_FN D widened(HalfF x) { return __builtin_convertvector(x, D); }
CPD_FN DBits widened(HalfU x) { return __builtin_convertvector(x, DBits); }
#endif

// float64 in each lane: two registers.
struct W {
    D low, high;
};
template <int... LANE>
CPD_FN W wide(F x, Numbers<LANE...>) {
    return {widened(__builtin_shufflevector(x, x, LANE...)),
            widened(__builtin_shufflevector(x, x, (LANE + CPD_GROUP / 2)...))};
}
CPD_FN W wide(F x) { return wide(x, EachOfHalf{}); }
// As the last bits of 2^52, which is then subtracted.
CPD_FN D number_of(HalfU x) { return (D)(widened(x) | (i64)0x433 << 52) - (double)((i64)1 << 52); }
template <int... LANE>
CPD_FN W wide(U x, Numbers<LANE...>) {
    return {number_of(__builtin_shufflevector(x, x, LANE...)),
            number_of(__builtin_shufflevector(x, x, (LANE + CPD_GROUP / 2)...))};
}
CPD_FN W wide(U x) { return wide(x, EachOfHalf{}); }
CPD_FN W subtract(W a, W b) { return {a.low - b.low, a.high - b.high}; }
CPD_FN W multiply(W a, W b) { return {a.low * b.low, a.high * b.high}; }
template <int... LANE>
CPD_FN I evens(DBits low, DBits high, Numbers<LANE...>) {
    return __builtin_shufflevector((I)low, (I)high, (2 * LANE)...);
}
CPD_FN I reaches(W a, W b) { return evens(a.low >= b.low, a.high >= b.high, EachLane{}); }

#endif

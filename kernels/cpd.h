// The vocabulary of the kernels: one lane on the GPU, those of a register on the CPU, under the
// same names. The only file, with cast.h, that asks which of the two it is compiled for.
#ifndef CPD_H
#define CPD_H

#include "cast.h"

#define CPD_INF 0x7f800000u  // float32 bits of infinity; above it NaN
#define CPD_NAN 0x7fc00000u

#ifdef __CUDACC__

// One lane a thread. CuPy compiles with -ftz=true, which would flush subnormal numbers in + and -:
// the PTX instructions without .ftz keep them.
#define CPD_FN static __device__ __forceinline__
#define CPD_GROUP 1
typedef float F;
typedef u32 U;
typedef int I;
typedef double D;

// Moves that the compiler does not see through: for compute_100 and later NVRTC would make abs.ftz
// and neg.ftz of masks between them, which flush subnormal numbers.
CPD_FN U bits_of(F x) {
    U u;
    asm("mov.b32 %0, %1;" : "=r"(u) : "f"(x));
    return u;
}
CPD_FN F from_bits(U u) {
    F x;
    asm("mov.b32 %0, %1;" : "=f"(x) : "r"(u));
    return x;
}
CPD_FN F add(F a, F b) {
    F sum;
    asm("add.rn.f32 %0, %1, %2;" : "=f"(sum) : "f"(a), "f"(b));
    return sum;
}
CPD_FN F subtract(F a, F b) {
    F difference;
    asm("sub.rn.f32 %0, %1, %2;" : "=f"(difference) : "f"(a), "f"(b));
    return difference;
}
CPD_FN F multiply(F a, F b) {
    F product;
    asm("mul.rn.f32 %0, %1, %2;" : "=f"(product) : "f"(a), "f"(b));
    return product;
}
CPD_FN U truncate(F x) { return (U)(int)x; }
CPD_FN F to_float(U integer) { return __int2float_rn((int)integer); }
CPD_FN D add(D a, D b) { return __dadd_rn(a, b); }
CPD_FN D subtract(D a, D b) { return __dsub_rn(a, b); }
CPD_FN D multiply(D a, D b) { return __dmul_rn(a, b); }
CPD_FN D widened(F x) {
    D wide;
    asm("cvt.f64.f32 %0, %1;" : "=d"(wide) : "f"(x));
    return wide;
}
CPD_FN F narrowed(D x) {
    F narrow;
    asm("cvt.rn.f32.f64 %0, %1;" : "=f"(narrow) : "d"(x));
    return narrow;
}
typedef double W;  // float64 in each lane
CPD_FN W wide(F x) { return widened(x); }
CPD_FN W wide(U x) { return (double)x; }
CPD_FN I reaches(W a, W b) { return a >= b ? -1 : 0; }
CPD_FN U gather(const int* table, U place) { return (U)table[place]; }
CPD_FN bool any(I lane) { return lane; }
CPD_FN I less(U a, U b) { return (int)a < (int)b ? -1 : 0; }
CPD_FN I equal(U a, U b) { return a == b ? -1 : 0; }
CPD_FN U lane_numbers() { return 0; }
CPD_FN void expect(const float*) {}
// Values from n on are padding: they read as zero and are not written.
CPD_FN F load(const float* x, i64 i, i64 n) { return i < n ? x[i] : 0.0f; }
CPD_FN void store(float* x, i64 i, i64 n, F value) {
    if (i < n) x[i] = value;
}
CPD_FN I inside(i64 i, i64 n) { return i < n ? -1 : 0; }
CPD_FN U load(const u32* x, i64 i, i64 n) { return i < n ? x[i] : 0u; }
CPD_FN void store(u32* x, i64 i, i64 n, U value) {
    if (i < n) x[i] = value;
}
CPD_FN bool any(bool lane) { return lane; }
CPD_FN U load_bytes(const u8* x) { return *x; }
CPD_FN void store_bytes(u8* x, U value) { *x = (u8)value; }

#else

#include <string.h>

#include <utility>

// Inlined by force: a call would pass these vectors through memory.
#define CPD_FN static inline __attribute__((always_inline))

// The one width of vectors: bytes of a register of the processor that is compiled for. cpu_v3.cpp
// and cpu_v4.cpp say 32, which is AVX2, and 64, AVX-512; all processors have 16. g++ lowers
// comparisons of wider vectors lane by lane.
#ifndef CPD_REGISTER
#define CPD_REGISTER 16
#endif
#define CPD_GROUP (CPD_REGISTER / 4)
#define CPD_VECTOR(bytes) __attribute__((vector_size(bytes)))
typedef float F CPD_VECTOR(CPD_REGISTER);
typedef u32 U CPD_VECTOR(CPD_REGISTER);
typedef int32_t I CPD_VECTOR(CPD_REGISTER);
typedef double D CPD_VECTOR(CPD_REGISTER);

// 0, 1, ... of the lanes as template arguments: what g++ shuffles by it must know from the start.
template <int... LANE>
using Numbers = std::integer_sequence<int, LANE...>;
typedef std::make_integer_sequence<int, CPD_GROUP> EachLane;

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
typedef double W CPD_VECTOR(2 * CPD_REGISTER);  // float64 in each lane
CPD_FN W wide(F x) { return __builtin_convertvector(x, W); }
CPD_FN W wide(U x) { return __builtin_convertvector(x, W); }
CPD_FN I reaches(W a, W b) { return __builtin_convertvector(a >= b, I); }
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
CPD_FN I less(U a, U b) { return (I)a < (I)b; }
CPD_FN I equal(U a, U b) { return (I)a == (I)b; }
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
// Fetches the line of x into the cache while other work goes on; x may lie beyond the array.
CPD_FN void expect(const float* x) { __builtin_prefetch(x); }
// The loops pad incomplete tiles themselves, so n needs no look.
CPD_FN I inside(i64, i64) { return ~I{}; }
CPD_FN F load(const float* x, i64 i, i64) {
    F value;
    memcpy(&value, x + i, sizeof value);
    return value;
}
CPD_FN void store(float* x, i64 i, i64, F value) { memcpy(x + i, &value, sizeof value); }
CPD_FN U load(const u32* x, i64 i, i64) {
    U value;
    memcpy(&value, x + i, sizeof value);
    return value;
}
CPD_FN void store(u32* x, i64 i, i64, U value) { memcpy(x + i, &value, sizeof value); }
CPD_FN U lanes(U each) { return each; }
CPD_FN bool any(bool all) { return all; }
typedef u8 Bytes CPD_VECTOR(CPD_GROUP);
CPD_FN U load_bytes(const u8* x) {
    Bytes value;
    memcpy(&value, x, sizeof value);
    return __builtin_convertvector(value, U);
}
CPD_FN void store_bytes(u8* x, U value) {
    Bytes low = __builtin_convertvector(value, Bytes);
    memcpy(x, &low, sizeof low);
}
// The signs of all lanes, the first lane's the lowest bit.
CPD_FN u32 signs(I v) {
#if CPD_REGISTER == 64
    return (u32)__builtin_ia32_cvtd2mask512(v);
#elif CPD_REGISTER == 32
    return (u32)__builtin_ia32_movmskps256((F)v);
#elif defined(__SSE2__)
    return (u32)__builtin_ia32_movmskps((F)v);
#else
    u32 bits = 0;
    for (int lane = 0; lane < CPD_GROUP; ++lane) bits |= (u32)v[lane] >> 31 << lane;
    return bits;
#endif
}
CPD_FN bool any(I mask) { return signs(mask) != 0; }

#endif

CPD_FN U lanes(u32 value) { return U{} + value; }
CPD_FN U larger(U a, U b) { return (U)((I)a < (I)b ? (I)b : (I)a); }
CPD_FN U smaller(U a, U b) { return (U)((I)a < (I)b ? (I)a : (I)b); }

#endif

// The vocabulary of the kernels: one lane on the GPU, sixteen on the CPU, under the same names.
// The only file that asks which of the two it is compiled for.
#ifndef CPD_H
#define CPD_H

#define CPD_TILE 1024            // values in a tile
#define CPD_LANES 32             // lanes of a tile; value row * CPD_LANES + lane belongs to lane
#define CPD_ROWS 32              // rows of a tile
#define CPD_SHIFT_BIAS 127       // a shift k is stored as k + 127
#define CPD_SHIFT_NONFINITE 255  // stored instead: the tile holds NaN or infinity
#define CPD_INF 0x7f800000u      // float32 bits of infinity; above it NaN
#define CPD_NAN 0x7fc00000u

#ifdef __CUDACC__

typedef unsigned char u8;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

// One lane a thread. NVRTC has no <stdint.h>, and CuPy compiles with -ftz=true, which would flush
// subnormal numbers in + and -: the PTX instructions without .ftz keep them.
#define CPD_FN static __device__ __forceinline__
#define CPD_GROUP 1
typedef float F;
typedef u32 U;
typedef int I;

CPD_FN U bits_of(F x) { return __float_as_uint(x); }
CPD_FN F from_bits(U u) { return __uint_as_float(u); }
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
CPD_FN I less(U a, U b) { return (int)a < (int)b ? -1 : 0; }
CPD_FN I equal(U a, U b) { return a == b ? -1 : 0; }
CPD_FN U lane_numbers() { return 0; }
// Values from n on are padding: they read as zero and are not written.
CPD_FN F load(const float* x, i64 i, i64 n) { return i < n ? x[i] : 0.0f; }
CPD_FN void store(float* x, i64 i, i64 n, F value) {
    if (i < n) x[i] = value;
}
CPD_FN U load(const u32* x, i64 i, i64 n) { return i < n ? x[i] : 0u; }
CPD_FN void store(u32* x, i64 i, i64 n, U value) {
    if (i < n) x[i] = value;
}

#else

#include <stdint.h>
#include <string.h>

typedef uint8_t u8;
typedef uint32_t u32;
typedef uint64_t u64;
typedef int64_t i64;

// Inlined by force: outside a clone a function would follow another vector calling convention.
#define CPD_FN static inline __attribute__((always_inline))
#define CPD_GROUP 16
typedef float F __attribute__((vector_size(64)));
typedef u32 U __attribute__((vector_size(64)));
typedef int32_t I __attribute__((vector_size(64)));

// One copy of each loop for each generation of processors, chosen when the module is loaded.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && defined(__gnu_linux__)
#define CPD_CLONES __attribute__((target_clones("default", "arch=x86-64-v3", "arch=x86-64-v4")))
#else
#define CPD_CLONES
#endif

CPD_FN U bits_of(F x) { return (U)x; }
CPD_FN F from_bits(U u) { return (F)u; }
CPD_FN F add(F a, F b) { return a + b; }
CPD_FN F subtract(F a, F b) { return a - b; }
CPD_FN I less(U a, U b) { return (I)a < (I)b; }
CPD_FN I equal(U a, U b) { return (I)a == (I)b; }
CPD_FN U lane_numbers() { return U{0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15}; }
// The loops pad incomplete tiles themselves, so n needs no look.
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

#endif

CPD_FN U all(u32 value) { return U{} + value; }
CPD_FN U larger(U a, U b) { return less(a, b) ? b : a; }
CPD_FN U smaller(U a, U b) { return less(a, b) ? a : b; }

#endif

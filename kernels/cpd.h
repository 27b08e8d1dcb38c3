// Types and functions of the kernels: one lane on the GPU, the lanes of a register on the CPU, with
// the same names. Only this file and cast.h depend on which of the two they are compiled for.
#ifndef CPD_H
#define CPD_H

#include "cast.h"

#define CPD_MAGNITUDE 0x7fffffffu  // float32 bits but the sign
#define CPD_INF 0x7f800000u        // float32 bits of infinity; above it NaN
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

// Moves that are opaque to the compiler: for compute_100 and later NVRTC would turn masks between
// them into abs.ftz and neg.ftz, which flush subnormal numbers.
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
CPD_FN bool perhaps(I) { return true; }
CPD_FN U load_bytes(const u8* x) { return *x; }
CPD_FN void store_bytes(u8* x, U value) { *x = (u8)value; }

#else
#include "cpu_registers.h"
#endif

CPD_FN U lanes(u32 value) { return U{} + value; }
CPD_FN U larger(U a, U b) { return (U)((I)a < (I)b ? (I)b : (I)a); }
CPD_FN U smaller(U a, U b) { return (U)((I)a < (I)b ? (I)a : (I)b); }

#endif

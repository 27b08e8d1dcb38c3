// e4m3, e4m3fn and e5m2 by the GPU's conversions, two values an instruction. They give the bits of
// float_format.h for finite values inside the format and near shifts.
// Instructions: NVIDIA's PTX ISA, cvt (sm_90 or later).
#ifndef CPD_CUDA_FLOAT8_H
#define CPD_CUDA_FLOAT8_H

#include "cpd.h"

#if defined(CPD_FIXED_CAST) && __CUDA_ARCH__ >= 900
#define CPD_HAS_FLOAT8 1
#else
#define CPD_HAS_FLOAT8 0  // kernels for all casts have no registers for one more way
#endif

// Whether the GPU's codes are those of a format up to its largest number. For an e4m3 with infinity
// that is 0x77, 240; for one without 0x7e, 448.
CPD_FN bool is_e4m3(const Cast& cast) {
    return cast.exp == 4 && cast.man == 3 && (cast.max_code == 0x77 || cast.max_code == 0x7e);
}
CPD_FN bool is_e5m2(const Cast& cast) {
    return cast.exp == 5 && cast.man == 2 && cast.max_code == 0x7b;
}
CPD_FN bool is_float8(const Cast& cast) {
    return CPD_HAS_FLOAT8 && !cast.table && (is_e4m3(cast) || is_e5m2(cast));
}

#if CPD_HAS_FLOAT8

// The larger of a magnitude and |x|; NaN if x is.
CPD_FN F larger_magnitude(F most, F x) {
    F magnitude, larger;
    asm("abs.f32 %0, %1;" : "=f"(magnitude) : "f"(x));
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(most), "f"(magnitude));
    return larger;
}

// The codes of two numbers, rounded to nearest, the first one's in the lower byte.
CPD_FN u32 two_codes(const Cast& cast, F first, F second) {
    unsigned short codes;
    if (is_e5m2(cast))
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(second), "f"(first));
    return codes;
}

// The numbers of two codes as float16, which holds all of them, one in each half.
CPD_FN u32 two_halves(const Cast& cast, u32 codes) {
    u32 halves;
    const unsigned short two = (unsigned short)codes;
    if (is_e5m2(cast))
        asm("cvt.rn.f16x2.e5m2x2 %0, %1;" : "=r"(halves) : "h"(two));
    else
        asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(two));
    return halves;
}
CPD_FN F widened_half(u32 half) {
    F x;
    const unsigned short bits = (unsigned short)half;
    asm("cvt.f32.f16 %0, %1;" : "=f"(x) : "h"(bits));
    return x;
}

// a b + c, rounded once: equals add of multiply if the product is exact.
CPD_FN F fused(F a, F b, F c) {
    F sum;
    asm("fma.rn.f32 %0, %1, %2, %3;" : "=f"(sum) : "f"(a), "f"(b), "f"(c));
    return sum;
}

// Bit 7 of a byte is set if one of four codes is infinity or NaN.
CPD_FN u32 beyond_largest(const Cast& cast, u32 word) {
    return ((word & 0x7f7f7f7fu) + (0x7fu - cast.max_code) * 0x01010101u) & 0x80808080u;
}

#endif
#endif

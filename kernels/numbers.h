// float and double with the same names, for code that is compiled for both: one number on the GPU,
// the lanes of one register on the CPU.
#ifndef CPD_NUMBERS_H
#define CPD_NUMBERS_H

#include "random.h"

template <int BYTES>
struct Layout;
template <>
struct Layout<4> {
    typedef int Int;
    enum { mantissa = 23, bias = 127 };
};
template <>
struct Layout<8> {
    typedef i64 Int;
    enum { mantissa = 52, bias = 1023 };
};
template <class N>
struct Number;

#ifdef __CUDACC__

typedef float S;
template <>
struct Number<float> : Layout<4> {
    typedef int Bits;
    typedef u32 Draws;
    enum { lanes = 1, any_way = 0 };
};
template <>
struct Number<double> : Layout<8> {
    typedef i64 Bits;
    typedef u32 Draws;
    enum { lanes = 1, any_way = 1 };  // of rounding; else to nearest alone
};

CPD_FN int raw(float x) { return (int)bits_of(x); }
CPD_FN float number(int bits) { return from_bits((u32)bits); }
CPD_FN i64 raw(double x) { return __double_as_longlong(x); }
CPD_FN double number(i64 bits) { return __longlong_as_double(bits); }
CPD_FN int above(float a, float b) { return a > b ? -1 : 0; }
CPD_FN i64 above(double a, double b) { return a > b ? -1 : 0; }
CPD_FN int more(int a, int b) { return a > b ? -1 : 0; }
CPD_FN i64 more(i64 a, i64 b) { return a > b ? -1 : 0; }
CPD_FN int pick(int which, int a, int b) { return which ? a : b; }
CPD_FN i64 pick(i64 which, i64 a, i64 b) { return which ? a : b; }
CPD_FN float read(const float* x, float) { return *x; }
CPD_FN double read(const float* x, double) { return widened(*x); }
CPD_FN float to_float32(float x) { return x; }
CPD_FN float to_float32(double x) { return narrowed(x); }
CPD_FN int widened(u32 draw, float) { return (int)draw; }
CPD_FN i64 widened(u32 draw, double) { return (i64)draw; }

#else

typedef F S;
typedef int SBits CPD_VECTOR(CPD_REGISTER);

template <>
struct Number<S> : Layout<4> {
    typedef SBits Bits;
    typedef u32 Draws CPD_VECTOR(CPD_REGISTER);
    typedef S Floats;  // as many of float32
    enum { lanes = CPD_REGISTER / 4, any_way = 1 };
};
template <>
struct Number<D> : Layout<8> {
    typedef DBits Bits;
    typedef HalfU Draws;
    typedef HalfF Floats;
    enum { lanes = CPD_REGISTER / 8, any_way = 1 };
};

CPD_FN SBits raw(S x) { return (SBits)x; }
CPD_FN S number(SBits bits) { return (S)bits; }
CPD_FN DBits raw(D x) { return (DBits)x; }
CPD_FN D number(DBits bits) { return (D)bits; }
CPD_FN SBits above(S a, S b) { return a > b; }
CPD_FN DBits above(D a, D b) { return a > b; }
template <class B>
CPD_FN B more(B a, B b) {
    return a > b;
}
template <class B>
CPD_FN B pick(B which, B a, B b) {
    return which ? a : b;
}
CPD_FN S widened(Number<S>::Floats x, S) { return x; }
CPD_FN SBits widened(Number<S>::Draws draw, S) { return (SBits)draw; }
CPD_FN D widened(HalfF x, D) { return widened(x); }
CPD_FN DBits widened(HalfU draw, D) { return widened(draw); }
template <class N>
CPD_FN N read(const float* x, N) {
    typename Number<N>::Floats floats;
    memcpy(&floats, x, sizeof floats);
    return widened(floats, N{});
}
template <class N>
CPD_FN N each(const float* x, N) {  // the same in all lanes
    u32 bits;
    memcpy(&bits, x, sizeof bits);  // a float would need another register to be added to zero
    return widened((typename Number<N>::Floats)(typename Number<N>::Draws{} + bits), N{});
}
template <class N>
CPD_FN typename Number<N>::Floats to_float32(N x) {
    return __builtin_convertvector(x, typename Number<N>::Floats);
}
#endif

template <class N>
CPD_FN typename Number<N>::Bits fill(typename Number<N>::Int bits) {
    return typename Number<N>::Bits{} + bits;
}
template <class N>
CPD_FN typename Number<N>::Bits sign_bit() {
    return fill<N>((typename Number<N>::Int)1 << (8 * (int)sizeof(typename Number<N>::Int) - 1));
}
// Of positive numbers, or infinity.
template <class N>
CPD_FN N larger(N a, N b) {
    return number(pick(more(raw(a), raw(b)), raw(a), raw(b)));
}
template <class N>
CPD_FN N with_sign(N x, N of) {
    typename Number<N>::Bits sign = sign_bit<N>();
    return number((raw(x) & ~sign) | (raw(of) & sign));
}
// Whether no lane is set, if that is known quickly, else false.
template <class B>
CPD_FN bool is_none(B) {
    return false;
}
// a + b * c and a - b * c for exact products, as with powers of two.
template <class N>
CPD_FN N add_exact(N a, N b, N c) {
    return add(a, multiply(b, c));
}
template <class N>
CPD_FN N subtract_exact(N a, N b, N c) {
    return subtract(a, multiply(b, c));
}

// a + b * c rounded down.
template <class N>
CPD_FN N add_below(N a, N b, N c) {
    N total = add_exact(a, b, c);
    return number(raw(total) + above(subtract_exact(total, b, c), a));
}

// a + b rounded to odd: rounding it again equals rounding the exact sum.
template <class N>
CPD_FN N odd_sum(N a, N b) {
    typedef typename Number<N>::Bits Bits;
    N total = add(a, b);
    N part = subtract(total, a);
    N rest = add(subtract(a, subtract(total, part)), subtract(b, part));
    Bits bits = raw(total);
    Bits inexact = above(rest, N{}) | above(N{}, rest);  // false for NaN, the rest of infinity
    const int sign = 8 * (int)sizeof(typename Number<N>::Int) - 1;
    Bits step = ((raw(rest) ^ bits) >> sign) | 1;  // -1 towards zero, 1 away from it
    return number(bits + (inexact & ((bits & 1) - 1) & step));
}
// a + b rounded down; both are positive, and b is 0 or above a.
template <class N>
CPD_FN N sum_below(N a, N b) {
    N total = add(a, b);
    return number(raw(total) + above(subtract(total, b), a));
}

#if !defined(__CUDACC__) && CPD_REGISTER == 64
// The same in fewer instructions; maskz: g++ 12 warns of the others.
CPD_FN S larger(S a, S b) { return _mm512_maskz_max_ps(0xffff, a, b); }
CPD_FN D larger(D a, D b) { return _mm512_maskz_max_pd(0xff, a, b); }
#define CPD_CHOICE 0xd8  // of the bits of x those that are not set in the third
CPD_FN S with_sign(S x, S of) {
    return (S)_mm512_ternarylogic_epi32((__m512i)x, (__m512i)of, (__m512i)sign_bit<S>(),
                                        CPD_CHOICE);
}
CPD_FN D with_sign(D x, D of) {
    return (D)_mm512_ternarylogic_epi64((__m512i)x, (__m512i)of, (__m512i)sign_bit<D>(),
                                        CPD_CHOICE);
}
CPD_FN bool is_none(SBits lanes) { return !_mm512_test_epi32_mask((__m512i)lanes, (__m512i)lanes); }
CPD_FN bool is_none(DBits lanes) { return !_mm512_test_epi64_mask((__m512i)lanes, (__m512i)lanes); }
#define CPD_ROUND_DOWN (_MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC)
#define CPD_ROUND_UP (_MM_FROUND_TO_POS_INF | _MM_FROUND_NO_EXC)
CPD_FN S sum_below(S a, S b) { return _mm512_maskz_add_round_ps(0xffff, a, b, CPD_ROUND_DOWN); }
CPD_FN D sum_below(D a, D b) { return _mm512_maskz_add_round_pd(0xff, a, b, CPD_ROUND_DOWN); }
CPD_FN S odd_sum(S a, S b) {  // of the two neighbours the odd one
    S under = sum_below(a, b), over = _mm512_maskz_add_round_ps(0xffff, a, b, CPD_ROUND_UP);
    return number(pick((raw(under) & 1) != 0, raw(under), raw(over)));
}
CPD_FN D odd_sum(D a, D b) {
    D under = sum_below(a, b), over = _mm512_maskz_add_round_pd(0xff, a, b, CPD_ROUND_UP);
    return number(pick((raw(under) & 1) != 0, raw(under), raw(over)));
}
CPD_FN S add_exact(S a, S b, S c) { return _mm512_fmadd_ps(b, c, a); }
CPD_FN D add_exact(D a, D b, D c) { return _mm512_fmadd_pd(b, c, a); }
CPD_FN S add_below(S a, S b, S c) {
    return _mm512_maskz_fmadd_round_ps(0xffff, b, c, a, CPD_ROUND_DOWN);
}
CPD_FN D add_below(D a, D b, D c) {
    return _mm512_maskz_fmadd_round_pd(0xff, b, c, a, CPD_ROUND_DOWN);
}
CPD_FN S subtract_exact(S a, S b, S c) { return _mm512_fnmadd_ps(b, c, a); }
CPD_FN D subtract_exact(D a, D b, D c) { return _mm512_fnmadd_pd(b, c, a); }
#endif

#endif

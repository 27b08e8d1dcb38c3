// Passes of compression methods over all values of a gradient; a part of cpu_loops.h, which
// includes it. ops/reference.py specifies each. Only sums have an order, so the compiler may
// vectorize the loops for any processor.

namespace {

CPD_FN int magnitude_of(float x) {
    int bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & CPD_MAGNITUDE;
}

// Number of values by which data is prefetched: the time of some additions.
const i64 SOON = 256;

// The values above some bits: written one after the other, with room for a group more.
struct Found {
    u32 above, first;  // first: the place of the first value
    u32* places;
    float* values;
    i64 count;
    CPD_INLINE void add(i64 i, float value) {
        if ((u32)magnitude_of(value) > above)
            places[count] = first + (u32)i, values[count++] = value;
    }
};

template <bool SCALED, bool TWICE, bool COLLECT>
u32 accumulate_as(const float* x, const float* kept, float factor, const float* more, i64 n,
                  float* sum, float* total, Found* found) {
    const F by = from_float(factor);
    Found own = COLLECT ? *found : Found{};  // which no store can change
    const U limit = lanes(own.above);
    U largest = lanes(0);
    i64 i = 0;
    for (; i + CPD_GROUP <= n; i += CPD_GROUP) {
        expect(x + i + SOON), expect(kept + i + SOON);
        F value = load(kept, i, n);
        value = load(x, i, n) + (SCALED ? by * value : value);
        store(sum, i, n, value);
        if (TWICE) {
            expect(more + i + SOON);
            value += load(more, i, n);
            store(total, i, n, value);
        }
        largest = larger(largest, bits_of(value) & CPD_MAGNITUDE);
#if CPD_REGISTER == 64
        if (COLLECT)  // without a branch, which would wait for memory each time it is mispredicted
            own.count +=
                store_lanes(signs(is_above(value, limit)), lane_numbers() + (own.first + (u32)i),
                            value, own.places + own.count, own.values + own.count);
#else
        if (COLLECT && any(is_above(value, limit)))
            for (int k = 0; k < CPD_GROUP; ++k) own.add(i + k, value[k]);
#endif
    }
    int most = (int)largest_lane(largest);
    for (; i < n; ++i) {
        float value = x[i] + (SCALED ? factor * kept[i] : kept[i]);
        sum[i] = value;
        if (TWICE) total[i] = value = value + more[i];
        const int magnitude = magnitude_of(value);
        most = most < magnitude ? magnitude : most;
        if (COLLECT) own.add(i, value);
    }
    if (COLLECT) found->count = own.count;
    return (u32)most;
}

template <bool COLLECT>
u32 accumulate_by(const float* x, const float* kept, float factor, const float* more, i64 n,
                  float* sum, float* total, Found* found) {
    return (more          ? factor != 1 ? accumulate_as<true, true, COLLECT>
                                        : accumulate_as<false, true, COLLECT>
            : factor != 1 ? accumulate_as<true, false, COLLECT>
                          : accumulate_as<false, false, COLLECT>)(x, kept, factor, more, n, sum,
                                                                  total, found);
}

u32 accumulate(const float* x, const float* kept, float factor, const float* more, i64 n,
               float* sum, float* total) {
    return accumulate_by<false>(x, kept, factor, more, n, sum, total, nullptr);
}

u32 accumulate_above(u32 above, const float* x, const float* kept, float factor, const float* more,
                     i64 n, float* sum, float* total, u32 first, u32* places, float* values,
                     i64* count) {
    Found found = {above, first, places, values, 0};
    const u32 most = accumulate_by<true>(x, kept, factor, more, n, sum, total, &found);
    *count = found.count;
    return most;
}

// Moves the values with set bits to values, one after the other, with room for a group more, and
// leaves zeros; words have no bits beyond n. Returns their number.
i64 take_marked(const u32* words, float* x, i64 n, float* values) {
    i64 count = 0;
#if CPD_REGISTER == 64
    for (i64 i = 0; i < n; i += CPD_GROUP) {
        const __mmask16 marks = (__mmask16)(words[i / 32] >> i % 32);
        const F value = load_some(x + i, n - i);
        const F taken = _mm512_maskz_compress_ps(marks, value);
        memcpy(values + count, &taken, sizeof taken);
        store_some(x + i, n - i, _mm512_maskz_mov_ps((__mmask16)~marks, value));
        count += __builtin_popcount(marks);
    }
#else
    for (i64 i = 0; i < n; i += 32)
        for (u32 word = words[i / 32]; word; word &= word - 1) {
            float& own = x[i + __builtin_ctz(word)];
            values[count++] = own, own = 0;
        }
#endif
    return count;
}

// Writes the values to the places with set bits, and zeros to the others. Returns their number.
i64 put_marked(const u32* words, const float* values, i64 n, float* x) {
    i64 count = 0;
#if CPD_REGISTER == 64
    for (i64 i = 0; i < n; i += CPD_GROUP) {
        const __mmask16 marks = (__mmask16)(words[i / 32] >> i % 32);
        const int some = __builtin_popcount(marks);
        const F packed = _mm512_maskz_loadu_ps((__mmask16)((1u << some) - 1), values + count);
        store_some(x + i, n - i, _mm512_maskz_expand_ps(marks, packed));
        count += some;
    }
#else
    memset(x, 0, (size_t)n * sizeof(float));
    for (i64 i = 0; i < n; i += 32)
        for (u32 word = words[i / 32]; word; word &= word - 1)
            x[i + __builtin_ctz(word)] = values[count++];
#endif
    return count;
}

// x cut to +-limit and divided, or multiplied by by; returns the largest magnitude of the results.
template <bool DIVIDE, bool CUT>
u32 scale_as(const float* x, float by, float limit, i64 n, float* out) {
    const F number = from_float(by), high = from_float(limit), low = -high;
    U largest = lanes(0);
    i64 i = 0;
    for (; i + CPD_GROUP <= n; i += CPD_GROUP) {
        expect(x + i + SOON);
        F value = load(x, i, n);
        if (CUT) value = value > high ? high : value < low ? low : value;
        value = DIVIDE ? value / number : value * number;
        store(out, i, n, value);
        largest = larger(largest, bits_of(value) & CPD_MAGNITUDE);
    }
    int most = (int)largest_lane(largest);
    for (; i < n; ++i) {
        float value = x[i];
        if (CUT) value = value > limit ? limit : value < -limit ? -limit : value;
        out[i] = value = DIVIDE ? value / by : value * by;
        const int magnitude = magnitude_of(value);
        most = most < magnitude ? magnitude : most;
    }
    return (u32)most;
}

// Whether 1 / by is exact: a power of two, so that a product with it has the bits of the quotient.
CPD_FN bool has_inverse(float by) {
    const int bits = magnitude_of(by), exponent = bits >> 23;
    return !(bits & 0x7fffff) && 0 < exponent && exponent < 254;
}

u32 scale(bool divide, const float* x, float by, float limit, i64 n, float* out) {
    if (divide && limit < __builtin_inff()) return scale_as<true, true>(x, by, limit, n, out);
    if (!divide || has_inverse(by))
        return scale_as<false, false>(x, divide ? 1 / by : by, limit, n, out);
    return scale_as<true, false>(x, by, limit, n, out);
}

u32 largest_of(const float* x, i64 n) {
    int most = 0;
    for (i64 i = 0; i < n; ++i) {
        const int magnitude = magnitude_of(x[i]);
        most = most < magnitude ? magnitude : most;
    }
    return (u32)most;
}

// Sums in NumPy's order: up to 128 values are eight sums side by side, more are halved.
typedef float EightFloats CPD_VECTOR(32);
typedef int EightInts CPD_VECTOR(32);
typedef double EightSums CPD_VECTOR(64);
typedef i64 EightBits CPD_VECTOR(64);
const i64 LEAF = 128;

CPD_FN EightSums wide_eight(const float* x) {
#if CPD_REGISTER == 64
    return (EightSums)_mm512_maskz_cvtps_pd(0xff, _mm256_loadu_ps(x));
#else
    EightFloats floats;
    memcpy(&floats, x, sizeof floats);
    return __builtin_convertvector(floats, EightSums);
#endif
}

template <int OF, class V>
CPD_FN V term_of(V x, double center) {
    if constexpr (OF == CPD_SQUARES) {
        const V difference = x - center;
        return difference * difference;
    } else
        return x;
}

template <int OF>
CPD_FN EightSums eight_terms(const float* x, double center) {
    EightSums wide = wide_eight(x);
    if (OF == CPD_MAGNITUDES) return (EightSums)((EightBits)wide & (i64) ~((u64)1 << 63));
    return term_of<OF>(wide, center);
}

template <int OF>
CPD_FN double one_term(float x, double center) {
    if (OF == CPD_MAGNITUDES) return __builtin_fabs((double)x);
    return term_of<OF>((double)x, center);
}

CPD_FN double joined_sum(EightSums s) {
    return ((s[0] + s[1]) + (s[2] + s[3])) + ((s[4] + s[5]) + (s[6] + s[7]));
}

template <int OF>
double sum_as(const float* x, i64 n, double center) {
    if (n > LEAF) {
        const i64 half = n / 2, first = half - half % 8;
        const double sum = sum_as<OF>(x, first, center);
        return sum + sum_as<OF>(x + first, n - first, center);
    }
    double sum = -0.0;
    i64 i = 0;
    if (n >= 8) {
        EightSums side = eight_terms<OF>(x, center);
        for (i = 8; i < n - n % 8; i += 8) side += eight_terms<OF>(x + i, center);
        sum = joined_sum(side);
    }
    for (; i < n; ++i) sum += one_term<OF>(x[i], center);
    return sum;
}

double sum_in_pairs(int of, const float* x, i64 n, double center) {
    return (of == CPD_MAGNITUDES ? sum_as<CPD_MAGNITUDES>
            : of == CPD_SQUARES  ? sum_as<CPD_SQUARES>
                                 : sum_as<CPD_VALUES>)(x, n, center);
}

// The sums of the values below 0, and of the others, each with zeros in place of the rest. n values
// are prefetched, as of the next row: memory would have nothing to do meanwhile.
Parts parts_of(const float* x, i64 n, const float* ahead) {
    if (n > LEAF) {
        const i64 half = n / 2, first = half - half % 8;
        const Parts a = parts_of(x, first, ahead);
        const Parts b = parts_of(x + first, n - first, ahead + first);
        return {a.below + b.below, a.above + b.above};
    }
    for (i64 i = 0; i < n; i += 16) expect(ahead + i);
    Parts sum = {-0.0, -0.0};
    i64 i = 0;
    if (n >= 8) {
        EightSums below, above;
        for (i = 0; i < n - n % 8; i += 8) {
            const EightSums wide = wide_eight(x + i);
            const EightBits minus = wide < EightSums{};
            const EightSums under = (EightSums)((EightBits)wide & minus);
            const EightSums over = (EightSums)((EightBits)wide & ~minus);
            below = i ? below + under : under, above = i ? above + over : over;
        }
        sum.below = joined_sum(below), sum.above = joined_sum(above);
    }
    for (; i < n; ++i) {
        const bool minus = x[i] < 0;
        sum.below += minus ? (double)x[i] : 0.0, sum.above += minus ? 0.0 : (double)x[i];
    }
    return sum;
}

// rest = x minus the mean for its sign. n values are prefetched.
void take_signs(const float* x, float below, float above, i64 n, float* rest, const float* ahead) {
    for (i64 i = 0; i < n; i += 16) expect(ahead + i);
#pragma GCC ivdep
    for (i64 i = 0; i < n; ++i) rest[i] = x[i] - (x[i] < 0 ? below : above);
}

// Each byte with its bits in reverse.
CPD_FN u64 reversed(u64 bits) {
    bits = (bits >> 1 & 0x5555555555555555) | (bits & 0x5555555555555555) << 1;
    bits = (bits >> 2 & 0x3333333333333333) | (bits & 0x3333333333333333) << 2;
    return (bits >> 4 & 0x0f0f0f0f0f0f0f0f) | (bits & 0x0f0f0f0f0f0f0f0f) << 4;
}

// 64 bits, each byte's highest first, set where values are not below 0.
CPD_FN u64 not_below(const float* x, i64 n) {
    u64 below = 0;
    i64 i = 0;
    for (; i + CPD_GROUP <= n; i += CPD_GROUP) below |= (u64)signs((I)(load(x, i, n) < F{})) << i;
    for (; i < n; ++i) below |= (u64)(x[i] < 0) << i;
    return reversed(n < 64 ? ~below & (((u64)1 << n) - 1) : ~below);
}

// Writes a bit for each value from bit first of out on, the highest of a byte first, and returns
// the number of set bits. The bits after the last one, to the end of its byte, become 0.
i64 pack_signs(const float* x, i64 n, i64 first, u8* out) {
    out += first / 8;
    const int shift = (int)(first % 8);
    i64 count = 0;
    for (i64 i = 0; i < n; i += 64) {
        const i64 left = n - i;
        u8 open = shift ? *out : 0;
        u64 bits = not_below(x + i, left < 64 ? left : 64);
        count += __builtin_popcountll(bits);
        if (!shift && left >= 64) {
            memcpy(out, &bits, sizeof bits), out += sizeof bits;
            continue;
        }
        const i64 ends = shift + (left < 64 ? left : 64);
        for (i64 done = 0; done < ends; done += 8, bits >>= 8) {
            const u8 byte = (u8)bits;
            *out = (u8)(open | byte >> shift);
            open = (u8)(byte << (8 - shift));
            if (done + 8 <= ends) ++out;
        }
    }
    return count;
}

// The n bits, 64 at most, from bit first of packed on, the first one the lowest.
CPD_FN u64 bits_at(const u8* packed, i64 first, i64 n) {
    const int shift = (int)(first % 8);
    const i64 bytes = (shift + n + 7) / 8;
    u64 bits = 0;
    packed += first / 8;
    if (bytes >= 8)
        memcpy(&bits, packed, sizeof bits);
    else
        memcpy(&bits, packed, (size_t)bytes);
    bits = reversed(bits) >> shift;
    return bytes > 8 ? bits | reversed(packed[8]) << (64 - shift) : bits;
}

// The lanes of above where bits from the lowest on are set, of below elsewhere.
CPD_FN F chosen(u32 bits, F below, F above) {
#if CPD_REGISTER == 64
    return _mm512_mask_blend_ps((__mmask16)bits, below, above);
#else
    const U each = lanes(1) << lane_numbers();
    return (lanes(bits) & each) == each ? above : below;
#endif
}

// out = the sum over ranks, each added to the last, of the means for their bits from bit first on,
// over divisor; pairs: the means for unset and for set bits, from 2 * row on. Returns the largest
// magnitude.
u32 mean_signs(const u8* const* packed, const float* const* pairs, i64 ranks, i64 row, i64 first,
               float divisor, i64 n, float* out) {
    const bool multiplies = has_inverse(divisor);
    const F by = from_float(multiplies ? 1 / divisor : divisor);
    U largest = lanes(0);
    for (i64 i = 0; i < n; i += 64) {
        const i64 m = n - i < 64 ? n - i : 64;
        F sums[64 / CPD_GROUP] = {};
        for (i64 rank = 0; rank < ranks; ++rank) {
            const F below = from_float(pairs[rank][2 * row]);
            const F above = from_float(pairs[rank][2 * row + 1]);
            const u64 bits = bits_at(packed[rank], first + i, m);
            for (int k = 0; k < 64; k += CPD_GROUP)
                sums[k / CPD_GROUP] += chosen((u32)(bits >> k), below, above);
        }
        float rest[64], *to = m < 64 ? rest : out + i;
        for (int k = 0; k < 64; k += CPD_GROUP) {
            const F sum = sums[k / CPD_GROUP];
            store(to, k, 64, multiplies ? sum * by : sum / by);
        }
        if (m < 64) {  // no lanes from m on
            memcpy(out + i, rest, (size_t)m * sizeof(float));
            memset(rest + m, 0, (size_t)(64 - m) * sizeof(float));
        }
        for (int k = 0; k < 64; k += CPD_GROUP)
            largest = larger(largest, bits_of(load(to, k, 64)) & CPD_MAGNITUDE);
    }
    return largest_lane(largest);
}

// The codes of compress/adacomp.py, of 8 bits or 16.
template <class Code>
i64 leaders_as(const float* x, const float* rate, float more, u32 highest, i64 n, Code* codes) {
    const int most = (int)highest;
    const u32 minus = 1u << CPD_BIN_BITS(sizeof(Code));
    i64 count = 0, i = 0;
#if CPD_REGISTER == 64
    for (; i < n; i += CPD_GROUP) {
        const F value = load_some(x + i, n - i), reach = load_some(rate + i, n - i) * more + value;
        const I own = (I)(bits_of(value) & CPD_MAGNITUDE),
                all = (I)(bits_of(reach) & CPD_MAGNITUDE);
        const u32 found = signs((all >= most) & (own != 0));
        const U signed_numbers = (lane_numbers() + (u32)i) | ((U)(value < F{}) & minus);
        count += store_lanes(found, signed_numbers, codes + count);
    }
#else
    for (; i + CPD_GROUP <= n; i += CPD_GROUP) {
        const F value = load(x, i, n), reach = load(rate, i, n) * more + value;
        const I reached = (I)(bits_of(reach) & CPD_MAGNITUDE) >= most;
        u32 found = signs(reached & ((I)(bits_of(value) & CPD_MAGNITUDE) != 0));
        for (; found; found &= found - 1) {
            const i64 k = i + __builtin_ctz(found);
            codes[count++] = (Code)((u32)k | (x[k] < 0 ? minus : 0));
        }
    }
    for (; i < n; ++i)
        if (magnitude_of(rate[i] * more + x[i]) >= most && magnitude_of(x[i]))
            codes[count++] = (Code)((u32)i | (x[i] < 0 ? minus : 0));
#endif
    return count;
}

i64 leaders_of(const float* x, const float* rate, float more, u32 highest, i64 n, int code_bytes,
               void* codes) {
    return code_bytes == 1 ? leaders_as(x, rate, more, highest, n, (u8*)codes)
                           : leaders_as(x, rate, more, highest, n, (uint16_t*)codes);
}

// The first of a chunk's largest magnitudes. 64 values are compared without a branch, as the place
// of the leader cannot be foreseen.
i64 leader_of(const float* x, i64 n) {
#if CPD_REGISTER == 64
    U largest = lanes(0);
    for (i64 i = 0; i < n; i += CPD_GROUP)
        largest = larger(largest, bits_of(load_some(x + i, n - i)) & CPD_MAGNITUDE);
    const U highest = lanes(largest_lane(largest));
    for (i64 i = 0;; i += 64) {
        u64 found = 0;
        for (i64 k = 0; k < 64 && i + k < n; k += CPD_GROUP) {
            const U bits = bits_of(load_some(x + i + k, n - i - k)) & CPD_MAGNITUDE;
            found |= (u64)signs(equal(bits, highest)) << k;
        }
        if (found) return i + __builtin_ctzll(found);
    }
#else
    const int most = (int)largest_of(x, n);
    i64 i = 0;
    while (magnitude_of(x[i]) != most) ++i;
    return i;
#endif
}

// sum += the integers of a tile of codes, a sign before a magnitude of the other bits, times by.
void add_levels(int bits, const u32* words, const float* by, float* sum) {
    const U mask = lanes((1u << (bits - 1)) - 1);
    for (int lane = 0; lane < CPD_LANES; lane += CPD_GROUP) {
        Unpacker unpacker = make_unpacker(words, lane);
        take_each(unpacker, bits, all_rows(lane), [&](int i, U code) {
            const U sign = code << (32 - bits) & 0x80000000u;  // of 0 too: it adds nothing
            const F level = from_bits(bits_of(to_float(code & mask)) | sign);
            store(sum, i, CPD_TILE, load(sum, i, CPD_TILE) + level * load(by, i, CPD_TILE));
        });
    }
}

// Products in the order of NumPy's einsum: four sums side by side, of 16 products the last four
// first.
typedef float Four CPD_VECTOR(16);

CPD_FN Four four_of(const float* x, i64 n) {
    Four value = {};
    memcpy(&value, x, n < 4 ? (size_t)n * sizeof(float) : sizeof value);
    return value;
}

// out[r * stride + k] = sums over columns of m[k][j] * rows[r][j], K rows of m, R of rows.
template <int K, int R>
CPD_FN void dot_rows(const float* m, i64 columns, const float* rows, float* out, i64 stride) {
    Four side[K][R] = {};
    auto add_four = [&](i64 j, i64 left) {
        Four b[R];
        for (int r = 0; r < R; ++r) b[r] = four_of(rows + r * columns + j, left);
        for (int k = 0; k < K; ++k) {
            const Four a = four_of(m + k * columns + j, left);
            for (int r = 0; r < R; ++r) side[k][r] = a * b[r] + side[k][r];
        }
    };
    i64 j = 0;
    for (; j + 16 <= columns; j += 16)
        for (int k = 12; k >= 0; k -= 4) add_four(j + k, 4);
    for (; j + 4 <= columns; j += 4) add_four(j, 4);
    if (j < columns) add_four(j, columns - j);
    for (int k = 0; k < K; ++k)
        for (int r = 0; r < R; ++r) {
            const Four s = side[k][r];
            out[r * stride + k] = ((s[0] + s[1]) + (s[2] + s[3])) + 0.0f;
        }
}

template <int K>
void dot_block(const float* m, i64 columns, const float* rows, i64 count, float* out, i64 stride) {
    i64 r = 0;
    for (; r + 2 <= count; r += 2)
        dot_rows<K, 2>(m, columns, rows + r * columns, out + r * stride, stride);
    if (r < count) dot_rows<K, 1>(m, columns, rows + r * columns, out + r * stride, stride);
}

void row_products(const float* m, i64 n, i64 columns, const float* rows, i64 count, float* out) {
    i64 i = 0;
    for (; i + 4 <= n; i += 4) dot_block<4>(m + i * columns, columns, rows, count, out + i, n);
    for (; i < n; ++i) dot_block<1>(m + i * columns, columns, rows, count, out + i, n);
}

// out[j] += m[k][j] * row[k], in the order of k, of K rows.
template <int K>
CPD_FN void add_rows(const float* m, i64 columns, const float* row, float* out) {
#pragma GCC ivdep
    for (i64 j = 0; j < columns; ++j) {
        float sum = out[j];
        for (int k = 0; k < K; ++k) sum = m[k * columns + j] * row[k] + sum;
        out[j] = sum;
    }
}

void column_products(const float* m, i64 n, i64 columns, const float* rows, i64 count, float* out) {
    memset(out, 0, (size_t)(count * columns) * sizeof(float));
    for (i64 i = 0; i < n;) {
        const i64 step = n - i >= 8 ? 8 : 1;
        for (i64 r = 0; r < count; ++r)
            (step == 8 ? add_rows<8> : add_rows<1>)(m + i * columns, columns, rows + r * n + i,
                                                    out + r * columns);
        i += step;
    }
}

// out[j] = 0 + firsts[r * stride] * seconds[r][j], in the order of r; returns the largest
// magnitude.
u32 outer_row(const float* firsts, i64 stride, const float* seconds, i64 count, i64 columns,
              float* out) {
    memset(out, 0, (size_t)columns * sizeof(float));
    for (i64 r = 0; r < count; ++r) {
        const float first = firsts[r * stride], *second = seconds + r * columns;
#pragma GCC ivdep
        for (i64 j = 0; j < columns; ++j) out[j] = first * second[j] + out[j];
    }
    return largest_of(out, columns);
}

}  // namespace

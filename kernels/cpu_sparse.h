// Loops of selection for the CPU; a part of cpu_loops.h, which includes it.
#include "sparse.h"

namespace {

const i64 AHEAD = 8 * CPD_TILE;  // of the values that are looked at, what is fetched: the time of a
                                 // tile's places is not lost

void mark_above(u32 bits, const float* x, i64 n, u32* words) {
    const U limit = lanes(bits);
    float rest[32] = {};  // zeros, whose bits are not set
    for (i64 i = 0; i < n; i += 32) {
        const float* part = x + i;
        expect(part + AHEAD), expect(part + AHEAD + 16);
        if (n - i < 32) part = (const float*)memcpy(rest, x + i, (size_t)(n - i) * sizeof(float));
        u32 word = 0;
        for (int k = 0; k < 32; k += CPD_GROUP)
            word |= signs(is_above(load(part, k, 32), limit)) << k;
        words[i / 32] = word;
    }
}

// Neighbours are counted in separate tables, so that counts do not depend on the last one. Values
// in no bucket are counted in one more: a branch would often be mispredicted.
void count_digits(u32 low, int shift, u32 buckets, const float* x, i64 n, u32* counts) {
    u32 tables[4][CPD_BUCKETS + 1] = {};
    for (i64 i = 0; i < n; ++i) {
        u32 bits;
        memcpy(&bits, x + i, sizeof bits);
        u32 bucket = bucket_of(bits, low, shift);
        ++tables[i & 3][bucket < buckets ? bucket : buckets];
    }
    for (u32 b = 0; b < buckets; ++b)
        counts[b] = tables[0][b] + tables[1][b] + tables[2][b] + tables[3][b];
}

void count_bits(const u32* words, i64 n, u32* counts) {
    for (i64 w = 0; w < n; w += 32) {
        u32 count = 0;
        for (i64 i = w; i < n && i < w + 32; ++i) count += (u32)__builtin_popcount(words[i]);
        counts[w / 32] = count;
    }
}

// Writes the places of set bits of a tile's n words, counted from first, and returns their number.
// A group's places, or some, are always written, and the next ones overwrite them, so places must
// have room for CPD_GROUP more.
CPD_FN i64 places_of_tile(const u32* words, i64 n, u32 first, u32* places) {
    i64 count = 0;
#if CPD_REGISTER == 64
    for (i64 i = 0; i < 2 * n; ++i) {
        const u32 marks = words[i / 2] >> 16 * (i % 2) & 0xffff;
        if (!marks) continue;  // several stores to one place take longer than a branch
        const U all = lane_numbers() + (first + 16 * (u32)i);
        const __m512i some = _mm512_maskz_compress_epi32((__mmask16)marks, (__m512i)all);
        memcpy(places + count, &some, sizeof some);
        count += __builtin_popcount(marks);
    }
#else
    for (i64 i = 0; i < n; i += 2) {
        u64 word = words[i] | (i + 1 < n ? (u64)words[i + 1] << 32 : 0);
        i64 next = count + __builtin_popcountll(word);
        u32 place = first + 32 * (u32)i;
        for (int k = 0; k < 2; ++k, word &= word - 1)
            places[count++] = place + (u32)__builtin_ctzll(word | (u64)1 << 63);
        for (; count < next; word &= word - 1) places[count++] = place + (u32)__builtin_ctzll(word);
        count = next;
    }
#endif
    return count;
}

void unpack_bitmap(const u32* words, i64 n, u32 first, const u32* starts, u32* out, i64 end) {
    u32 places[CPD_TILE + CPD_GROUP];
    for (i64 w = 0; w < n; w += 32) {
        i64 start = starts[w / 32];
        i64 count = places_of_tile(words + w, n - w < 32 ? n - w : 32, first + 32 * (u32)w, places);
        if (count > end - start) count = end - start;  // never true of starts by count_bits
        if (count > 0) memcpy(out + start, places, (size_t)count * sizeof(u32));
    }
}

i64 collect_tile(u32 bits, const float* x, i64 n, u32 first, u32* places, float* values) {
#if CPD_REGISTER == 64
    const U limit = lanes(bits);
    i64 some = 0;
    for (i64 i = 0; i < n; i += CPD_GROUP) {
        const F value = load_some(x + i, n - i);
        const u32 above = signs(is_above(value, limit));
        some += store_lanes(above, lane_numbers() + (first + (u32)i), value, places + some,
                            values + some);
    }
    return some;
#else
    u32 words[CPD_TILE / 32];
    mark_above(bits, x, n, words);
    i64 count = places_of_tile(words, (n + 31) / 32, first, places);
    for (i64 i = 0; i < count; ++i) values[i] = x[places[i] - first];
    return count;
#endif
}

}  // namespace

// Loops of OCP's Microscaling for the CPU; a part of cpu_loops.h, which includes it. A block is
// 32 neighbours, a few registers with one shift. Here the codes of a tile are bytes in order.

namespace {

typedef u64 Eights CPD_VECTOR(CPD_REGISTER);  // each number is eight codes

const u64 EVEN_BYTES = 0x00ff00ff00ff00ff, EVEN_PAIRS = 0x0000ffff0000ffff, LOW_HALF = 0xffffffff;

// Eight codes of bits bits, a byte each, packed: pairs, fours, then all; and the reverse.
CPD_FN Eights together(Eights v, int bits) {
    const int gap = 8 - bits;
    v = (v & EVEN_BYTES) | (v & ~EVEN_BYTES) >> gap;
    v = (v & EVEN_PAIRS) | (v & ~EVEN_PAIRS) >> 2 * gap;
    return (v & LOW_HALF) | (v & ~LOW_HALF) >> 4 * gap;
}

CPD_FN Eights apart(Eights v, int bits) {
    const int gap = 8 - bits;
    const u64 fours = LOW_HALF >> 4 * gap, pairs = EVEN_PAIRS & EVEN_PAIRS >> 2 * gap,
              bytes = EVEN_BYTES & EVEN_BYTES >> gap;
    v = (v & fours) | (v << 4 * gap & fours << 32);
    v = (v & pairs) | (v << 2 * gap & pairs << 16);
    return (v & bytes) | (v << gap & bytes << 8);
}

// The codes of a tile, unpacked from memory; codes of 8 bits may stay there. Eight codes of 4 to 8
// bits are 4 to 8 bytes; eight bytes are moved for them, except at the end of the tile, as that of
// another thread may follow.
struct Codes {
    alignas(64) u8 bytes[CPD_TILE + 8];

    const u8* read(int bits, const u32* words) {
        const u8* in = (const u8*)words;
        if (bits == 8) return in;
        const int last = CPD_TILE / 8 - 1;
        u64 rest = 0;
        memcpy(&rest, in + last * bits, (size_t)bits);
        for (int i = 0; i <= last; i += CPD_REGISTER / 8) {
            Eights v;
#pragma GCC unroll 8
            for (int k = 0; k < CPD_REGISTER / 8; ++k) {
                u64 eight;
                memcpy(&eight, i + k < last ? in + (i + k) * bits : (const u8*)&rest, sizeof eight);
                v[k] = eight;
            }
            v = apart(v, bits);
            memcpy(bytes + 8 * i, &v, sizeof v);
        }
        return bytes;
    }
    u8* target(int bits, u32* words) { return bits == 8 ? (u8*)words : bytes; }
    void write(int bits, u32* words) {
        u8* out = (u8*)words;
        if (bits == 8) return;
        const int last = CPD_TILE / 8 - 1;
        for (int i = 0; i <= last; i += CPD_REGISTER / 8) {
            Eights v;
            memcpy(&v, bytes + 8 * i, sizeof v);
            v = together(v, bits);
#pragma GCC unroll 8
            for (int k = 0; k < CPD_REGISTER / 8; ++k) {
                const u64 eight = v[k];
                memcpy(i + k < last ? out + (i + k) * bits : bytes + CPD_TILE, &eight,
                       sizeof eight);
            }
        }
        memcpy(out + last * bits, bytes + CPD_TILE, (size_t)bits);
    }
};

// The shift of a scale: whether it marks NaN, by how much values are scaled first, and the rest,
// which is near.
struct Shift {
    bool marked;
    int far;
    u32 near;
};

CPD_FN Shift shift_of(const Cast& cast, u8 scale) {
    const bool marked = scale == CPD_SHIFT_NONFINITE;
    const int k = marked ? 0 : CPD_SHIFT_BIAS - scale, far = far_of(cast, k);
    return Shift{marked, far, (u32)(k - far)};
}

// Calls body(i, value) for the values of a block, i the place of the first one in it.
template <class Body>
CPD_FN void decode_block(const Cast& cast, u8 scale, const u8* codes, Body body) {
    const Shift shift = shift_of(cast, scale);
    const Decoder d = make_decoder(cast, shift.near);
    const F back = normal_power(lanes(0u - (u32)shift.far));
    for (int i = 0; i < CPD_LANES; i += CPD_GROUP) {
        F value = decode_code(cast, d, load_bytes(codes + i));
        if (__builtin_expect(shift.far, 0)) value = moved_back(value, back);
        body(i, shift.marked ? from_bits(lanes(CPD_NAN)) : value);
    }
}

// out = x + the decoded tile.
CPD_TILE_FN void add_ocp_tile(const Cast& given, const u8* scales, const u8* codes, const float* x,
                              float* out) {
    const Cast cast = given;  // a copy, which no store can change
    for (int first = 0; first < CPD_TILE; first += CPD_LANES)
        decode_block(cast, scales[first / CPD_LANES], codes + first, [&](int i, F value) {
            store(out, first + i, CPD_TILE, add(load(x, first + i, CPD_TILE), value));
        });
}

// Chooses the scales of a tile; returns the largest magnitudes of its blocks, as float32 bits.
CPD_FN U fit_ocp_tile(const Cast& cast, const float* x, u8* scales) {
    u32 most[CPD_LANES];
    for (int b = 0; b < CPD_LANES; ++b) {
        U block = lanes(0);
        for (int i = 0; i < CPD_LANES; i += CPD_GROUP)
            block = larger(block, bits_of(load(x, b * CPD_LANES + i, CPD_TILE)) & CPD_MAGNITUDE);
        most[b] = largest_lane(block);
    }
    U all = lanes(0);
    for (int b = 0; b < CPD_LANES; b += CPD_GROUP) {
        const U blocks = load(most, b, CPD_LANES), shifts = fitting_shifts(cast, blocks);
        const I marked = equal(shifts, lanes(CPD_SHIFT_NONFINITE));
        store_bytes(scales + b, marked ? shifts : 2 * CPD_SHIFT_BIAS - shifts);
        all = larger(all, blocks);
    }
    return all;
}

// index: of the tile; value r of block b draws the random bits of element 32 r + b.
template <int WAY, bool COUNT, int KNOWN>
CPD_TILE_FN void encode_ocp_tile(const Cast& given, const u8* scales, Key key, u64 index,
                                 const float* x, u8* codes, u32* counts, const float* ahead) {
    const Cast cast = given;  // a copy, which no store can change
    Counts c = {};
    for (int b = 0; b < CPD_LANES; ++b) {
        const int first = b * CPD_LANES;
        const Shift shift = shift_of(cast, scales[b]);
        const auto e = make_encoder_of<WAY>(cast, shift.near);
        const F factor = normal_power(lanes((u32)shift.far));
        for (int i = 0; i < CPD_LANES; i += CPD_GROUP) {
            F value = load(x, first + i, CPD_TILE);
            if (__builtin_expect(shift.far, 0)) value = moved(value, factor);
            U code = encode_value<WAY, COUNT, KNOWN>(
                cast, e, value, key, index + (u64)(i * CPD_LANES + b), c, CPD_LANES);
            store_bytes(codes + first + i, code);
        }
        for (int i = 0; i < CPD_LANES; i += 16) expect(ahead + first + i);
    }
    if (COUNT) write_counts(c, counts);
}

// As blocks_loop, for OCP's blocks.
template <int WAY, bool COUNT>
void ocp_loop(const Cast& given, int, bool fit, Key key, u64 offset, const u32* words_in,
              const u8* scales_in, const float* x, i64 n, u32* words, u8* scales, u32* counts) {
    const Cast cast = given;  // a copy, which no store can change
    const int bits = width(cast);
    Padded<float> pad;
    alignas(64) float sum[CPD_TILE];
    Codes codes;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const i64 left = n - t * CPD_TILE, block = t * CPD_LANES;
        const float* tile = pad.read(x + t * CPD_TILE, left);
        if (words_in) {
            const u8* came = codes.read(bits, words_in + block * bits);
            add_ocp_tile(cast, scales_in + block, came, tile, sum);
            // Without the decoded padding of the words.
            if (left < CPD_TILE) memset(sum + left, 0, (size_t)(CPD_TILE - left) * sizeof(float));
            tile = sum;
        }
        bool saturates = false;
        if (fit) {
            const U most = fit_ocp_tile(cast, tile, scales + block);
            saturates = knows_inside(WAY) && cast.overflow_code == cast.max_code &&
                        !any(less(lanes(CPD_INF - 1), most));
        }
        auto encode = saturates ? encode_ocp_tile<WAY, COUNT, CPD_SATURATES>
                                : encode_ocp_tile<WAY, COUNT, CPD_ANYTHING>;
        encode(cast, scales + block, key, offset + (u64)(t * CPD_TILE), tile,
               codes.target(bits, words + block * bits), counts + 3 * t,
               x + (t + CPD_HOP_AHEAD) * CPD_TILE);
        codes.write(bits, words + block * bits);
    }
}

// out = the decoded blocks, plus x if given; returns the number that is not finite.
i64 decode_ocp(const Cast& given, const u32* words, const u8* scales, const float* x, float* out,
               i64 n) {
    const Cast cast = given;  // a copy, which no store can change
    const int bits = width(cast);
    Padded<float> pad, pad_out;
    Codes codes;
    i64 nonfinite = 0;
    for (i64 t = 0; t * CPD_TILE < n; ++t) {
        const i64 left = n - t * CPD_TILE, block = t * CPD_LANES;
        float* target = pad_out.target(out + t * CPD_TILE, left);
        const u8* came = codes.read(bits, words + block * bits);
        if (x) {
            add_ocp_tile(cast, scales + block, came, pad.read(x + t * CPD_TILE, left), target);
        } else {
            U most = lanes(0);
            for (int first = 0; first < CPD_TILE; first += CPD_LANES)
                decode_block(cast, scales[block + first / CPD_LANES], came + first,
                             [&](int i, F value) {
                                 most = larger(most, bits_of(value) & CPD_MAGNITUDE);
                                 store(target, first + i, CPD_TILE, value);
                             });
            if (perhaps(less(lanes(CPD_INF - 1), most)))
                nonfinite += nonfinite_in(target, left < CPD_TILE ? left : CPD_TILE);
        }
        pad_out.write(out + t * CPD_TILE, left);
    }
    return nonfinite;
}

}  // namespace

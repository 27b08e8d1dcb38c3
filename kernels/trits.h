// Ternary codes, of 2 bits in tiles, to and from five in a byte: 205 bytes a tile, 1.602 bits a
// value. A code's digit is 0 for 0, 1 for +1 and 2 for -1; -0 becomes 0. Byte 32 g + l holds the
// digits of rows 5 g .. 5 g + 4 of lane l, the first one the lowest, for g = 0..5. Rows 30 and 31
// are 64 digits in a row, t = 32 (row - 30) + lane: byte 192 + j holds digits 5 j .. 5 j + 4.
#ifndef CPD_TRITS_H
#define CPD_TRITS_H

#include "cpd.h"

#define CPD_TRIT_ROWS 30   // rows with bytes that each hold digits of one lane
#define CPD_TRIT_TAIL 192  // where the bytes of the other two rows begin

// The place in its word of the code of digit t of the last two rows.
CPD_FN int tail_shift(int t) { return t < CPD_LANES ? 28 : 30; }

template <class T>
CPD_FN T digit_of(T code) {
    return (code & 1u) << ((code >> 1) & 1u);
}

template <class T>
CPD_FN T code_of(T digit) {
    return digit + (digit >> 1);
}

// Digit by digit, as lanes share a byte: words of rows 16..31.
CPD_FN u32 tail_byte(const u32* words, int j) {
    u32 byte = 0;
    for (int t = 5 * j + 4; t >= 5 * j; --t) {
        u32 code = t < 2 * CPD_LANES ? words[t % CPD_LANES] >> tail_shift(t) & 3u : 0u;
        byte = 3 * byte + digit_of(code);
    }
    return byte;
}

CPD_FN u32 tail_code(const u8* bytes, int t) {
    u32 rest = bytes[t / 5];
    for (int i = 0; i < t % 5; ++i) rest /= 3;
    return code_of(rest % 3) << tail_shift(t);
}

CPD_FN void pack_trits_column(const u32* words, u8* trits, int lane) {
    U low = load(words + lane, 0, 1), high = load(words + CPD_LANES + lane, 0, 1);
    for (int first = 0; first < CPD_TRIT_ROWS; first += 5) {
        U byte = lanes(0);
        for (int row = first + 4; row >= first; --row)
            byte = byte * 3u + digit_of((row < 16 ? low : high) >> (2 * (row % 16)) & 3u);
        store_bytes(trits + first / 5 * CPD_LANES + lane, byte);
    }
    for (int j = lane; j < lane + CPD_GROUP && CPD_TRIT_TAIL + j < CPD_TRIT_BYTES; ++j)
        trits[CPD_TRIT_TAIL + j] = (u8)tail_byte(words + CPD_LANES, j);
}

CPD_FN void unpack_trits_column(const u8* trits, u32* words, int lane) {
    U low = lanes(0), high = lanes(0);
    for (int first = 0; first < CPD_TRIT_ROWS; first += 5) {
        U rest = load_bytes(trits + first / 5 * CPD_LANES + lane);
        for (int row = first; row < first + 5; ++row) {
            U third = rest * 171u >> 9;  // a byte divided by 3
            U code = code_of(rest - 3u * third) << (2 * (row % 16));
            if (row < 16)
                low |= code;
            else
                high |= code;
            rest = third;
        }
    }
    store(words + lane, 0, 1, low);
    store(words + CPD_LANES + lane, 0, 1, high);
    for (int l = lane; l < lane + CPD_GROUP; ++l)
        words[CPD_LANES + l] |=
            tail_code(trits + CPD_TRIT_TAIL, l) | tail_code(trits + CPD_TRIT_TAIL, CPD_LANES + l);
}

#endif

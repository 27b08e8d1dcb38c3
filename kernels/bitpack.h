// Codes of b bits to and from the words of a lane: 32 rows make b words, lowest bits first. Word w
// of lane l is at [w][l], so no lane touches another's words; with OCP's blocks on a GPU, it is at
// [l][w]. Arguments first and step give the place of a lane's words.
// Layout: FastLanes (Afroozeh, Boncz; VLDB 2023).
#ifndef CPD_BITPACK_H
#define CPD_BITPACK_H

#include "cpd.h"

struct Packer {
    u32* words;  // the next word of the lanes
    U open;      // the word that is being filled
    int filled;  // bits in it
    int step;    // to the next word
};

CPD_FN Packer make_packer(u32* words, int first, int step = CPD_LANES) {
    return Packer{words + first, lanes(0), 0, step};
}

CPD_FN void put(Packer& p, U code, int bits) {
    p.open |= code << p.filled;
    p.filled += bits;
    if (p.filled >= 32) {
        store(p.words, 0, 1, p.open);
        p.words += p.step;
        p.filled -= 32;
        p.open = p.filled ? code >> (bits - p.filled) : lanes(0);
    }
}

struct Unpacker {
    const u32* words;
    U open;
    int taken;  // bits of it that are used up
    int step;   // to the next word
};

CPD_FN Unpacker make_unpacker(const u32* words, int first, int step = CPD_LANES) {
    return Unpacker{words + first, lanes(0), 32, step};
}

// The bits above the code are those of the next one: mask them off.
CPD_FN U take(Unpacker& p, int bits) {
    if (p.taken == 32) {
        p.open = load(p.words, 0, 1);
        p.words += p.step;
        p.taken = 0;
    }
    U code = p.open >> p.taken;
    int left = 32 - p.taken;
    if (left < bits) {
        p.open = load(p.words, 0, 1);
        p.words += p.step;
        code |= p.open << left;
        p.taken = bits - left;
    } else {
        p.taken += bits;
    }
    return code;
}

// Rows of a column: value i = row * CPD_LANES + lane, first <= i < stop. There are at least 16, so
// that their codes fill whole words.
struct Rows {
    int first, stop;
};

CPD_FN Rows all_rows(int lane) { return Rows{lane, CPD_TILE}; }

// The rows of block b of a lane's column.
CPD_FN Rows rows_of(int lane, int blocks, int b) {
    int size = CPD_TILE / blocks;
    return Rows{lane + b * size, (b + 1) * size};
}

// A word of the codes code(i) of rows, each BITS wide, a divisor of 32; and the reverse. The
// compiler then knows the place of each code.
template <int BITS, int AT = 0, class Code>
CPD_FN U word_of(int i, Code code) {
    U word = code(i) << AT;
    if constexpr (AT + BITS < 32) word |= word_of<BITS, AT + BITS>(i + CPD_LANES, code);
    return word;
}
template <int BITS, int AT = 0, class Body>
CPD_FN void codes_of(U word, int i, Body body) {
    body(i, word >> AT);
    if constexpr (AT + BITS < 32) codes_of<BITS, AT + BITS>(word, i + CPD_LANES, body);
}

// Puts the codes of rows.
template <int BITS, class Code>
CPD_FN void put_words(Packer& p, Rows rows, Code code) {
    for (int i = rows.first; i < rows.stop; i += 32 / BITS * CPD_LANES, p.words += p.step)
        store(p.words, 0, 1, word_of<BITS>(i, code));
}
template <class Code>
CPD_FN void put_each_of(Packer& p, int bits, Rows rows, Code code) {
    for (int i = rows.first; i < rows.stop; i += CPD_LANES) put(p, code(i), bits);
}
template <class Code>
CPD_FN void put_each(Packer& p, int bits, Rows rows, Code code) {
    if (bits == 8) return put_words<8>(p, rows, code);
    if (bits == 4) return put_words<4>(p, rows, code);
    put_each_of(p, bits, rows, code);
}

// Calls body(i, code) for rows.
template <int BITS, class Body>
CPD_FN void take_words(Unpacker& p, Rows rows, Body body) {
    for (int i = rows.first; i < rows.stop; i += 32 / BITS * CPD_LANES, p.words += p.step)
        codes_of<BITS>(load(p.words, 0, 1), i, body);
}
template <class Body>
CPD_FN void take_each(Unpacker& p, int bits, Rows rows, Body body) {
    if (bits == 8) return take_words<8>(p, rows, body);
    if (bits == 4) return take_words<4>(p, rows, body);
    for (int i = rows.first; i < rows.stop; i += CPD_LANES) body(i, take(p, bits));
}

#endif

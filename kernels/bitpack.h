// Codes of b bits to and from the words of a lane: 32 rows make b words, lowest bits first, and
// word w of lane l lies at [w][l], so no lane touches another's words. With OCP's blocks it lies at
// [l][w], on a GPU: first and step say so.
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

#endif

// Codes of b bits to and from the words of a lane: 32 rows make b words, lowest bits first, and
// word w of lane l lies at [w][l], so no lane touches another's words.
// Layout: FastLanes (Afroozeh, Boncz; VLDB 2023).
#ifndef CPD_BITPACK_H
#define CPD_BITPACK_H

#include "cpd.h"

struct Packer {
    u32* words;  // the next word of the lanes
    U open;      // the word that is being filled
    int filled;  // bits in it
};

CPD_FN Packer make_packer(u32* words, int lane) { return Packer{words + lane, lanes(0), 0}; }

CPD_FN void put(Packer& p, U code, int bits) {
    p.open |= code << p.filled;
    p.filled += bits;
    if (p.filled >= 32) {
        store(p.words, 0, 1, p.open);
        p.words += CPD_LANES;
        p.filled -= 32;
        p.open = p.filled ? code >> (bits - p.filled) : lanes(0);
    }
}

struct Unpacker {
    const u32* words;
    U open;
    int taken;  // bits of it that are used up
};

CPD_FN Unpacker make_unpacker(const u32* words, int lane) {
    return Unpacker{words + lane, lanes(0), 32};
}

// The bits above the code are those of the next one: mask them off.
CPD_FN U take(Unpacker& p, int bits) {
    if (p.taken == 32) {
        p.open = load(p.words, 0, 1);
        p.words += CPD_LANES;
        p.taken = 0;
    }
    U code = p.open >> p.taken;
    int left = 32 - p.taken;
    if (left < bits) {
        p.open = load(p.words, 0, 1);
        p.words += CPD_LANES;
        code |= p.open << left;
        p.taken = bits - left;
    } else {
        p.taken += bits;
    }
    return code;
}

#endif

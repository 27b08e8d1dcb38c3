// Counter-based random bits: a hash of a stream's key and an element's index.
#ifndef CPD_RANDOM_H
#define CPD_RANDOM_H

#include "cpd.h"

// The parts of the key and of the index's high word that enter first, and after a round.
CPD_FN u32 first_key(Key key, u32 high) { return key.low + high * 0x85ebca6bu; }
CPD_FN u32 second_key(Key key, u32 high) { return key.high ^ high * 0x9e3779b9u; }

// x: the index's low word + first_key. C. Wellons' triple32 ("Prospecting for hash functions",
// 2018) with the second key after the first round. x joins again at the end, as in the
// construction of Davies and Meyer: otherwise no draw of 32 bits would occur twice.
template <class V>
CPD_FN V hashed(V x, V second) {
    V h = (x ^ (x >> 17)) * 0xed5ad4bbu;
    h = (h ^ (h >> 11) ^ second) * 0xac4c1b51u;
    h = (h ^ (h >> 15)) * 0x31848babu;
    return h ^ (h >> 14) ^ x;
}

// 32 random bits for elements index + numbers of the lanes, which are 0, 1, ... count - 1.
template <class V>
CPD_FN V random32(Key key, u64 index, V numbers, u32 count) {
    u32 low = (u32)index, high = (u32)(index >> 32), first = first_key(key, high);
    V x = numbers + (low + first), second = V{} + second_key(key, high);
    if (low > 0u - count) {  // lanes whose low word has wrapped round
        V next = (V)(numbers + low < low);
        x += next & (first_key(key, high + 1) - first);
        second ^= next & (second_key(key, high) ^ second_key(key, high + 1));
    }
    return hashed(x, second);
}

// 31 of them for elements index, index + step, ... of the lanes.
CPD_FN U random31(Key key, u64 index, u32 step) {
    return random32(key, index, lane_numbers() * step, CPD_GROUP * step) >> 1;
}

#endif

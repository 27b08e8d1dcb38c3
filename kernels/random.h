// Counter-based random bits: a hash of a stream's key and an element's index.
#ifndef CPD_RANDOM_H
#define CPD_RANDOM_H

#include "cpd.h"

// The part of the key and of the index's high word that enters first, and half-way.
CPD_FN u32 first_key(Key key, u32 high) { return key.low ^ high * 0x85ebca6bu; }
CPD_FN u32 second_key(Key key, u32 high) { return key.high ^ high * 0x9e3779b9u; }

// C. Wellons' lowbias32 ("Prospecting for hash functions", 2018), the second key half-way.
template <class V>
CPD_FN V hashed(V low, V first, V second) {
    V h = low ^ first;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15) ^ second) * 0x846ca68bu;
    return h ^ (h >> 16);
}

// 32 random bits for elements index + numbers of the lanes, which are 0, 1, ... count - 1.
template <class V>
CPD_FN V random32(Key key, u64 index, V numbers, u32 count) {
    u32 low_index = (u32)index, high = (u32)(index >> 32);
    V first = V{} + first_key(key, high), second = V{} + second_key(key, high);
    V low = numbers + low_index;
    if (low_index > 0u - count) {  // lanes whose low word has wrapped round
        V next = (V)(low < low_index);
        first ^= next & (first_key(key, high) ^ first_key(key, high + 1));
        second ^= next & (second_key(key, high) ^ second_key(key, high + 1));
    }
    return hashed(low, first, second);
}

// 31 of them for elements index, index + 1, ... of the lanes.
CPD_FN U random31(Key key, u64 index) {
    return random32(key, index, lane_numbers(), CPD_GROUP) >> 1;
}

#endif

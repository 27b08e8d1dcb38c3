// Counter-based random bits: a hash of a stream's key and an element's index.
#ifndef CPD_RANDOM_H
#define CPD_RANDOM_H

#include "cpd.h"

// The part of the key and of the index's high word that enters first, and half-way.
CPD_FN u32 first_key(Key key, u32 high) { return key.low ^ high * 0x85ebca6bu; }
CPD_FN u32 second_key(Key key, u32 high) { return key.high ^ high * 0x9e3779b9u; }

// 31 random bits for elements index, index + 1, ... of the lanes.
CPD_FN U random31(Key key, u64 index) {
    u32 low_index = (u32)index, high = (u32)(index >> 32);
    U low = lane_numbers() + low_index;
    U first = lanes(first_key(key, high)), second = lanes(second_key(key, high));
    if (low_index > 0u - CPD_GROUP) {  // lanes whose low word has wrapped round, and is small
        I next = less(low, lanes(CPD_GROUP)) & ~less(low, lanes(0));
        first = next ? lanes(first_key(key, high + 1)) : first;
        second = next ? lanes(second_key(key, high + 1)) : second;
    }
    // C. Wellons' lowbias32 ("Prospecting for hash functions", 2018), the second key half-way.
    U h = low ^ first;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15) ^ second) * 0x846ca68bu;
    return (h ^ (h >> 16)) >> 1;
}

#endif

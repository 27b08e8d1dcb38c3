// Counter-based random bits: a hash of a stream's key and an element's index.
#ifndef CPD_RANDOM_H
#define CPD_RANDOM_H

#include "cpd.h"

// 31 random bits for elements index, index + 1, ... of the lanes.
CPD_FN U random31(Key key, u64 index) {
    u32 first = (u32)index, high = (u32)(index >> 32);
    U low = lane_numbers() + first;
    U join = lanes(key.high ^ high * 0x9e3779b9u);
    // Lanes whose low word has wrapped round, and is small, belong to the next high word.
    if (first > 0u - CPD_GROUP)
        join = less(low, lanes(CPD_GROUP)) & ~less(low, lanes(0))
                   ? lanes(key.high ^ (high + 1) * 0x9e3779b9u)
                   : join;
    // C. Wellons' lowbias32 ("Prospecting for hash functions", 2018), the rest of the stream's key
    // and of the index joining half-way.
    U h = low ^ key.low;
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15) ^ join) * 0x846ca68bu;
    return (h ^ (h >> 16)) >> 1;
}

#endif

// Counter-based random bits: a hash of a stream's key and an element's index.
#ifndef CPD_RANDOM_H
#define CPD_RANDOM_H

#include "cpd.h"

// C. Wellons' lowbias32 finaliser ("Prospecting for hash functions", 2018).
CPD_FN U mix(U h) {
    h = (h ^ (h >> 16)) * 0x7feb352du;
    h = (h ^ (h >> 15)) * 0x846ca68bu;
    return h ^ (h >> 16);
}

// 31 random bits for elements index, index + 1, ... of the lanes.
CPD_FN U random31(Key key, u64 index) {
    U low = lane_numbers() + (u32)index;
    // A lane whose low word has wrapped round belongs to the next high word. The comparison is
    // unsigned: flipping the top bits makes the signed one do it.
    U flip = lanes(0x80000000u);
    I wrapped = less(low ^ flip, lanes((u32)index) ^ flip);
    U high = lanes((u32)(index >> 32)) - (U)wrapped;
    U h = mix(low ^ key.low);
    return mix(h + key.high + high * 0x9e3779b9u) >> 1;
}

#endif

// The blocks of filters of the autoencoder, as kernels need them.
#ifndef CPD_BLOCKS_H
#define CPD_BLOCKS_H

#include "cast.h"

#define CPD_FIELD_VALUES 16  // rows of fields in a kernel's memory are multiples of it

// Sizes of a block and of a batch, and strides in values. A field is pieces of run values.
struct BlockShape {
    i64 maps, inputs, batch, pieces, run;
    i64 piece, image;     // strides in the window
    i64 map, slopes_map;  // of filters, in responses and in the pools' slopes
    i64 width;            // of a row of a field in a kernel's memory
};

// Factors of a step; alpha: of the reconstruction's slope.
struct BlockStep {
    double rate, momentum, alpha;
};

#endif

// The pools of the autoencoder's responses, as kernels need them.
#ifndef CPD_POOLS_H
#define CPD_POOLS_H

#include "cast.h"

#define CPD_POOL_VALUES 64  // of a cell that are pooled together

// Some pools, and strides in values. They are written, or by / pool is added to the slopes of a
// pool's cells.
struct PoolShape {
    i64 rows, columns;  // of pools
    i64 size, step;     // of a pool, in cells
    i64 row, column, to_row, to_column;
    double epsilon, by;
    bool pooled;
};

#endif

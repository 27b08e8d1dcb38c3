// Calls of matrix products; a part of cpu_module.cpp, which includes it.
#include "cpu_threads.h"

namespace {

const i64 MOST_ROWS = 256;  // of a that go through a panel before the next is made

int to_rounding(PyObject* object, void* target) {
    Rounding* r = static_cast<Rounding*>(target);
    return PyArg_ParseTuple(object, "iiiiiIIIIII;rounding: 11 numbers", &r->man, &r->way,
                            &r->magnitude, &r->flipped, &r->random_bits, &r->least, &r->max,
                            &r->over, &r->under, &r->inf, &r->nan);
}

// The panels of a product of batch matrices, as tasks.
struct Panels {
    i64 batch, m, k, n;
    i64 across() const { return (n + CPD_PANEL - 1) / CPD_PANEL; }
    i64 down() const { return (m + MOST_ROWS - 1) / MOST_ROWS; }
    i64 count() const { return batch * across() * down(); }
};

PyObject* matmul(PyObject*, PyObject* args) {
    Products how;
    Panels p;
    int threads;
    long long batch, m, k, n, chunk;
    Buffer a, b, out;
    if (!PyArg_ParseTuple(args, "iO&O&O&(iiiL)O&LLLLy*y*w*", &threads, to_rounding, &how.product,
                          to_rounding, &how.sum, to_rounding, &how.between, &how.arithmetic,
                          &how.pairwise, &how.kahan, &chunk, to_key, &how.key, &batch, &m, &k, &n,
                          &a.view, &b.view, &out.view))
        return nullptr;
    p = {batch, m, k, n};
    how.chunk = chunk;
    const i64 size = sizeof(float);
    if (!has_length(a, "a", batch * m * k * size) || !has_length(b, "b", batch * k * n * size) ||
        !has_length(out, "out", batch * m * n * size))
        return nullptr;
    // A task counts as a block of values, the unit that threads share.
    const i64 task = BLOCK_TILES * CPD_TILE;
    return in_blocks(threads, p.count() * task, [&](const Block& block) {
        std::vector<float> panel((size_t)(p.k * CPD_PANEL));
        for (i64 t = block.first / task; t < (block.first + block.n) / task; ++t) {
            i64 each = t / (p.across() * p.down()), column = t / p.down() % p.across() * CPD_PANEL;
            i64 row = t % p.down() * MOST_ROWS;
            i64 rows = p.m - row < MOST_ROWS ? p.m - row : MOST_ROWS;
            i64 first = (each * p.m + row) * p.n;
            loops->matmul(how, a.at<float>((each * p.m + row) * p.k), rows, p.k,
                          b.at<float>(each * p.k * p.n), p.n, column, panel.data(),
                          out.at<float>(first), (u64)first, (u64)(p.batch * p.m * p.n));
        }
    });
}

}  // namespace

// Calls between the autoencoder's passes; a part of cpu_module.cpp, which includes it after
// cpu_blocks_calls.h.
#include "pools.h"

namespace {

// Whether an array has this shape and dtype, and the values of its last axis, of 3, lie together.
bool is_rows(const Buffer& b, const char* name, const char* format, const std::vector<i64>& shape) {
    if (!BlockCall::is(b, name, format, shape)) return false;
    bool fits = shape[2] < 2 || b.view.strides[2] == b.view.itemsize;
    for (int axis = 0; axis < 2; ++axis) fits &= b.view.strides[axis] % b.view.itemsize == 0;
    if (!fits) PyErr_Format(PyExc_ValueError, "%s: the strides do not fit", name);
    return fits;
}
// Whether an array has floats and 3 axes.
bool is_floats(const Buffer& b, const char* name) {
    if (b.view.ndim == 3 && (!strcmp(b.view.format, "f") || !strcmp(b.view.format, "d")))
        return true;
    PyErr_Format(PyExc_ValueError, "%s: must be floats with 3 axes", name);
    return false;
}
std::vector<i64> shape_of(const Buffer& b) { return {b.view.shape, b.view.shape + 3}; }

// Sums of tasks, added up in their order for any threads.
PyObject* with_sums(PyObject* done, const std::vector<double>& sums, size_t each) {
    if (!done) return nullptr;
    Py_DECREF(done);
    double all[2] = {};
    for (size_t i = 0; i < sums.size(); ++i) all[i % each] += sums[i];
    return each == 1 ? PyFloat_FromDouble(all[0]) : Py_BuildValue("dd", all[0], all[1]);
}

// pool_responses(threads, size, step, epsilon, by, write, responses, out): the sum of pools,
// sqrt(epsilon + their squares), of responses [rows, columns, n]. They are written to out, or if
// write is false by / pool is added to out, the slopes of the pool's responses.
PyObject* pool_responses(PyObject*, PyObject* args) {
    Buffer responses, out;
    PoolShape of;
    int threads, pooled;
    long long size, step;
    if (!PyArg_ParseTuple(args, "iLLddpO&O&", &threads, &size, &step, &of.epsilon, &of.by, &pooled,
                          to_strided<PyBUF_RECORDS_RO>, &responses, to_strided<PyBUF_RECORDS>,
                          &out) ||
        !is_floats(responses, "responses"))
        return nullptr;
    const std::vector<i64> cells = shape_of(responses);
    of.size = size, of.step = step, of.pooled = pooled;
    if (size < 1 || step < 1 || cells[0] < size || cells[1] < size || (cells[0] - size) % step ||
        (cells[1] - size) % step)
        return PyErr_Format(PyExc_ValueError, "responses: are not those of pools of %lld by %lld",
                            size, step);
    of.rows = (cells[0] - size) / step + 1, of.columns = (cells[1] - size) / step + 1;
    const char* format = responses.view.format;
    const std::vector<i64> pools = {of.rows, of.columns, cells[2]};
    if (!is_rows(responses, "responses", format, cells) ||
        !is_rows(out, "out", format, pooled ? pools : cells))
        return nullptr;
    const bool is_double = responses.view.itemsize == sizeof(double);
    of.row = BlockCall::stride(responses, 0), of.column = BlockCall::stride(responses, 1);
    of.to_row = BlockCall::stride(out, 0), of.to_column = BlockCall::stride(out, 1);
    const i64 count = (cells[2] + CPD_POOL_VALUES - 1) / CPD_POOL_VALUES;
    std::vector<double> sums((size_t)count);
    PyObject* done = in_blocks(threads, count * BLOCK_TASK, [&](const Block& b) {
        const Room room(2 * cells[1] * 64);
        for (i64 t = b.first / BLOCK_TASK; t < (b.first + b.n) / BLOCK_TASK; ++t) {
            const i64 first = t * CPD_POOL_VALUES, left = cells[2] - first;
            const i64 at = first * responses.view.itemsize;
            sums[(size_t)t] = loops->pool_cells[is_double](
                of, responses.at<u8>(at), out.at<u8>(at),
                left < CPD_POOL_VALUES ? left : CPD_POOL_VALUES, room.start);
        }
    });
    return with_sums(done, sums, 1);
}

// subtract_cells(threads, by, x, again): again -= by * x for [rows, columns, n]; returns the sums
// of the squares of the differences and of x.
PyObject* subtract_cells(PyObject*, PyObject* args) {
    Buffer x, again;
    int threads;
    double by;
    if (!PyArg_ParseTuple(args, "idO&O&", &threads, &by, to_strided<PyBUF_RECORDS_RO>, &x,
                          to_strided<PyBUF_RECORDS>, &again) ||
        !is_floats(x, "x"))
        return nullptr;
    const std::vector<i64> n = shape_of(x);
    if (!is_rows(x, "x", x.view.format, n) || !is_rows(again, "again", x.view.format, n))
        return nullptr;
    const bool is_double = x.view.itemsize == sizeof(double);
    std::vector<double> sums((size_t)(2 * n[0]));
    PyObject* done = in_blocks(threads, n[0] * BLOCK_TASK, [&](const Block& b) {
        for (i64 t = b.first / BLOCK_TASK; t < (b.first + b.n) / BLOCK_TASK; ++t)
            for (i64 i = 0; i < n[1]; ++i)
                loops->subtract_row[is_double](
                    by, x.at<u8>(t * x.view.strides[0] + i * x.view.strides[1]),
                    again.at<u8>(t * again.view.strides[0] + i * again.view.strides[1]), n[2],
                    &sums[(size_t)(2 * t)]);
    });
    return with_sums(done, sums, 2);
}

}  // namespace

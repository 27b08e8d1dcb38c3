// Calls of the autoencoder's filters; a part of cpu_module.cpp, which includes it.
#include <memory>

#include "cpu_threads.h"

namespace {

// An array with strides, all of which are kept; written: PyBUF_RECORDS.
template <int FLAGS>
int to_strided(PyObject* object, void* target) {
    return PyObject_GetBuffer(object, &static_cast<Buffer*>(target)->view, FLAGS) == 0;
}

// The arrays of some blocks: [blocks, maps, inputs] without gaps, and [rows, columns, ...], whose
// strides are free except for the values of a field's row, and of a filter, which lie together.
struct BlockCall {
    Buffer weight, moving, x, again, responses, slopes;
    BlockShape of = {};

    i64 count() const { return weight.view.shape[0]; }
    bool is_double() const { return weight.view.itemsize == sizeof(double); }
    i64 size() const { return weight.view.itemsize; }

    static bool is(const Buffer& b, const char* name, const char* format,
                   const std::vector<i64>& shape) {
        const bool same = b.view.ndim == (int)shape.size() && !strcmp(b.view.format, format) &&
                          std::equal(shape.begin(), shape.end(), b.view.shape);
        if (!same) PyErr_Format(PyExc_ValueError, "%s: has another shape or dtype", name);
        return same;
    }
    static bool is_whole(const Buffer& b, const char* name) {
        if (PyBuffer_IsContiguous(&b.view, 'C')) return true;
        PyErr_Format(PyExc_ValueError, "%s: must be contiguous", name);
        return false;
    }
    static i64 stride(const Buffer& b, int axis) { return b.view.strides[axis] / b.view.itemsize; }
    // Whether an array's values along the axes 3 and 4 lie together, for fields.
    bool is_field(const Buffer& b, const char* name) const {
        const Py_ssize_t* n = x.view.shape;
        bool fits = (n[4] == 1 || stride(b, 4) == 1) && (n[3] == 1 || stride(b, 3) == n[4]);
        for (int axis = 0; axis < 6; ++axis) fits &= b.view.strides[axis] % size() == 0;
        for (int axis : {0, 1, 2, 5}) fits &= stride(b, axis) == stride(x, axis);
        if (!fits) PyErr_Format(PyExc_ValueError, "%s: the strides do not fit", name);
        return fits;
    }
    // Whether a filter's values for all images lie together.
    bool has_rows(const Buffer& b, const char* name) const {
        bool fits = b.view.shape[3] == 1 || b.view.strides[3] == size();
        for (int axis = 0; axis < 3; ++axis) fits &= b.view.strides[axis] % size() == 0;
        if (!fits) PyErr_Format(PyExc_ValueError, "%s: the strides do not fit", name);
        return fits;
    }
    // Checks the arrays that are given.
    bool fits() {
        const Py_buffer &w = weight.view, &f = x.view;
        if (w.ndim != 3 || f.ndim != 6 || (strcmp(w.format, "f") && strcmp(w.format, "d"))) {
            PyErr_SetString(PyExc_ValueError, "weight, x: must be floats with 3 and 6 axes");
            return false;
        }
        const std::vector<i64> fields(f.shape, f.shape + 6),
            all = {fields[0], fields[1], w.shape[1], fields[5]};
        if (!is(x, "x", w.format, fields) || !is(again, "again", w.format, fields) ||
            !is(responses, "responses", w.format, all) || !is_whole(weight, "weight") ||
            !is(weight, "weight", w.format,
                {fields[0] * fields[1], w.shape[1], fields[2] * fields[3] * fields[4]}) ||
            !is_field(x, "x") || !is_field(again, "again") || !has_rows(responses, "responses"))
            return false;
        of.maps = w.shape[1], of.inputs = w.shape[2], of.batch = fields[5];
        of.pieces = fields[2], of.run = fields[3] * fields[4];
        of.piece = stride(x, 2), of.image = stride(x, 5);
        of.map = stride(responses, 2);
        of.width = (of.inputs + CPD_FIELD_VALUES - 1) / CPD_FIELD_VALUES * CPD_FIELD_VALUES;
        if (!moving.view.buf) return true;
        if (!is(moving, "moving", w.format, {w.shape[0], w.shape[1], w.shape[2]}) ||
            !is(slopes, "slopes", w.format, all) || !is_whole(moving, "moving") ||
            !has_rows(slopes, "slopes"))
            return false;
        of.slopes_map = stride(slopes, 2);
        return true;
    }
    u8* filters(const Buffer& b, i64 block) const {
        return b.at<u8>(block * of.maps * of.inputs * size());
    }
    u8* at(const Buffer& b, i64 block) const {
        const i64 columns = x.view.shape[1];
        return b.at<u8>(block / columns * b.view.strides[0] + block % columns * b.view.strides[1]);
    }
};

// Memory for so many values, from the start of a cache line on.
struct Room {
    std::unique_ptr<u8[]> memory;
    u8* start;
    Room(i64 bytes) : memory(new u8[(size_t)bytes + 63]), start(memory.get()) {
        start += -(uintptr_t)start & 63;
    }
};

const i64 BLOCK_TASK = BLOCK_TILES * CPD_TILE;  // counts as the unit that threads share

// reconstruct_blocks(threads, weight, x, responses, again): the responses to fields x, and the
// filters' outputs for them, added to again. Sums are in the order of blocks for any threads.
PyObject* reconstruct_blocks(PyObject*, PyObject* args) {
    BlockCall c;
    int threads;
    if (!PyArg_ParseTuple(args, "iO&O&O&O&", &threads, to_strided<PyBUF_RECORDS_RO>, &c.weight,
                          to_strided<PyBUF_RECORDS_RO>, &c.x, to_strided<PyBUF_RECORDS>,
                          &c.responses, to_strided<PyBUF_RECORDS>, &c.again) ||
        !c.fits())
        return nullptr;
    const i64 row = c.of.width * c.size(), outputs = c.of.batch * row;
    const bool at_once = threads < 2;
    const Room all((at_once ? 1 : c.count()) * outputs);
    const auto add = [&](i64 block, i64 first, i64 stop) {
        for (i64 i = first; i < stop; ++i)
            loops->add_field[c.is_double()](c.of,
                                            all.start + (at_once ? 0 : block) * outputs + i * row,
                                            c.at(c.again, block) + i * c.again.view.strides[5]);
    };
    PyObject* done = in_blocks(threads, c.count() * BLOCK_TASK, [&](const Block& b) {
        const Room room(outputs + row);
        for (i64 t = b.first / BLOCK_TASK; t < (b.first + b.n) / BLOCK_TASK; ++t) {
            loops->reconstruct_block[c.is_double()](
                c.of, c.filters(c.weight, t), c.at(c.x, t), c.at(c.responses, t),
                all.start + (at_once ? 0 : t) * outputs, room.start);
            if (at_once) add(t, 0, c.of.batch);
        }
    });
    if (!done || at_once) return done;
    Py_DECREF(done);
    return in_blocks(threads, c.of.batch * BLOCK_TASK, [&](const Block& b) {
        for (i64 t = 0; t < c.count(); ++t)
            add(t, b.first / BLOCK_TASK, (b.first + b.n) / BLOCK_TASK);
    });
}

// descend_blocks(threads, (rate, momentum, alpha), weight, moving, x, again, responses, slopes):
// a step of the filters and of their momentum, moving.
PyObject* descend_blocks(PyObject*, PyObject* args) {
    BlockCall c;
    BlockStep by;
    int threads;
    if (!PyArg_ParseTuple(args, "i(ddd)O&O&O&O&O&O&", &threads, &by.rate, &by.momentum, &by.alpha,
                          to_strided<PyBUF_RECORDS>, &c.weight, to_strided<PyBUF_RECORDS>,
                          &c.moving, to_strided<PyBUF_RECORDS_RO>, &c.x,
                          to_strided<PyBUF_RECORDS_RO>, &c.again, to_strided<PyBUF_RECORDS_RO>,
                          &c.responses, to_strided<PyBUF_RECORDS_RO>, &c.slopes) ||
        !c.fits())
        return nullptr;
    const i64 n = c.of.batch, values = (2 * n + 1) * c.of.width + (3 * n + 1) * c.of.maps;
    return in_blocks(threads, c.count() * BLOCK_TASK, [&](const Block& b) {
        const Room room(values * c.size());
        for (i64 t = b.first / BLOCK_TASK; t < (b.first + b.n) / BLOCK_TASK; ++t)
            loops->descend_block[c.is_double()](
                c.of, by, c.filters(c.weight, t), c.filters(c.moving, t), c.at(c.x, t),
                c.at(c.again, t), c.at(c.responses, t), c.at(c.slopes, t), room.start);
    });
}

}  // namespace

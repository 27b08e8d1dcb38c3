// Arguments of the module's functions: buffers, casts and keys, and what is checked of them.
#ifndef CPD_CPU_ARGUMENTS_H
#define CPD_CPU_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include "cpu_table.h"

namespace {

// A buffer argument, released at the end of the scope.
struct Buffer {
    Py_buffer view = {};
    ~Buffer() {
        if (view.buf) PyBuffer_Release(&view);
    }
    // Where element index lies; null where the argument was left out.
    template <class T>
    T* at(i64 index) const {
        return view.buf ? static_cast<T*>(view.buf) + index : nullptr;
    }
};

// A writable buffer, or none where None is given.
int to_optional(PyObject* object, void* target) {
    if (object == Py_None) return 1;
    Py_buffer* view = &static_cast<Buffer*>(target)->view;
    return PyObject_GetBuffer(object, view, PyBUF_WRITABLE) == 0;
}

struct Unlocked {  // the GIL is free within the scope
    PyThreadState* state = PyEval_SaveThread();
    ~Unlocked() { PyEval_RestoreThread(state); }
};

i64 tiles_of(i64 n) { return (n + CPD_TILE - 1) / CPD_TILE; }

bool has_length(const Buffer& buffer, const char* name, i64 bytes) {
    if (buffer.view.len == bytes) return true;
    PyErr_Format(PyExc_ValueError, "%s: %zd bytes given, %lld needed", name, buffer.view.len,
                 (long long)bytes);
    return false;
}

// A Cast travels as a tuple of its 14 numbers, in the order of the struct, the address of its
// table or 0, and what keeps the table alive.
int to_cast(PyObject* object, void* target) {
    Cast* c = static_cast<Cast*>(target);
    unsigned long long address;
    PyObject* kept = nullptr;
    if (!PyArg_ParseTuple(object, "iiiIIIIIiiiIIIK|O;cast: 14 numbers and a table", &c->exp,
                          &c->man, &c->rounding, &c->max_code, &c->inf_code, &c->nan_code,
                          &c->overflow_code, &c->first_nan, &c->shift_min, &c->shift_max, &c->emax,
                          &c->max_significand, &c->overflow_below, &c->random_mask, &address,
                          &kept))
        return 0;
    c->table = reinterpret_cast<const int*>(static_cast<uintptr_t>(address));
    return 1;
}

int to_key(PyObject* object, void* target) {
    Key* k = static_cast<Key*>(target);
    return PyArg_ParseTuple(object, "II;key: 2 numbers", &k->low, &k->high);
}

int width_of(const Cast& cast) { return 1 + cast.exp + cast.man; }

bool has_words(const Buffer& words, const char* name, i64 tiles, i64 bits) {
    return has_length(words, name, tiles * (CPD_TILE / 8) * bits);
}

bool has_tiles(const Buffer& words, const Buffer& shifts, i64 n, i64 bits) {
    return has_words(words, "words", tiles_of(n), bits) &&
           has_length(shifts, "shifts", tiles_of(n));
}

// The same where there may be more shifts; blocks is set to those of a column, by their number.
bool has_blocks(const Buffer& words, const Buffer& shifts, i64 n, i64 bits, int* blocks) {
    const i64 tiles = tiles_of(n);
    for (*blocks = 0; *blocks <= CPD_MOST_BLOCKS; ++*blocks)
        if (shifts.view.len == tiles * CPD_SHIFTS_OF_TILE(*blocks))
            return has_words(words, "words", tiles, bits);
    return has_tiles(words, shifts, n, bits);  // says what is wrong
}

i64 floats_in(const Buffer& x) { return x.view.len / (i64)sizeof(float); }

bool has_counts(const Buffer& counts, i64 n) {
    return !counts.view.buf || has_length(counts, "counts", tiles_of(n) * 3 * (i64)sizeof(u32));
}

bool is_width(int bits) {
    if (1 <= bits && bits <= 32) return true;
    PyErr_Format(PyExc_ValueError, "bits: %d given, 1..32 allowed", bits);
    return false;
}

}  // namespace

#endif

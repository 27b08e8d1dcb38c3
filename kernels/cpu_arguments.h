// Arguments of the module's functions: buffers, casts and keys, and their checks.
#ifndef CPD_CPU_ARGUMENTS_H
#define CPD_CPU_ARGUMENTS_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>

#include <vector>

#include "cpu_table.h"

namespace {

// The objects that recorded calls keep. X and OUT are two arrays that may have another address in
// every run; all others stay in place.
struct Held {
    u8 *low[2] = {}, *high[2] = {}, *now[2] = {};  // of X and OUT: when recorded, and in this run
    std::vector<Py_buffer> views;
    std::vector<PyObject*> objects;
};

// If not null, calls of this thread are recorded in it instead of executed, see cpu_call_list.h.
thread_local Held* recording = nullptr;

// A buffer argument, released at the end of the scope; a recorded call keeps it. A copy, as in a
// recorded call, only has the address of the array.
struct Buffer {
    Py_buffer view = {};
    u8* const* base = nullptr;  // of X or OUT: its address, and the array's offset in it
    i64 into = 0;
    bool is_copy = false;

    Buffer() {}
    Buffer(const Buffer& other)
        : view(other.view), base(other.base), into(other.into), is_copy(true) {
        u8* start = static_cast<u8*>(view.buf);
        for (int i = 0; recording && !base && i < 2; ++i)
            if (recording->low[i] <= start && start < recording->high[i])
                base = &recording->now[i], into = start - recording->low[i];
    }
    Buffer& operator=(const Buffer&) = delete;
    ~Buffer() {
        if (is_copy || !view.buf) return;
        if (recording)
            recording->views.push_back(view);
        else
            PyBuffer_Release(&view);
    }
    // The address of element index; null if the argument was left out.
    template <class T>
    T* at(i64 index) const {
        u8* start = base ? *base + into : static_cast<u8*>(view.buf);
        return start ? reinterpret_cast<T*>(start) + index : nullptr;
    }
};

// A buffer that is read; none for None.
int to_optional(PyObject* object, void* target) {
    Py_buffer* view = &static_cast<Buffer*>(target)->view;
    return object == Py_None || PyObject_GetBuffer(object, view, PyBUF_SIMPLE) == 0;
}

// The same for a buffer that is written.
int to_optional_out(PyObject* object, void* target) {
    Py_buffer* view = &static_cast<Buffer*>(target)->view;
    return object == Py_None || PyObject_GetBuffer(object, view, PyBUF_WRITABLE) == 0;
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

// A Cast is a tuple of its 17 numbers, in the order of the struct, the address of its table or 0,
// and the object that owns the table.
int to_cast(PyObject* object, void* target) {
    Cast* c = static_cast<Cast*>(target);
    unsigned long long address;
    PyObject* kept = nullptr;
    if (!PyArg_ParseTuple(object, "iiiIIIIIiiiIIIiiiK|O;cast: 17 numbers and a table", &c->exp,
                          &c->man, &c->rounding, &c->max_code, &c->inf_code, &c->nan_code,
                          &c->overflow_code, &c->first_nan, &c->shift_min, &c->shift_max, &c->emax,
                          &c->max_significand, &c->overflow_below, &c->random_mask, &c->near_min,
                          &c->near_max, &c->ocp, &address, &kept))
        return 0;
    c->table = reinterpret_cast<const int*>(static_cast<uintptr_t>(address));
    if (recording && kept) {
        Py_IncRef(kept);
        recording->objects.push_back(kept);
    }
    return 1;
}

int to_key(PyObject* object, void* target) {
    Key* k = static_cast<Key*>(target);
    return PyArg_ParseTuple(object, "II;key: 2 numbers", &k->low, &k->high);
}

// A key, given as a tuple or in an array, which may have another key in every run.
struct KeyArgument {
    Key own = {};
    Buffer words;
    operator Key() const { return words.view.buf ? *words.at<Key>(0) : own; }
};

int to_key_argument(PyObject* object, void* target) {
    KeyArgument* key = static_cast<KeyArgument*>(target);
    if (PyTuple_Check(object)) return to_key(object, &key->own);
    if (PyObject_GetBuffer(object, &key->words.view, PyBUF_WRITABLE)) return 0;
    if (key->words.view.len == sizeof(Key)) return 1;
    PyErr_SetString(PyExc_ValueError, "key: an array must have 8 bytes");
    return 0;
}

int width_of(const Cast& cast) { return 1 + cast.exp + cast.man; }

bool has_words(const Buffer& words, const char* name, i64 tiles, i64 bits) {
    return has_length(words, name, tiles * (CPD_TILE / 8) * bits);
}

bool has_tiles(const Buffer& words, const Buffer& shifts, i64 n, i64 bits) {
    return has_words(words, "words", tiles_of(n), bits) &&
           has_length(shifts, "shifts", tiles_of(n));
}

// The same if there may be more shifts; their number gives the blocks of a column, written.
bool has_blocks(const Cast& cast, const Buffer& words, const Buffer& shifts, i64 n, i64 bits,
                int* blocks) {
    const i64 tiles = tiles_of(n);
    if (cast.ocp) {
        *blocks = 1;
        if (bits < 4 || bits > 8) {  // see Codes of cpu_ocp.h
            PyErr_Format(PyExc_ValueError, "cast: OCP's elements have %lld bits: 4 to 8 allowed",
                         bits);
            return false;
        }
        return has_length(shifts, "shifts", tiles * CPD_LANES) &&
               has_words(words, "words", tiles, bits);
    }
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

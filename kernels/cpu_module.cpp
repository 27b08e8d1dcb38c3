// The Python module cpdhpc._cpu: checks lengths, releases the GIL, calls the loops.
// ops/cpu.py checks dtypes and shapes; here a wrong length is an error, never a crash.
#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <string.h>

#include "cpu_table.h"

namespace {

const Loops* loops = &cpd_loops_portable;  // the fastest that this processor runs

// A buffer argument, released at the end of the scope.
struct Buffer {
    Py_buffer view = {};
    ~Buffer() {
        if (view.buf) PyBuffer_Release(&view);
    }
    template <class T>
    T* as() const {
        return static_cast<T*>(view.buf);
    }
};

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

// A Cast travels as a tuple of its 11 numbers, in the order of the struct.
int to_cast(PyObject* object, void* target) {
    Cast* c = static_cast<Cast*>(target);
    return PyArg_ParseTuple(object, "iiiIIIIIiiiI;cast: 12 numbers", &c->exp, &c->man, &c->rounding,
                            &c->max_code, &c->inf_code, &c->nan_code, &c->overflow_code,
                            &c->first_nan, &c->shift_min, &c->shift_max, &c->emax,
                            &c->max_significand);
}

int to_key(PyObject* object, void* target) {
    Key* k = static_cast<Key*>(target);
    return PyArg_ParseTuple(object, "II;key: 2 numbers", &k->low, &k->high);
}

bool has_tiles(const Buffer& words, const Buffer& shifts, i64 n, int bits) {
    return has_length(words, "words", tiles_of(n) * (CPD_TILE / 8) * bits) &&
           has_length(shifts, "shifts", tiles_of(n));
}

i64 floats_in(const Buffer& x) { return x.view.len / (i64)sizeof(float); }

PyObject* encode(PyObject*, PyObject* args) {
    Cast cast;
    Key key;
    int k;
    unsigned long long offset;
    Buffer x, codes;
    if (!PyArg_ParseTuple(args, "O&iO&Ky*w*", to_cast, &cast, &k, to_key, &key, &offset, &x.view,
                          &codes.view) ||
        !has_length(codes, "codes", x.view.len))
        return nullptr;
    {
        Unlocked unlocked;
        loops->encode(cast, k, key, offset, x.as<float>(), floats_in(x), codes.as<u32>());
    }
    Py_RETURN_NONE;
}

PyObject* decode(PyObject*, PyObject* args) {
    Cast cast;
    int k;
    Buffer codes, out;
    if (!PyArg_ParseTuple(args, "O&iy*w*", to_cast, &cast, &k, &codes.view, &out.view) ||
        !has_length(codes, "codes", out.view.len))
        return nullptr;
    {
        Unlocked unlocked;
        loops->decode(cast, k, codes.as<u32>(), floats_in(out), out.as<float>());
    }
    Py_RETURN_NONE;
}

bool is_width(int bits) {
    if (1 <= bits && bits <= 32) return true;
    PyErr_Format(PyExc_ValueError, "bits: %d given, 1..32 allowed", bits);
    return false;
}

PyObject* pack(PyObject*, PyObject* args) {
    int bits;
    Buffer codes, words;
    if (!PyArg_ParseTuple(args, "iy*w*", &bits, &codes.view, &words.view) || !is_width(bits) ||
        !has_length(words, "words", tiles_of(floats_in(codes)) * (CPD_TILE / 8) * bits))
        return nullptr;
    {
        Unlocked unlocked;
        loops->pack(bits, codes.as<u32>(), floats_in(codes), words.as<u32>());
    }
    Py_RETURN_NONE;
}

PyObject* unpack(PyObject*, PyObject* args) {
    int bits;
    Buffer words, codes;
    if (!PyArg_ParseTuple(args, "iy*w*", &bits, &words.view, &codes.view) || !is_width(bits) ||
        !has_length(words, "words", tiles_of(floats_in(codes)) * (CPD_TILE / 8) * bits))
        return nullptr;
    {
        Unlocked unlocked;
        loops->unpack(bits, words.as<u32>(), floats_in(codes), codes.as<u32>());
    }
    Py_RETURN_NONE;
}

PyObject* amax_tiles(PyObject*, PyObject* args) {
    Buffer x, amax;
    if (!PyArg_ParseTuple(args, "y*w*", &x.view, &amax.view) ||
        !has_length(amax, "amax", tiles_of(floats_in(x)) * (i64)sizeof(u32)))
        return nullptr;
    {
        Unlocked unlocked;
        loops->amax_tiles(x.as<float>(), floats_in(x), amax.as<u32>());
    }
    Py_RETURN_NONE;
}

bool has_counts(const Buffer& counts, i64 n) {
    return !counts.view.buf || has_length(counts, "counts", tiles_of(n) * 3 * (i64)sizeof(u32));
}

PyObject* encode_tiles(PyObject*, PyObject* args) {
    Cast cast;
    Key key;
    int fit;
    unsigned long long offset;
    Buffer x, words, shifts, counts;
    if (!PyArg_ParseTuple(args, "O&pO&Ky*w*w*|w*", to_cast, &cast, &fit, to_key, &key, &offset,
                          &x.view, &words.view, &shifts.view, &counts.view) ||
        !has_tiles(words, shifts, floats_in(x), 1 + cast.exp + cast.man) ||
        !has_counts(counts, floats_in(x)))
        return nullptr;
    {
        Unlocked unlocked;
        loops->encode_tiles(cast, fit, key, offset, x.as<float>(), floats_in(x), words.as<u32>(),
                            shifts.as<u8>(), counts.as<u32>());
    }
    Py_RETURN_NONE;
}

PyObject* decode_tiles(PyObject*, PyObject* args) {
    Cast cast;
    Buffer words, shifts, out;
    if (!PyArg_ParseTuple(args, "O&y*y*w*", to_cast, &cast, &words.view, &shifts.view, &out.view) ||
        !has_tiles(words, shifts, floats_in(out), 1 + cast.exp + cast.man))
        return nullptr;
    i64 nonfinite;
    {
        Unlocked unlocked;
        nonfinite = loops->decode_tiles(cast, words.as<u32>(), shifts.as<u8>(), out.as<float>(),
                                        floats_in(out));
    }
    return PyLong_FromLongLong(nonfinite);
}

PyObject* decode_add_tiles(PyObject*, PyObject* args) {
    Cast cast;
    Buffer words, shifts, x, out;
    if (!PyArg_ParseTuple(args, "O&y*y*y*w*", to_cast, &cast, &words.view, &shifts.view, &x.view,
                          &out.view) ||
        !has_tiles(words, shifts, floats_in(x), 1 + cast.exp + cast.man) ||
        !has_length(out, "out", x.view.len))
        return nullptr;
    {
        Unlocked unlocked;
        loops->decode_add_tiles(cast, words.as<u32>(), shifts.as<u8>(), x.as<float>(),
                                out.as<float>(), floats_in(x));
    }
    Py_RETURN_NONE;
}

PyObject* decode_add_encode_tiles(PyObject*, PyObject* args) {
    Cast cast;
    Key key;
    int fit;
    unsigned long long offset;
    Buffer words_in, shifts_in, x, words, shifts, counts;
    if (!PyArg_ParseTuple(args, "O&pO&Ky*y*y*w*w*|w*", to_cast, &cast, &fit, to_key, &key, &offset,
                          &words_in.view, &shifts_in.view, &x.view, &words.view, &shifts.view,
                          &counts.view))
        return nullptr;
    i64 n = floats_in(x);
    int bits = 1 + cast.exp + cast.man;
    if (!has_tiles(words_in, shifts_in, n, bits) || !has_tiles(words, shifts, n, bits) ||
        !has_counts(counts, n))
        return nullptr;
    {
        Unlocked unlocked;
        loops->decode_add_encode_tiles(cast, fit, key, offset, words_in.as<u32>(),
                                       shifts_in.as<u8>(), x.as<float>(), n, words.as<u32>(),
                                       shifts.as<u8>(), counts.as<u32>());
    }
    Py_RETURN_NONE;
}

// The tables that this processor runs, slowest first.
int runnable(const Loops** found) {
    int count = 0;
    found[count++] = &cpd_loops_portable;
#ifdef CPD_HAS_X86_CLONES
    if (__builtin_cpu_supports("x86-64-v3")) found[count++] = &cpd_loops_v3;
    if (__builtin_cpu_supports("x86-64-v4")) found[count++] = &cpd_loops_v4;
#endif
    return count;
}

PyObject* clone(PyObject*, PyObject*) { return PyUnicode_FromString(loops->name); }

PyObject* clones(PyObject*, PyObject*) {
    const Loops* found[3];
    int count = runnable(found);
    PyObject* names = PyList_New(0);
    for (int i = 0; names && i < count; ++i) {
        PyObject* name = PyUnicode_FromString(found[i]->name);
        if (!name || PyList_Append(names, name)) Py_CLEAR(names);
        Py_XDECREF(name);
    }
    return names;
}

// For tests and benchmarks: all clones must give the same bits.
PyObject* use_clone(PyObject*, PyObject* args) {
    const char* wanted;
    if (!PyArg_ParseTuple(args, "s", &wanted)) return nullptr;
    const Loops* found[3];
    int count = runnable(found);
    for (int i = 0; i < count; ++i) {
        if (strcmp(wanted, found[i]->name)) continue;
        loops = found[i];
        Py_RETURN_NONE;
    }
    PyErr_Format(PyExc_ValueError, "use_clone: %s: not among clones()", wanted);
    return nullptr;
}

PyMethodDef methods[] = {
    {"encode", encode, METH_VARARGS, nullptr},
    {"decode", decode, METH_VARARGS, nullptr},
    {"pack", pack, METH_VARARGS, nullptr},
    {"unpack", unpack, METH_VARARGS, nullptr},
    {"amax_tiles", amax_tiles, METH_VARARGS, nullptr},
    {"encode_tiles", encode_tiles, METH_VARARGS, nullptr},
    {"decode_tiles", decode_tiles, METH_VARARGS, nullptr},
    {"decode_add_tiles", decode_add_tiles, METH_VARARGS, nullptr},
    {"decode_add_encode_tiles", decode_add_encode_tiles, METH_VARARGS, nullptr},
    {"clone", clone, METH_NOARGS, nullptr},
    {"clones", clones, METH_NOARGS, nullptr},
    {"use_clone", use_clone, METH_VARARGS, nullptr},
    {nullptr, nullptr, 0, nullptr}};

PyModuleDef module = {PyModuleDef_HEAD_INIT,
                      "_cpu",
                      "The CPU kernels.",
                      -1,
                      methods,
                      nullptr,
                      nullptr,
                      nullptr,
                      nullptr};

}  // namespace

PyMODINIT_FUNC PyInit__cpu() {
    const Loops* found[3];
    loops = found[runnable(found) - 1];
    return PyModule_Create(&module);
}

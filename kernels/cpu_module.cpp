// The Python module cpdhpc._cpu: checks lengths, releases the GIL, and calls the loops; the first
// argument is the number of threads.
// ops/cpu.py checks dtypes and shapes; here a wrong length is an error, never a crash.
#include <string.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "cpu_threads.h"

namespace {

const Loops* loops = &cpd_loops_portable;  // the fastest that this processor runs

}  // namespace

#include "cpu_board_calls.h"  // with call lists: the others' calls can be written down
//
#include "cpu_blocks_calls.h"
#include "cpu_ending_calls.h"
#include "cpu_exchange_calls.h"
#include "cpu_integers_calls.h"
#include "cpu_moves_calls.h"
#include "cpu_pools_calls.h"
#include "cpu_products_calls.h"
#include "cpu_sparse_calls.h"
#include "cpu_steps_calls.h"
//
#include "cpu_passes_calls.h"
//
#include "cpu_largest_calls.h"
//
#include "cpu_places_calls.h"

namespace {

PyObject* encode(PyObject*, PyObject* args) {
    Cast cast;
    Key key;
    int threads, k;
    unsigned long long offset;
    Buffer x, codes;
    if (!PyArg_ParseTuple(args, "iO&iO&Ky*w*", &threads, to_cast, &cast, &k, to_key, &key, &offset,
                          &x.view, &codes.view) ||
        !has_length(codes, "codes", x.view.len))
        return nullptr;
    return in_blocks(threads, floats_in(x), [&](const Block& b) {
        loops->encode(cast, k, key, offset + b.first, x.at<float>(b.first), b.n,
                      codes.at<u32>(b.first));
    });
}

PyObject* decode(PyObject*, PyObject* args) {
    Cast cast;
    int threads, k;
    Buffer codes, out;
    if (!PyArg_ParseTuple(args, "iO&iy*w*", &threads, to_cast, &cast, &k, &codes.view, &out.view) ||
        !has_length(codes, "codes", out.view.len))
        return nullptr;
    return in_blocks(threads, floats_in(out), [&](const Block& b) {
        loops->decode(cast, k, codes.at<u32>(b.first), b.n, out.at<float>(b.first));
    });
}

PyObject* pack(PyObject*, PyObject* args) {
    int threads, bits;
    Buffer codes, words;
    if (!PyArg_ParseTuple(args, "iiy*w*", &threads, &bits, &codes.view, &words.view) ||
        !is_width(bits) || !has_words(words, "words", tiles_of(floats_in(codes)), bits))
        return nullptr;
    return in_blocks(threads, floats_in(codes), [&](const Block& b) {
        loops->pack(bits, codes.at<u32>(b.first), b.n, words.at<u32>(b.tile * CPD_LANES * bits));
    });
}

PyObject* unpack(PyObject*, PyObject* args) {
    int threads, bits;
    Buffer words, codes;
    if (!PyArg_ParseTuple(args, "iiy*w*", &threads, &bits, &words.view, &codes.view) ||
        !is_width(bits) || !has_words(words, "words", tiles_of(floats_in(codes)), bits))
        return nullptr;
    return in_blocks(threads, floats_in(codes), [&](const Block& b) {
        loops->unpack(bits, words.at<u32>(b.tile * CPD_LANES * bits), b.n, codes.at<u32>(b.first));
    });
}

PyObject* amax_tiles(PyObject*, PyObject* args) {
    int threads;
    Buffer x, amax;
    if (!PyArg_ParseTuple(args, "iy*w*", &threads, &x.view, &amax.view) ||
        !has_length(amax, "amax", tiles_of(floats_in(x)) * (i64)sizeof(u32)))
        return nullptr;
    return in_blocks(threads, floats_in(x), [&](const Block& b) {
        loops->amax_tiles(x.at<float>(b.first), b.n, amax.at<u32>(b.tile));
    });
}

PyObject* encode_tiles(PyObject*, PyObject* args) {
    Cast cast;
    KeyArgument key;
    int threads, fit, blocks;
    unsigned long long offset;
    Buffer x, words, shifts, counts;
    if (!PyArg_ParseTuple(args, "iO&pO&Ky*w*w*|w*", &threads, to_cast, &cast, &fit, to_key_argument,
                          &key, &offset, &x.view, &words.view, &shifts.view, &counts.view))
        return nullptr;
    i64 n = floats_in(x), bits = width_of(cast);
    if (!has_blocks(cast, words, shifts, n, bits, &blocks) || !has_counts(counts, n))
        return nullptr;
    return kept(threads, n, [=](const Block& b) {
        loops->encode_tiles(cast, blocks, fit, key, offset + b.first, x.at<float>(b.first), b.n,
                            words.at<u32>(b.tile * CPD_LANES * bits),
                            shifts.at<u8>(b.tile * CPD_SHIFTS_OF_TILE(blocks)),
                            counts.at<u32>(3 * b.tile));
    });
}

PyObject* decode_tiles(PyObject*, PyObject* args) {
    Cast cast;
    int threads, blocks;
    Buffer words, shifts, out;
    if (!PyArg_ParseTuple(args, "iO&y*y*w*", &threads, to_cast, &cast, &words.view, &shifts.view,
                          &out.view))
        return nullptr;
    i64 n = floats_in(out), bits = width_of(cast);
    if (!has_blocks(cast, words, shifts, n, bits, &blocks)) return nullptr;
    return count_kept(threads, n, [=](const Block& b) {
        return loops->decode_tiles(cast, blocks, words.at<u32>(b.tile * CPD_LANES * bits),
                                   shifts.at<u8>(b.tile * CPD_SHIFTS_OF_TILE(blocks)),
                                   out.at<float>(b.first), b.n);
    });
}

PyObject* decode_add_tiles(PyObject*, PyObject* args) {
    Cast cast;
    int threads, blocks;
    Buffer words, shifts, x, out;
    if (!PyArg_ParseTuple(args, "iO&y*y*y*w*", &threads, to_cast, &cast, &words.view, &shifts.view,
                          &x.view, &out.view))
        return nullptr;
    i64 n = floats_in(x), bits = width_of(cast);
    if (!has_blocks(cast, words, shifts, n, bits, &blocks) || !has_length(out, "out", x.view.len))
        return nullptr;
    return kept(threads, n, [=](const Block& b) {
        loops->decode_add_tiles(cast, blocks, words.at<u32>(b.tile * CPD_LANES * bits),
                                shifts.at<u8>(b.tile * CPD_SHIFTS_OF_TILE(blocks)),
                                x.at<float>(b.first), out.at<float>(b.first), b.n);
    });
}

PyObject* decode_add_encode_tiles(PyObject*, PyObject* args) {
    Cast cast;
    KeyArgument key;
    int threads, fit, blocks, blocks_in;
    unsigned long long offset;
    Buffer words_in, shifts_in, x, words, shifts, out, counts;
    if (!PyArg_ParseTuple(args, "iO&pO&Ky*y*y*w*w*O&O&", &threads, to_cast, &cast, &fit,
                          to_key_argument, &key, &offset, &words_in.view, &shifts_in.view, &x.view,
                          &words.view, &shifts.view, to_optional_out, &out, to_optional_out,
                          &counts))
        return nullptr;
    i64 n = floats_in(x), bits = width_of(cast);
    if (!has_blocks(cast, words_in, shifts_in, n, bits, &blocks_in) ||
        !has_blocks(cast, words, shifts, n, bits, &blocks) ||
        !has_length(shifts, "shifts", shifts_in.view.len) || !has_counts(counts, n) ||
        (out.view.buf && !has_length(out, "out", x.view.len)))
        return nullptr;
    return count_kept(threads, n, [=](const Block& b) {
        i64 word = b.tile * CPD_LANES * bits, shift = b.tile * CPD_SHIFTS_OF_TILE(blocks);
        return loops->decode_add_encode_tiles(
            cast, blocks, fit, key, offset + b.first, words_in.at<u32>(word),
            shifts_in.at<u8>(shift), x.at<float>(b.first), b.n, words.at<u32>(word),
            shifts.at<u8>(shift), out.at<float>(b.first), counts.at<u32>(3 * b.tile));
    });
}

// An int64 that other processes see: earlier writes are visible to a process that reads it.
PyObject* store_release(PyObject*, PyObject* args) {
    Buffer target;
    long long value;
    if (!PyArg_ParseTuple(args, "w*L", &target.view, &value) || !has_length(target, "target", 8))
        return nullptr;
    __atomic_store_n(target.at<long long>(0), value, __ATOMIC_RELEASE);
    Py_RETURN_NONE;
}

PyObject* load_acquire(PyObject*, PyObject* args) {
    Buffer source;
    if (!PyArg_ParseTuple(args, "y*", &source.view) || !has_length(source, "source", 8))
        return nullptr;
    return PyLong_FromLongLong(__atomic_load_n(source.at<long long>(0), __ATOMIC_ACQUIRE));
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

// For tests and benchmarks: all clones must give the same bits, except for blocks of filters.
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
    {"add_integers_tiles", add_integers_tiles, METH_VARARGS, nullptr},
    {"add_encode_integers_tiles", add_encode_integers_tiles, METH_VARARGS, nullptr},
    {"decode_integers_tiles", decode_integers_tiles, METH_VARARGS, nullptr},
    {"pack_trits", pack_trits, METH_VARARGS, nullptr},
    {"unpack_trits", unpack_trits, METH_VARARGS, nullptr},
    {"mark_above", mark_above, METH_VARARGS, nullptr},
    {"count_digits", count_digits, METH_VARARGS, nullptr},
    {"count_bits", count_bits, METH_VARARGS, nullptr},
    {"pack_bitmap", pack_bitmap, METH_VARARGS, nullptr},
    {"unpack_bitmap", unpack_bitmap, METH_VARARGS, nullptr},
    {"pack_stream", pack_stream, METH_VARARGS, nullptr},
    {"unpack_stream", unpack_stream, METH_VARARGS, nullptr},
    {"gather", gather, METH_VARARGS, nullptr},
    {"scatter_add", scatter_add, METH_VARARGS, nullptr},
    {"clear", clear, METH_VARARGS, nullptr},
    {"step_layers", step_layers, METH_VARARGS, nullptr},
    {"accumulate", accumulate, METH_VARARGS, nullptr},
    {"accumulate_largest", accumulate_largest, METH_VARARGS, nullptr},
    {"largest", largest, METH_VARARGS, nullptr},
    {"scale_runs", scale_runs, METH_VARARGS, nullptr},
    {"run_maxima", run_maxima, METH_VARARGS, nullptr},
    {"row_sums", row_sums, METH_VARARGS, nullptr},
    {"run_sums", run_sums, METH_VARARGS, nullptr},
    {"square_sum", square_sum, METH_VARARGS, nullptr},
    {"encode_signs", encode_signs, METH_VARARGS, nullptr},
    {"decode_signs", decode_signs, METH_VARARGS, nullptr},
    {"encode_bins", encode_bins, METH_VARARGS, nullptr},
    {"mean_bins", mean_bins, METH_VARARGS, nullptr},
    {"pack_bins", pack_bins, METH_VARARGS, nullptr},
    {"unpack_bins", unpack_bins, METH_VARARGS, nullptr},
    {"clear_all", clear_all, METH_VARARGS, nullptr},
    {"put", put, METH_VARARGS, nullptr},
    {"mark_drawn", mark_drawn, METH_VARARGS, nullptr},
    {"chunk_leaders", chunk_leaders, METH_VARARGS, nullptr},
    {"accumulate_chunks", accumulate_chunks, METH_VARARGS, nullptr},
    {"mean_places", mean_places, METH_VARARGS, nullptr},
    {"merge_places", merge_places, METH_VARARGS, nullptr},
    {"pairs_at", pairs_at, METH_VARARGS, nullptr},
    {"accumulate_taking", accumulate_taking, METH_VARARGS, nullptr},
    {"put_marked", put_marked, METH_VARARGS, nullptr},
    {"take", take, METH_VARARGS, nullptr},
    {"row_products", row_products, METH_VARARGS, nullptr},
    {"column_products", column_products, METH_VARARGS, nullptr},
    {"outer", outer, METH_VARARGS, nullptr},
    {"encode_runs", encode_runs, METH_VARARGS, nullptr},
    {"mean_runs", mean_runs, METH_VARARGS, nullptr},
    {"matmul", matmul, METH_VARARGS, nullptr},
    {"reconstruct_blocks", reconstruct_blocks, METH_VARARGS, nullptr},
    {"descend_blocks", descend_blocks, METH_VARARGS, nullptr},
    {"pool_responses", pool_responses, METH_VARARGS, nullptr},
    {"subtract_cells", subtract_cells, METH_VARARGS, nullptr},
    {"make_moves", make_moves, METH_VARARGS, nullptr},
    {"read_loan", read_loan, METH_VARARGS, nullptr},
    {"read_memory", read_memory, METH_VARARGS, nullptr},
    {"run_moves", (PyCFunction)(void (*)(void))run_moves, METH_FASTCALL, nullptr},
    {"make_exchange", make_exchange, METH_VARARGS, nullptr},
    {"run_exchange", (PyCFunction)(void (*)(void))run_exchange, METH_FASTCALL, nullptr},
    {"copy", copy, METH_VARARGS, nullptr},
    {"copy_past_caches", copy_past_caches, METH_VARARGS, nullptr},
    {"add", add, METH_VARARGS, nullptr},
    {"divide", divide, METH_VARARGS, nullptr},
    {"make_list", make_list, METH_VARARGS, nullptr},
    {"begin_segment", begin_segment, METH_VARARGS, nullptr},
    {"record", record, METH_VARARGS, nullptr},
    {"add_word", add_word, METH_VARARGS, nullptr},
    {"add_start", add_start, METH_VARARGS, nullptr},
    {"add_test", add_test, METH_VARARGS, nullptr},
    {"use_library", use_library, METH_VARARGS, nullptr},
    {"run_list", (PyCFunction)(void (*)(void))run_list, METH_FASTCALL, nullptr},
    {"run_agreed", (PyCFunction)(void (*)(void))run_agreed, METH_FASTCALL, nullptr},
    {"resume_list", resume_list, METH_VARARGS, nullptr},
    {"end_list", end_list, METH_VARARGS, nullptr},
    {"make_board", make_board, METH_O, nullptr},
    {"meet", meet, METH_VARARGS, nullptr},
    {"meet_again", meet_again, METH_VARARGS, nullptr},
    {"round_trip", round_trip, METH_VARARGS, nullptr},
    {"absent_from", absent_from, METH_O, nullptr},
    {"waits_of", waits_of, METH_O, nullptr},
    {"store_release", store_release, METH_VARARGS, nullptr},
    {"load_acquire", load_acquire, METH_VARARGS, nullptr},
    {"set_timeline", set_timeline, METH_O, nullptr},
    {"timeline_now", timeline_now, METH_NOARGS, nullptr},
    {"timeline_add", timeline_add, METH_VARARGS, nullptr},
    {"set_time_slice", set_time_slice, METH_VARARGS, nullptr},
    {"end_in_time", end_in_time, METH_VARARGS, nullptr},
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

// The module's functions for call lists; a part of cpu_module.cpp, which includes it.
#include "cpu_call_list.h"

namespace {

#ifdef CPD_HAS_X86_CLONES
#define CPD_CLONES __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define CPD_CLONES
#endif

CPD_CLONES void add_values(const float* a, const float* b, i64 n, float* out) {
    for (i64 i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

// copy(threads, x, out) and copy_past_caches, of any bytes; add(threads, a, b, out) and
// divide(threads, x, divisor, out), of float32. divide returns 0 if all quotients are finite, else
// the number of parts of the work with others.
PyObject* copied(PyObject* args, bool past_caches) {
    int threads;
    Buffer x, out;
    if (!PyArg_ParseTuple(args, "iy*w*", &threads, &x.view, &out.view) ||
        !has_length(out, "out", x.view.len))
        return nullptr;
    const i64 size = x.view.len, n = (size + 3) / 4;
    return kept(threads, n, [=](const Block& b) {
        const i64 start = 4 * b.first, end = b.first + b.n == n ? size : start + 4 * b.n;
        (past_caches ? stream : loops->copy)(out.at<u8>(start), x.at<u8>(start), end - start);
    });
}

PyObject* copy(PyObject*, PyObject* args) { return copied(args, false); }
PyObject* copy_past_caches(PyObject*, PyObject* args) { return copied(args, true); }

PyObject* add(PyObject*, PyObject* args) {
    int threads;
    Buffer a, b, out;
    if (!PyArg_ParseTuple(args, "iy*y*w*", &threads, &a.view, &b.view, &out.view) ||
        !has_length(b, "b", a.view.len) || !has_length(out, "out", a.view.len))
        return nullptr;
    return kept(threads, floats_in(a), [=](const Block& block) {
        add_values(a.at<float>(block.first), b.at<float>(block.first), block.n,
                   out.at<float>(block.first));
    });
}

PyObject* divide(PyObject*, PyObject* args) {
    int threads;
    float divisor;
    Buffer x, out;
    if (!PyArg_ParseTuple(args, "iy*fw*", &threads, &x.view, &divisor, &out.view) ||
        !has_length(out, "out", x.view.len))
        return nullptr;
    return count_kept(threads, floats_in(x), [=](const Block& b) {
        return (i64)(loops->scale(true, x.at<float>(b.first), divisor, __builtin_inff(), b.n,
                                  out.at<float>(b.first)) >= CPD_INF);
    });
}

const char* const CALL_LIST = "cpdhpc.call_list";

CallList* list_of(PyObject* capsule) {
    return static_cast<CallList*>(PyCapsule_GetPointer(capsule, CALL_LIST));
}

void drop_list(PyObject* capsule) { delete list_of(capsule); }

// A word that is shared, int64; its memory is held by the list.
bool keep_word(CallList& list, PyObject* object, i64** word) {
    Py_buffer view;
    if (PyObject_GetBuffer(object, &view, PyBUF_WRITABLE)) return false;
    list.views.push_back(view);
    *word = static_cast<i64*>(view.buf);
    if (view.len == 8 && (uintptr_t)view.buf % 8 == 0) return true;
    PyErr_SetString(PyExc_ValueError, "call list: a word must have 8 bytes, aligned");
    return false;
}

// make_list(x, out, slots): an empty list for arrays like x and out; slots: for each a tuple of
// words with the last serial that each process of the node has ended, this process's first.
PyObject* make_list(PyObject*, PyObject* args) {
    Buffer x, out;
    PyObject* slots;
    if (!PyArg_ParseTuple(args, "y*w*O!", &x.view, &out.view, &PyTuple_Type, &slots))
        return nullptr;
    CallList* list = new CallList();
    PyObject* capsule = PyCapsule_New(list, CALL_LIST, drop_list);
    if (!capsule) return delete list, nullptr;
    const Buffer* arrays[] = {&x, &out};
    list->kind = Py_TYPE(x.view.obj);
    for (int i = 0; i < 2; ++i) {
        list->low[i] = list->now[i] = arrays[i]->at<u8>(0);
        list->high[i] = list->low[i] + arrays[i]->view.len;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(slots); ++i) {
        PyObject* words = PyTuple_GetItem(slots, i);
        const Py_ssize_t count = PyTuple_Size(words);
        list->all.emplace_back();
        for (Py_ssize_t j = 0; j < count; ++j) {
            i64* word;
            if (!keep_word(*list, PyTuple_GetItem(words, j), &word))
                return Py_DecRef(capsule), nullptr;
            list->all.back().push_back(word);
            if (j == 0) list->ended.push_back(word);
        }
        if (count < 1) {
            if (!PyErr_Occurred())
                PyErr_SetString(PyExc_ValueError, "call list: a slot has no word");
            return Py_DecRef(capsule), nullptr;
        }
        list->used.push_back(0);
        list->spins = spins_of((size_t)count);
    }
    return capsule;
}

// begin_segment(list, slot): calls that are recorded from here on belong to a new segment.
PyObject* begin_segment(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long slot;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &slot)) return nullptr;
    CallList* list = list_of(capsule);
    if (!list) return nullptr;
    if (slot < 0 || slot >= (long long)list->all.size())
        return PyErr_Format(PyExc_ValueError, "call list: slot %lld: there is none", slot);
    list->segments.emplace_back();
    list->segments.back().slot = slot;
    Py_RETURN_NONE;
}

// record(list, counts, doing): kernels that this thread calls from here on are recorded; counts:
// whether they count values of the result that are not finite; doing: their kind for a timeline.
// record(None, False): they are executed again.
PyObject* record(PyObject*, PyObject* args) {
    PyObject* capsule;
    int counts;
    long long doing = COMPUTES;
    if (!PyArg_ParseTuple(args, "Op|L", &capsule, &counts, &doing)) return nullptr;
    CallList* list = capsule == Py_None ? nullptr : list_of(capsule);
    if (!list && capsule != Py_None) return nullptr;
    if (list) list->counts = counts, list->doing = doing;
    recording = list;
    Py_RETURN_NONE;
}

PyObject* add_step(CallList* list, Step step) {
    if (!list) return nullptr;
    if (list->segments.empty()) {
        PyErr_SetString(PyExc_ValueError, "call list: has no segment yet");
        return nullptr;
    }
    list->segments.back().steps.push_back(std::move(step));
    Py_RETURN_NONE;
}

// add_word(list, word, label): if label is negative, a step that notifies others of a message by a
// word; else one that waits for it.
PyObject* add_word(PyObject*, PyObject* args) {
    PyObject *capsule, *object;
    long long label;
    if (!PyArg_ParseTuple(args, "OOL", &capsule, &object, &label)) return nullptr;
    CallList* list = list_of(capsule);
    i64* word;
    if (!list || !keep_word(*list, object, &word)) return nullptr;
    return add_step(list, Step{label < 0 ? TELL : HEAR, false, 0, label, word, SENDS, {}});
}

// add_start(list, address), add_test(list, address, label): start a request of MPI's, and wait for
// it. address: of the handle, which the caller keeps.
PyObject* add_start(PyObject*, PyObject* args) {
    PyObject* capsule;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &address)) return nullptr;
    void* request = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
    return add_step(list_of(capsule), Step{START, false, 0, 0, request, SENDS, {}});
}

PyObject* add_test(PyObject*, PyObject* args) {
    PyObject* capsule;
    unsigned long long address;
    long long label;
    if (!PyArg_ParseTuple(args, "OKL", &capsule, &address, &label)) return nullptr;
    void* request = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
    return add_step(list_of(capsule), Step{TEST, false, 0, label, request, SENDS, {}});
}

// use_library(start, test): the addresses of MPI_Start and MPI_Test.
PyObject* use_library(PyObject*, PyObject* args) {
    unsigned long long start, test;
    if (!PyArg_ParseTuple(args, "KK", &start, &test)) return nullptr;
    library.start = reinterpret_cast<Start>(static_cast<uintptr_t>(start));
    library.test = reinterpret_cast<Test>(static_cast<uintptr_t>(test));
    Py_RETURN_NONE;
}

// Results of a run besides a number of values, see run_list and run_agreed.
const i64 WAITING = -1, OVERLAPS = -2, UNLIKE = -3, ABSENT = -4, STRANGE = -5;

const i64 SMALL_BYTES = 1 << 15;  // of a result that takes some microseconds

// The result of a run: the number of values that are not finite, or WAITING.
PyObject* go_on(CallList* list, i64 threads, i64 looks) {
    if (threads > 1) {
        list->helping = &helpers();
        try {
            list->helping->start((int)threads - 1);
        } catch (const std::system_error& error) {
            return PyErr_Format(PyExc_RuntimeError, "threads: %lld asked for: %s",
                                (long long)threads, error.what());
        }
    }
    list->threads = threads;
    // Releasing the GIL and taking it again takes some percent of the smallest runs.
    if (list->high[1] - list->low[1] <= SMALL_BYTES) list->run(list->spins);
    if (!list->is_over() && !list->error) {
        Unlocked unlocked;
        list->run(looks);
    }
    if (list->error)
        return PyErr_Format(PyExc_RuntimeError, "call list: MPI error %d", list->error);
    return PyLong_FromLongLong(list->is_over() ? list->bad : WAITING);
}

// end_list(list, turns, lends, bytes_sent, bytes, messages_sent, messages): ends the recording.
// Runs execute one of turns equal parts each, in turns, and add the bytes and messages that they
// send to two counters; lends: a run waits for the processes that read x or out.
PyObject* end_list(PyObject*, PyObject* args) {
    PyObject *capsule, *counters[2];
    long long turns, amounts[2];
    int lends;
    if (!PyArg_ParseTuple(args, "OLpOLOL", &capsule, &turns, &lends, &counters[0], &amounts[0],
                          &counters[1], &amounts[1]))
        return nullptr;
    CallList* list = list_of(capsule);
    if (!list) return nullptr;
    if (turns < 1 || list->segments.size() % (size_t)turns)
        return PyErr_Format(PyExc_ValueError, "call list: %lld turns: cannot be", turns);
    list->turns = (size_t)turns, list->lends = lends;
    for (int i = 0; i < 2; ++i) {
        if (!keep_word(*list, counters[i], &list->sent[i].counter)) return nullptr;
        list->sent[i].amount = amounts[i];
    }
    Py_RETURN_NONE;
}

// Begins a run, unless x and out overlap. arrays: x and out, of the recorded length.
PyObject* start_list(CallList* list, const Buffer* arrays, i64 threads, i64 looks) {
    list->begin(arrays[0].at<u8>(0), arrays[1].at<u8>(0));
    return go_on(list, threads, looks);
}

bool overlap(const Buffer* arrays) {
    const u8 *x = arrays[0].at<u8>(0), *out = arrays[1].at<u8>(0);
    return arrays[0].view.len && arrays[1].view.len && x < out + arrays[1].view.len &&
           out < x + arrays[0].view.len;
}

// run_list(list, threads, looks, x, out): executes the list on x and out; returns the number of
// values of the result that are not finite, WAITING if there was no progress for this number of
// looks, or OVERLAPS, with nothing done, if x and out overlap.
// Raises RuntimeError for an error of MPI, ValueError for arrays of another size.
PyObject* run_list(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 5) {
        PyErr_SetString(PyExc_TypeError, "run_list: 5 arguments are needed");
        return nullptr;
    }
    CallList* list = list_of(args[0]);
    const i64 threads = PyLong_AsLongLong(args[1]), looks = PyLong_AsLongLong(args[2]);
    Buffer arrays[2];
    if (!list || PyErr_Occurred() || PyObject_GetBuffer(args[3], &arrays[0].view, PyBUF_SIMPLE) ||
        PyObject_GetBuffer(args[4], &arrays[1].view, PyBUF_WRITABLE))
        return nullptr;
    for (int i = 0; i < 2; ++i)
        if (!has_length(arrays[i], i ? "out" : "x", list->high[i] - list->low[i])) return nullptr;
    if (!list->is_over()) {
        PyErr_SetString(PyExc_ValueError, "run_list: a run is under way");
        return nullptr;
    }
    if (overlap(arrays)) return PyLong_FromLongLong(OVERLAPS);
    return start_list(list, arrays, threads, looks);
}

// resume_list(list, looks): continues the run in progress.
PyObject* resume_list(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long looks;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &looks)) return nullptr;
    CallList* list = list_of(capsule);
    return list ? go_on(list, list->threads, looks) : nullptr;
}

// waits_of(list): the labels of the waits of the run in progress; none if it waits for a slot.
PyObject* waits_of(PyObject*, PyObject* capsule) {
    CallList* list = list_of(capsule);
    PyObject* labels = list ? PyList_New(0) : nullptr;
    for (size_t i = 0; labels && i < list->under_way.size(); ++i) {
        const Segment& segment = *list->under_way[i];
        PyObject* label = PyLong_FromLongLong(segment.steps[segment.next].label);
        if (!label || PyList_Append(labels, label)) Py_CLEAR(labels);
        Py_XDECREF(label);
    }
    return labels;
}

}  // namespace

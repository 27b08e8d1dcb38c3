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

CPD_CLONES void divide_values(const float* x, float divisor, i64 n, float* out) {
    for (i64 i = 0; i < n; ++i) out[i] = x[i] / divisor;
}

// copy(threads, x, out) and copy_past_caches, of any bytes; add(threads, a, b, out) and
// divide(threads, x, divisor, out), of float32.
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
    return kept(threads, floats_in(x), [=](const Block& b) {
        divide_values(x.at<float>(b.first), divisor, b.n, out.at<float>(b.first));
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
// the words that tell up to where the processes of the node are, this process's first.
PyObject* make_list(PyObject*, PyObject* args) {
    Buffer x, out;
    PyObject* slots;
    if (!PyArg_ParseTuple(args, "y*w*O!", &x.view, &out.view, &PyTuple_Type, &slots))
        return nullptr;
    CallList* list = new CallList();
    PyObject* capsule = PyCapsule_New(list, CALL_LIST, drop_list);
    if (!capsule) return delete list, nullptr;
    const Buffer* arrays[] = {&x, &out};
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

// begin_segment(list, slot): what is written down from here on belongs to a new segment.
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

// record(list, counts): kernels that this thread calls from here on are written down; counts:
// whether what they find not finite is in the result. record(None, False): they are done again.
PyObject* record(PyObject*, PyObject* args) {
    PyObject* capsule;
    int counts;
    if (!PyArg_ParseTuple(args, "Op", &capsule, &counts)) return nullptr;
    CallList* list = capsule == Py_None ? nullptr : list_of(capsule);
    if (!list && capsule != Py_None) return nullptr;
    if (list) list->counts = counts;
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

// add_word(list, word, label): tells others by a word that a message is there, where label is
// negative; else waits for it.
PyObject* add_word(PyObject*, PyObject* args) {
    PyObject *capsule, *object;
    long long label;
    if (!PyArg_ParseTuple(args, "OOL", &capsule, &object, &label)) return nullptr;
    CallList* list = list_of(capsule);
    i64* word;
    if (!list || !keep_word(*list, object, &word)) return nullptr;
    return add_step(list, Step{label < 0 ? TELL : HEAR, false, 0, label, word, {}});
}

// add_start(list, address), add_test(list, address, label): start a request of MPI's, and wait for
// it. address: of the handle, which the caller keeps.
PyObject* add_start(PyObject*, PyObject* args) {
    PyObject* capsule;
    unsigned long long address;
    if (!PyArg_ParseTuple(args, "OK", &capsule, &address)) return nullptr;
    void* request = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
    return add_step(list_of(capsule), Step{START, false, 0, 0, request, {}});
}

PyObject* add_test(PyObject*, PyObject* args) {
    PyObject* capsule;
    unsigned long long address;
    long long label;
    if (!PyArg_ParseTuple(args, "OKL", &capsule, &address, &label)) return nullptr;
    void* request = reinterpret_cast<void*>(static_cast<uintptr_t>(address));
    return add_step(list_of(capsule), Step{TEST, false, 0, label, request, {}});
}

// use_library(start, test): the addresses of MPI_Start and MPI_Test.
PyObject* use_library(PyObject*, PyObject* args) {
    unsigned long long start, test;
    if (!PyArg_ParseTuple(args, "KK", &start, &test)) return nullptr;
    library.start = reinterpret_cast<Start>(static_cast<uintptr_t>(start));
    library.test = reinterpret_cast<Test>(static_cast<uintptr_t>(test));
    Py_RETURN_NONE;
}

// What a run may come to besides a number of values, see run_list and run_agreed.
const i64 WAITING = -1, OVERLAPS = -2, UNLIKE = -3, ABSENT = -4, STRANGE = -5;

// What a run has come to: how many values are not finite, or WAITING.
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
    {
        Unlocked unlocked;
        list->run(looks);
    }
    if (list->error)
        return PyErr_Format(PyExc_RuntimeError, "call list: MPI error %d", list->error);
    return PyLong_FromLongLong(list->is_over() ? list->bad : WAITING);
}

// end_list(list, turns, lends, bytes_sent, bytes, messages_sent, messages): nothing is written down
// any more; a run does one of so many equal parts by turns, and adds what it sends to two counters;
// lends: it waits for those who read x or out.
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

// Has a run begin, unless out has memory of x. arrays: x and out, of the length that was recorded.
PyObject* start_list(CallList* list, const Buffer* arrays, i64 threads, i64 looks) {
    list->begin(arrays[0].at<u8>(0), arrays[1].at<u8>(0));
    return go_on(list, threads, looks);
}

bool overlap(const Buffer* arrays) {
    const u8 *x = arrays[0].at<u8>(0), *out = arrays[1].at<u8>(0);
    return x < out + arrays[1].view.len && out < x + arrays[0].view.len;
}

// run_list(list, threads, looks, x, out): does what is written on x and out; returns how many
// values of the result are not finite, WAITING where what it waits for did not come in so many
// looks, or OVERLAPS, with nothing done, where out has memory of x.
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

// resume_list(list, looks): goes on with the run under way.
PyObject* resume_list(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long looks;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &looks)) return nullptr;
    CallList* list = list_of(capsule);
    return list ? go_on(list, list->threads, looks) : nullptr;
}

// Boards: where the processes of a node find out whether all give the same number, as a digest of
// what they are about to do. Each has two lines of its own, used by turns: who is a meeting ahead
// does not disturb who still reads.
struct Board {
    std::vector<Py_buffer> views;
    std::vector<i64*> boards;  // this process's first
    i64 serial = 0, number = 0, spins = 0;
    static const i64 LINE = 8;  // words: the serial, the number

    ~Board() {
        for (Py_buffer& view : views) PyBuffer_Release(&view);
    }
    i64* line(size_t i) const { return boards[i] + serial % 2 * LINE; }
    bool has_come(size_t i) const { return word_of(line(i)) >= serial; }
    void come(i64 given) {
        ++serial, number = given;
        line(0)[1] = given;
        __atomic_store_n(line(0), serial, __ATOMIC_RELEASE);
    }
    bool meet(i64 most) const {
        Looks looks{spins, most};
        for (size_t i = 1; i < boards.size(); ++i)
            while (!has_come(i))
                if (!looks.more()) return false;
        return true;
    }
    bool is_same() const {
        bool same = number != 0;
        for (size_t i = 1; i < boards.size(); ++i) same = same && line(i)[1] == number;
        return same;
    }
};

const char* const BOARD = "cpdhpc.board";

Board* board_of(PyObject* capsule) {
    return static_cast<Board*>(PyCapsule_GetPointer(capsule, BOARD));
}

void drop_board(PyObject* capsule) { delete board_of(capsule); }

// make_board(boards): of 128 bytes each, zero at first, this process's in front.
PyObject* make_board(PyObject*, PyObject* boards) {
    if (!PyTuple_Check(boards) || PyTuple_Size(boards) < 1) {
        PyErr_SetString(PyExc_TypeError, "make_board: boards must be a tuple");
        return nullptr;
    }
    Board* board = new Board();
    PyObject* capsule = PyCapsule_New(board, BOARD, drop_board);
    if (!capsule) return delete board, nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_Size(boards); ++i) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyTuple_GetItem(boards, i), &view, PyBUF_WRITABLE))
            return Py_DecRef(capsule), nullptr;
        board->views.push_back(view);
        board->boards.push_back(static_cast<i64*>(view.buf));
        if (view.len != 2 * Board::LINE * (i64)sizeof(i64) || (uintptr_t)view.buf % 8) {
            PyErr_SetString(PyExc_ValueError, "make_board: a board must have 128 bytes, aligned");
            return Py_DecRef(capsule), nullptr;
        }
    }
    board->spins = spins_of(board->boards.size());
    return capsule;
}

PyObject* met(const Board* board, i64 looks) {
    bool all;
    {
        Unlocked unlocked;
        all = board->meet(looks);
    }
    return PyLong_FromLong(all ? board->is_same() : (long)WAITING);
}

// meet(board, number, looks): comes to the next meeting; returns whether all have given the same
// number, which is not 0, or WAITING where some did not come in so many looks.
PyObject* meet(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long number, looks;
    if (!PyArg_ParseTuple(args, "OLL", &capsule, &number, &looks)) return nullptr;
    Board* board = board_of(capsule);
    if (!board) return nullptr;
    board->come(number);
    return met(board, looks);
}

// meet_again(board, looks): the same, of the meeting that this process has come to.
PyObject* meet_again(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long looks;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &looks)) return nullptr;
    Board* board = board_of(capsule);
    return board ? met(board, looks) : nullptr;
}

// Two processes write numbers by turns, each once it sees the other's: the shortest time from one
// write to the next, ns; or 0 where the other one does not come.
i64 shortest_trip_ns(i64* mine, const i64* other, bool leads, i64 first, i64 trips) {
    i64 shortest = INT64_MAX;
    for (i64 trip = first; trip < first + trips; ++trip) {
        const Looks::Clock::time_point since = Looks::Clock::now();
        if (leads) __atomic_store_n(mine, trip, __ATOMIC_RELEASE);
        for (Looks looks{1000, INT64_MAX}; word_of(other) < trip;)
            if (!looks.more()) return 0;
        if (!leads) __atomic_store_n(mine, trip, __ATOMIC_RELEASE);
        const std::chrono::nanoseconds took = Looks::Clock::now() - since;
        shortest = std::min(shortest, (i64)took.count());
    }
    return shortest;
}

// round_trip(mine, other, leads, call): how long it takes from what this process of a node writes
// to what another one writes when it sees it, ns: the shortest of many; 0 where it does not come.
// mine, other: their boards; leads: true in one of the two; call: 1, 2, ... Both call it at once.
PyObject* round_trip(PyObject*, PyObject* args) {
    Buffer boards[2];
    int leads;
    long long call;
    if (!PyArg_ParseTuple(args, "w*w*pL", &boards[0].view, &boards[1].view, &leads, &call))
        return nullptr;
    i64* words[2];
    for (int i = 0; i < 2; ++i) {
        if (!has_length(boards[i], "board", 2 * Board::LINE * (i64)sizeof(i64))) return nullptr;
        words[i] = boards[i].at<i64>(0) + Board::LINE / 2;  // which no meeting uses
    }
    const i64 trips = 100;  // their numbers go on, so what is left of an earlier call is no matter
    i64 found;
    {
        Unlocked unlocked;
        found = shortest_trip_ns(words[0], words[1], leads, call * trips, trips);
    }
    return PyLong_FromLongLong(found);
}

// Whether an object holds float32 values one after another; its memory is then the buffer's.
bool holds_floats(PyObject* object, int flags, Buffer& buffer) {
    flags |= PyBUF_FORMAT | PyBUF_C_CONTIGUOUS;
    if (PyObject_GetBuffer(object, &buffer.view, flags)) return PyErr_Clear(), false;
    const char* format = buffer.view.format;
    return format[0] == 'f' && !format[1];
}

bool have_one_shape(const Py_buffer& a, const Py_buffer& b) {
    if (a.ndim != b.ndim) return false;
    for (int i = 0; i < a.ndim; ++i)
        if (a.shape[i] != b.shape[i]) return false;
    return true;
}

// run_agreed(board, number, list, threads, looks, x, out): meet, and run_list where all have given
// the same number. Returns what run_list does, or: STRANGE, with nothing done, where x and out are
// not float32 of one shape and of the list's size, C-contiguous, out writable; ABSENT where some
// did not come in so many looks, after which meet_again and run_list go on; UNLIKE.
PyObject* run_agreed(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 7) {
        PyErr_SetString(PyExc_TypeError, "run_agreed: 7 arguments are needed");
        return nullptr;
    }
    Board* board = board_of(args[0]);
    CallList* list = board ? list_of(args[2]) : nullptr;
    if (!list) return nullptr;
    const i64 number = PyLong_AsLongLong(args[1]), threads = PyLong_AsLongLong(args[3]);
    const i64 looks = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred()) return nullptr;
    Buffer arrays[2];
    if (!holds_floats(args[5], 0, arrays[0]) || !holds_floats(args[6], PyBUF_WRITABLE, arrays[1]) ||
        !list->is_over() || !have_one_shape(arrays[0].view, arrays[1].view) ||
        arrays[0].view.len != list->high[0] - list->low[0])
        return PyLong_FromLongLong(STRANGE);
    if (overlap(arrays)) return PyLong_FromLongLong(OVERLAPS);
    board->come(number);
    if (!board->meet(board->spins)) {  // most come in less: the GIL stays where it is
        Unlocked unlocked;
        if (!board->meet(looks)) count = 0;
    }
    if (!count) return PyLong_FromLongLong(ABSENT);
    if (!board->is_same()) return PyLong_FromLongLong(UNLIKE);
    return start_list(list, arrays, threads, looks);
}

// absent_from(board): the places of those that have not come.
PyObject* absent_from(PyObject*, PyObject* capsule) {
    Board* board = board_of(capsule);
    PyObject* places = board ? PyList_New(0) : nullptr;
    for (size_t i = 1; places && i < board->boards.size(); ++i) {
        if (board->has_come(i)) continue;
        PyObject* place = PyLong_FromSize_t(i);
        if (!place || PyList_Append(places, place)) Py_CLEAR(places);
        Py_XDECREF(place);
    }
    return places;
}

// waits_of(list): the labels of what the run under way waits for; none where it waits for a slot.
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

// The module's functions for boards: barriers in shared memory that compare a number.
// A part of cpu_module.cpp, which includes it.
#include "cpu_call_list_calls.h"

namespace {

// A barrier of the processes of a node that compares a number, as the digest of the next call. Each
// process has a board, shared memory of two lines that it uses in turns: a process that is one
// meeting ahead does not overwrite the line that others still read.
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

// make_board(boards): of 128 bytes each, zero at first, that of this process first.
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

// meet(board, number, looks): enters the next meeting; returns whether all numbers are the same and
// not 0, or WAITING if some processes have not entered after this number of looks.
PyObject* meet(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long number, looks;
    if (!PyArg_ParseTuple(args, "OLL", &capsule, &number, &looks)) return nullptr;
    Board* board = board_of(capsule);
    if (!board) return nullptr;
    board->come(number);
    return met(board, looks);
}

// meet_again(board, looks): the same, for the meeting that this process has entered.
PyObject* meet_again(PyObject*, PyObject* args) {
    PyObject* capsule;
    long long looks;
    if (!PyArg_ParseTuple(args, "OL", &capsule, &looks)) return nullptr;
    Board* board = board_of(capsule);
    return board ? met(board, looks) : nullptr;
}

// Two processes write numbers in turns, each after it sees the other's: the shortest time from one
// write to the next, ns; or 0 if the other process does not answer.
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

// round_trip(mine, other, leads, call): the time from a write of this process to the answer of
// another process of the node, ns: the shortest of many; 0 if there is no answer. mine, other:
// their boards; leads: true in one of the two; call: 1, 2, ... Both processes call it.
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
    const i64 trips = 100;  // numbers continue, so those of an earlier call do no harm
    i64 found;
    {
        Unlocked unlocked;
        found = shortest_trip_ns(words[0], words[1], leads, call * trips, trips);
    }
    return PyLong_FromLongLong(found);
}

// Whether a list or tuple has a single array, of exactly this type, with contiguous float32 values;
// buffer then has its memory.
bool holds_array(PyObject* arrays, PyTypeObject* kind, int flags, Buffer& buffer) {
    PyObject* array = nullptr;
    if (PyList_CheckExact(arrays) && PyList_Size(arrays) == 1) array = PyList_GetItem(arrays, 0);
    if (PyTuple_CheckExact(arrays) && PyTuple_Size(arrays) == 1) array = PyTuple_GetItem(arrays, 0);
    if (!array || Py_TYPE(array) != kind) return false;
    flags |= PyBUF_FORMAT | PyBUF_C_CONTIGUOUS;
    if (PyObject_GetBuffer(array, &buffer.view, flags)) return PyErr_Clear(), false;
    const char* format = buffer.view.format;
    return format[0] == 'f' && !format[1];
}

bool have_one_shape(const Py_buffer& a, const Py_buffer& b) {
    if (a.ndim != b.ndim) return false;
    for (int i = 0; i < a.ndim; ++i)
        if (a.shape[i] != b.shape[i]) return false;
    return true;
}

// run_agreed(board, number, list, threads, looks, xs, outs): meet, and run_list if all numbers are
// the same. Returns the result of run_list, or: STRANGE, with nothing done, unless xs and outs are
// lists or tuples of one array each, of the recorded type, float32, of the same shape and of the
// list's size, C-contiguous, that of outs writable; ABSENT if some processes have not entered after
// this number of looks: call meet_again, then run_list; UNLIKE if the numbers differ.
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
    if (!holds_array(args[5], list->kind, 0, arrays[0]) ||
        !holds_array(args[6], list->kind, PyBUF_WRITABLE, arrays[1]) || !list->is_over() ||
        !have_one_shape(arrays[0].view, arrays[1].view) ||
        arrays[0].view.len != list->high[0] - list->low[0])
        return PyLong_FromLongLong(STRANGE);
    if (overlap(arrays)) return PyLong_FromLongLong(OVERLAPS);
    const i64 came = traced();
    board->come(number);
    if (!board->meet(board->spins)) {  // most meetings take less: the GIL is kept
        Unlocked unlocked;
        if (!board->meet(looks)) count = 0;
    }
    if (came) timeline.add(WAITING_FOR, came, ticks(), 0);
    if (!count) return PyLong_FromLongLong(ABSENT);
    if (!board->is_same()) return PyLong_FromLongLong(UNLIKE);
    return start_list(list, arrays, threads, looks);
}

// absent_from(board): the places of the processes that have not entered.
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

}  // namespace

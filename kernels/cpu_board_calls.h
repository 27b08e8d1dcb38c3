// The module's functions for boards; a part of cpu_module.cpp, which includes it.
#include "cpu_call_list_calls.h"

namespace {

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

// The one array of a list or tuple, of exactly this type, whose float32 values lie one after
// another; its memory is then the buffer's.
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

// run_agreed(board, number, list, threads, looks, xs, outs): meet, and run_list where all have
// given the same number. Returns what run_list does, or: STRANGE, with nothing done, where xs and
// outs are not lists or tuples of an array each, of the type that was recorded, float32, of one
// shape and of the list's size, C-contiguous, outs' writable; ABSENT where some did not come in so
// many looks, after which meet_again and run_list go on; UNLIKE.
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
    if (!board->meet(board->spins)) {  // most come in less: the GIL stays where it is
        Unlocked unlocked;
        if (!board->meet(looks)) count = 0;
    }
    if (came) timeline.add(WAITING_FOR, came, ticks(), 0);
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

}  // namespace

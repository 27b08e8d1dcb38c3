// The module's functions for moves; a part of cpu_module.cpp, which includes it.
// A program is checked once, against its memory and against arrays like those it is run on.
#include <vector>

#include "cpu_timeline.h"
#include "moves.h"

namespace {

// The memory layout of an array: a run compares it, so that rows never go beyond an array.
struct Shape {
    i64 itemsize = 0, low = 0, high = 0;  // bytes from the first element: low <= 0 < high
    std::vector<i64> extents;             // counts, then strides

    bool read(const Py_buffer& view) {
        itemsize = view.itemsize;
        extents.assign(view.shape, view.shape + view.ndim);
        extents.insert(extents.end(), view.strides, view.strides + view.ndim);
        low = 0, high = view.itemsize;
        for (int i = 0; i < view.ndim; ++i) {
            i64 reach = (view.shape[i] - 1) * view.strides[i];
            if (view.shape[i] == 0) return low = high = 0, true;
            (reach < 0 ? low : high) += reach;
        }
        return true;
    }
    bool fits(const Py_buffer& view) const {
        if ((size_t)view.ndim * 2 != extents.size() || view.itemsize != itemsize) return false;
        size_t bytes = (size_t)view.ndim * sizeof(i64);
        return !memcmp(view.shape, extents.data(), bytes) &&
               !memcmp(view.strides, extents.data() + view.ndim, bytes);
    }
};

const i64 NOWHERE = -((i64)1 << 62);

struct Program {
    std::vector<Row> rows;
    std::vector<Py_buffer> memory;
    std::vector<u8*> bases;  // null for x and out
    Shape x, out;
    i64 inside;  // offset from out at which x may be a part of it; NOWHERE: they must not overlap

    ~Program() {
        for (Py_buffer& each : memory) PyBuffer_Release(&each);
    }
    bool reaches(i64 base, i64 offset, const Row& row, const i64* strides, i64 run) const {
        i64 low = offset, high = offset + run;
        for (int i = 0; i < 4; ++i) {
            if (row.counts[i] < 1) return false;
            i64 reach = (row.counts[i] - 1) * strides[i];
            (reach < 0 ? low : high) += reach;
        }
        if (base == X) return low >= x.low && high <= x.high;
        if (base == OUT) return low >= out.low && high <= out.high;
        return base >= MEMORY && base < (i64)bases.size() && low >= 0 &&
               high <= memory[base - MEMORY].len;
    }
    bool is_word(i64 base, i64 offset) const {  // whether there is room for three words
        return base >= MEMORY && base < (i64)bases.size() && offset >= 0 && offset % 8 == 0 &&
               offset + 24 <= memory[base - MEMORY].len;
    }
    bool is_sound(const Row& row) const {
        static const i64 none[4] = {};
        if (row.op == TAKE)
            return row.run > 0 && is_word(row.source, row.source_offset) && row.target != X &&
                   reaches(row.target, row.target_offset, row, row.target_strides, row.run);
        if (row.op >= POST && row.op <= RECALL)
            return is_word(row.target, row.target_offset) &&
                   (row.op != SETTLE || is_word(row.source, row.source_offset)) &&
                   (row.op != LEND || reaches(row.source, row.source_offset, row, none, row.run));
        bool fill = row.op == FILL;
        if (row.op < COPY || row.op > FILL || row.kind < INT8 || row.kind > FLOAT64 || row.run < 1)
            return false;
        if (fill && (row.value < 1 || row.run % row.value)) return false;
        return row.target != X &&
               reaches(row.target, row.target_offset, row, row.target_strides, row.run) &&
               reaches(row.source, row.source_offset, row, fill ? none : row.source_strides,
                       fill ? row.value : row.run);
    }
};

const char* const PROGRAM = "cpdhpc.moves";

void drop_program(PyObject* capsule) {
    delete static_cast<Program*>(PyCapsule_GetPointer(capsule, PROGRAM));
}

struct Strided {  // an array argument of any strides, released at the end of the scope
    Py_buffer view = {};
    ~Strided() {
        if (view.obj) PyBuffer_Release(&view);
    }
    bool read(PyObject* object, bool writable) {
        return !PyObject_GetBuffer(object, &view,
                                   PyBUF_STRIDED_RO | (writable ? PyBUF_WRITABLE : 0));
    }
};

bool take_memory(Program& program, PyObject* memory) {
    for (Py_ssize_t i = 0; i < PyTuple_Size(memory); ++i) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyTuple_GetItem(memory, i), &view, PyBUF_WRITABLE)) return false;
        program.memory.push_back(view);
        program.bases.push_back(static_cast<u8*>(view.buf));
    }
    return true;
}

// make_moves(rows, memory, x, out, inside): a program for arrays like x and out.
PyObject* make_moves(PyObject*, PyObject* args) {
    Buffer rows;
    PyObject *memory, *x, *out;
    long long inside;
    if (!PyArg_ParseTuple(args, "y*O!OOL", &rows.view, &PyTuple_Type, &memory, &x, &out, &inside))
        return nullptr;
    Program* program = new Program();
    PyObject* capsule = PyCapsule_New(program, PROGRAM, drop_program);
    if (!capsule) return delete program, nullptr;
    Strided in, to;
    program->bases = {nullptr, nullptr};
    program->inside = inside;
    if (!take_memory(*program, memory) || !in.read(x, false) || !to.read(out, true))
        return Py_DecRef(capsule), nullptr;
    program->x.read(in.view), program->out.read(to.view);
    program->rows.assign(rows.at<Row>(0), rows.at<Row>(rows.view.len / (i64)sizeof(Row)));
    for (const Row& row : program->rows)
        if (!program->is_sound(row)) {
            PyErr_Format(PyExc_ValueError, "make_moves: row %zd reaches out of its memory",
                         &row - program->rows.data());
            return Py_DecRef(capsule), nullptr;
        }
    return capsule;
}

bool apart(const Program& program, const u8* x, const u8* out) {
    if (program.inside != NOWHERE && x == out + program.inside) return true;
    if (program.x.low == program.x.high || program.out.low == program.out.high) return true;
    return x + program.x.high <= out + program.out.low ||
           out + program.out.high <= x + program.x.low;
}

// read_loan(pid, message, out): reads a message in place (loans.h), with its words at message, into
// out; returns whether there was one. read_memory(pid, address, out): reads memory of another
// process. Both raise OSError if that is not allowed.
PyObject* read_failed() { return PyErr_SetFromErrno(PyExc_OSError); }

PyObject* read_loan(PyObject*, PyObject* args) {
    long long pid;
    Buffer message, out;
    if (!PyArg_ParseTuple(args, "Lw*w*", &pid, &message.view, &out.view)) return nullptr;
    if (message.view.len < 24) {
        PyErr_SetString(PyExc_ValueError, "read_loan: message: needs three words");
        return nullptr;
    }
    const i64 once[4] = {1, 1, 1, 1}, none[4] = {};
    Outcome found = take_loan(pid, message.at<i64>(0), out.at<u8>(0), out.view.len, once, none);
    return found == DIFFERS ? read_failed() : PyBool_FromLong(found == SKIPS);
}

PyObject* read_memory(PyObject*, PyObject* args) {
    long long pid, address;
    Buffer out;
    if (!PyArg_ParseTuple(args, "LLw*", &pid, &address, &out.view)) return nullptr;
    const i64 once[4] = {1, 1, 1, 1}, none[4] = {};
    if (!read_process(pid, address, out.at<u8>(0), out.view.len, once, none)) return read_failed();
    Py_RETURN_NONE;
}

// Writes rows into a timeline: consecutive rows of a kind are one entry, writing a word takes no
// time, and a word that is already there is no wait.
struct MoveTimes {
    i64 serial, doing = -1, since = ticks();

    void operator()(const Row& row, const u8* word) {
        if (row.op == POST || row.op == LEND) {
            end();
            timeline.add(SENDS, since, since, 0);
            return;
        }
        const bool comes = row.op == AWAIT && word_of((const i64*)word) < serial + row.value;
        turn(comes || row.op == SETTLE || row.op == RECALL ? WAITING_FOR : COPIES);
    }
    void turn(i64 next) {
        if (doing >= 0 && doing != next) end();
        doing = next;
    }
    void end() {
        if (doing < 0) return;
        const i64 now = ticks();
        timeline.add(doing, since, now, 0);
        doing = -1, since = now;
    }
    ~MoveTimes() { end(); }
};

// run_moves(program, first, last, serial, number, looks, x, out): executes rows first..last and
// returns last; or the row that waits; or -1 - row if the number differs there; or None if x or out
// has another memory layout than the arrays that the program was made for.
PyObject* run_moves(PyObject*, PyObject* const* args, Py_ssize_t count) {
    i64 numbers[5];
    if (count != 8) {
        PyErr_SetString(PyExc_TypeError, "run_moves: 8 arguments are needed");
        return nullptr;
    }
    for (int i = 0; i < 5; ++i) {
        numbers[i] = PyLong_AsLongLong(args[1 + i]);
        if (numbers[i] == -1 && PyErr_Occurred()) return nullptr;
    }
    const i64 last = numbers[1];
    Program* program = static_cast<Program*>(PyCapsule_GetPointer(args[0], PROGRAM));
    Strided x, out;
    if (!program || !x.read(args[6], false) || !out.read(args[7], true)) return nullptr;
    if (!program->x.fits(x.view) || !program->out.fits(out.view)) Py_RETURN_NONE;
    u8* arrays[] = {static_cast<u8*>(x.view.buf), static_cast<u8*>(out.view.buf)};
    i64 row = numbers[0];
    if (row < 0 || last > (i64)program->rows.size()) {
        PyErr_SetString(PyExc_ValueError, "run_moves: no such rows");
        return nullptr;
    }
    if (!apart(*program, arrays[X], arrays[OUT])) {
        PyErr_SetString(PyExc_ValueError,
                        "out overlaps what is given: it may only have that, or be that, as the "
                        "part of the window that this rank owns");
        return nullptr;
    }
    Outcome outcome;
    {
        Unlocked unlocked;
        const auto go = [&](const auto& before) {
            return do_rows(program->rows.data(), row, last, program->bases.data(), arrays,
                           numbers[2], numbers[3], numbers[4], before);
        };
        if (timeline.on()) {
            MoveTimes times{numbers[2]};
            outcome = go(std::ref(times));
        } else {
            outcome = go([](const Row&, const u8*) {});
        }
    }
    return PyLong_FromLongLong(outcome == DIFFERS ? -1 - row : row);
}

}  // namespace

// The module's functions for exchanges: calls of torch.distributed in shared memory of a node.
// A part of cpu_module.cpp, which includes it. torch/backend/board.py has the Python side.
//
// Each rank writes to its own area, which has a slot for each of a few calls. A call goes in turns:
// a rank writes values to one of the slot's places, posts the turn, waits until all others have
// posted it, takes their values and marks the turn as read. In the first turn the ranks compare the
// text of the call before they take anything. A stamp is the call's number, then the turn's.
#include <atomic>

#include "moves.h"

namespace {

const i64 SLOTS = 4, PLACES = 2, HEAD_BYTES = 128, TEXT_BYTES = 256, NOTE_ROOM = 1024;
const i64 VALUES_BYTES = 1 << 19;  // of a place
const i64 SLOT_BYTES = HEAD_BYTES + TEXT_BYTES + NOTE_ROOM + PLACES * VALUES_BYTES;
const int TURN_BITS = 40;
const i64 LEFT = ((i64)1 << TURN_BITS) - 1;  // instead of a turn: all of them

// A core writes a byte in 0.02 to 0.11 ns if the core that has read the line shares a cache with
// it, else in 0.2 to 0.5; past the caches in 0.03 to 0.04 then. The first writes are timed. If they
// are slow, those that follow go past the caches; after some a write is timed again, as virtual
// machines change their cores.
const i64 TIMED_BYTES = 1 << 12, RETRIED = 100;
const double SLOW_NS = 0.15;  // for a byte

const i64 HELD_BYTES = 1 << 13;  // calls of at most so many bytes keep the interpreter's lock
const i64 FOLDED = 2048;         // elements that are added for all ranks before the next

// Integers are added as unsigned, so that sums that are too large wrap around. Operands are in the
// order of ranks, also if out is one of them: all ranks get the same bits, also of NaN.
#define CPD_ADD(NAME, T)                                                           \
    CPD_CLONES void NAME(const u8* a, const u8* b, i64 n, u8* out) {               \
        typedef T Anywhere __attribute__((aligned(1), may_alias));                 \
        const Anywhere *x = (const Anywhere*)a, *y = (const Anywhere*)b;           \
        Anywhere* to = (Anywhere*)out;                                             \
        _Pragma("GCC ivdep") for (i64 i = 0; i < n; ++i) to[i] = (T)(x[i] + y[i]); \
    }
CPD_ADD(add_8, u8)
CPD_ADD(add_16, unsigned short)
CPD_ADD(add_32, u32)
CPD_ADD(add_64, u64)
CPD_ADD(add_floats, float)
CPD_ADD(add_doubles, double)
#undef CPD_ADD

struct Addition {
    void (*add)(const u8* a, const u8* b, i64 n, u8* out);
    i64 size;
};
const Addition additions[] = {{add_8, 1},  {add_16, 2},     {add_32, 4},  // by Kind
                              {add_64, 8}, {add_floats, 4}, {add_doubles, 8}};

struct Exchange {
    std::vector<Py_buffer> views;
    std::vector<u8*> areas;  // by rank
    i64 rank = 0, spins = 0;
    std::atomic<i64> slow{0};  // writes that still go past the caches

    ~Exchange() {
        for (Py_buffer& view : views) PyBuffer_Release(&view);
    }
    i64 ranks() const { return (i64)areas.size(); }
    u8* slot(i64 number, i64 of) const { return areas[of] + number % SLOTS * SLOT_BYTES; }
    i64* written(i64 number, i64 of) const { return (i64*)slot(number, of); }
    i64* digest(i64 number, i64 of) const { return (i64*)slot(number, of) + 1; }
    i64* read(i64 number, i64 of) const { return (i64*)(slot(number, of) + HEAD_BYTES / 2); }
    u8* note(i64 number, i64 of) const { return slot(number, of) + HEAD_BYTES + TEXT_BYTES; }
    u8* place(i64 number, i64 turn, i64 of) const {
        const i64 which = (number / SLOTS + turn) % PLACES;
        return slot(number, of) + SLOT_BYTES - (PLACES - which) * VALUES_BYTES;
    }
    void mark(i64 number, i64 turn) const {
        i64* mine = read(number, rank);
        const i64 stamp = (number << TURN_BITS) + turn;
        if (*mine < stamp) __atomic_store_n(mine, stamp, __ATOMIC_RELEASE);
    }
    void write(u8* to, const u8* from, i64 size) {
        if (size < TIMED_BYTES) {
            memcpy(to, from, (size_t)size);
        } else if (slow > 0) {
            --slow;
            stream(to, from, size);
        } else {
            const Looks::Clock::time_point since = Looks::Clock::now();
            loops->copy(to, from, size);
            const std::chrono::duration<double, std::nano> took = Looks::Clock::now() - since;
            if (took.count() > SLOW_NS * (double)size) slow = RETRIED;
        }
    }
};

struct Portion {
    i64 rank, start;  // of a place
    u8* values;
    i64 size;
    i64 in_turn(i64 first, i64 each) const {
        return std::max((i64)0, std::min(each, size - first));
    }
};

// What run_exchange returns: 0 at the end, or the turns that are taken and written, and a reason.
enum Reason { ENDED, BUSY, AWAITS, UNLIKE_TEXT, UNLIKE_NOTES, TAKES };
const int REASON_BITS = 4, AHEAD_BITS = 4;

struct Turns {
    Exchange* board;
    i64 number, base, count, each, kind;
    bool leaves, calls;
    const char* text = nullptr;
    i64 digest = 0;
    const char* note = nullptr;
    Py_ssize_t note_size = 0;
    std::vector<Portion> gives, takes, own, fold;
    i64 taken = 0, ahead = 0;
    Reason reason = ENDED;

    u8* place(i64 turn, i64 of) const { return board->place(number, base + turn, of); }
    bool is_free(i64 turn) const {
        i64 wanted;
        if (turn >= PLACES)
            wanted = (number << TURN_BITS) + turn - PLACES;
        else if (number > SLOTS)
            wanted = ((number - SLOTS) << TURN_BITS) + LEFT;
        else
            return true;
        for (i64 r = 0; r < board->ranks(); ++r)
            if (r != board->rank && word_of(board->read(number, r)) < wanted) return false;
        return true;
    }
    bool has_come(i64 turn) const {
        for (i64 r = 0; r < board->ranks(); ++r)
            if (r != board->rank &&
                word_of(board->written(number, r)) < (number << TURN_BITS) + turn)
                return false;
        return true;
    }
    void put(i64 turn) {
        u8* mine = place(turn, board->rank);
        const i64 first = turn * each;
        for (const Portion& portion : gives)
            if (const i64 size = portion.in_turn(first, each))
                board->write(mine + portion.start, portion.values + first, size);
        if (base + turn == 0) {
            memcpy(board->slot(number, board->rank) + HEAD_BYTES, text, (size_t)TEXT_BYTES);
            memcpy(board->note(number, board->rank), note, (size_t)note_size);
            *board->digest(number, board->rank) = digest;
        }
        __atomic_store_n(board->written(number, board->rank), (number << TURN_BITS) + base + turn,
                         __ATOMIC_RELEASE);
    }
    // What this rank has written may be that of a later call, if others have left this one.
    bool is_same_text() const {
        for (i64 r = 0; r < board->ranks(); ++r)
            if (r != board->rank && *board->digest(number, r) != digest) return false;
        return digest != 0;
    }
    // Whether all notes are the same word of 8 bytes, repeated.
    bool are_same_notes() const {
        for (i64 r = 0; r < board->ranks(); ++r)
            for (i64 i = 0; i < note_size; i += 8) {
                const char* from = r == board->rank ? note : (char*)board->note(number, r);
                if (memcmp(from + i, note, 8)) return false;
            }
        return true;
    }
    void add_up(i64 turn, i64 first) const {
        const Addition& by = additions[kind];
        const Portion &mine = fold[0], &out = fold[1];
        const i64 n = mine.in_turn(first, each) / by.size, ranks = board->ranks();
        alignas(64) u8 total[FOLDED * 8];
        const i64 step = ranks == 2 ? n : FOLDED;
        const auto of = [&](i64 rank, i64 i) {
            return rank == board->rank ? mine.values + first + i * by.size
                                       : place(turn, rank) + mine.start + i * by.size;
        };
        for (i64 i = 0; i < n; i += step) {
            const i64 some = std::min(step, n - i);
            u8* to = out.values + first + i * by.size;
            const u8* sum = of(0, i);
            for (i64 r = 1; r < ranks; ++r) {
                u8* into = r == ranks - 1 ? to : total;
                by.add(sum, of(r, i), some, into);
                sum = into;
            }
        }
    }
    void take(i64 turn) const {
        const i64 first = turn * each;
        for (const Portion& portion : takes)
            if (const i64 size = portion.in_turn(first, each))
                loops->copy(portion.values + first, place(turn, portion.rank) + portion.start,
                            size);
        if (!own.empty())
            if (const i64 size = own[0].in_turn(first, each))
                loops->copy(own[1].values + first, own[0].values + first, size);
        if (!fold.empty()) add_up(turn, first);
    }
    // Goes on until all turns are taken or there is a reason to stop. A reason that the caller has
    // dealt with is not found again.
    void run(i64 most) {
        Looks looks{board->spins, most};
        while (taken < count) {
            bool moved = false;
            while (ahead < PLACES && taken + ahead < count && is_free(base + taken + ahead))
                put(taken + ahead++), moved = true;
            if (ahead && has_come(base + taken)) {
                if (base + taken == 0 && reason < UNLIKE_NOTES) {
                    if (!is_same_text()) return void(reason = UNLIKE_TEXT);
                    if (!are_same_notes()) return void(reason = UNLIKE_NOTES);
                }
                if (reason != TAKES) {
                    take(taken);
                    if (calls) return void(reason = TAKES);
                }
                reason = ENDED;
                ++taken, --ahead;
                board->mark(number, leaves && taken == count ? LEFT : base + taken - 1);
                moved = true;
            }
            if (moved)
                looks.spent = 0;
            else if (!looks.more())
                return void(reason = ahead ? AWAITS : BUSY);
        }
        reason = ENDED;
    }
    i64 state() const {
        return reason == ENDED ? 0 : (taken << AHEAD_BITS | ahead) << REASON_BITS | reason;
    }
};

const char* const EXCHANGE = "cpdhpc.exchange";

Exchange* exchange_of(PyObject* capsule) {
    return static_cast<Exchange*>(PyCapsule_GetPointer(capsule, EXCHANGE));
}

void drop_exchange(PyObject* capsule) { delete exchange_of(capsule); }

// make_exchange(rank, areas): areas by rank, of SLOTS slots each, zeros at first.
PyObject* make_exchange(PyObject*, PyObject* args) {
    PyObject* areas;
    long long rank;
    if (!PyArg_ParseTuple(args, "LO!", &rank, &PyTuple_Type, &areas)) return nullptr;
    Exchange* board = new Exchange();
    PyObject* capsule = PyCapsule_New(board, EXCHANGE, drop_exchange);
    if (!capsule) return delete board, nullptr;
    for (Py_ssize_t i = 0; i < PyTuple_Size(areas); ++i) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyTuple_GetItem(areas, i), &view, PyBUF_WRITABLE))
            return Py_DecRef(capsule), nullptr;
        board->views.push_back(view);
        board->areas.push_back(static_cast<u8*>(view.buf));
        if (view.len != SLOTS * SLOT_BYTES || (uintptr_t)view.buf % 64) {
            PyErr_Format(PyExc_ValueError, "make_exchange: an area must have %lld bytes, aligned",
                         (long long)(SLOTS * SLOT_BYTES));
            return Py_DecRef(capsule), nullptr;
        }
    }
    board->rank = rank, board->spins = spins_of(board->areas.size());
    if (rank >= 0 && rank < board->ranks()) return capsule;
    PyErr_SetString(PyExc_ValueError, "make_exchange: rank: must be that of an area");
    return Py_DecRef(capsule), nullptr;
}

// Pieces from a flat tuple of ranks, starts, addresses and sizes.
bool read_portions(PyObject* given, i64 ranks, std::vector<Portion>& portions) {
    const Py_ssize_t count = PyTuple_Size(given);
    if (count < 0) return false;
    for (Py_ssize_t i = 0; i + 3 < count; i += 4) {
        i64 numbers[4];
        for (int j = 0; j < 4; ++j) numbers[j] = PyLong_AsLongLong(PyTuple_GetItem(given, i + j));
        if (PyErr_Occurred()) return false;
        const Portion portion{numbers[0], numbers[1], (u8*)(uintptr_t)numbers[2], numbers[3]};
        if (portion.rank < 0 || portion.rank >= ranks || portion.start < 0 || portion.size < 0) {
            PyErr_SetString(PyExc_ValueError, "run_exchange: a portion outside of its place");
            return false;
        }
        if (portion.size) portions.push_back(portion);
    }
    return true;
}

// Whether the parts of portions in a turn fit into a place.
bool have_room(const Turns& turns, const std::vector<Portion>& portions) {
    for (const Portion& portion : portions)
        if (portion.start + std::min(portion.size, turns.each) > VALUES_BYTES)
            return PyErr_SetString(PyExc_ValueError, "run_exchange: a portion beyond its place"),
                   false;
    return true;
}

// run_exchange(board, state, looks, number, base, count, each, leaves, calls, text, digest,
// note, gives, takes, own, kind, fold): continues a call, at first with state 0, until its turns
// have ended, which returns 0, or there is something to do before it is called with the state that
// it returns: see Reason, its last bits.
//   looks: those without progress before it returns BUSY (a place is read by others) or AWAITS
//   base: turns of this call before these; count: of these turns
//   each: bytes of a portion in a turn; leaves: whether these are the last turns of the call
//   calls: whether to return TAKES in each turn, while the places of others can be read
//   text, digest, note: compared in turn 0 of the call, before any value is taken. The digest is 0
//     if this rank refuses the call; a note is some words of 8 bytes
//   gives: what this rank writes, of each portion the first bytes at its start in the first turn
//   takes: of each portion the rank that has it; own: a portion, and that to which it is copied
//   fold: a portion, at start in the others' places, and that to which the sum of all goes, by kind
PyObject* run_exchange(PyObject*, PyObject* const* args, Py_ssize_t count) {
    if (count != 17) {
        PyErr_SetString(PyExc_TypeError, "run_exchange: 17 arguments are needed");
        return nullptr;
    }
    Turns turns;
    turns.board = exchange_of(args[0]);
    if (!turns.board) return nullptr;
    i64 numbers[8];
    for (int i = 0; i < 8; ++i) numbers[i] = PyLong_AsLongLong(args[1 + i]);
    turns.digest = PyLong_AsLongLong(args[10]), turns.kind = PyLong_AsLongLong(args[15]);
    if (PyErr_Occurred()) return nullptr;
    const i64 state = numbers[0], looks = numbers[1], ranks = turns.board->ranks();
    turns.number = numbers[2], turns.base = numbers[3], turns.count = numbers[4];
    turns.each = numbers[5], turns.leaves = numbers[6], turns.calls = numbers[7];
    turns.reason = (Reason)(state & ((1 << REASON_BITS) - 1));
    turns.ahead = state >> REASON_BITS & ((1 << AHEAD_BITS) - 1);
    turns.taken = state >> (REASON_BITS + AHEAD_BITS);
    char *text, *note;
    Py_ssize_t text_size;
    if (PyBytes_AsStringAndSize(args[9], &text, &text_size) ||
        PyBytes_AsStringAndSize(args[11], &note, &turns.note_size) ||
        !read_portions(args[12], ranks, turns.gives) ||
        !read_portions(args[13], ranks, turns.takes) ||
        !read_portions(args[14], ranks, turns.own) || !read_portions(args[16], ranks, turns.fold))
        return nullptr;
    turns.text = text, turns.note = note;
    const auto paired = [](const std::vector<Portion>& portions) {
        return portions.empty() || (portions.size() == 2 && portions[0].size == portions[1].size);
    };
    if (text_size != TEXT_BYTES || turns.note_size > NOTE_ROOM || turns.note_size % 8 ||
        turns.number < 1 || turns.each < 1 || !paired(turns.own) || !paired(turns.fold) ||
        turns.kind < INT8 || turns.kind > FLOAT64 || ranks < 2) {
        PyErr_SetString(PyExc_ValueError, "run_exchange: an argument out of its range");
        return nullptr;
    }
    if (!have_room(turns, turns.gives) || !have_room(turns, turns.takes) ||
        !have_room(turns, turns.fold))
        return nullptr;
    i64 bytes = 0;
    for (const auto* portions : {&turns.gives, &turns.takes, &turns.own, &turns.fold})
        for (const Portion& portion : *portions) bytes += portion.size;
    if (bytes <= HELD_BYTES) turns.run(std::min(looks, turns.board->spins));
    if (bytes > HELD_BYTES || (looks && (turns.reason == AWAITS || turns.reason == BUSY))) {
        Unlocked unlocked;
        turns.run(looks);
    }
    return PyLong_FromLongLong(turns.state());
}

}  // namespace

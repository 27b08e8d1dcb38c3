// Call lists: calls of kernels and messages that are recorded once, and run many times without the
// interpreter. A part of cpu_module.cpp; collectives/recorded.py records them.
//
// A list has segments, parts of the data that are processed independently. Each segment in progress
// advances until it has to wait, the oldest first. A segment has a slot, whose memory it shares
// with others: it begins when all processes of the node have ended the last segment of that slot.
// Its serial number is the same in all processes. They write it to words of shared memory, for
// "this message is there" and "this slot is ended".
#ifndef CPD_CPU_CALL_LIST_H
#define CPD_CPU_CALL_LIST_H

#include <chrono>
#include <memory>
#ifdef __SSE2__
#include <emmintrin.h>
#endif

#include "cpu_threads.h"
#include "cpu_timeline.h"
#include "loans.h"

namespace {

// Of the library of MPI that mpi4py has loaded: int MPI_Start(MPI_Request*), and
// int MPI_Test(MPI_Request*, int* flag, MPI_Status*), whose status is at most 64 bytes anywhere.
typedef int (*Start)(void* request);
typedef int (*Test)(void* request, int* flag, void* status);
struct Library {
    Start start;
    Test test;
} library = {};

enum StepKind { KERNEL, TELL, HEAR, START, TEST };

struct Step {
    StepKind kind;
    bool counts;   // whether the call returns the number of results that are not finite
    i64 n, label;  // of values; of a wait, for the caller
    void* target;  // a word that is shared, or a request
    i64 doing;     // kind, for a timeline
    std::function<i64(const Block&)> body;
};

struct Segment {
    i64 slot, serial = 0;
    size_t next = 0;  // the step to do
    std::vector<Step> steps;
};

i64 word_of(const i64* word) { return __atomic_load_n(word, __ATOMIC_ACQUIRE); }

// Looks before the core is yielded: none if a node has more processes than cores, as a spinning
// process would keep the one that it waits for from running.
i64 spins_of(size_t processes) { return (long)processes > sysconf(_SC_NPROCESSORS_ONLN) ? 0 : 200; }

// Looks that find no progress: the core is kept at first, then yielded between looks. They end
// after a number of looks, or after 10 ms, as others may keep the core for long; the caller checks
// time.
struct Looks {
    typedef std::chrono::steady_clock Clock;
    i64 spins, most, spent = 0;
    Clock::time_point since = {};

    bool more() {
        if (spent == most) return false;
        if (spent < spins) return pause_core(), ++spent;
        const Clock::time_point now = Clock::now();
        if (spent == spins) since = now;
        if (now - since > std::chrono::milliseconds(10)) return false;
        return sched_yield(), ++spent;
    }
};

struct CallList : Held {
    std::vector<Segment> segments;
    std::vector<i64*> ended;                   // this process's words, by slot
    std::vector<std::vector<const i64*>> all;  // the words of all processes of the node, by slot
    std::vector<i64> used;                     // the serial of the last segment, by slot
    i64 serial = 0, threads = 1, spins = 0;
    bool counts = false;  // of the calls that are recorded now
    i64 doing = COMPUTES;
    bool lends = false;  // whether others read x or out in place: a run ends after they have
    PyTypeObject* kind = nullptr;  // of X
    size_t turns = 1, turn = 0;    // the segments are cut into equal parts; a run executes one
    struct {
        i64 *counter, amount;
    } sent[2] = {};  // bytes and messages of a run, and their counters

    // The run in progress.
    std::vector<Segment*> under_way;
    size_t opened = 0, last = 0;
    i64 bad = 0;
    int error = 0;                     // of MPI
    i64 idle_since = 0, last_end = 0;  // for a timeline: the start of a wait; the end of a step
    Helpers* helping = nullptr;

    ~CallList() {
        for (Py_buffer& view : views) PyBuffer_Release(&view);
        for (PyObject* object : objects) Py_DecRef(object);
    }
    bool is_free(i64 slot) const {
        for (const i64* word : all[slot])
            if (word_of(word) < used[slot]) return false;
        return true;
    }
    i64 called(const Step& step) const {
        if (threads < 2 || step.n < SHARED_TILES * CPD_TILE) return step.body(Block{0, 0, step.n});
        std::atomic<i64> count{0};
        const Body body = [&](const Block& b) { count += step.body(b); };
        helping->run((int)threads, step.n, body);
        return count;
    }
    // For a timeline: the time when a step begins, after a wait or the last step; 0 without one.
    i64 wakes() {
        if (!timeline.on()) return 0;
        if (idle_since || !last_end) last_end = ticks();
        if (idle_since) timeline.add(WAITING_FOR, idle_since, last_end, 0);
        idle_since = 0;
        return last_end;
    }
    void idles() {
        if (!idle_since && timeline.on()) idle_since = ticks();
    }
    // Executes a step, or returns false if it has to wait.
    bool done(const Step& step, i64 number) {
        i64* word = static_cast<i64*>(step.target);
        alignas(16) char status[64];
        int flag = 1;
        switch (step.kind) {
            case KERNEL: {
                const i64 begun = wakes();
                i64 found = called(step);
                if (step.counts) bad += found;
                if (begun) timeline.add(step.doing, begun, last_end = ticks(), step.n);
                return true;
            }
            case TELL:
                if (const i64 now_at = wakes()) timeline.add(SENDS, now_at, now_at, 0);
                __atomic_store_n(word, number, __ATOMIC_RELEASE);
                return true;
            case HEAR:
                return word_of(word) >= number;
            case START: {
                const i64 begun = wakes();
                error = library.start(step.target);
                if (begun) timeline.add(SENDS, begun, last_end = ticks(), 0);
                return !error;
            }
            case TEST:
                error = library.test(step.target, &flag, status);
                return !error && flag;
        }
        return true;
    }
    // Executes all steps that need not wait; returns whether there were any.
    bool advance() {
        bool moved = false;
        for (; opened < last && is_free(segments[opened].slot); ++opened, moved = true) {
            Segment& segment = segments[opened];
            used[segment.slot] = segment.serial = ++serial;
            segment.next = 0;
            under_way.push_back(&segment);
        }
        for (size_t i = 0; i < under_way.size() && !error;) {
            Segment& segment = *under_way[i];
            for (; segment.next < segment.steps.size(); ++segment.next, moved = true)
                if (!done(segment.steps[segment.next], segment.serial)) break;
            if (segment.next < segment.steps.size()) {
                ++i;
                continue;
            }
            __atomic_store_n(ended[segment.slot], segment.serial, __ATOMIC_RELEASE);
            under_way.erase(under_way.begin() + (long)i);
            moved = true;
        }
        return moved;
    }
    // Lets MPI move messages while all segments wait for words: it does so only during its calls.
    // One incomplete request is enough; an inactive one counts as complete.
    void poke() {
        for (const Segment* segment : under_way)
            if (segment->steps[segment->next].kind == TEST) return;  // it was called just now
        for (const Segment* segment : under_way)
            for (size_t i = segment->next; i < segment->steps.size() && !error; ++i)
                if (segment->steps[i].kind == TEST && !done(segment->steps[i], 0)) return;
    }
    bool is_read() const {
        for (size_t slot = 0; slot < all.size(); ++slot)
            if (!is_free((i64)slot)) return false;
        return true;
    }
    bool is_over() const {
        return under_way.empty() && opened == last && (!lends || error || is_read());
    }
    void begin(u8* x, u8* out) {
        now[0] = x, now[1] = out;
        const size_t count = segments.size() / turns;
        turn = (turn + 1) % turns;
        opened = turn * count, last = opened + count;
        bad = 0;
        for (auto& each : sent)
            if (each.counter) *each.counter += each.amount;
    }
    // Continues up to the end, an error, or a number of consecutive looks without progress.
    void run(i64 most) {
        Looks looks{spins, most};
        last_end = idle_since = 0;
        while (!is_over() && !error) {
            if (advance()) {
                looks.spent = 0;
                continue;
            }
            idles();
            poke();
            if (!looks.more()) break;
        }
        if (idle_since) wakes();
    }
};

CallList* recording_list() { return static_cast<CallList*>(recording); }

void end_stream() {
#ifdef __SSE2__
    _mm_sfence();
#endif
}

void stream(u8* out, const u8* x, i64 size) {
    loops->stream_on(out, x, size);
    end_stream();
}

// As in_blocks and count_in_blocks, or the call is recorded. The body must hold copies.
template <class Work>
PyObject* write_down(int threads, i64 n, const Work& body) {
    CallList& list = *recording_list();
    if (list.segments.empty()) {
        PyErr_SetString(PyExc_ValueError, "call list: has no segment yet");
        return nullptr;
    }
    std::function<i64(const Block&)> kept(body);
    list.segments.back().steps.push_back(
        Step{KERNEL, list.counts, n, 0, nullptr, list.doing, std::move(kept)});
    return PyLong_FromLong(0);
}

template <class Work>
PyObject* kept(int threads, i64 n, const Work& body) {
    if (!recording) return in_blocks(threads, n, body);
    return write_down(threads, n, [body](const Block& b) { return body(b), (i64)0; });
}

template <class Work>
PyObject* count_kept(int threads, i64 n, const Work& body) {
    return recording ? write_down(threads, n, body) : count_in_blocks(threads, n, body);
}

}  // namespace

#endif

// Timeline of this process, written into memory of Python's: rows of five words, which are kind,
// thread, begin and end, and number of values or bytes. Times are ticks of the processor's counter
// if its rate is constant, as reading it takes a third of the time of the monotonic clock; else
// nanoseconds of that clock. Without memory, the only cost is to test a pointer.
#ifndef CPD_CPU_TIMELINE_H
#define CPD_CPU_TIMELINE_H

#include <atomic>
#include <chrono>
#if defined(__x86_64__)
#include <cpuid.h>
#include <x86intrin.h>
#endif

#include "cpu_arguments.h"

namespace {

enum Doing { COMPUTES, ENCODES, COPIES, SENDS, WAITING_FOR };  // KINDS of world/timeline.py

struct Timeline {
    std::atomic<i64*> rows{nullptr};
    i64 room = 0;                      // rows
    std::atomic<i64> used{0};          // may exceed room
    std::atomic<i64> threads{0};       // that have written a row
    Py_buffer view = {}, before = {};  // before: the last memory, as a thread may still write to it

    i64 thread() {
        static thread_local i64 number = -1;
        if (number < 0) number = threads++;
        return number;
    }
    void add(i64 kind, i64 begin, i64 end, i64 amount) {
        i64* const all = rows.load(std::memory_order_acquire);
        if (!all) return;
        const i64 place = used.fetch_add(1, std::memory_order_relaxed);
        if (place >= room) return;
        i64* const row = all + 5 * place;
        row[0] = kind, row[1] = thread(), row[2] = begin, row[3] = end, row[4] = amount;
    }
    bool on() const { return rows.load(std::memory_order_relaxed) != nullptr; }
} timeline;

i64 clock_ns() {
    const auto since = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(since).count();
}

// Whether the processor counts at one rate on all cores, asleep or not.
bool has_counter() {
#if defined(__x86_64__)
    unsigned a, b, c, d;
    return __get_cpuid(0x80000007, &a, &b, &c, &d) && (d >> 8 & 1);
#else
    return false;
#endif
}
const bool counter = has_counter();

i64 ticks() {
#if defined(__x86_64__)
    if (counter) return (i64)__rdtsc();
#endif
    return clock_ns();
}

// The time in ticks, or 0 if nothing is written.
i64 traced() { return timeline.on() ? ticks() : 0; }

// set_timeline(rows): write into rows, int64[n, 5], from now on; None ends it. Returns the number
// of rows since the last call, the time in ticks, and in ns of the monotonic clock.
PyObject* set_timeline(PyObject*, PyObject* rows) {
    Py_buffer view = {};
    if (rows != Py_None && PyObject_GetBuffer(rows, &view, PyBUF_WRITABLE)) return nullptr;
    timeline.rows.store(nullptr, std::memory_order_release);
    const i64 used = timeline.used.exchange(0);
    if (timeline.before.obj) PyBuffer_Release(&timeline.before);
    timeline.before = timeline.view, timeline.view = view;
    timeline.room = view.len / 40;
    if (view.buf) timeline.rows.store(static_cast<i64*>(view.buf), std::memory_order_release);
    return Py_BuildValue("LLL", (long long)used, (long long)ticks(), (long long)clock_ns());
}

// timeline_now(): the time in ticks if something is written, else 0.
PyObject* timeline_now(PyObject*, PyObject*) { return PyLong_FromLongLong(traced()); }

// timeline_add(kind, begin, amount): writes a row of this thread, from begin until now.
PyObject* timeline_add(PyObject*, PyObject* args) {
    long long kind, begin, amount;
    if (!PyArg_ParseTuple(args, "LLL", &kind, &begin, &amount)) return nullptr;
    if (timeline.on()) timeline.add(kind, begin, ticks(), amount);
    Py_RETURN_NONE;
}

}  // namespace

#endif

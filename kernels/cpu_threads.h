// The tiles of a call, shared in blocks by a few threads: the bits are those of one thread.
#ifndef CPD_CPU_THREADS_H
#define CPD_CPU_THREADS_H

#include <pthread.h>
#include <sched.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "cpu_arguments.h"

namespace {

const i64 BLOCK_TILES = 32;    // 128 KiB of float32: a few microseconds, so that waits are short
const i64 SHARED_TILES = 256;  // 1 MiB: less work takes no longer than waking a helper
const int LOOKS = 200;         // of an idle helper for the next call before it sleeps

// Tiles that one thread works on: the first one, its first value, and the number of values.
struct Block {
    i64 tile, first, n;
};
typedef std::function<void(const Block&)> Body;

// Helpers of the thread that calls. They never touch Python, and sleep when there is no work.
class Helpers {
  public:
    const pid_t process = getpid();

    // Starts helpers up to count. Throws std::system_error if the system starts no more threads.
    void start(int count) {
        std::lock_guard<std::mutex> lock(mutex);
        if ((int)threads.size() < count) cores = {};  // also set the cores of new ones
        while ((int)threads.size() < count) threads.emplace_back(&Helpers::help, this);
    }

    // Runs body over the blocks of n values on this number of threads, this one included.
    void run(int count, i64 n, const Body& body) {
        std::unique_lock<std::mutex> lock(mutex);
        if (current) {  // they work for another thread of the program
            lock.unlock();
            return body(Block{0, 0, n});
        }
        keep_off_this_core();
        current = &body, end = n, next = 0, seats = count - 1;
        ++calls;
        lock.unlock();
        wake.notify_all();
        lock.lock();
        work(lock);
        while (working) {
            lock.unlock();
            std::this_thread::yield();
            lock.lock();
        }
        current = nullptr;
    }

  private:
    std::mutex mutex;
    std::condition_variable wake;
    std::atomic<u64> calls{0};
    const Body* current = nullptr;  // runs now, for values next..end
    i64 next = 0, end = 0;
    int seats = 0;    // for helpers that may still join
    int working = 0;  // threads inside a block
    std::vector<std::thread> threads;
    cpu_set_t cores = {};  // that the helpers may use

    // Linux wakes a thread on the core of its waker if all others look busy, as those of a virtual
    // machine do while they are halted; there it would wait for the work that it should share.
    void keep_off_this_core() {
        cpu_set_t others;
        if (sched_getaffinity(0, sizeof others, &others)) return;
        if (CPU_COUNT(&others) > 1) CPU_CLR(sched_getcpu(), &others);
        if (CPU_EQUAL(&others, &cores)) return;
        cores = others;
        for (std::thread& each : threads)
            pthread_setaffinity_np(each.native_handle(), sizeof cores, &cores);
    }

    void help() {
        u64 seen = 0;
        std::unique_lock<std::mutex> lock(mutex);
        for (;;) {
            wake.wait(lock, [&] { return calls != seen; });
            seen = calls;
            if (current && next < end && seats > 0) {
                --seats;
                work(lock);
            }
            lock.unlock();
            for (int i = 0; i < LOOKS && calls == seen; ++i) std::this_thread::yield();
            lock.lock();
        }
    }

    // Takes blocks until there are none; locked on entry and return.
    void work(std::unique_lock<std::mutex>& lock) {
        ++working;
        while (next < end) {
            i64 first = next, n = BLOCK_TILES * CPD_TILE;
            next += n;
            if (next > end) n = end - first;
            const Body& body = *current;
            lock.unlock();
            body(Block{first / CPD_TILE, first, n});
            lock.lock();
        }
        --working;
    }
};

// The helpers of this process; after a fork the child starts its own. Needs the GIL.
Helpers& helpers() {
    static Helpers* all = nullptr;
    if (!all || all->process != getpid()) all = new Helpers;  // never freed: threads may be asleep
    return *all;
}

// Runs body over n values without the GIL, on at most this number of threads. Returns None, or null
// with an error set if the system starts no threads.
template <class Work>
PyObject* in_blocks(int threads, i64 n, const Work& body) {
    if (recording) {
        PyErr_SetString(PyExc_RuntimeError, "record: this kernel cannot be written down");
        return nullptr;
    }
    if (threads < 2 || n < SHARED_TILES * CPD_TILE) {
        Unlocked unlocked;
        body(Block{0, 0, n});
    } else {
        Helpers& all = helpers();
        try {
            all.start(threads - 1);
        } catch (const std::system_error& error) {
            return PyErr_Format(PyExc_RuntimeError, "threads: %d asked for: %s", threads,
                                error.what());
        }
        Unlocked unlocked;
        all.run(threads, n, std::cref(body));
    }
    Py_RETURN_NONE;
}

// The same for a body that returns a count: the sum of the counts.
template <class Work>
PyObject* count_in_blocks(int threads, i64 n, const Work& body) {
    std::atomic<i64> count{0};
    PyObject* done = in_blocks(threads, n, [&](const Block& b) { count += body(b); });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyLong_FromLongLong(count);
}

// set_time_slice(ns): of the calling thread, from 100,000 to 100,000,000; returns whether Linux
// supports it, from 6.12 on. Earlier versions and other systems do nothing.
PyObject* set_time_slice(PyObject*, PyObject* args) {
    unsigned long long ns;
    if (!PyArg_ParseTuple(args, "K", &ns)) return nullptr;
    long failed = -1;
#ifdef SYS_sched_setattr
    // struct sched_attr as it was first: glibc has none before 2.41. A policy of 0 is SCHED_OTHER.
    struct {
        uint32_t size, policy;
        uint64_t flags;
        int32_t nice;
        uint32_t priority;
        uint64_t runtime, deadline, period;
    } attributes = {};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) == 0 &&
        attributes.policy == 0) {  // other attributes, as nice, stay
        attributes.runtime = ns;
        failed = syscall(SYS_sched_setattr, 0, &attributes, 0);
    }
#endif
    return PyBool_FromLong(!failed);
}

}  // namespace

#endif

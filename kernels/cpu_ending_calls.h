// Ends a process if MPI_Finalize never returns: by a timer of the system, which needs neither
// Python's lock, held during that call, nor a thread.
#ifndef CPD_CPU_ENDING_CALLS_H
#define CPD_CPU_ENDING_CALLS_H

#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/time.h>
#include <unistd.h>

#include "cpu_arguments.h"

namespace {

char last_words[256];  // written then, set before the timer starts
size_t last_words_size = 0;
itimerval last_limit = {};
bool ends_in_time = false;

// A handler of signals may call write and _exit, and little else.
void end_now(int) {
    if (write(STDERR_FILENO, last_words, last_words_size) < 0) _exit(0);
    _exit(0);
}

// Python calls this last, except functions that were registered before, as MPI_Finalize by mpi4py.
void start_last_limit() {
    fflush(nullptr);
    struct sigaction action = {};
    action.sa_handler = end_now;
    sigset_t alarm;
    sigemptyset(&alarm);
    sigaddset(&alarm, SIGALRM);
    sigaction(SIGALRM, &action, nullptr);
    pthread_sigmask(SIG_UNBLOCK, &alarm, nullptr);
    setitimer(ITIMER_REAL, &last_limit, nullptr);
}

// Limits the time of Python's last steps, after its own exit functions; then words are written and
// the process ends with status 0. The last call counts.
PyObject* end_in_time(PyObject*, PyObject* args) {
    double limit_s;
    const char* words;
    Py_ssize_t size;
    if (!PyArg_ParseTuple(args, "dy#", &limit_s, &words, &size)) return nullptr;
    if (!(limit_s >= 1e-3 && limit_s <= 1e6) || size > (Py_ssize_t)sizeof last_words) {
        PyErr_Format(PyExc_ValueError, "end_in_time: 1e-3..1e6 s and %d bytes allowed",
                     (int)sizeof last_words);
        return nullptr;
    }
    if (!ends_in_time && Py_AtExit(start_last_limit)) {
        PyErr_SetString(PyExc_RuntimeError, "end_in_time: Python takes no more exit functions");
        return nullptr;
    }
    ends_in_time = true;
    memcpy(last_words, words, (size_t)size);
    last_words_size = (size_t)size;
    double whole;
    last_limit.it_value.tv_usec = (suseconds_t)(modf(limit_s, &whole) * 1e6);
    last_limit.it_value.tv_sec = (time_t)whole;
    Py_RETURN_NONE;
}

}  // namespace

#endif

// Messages in place ("loans"): a long message that is contiguous in its sender's memory is read
// from there by the other process, by the kernel's process_vm_readv, instead of being copied twice.
//
// The word after a message's number is 0 for a packed message, else the address of the message, and
// READING while it is read. The first change of the address decides: to READING by the reader, or
// to 0 by the sender, after it has packed the message. So a sender that waits long for its reader
// can continue as after a packed message.
#ifndef CPD_LOANS_H
#define CPD_LOANS_H

#include <errno.h>
#include <sys/uio.h>

#include "cpd.h"

enum Outcome { DONE, WAITS, DIFFERS, SKIPS };  // SKIPS: the row has the number of rows to skip

const i64 READING = 1, LOAN = 2;  // LOAN: the place of the word, from a message's first
const i64 LENT_LOOKS = 1000;      // at a message that is not being read, before it is packed
const i64 READ_LOOKS = 1000000;   // at one that is being read, as the reader may have died
const int PIECES = 256;           // of memory, in one call

inline void pause_core() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

// Reads run * counts contiguous bytes of another process into a strided box; false if the kernel
// does not allow it.
inline bool read_process(i64 pid, i64 address, u8* out, i64 run, const i64* n, const i64* strides) {
    struct iovec to[PIECES], from;
    const i64 runs = n[0] * n[1] * n[2] * n[3];
    for (i64 i = 0; i < runs;) {
        int pieces = 0;
        for (; pieces < PIECES && i < runs; ++i, ++pieces) {
            i64 d = i % n[3], c = i / n[3] % n[2], b = i / (n[3] * n[2]) % n[1],
                a = i / (n[3] * n[2] * n[1]);
            to[pieces].iov_base =
                out + a * strides[0] + b * strides[1] + c * strides[2] + d * strides[3];
            to[pieces].iov_len = (size_t)run;
        }
        from.iov_base = (void*)address;
        from.iov_len = (size_t)(pieces * run);
        if (process_vm_readv((pid_t)pid, to, (unsigned long)pieces, &from, 1, 0) != pieces * run)
            return false;
        address += pieces * run;
    }
    return true;
}

// Reads a message in place; DONE, with nothing done, if it is packed.
inline Outcome take_loan(i64 pid, i64* message, u8* out, i64 run, const i64* counts,
                         const i64* strides) {
    i64 address = __atomic_load_n(message + LOAN, __ATOMIC_ACQUIRE);
    if (!address || !__atomic_compare_exchange_n(message + LOAN, &address, READING, false,
                                                 __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
        return DONE;
    return read_process(pid, address, out, run, counts, strides) ? SKIPS : DIFFERS;
}

// Waits until a message in place has been read; DONE if it should be packed instead.
inline Outcome settle_loan(const i64* read, const i64* message, i64 serial) {
    for (i64 lent = 0, looks = 0; lent < LENT_LOOKS && looks < READ_LOOKS; ++looks) {
        if (__atomic_load_n(read, __ATOMIC_ACQUIRE) >= serial) return SKIPS;
        lent += __atomic_load_n(message + LOAN, __ATOMIC_RELAXED) != READING;
        pause_core();
    }
    return DONE;
}

// Marks a message in place, which has been packed since, as packed; DONE if it is being read.
inline Outcome recall_loan(i64* message) {
    i64 address = __atomic_load_n(message + LOAN, __ATOMIC_ACQUIRE);
    while (address != READING)
        if (__atomic_compare_exchange_n(message + LOAN, &address, 0, false, __ATOMIC_ACQ_REL,
                                        __ATOMIC_ACQUIRE))
            return SKIPS;
    return DONE;
}

#endif

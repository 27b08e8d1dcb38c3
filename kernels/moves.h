// Moves: copies and sums of strided boxes of bytes, and words by which two processes notify each
// other of messages in shared memory. darray/moves.py makes the rows.
#ifndef CPD_MOVES_H
#define CPD_MOVES_H

#include <string.h>

#include "cpd.h"
#include "loans.h"

enum Op { COPY, ADD, FILL, POST, AWAIT, LEND, TAKE, SETTLE, RECALL };
enum Kind { INT8, INT16, INT32, INT64, FLOAT32, FLOAT64 };

// A box of counts[0] x .. x counts[3] runs. Offsets, strides and run are in bytes; source and
// target are numbers of bases. POST and AWAIT: a word in target, and a value that is added to the
// serial number. 8 bytes after the word is the message's number, and then its address if it is in
// place. LEND: POST with source as that address. TAKE: a message to target from process kind; if it
// is in place, value rows are skipped. SETTLE, RECALL: see settle_loan and recall_loan; target is
// the message, source the word that is written when it has been read, value the rows to skip.
struct Row {
    i64 op, kind, source, target, source_offset, target_offset, run, value;
    i64 counts[4], source_strides[4], target_strides[4];
};

// Four elements at a time. If they are far apart, as at the border of the innermost axis, and more
// than a core's second cache has lines for, they are prefetched 64 ahead: 230 KB of float32 at a
// stride of 404 bytes then take 36 us instead of 38 each way. Fewer come from the cache, and
// prefetching costs more than it saves: 16 KB at a stride of 260 bytes took 2.3 us instead of 2.0.
const i64 FETCHED = 8192;  // elements

template <int SIZE>
void copy_fixed(u8* out, const u8* in, i64 n, i64 out_stride, i64 in_stride) {
    const bool fetches = n >= FETCHED;
    const i64 far_in = 64 * in_stride, far_out = 64 * out_stride;
    i64 i = 0;
    for (; i + 4 <= n; i += 4, in += 4 * in_stride, out += 4 * out_stride) {
        u8 four[4][SIZE];
        for (int k = 0; k < 4; ++k) memcpy(four[k], in + k * in_stride, SIZE);
        for (int k = 0; k < 4; ++k) memcpy(out + k * out_stride, four[k], SIZE);
        if (!fetches) continue;
        for (int k = 0; k < 4 && in_stride != SIZE; ++k)
            __builtin_prefetch(in + far_in + k * in_stride);
        for (int k = 0; k < 4 && out_stride != SIZE; ++k)
            __builtin_prefetch(out + far_out + k * out_stride, 1);
    }
    for (; i < n; ++i, in += in_stride, out += out_stride) memcpy(out, in, SIZE);
}

// Runs of HALF..2 HALF bytes, in two moves that may overlap: a call of memcpy costs more. They are
// prefetched 16 ahead if they are apart: 38,400 runs of 20 bytes at a stride of 420 take 37 us
// instead of 40.
template <int HALF>
void copy_halves(u8* out, const u8* in, i64 run, i64 n, i64 out_stride, i64 in_stride) {
    for (i64 i = 0; i < n; ++i, in += in_stride, out += out_stride) {
        if (in_stride != run) __builtin_prefetch(in + 16 * in_stride);
        if (out_stride != run) __builtin_prefetch(out + 16 * out_stride, 1);
        u8 first[HALF], last[HALF];
        memcpy(first, in, HALF);
        memcpy(last, in + run - HALF, HALF);
        memcpy(out, first, HALF);
        memcpy(out + run - HALF, last, HALF);
    }
}

inline void copy_runs(u8* out, const u8* in, i64 run, i64 n, i64 out_stride, i64 in_stride) {
    switch (run) {
        case 1:
            return copy_fixed<1>(out, in, n, out_stride, in_stride);
        case 2:
            return copy_fixed<2>(out, in, n, out_stride, in_stride);
        case 4:
            return copy_fixed<4>(out, in, n, out_stride, in_stride);
        case 8:
            return copy_fixed<8>(out, in, n, out_stride, in_stride);
        case 16:
            return copy_fixed<16>(out, in, n, out_stride, in_stride);
    }
    if (run > 8 && run < 16) return copy_halves<8>(out, in, run, n, out_stride, in_stride);
    if (run > 16 && run <= 32) return copy_halves<16>(out, in, run, n, out_stride, in_stride);
    if (run > 32 && run <= 64) return copy_halves<32>(out, in, run, n, out_stride, in_stride);
    for (i64 i = 0; i < n; ++i) loops->copy(out + i * out_stride, in + i * in_stride, run);
}

template <class T>
void add_runs(u8* out, const u8* in, i64 run, i64 n, i64 out_stride, i64 in_stride) {
    typedef T Anywhere __attribute__((aligned(1), may_alias));
    for (i64 i = 0; i < n; ++i) {
        Anywhere* to = (Anywhere*)(out + i * out_stride);
        const Anywhere* from = (const Anywhere*)(in + i * in_stride);
        for (i64 j = 0; j < run / (i64)sizeof(T); ++j) to[j] = (T)(to[j] + from[j]);
    }
}

typedef void (*Runs)(u8* out, const u8* in, i64 run, i64 n, i64 out_stride, i64 in_stride);

// Integers are added as unsigned, so that sums that are too large wrap around, as NumPy's.
const Runs add_by_kind[] = {add_runs<u8>,  add_runs<unsigned short>, add_runs<u32>,
                            add_runs<u64>, add_runs<float>,          add_runs<double>};

// Fills every run with the element at in, of size bytes.
inline void fill_runs(u8* out, const u8* in, i64 run, i64 n, i64 out_stride, i64 size) {
    for (i64 i = 0; i < n; ++i) {
        u8* start = out + i * out_stride;
        memcpy(start, in, size);
        for (i64 done = size; done < run; done *= 2)
            memcpy(start + done, start, done < run - done ? done : run - done);
    }
}

inline void move_box(const Row& row, const u8* in, u8* out) {
    const i64 *n = row.counts, *si = row.source_strides, *so = row.target_strides;
    Runs runs = row.op == ADD ? add_by_kind[row.kind] : copy_runs;
    for (i64 a = 0; a < n[0]; ++a)
        for (i64 b = 0; b < n[1]; ++b)
            for (i64 c = 0; c < n[2]; ++c) {
                const u8* from = in + a * si[0] + b * si[1] + c * si[2];
                u8* to = out + a * so[0] + b * so[1] + c * so[2];
                if (row.op == FILL)
                    fill_runs(to, in, row.run, n[3], so[3], row.value);
                else
                    runs(to, from, row.run, n[3], so[3], si[3]);
            }
}

inline Outcome await_word(u8* word, i64 wanted, i64 number, i64 looks, bool is_message) {
    for (i64 i = 0; __atomic_load_n((i64*)word, __ATOMIC_ACQUIRE) < wanted; ++i) {
        if (i == looks) return WAITS;
        pause_core();
    }
    return is_message && ((i64*)word)[1] != number ? DIFFERS : DONE;
}

inline void post_word(u8* word, i64 value, i64 number, i64 address) {
    ((i64*)word)[1] = number;
    ((i64*)word)[2] = address;
    __atomic_store_n((i64*)word, value, __ATOMIC_RELEASE);
}

const i64 X = 0, OUT = 1, MEMORY = 2;  // numbers of bases: two arrays, then memory

// Executes the rows first..last; stops at an AWAIT whose word is not there, or has another number.
// kind of an AWAIT: whether it is for a message. before: called with each row before it is
// executed, and its target.
template <class Before>
Outcome do_rows(const Row* rows, i64& first, i64 last, u8* const* memory, u8* const* arrays,
                i64 serial, i64 number, i64 looks, const Before& before) {
    for (; first < last; ++first) {
        const Row& row = rows[first];
        u8* out = (row.target < MEMORY ? arrays : memory)[row.target] + row.target_offset;
        u8* in = (row.source < MEMORY ? arrays : memory)[row.source] + row.source_offset;
        before(row, out);
        Outcome found = DONE;
        switch (row.op) {
            case POST:
                post_word(out, serial + row.value, number, 0);
                break;
            case LEND:
                post_word(out, serial, number, (i64)in);
                break;
            case AWAIT:
                found = await_word(out, serial + row.value, number, looks, row.kind);
                break;
            case TAKE:
                found = take_loan(row.kind, (i64*)in, out, row.run, row.counts, row.target_strides);
                break;
            case SETTLE:
                found = settle_loan((i64*)in, (i64*)out, serial);
                break;
            case RECALL:
                found = recall_loan((i64*)out);
                break;
            default:
                if (row.op != COPY || in != out) move_box(row, in, out);
                // else: x is already in its place in out
        }
        if (found == SKIPS)
            first += row.value;
        else if (found != DONE)
            return found;
    }
    return DONE;
}

#endif

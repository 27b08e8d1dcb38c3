// CUDA's language on a CPU, for tests: a thread of a block is a fiber. One at a time goes on, drawn
// by chance, until it ends or waits for the others of its warp or block; a warp whose lanes wait for
// different things, or of which some have ended, is an error, as is a barrier that not all reach.
#include <ucontext.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <functional>
#include <limits>
#include <memory>
#include <random>
#include <type_traits>
#include <vector>

#define __CUDACC__ 1
#define __CUDA_ARCH__ 900
#define __device__
#define __global__
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __noinline__ __attribute__((noinline))
#define __shared__ static  // blocks run one after the other

namespace cuda {

struct Index {
    unsigned x;
};
enum { LANES = 32, THREADS = 128, STACK_BYTES = 1 << 17 };
enum Wait { RUNS, AT_WARP, AT_BARRIER, ENDED };

struct Fiber {
    ucontext_t context;
    std::unique_ptr<char[]> stack{new char[STACK_BYTES]};
    unsigned thread;  // the one that it runs now
};
struct Thread {
    Wait wait;
    int site;                       // line of what it waits at
    uint32_t mask, value, operand;  // of a warp's operation
    Fiber* fiber;
};

inline Index block_index, grid_size, block_size{THREADS}, thread_index;
inline std::mt19937 chance(1);
inline std::function<void()> body;
inline std::vector<std::unique_ptr<Fiber>> fibers;
inline std::vector<Fiber*> idle;
inline Thread threads[THREADS];
inline unsigned order[THREADS], started;
inline Fiber* running;
inline ucontext_t scheduler;
inline long operations;  // of warps, and barriers
inline char message[200];

// Threads that end make room for the next on the same fiber; one that waits keeps it.
inline void work() {
    for (;;) {
        while (started < THREADS) {
            unsigned t = order[started++];
            running->thread = t;
            threads[t] = Thread{RUNS, 0, 0, 0, 0, running};
            thread_index.x = t;
            body();
            threads[t].wait = ENDED;
        }
        idle.push_back(running);
        swapcontext(&running->context, &scheduler);
    }
}

inline Fiber* fresh() {
    if (idle.empty()) {
        fibers.push_back(std::make_unique<Fiber>());
        Fiber* fiber = fibers.back().get();
        getcontext(&fiber->context);
        fiber->context.uc_stack.ss_sp = fiber->stack.get();
        fiber->context.uc_stack.ss_size = STACK_BYTES;
        fiber->context.uc_link = nullptr;
        makecontext(&fiber->context, work, 0);
        return fiber;
    }
    Fiber* fiber = idle.back();
    idle.pop_back();
    return fiber;
}

inline void go_on(Fiber* fiber) {
    running = fiber;
    thread_index.x = fiber->thread;
    swapcontext(&scheduler, &fiber->context);
}

inline uint32_t wait(Wait what, int site, uint32_t mask, uint32_t value, uint32_t operand) {
    Thread& own = threads[running->thread];
    own.wait = what, own.site = site, own.mask = mask, own.value = value, own.operand = operand;
    Fiber* self = running;
    swapcontext(&self->context, &scheduler);
    return threads[self->thread].value;
}

// What the lanes of a warp get: exchange(values, operand, lane).
typedef uint32_t (*Exchange)(const uint32_t*, uint32_t, int);
inline Exchange exchange[THREADS];

inline bool release_warp(unsigned first) {
    uint32_t values[LANES];
    const Thread& one = threads[first];
    for (int lane = 0; lane < LANES; ++lane) {
        const Thread& other = threads[first + lane];
        if (other.wait != AT_WARP || other.site != one.site || other.mask != 0xffffffffu) {
            snprintf(message, sizeof message,
                     "block %u, warp %u: lanes 0 and %d part at lines %d and %d (mask %x)",
                     block_index.x, first / LANES, lane, one.site, other.site, other.mask);
            return false;
        }
        values[lane] = other.value;
    }
    for (int lane = 0; lane < LANES; ++lane) {
        Thread& own = threads[first + lane];
        own.value = exchange[first + lane](values, own.operand, lane);
        own.wait = RUNS;
    }
    ++operations;
    return true;
}

inline bool release_barrier() {
    for (const Thread& each : threads)
        if (each.wait != AT_BARRIER || each.site != threads[0].site) {
            snprintf(message, sizeof message, "block %u: not all threads are at the barrier of line %d",
                     block_index.x, threads[0].site);
            return false;
        }
    for (Thread& each : threads) each.wait = RUNS;
    ++operations;
    return true;
}

// Who can go on is none: a warp whose lanes all wait is let go, else a barrier that all have reached.
inline bool release() {
    bool any = false;
    for (unsigned first = 0; first < THREADS; first += LANES) {
        int at_warp = 0;
        for (int lane = 0; lane < LANES; ++lane) at_warp += threads[first + lane].wait == AT_WARP;
        if (!at_warp) continue;
        if (!release_warp(first)) return false;
        any = true;
    }
    return any || release_barrier();
}

inline bool run_block() {
    started = 0;
    for (Thread& each : threads) each.wait = ENDED;
    for (unsigned t = 0; t < THREADS; ++t) order[t] = t;
    std::shuffle(order, order + THREADS, chance);
    while (started < THREADS) go_on(fresh());
    for (;;) {
        std::vector<unsigned> ready;
        bool done = true;
        for (unsigned t = 0; t < THREADS; ++t) {
            if (threads[t].wait == RUNS) ready.push_back(t);
            done = done && threads[t].wait == ENDED;
        }
        if (done) return true;
        if (ready.empty() && !release()) return false;
        std::shuffle(ready.begin(), ready.end(), chance);
        for (unsigned t : ready) go_on(threads[t].fiber);
    }
}

inline long only = -1;  // the block that is run, of many; -1: all of them, in any order

inline const char* launch(unsigned blocks, std::function<void()> kernel) {
    grid_size.x = blocks;
    body = std::move(kernel);
    if (only >= 0) {
        block_index.x = only;
        return run_block() ? nullptr : message;
    }
    std::vector<unsigned> numbers(blocks);
    for (unsigned b = 0; b < blocks; ++b) numbers[b] = b;
    std::shuffle(numbers.begin(), numbers.end(), chance);
    for (unsigned b : numbers) {
        block_index.x = b;
        if (!run_block()) return message;
    }
    return nullptr;
}

inline uint32_t at_warp(int site, uint32_t mask, uint32_t value, uint32_t operand, Exchange how) {
    exchange[running->thread] = how;
    return wait(AT_WARP, site, mask, value, operand);
}

template <class To, class From>
inline To same_bits(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}

// cvt.rzi: NaN becomes 0, and what is too large the limit.
template <class To, class From>
inline To toward_zero(From x) {
    if (x != x) return 0;
    const From limit = std::ldexp(From(1), 8 * sizeof(To) - 1);
    if (x >= limit) return std::numeric_limits<To>::max();
    return x < -limit ? std::numeric_limits<To>::min() : (To)x;
}

// max.NaN: NaN if either is.
inline float largest(float a, float b) {
    return a != a || b != b ? std::numeric_limits<float>::quiet_NaN() : std::max(a, b);
}

// Codes of OCP's 8 bits, of which MOST is the largest number's, by float64, which is exact here.
template <int MAN, int EMIN, int MOST>
struct Float8 {
    static double magnitude(int code) {
        const int field = code >> MAN, digits = code & ((1 << MAN) - 1);
        return std::ldexp(field ? digits + (1 << MAN) : digits, EMIN - MAN + std::max(field - 1, 0));
    }
    static unsigned of(float x) {
        const unsigned sign = std::signbit(x) ? 0x80 : 0;
        if (x != x) return 0x7f;
        const double a = std::fabs((double)x);
        int code = MOST;  // the largest that is not above
        while (magnitude(code) > a) --code;
        const double rest = code < MOST ? a - (magnitude(code) + magnitude(code + 1)) / 2 : -1;
        return sign | (code + (rest > 0 || (rest == 0 && code & 1)));
    }
    static unsigned short of_two(float upper, float lower) { return of(upper) << 8 | of(lower); }
    static unsigned half(unsigned code) {
        const unsigned code_of = code & 0x7f, sign = (code & 0x80) << 8;
        if (code_of > MOST) return sign | (MAN == 2 && code_of == MOST + 1 ? 0x7c00 : 0x7fff);
        return sign | same_bits<unsigned short>((_Float16)magnitude(code_of));
    }
    static unsigned halves(unsigned short codes) { return half(codes >> 8) << 16 | half(codes & 255); }
};
typedef Float8<3, -6, 0x7e> E4M3;
typedef Float8<2, -14, 0x7b> E5M2;

}  // namespace cuda

#define threadIdx cuda::thread_index
#define blockIdx cuda::block_index
#define gridDim cuda::grid_size
#define blockDim cuda::block_size

#define __syncthreads() cuda::wait(cuda::AT_BARRIER, __LINE__, 0, 0, 0)
#define __syncwarp() cuda::at_warp(__LINE__, ~0u, 0, 0, [](auto, auto, int) { return 0u; })
#define __shfl_xor_sync(mask, value, step)       \
    cuda::at_warp(__LINE__, mask, value, step,   \
                  [](const uint32_t* all, uint32_t by, int lane) { return all[lane ^ by]; })
#define __shfl_up_sync(mask, value, step)                                      \
    cuda::at_warp(__LINE__, mask, value, step,                                 \
                  [](const uint32_t* all, uint32_t by, int lane) {             \
                      return all[lane < (int)by ? lane : lane - (int)by]; \
                  })
#define __ballot_sync(mask, value)                                              \
    cuda::at_warp(__LINE__, mask, (value) != 0, 0,                              \
                  [](const uint32_t* all, uint32_t, int) {                      \
                      uint32_t word = 0;                                        \
                      for (int l = 0; l < cuda::LANES; ++l) word |= all[l] << l; \
                      return word;                                              \
                  })

template <class T>
inline T atomicAdd(T* at, T value) {
    T before = *at;
    *at += value;
    return before;
}
template <class T>
inline T atomicMax(T* at, T value) {
    T before = *at;
    *at = std::max(before, value);
    return before;
}
template <class T>
inline T atomicOr(T* at, T value) {
    T before = *at;
    *at |= value;
    return before;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }
inline float __int2float_rn(int x) { return (float)x; }
inline long long __double_as_longlong(double x) { return cuda::same_bits<long long>(x); }
inline double __longlong_as_double(long long x) { return cuda::same_bits<double>(x); }
inline double __dadd_rn(double a, double b) { return a + b; }
inline double __dsub_rn(double a, double b) { return a - b; }
inline double __dmul_rn(double a, double b) { return a * b; }
using std::max;
using std::min;

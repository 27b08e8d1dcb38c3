// Boxes of cells copied and added in one launch; a part of cuda_loops.cu, which includes it. Each
// unit of a target is written once, by one thread, as the sum of its box's terms in order, so that
// threads are independent. darray/device.py makes the tables.
#include "cuda_sums.h"

namespace {

// Kinds of units: bytes that are copied, or a number that is added. ops/gpu.py has the same order.
enum {
    CPD_MOVES_COPY_1,
    CPD_MOVES_COPY_2,
    CPD_MOVES_COPY_4,
    CPD_MOVES_COPY_8,
    CPD_MOVES_COPY_16,
    CPD_MOVES_INT8,
    CPD_MOVES_INT16,
    CPD_MOVES_INT32,
    CPD_MOVES_INT64,
    CPD_MOVES_FLOAT32,
    CPD_MOVES_FLOAT64,
    CPD_MOVES_FLOAT16,
    CPD_MOVES_BFLOAT16
};
enum { CPD_MOVED_AXES = 6, CPD_BEGINS = 4 };  // BEGINS: added to the base of a term

// first: the number of the box's first unit among all; terms: that of its first term, up to the
// next box's. An extra box after the last has the totals of both.
struct MovedBox {
    i64 first, terms, base, offset, counts[CPD_MOVED_AXES], strides[CPD_MOVED_AXES];
};
struct MovedTerm {
    i64 base, offset, strides[CPD_MOVED_AXES];
};
struct alignas(16) Wide {
    u64 low, high;
};

// Addition of numbers. Integers are unsigned, so that sums that are too large wrap around, as
// NumPy's; short floats are rounded after every addition.
template <class T>
struct Plain {
    typedef T Type;
    static __device__ T sum(T a, T b) { return (T)(a + b); }
};
struct Single : Plain<float> {
    static __device__ float sum(float a, float b) { return add(a, b); }
};
struct Half {
    typedef unsigned short Type;
    static __device__ float wide(Type x) {
        float y;
        asm("cvt.f32.f16 %0, %1;" : "=f"(y) : "h"(x));
        return y;
    }
    static __device__ Type sum(Type a, Type b) {
        const float wide_sum = add(wide(a), wide(b));
        Type y;
        asm("cvt.rn.f16.f32 %0, %1;" : "=h"(y) : "f"(wide_sum));
        return y;
    }
};
struct Brain {
    typedef unsigned short Type;
    static __device__ Type sum(Type a, Type b) {
        const u32 y = bits_of(add(from_bits((u32)a << 16), from_bits((u32)b << 16)));
        if ((y & CPD_MAGNITUDE) > CPD_INF) return 0x7fc0;
        return (Type)((y + 0x7fffu + (y >> 16 & 1)) >> 16);
    }
};

struct MovedArrays {
    const char* x;
    char *out, *memory;
    const char* table;

    __device__ const char* from(i64 base) const {
        return base == 0 ? x : base == 1 ? out : base == 2 ? memory : table;
    }
    __device__ char* to(i64 base) const { return base == 1 ? out : memory; }
};

// The number of the box that has unit i.
__device__ const MovedBox& box_of(const MovedBox* boxes, i64 count, i64 i) {
    i64 low = 0, high = count - 1;
    while (low < high) {
        const i64 middle = (low + high) / 2;
        if (boxes[middle + 1].first > i)
            high = middle;
        else
            low = middle + 1;
    }
    return boxes[low];
}

// The index of a unit on each axis of its box, the last one fastest. By 32-bit divisions if
// possible.
__device__ void place_of(const MovedBox& box, i64 unit, i64* place) {
    for (int axis = CPD_MOVED_AXES - 1; axis >= 0; --axis) {
        const i64 n = box.counts[axis];
        const i64 rest = (unit | n) >> 32 ? unit / n : (i64)((u32)unit / (u32)n);
        place[axis] = unit - rest * n;
        unit = rest;
    }
}

__device__ i64 ahead_of(const i64* place, const i64* strides) {
    i64 ahead = 0;
    for (int axis = 0; axis < CPD_MOVED_AXES; ++axis) ahead += place[axis] * strides[axis];
    return ahead;
}

template <class N>
__device__ typename N::Type moved_sum(const MovedArrays& arrays, const MovedTerm* terms, i64 count,
                                      const i64* place) {
    typedef typename N::Type Type;
    Type total{}, part{};
    bool several = false;
    for (i64 t = 0; t < count; ++t) {
        const MovedTerm& term = terms[t];
        const char* at = arrays.from(term.base % CPD_BEGINS) + term.offset;
        const Type value = *(const Type*)(at + ahead_of(place, term.strides));
        if (t == 0) {
            part = value;
        } else if (term.base < CPD_BEGINS) {
            part = N::sum(part, value);
        } else {
            total = several ? N::sum(total, part) : part;
            part = value, several = true;
        }
    }
    return several ? N::sum(total, part) : part;
}

template <class N>
__device__ void move_sums(const MovedArrays& arrays, const MovedBox* boxes, i64 count, i64 units) {
    const MovedTerm* terms = (const MovedTerm*)(boxes + count + 1);
    for (i64 i = first_thread(); i < units; i += thread_stride()) {
        const MovedBox& box = box_of(boxes, count, i);
        i64 place[CPD_MOVED_AXES];
        place_of(box, i - box.first, place);
        const auto sum =
            moved_sum<N>(arrays, terms + box.terms, (&box)[1].terms - box.terms, place);
        char* to = arrays.to(box.base) + box.offset + ahead_of(place, box.strides);
        *(typename N::Type*)to = sum;
    }
}

template <class T>
__device__ void move_copies(const MovedArrays& arrays, const MovedBox* boxes, i64 count,
                            i64 units) {
    const MovedTerm* terms = (const MovedTerm*)(boxes + count + 1);
    for (i64 i = first_thread(); i < units; i += thread_stride()) {
        const MovedBox& box = box_of(boxes, count, i);
        const MovedTerm& term = terms[box.terms];
        i64 place[CPD_MOVED_AXES];
        place_of(box, i - box.first, place);
        const char* from = arrays.from(term.base % CPD_BEGINS) + term.offset;
        char* to = arrays.to(box.base) + box.offset;
        *(T*)(to + ahead_of(place, box.strides)) =
            *(const T*)(from + ahead_of(place, term.strides));
    }
}

}  // namespace

extern "C" {

__global__ void move_boxes(int kind, const i64* table, i64 boxes, i64 units, const char* x,
                           char* out, char* memory) {
    const MovedArrays arrays{x, out, memory, (const char*)table};
    const MovedBox* first = (const MovedBox*)table;
    switch (kind) {
        case CPD_MOVES_COPY_1:
            return move_copies<u8>(arrays, first, boxes, units);
        case CPD_MOVES_COPY_2:
            return move_copies<unsigned short>(arrays, first, boxes, units);
        case CPD_MOVES_COPY_4:
            return move_copies<u32>(arrays, first, boxes, units);
        case CPD_MOVES_COPY_8:
            return move_copies<u64>(arrays, first, boxes, units);
        case CPD_MOVES_COPY_16:
            return move_copies<Wide>(arrays, first, boxes, units);
        case CPD_MOVES_INT8:
            return move_sums<Plain<u8>>(arrays, first, boxes, units);
        case CPD_MOVES_INT16:
            return move_sums<Plain<unsigned short>>(arrays, first, boxes, units);
        case CPD_MOVES_INT32:
            return move_sums<Plain<u32>>(arrays, first, boxes, units);
        case CPD_MOVES_INT64:
            return move_sums<Plain<u64>>(arrays, first, boxes, units);
        case CPD_MOVES_FLOAT32:
            return move_sums<Single>(arrays, first, boxes, units);
        case CPD_MOVES_FLOAT64:
            return move_sums<Plain<double>>(arrays, first, boxes, units);
        case CPD_MOVES_FLOAT16:
            return move_sums<Half>(arrays, first, boxes, units);
        case CPD_MOVES_BFLOAT16:
            return move_sums<Brain>(arrays, first, boxes, units);
    }
}

}  // extern "C"

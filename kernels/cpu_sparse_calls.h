// The module's functions for sparse arrays; a part of cpu_module.cpp, which includes it.
#include "sparse.h"

namespace {

i64 words_in(const Buffer& words) { return words.view.len / (i64)sizeof(u32); }

PyObject* mark_above(PyObject*, PyObject* args) {
    int threads;
    unsigned bits;
    Buffer x, words;
    if (!PyArg_ParseTuple(args, "iIy*w*", &threads, &bits, &x.view, &words.view) ||
        !has_length(words, "words", (floats_in(x) + 31) / 32 * (i64)sizeof(u32)))
        return nullptr;
    return in_blocks(threads, floats_in(x), [&](const Block& b) {
        loops->mark_above(bits, x.at<float>(b.first), b.n, words.at<u32>(b.first / 32));
    });
}

PyObject* count_digits(PyObject*, PyObject* args) {
    int threads, shift;
    unsigned low;
    Buffer x, counts;
    if (!PyArg_ParseTuple(args, "iIiy*w*", &threads, &low, &shift, &x.view, &counts.view))
        return nullptr;
    u32 buckets = (u32)words_in(counts);
    if (buckets > CPD_BUCKETS || shift < 0 || shift > 31)
        return PyErr_Format(PyExc_ValueError, "count_digits: shift %d, %u buckets given", shift,
                            buckets);
    memset(counts.at<u32>(0), 0, counts.view.len);
    std::mutex adding;
    return in_blocks(threads, floats_in(x), [&](const Block& b) {
        u32 found[CPD_BUCKETS];
        loops->count_digits(low, shift, buckets, x.at<float>(b.first), b.n, found);
        std::lock_guard<std::mutex> lock(adding);
        for (u32 i = 0; i < buckets; ++i) counts.at<u32>(0)[i] += found[i];
    });
}

i64 word_tiles(const Buffer& words) { return (words_in(words) + 31) / 32; }

PyObject* count_bits(PyObject*, PyObject* args) {
    int threads;
    Buffer words, counts;
    if (!PyArg_ParseTuple(args, "iy*w*", &threads, &words.view, &counts.view) ||
        !has_length(counts, "counts", word_tiles(words) * (i64)sizeof(u32)))
        return nullptr;
    return in_blocks(threads, 32 * words_in(words), [&](const Block& b) {
        loops->count_bits(words.at<u32>(b.first / 32), b.n / 32, counts.at<u32>(b.tile));
    });
}

PyObject* unpack_bitmap(PyObject*, PyObject* args) {
    int threads;
    Buffer words, starts, out;
    if (!PyArg_ParseTuple(args, "iy*y*w*", &threads, &words.view, &starts.view, &out.view) ||
        !has_length(starts, "starts", word_tiles(words) * (i64)sizeof(u32)))
        return nullptr;
    return in_blocks(threads, 32 * words_in(words), [&](const Block& b) {
        loops->unpack_bitmap(words.at<u32>(b.first / 32), b.n / 32, (u32)b.first,
                             starts.at<u32>(b.tile), out.at<u32>(0), words_in(out));
    });
}

PyObject* pack_bitmap(PyObject*, PyObject* args) {
    Buffer indices, words;
    if (!PyArg_ParseTuple(args, "y*w*", &indices.view, &words.view)) return nullptr;
    u32* bits = words.at<u32>(0);
    memset(bits, 0, words.view.len);
    for (i64 i = 0; i < words_in(indices); ++i) {
        u32 place = *indices.at<u32>(i);
        if (place / 32 >= words_in(words))
            return PyErr_Format(PyExc_ValueError, "pack_bitmap: index %u: must be below %lld",
                                place, 32 * (long long)words_in(words));
        bits[place / 32] |= 1u << place % 32;
    }
    Py_RETURN_NONE;
}

// Whether indices ascend, are distinct and are below n.
bool ascend(const char* name, const u32* given, i64 count, i64 n) {
    bool wrong = count && given[count - 1] >= n;
    for (i64 i = 1; i < count; ++i) wrong |= given[i - 1] >= given[i];
    if (wrong)
        PyErr_Format(PyExc_ValueError, "%s: indices: must ascend, be distinct and be below %lld",
                     name, (long long)n);
    return !wrong;
}

bool ascends(const char* name, const Buffer& indices, i64 n) {
    return ascend(name, indices.at<u32>(0), words_in(indices), n);
}

const i64 FAR = 32;  // places from one that is used to one whose line is prefetched

// Calls body(i, x[at[i]]) for n places.
template <class Work>
void each_place(float* x, const u32* at, i64 n, const Work& body) {
    for (i64 i = 0; i < n; ++i) {
        __builtin_prefetch(x + at[i + FAR < n ? i + FAR : n - 1]);
        body(i, x[at[i]]);
    }
}

PyObject* gather(PyObject*, PyObject* args) {
    int threads;
    Buffer x, indices, out;
    if (!PyArg_ParseTuple(args, "iy*y*w*", &threads, &x.view, &indices.view, &out.view) ||
        !has_length(out, "out", indices.view.len) || !ascends("gather", indices, floats_in(x)))
        return nullptr;
    return in_blocks(threads, words_in(indices), [&](const Block& b) {
        float* to = out.at<float>(b.first);
        each_place(x.at<float>(0), indices.at<u32>(b.first), b.n,
                   [&](i64 i, const float& own) { to[i] = own; });
    });
}

PyObject* scatter_add(PyObject*, PyObject* args) {
    int threads;
    Buffer out, indices, values;
    if (!PyArg_ParseTuple(args, "iw*y*y*", &threads, &out.view, &indices.view, &values.view) ||
        !has_length(values, "values", indices.view.len) ||
        !ascends("scatter_add", indices, floats_in(out)))
        return nullptr;
    return in_blocks(threads, words_in(indices), [&](const Block& b) {
        const float* terms = values.at<float>(b.first);
        each_place(out.at<float>(0), indices.at<u32>(b.first), b.n,
                   [&](i64 i, float& own) { own += terms[i]; });
    });
}

PyObject* clear(PyObject*, PyObject* args) {
    int threads;
    Buffer x, indices;
    if (!PyArg_ParseTuple(args, "iw*y*", &threads, &x.view, &indices.view) ||
        !ascends("clear", indices, floats_in(x)))
        return nullptr;
    return in_blocks(threads, words_in(indices), [&](const Block& b) {
        each_place(x.at<float>(0), indices.at<u32>(b.first), b.n, [](i64, float& own) { own = 0; });
    });
}

// A tile of a stream: its codes, their width, and its words.
struct Stream {
    u32* codes;
    i64 n;
    int width;
    u32* words;
};

int run_at(const Stream& s, i64 i) { return (int)(s.n - i < CPD_RUN ? s.n - i : CPD_RUN); }

void pack_tile(const Stream& s) {
    for (i64 i = 0; i < s.n; i += CPD_RUN)
        pack_run(s.codes + i, run_at(s, i), s.width, s.words + i / CPD_RUN * s.width);
}

void unpack_tile(const Stream& s) {
    const i64 last = (s.n * s.width + 31) / 32 * (i64)sizeof(u32) - (i64)sizeof(u64);
    const u32 mask = (u32)(((u64)1 << s.width) - 1);
    for (i64 i = 0; last >= 0 && i < s.n; ++i) {  // each code lies in 8 bytes
        const i64 bit = i * s.width, at = std::min(bit / 8, last);
        u64 two;
        memcpy(&two, (const u8*)s.words + at, sizeof two);
        s.codes[i] = (u32)(two >> (bit - 8 * at)) & mask;
    }
    for (i64 i = 0; last < 0 && i < s.n; i += CPD_RUN)
        unpack_run(s.words + i / CPD_RUN * s.width, run_at(s, i), s.width, s.codes + i);
}

// Calls a function for each tile. Returns null with an error set if codes, widths and words do not
// fit together.
PyObject* each_stream(const Buffer& codes, const Buffer& widths, const Buffer& words,
                      void (*body)(const Stream&)) {
    std::vector<Stream> streams;
    u32* next = words.at<u32>(0);
    if (!has_length(widths, "widths", tiles_of(words_in(codes)))) return nullptr;
    for (i64 t = 0; t < tiles_of(words_in(codes)); ++t) {
        i64 left = words_in(codes) - t * CPD_TILE, n = left < CPD_TILE ? left : CPD_TILE;
        int width = *widths.at<u8>(t);
        if (width > 32) return PyErr_Format(PyExc_ValueError, "widths: %d: must be 0..32", width);
        streams.push_back({codes.at<u32>(t * CPD_TILE), n, width, next});
        next += (n * width + 31) / 32;
    }
    if (!has_length(words, "words", (i64)((u8*)next - words.at<u8>(0)))) return nullptr;
    {
        Unlocked unlocked;
        for (const Stream& each : streams) body(each);
    }
    Py_RETURN_NONE;
}

PyObject* pack_stream(PyObject*, PyObject* args) {
    Buffer codes, widths, words;
    if (!PyArg_ParseTuple(args, "y*y*w*", &codes.view, &widths.view, &words.view)) return nullptr;
    return each_stream(codes, widths, words, pack_tile);
}

PyObject* unpack_stream(PyObject*, PyObject* args) {
    Buffer words, widths, codes;
    if (!PyArg_ParseTuple(args, "y*y*w*", &words.view, &widths.view, &codes.view)) return nullptr;
    return each_stream(codes, widths, words, unpack_tile);
}

}  // namespace

// The module's functions for passes over gradients; a part of cpu_module.cpp, which includes it.

namespace {

const i64 LINE = 16;        // float32 in a cache line
const i64 STEP = CPD_TILE;  // values that one loop passes on to the next: writing more at once past
                            // the caches would take longer, as meanwhile nothing is read

void raise_to(std::atomic<u32>& most, u32 found) {
    u32 before = most;
    while (before < found && !most.compare_exchange_weak(before, found)) {
    }
}

bool as_long(const Buffer& x, const Buffer& other, const char* name) {
    return !other.view.buf || has_length(other, name, x.view.len);
}

// The target of a loop: an array; or, if it is larger than a core's cache, a buffer whose values
// are then stored past the caches: whole lines that are overwritten need not be read.
struct Written {
    static const i64 LARGE = 1 << 19, ROOM = 4 * STEP, LINE_BYTES = LINE * sizeof(float);
    const bool streams;
    alignas(LINE_BYTES) float own[ROOM + LINE];
    explicit Written(i64 n) : streams(n >= LARGE) {}
    ~Written() {
        if (streams) end_stream();
    }
    // Room for ROOM values, which lie in a line as those of out do.
    float* at(float* out) {
        return streams ? own + (uintptr_t)out % LINE_BYTES / sizeof(float) : out;
    }
    void done(float* out, i64 n) {
        if (streams) loops->stream_on((u8*)out, (const u8*)at(out), n * (i64)sizeof(float));
    }
};

// A tuple of buffers.
struct Views {
    std::vector<Py_buffer> all;
    ~Views() {
        for (Py_buffer& each : all) PyBuffer_Release(&each);
    }
    bool have_length(const char* name, i64 bytes) const {
        for (const Py_buffer& each : all)
            if (each.len != bytes)
                return PyErr_Format(PyExc_ValueError, "%s: %zd bytes given, %lld needed", name,
                                    each.len, (long long)bytes),
                       false;
        return true;
    }
    template <class T>
    const T* at(i64 number, i64 index) const {
        return static_cast<const T*>(all[(size_t)number].buf) + index;
    }
};

int add_views(PyObject* given, void* target, int flags) {
    std::vector<Py_buffer>& all = static_cast<Views*>(target)->all;
    if (!PyTuple_Check(given)) return PyErr_SetString(PyExc_TypeError, "must be a tuple"), 0;
    for (Py_ssize_t i = 0; i < PyTuple_Size(given); ++i) {
        Py_buffer view;
        if (PyObject_GetBuffer(PyTuple_GetItem(given, i), &view, flags)) return 0;
        all.push_back(view);
    }
    return 1;
}

int to_views(PyObject* given, void* target) { return add_views(given, target, PyBUF_SIMPLE); }
int to_views_out(PyObject* given, void* target) { return add_views(given, target, PyBUF_WRITABLE); }

// Runs of values, each with a number of its own: they end at ends, int64[runs], which ascend.
struct Runs {
    Buffer each, ends;
    i64 count() const { return ends.view.len / (i64)sizeof(i64); }
    // Whether the runs cover all values before last, and there are numbers for all, times over.
    bool are_sound(i64 last, const Buffer& numbers, i64 times = 1) const {
        const i64* end = ends.at<i64>(0);
        bool wrong = count() ? end[count() - 1] < last : last > 0;
        for (i64 i = 1; i < count(); ++i) wrong |= end[i - 1] > end[i];
        if (wrong) PyErr_SetString(PyExc_ValueError, "runs: ends: must ascend to the last value");
        return !wrong && has_length(numbers, "each", times * count() * (i64)sizeof(float));
    }
    i64 of(i64 i) const {  // the run that has value i
        const i64* begin = ends.at<i64>(0);
        return std::upper_bound(begin, begin + count(), i) - begin;
    }
};

// Calls body(run, first, n) for the part of each run that lies in first .. first + n - 1. run: one
// that does not end before the values, and afterwards the last one: a search takes long.
template <class Work>
void each_run(const Runs& runs, i64& run, i64 first, i64 n, const Work& body) {
    const i64* ends = runs.ends.at<i64>(0);
    for (i64 at = first; at < first + n;) {
        while (ends[run] <= at) ++run;
        const i64 stop = ends[run] < first + n ? ends[run] : first + n;
        body(run, at, stop - at), at = stop;
    }
}

// scale_runs(threads, divide, x, each, ends, limits, out): out = x, cut to the limit of its run if
// limits are given, over, or times, the number of its run. Returns the bits of the largest
// magnitude of out.
PyObject* scale_runs(PyObject*, PyObject* args) {
    int threads, divide;
    Buffer x, limits, out;
    Runs runs;
    if (!PyArg_ParseTuple(args, "ipy*y*y*O&w*", &threads, &divide, &x.view, &runs.each.view,
                          &runs.ends.view, to_optional, &limits, &out.view) ||
        !as_long(x, out, "out") || !as_long(runs.each, limits, "limits") ||
        !runs.are_sound(floats_in(x), runs.each))
        return nullptr;
    std::atomic<u32> most{0};
    PyObject* done = in_blocks(threads, floats_in(x), [&](const Block& b) {
        Written values(x.view.buf == out.view.buf ? 0 : floats_in(x));
        i64 at_run = runs.of(b.first);
        u32 largest = 0;
        for (i64 i = b.first; i < b.first + b.n; i += STEP) {
            const i64 left = b.first + b.n - i, m = left < STEP ? left : STEP;
            float* to = values.at(out.at<float>(i));
            each_run(runs, at_run, i, m, [&](i64 run, i64 first, i64 n) {
                const float limit = limits.view.buf ? *limits.at<float>(run) : __builtin_inff();
                const u32 found = loops->scale(divide, x.at<float>(first),
                                               *runs.each.at<float>(run), limit, n, to + first - i);
                largest = largest < found ? found : largest;
            });
            values.done(out.at<float>(i), m);
        }
        raise_to(most, largest);
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyLong_FromUnsignedLong(most);
}

// Values of a row that NumPy converts to float64 at once; it adds their sums in order.
const i64 AT_ONCE = 8192;

template <class Work>
double sum_of_row(const float* x, i64 n, const Work& also) {
    double sum = 0;
    for (i64 i = 0; i < n; i += AT_ONCE) {
        const i64 m = n - i < AT_ONCE ? n - i : AT_ONCE;
        sum += loops->sum_in_pairs(CPD_VALUES, x + i, m, 0);
        also(i, m);
    }
    return sum;
}

// run_maxima(x, ends, out): the bits of the largest magnitude of each run. Returns the sum of x, as
// of a row, by the same pass.
PyObject* run_maxima(PyObject*, PyObject* args) {
    Buffer x, out;
    Runs runs;
    if (!PyArg_ParseTuple(args, "y*y*w*", &x.view, &runs.ends.view, &out.view) ||
        !runs.are_sound(floats_in(x), out))
        return nullptr;
    if (runs.count() && *runs.ends.at<i64>(runs.count() - 1) > floats_in(x))
        return PyErr_Format(PyExc_ValueError, "run_maxima: ends: must be %lld at most",
                            (long long)floats_in(x));
    double sum;
    {
        Unlocked unlocked;
        u32* most = out.at<u32>(0);
        memset(most, 0, (size_t)out.view.len);
        i64 at_run = 0;
        sum = sum_of_row(x.at<float>(0), floats_in(x), [&](i64 i, i64 m) {
            each_run(runs, at_run, i, m, [&](i64 run, i64 first, i64 n) {
                const u32 found = loops->largest_of(x.at<float>(first), n);
                most[run] = most[run] < found ? found : most[run];
            });
        });
    }
    return PyFloat_FromDouble(sum);
}

Parts parts_of_row(const float* x, i64 n, const float* ahead) {
    Parts sum = {};
    for (i64 i = 0; i < n; i += AT_ONCE) {
        const Parts next = loops->parts_of(x + i, n - i < AT_ONCE ? n - i : AT_ONCE, ahead + i);
        sum = {sum.below + next.below, sum.above + next.above};
    }
    return sum;
}

// row_sums(x, out): of as many rows as out, float64, has sums.
PyObject* row_sums(PyObject*, PyObject* args) {
    Buffer x, out;
    if (!PyArg_ParseTuple(args, "y*w*", &x.view, &out.view)) return nullptr;
    const i64 rows = out.view.len / (i64)sizeof(double), columns = rows ? floats_in(x) / rows : 0;
    if (!has_length(x, "x", rows * columns * (i64)sizeof(float))) return nullptr;
    {
        Unlocked unlocked;
        for (i64 i = 0; i < rows; ++i)
            *out.at<double>(i) = sum_of_row(x.at<float>(i * columns), columns, [](i64, i64) {});
    }
    Py_RETURN_NONE;
}

// run_sums(of, x, starts, out): the first term of each run plus the sum of the others, as NumPy's
// reduceat.
PyObject* run_sums(PyObject*, PyObject* args) {
    int of;
    Buffer x, starts, out;
    if (!PyArg_ParseTuple(args, "iy*y*w*", &of, &x.view, &starts.view, &out.view) ||
        !has_length(out, "out", starts.view.len))
        return nullptr;
    const i64 runs = starts.view.len / (i64)sizeof(i64), n = floats_in(x);
    const i64* start = starts.at<i64>(0);
    for (i64 i = 0; i < runs; ++i)
        if (start[i] < 0 || start[i] >= (i + 1 < runs ? start[i + 1] : n))
            return PyErr_Format(PyExc_ValueError, "run_sums: starts: must ascend, below %lld",
                                (long long)n);
    {
        Unlocked unlocked;
        for (i64 i = 0; i < runs; ++i) {
            const float* first = x.at<float>(start[i]);
            const i64 size = (i + 1 < runs ? start[i + 1] : n) - start[i];
            *out.at<double>(i) = loops->sum_in_pairs(of, first, 1, 0) +
                                 loops->sum_in_pairs(of, first + 1, size - 1, 0);
        }
    }
    Py_RETURN_NONE;
}

// square_sum(x, center): of x - center, halved as a whole.
PyObject* square_sum(PyObject*, PyObject* args) {
    double center, sum;
    Buffer x;
    if (!PyArg_ParseTuple(args, "y*d", &x.view, &center)) return nullptr;
    {
        Unlocked unlocked;
        sum = loops->sum_in_pairs(CPD_SQUARES, x.at<float>(0), floats_in(x), center);
    }
    return PyFloat_FromDouble(sum);
}

// encode_signs(x, kept, rest, signs, pairs): for x + kept, or x alone, in rows of one pair each,
// the signs, a bit a value, and the means of the values below 0 and of the others; rest, if given,
// is the error. Returns the bits of the largest magnitude of the sum.
PyObject* encode_signs(PyObject*, PyObject* args) {
    Buffer x, kept, rest, signs, pairs;
    if (!PyArg_ParseTuple(args, "y*O&O&w*w*", &x.view, to_optional, &kept, to_optional_out, &rest,
                          &signs.view, &pairs.view) ||
        !as_long(x, kept, "kept") || !as_long(x, rest, "rest") ||
        !has_length(signs, "signs", (floats_in(x) + 7) / 8))
        return nullptr;
    const i64 rows = floats_in(pairs) / 2, columns = rows ? floats_in(x) / rows : 0;
    if (!has_length(x, "x", rows * columns * (i64)sizeof(float))) return nullptr;
    std::vector<float> row;
    try {
        row.resize((size_t)columns);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    u32 most = 0;
    {
        Unlocked unlocked;
        Written rests(rest.view.buf ? floats_in(x) : 0);
        for (i64 i = 0; i < rows; ++i) {
            const i64 first = i * columns;
            const float* sums = kept.view.buf ? row.data() : x.at<float>(first);
            const u32 largest = kept.view.buf
                                    ? loops->accumulate(x.at<float>(first), kept.at<float>(first),
                                                        1, nullptr, columns, row.data(), nullptr)
                                    : loops->largest_of(sums, columns);
            most = most < largest ? largest : most;
            const Parts sum = parts_of_row(sums, columns, x.at<float>(first + columns));
            const i64 count = loops->pack_signs(sums, columns, first, signs.at<u8>(0)),
                      others = columns - count;
            const float below = (float)(sum.below / (double)(others ? others : 1)),
                        above = (float)(sum.above / (double)(count ? count : 1));
            *pairs.at<float>(2 * i) = below, *pairs.at<float>(2 * i + 1) = above;
            if (!rest.view.buf) continue;
            const Buffer& soon = kept.view.buf ? kept : x;
            for (i64 j = first; j < first + columns; j += STEP) {
                const i64 left = first + columns - j, m = left < STEP ? left : STEP;
                loops->take_signs(sums + (j - first), below, above, m, rests.at(rest.at<float>(j)),
                                  soon.at<float>(j + columns));
                rests.done(rest.at<float>(j), m);
            }
        }
    }
    return PyLong_FromUnsignedLong(most);
}

// decode_signs(signs, pairs, rows, divisor, out): out is the sum over ranks of the values of their
// signs and pairs, a tuple of each, over divisor. Returns the bits of the largest magnitude.
PyObject* decode_signs(PyObject*, PyObject* args) {
    float divisor;
    long long rows;
    Views signs, pairs;
    Buffer out;
    if (!PyArg_ParseTuple(args, "O&O&Lfw*", to_views, &signs, to_views, &pairs, &rows, &divisor,
                          &out.view))
        return nullptr;
    const i64 n = floats_in(out), ranks = (i64)signs.all.size(), columns = rows > 0 ? n / rows : 0;
    if (!signs.have_length("signs", (n + 7) / 8) || pairs.all.size() != signs.all.size() ||
        !pairs.have_length("pairs", 2 * rows * (i64)sizeof(float)) ||
        !has_length(out, "out", rows * columns * (i64)sizeof(float)))
        return PyErr_Occurred() ? nullptr
                                : PyErr_Format(PyExc_ValueError, "pairs: must be as many as signs");
    u32 most = 0;
    std::vector<const u8*> bits;
    std::vector<const float*> numbers;
    try {
        for (i64 rank = 0; rank < ranks; ++rank)
            bits.push_back(signs.at<u8>(rank, 0)), numbers.push_back(pairs.at<float>(rank, 0));
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    {
        Unlocked unlocked;
        Written values(n);
        for (i64 row = 0; row < rows; ++row)
            for (i64 j = 0; j < columns; j += STEP) {
                const i64 first = row * columns + j, m = columns - j < STEP ? columns - j : STEP;
                float* x = values.at(out.at<float>(first));
                const u32 found = loops->mean_signs(bits.data(), numbers.data(), ranks, row, first,
                                                    divisor, m, x);
                most = most < found ? found : most;
                values.done(out.at<float>(first), m);
            }
    }
    return PyLong_FromUnsignedLong(most);
}

template <class T>
PyObject* bytes_of(const std::vector<T>& found) {
    return PyByteArray_FromStringAndSize((const char*)found.data(),
                                         (Py_ssize_t)(found.size() * sizeof(T)));
}

PyObject* both_bytes_of(const std::vector<u32>& places, const std::vector<float>& values) {
    PyObject* where = bytes_of(places);
    PyObject* what = where ? bytes_of(values) : nullptr;
    PyObject* both = what ? PyTuple_Pack(2, where, what) : nullptr;
    Py_XDECREF(where);
    Py_XDECREF(what);
    return both;
}

// The layout of AdaComp's codes, of 8 bits or 16: see compress/adacomp.py.
struct BinCodes {
    i64 bin;
    static const i64 SKIPPED = 4;  // empty bins that one passes over, at most
    int bytes() const { return bin < 1 << 6 ? 1 : 2; }
    int index_bits() const { return CPD_BIN_BITS(bytes()); }
    u32 passing() const { return (1u << index_bits()) - 1; }
    u32 last() const { return 2u << index_bits(); }

    // Passes over empty bins.
    template <class Code>
    void skip(i64 empty, std::vector<Code>& codes) const {
        for (; empty > 0; empty -= SKIPPED) {
            const u32 more = (u32)(empty < SKIPPED ? empty : SKIPPED) - 1;
            codes.push_back((Code)(passing() | more << index_bits()));
        }
    }

    template <class Code>
    void pack(const u32* indices, const float* values, i64 n, std::vector<Code>& codes) const {
        for (i64 i = 0, before = -1; i < n; ++i) {
            const i64 own = indices[i] / (u32)bin;
            if (i && own != before) codes.back() |= (Code)last();
            skip(own - before - 1, codes);
            const u32 minus = values[i] < 0;
            codes.push_back((Code)((u32)(indices[i] - own * bin) | minus << index_bits()));
            before = own;
        }
        if (n) codes.back() |= (Code)last();
    }

    // Writes indices and scale or -scale; returns their number. Both arrays have room for n.
    template <class Code>
    i64 unpack(const Code* codes, i64 n, float scale, u32 first, u32* indices,
               float* values) const {
        i64 count = 0;
        u32 start = first;
        for (i64 i = 0; i < n; ++i) {
            const u32 code = codes[i], index = code & passing(), upper = code >> index_bits();
            if (index == passing()) {
                start += (upper + 1) * (u32)bin;
                continue;
            }
            indices[count] = start + index;
            values[count++] = upper & 1 ? -scale : scale;
            start += (upper >> 1) * (u32)bin;
        }
        return count;
    }
};

bool is_bin(long long bin) {
    if (1 <= bin && bin < 1 << 14) return true;
    PyErr_Format(PyExc_ValueError, "bin: %lld: must be 1..%d", bin, (1 << 14) - 1);
    return false;
}

// pack_bins(bin, indices, values): codes of indices, which ascend, and of the values' signs.
PyObject* pack_bins(PyObject*, PyObject* args) {
    long long bin;
    Buffer indices, values;
    if (!PyArg_ParseTuple(args, "Ly*y*", &bin, &indices.view, &values.view) || !is_bin(bin) ||
        !has_length(values, "values", indices.view.len) ||
        !ascends("pack_bins", indices, (i64)1 << 32))
        return nullptr;
    std::vector<u8> bytes;
    std::vector<uint16_t> pairs;
    const BinCodes how = {bin};
    try {
        const i64 n = words_in(indices);
        if (how.bytes() == 1)
            how.pack(indices.at<u32>(0), values.at<float>(0), n, bytes);
        else
            how.pack(indices.at<u32>(0), values.at<float>(0), n, pairs);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    return how.bytes() == 1 ? bytes_of(bytes) : bytes_of(pairs);
}

// unpack_bins(bin, codes, scale, first, indices, values): the reverse; returns their number.
PyObject* unpack_bins(PyObject*, PyObject* args) {
    long long bin;
    float scale;
    unsigned first;
    Buffer codes, indices, values;
    if (!PyArg_ParseTuple(args, "Ly*fIw*w*", &bin, &codes.view, &scale, &first, &indices.view,
                          &values.view) ||
        !is_bin(bin))
        return nullptr;
    const BinCodes how = {bin};
    const i64 n = codes.view.len / how.bytes();
    if (!has_length(indices, "indices", n * 4) || !has_length(values, "values", n * 4))
        return nullptr;
    u32* at = indices.at<u32>(0);
    float* to = values.at<float>(0);
    return PyLong_FromLongLong(how.bytes() == 1
                                   ? how.unpack(codes.at<u8>(0), n, scale, first, at, to)
                                   : how.unpack(codes.at<uint16_t>(0), n, scale, first, at, to));
}

const i64 GROUP_VALUES = 16;  // of the widest register

// Whole bins of x, up to the last one, of at most so many values that they stay in the cache.
i64 step_of(i64 bin) { return bin < STEP ? STEP / bin * bin : bin; }

// Appends the codes of the leaders of x + kept, written to sum, and writes the largest of its bins.
template <class Code>
void encode_leaders(const Buffer& x, const Buffer& kept, float more, const BinCodes& how,
                    const Buffer& sum, const Buffer& highest, std::vector<Code>& codes) {
    const i64 n = floats_in(x), bin = how.bin, step = step_of(bin);
    std::vector<Code> own((size_t)(bin + GROUP_VALUES));
    Written values(bin <= Written::ROOM ? n : 0);
    i64 empty = 0;
    for (i64 i = 0; i < n; i += step) {
        const i64 end = n - i < step ? n : i + step;
        float* to = values.at(sum.at<float>(i));
        for (i64 j = i; j < end; j += bin) {
            const i64 size = end - j < bin ? end - j : bin;
            const float* from = x.at<float>(j);
            const u32 largest =
                loops->accumulate(from, kept.at<float>(j), 1, nullptr, size, to + (j - i), nullptr);
            *highest.at<u32>(j / bin) = largest;
            const i64 count =
                loops->leaders_of(to + (j - i), from, more, largest, size, how.bytes(), own.data());
            if (!count) {
                ++empty;
                continue;
            }
            how.skip(empty, codes), empty = 0;
            own[(size_t)count - 1] |= (Code)how.last();
            codes.insert(codes.end(), own.begin(), own.begin() + count);
        }
        values.done(sum.at<float>(i), end - i);
    }
}

// encode_bins(x, kept, more, bin, sum, highest): sum = x + kept; returns the codes of the places at
// which sum + more * x reaches the largest sum of its bin of bin values, without zeros, as a
// bytearray; highest: the bits of each bin's largest, written.
PyObject* encode_bins(PyObject*, PyObject* args) {
    float more;
    long long bin;
    Buffer x, kept, sum, highest;
    if (!PyArg_ParseTuple(args, "y*y*fLw*w*", &x.view, &kept.view, &more, &bin, &sum.view,
                          &highest.view) ||
        !as_long(x, kept, "kept") || !as_long(x, sum, "sum") || !is_bin(bin) ||
        !has_length(highest, "highest", (floats_in(x) + bin - 1) / bin * (i64)sizeof(u32)))
        return nullptr;
    std::vector<u8> bytes;
    std::vector<uint16_t> pairs;
    const BinCodes how = {bin};
    bool full = false;
    {
        Unlocked unlocked;
        try {
            if (how.bytes() == 1)
                encode_leaders(x, kept, more, how, sum, highest, bytes);
            else
                encode_leaders(x, kept, more, how, sum, highest, pairs);
        } catch (const std::bad_alloc&) {
            full = true;
        }
    }
    if (full) return PyErr_NoMemory();
    return how.bytes() == 1 ? bytes_of(bytes) : bytes_of(pairs);
}

// The codes of a rank, of which those before next are read.
struct Reader {
    const u8* codes;       // perhaps at an odd address
    i64 end, next, start;  // numbers of codes; the first place of the next one's bin
    float numbers[2];      // for unset and set signs
    float* rest;           // from which they are subtracted, or null
    i64 values;            // that were read
};

// Adds the values of codes for the places first .. stop - 1, whole bins of n values, to out.
// Returns whether the codes are sound.
template <class Code>
bool add_codes(const BinCodes& how, Reader& given, i64 first, i64 stop, i64 n, float* out) {
    const u32 passing = how.passing();
    const int bits = how.index_bits();
    Reader r = given;  // which no store can change
    for (; r.next < r.end && r.start < stop; ++r.next) {
        Code code;
        memcpy(&code, r.codes + r.next * (i64)sizeof code, sizeof code);
        const u32 index = code & passing, upper = (u32)code >> bits;
        if (index == passing) {
            r.start += (upper + 1) * how.bin;
            continue;
        }
        const i64 at = r.start + index;
        if (index >= how.bin || at >= n) return false;
        const float number = r.numbers[upper & 1];
        out[at - first] += number;
        if (r.rest) r.rest[at] -= number;
        r.start += (upper >> 1) * how.bin;
        ++r.values;
    }
    given = r;
    return true;
}

// mean_bins(bin, codes, scales, rests, first, divisor, out): out is the sum over ranks of the
// values of their codes, a tuple, over divisor; scales: float32 of each. Those of rank first and
// the next ones are subtracted from the arrays of the tuple rests. Returns the bits of the largest
// magnitude, and the numbers of values of the ranks, int64, as a bytearray.
PyObject* mean_bins(PyObject*, PyObject* args) {
    long long bin, owner;
    float divisor;
    Views codes, rests;
    Buffer scales, out;
    if (!PyArg_ParseTuple(args, "LO&y*O&Lfw*", &bin, to_views, &codes, &scales.view, to_views_out,
                          &rests, &owner, &divisor, &out.view) ||
        !is_bin(bin) || !rests.have_length("rests", out.view.len))
        return nullptr;
    const BinCodes how = {bin};
    const i64 n = floats_in(out), ranks = (i64)codes.all.size(), step = step_of(bin);
    const i64 owned = (i64)rests.all.size();
    if (!has_length(scales, "scales", ranks * (i64)sizeof(float))) return nullptr;
    if (owner < 0 || owner > ranks - owned)
        return PyErr_Format(PyExc_ValueError, "rests: must be of ranks below %lld",
                            (long long)ranks);
    std::vector<Reader> readers;
    std::vector<i64> counts;
    u32 most = 0;
    bool sound = true, full = false;
    {
        Unlocked unlocked;
        try {
            for (i64 rank = 0; rank < ranks; ++rank) {
                const float scale = *scales.at<float>(rank);
                const bool is_own = owner <= rank && rank < owner + owned;
                float* rest = is_own ? (float*)rests.all[(size_t)(rank - owner)].buf : nullptr;
                const i64 size = codes.all[(size_t)rank].len, end = size / how.bytes();
                sound &= size % how.bytes() == 0;
                readers.push_back({codes.at<u8>(rank, 0), end, 0, 0, {scale, -scale}, rest, 0});
            }
            Written values(bin <= Written::ROOM ? n : 0);
            for (i64 i = 0; i < n && sound; i += step) {
                const i64 stop = n - i < step ? n : i + step;
                float* sum = values.at(out.at<float>(i));
                memset(sum, 0, (size_t)(stop - i) * sizeof(float));
                for (const Reader& each : readers)  // most lines have a value that is sent
                    for (i64 k = stop; each.rest && k < stop + step; k += LINE)
                        __builtin_prefetch(each.rest + k, 1);
                for (Reader& each : readers)
                    sound &= how.bytes() == 1 ? add_codes<u8>(how, each, i, stop, n, sum)
                                              : add_codes<uint16_t>(how, each, i, stop, n, sum);
                const u32 found = loops->scale(true, sum, divisor, __builtin_inff(), stop - i, sum);
                most = most < found ? found : most;
                values.done(out.at<float>(i), stop - i);
            }
            for (const Reader& each : readers)
                sound &= each.next == each.end, counts.push_back(each.values);
        } catch (const std::bad_alloc&) {
            full = true;
        }
    }
    if (full) return PyErr_NoMemory();
    if (!sound)
        return PyErr_Format(PyExc_ValueError, "mean_bins: codes: must be of bins of %lld values",
                            bin);
    PyObject* numbers = bytes_of(counts);
    PyObject* both = numbers ? Py_BuildValue("IO", (unsigned)most, numbers) : nullptr;
    Py_XDECREF(numbers);
    return both;
}

// clear_all(threads, out): zeros, past the caches if there are many.
PyObject* clear_all(PyObject*, PyObject* args) {
    int threads;
    Buffer out;
    if (!PyArg_ParseTuple(args, "iw*", &threads, &out.view)) return nullptr;
    const i64 n = floats_in(out);
    return in_blocks(threads, n, [&](const Block& b) {
        Written zeros(n);
        if (zeros.streams) memset(zeros.own, 0, sizeof zeros.own);
        for (i64 i = b.first; i < b.first + b.n; i += STEP) {
            const i64 left = b.first + b.n - i, m = left < STEP ? left : STEP;
            if (!zeros.streams) memset(out.at<float>(i), 0, (size_t)m * sizeof(float));
            zeros.done(out.at<float>(i), m);
        }
    });
}

// put(threads, out, indices, values): out[indices] = values.
PyObject* put(PyObject*, PyObject* args) {
    int threads;
    Buffer out, indices, values;
    if (!PyArg_ParseTuple(args, "iw*y*y*", &threads, &out.view, &indices.view, &values.view) ||
        !has_length(values, "values", indices.view.len) || !ascends("put", indices, floats_in(out)))
        return nullptr;
    return in_blocks(threads, words_in(indices), [&](const Block& b) {
        float* to = out.at<float>(0);
        each_place(to, indices.at<u32>(b.first), b.n,
                   [&](i64 i, float& x) { x = values.at<float>(b.first)[i]; });
    });
}

// chunk_leaders(x, chunk, out): the position of the first of the largest magnitudes of each chunk.
PyObject* chunk_leaders(PyObject*, PyObject* args) {
    long long chunk;
    Buffer x, out;
    if (!PyArg_ParseTuple(args, "y*Lw*", &x.view, &chunk, &out.view)) return nullptr;
    const i64 n = floats_in(x);
    if (chunk < 1 || !has_length(out, "out", (n + chunk - 1) / chunk * (i64)sizeof(i64)))
        return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "chunk: %lld", chunk);
    {
        Unlocked unlocked;
        for (i64 i = 0; i < n; i += chunk)
            *out.at<i64>(i / chunk) =
                loops->leader_of(x.at<float>(i), n - i < chunk ? n - i : chunk);
    }
    Py_RETURN_NONE;
}

// accumulate_chunks(x, kept, chunk, sum, places): sum = x + kept, and the places of chunk_leaders.
// Returns the bits of the largest magnitude.
PyObject* accumulate_chunks(PyObject*, PyObject* args) {
    long long chunk;
    Buffer x, kept, sum, places;
    if (!PyArg_ParseTuple(args, "y*y*Lw*w*", &x.view, &kept.view, &chunk, &sum.view,
                          &places.view) ||
        !as_long(x, kept, "kept") || !as_long(x, sum, "sum"))
        return nullptr;
    const i64 n = floats_in(x);
    if (chunk < 1 || !has_length(places, "places", (n + chunk - 1) / chunk * (i64)sizeof(i64)))
        return PyErr_Occurred() ? nullptr : PyErr_Format(PyExc_ValueError, "chunk: %lld", chunk);
    u32 most = 0;
    {
        Unlocked unlocked;
        const i64 step = step_of(chunk);
        Written sums(chunk <= Written::ROOM ? n : 0);
        i64* place = places.at<i64>(0);
        for (i64 i = 0; i < n; i += step) {
            const i64 m = n - i < step ? n - i : step;
            float* to = sums.at(sum.at<float>(i));
            most = std::max(most, loops->accumulate(x.at<float>(i), kept.at<float>(i), 1, nullptr,
                                                    m, to, nullptr));
            for (i64 k = 0; k < m; k += chunk)
                *place++ = loops->leader_of(to + k, m - k < chunk ? m - k : chunk);
            sums.done(sum.at<float>(i), m);
        }
    }
    return PyLong_FromUnsignedLong(most);
}

// A matrix of n rows, with columns by its size, and count rows to multiply it by.
struct Matrix {
    i64 n, columns, count;
    bool read(const Buffer& m, long long rows) {
        n = rows, columns = rows > 0 ? floats_in(m) / rows : 0;
        return has_length(m, "m", n * columns * (i64)sizeof(float));
    }
    // firsts: rows of a values; seconds: as many rows of b values
    bool goes_with(const Buffer& firsts, i64 a, const Buffer& seconds, i64 b) {
        count = a ? floats_in(firsts) / a : 0;
        return has_length(firsts, "rows", count * a * (i64)sizeof(float)) &&
               has_length(seconds, "out", count * b * (i64)sizeof(float));
    }
};

PyObject* row_products(PyObject*, PyObject* args) {
    long long n;
    Buffer m, rows, out;
    Matrix is;
    if (!PyArg_ParseTuple(args, "Ly*y*w*", &n, &m.view, &rows.view, &out.view) || !is.read(m, n) ||
        !is.goes_with(rows, is.columns, out, n))
        return nullptr;
    {
        Unlocked unlocked;
        loops->row_products(m.at<float>(0), is.n, is.columns, rows.at<float>(0), is.count,
                            out.at<float>(0));
    }
    Py_RETURN_NONE;
}

PyObject* column_products(PyObject*, PyObject* args) {
    long long n;
    Buffer m, rows, out;
    Matrix is;
    if (!PyArg_ParseTuple(args, "Ly*y*w*", &n, &m.view, &rows.view, &out.view) || !is.read(m, n) ||
        !is.goes_with(rows, n, out, is.columns))
        return nullptr;
    {
        Unlocked unlocked;
        loops->column_products(m.at<float>(0), is.n, is.columns, rows.at<float>(0), is.count,
                               out.at<float>(0));
    }
    Py_RETURN_NONE;
}

// outer(n, firsts, seconds, out): the sum of products of columns and rows; see Loops.
PyObject* outer(PyObject*, PyObject* args) {
    long long n;
    u32 most = 0;
    Buffer out, firsts, seconds;
    Matrix is;
    if (!PyArg_ParseTuple(args, "Ly*y*w*", &n, &firsts.view, &seconds.view, &out.view) ||
        !is.read(out, n) || !is.goes_with(firsts, n, seconds, is.columns))
        return nullptr;
    {
        Unlocked unlocked;
        Written row(is.columns <= Written::ROOM ? floats_in(out) : 0);
        for (i64 i = 0; i < is.n; ++i) {
            float* to = out.at<float>(i * is.columns);
            const u32 found = loops->outer_row(firsts.at<float>(i), is.n, seconds.at<float>(0),
                                               is.count, is.columns, row.at(to));
            most = most < found ? found : most;
            row.done(to, is.columns);
        }
    }
    return PyLong_FromUnsignedLong(most);
}

// The encoding of integers of runs: codes of a cast in tiles, or five in a byte.
struct Codes {
    int bits, trits;
    i64 tile_bytes() const { return trits ? CPD_TRIT_BYTES : CPD_TILE / 8 * bits; }
    i64 bytes(i64 n) const { return tiles_of(n) * tile_bytes(); }
    bool are_sound(const char* name) const {
        if (2 <= bits && bits <= 16 && (bits == 2 || !trits)) return true;
        PyErr_Format(PyExc_ValueError, "%s: %d bits: must be 2..16, of trits 2", name, bits);
        return false;
    }
};

// encode_runs(threads, cast, trits, key, shift, x, each, ends, factor, payload): codes of x over
// the number of its run, times factor, with one shift for all.
PyObject* encode_runs(PyObject*, PyObject* args) {
    Cast cast;
    Codes codes;
    Key key;
    int threads, shift;
    float factor;
    Buffer x, payload;
    Runs runs;
    if (!PyArg_ParseTuple(args, "iO&pO&iy*y*y*fw*", &threads, to_cast, &cast, &codes.trits, to_key,
                          &key, &shift, &x.view, &runs.each.view, &runs.ends.view, &factor,
                          &payload.view) ||
        !runs.are_sound(floats_in(x), runs.each))
        return nullptr;
    codes.bits = width_of(cast);
    if (!codes.are_sound("encode_runs") ||
        !has_length(payload, "payload", codes.bytes(floats_in(x))))
        return nullptr;
    return in_blocks(threads, floats_in(x), [&](const Block& b) {
        float scaled[CPD_TILE];
        u32 words[2 * CPD_LANES];
        i64 at_run = runs.of(b.first);
        for (i64 i = b.first; i < b.first + b.n; i += CPD_TILE) {
            const i64 left = b.first + b.n - i, m = left < CPD_TILE ? left : CPD_TILE;
            u32 most = 0;
            each_run(runs, at_run, i, m, [&](i64 run, i64 first, i64 n) {
                float* to = scaled + (first - i);
                u32 found = loops->scale(true, x.at<float>(first), *runs.each.at<float>(run),
                                         __builtin_inff(), n, to);
                if (factor != 1) found = loops->scale(false, to, factor, 0, n, to);
                most = most < found ? found : most;
            });
            if (m < CPD_TILE) memset(scaled + m, 0, sizeof scaled - (size_t)m * sizeof(float));
            u8* to = payload.at<u8>(i / CPD_TILE * codes.tile_bytes());
            loops->encode_tile(cast, (u8)shift, most, key, i, scaled,
                               codes.trits ? words : (u32*)to, x.at<float>(i + CPD_TILE));
            if (codes.trits) loops->pack_trits(words, 1, to);
        }
    });
}

// mean_runs(threads, bits, trits, payloads, each, ends, divisor, out): out is the sum over
// payloads, in order, of their codes times the numbers of their runs, over divisor; each has the
// numbers of all payloads. Returns the bits of the largest magnitude.
PyObject* mean_runs(PyObject*, PyObject* args) {
    Codes codes;
    int threads;
    float divisor;
    Views payloads;
    Buffer out;
    Runs runs;
    if (!PyArg_ParseTuple(args, "iipO&y*y*fw*", &threads, &codes.bits, &codes.trits, to_views,
                          &payloads, &runs.each.view, &runs.ends.view, &divisor, &out.view) ||
        !codes.are_sound("mean_runs"))
        return nullptr;
    const i64 n = floats_in(out), count = (i64)payloads.all.size();
    if (!payloads.have_length("payloads", codes.bytes(n)) || !runs.are_sound(n, runs.each, count))
        return nullptr;
    std::atomic<u32> most{0};
    PyObject* done = in_blocks(threads, n, [&](const Block& b) {
        float spread[CPD_TILE] = {}, own[CPD_TILE];  // of a rank's runs; the sum
        u32 words[2 * CPD_LANES], largest = 0;
        const bool streams = n >= Written::LARGE;
        i64 before = runs.of(b.first), at_run = before;
        for (i64 i = b.first; i < b.first + b.n; i += CPD_TILE, before = at_run) {
            const i64 left = b.first + b.n - i, m = left < CPD_TILE ? left : CPD_TILE;
            memset(own, 0, sizeof own);
            for (i64 rank = 0; rank < count; ++rank) {
                const u8* came = payloads.at<u8>(rank, i / CPD_TILE * codes.tile_bytes());
                const float* numbers = runs.each.at<float>(rank * runs.count());
                at_run = before;
                each_run(runs, at_run, i, m, [&](i64 run, i64 first, i64 size) {
                    std::fill_n(spread + (first - i), size, numbers[run]);
                });
                if (codes.trits) loops->unpack_trits(came, 1, words);
                loops->add_levels(codes.bits, codes.trits ? words : (const u32*)came, spread, own);
            }
            float* to = streams ? own : out.at<float>(i);
            const u32 found = loops->scale(true, own, divisor, __builtin_inff(), m, to);
            largest = largest < found ? found : largest;
            if (streams)
                loops->stream_on((u8*)out.at<float>(i), (const u8*)own, m * (i64)sizeof(float));
        }
        if (streams) end_stream();
        raise_to(most, largest);
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyLong_FromUnsignedLong(most);
}

}  // namespace

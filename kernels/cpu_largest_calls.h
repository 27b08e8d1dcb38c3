// The module's functions for selection by magnitude, of an array or of the sums of a pass; a part
// of cpu_module.cpp, which includes it.

namespace {

// The k largest of n values are found in little more than one pass over them. A sample gives a
// magnitude that about k values exceed; one pass collects these, and the k-th is found among them.
// The result is exact for any sample: if fewer than k values exceed the magnitude, all values but
// zeros are collected.
const i64 SAMPLED = 4096;  // the sample has one line of each block of so many values
const i64 FEW = 8192;      // all of fewer values are collected
const double SPARE = 6;    // standard deviations by which a sample may be wrong
const i64 SOON_LINES = 8;  // of the sample, which are prefetched

u32 magnitude_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & CPD_MAGNITUDE;
}

// Values above a limit, with their places.
struct Above {
    std::vector<u32> places;
    std::vector<float> values;
};
typedef std::vector<Above> Blocks;  // of each block of a call, in order

i64 count_of(const Blocks& blocks) {
    size_t count = 0;
    for (const Above& each : blocks) count += each.places.size();
    return (i64)count;
}

// Room for those of a tile.
struct OfTile {
    u32 places[CPD_TILE + LINE];
    float values[CPD_TILE + LINE];
    i64 count = 0;
    void move_to(Above& all) const {
        all.places.insert(all.places.end(), places, places + count);
        all.values.insert(all.values.end(), values, values + count);
    }
};

// Calls body(block, values of the block) as in_blocks does.
template <class Work>
PyObject* collecting(int threads, i64 n, Blocks& blocks, const Work& body) {
    std::atomic<bool> full{false};
    blocks.assign((size_t)(n / (BLOCK_TILES * CPD_TILE) + 1), {});
    PyObject* done = in_blocks(threads, n, [&](const Block& b) {
        try {
            body(b, blocks[(size_t)(b.tile / BLOCK_TILES)]);
        } catch (const std::bad_alloc&) {
            full = true;
        }
    });
    if (done && full) {
        Py_DECREF(done);
        return PyErr_NoMemory();
    }
    return done;
}

PyObject* collect(int threads, const Buffer& x, u32 above, Blocks& blocks) {
    return collecting(threads, floats_in(x), blocks, [&](const Block& b, Above& all) {
        OfTile found;
        for (i64 i = b.first; i < b.first + b.n; i += CPD_TILE) {
            const i64 left = b.first + b.n - i, m = left < CPD_TILE ? left : CPD_TILE;
            found.count =
                loops->collect_tile(above, x.at<float>(i), m, (u32)i, found.places, found.values);
            found.move_to(all);
        }
    });
}

// Sums x + factor * kept, and if more and total are given total = sum + more.
struct Sums {
    int threads;
    float factor;
    Buffer x, kept, more, sum, total;
    // Parses the arguments threads, x, kept, factor, more, sum, total, and one or two more.
    bool parse(PyObject* args, const char* format, void* next, void* last = nullptr) {
        if (!PyArg_ParseTuple(args, format, &threads, &x.view, &kept.view, &factor, to_optional,
                              &more, &sum.view, to_optional_out, &total, next, last) ||
            !as_long(x, kept, "kept") || !as_long(x, more, "more") || !as_long(x, sum, "sum") ||
            !as_long(x, total, "total"))
            return false;
        if (!more.view.buf != !total.view.buf)
            PyErr_Format(PyExc_ValueError, "accumulate: more and total: must be given both");
        return !more.view.buf == !total.view.buf;
    }
    // Writes the sums, collects the values of the last one above some bits, and subtracts less from
    // the magnitudes of these; most: the bits of its largest magnitude before that.
    PyObject* write(u32 above, float less, Blocks& blocks, std::atomic<u32>& most) const {
        const i64 n = floats_in(x);
        return collecting(threads, n, blocks, [&](const Block& b, Above& all) {
            u32 largest = 0;
            Written sums(n), totals(n);
            OfTile found;
            for (i64 i = b.first; i < b.first + b.n; i += CPD_TILE) {
                const i64 left = b.first + b.n - i, m = left < CPD_TILE ? left : CPD_TILE;
                float *first = sums.at(sum.at<float>(i)), *second = totals.at(total.at<float>(i)),
                      *last = more.view.buf ? second : first;
                const u32 own =
                    above < CPD_MAGNITUDE
                        ? loops->accumulate_above(above, x.at<float>(i), kept.at<float>(i), factor,
                                                  more.at<float>(i), m, first, second, (u32)i,
                                                  found.places, found.values, &found.count)
                        : loops->accumulate(x.at<float>(i), kept.at<float>(i), factor,
                                            more.at<float>(i), m, first, second);
                largest = std::max(largest, own);
                if (less != 0)
                    for (i64 k = 0; k < found.count; ++k)
                        last[found.places[k] - i] -= copysignf(less, found.values[k]);
                found.move_to(all);
                sums.done(sum.at<float>(i), m);
                if (more.view.buf) totals.done(total.at<float>(i), m);
            }
            raise_to(most, largest);
        });
    }
    // The magnitudes of the last sum in the sample.
    void sample(std::vector<u32>& bits) const {
        const i64 lines = floats_in(x) / SAMPLED;
        auto expect = [&](i64 line) {
            const i64 at = std::min(line, lines - 1) * SAMPLED;
            for (const Buffer* each : {&x, &kept, &more})
                if (each->view.buf) __builtin_prefetch(each->at<float>(at));
        };
        for (i64 line = 0; line < std::min(lines, SOON_LINES); ++line) expect(line);
        for (i64 line = 0; line < lines; ++line) {
            const i64 at = line * SAMPLED;
            float one[LINE], two[LINE];
            expect(line + SOON_LINES);
            loops->accumulate(x.at<float>(at), kept.at<float>(at), factor, more.at<float>(at), LINE,
                              one, two);
            for (float each : more.view.buf ? two : one) bits.push_back(magnitude_bits(each));
        }
    }
};

// The k-th largest of some magnitudes, 1 <= k <= their number, which it puts in another order: one
// histogram leaves few of them.
u32 kth_largest(std::vector<u32>& bits, i64 k) {
    u32 least = CPD_MAGNITUDE, most = 0;
    for (u32 each : bits) least = std::min(least, each), most = std::max(most, each);
    int shift = 0;
    while ((most - least) >> shift >= CPD_BUCKETS) ++shift;
    i64 counts[CPD_BUCKETS] = {}, some = 0;
    for (u32 each : bits) ++counts[(each - least) >> shift];
    u32 bucket = (most - least) >> shift;
    for (; k > counts[bucket]; --bucket) k -= counts[bucket];
    for (u32 each : bits) bits[(size_t)some] = each, some += (each - least) >> shift == bucket;
    std::nth_element(bits.begin(), bits.begin() + k - 1, bits.begin() + some, std::greater<u32>());
    return bits[(size_t)k - 1];
}

// Bits that k of n values, or a few more, exceed, by the magnitudes of a sample of them.
u32 exceeded(i64 k, i64 n, std::vector<u32>& sample) {
    const double expected = (double)k * (double)sample.size() / (double)n;
    const i64 reach = (i64)(expected + SPARE * sqrt(expected)) + 1;
    if (n <= FEW || reach >= (i64)sample.size()) return 0;
    return std::max(kth_largest(sample, reach), 1u) - 1;
}

// The k largest of blocks, of equal ones the first, or all if there are fewer.
Above largest_of(const Blocks& blocks, i64 k) {
    std::vector<u32> bits;
    bits.reserve((size_t)count_of(blocks));
    for (const Above& each : blocks)
        for (float value : each.values) bits.push_back(magnitude_bits(value));
    k = std::min(k, (i64)bits.size());
    Above largest;
    if (!k) return largest;
    const u32 kth = (i64)bits.size() > k ? kth_largest(bits, k) : 0;
    i64 ties = k, count = 0;
    for (const Above& each : blocks)
        for (float value : each.values) ties -= magnitude_bits(value) > kth;
    largest.places.resize((size_t)k + 1), largest.values.resize((size_t)k + 1);
    for (const Above& each : blocks)
        for (size_t i = 0; i < each.values.size() && count < k; ++i) {
            const u32 own = magnitude_bits(each.values[i]);
            const bool is_tie = own == kth && ties > 0;
            largest.places[(size_t)count] = each.places[i];
            largest.values[(size_t)count] = each.values[i];
            ties -= is_tie, count += own > kth || is_tie;
        }
    largest.places.resize((size_t)k), largest.values.resize((size_t)k);
    return largest;
}

Above all_of(Blocks& blocks) {
    if ((i64)blocks[0].places.size() == count_of(blocks)) return std::move(blocks[0]);
    Above all;
    for (const Above& each : blocks) {
        all.places.insert(all.places.end(), each.places.begin(), each.places.end());
        all.values.insert(all.values.end(), each.values.begin(), each.values.end());
    }
    return all;
}

// accumulate(threads, x, kept, factor, more, sum, total, above, less): see Sums. Returns the bits
// of the largest magnitude of the last sum, and its indices and values with a magnitude above
// some bits, as bytearrays; then less is subtracted from the magnitudes of these.
PyObject* accumulate(PyObject*, PyObject* args) {
    unsigned above;
    float less;
    Sums sums;
    if (!sums.parse(args, "iy*y*fO&w*O&If", &above, &less)) return nullptr;
    try {
        Blocks blocks;
        std::atomic<u32> most{0};
        PyObject* done = sums.write(above, less, blocks, most);
        if (!done) return nullptr;
        Py_DECREF(done);
        const Above found = all_of(blocks);
        PyObject* both = both_bytes_of(found.places, found.values);
        return both ? Py_BuildValue("IN", (unsigned)most, both) : nullptr;
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

// accumulate_largest(threads, x, kept, factor, more, sum, total, k): the indices and values
// of the k largest of the last sum, as bytearrays; fewer if the sample was wrong.
PyObject* accumulate_largest(PyObject*, PyObject* args) {
    long long k;
    Sums sums;
    if (!sums.parse(args, "iy*y*fO&w*O&L", &k)) return nullptr;
    try {
        Blocks blocks;
        std::atomic<u32> most{0};
        std::vector<u32> sample;
        if (k > 0) sums.sample(sample);
        const u32 above = k > 0 ? exceeded(k, floats_in(sums.x), sample) : CPD_MAGNITUDE;
        PyObject* done = sums.write(above, 0, blocks, most);
        if (!done) return nullptr;
        Py_DECREF(done);
        const Above found = largest_of(blocks, k);
        return both_bytes_of(found.places, found.values);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

// largest(threads, x, k): the ascending indices and the values of the k largest magnitudes, of
// equal ones the first, without zeros, as bytearrays.
PyObject* largest(PyObject*, PyObject* args) {
    int threads;
    long long k;
    Buffer x;
    if (!PyArg_ParseTuple(args, "iy*L", &threads, &x.view, &k)) return nullptr;
    try {
        Blocks blocks;
        std::vector<u32> sample;
        const i64 n = floats_in(x);
        for (i64 line = 0; line < n / SAMPLED; ++line)
            for (i64 i = 0; i < LINE; ++i)
                sample.push_back(magnitude_bits(*x.at<float>(line * SAMPLED + i)));
        const u32 first = k > 0 ? exceeded(k, n, sample) : CPD_MAGNITUDE;
        for (u32 above : {first, 0u}) {
            PyObject* done = collect(threads, x, above, blocks);
            if (!done) return nullptr;
            Py_DECREF(done);
            if (!above || count_of(blocks) >= k) break;
        }
        const Above found = largest_of(blocks, k);
        return both_bytes_of(found.places, found.values);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
}

}  // namespace

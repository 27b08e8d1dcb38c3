// The module's functions for passes with sparse arrays; a part of cpu_module.cpp, which includes
// it.

namespace {

const i64 DENSE = 16;  // if one of so many values is summed, dividing all takes no more time

// Sparse arrays of n values, of several sources. Their places ascend, are distinct and below n.
struct Sources {
    Views places, values;
    i64 count(size_t source) const { return places.all[source].len / (i64)sizeof(u32); }
    bool are_sound(const char* name, i64 n) const {
        if (places.all.size() != values.all.size())
            return PyErr_Format(PyExc_ValueError, "%s: values: must be as many as indices", name),
                   false;
        for (size_t s = 0; s < places.all.size(); ++s) {
            if (places.all[s].len != values.all[s].len)
                return PyErr_Format(PyExc_ValueError, "%s: values: %zd bytes given, %zd needed",
                                    name, values.all[s].len, places.all[s].len),
                       false;
            if (!ascend(name, places.at<u32>((i64)s, 0), count(s), n)) return false;
        }
        return true;
    }
};

// The values of sources in consecutive places, part after part.
class PartialSums {
  public:
    PartialSums(const Sources& of, i64 first) : sources(of), next(of.places.all.size()) {
        for (size_t s = 0; s < next.size(); ++s) {
            const u32* begin = sources.places.at<u32>((i64)s, 0);
            next[s] = std::lower_bound(begin, begin + sources.count(s), first) - begin;
        }
    }
    // The first remaining place, or one beyond all sources.
    i64 place() const {
        i64 least = (i64)1 << 32;
        for (size_t s = 0; s < next.size(); ++s)
            if (next[s] < sources.count(s))
                least = std::min(least, (i64)*sources.places.at<u32>((i64)s, next[s]));
        return least;
    }
    // Adds the values at places first .. first + n - 1, in the order of sources, to sum.
    void add(i64 first, i64 n, float* sum) {
        before = next;
        for (size_t s = 0; s < next.size(); ++s) {
            const u32* places = sources.places.at<u32>((i64)s, 0);
            const float* values = sources.values.at<float>((i64)s, 0);
            const i64 end = sources.count(s);
            i64 i = next[s];
            for (; i < end && (i64)places[i] < first + n; ++i) sum[places[i] - first] += values[i];
            next[s] = i;
        }
    }
    // Calls body for each place that was added to last, of several sources several times: a search
    // for bits in words would mispredict the end of most words.
    template <class Work>
    void each(const Work& body) const {
        for (size_t s = 0; s < next.size(); ++s) {
            const u32* places = sources.places.at<u32>((i64)s, 0);
            for (i64 i = before[s]; i < next[s]; ++i) body((i64)places[i]);
        }
    }

  private:
    const Sources& sources;
    std::vector<i64> next, before;  // of each source: number of places that are done
};

// mean_places(threads, places, values, divisor, out): out is the sum of the sources' values at a
// place, in their order from 0 on, over divisor; places and values: tuples of each. Returns the
// bits of the largest magnitude. A power of two is multiplied by its inverse, which takes less
// time.
PyObject* mean_places(PyObject*, PyObject* args) {
    int threads;
    float divisor;
    Sources sources;
    Buffer out;
    if (!PyArg_ParseTuple(args, "iO&O&fw*", &threads, to_views, &sources.places, to_views,
                          &sources.values, &divisor, &out.view) ||
        !sources.are_sound("mean_places", floats_in(out)))
        return nullptr;
    const i64 n = floats_in(out);
    i64 count = 0;
    for (size_t s = 0; s < sources.places.all.size(); ++s) count += sources.count(s);
    int exponent;
    const bool is_exact = frexpf(divisor, &exponent) == 0.5f && 0 < exponent && exponent < 100;
    const bool is_dense = DENSE * count > n;
    const float by = is_exact ? 1 / divisor : divisor;
    std::atomic<u32> most{0};
    std::atomic<bool> full{false};
    PyObject* done = in_blocks(threads, n, [&](const Block& b) {
        try {
            PartialSums sums(sources, b.first);
            Written values(n);
            float own[STEP] = {};  // the sums of a step; zeros before it
            u32 largest = 0;
            if (values.streams) memset(values.own, 0, sizeof values.own);
            for (i64 i = b.first; i < b.first + b.n; i += STEP) {
                const i64 left = b.first + b.n - i, m = left < STEP ? left : STEP;
                float* to = values.at(out.at<float>(i));
                if (is_dense || !values.streams) memset(to, 0, (size_t)m * sizeof(float));
                sums.add(i, m, is_dense ? to : own);
                if (is_dense)
                    largest = std::max(
                        largest, divisor == 1
                                     ? loops->largest_of(to, m)
                                     : loops->scale(!is_exact, to, by, __builtin_inff(), m, to));
                else
                    sums.each([&](i64 place) {
                        const float sum = own[place - i], mean = is_exact ? sum * by : sum / by;
                        to[place - i] = mean;
                        largest = std::max(largest, magnitude_bits(mean));
                    });
                values.done(out.at<float>(i), m);
                if (is_dense) continue;
                sums.each([&](i64 place) { own[place - i] = 0; });
                if (values.streams) sums.each([&](i64 place) { to[place - i] = 0; });
            }
            raise_to(most, largest);
        } catch (const std::bad_alloc&) {
            full = true;
        }
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return full ? PyErr_NoMemory() : PyLong_FromUnsignedLong(most);
}

// merge_places(n, places, values): the places of the sums of sources, as above, that are not 0, and
// these sums, as bytearrays.
PyObject* merge_places(PyObject*, PyObject* args) {
    long long n;
    Sources sources;
    if (!PyArg_ParseTuple(args, "LO&O&", &n, to_views, &sources.places, to_views,
                          &sources.values) ||
        !sources.are_sound("merge_places", n))
        return nullptr;
    std::vector<u32> places;
    std::vector<float> values;
    try {
        Unlocked unlocked;
        i64 most = 0, count = 0;
        for (size_t s = 0; s < sources.places.all.size(); ++s) most += sources.count(s);
        places.resize((size_t)(std::min(most, (i64)n) + LINE)), values.resize(places.size());
        PartialSums sums(sources, 0);
        const i64 few = 256;  // most of them have a place, and a search of them takes little time
        for (i64 at = sums.place(); at < n; at = sums.place()) {
            const i64 first = at / few * few;
            float sum[few] = {};
            sums.add(first, few, sum);
            count += loops->collect_tile(0, sum, few, (u32)first, &places[(size_t)count],
                                         &values[(size_t)count]);
        }
        places.resize((size_t)count), values.resize((size_t)count);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    return both_bytes_of(places, values);
}

// pairs_at(words, places, values): the places, which are below 32 for each word, that have a bit
// there, and their values, as bytearrays.
PyObject* pairs_at(PyObject*, PyObject* args) {
    Buffer words, places, values;
    if (!PyArg_ParseTuple(args, "y*y*y*", &words.view, &places.view, &values.view) ||
        !has_length(values, "values", places.view.len) ||
        !ascends("pairs_at", places, 32 * words_in(words)))
        return nullptr;
    std::vector<u32> lie;
    std::vector<float> own;
    try {
        Unlocked unlocked;
        const i64 n = words_in(places);
        i64 count = 0;
        lie.resize((size_t)n + 1), own.resize((size_t)n + 1);
        for (i64 i = 0; i < n; ++i) {
            const u32 place = *places.at<u32>(i);
            lie[(size_t)count] = place, own[(size_t)count] = *values.at<float>(i);
            count += *words.at<u32>(place / 32) >> place % 32 & 1;
        }
        lie.resize((size_t)count), own.resize((size_t)count);
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    return both_bytes_of(lie, own);
}

// Places of n values that are marked by a bit each: bit i % 32 of word i / 32.
struct Marks {
    Buffer words;
    std::vector<i64> starts;  // of each block, the number of places before it
    // Whether there are a bit for each of n places, none beyond, and a value for each place.
    bool are_sound(i64 n, const Buffer& values) {
        if (!has_length(words, "words", (n + 31) / 32 * (i64)sizeof(u32))) return false;
        std::vector<u32> bits((size_t)word_tiles(words));
        i64 count = 0;
        loops->count_bits(words.at<u32>(0), words_in(words), bits.data());
        for (size_t tile = 0; tile < bits.size(); count += bits[tile++])
            if (tile % BLOCK_TILES == 0) starts.push_back(count);
        if (n % 32 && *words.at<u32>(n / 32) >> n % 32)
            return PyErr_Format(PyExc_ValueError, "words: bits beyond value %lld", (long long)n),
                   false;
        return has_length(values, "values", count * (i64)sizeof(float));
    }
    i64 before(const Block& b) const {
        return starts.empty() ? 0 : starts[(size_t)(b.tile / BLOCK_TILES)];
    }
    const u32* at(i64 i) const { return words.at<u32>(i / 32); }
};

// accumulate_taking(threads, x, kept, sum, words, values): sum = x + kept, but 0 at the marked
// places, whose sums go to values. Returns the bits of the largest magnitude of all sums.
PyObject* accumulate_taking(PyObject*, PyObject* args) {
    int threads;
    Marks marks;
    Buffer x, kept, sum, values;
    if (!PyArg_ParseTuple(args, "iy*y*w*y*w*", &threads, &x.view, &kept.view, &sum.view,
                          &marks.words.view, &values.view) ||
        !as_long(x, kept, "kept") || !as_long(x, sum, "sum") ||
        !marks.are_sound(floats_in(x), values))
        return nullptr;
    const i64 n = floats_in(x);
    std::atomic<u32> most{0};
    PyObject* done = in_blocks(threads, n, [&](const Block& b) {
        float *taken = values.at<float>(marks.before(b)), own[CPD_TILE + LINE];
        u32 largest = 0;
        Written sums(n);
        for (i64 i = b.first; i < b.first + b.n; i += CPD_TILE) {
            const i64 left = b.first + b.n - i, m = left < CPD_TILE ? left : CPD_TILE;
            float* to = sums.at(sum.at<float>(i));
            largest = std::max(largest, loops->accumulate(x.at<float>(i), kept.at<float>(i), 1,
                                                          nullptr, m, to, nullptr));
            const i64 count = loops->take_marked(marks.at(i), to, m, own);
            memcpy(taken, own, (size_t)count * sizeof(float)), taken += count;
            sums.done(sum.at<float>(i), m);
        }
        raise_to(most, largest);
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyLong_FromUnsignedLong(most);
}

// put_marked(threads, words, values, out): out = values at the marked places, and 0 elsewhere.
PyObject* put_marked(PyObject*, PyObject* args) {
    int threads;
    Marks marks;
    Buffer values, out;
    if (!PyArg_ParseTuple(args, "iy*y*w*", &threads, &marks.words.view, &values.view, &out.view) ||
        !marks.are_sound(floats_in(out), values))
        return nullptr;
    const i64 n = floats_in(out);
    return in_blocks(threads, n, [&](const Block& b) {
        const float* next = values.at<float>(marks.before(b));
        Written numbers(n);
        for (i64 i = b.first; i < b.first + b.n; i += CPD_TILE) {
            const i64 left = b.first + b.n - i, m = left < CPD_TILE ? left : CPD_TILE;
            float* to = numbers.at(out.at<float>(i));
            next += loops->put_marked(marks.at(i), next, m, to);
            numbers.done(out.at<float>(i), m);
        }
    });
}

__extension__ typedef unsigned __int128 Wide;

// Philox 4x64 of 10 rounds, as NumPy has it. Source: Salmon et al.: Parallel random numbers: as
// easy as 1, 2, 3, SC 2011.
struct Philox {
    u64 low, high;  // the key
    void draw(u64 counter, u64* four) const {
        u64 a = counter, b = 0, c = 0, d = 0, first = low, second = high;
        for (int round = 0; round < 10; ++round) {
            const Wide by_a = (Wide)a * 0xd2e7470ee14c6c93, by_c = (Wide)c * 0xca5a826395121157;
            a = (u64)(by_c >> 64) ^ b ^ first, b = (u64)by_c;
            c = (u64)(by_a >> 64) ^ d ^ second, d = (u64)by_a;
            first += 0x9e3779b97f4a7c15, second += 0xbb67ae8584caa73b;
        }
        four[0] = a, four[1] = b, four[2] = c, four[3] = d;
    }
};

// mark_drawn(low, high, count, n, words): sets bits of words until count of n are set, those of
// Philox's numbers modulo n.
PyObject* mark_drawn(PyObject*, PyObject* args) {
    unsigned long long low, high;
    long long count, n;
    Buffer words;
    if (!PyArg_ParseTuple(args, "KKLLw*", &low, &high, &count, &n, &words.view) ||
        !has_length(words, "words", (n + 31) / 32 * (i64)sizeof(u32)))
        return nullptr;
    if (count < 0 || count > n) return PyErr_Format(PyExc_ValueError, "count: must be 0..n");
    const Philox stream = {low, high};
    {
        Unlocked unlocked;
        memset(words.view.buf, 0, (size_t)words.view.len);
        u32* const marks = words.at<u32>(0);
        const u64 each = (u64)n, inverse = each ? ~(u64)0 / each : 0;
        u64 places[512], counter = 0;  // so that marks need not wait for the numbers
        for (i64 left = count; left > 0;) {
            const i64 m = std::min((left + 3) / 4 * 4, (i64)512);
            for (i64 k = 0; k < m; k += 4) {
                stream.draw(++counter, places + k);
                for (u64* place = places + k; place < places + k + 4; ++place) {
                    *place -= (u64)((Wide)*place * inverse >> 64) * each;  // or the quotient - 1
                    *place -= each & (0 - (u64)(*place >= each));
                }
            }
            for (i64 k = 0; k < m && left > 0; ++k) {
                u32& word = marks[places[k] / 32];
                const int bit = (int)(places[k] % 32);
                left -= 1 ^ (word >> bit & 1), word |= 1u << bit;
            }
        }
    }
    Py_RETURN_NONE;
}

// take(threads, x, places, values): values = x[places], which become 0.
PyObject* take(PyObject*, PyObject* args) {
    int threads;
    Buffer x, places, values;
    if (!PyArg_ParseTuple(args, "iw*y*w*", &threads, &x.view, &places.view, &values.view) ||
        !has_length(values, "values", places.view.len) || !ascends("take", places, floats_in(x)))
        return nullptr;
    return in_blocks(threads, words_in(places), [&](const Block& b) {
        float *from = x.at<float>(0), *to = values.at<float>(b.first);
        each_place(from, places.at<u32>(b.first), b.n, [&](i64 i, float& x) { to[i] = x, x = 0; });
    });
}

}  // namespace

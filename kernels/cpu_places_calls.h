// The module's functions for passes with sparse arrays; a part of cpu_module.cpp, which includes
// it.

namespace {

const i64 DENSE = 8;  // if one of so many values is summed, dividing all takes no more time

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
    // Writes the sums at places first .. first + n - 1, in the order of sources from 0 on, into
    // sum, and with NOTES records their places for each. n: STEP at most
    template <bool NOTES>
    void add(i64 first, i64 n, float* sum) {
        memset(sum, 0, (size_t)n * sizeof(float));
        for (size_t s = 0; s < next.size(); ++s) {
            const u32* places = sources.places.at<u32>((i64)s, 0);
            const float* values = sources.values.at<float>((i64)s, 0);
            const i64 end = sources.count(s);
            i64 i = next[s];
            for (; i < end && (i64)places[i] < first + n; ++i) {
                const u32 k = (u32)(places[i] - first);
                sum[k] += values[i];
                if (NOTES) marks[k / 64] |= (u64)1 << k % 64;
            }
            next[s] = i;
        }
    }
    // The number of remaining values of sources before a place.
    i64 left_before(i64 end) const {
        i64 count = 0;
        for (size_t s = 0; s < next.size(); ++s) {
            const u32* begin = sources.places.at<u32>((i64)s, 0);
            count += std::lower_bound(begin + next[s], begin + sources.count(s), end) - begin;
            count -= next[s];
        }
        return count;
    }
    // Calls body(k) for each place first + k of the last add; once.
    template <class Work>
    void each(const Work& body) {
        for (i64 w = 0; w < STEP / 64; ++w) {
            u64 bits = marks[w];
            for (marks[w] = 0; bits; bits &= bits - 1) body(64 * w + __builtin_ctzll(bits));
        }
    }

  private:
    const Sources& sources;
    std::vector<i64> next;  // of each source: number of places that are done
    u64 marks[STEP / 64] = {};
};

u32 magnitude_bits(float x) {
    u32 bits;
    memcpy(&bits, &x, sizeof bits);
    return bits & CPD_MAGNITUDE;
}

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
    int exponent;
    const bool is_exact = frexpf(divisor, &exponent) == 0.5f && 0 < exponent && exponent < 100;
    std::atomic<u32> most{0};
    std::atomic<bool> full{false};
    PyObject* done = in_blocks(threads, n, [&](const Block& b) {
        try {
            PartialSums sums(sources, b.first);
            Written values(n);
            u32 largest = 0;
            for (i64 i = b.first; i < b.first + b.n; i += STEP) {
                const i64 left = b.first + b.n - i, m = left < STEP ? left : STEP;
                float* sum = values.at(out.at<float>(i));
                if (is_exact || DENSE * sums.left_before(i + m) > m) {
                    sums.add<false>(i, m, sum);
                    const float by = is_exact ? 1 / divisor : divisor;
                    largest = std::max(
                        largest, divisor == 1
                                     ? loops->largest_of(sum, m)
                                     : loops->scale(!is_exact, sum, by, __builtin_inff(), m, sum));
                } else {
                    sums.add<true>(i, m, sum);
                    sums.each([&](i64 k) {
                        sum[k] /= divisor;
                        largest = std::max(largest, magnitude_bits(sum[k]));
                    });
                }
                values.done(out.at<float>(i), m);
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
        PartialSums sums(sources, 0);
        float sum[STEP];
        for (i64 at = sums.place(); at < n; at = sums.place()) {
            const i64 first = at / STEP * STEP;
            sums.add<true>(first, STEP, sum);
            sums.each([&](i64 k) {
                if (sum[k] == 0) return;
                places.push_back((u32)(first + k));
                values.push_back(sum[k]);
            });
        }
    } catch (const std::bad_alloc&) {
        return PyErr_NoMemory();
    }
    return both_bytes_of(places, values);
}

// accumulate_taking(threads, x, kept, sum, places, values): sum = x + kept, but 0 at some places,
// whose sums go to values. Returns the bits of the largest magnitude of all sums.
PyObject* accumulate_taking(PyObject*, PyObject* args) {
    int threads;
    Buffer x, kept, sum, places, values;
    if (!PyArg_ParseTuple(args, "iy*y*w*y*w*", &threads, &x.view, &kept.view, &sum.view,
                          &places.view, &values.view) ||
        !as_long(x, kept, "kept") || !as_long(x, sum, "sum") ||
        !has_length(values, "values", places.view.len) ||
        !ascends("accumulate_taking", places, floats_in(x)))
        return nullptr;
    const i64 n = floats_in(x), count = words_in(places);
    const u32* const place = places.at<u32>(0);
    float* const taken = values.at<float>(0);
    std::atomic<u32> most{0};
    PyObject* done = in_blocks(threads, n, [&](const Block& b) {
        i64 k = std::lower_bound(place, place + count, b.first) - place;
        u32 largest = 0;
        Written sums(n);
        for (i64 i = b.first; i < b.first + b.n; i += STEP) {
            const i64 left = b.first + b.n - i, m = left < STEP ? left : STEP;
            float* to = sums.at(sum.at<float>(i));
            largest = std::max(largest, loops->accumulate(x.at<float>(i), kept.at<float>(i), 1,
                                                          nullptr, m, to, nullptr));
            const i64 end = std::lower_bound(place + k, place + count, i + m) - place;
            for (; k < end; ++k) taken[k] = to[place[k] - i], to[place[k] - i] = 0;
            sums.done(sum.at<float>(i), m);
        }
        raise_to(most, largest);
    });
    if (!done) return nullptr;
    Py_DECREF(done);
    return PyLong_FromUnsignedLong(most);
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
        const u32* at = places.at<u32>(b.first);
        for (i64 i = 0; i < b.n; ++i) to[i] = from[at[i]], from[at[i]] = 0;
    });
}

}  // namespace

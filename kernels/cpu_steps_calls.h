// The module's function for optimisers' steps; a part of cpu_module.cpp, which includes it.
// Layers are processed in groups that fit in a cache: sums over a group's values, then its steps.
#include "steps.h"

namespace {

const i64 GROUP = 1 << 16;  // values, of up to 4 arrays of 4 bytes: 1 MiB

// Consecutive values that one thread works on: rows of a layer, or a part of one row.
struct Piece {
    size_t layer;
    i64 row, rows, first, n;  // first, n: within a row
    size_t sums;              // place of the first row's
};

struct StepLayer {
    float *w, *m, *v;
    const float* g;
    i64 rows, row;  // number of rows, and of values of each
    bool has_units;
    LayerNumbers* numbers;
    size_t sums;
    Momentum momentum;  // computed from its sums
    Moments moments;
    std::vector<LayerMove> moves;  // one for all rows, or each

    bool has_sums(int rule) const {
        if (rule == CPD_LARS || rule == CPD_LARC) return numbers->adapts;
        return true;
    }
    i64 parts() const { return (row + CPD_PART - 1) / CPD_PART; }  // of a row
};

class LayerSteps {
  public:
    std::vector<StepLayer> layers;
    int rule;

    explicit LayerSteps(int which) : rule(which) {}

    // all: helpers, or null.
    void run(int threads, Helpers* all) {
        i64 limit = threads > 1 ? threads * SHARED_TILES * CPD_TILE / 2 : GROUP, values = 0;
        size_t first = 0;
        for (size_t i = 0; i < layers.size(); ++i) {
            i64 n = layers[i].rows * layers[i].row;
            if (n >= limit && values) run_group(first, i, threads, all), first = i, values = 0;
            values += n;
            if (values >= limit) run_group(first, i + 1, threads, all), first = i + 1, values = 0;
        }
        if (values) run_group(first, layers.size(), threads, all);
    }

  private:
    std::vector<Piece> pieces;
    std::vector<LayerSums> sums;

    void run_group(size_t first, size_t end, int threads, Helpers* all) {
        pieces.clear();
        i64 values = 0;
        size_t places = 0;
        for (size_t i = first; i < end; ++i) {
            cut(i, places);
            values += layers[i].rows * layers[i].row;
        }
        sums.resize(places);
        Helpers* shared = values >= SHARED_TILES * CPD_TILE ? all : nullptr;
        each_piece(threads, shared, [this](const Piece& p) { sum(p); });
        for (size_t i = first; i < end; ++i) finish(layers[i]);
        each_piece(threads, shared, [this](const Piece& p) { step(p); });
    }

    void cut(size_t number, size_t& places) {
        StepLayer& l = layers[number];
        l.sums = places;
        places += (size_t)(l.rows * l.parts());
        i64 together = l.row < CPD_PART ? CPD_PART / l.row : 1;
        for (i64 row = 0; row < l.rows; row += together)
            for (i64 part = 0; part < l.parts(); ++part) {
                i64 at = part * CPD_PART, left = l.row - at;
                pieces.push_back({number, row, l.rows - row < together ? l.rows - row : together,
                                  at, left < CPD_PART ? left : CPD_PART,
                                  l.sums + (size_t)(row * l.parts() + part)});
            }
    }

    // A piece counts as a block of values, the unit that threads share.
    template <class Work>
    void each_piece(int threads, Helpers* all, const Work& work) {
        const i64 task = BLOCK_TILES * CPD_TILE, n = (i64)pieces.size() * task;
        auto body = [&](const Block& b) {
            for (i64 i = b.first / task; i < (b.first + b.n) / task; ++i) work(pieces[(size_t)i]);
        };
        if (all)
            all->run(threads, n, std::cref(body));
        else
            body(Block{0, 0, n});
    }

    void sum(const Piece& p) {
        const StepLayer& l = layers[p.layer];
        if (!l.has_sums(rule)) return;
        for (i64 r = 0; r < p.rows; ++r) {
            i64 at = (p.row + r) * l.row + p.first;
            LayerSums* target = &sums[p.sums + (size_t)(r * l.parts())];
            if (rule == CPD_LAMB)
                loops->lamb_sums(l.moments, (float)l.numbers->decay, l.w + at, l.g + at, l.m + at,
                                 l.v + at, p.n, target);
            else if (rule == CPD_ADAMP)
                loops->adamp_sums(l.moments, l.w + at, l.g + at, l.m + at, l.v + at, p.n, target);
            else
                loops->square_sums(l.w + at, l.g + at, p.n, target);
        }
    }

    static void add(LayerSums& to, const LayerSums& x) {
        to.weights += x.weights, to.gradients += x.gradients;
        to.both += x.both, to.steps += x.steps;
    }

    void finish(StepLayer& l) {
        LayerSums* of_rows = sums.data() + l.sums;
        LayerSums all = {};
        for (i64 row = 0; row < l.rows; ++row) {
            LayerSums total = {};
            if (l.has_sums(rule))
                for (i64 part = 0; part < l.parts(); ++part)
                    add(total, of_rows[row * l.parts() + part]);
            of_rows[row] = total;  // overwrites only parts that have been added
            add(all, total);
        }
        if (rule == CPD_LARS) l.momentum = lars_of(*l.numbers, all);
        if (rule == CPD_LARC) l.momentum = larc_of(*l.numbers, all);
        if (rule == CPD_NOVOGRAD) l.momentum = novograd_of(*l.numbers, all);
        if (rule == CPD_LAMB) l.moves.assign(1, lamb_of(*l.numbers, all));
        if (rule == CPD_ADAMP) project(l, of_rows, all);
    }

    void project(StepLayer& l, const LayerSums* of_rows, const LayerSums& all) {
        const LayerNumbers& of = *l.numbers;
        const bool may = of.adapts && l.has_units;
        bool rows = may;
        for (i64 row = 0; rows && row < l.rows; ++row) rows = is_free(of, of_rows[row], l.row);
        bool whole = !rows && may && is_free(of, all, l.rows * l.row);
        if (!rows) return l.moves.assign(1, adamp_of(of, all, whole));
        l.moves.clear();
        for (i64 row = 0; row < l.rows; ++row) l.moves.push_back(adamp_of(of, of_rows[row], true));
    }

    void step(const Piece& p) {
        const StepLayer& l = layers[p.layer];
        i64 at = p.row * l.row + p.first;
        if (rule != CPD_LAMB && rule != CPD_ADAMP)
            return loops->momentum_step(l.momentum, l.w + at, l.g + at, l.m + at, p.rows * p.n);
        bool apart = l.moves.size() > 1;
        i64 n = apart ? p.n : p.rows * p.n, count = apart ? p.rows : 1;
        for (i64 r = 0; r < count; ++r, at += n)
            loops->move_weights(l.moments, l.moves[apart ? (size_t)(p.row + r) : 0], l.w + at,
                                l.m + at, l.v + at, n);
    }
};

// The arrays of all layers, released at the end.
struct Arrays {
    std::vector<Py_buffer> views;
    ~Arrays() {
        for (Py_buffer& view : views) PyBuffer_Release(&view);
    }
    // Of float32 or None. Returns false with an error set for others.
    bool add(PyObject* object, int flags) {
        Py_buffer view = {};
        if (object != Py_None && PyObject_GetBuffer(object, &view, flags)) return false;
        views.push_back(view);
        if (!view.buf || !strcmp(view.format ? view.format : "", "f")) return true;
        PyErr_Format(PyExc_TypeError, "step_layers: format %s given, float32 needed",
                     view.format ? view.format : "B");
        return false;
    }
};

bool take_layers(PyObject* list, const Buffer& rows, const Buffer& numbers, Arrays& arrays,
                 LayerSteps& steps) {
    const Py_ssize_t count = PyList_Size(list) / 4;
    arrays.views.reserve((size_t)count * 4);
    if (!has_length(rows, "rows", count * 8) ||
        !has_length(numbers, "numbers", count * (i64)sizeof(LayerNumbers)))
        return false;
    const bool moments = steps.rule == CPD_LAMB || steps.rule == CPD_ADAMP;
    for (Py_ssize_t i = 0; i < count; ++i) {
        for (int which = 0; which < 4; ++which) {
            int flags = which == 1 ? PyBUF_FORMAT : PyBUF_FORMAT | PyBUF_WRITABLE;
            if (!arrays.add(PyList_GetItem(list, 4 * i + which), flags)) return false;
        }
        const Py_buffer* of = &arrays.views[(size_t)(4 * i)];
        const i64 n = (i64)of->len / (i64)sizeof(float);
        const i64 count = steps.rule == CPD_ADAMP && *rows.at<i64>(i) ? *rows.at<i64>(i) : 1;
        bool fits = of[1].len == of->len && n > 0 && count > 0 && n % count == 0 &&
                    of[2].len == of->len && (!moments || of[3].len == of->len);
        if (!fits) {
            PyErr_Format(PyExc_ValueError, "layers: layer %zd: arrays or rows do not fit", i);
            return false;
        }
        StepLayer l = {};
        l.w = (float*)of[0].buf, l.g = (const float*)of[1].buf;
        l.m = (float*)of[2].buf, l.v = (float*)of[3].buf;
        l.rows = count, l.row = n / count;
        l.has_units = *rows.at<i64>(i) > 0;
        l.numbers = numbers.at<LayerNumbers>(i);
        l.moments = moments_of(*l.numbers);
        steps.layers.push_back(l);
    }
    return true;
}

// step_layers(threads, rule, arrays, rows, numbers): arrays: w, g, m, v of each layer, one after
// the other, in a list. Writes w, m, v, and norms among the numbers.
PyObject* step_layers(PyObject*, PyObject* args) {
    int threads, rule;
    PyObject* list;
    Buffer rows, numbers;
    if (!PyArg_ParseTuple(args, "iiO!y*w*", &threads, &rule, &PyList_Type, &list, &rows.view,
                          &numbers.view))
        return nullptr;
    if (rule < 0 || rule >= CPD_RULES || PyList_Size(list) % 4)
        return PyErr_Format(PyExc_ValueError, "step_layers: unknown rule, or not 4 arrays a layer");
    if (recording) return PyErr_Format(PyExc_RuntimeError, "record: this kernel cannot be");
    Arrays arrays;
    LayerSteps steps(rule);
    if (!take_layers(list, rows, numbers, arrays, steps)) return nullptr;
    Helpers* all = nullptr;
    if (threads > 1) {
        all = &helpers();
        try {
            all->start(threads - 1);
        } catch (const std::system_error& error) {
            return PyErr_Format(PyExc_RuntimeError, "threads: %d asked for: %s", threads,
                                error.what());
        }
    }
    {
        Unlocked unlocked;
        steps.run(threads, all);
    }
    Py_RETURN_NONE;
}

}  // namespace

// The module's functions for exact sums; a part of cpu_module.cpp, which includes it.
namespace {

int width_of(const Cast& cast, int bits) { return bits ? bits : 1 + cast.exp + cast.man; }

bool has_integers(const Buffer& words, const char* name, i64 tiles, const Cast& cast, int bits) {
    return (bits == 0 || is_width(bits)) &&
           has_length(words, name, tiles * (CPD_TILE / 8) * width_of(cast, bits));
}

PyObject* add_integers_tiles(PyObject*, PyObject* args) {
    Cast cast;
    int bits_a, bits_b, bits;
    Buffer a, b, words;
    if (!PyArg_ParseTuple(args, "O&y*iy*iw*i", to_cast, &cast, &a.view, &bits_a, &b.view, &bits_b,
                          &words.view, &bits) ||
        !is_width(bits))
        return nullptr;
    i64 tiles = words.view.len / (CPD_TILE / 8 * bits);
    if (!has_integers(words, "words", tiles, cast, bits) ||
        !has_integers(a, "a", tiles, cast, bits_a) || !has_integers(b, "b", tiles, cast, bits_b))
        return nullptr;
    {
        Unlocked unlocked;
        loops->add_integers_tiles(cast, a.as<u32>(), bits_a, b.as<u32>(), bits_b, tiles,
                                  words.as<u32>(), bits);
    }
    Py_RETURN_NONE;
}

PyObject* add_encode_integers_tiles(PyObject*, PyObject* args) {
    Cast cast;
    Key key;
    unsigned long long offset;
    int bits_in, bits;
    Buffer words_in, shifts, x, words, counts;
    if (!PyArg_ParseTuple(args, "O&O&Ky*iy*y*w*i|w*", to_cast, &cast, to_key, &key, &offset,
                          &words_in.view, &bits_in, &shifts.view, &x.view, &words.view, &bits,
                          &counts.view) ||
        !is_width(bits))
        return nullptr;
    i64 n = floats_in(x);
    if (!has_integers(words_in, "words_in", tiles_of(n), cast, bits_in) ||
        !has_tiles(words, shifts, n, bits) || !has_counts(counts, n))
        return nullptr;
    {
        Unlocked unlocked;
        loops->add_encode_integers_tiles(cast, key, offset, words_in.as<u32>(), bits_in,
                                         shifts.as<u8>(), x.as<float>(), n, words.as<u32>(), bits,
                                         counts.as<u32>());
    }
    Py_RETURN_NONE;
}

PyObject* decode_integers_tiles(PyObject*, PyObject* args) {
    Cast cast;
    int bits;
    Buffer words, shifts, out;
    if (!PyArg_ParseTuple(args, "O&y*iy*w*", to_cast, &cast, &words.view, &bits, &shifts.view,
                          &out.view) ||
        !(bits == 0 || is_width(bits)) ||
        !has_tiles(words, shifts, floats_in(out), width_of(cast, bits)))
        return nullptr;
    i64 nonfinite;
    {
        Unlocked unlocked;
        nonfinite = loops->decode_integers_tiles(cast, words.as<u32>(), bits, shifts.as<u8>(),
                                                 out.as<float>(), floats_in(out));
    }
    return PyLong_FromLongLong(nonfinite);
}

const i64 TERNARY_BYTES = 2 * CPD_TILE / 8;  // of a tile of 2-bit codes

PyObject* pack_trits(PyObject*, PyObject* args) {
    Buffer words, trits;
    if (!PyArg_ParseTuple(args, "y*w*", &words.view, &trits.view)) return nullptr;
    i64 tiles = trits.view.len / CPD_TRIT_BYTES;
    if (!has_length(trits, "trits", tiles * CPD_TRIT_BYTES) ||
        !has_length(words, "words", tiles * TERNARY_BYTES))
        return nullptr;
    {
        Unlocked unlocked;
        loops->pack_trits(words.as<u32>(), tiles, trits.as<u8>());
    }
    Py_RETURN_NONE;
}

PyObject* unpack_trits(PyObject*, PyObject* args) {
    Buffer trits, words;
    if (!PyArg_ParseTuple(args, "y*w*", &trits.view, &words.view)) return nullptr;
    i64 tiles = trits.view.len / CPD_TRIT_BYTES;
    if (!has_length(trits, "trits", tiles * CPD_TRIT_BYTES) ||
        !has_length(words, "words", tiles * TERNARY_BYTES))
        return nullptr;
    {
        Unlocked unlocked;
        loops->unpack_trits(trits.as<u8>(), tiles, words.as<u32>());
    }
    Py_RETURN_NONE;
}

}  // namespace

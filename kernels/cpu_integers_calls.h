// The module's functions for exact sums; a part of cpu_module.cpp, which includes it.
namespace {

// bits: of integers; 0: codes of the cast
i64 width_of(const Cast& cast, int bits) { return bits ? bits : width_of(cast); }

bool has_integers(const Buffer& words, const char* name, i64 tiles, const Cast& cast, int bits) {
    return (bits == 0 || is_width(bits)) && has_words(words, name, tiles, width_of(cast, bits));
}

PyObject* add_integers_tiles(PyObject*, PyObject* args) {
    Cast cast;
    int threads, bits_a, bits_b, bits;
    Buffer a, b, words;
    if (!PyArg_ParseTuple(args, "iO&y*iy*iw*i", &threads, to_cast, &cast, &a.view, &bits_a, &b.view,
                          &bits_b, &words.view, &bits) ||
        !is_width(bits))
        return nullptr;
    i64 tiles = words.view.len / (CPD_TILE / 8 * bits);
    if (!has_integers(words, "words", tiles, cast, bits) ||
        !has_integers(a, "a", tiles, cast, bits_a) || !has_integers(b, "b", tiles, cast, bits_b))
        return nullptr;
    return kept(threads, tiles * CPD_TILE, [=](const Block& block) {
        i64 lane = block.tile * CPD_LANES;
        loops->add_integers_tiles(cast, a.at<u32>(lane * width_of(cast, bits_a)), bits_a,
                                  b.at<u32>(lane * width_of(cast, bits_b)), bits_b,
                                  tiles_of(block.n), words.at<u32>(lane * bits), bits);
    });
}

PyObject* add_encode_integers_tiles(PyObject*, PyObject* args) {
    Cast cast;
    KeyArgument key;
    unsigned long long offset;
    int threads, bits_in, bits;
    Buffer words_in, shifts, x, words, counts;
    if (!PyArg_ParseTuple(args, "iO&O&Ky*iy*y*w*i|w*", &threads, to_cast, &cast, to_key_argument,
                          &key, &offset, &words_in.view, &bits_in, &shifts.view, &x.view,
                          &words.view, &bits, &counts.view) ||
        !is_width(bits))
        return nullptr;
    i64 n = floats_in(x);
    if (!has_integers(words_in, "words_in", tiles_of(n), cast, bits_in) ||
        !has_tiles(words, shifts, n, bits) || !has_counts(counts, n))
        return nullptr;
    return kept(threads, n, [=](const Block& b) {
        i64 lane = b.tile * CPD_LANES;
        loops->add_encode_integers_tiles(
            cast, key, offset + b.first, words_in.at<u32>(lane * width_of(cast, bits_in)), bits_in,
            shifts.at<u8>(b.tile), x.at<float>(b.first), b.n, words.at<u32>(lane * bits), bits,
            counts.at<u32>(3 * b.tile));
    });
}

PyObject* decode_integers_tiles(PyObject*, PyObject* args) {
    Cast cast;
    int threads, bits;
    Buffer words, shifts, out;
    if (!PyArg_ParseTuple(args, "iO&y*iy*w*", &threads, to_cast, &cast, &words.view, &bits,
                          &shifts.view, &out.view) ||
        !(bits == 0 || is_width(bits)) ||
        !has_tiles(words, shifts, floats_in(out), width_of(cast, bits)))
        return nullptr;
    return count_kept(threads, floats_in(out), [=](const Block& b) {
        return loops->decode_integers_tiles(
            cast, words.at<u32>(b.tile * CPD_LANES * width_of(cast, bits)), bits,
            shifts.at<u8>(b.tile), out.at<float>(b.first), b.n);
    });
}

const i64 TERNARY_BYTES = 2 * CPD_TILE / 8;  // of a tile of 2-bit codes

bool has_trits(const Buffer& trits, const Buffer& words, i64 tiles) {
    return has_length(trits, "trits", tiles * CPD_TRIT_BYTES) &&
           has_length(words, "words", tiles * TERNARY_BYTES);
}

PyObject* pack_trits(PyObject*, PyObject* args) {
    int threads;
    Buffer words, trits;
    if (!PyArg_ParseTuple(args, "iy*w*", &threads, &words.view, &trits.view)) return nullptr;
    i64 tiles = trits.view.len / CPD_TRIT_BYTES;
    if (!has_trits(trits, words, tiles)) return nullptr;
    return kept(threads, tiles * CPD_TILE, [=](const Block& b) {
        loops->pack_trits(words.at<u32>(b.tile * 2 * CPD_LANES), tiles_of(b.n),
                          trits.at<u8>(b.tile * CPD_TRIT_BYTES));
    });
}

PyObject* unpack_trits(PyObject*, PyObject* args) {
    int threads;
    Buffer trits, words;
    if (!PyArg_ParseTuple(args, "iy*w*", &threads, &trits.view, &words.view)) return nullptr;
    i64 tiles = trits.view.len / CPD_TRIT_BYTES;
    if (!has_trits(trits, words, tiles)) return nullptr;
    return kept(threads, tiles * CPD_TILE, [=](const Block& b) {
        loops->unpack_trits(trits.at<u8>(b.tile * CPD_TRIT_BYTES), tiles_of(b.n),
                            words.at<u32>(b.tile * 2 * CPD_LANES));
    });
}

}  // namespace

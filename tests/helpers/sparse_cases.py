"""Calls of the collectives for compressors on made-up arrays, and what NumPy says they return."""

import numpy as np

from cpdhpc.collectives import sparse


def lengths(ranks, longest):
    """Of each rank's array: some of them 0."""
    return [rank * 7 % 5 * longest // 4 for rank in range(ranks)]


def arrays(ranks, dtype, sizes):
    """The same on every process."""
    rng = np.random.default_rng((ranks, len(sizes), sum(sizes)))
    return [rng.integers(0, 120, size).astype(dtype) for size in sizes]


def values(ranks, dtype, shape):
    """Whose sum depends on the order."""
    rng = np.random.default_rng((ranks, *shape))
    scale = 2.0 ** rng.integers(-9, 30, (ranks, *shape))
    return list((rng.standard_normal((ranks, *shape)) * scale).astype(dtype))


def ring(ranks):
    """Each rank sends to the next two, and rank 0 to the last, nothing twice or to itself."""
    pairs = {(rank, (rank + step) % ranks) for rank in range(ranks) for step in (1, 2)}
    pairs = sorted(pair for pair in {*pairs, (0, ranks - 1)} if pair[0] != pair[1])
    dtypes = ("int64", "float32", "uint8")
    sends = [{} for _ in range(ranks)]
    for rank, to in pairs:
        sends[rank][to] = np.arange(rank * 5 % 4 * 3, dtype=dtypes[(rank + to) % 3]) + to
    return sends


def calls(world, root_rank, longest):
    """Name -> what a call returned on this process, and what it should have been."""
    ranks, hosted = world.ranks, world.hosted
    found = {}
    for dtype in ("float32", "uint16", "bool", "int64"):
        given = arrays(ranks, dtype, lengths(ranks, longest))
        got = sparse.allgather(world, [given[rank] for rank in hosted])
        found[f"allgather {dtype}"] = got, given
    leader = np.arange(longest, dtype=np.int32)
    given = [leader if rank == root_rank else None for rank in hosted]
    found["broadcast"] = [sparse.broadcast(world, given, root_rank)], [leader]
    for dtype in sparse.SUMMED:
        for shape in ((3, 5), (longest,), (sparse.GATHERED_BYTES // 4 + 77,)):
            given = values(ranks, dtype, shape)
            total = given[0].copy()
            for each in given[1:]:
                total += each
            found[f"sum {dtype} {shape}"] = (
                [sparse.sum(world, [given[rank] for rank in hosted])],
                [total],
            )
    sends = ring(ranks)
    got = sparse.neighbours(world, [sends[rank] for rank in hosted])
    for rank, each in zip(hosted, got, strict=True):
        came = {source: sent[rank] for source, sent in enumerate(sends) if rank in sent}
        assert list(each) == list(came)
        found[f"neighbours {rank}"] = list(each.values()), list(came.values())
    if ranks > 1:  # who sends, and how much, is known: to the next one, and to the last
        x = arrays(ranks, "uint16", [longest] * ranks)
        tos = [sorted({(rank + 1) % ranks, ranks - 1} - {rank}) for rank in range(ranks)]
        tos = [to or [0] for to in tos]
        froms = [[s for s in range(ranks) if rank in tos[s]] for rank in range(ranks)]
        sends = [dict.fromkeys(tos[rank], x[rank]) for rank in hosted]
        got = sparse.neighbours(world, sends, [froms[rank] for rank in hosted])
        for rank, each in zip(hosted, got, strict=True):
            assert list(each) == froms[rank]
            found[f"known {rank}"] = list(each.values()), [x[source] for source in froms[rank]]
    return found


def same(got, expected):
    """The same arrays, bit for bit."""
    return len(got) == len(expected) and all(
        a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
        for a, b in zip(got, expected, strict=True)
    )


def sent(world):
    """What each hosted rank has sent: bytes and messages."""
    return world.bytes_sent.tolist(), world.messages_sent.tolist()


def wrong_calls(world, wrong):
    """Calls that are wrong where wrong says so, else right: (call, error, words)."""
    x = np.zeros(3, np.float32)
    good, ranks = [x] * world.virtual_ranks, world.ranks
    first = world.hosted.start

    def one(bad, right=None):
        """Right arrays, the first of them bad on the process that is wrong."""
        right = good if right is None else right
        return [bad, *right[1:]] if wrong else right

    def root(bad):
        return one(bad, [x if rank == 0 else None for rank in world.hosted])

    about = [{(rank + 1) % ranks: x} for rank in world.hosted]
    twice = [((rank - 1) % ranks,) * 2 for rank in world.hosted]
    empty, nobody = [{} for _ in world.hosted], [() for _ in world.hosted]
    return [
        (lambda: sparse.allgather(world, one([1, 2])), TypeError, "must be a NumPy array"),
        (lambda: sparse.allgather(world, one(x.astype(">f4"))), TypeError, "known are float32"),
        (lambda: sparse.allgather(world, one(x.astype("c8"))), TypeError, "known are float32"),
        (lambda: sparse.allgather(world, one(np.zeros((2, 2)))), ValueError, "one dimension"),
        (lambda: sparse.allgather(world, one(x)[wrong:]), ValueError, "hosted ranks"),
        (lambda: sparse.broadcast(world, root(3), 0), (TypeError, ValueError), "broadcast: "),
        (lambda: sparse.broadcast(world, root(None), ranks if wrong else 0), ValueError, "0.."),
        (lambda: sparse.sum(world, one(x.astype(np.int8))), TypeError, "known are float32"),
        (lambda: sparse.sum(world, one(x)[wrong:]), ValueError, "hosted ranks"),
        (lambda: sparse.neighbours(world, one({ranks: x}, empty)), ValueError, "another of"),
        (lambda: sparse.neighbours(world, one({first: x}, empty)), ValueError, "another of"),
        (lambda: sparse.neighbours(world, one({-1: x}, empty)), ValueError, "another of"),
        (lambda: sparse.neighbours(world, one({0.5: x}, empty)), ValueError, "another of"),
        (lambda: sparse.neighbours(world, one({"1": x}, empty)), ValueError, "another of"),
        (lambda: sparse.neighbours(world, one({True: x}, empty)), ValueError, "another of"),
        (lambda: sparse.neighbours(world, one([1], empty)), TypeError, "must be a dict"),
        (lambda: sparse.neighbours(world, one(None, empty)), TypeError, "must be a dict"),
        (lambda: sparse.neighbours(world, None if wrong else empty), TypeError, "must be a list"),
        (lambda: sparse.neighbours(world, empty, nobody if wrong else None), ValueError, "nothing"),
        (lambda: sparse.neighbours(world, empty, [] if wrong else None), ValueError, "hosted rank"),
        (lambda: sparse.neighbours(world, about, twice if wrong else None), ValueError, "once"),
        (lambda: sparse.sum(world, None if wrong else good), TypeError, "must be a list"),
        (lambda: sparse.broadcast(world, root(x), "0" if wrong else 0), ValueError, "0.."),
    ]  # fmt: skip

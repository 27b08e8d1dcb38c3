"""Every schedule is proven by payloads that are sets of ranks, and by the bytes it sends."""

import numpy as np
import pytest

from cpdhpc.comm import SCHEDULES, Allreduce, Loopback, Schedule, ScheduleError, Step
from cpdhpc.comm.engine import Exchange, run
from cpdhpc.partition import chunk

LIKE = np.empty(0, np.float32)
MASK_BYTES = 17  # a bit for each of up to 128 ranks, and one more byte


def packed(mask):
    return np.frombuffer(mask.to_bytes(MASK_BYTES, "little"), np.uint8)


def unpacked(payload):
    return int.from_bytes(payload.tobytes(), "little")


def disjoint_union(a, b):
    assert a & b == 0, f"counted twice: {a & b:b}"
    return a | b


def masks_program(schedule, rank, ranks):
    """Follow the steps with sets of ranks for sums; return the set of each finished chunk."""
    chunks = schedule.chunks(ranks)
    partial = [1 << rank] * chunks
    held = [{rank: 1 << rank} for _ in range(chunks)]
    final = [None] * chunks

    def finished(i):
        if final[i] is None:
            final[i] = partial[i]
            for other, mask in held[i].items():
                final[i] = final[i] if other == rank else disjoint_union(final[i], mask)
        return final[i]

    outgoing = {"reduce": partial.__getitem__, "hold": lambda i: 1 << rank, "copy": finished}
    for number, step in enumerate(schedule.steps(rank, ranks)):
        payload = None
        if step.send_to is not None:
            payload = packed(outgoing[step.kind](step.send_chunk))
        received = yield Exchange(
            step.send_to,
            payload,
            step.recv_from,
            MASK_BYTES,
            number,
            step.recv_chunk,
            step.send_chunk,
        )
        if step.recv_from is None:
            continue
        i, mask = step.recv_chunk, unpacked(received)
        assert final[i] is None, "received into a finished chunk"
        if step.kind == "reduce":
            partial[i] = disjoint_union(partial[i], mask)
        elif step.kind == "hold":
            assert mask == 1 << step.recv_from and step.recv_from not in held[i]
            held[i][step.recv_from] = mask
        else:
            final[i] = mask
    return [finished(i) for i in range(chunks)]


def run_masks(schedule, ranks):
    world = Loopback(ranks)
    programs = [masks_program(schedule, r, ranks) for r in world.hosted]
    return run(world, lambda piece, take: programs, 1, LIKE, "masks")[0]


@pytest.mark.parametrize("ranks", [*range(1, 34), 64, 128])
@pytest.mark.parametrize("name", SCHEDULES)
def test_each_contribution_counts_once_in_every_final_chunk(name, ranks):
    everyone = (1 << ranks) - 1
    for masks in run_masks(SCHEDULES[name], ranks):
        assert masks == [everyone] * SCHEDULES[name].chunks(ranks)


@pytest.mark.parametrize("ranks", range(1, 34))
@pytest.mark.parametrize("name", SCHEDULES)
def test_no_rank_sends_to_itself(name, ranks):
    for rank in range(ranks):
        for step in SCHEDULES[name].steps(rank, ranks):
            assert rank not in (step.send_to, step.recv_from)
            assert step.send_to is not None or step.recv_from is not None


def one_chunk(steps):
    return Schedule(steps, lambda ranks: 1, ("requantise",), "requantise")


def test_a_contribution_counted_twice_is_noticed():
    def twice(rank, ranks):
        for _ in range(2):
            yield Step("reduce", 1 - rank, 0, 1 - rank, 0)

    with pytest.raises(AssertionError, match="counted twice"):
        run_masks(one_chunk(twice), 2)


def test_a_deadlock_names_ranks_rounds_and_chunks():
    def wait_for_each_other(rank, ranks):
        yield Step("reduce", None, 0, (rank + 1) % ranks, 0)

    with pytest.raises(ScheduleError, match=r"deadlock: rank 0 waits for rank 1, round 0, chunk 0"):
        run_masks(one_chunk(wait_for_each_other), 3)


def test_a_message_left_over_names_its_ranks():
    def nobody_listens(rank, ranks):
        if rank == 2:
            yield Step("copy", 1, 0, None, 0)

    with pytest.raises(ScheduleError, match="left over: rank 2 to rank 1, round 0, chunk 0"):
        run_masks(one_chunk(nobody_listens), 3)


def test_a_rank_that_does_not_exist_is_noticed():
    def off_the_end(rank, ranks):
        yield Step("copy", rank + 1, 0, None, 0)

    with pytest.raises(ValueError, match=r"sends to rank 2 of 0\.\.1"):
        run_masks(one_chunk(off_the_end), 2)


def sent_bytes(name, wire, ranks, n, scaling="tile"):
    world = Loopback(ranks)
    xs = [np.zeros(n, np.float32)] * ranks
    Allreduce(wire, name, scaling).run(world, xs)
    return world.bytes_sent, world.messages_sent


@pytest.mark.parametrize("wire, tile_bytes", [("raw", 4096), ("e4m3", 1024 + 1), ("e2m1fn", 513)])
@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 7, 8])
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_ring_and_direct_send_the_least_possible(name, ranks, wire, tile_bytes):
    """2 (p - 1) / p of the data from each rank, headers included, where p divides the tiles."""
    each_bytes = 3 * tile_bytes
    sent, messages = sent_bytes(name, wire, ranks, ranks * 3 * 1024)
    assert (sent == 2 * (ranks - 1) * each_bytes).all()
    assert (messages == 2 * (ranks - 1)).all()


@pytest.mark.parametrize("n", [1, 1025, 5000])
@pytest.mark.parametrize("name", ["ring", "direct"])
def test_uneven_chunks_cost_at_most_a_tile_more_in_each_round(name, n):
    ranks = 4
    tiles = [-(-(stop - start) // 1024) for start, stop in (chunk(n, ranks, i) for i in range(4))]
    sent, messages = sent_bytes(name, "e4m3", ranks, n)
    for rank in range(ranks):
        if name == "ring":  # all chunks but its own, and all but the one it gets last
            expected = [*(tiles[:rank] + tiles[rank + 1 :])]
            expected += [t for i, t in enumerate(tiles) if i != (rank + 1) % ranks]
        else:  # all chunks but its own, and its own to all others
            expected = tiles[:rank] + tiles[rank + 1 :] + [tiles[rank]] * (ranks - 1)
        assert sent[rank] == 1025 * sum(expected)
        assert messages[rank] == sum(t > 0 for t in expected)


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8, 9])
def test_tree_and_gather_send_what_their_formulas_say(ranks):
    whole_bytes = 5 * 1025
    sent, messages = sent_bytes("tree", "e4m3", ranks, 5000)
    assert sent.sum() == 2 * (ranks - 1) * whole_bytes
    assert messages[0] == (ranks - 1).bit_length()
    sent, _ = sent_bytes("gather", "e4m3", ranks, 5000)
    assert (sent == (ranks - 1) * whole_bytes).all()


def test_shifts_travel_only_with_tile_scaling():
    for scaling in ("none", "static:2", "aps"):
        sent, _ = sent_bytes("ring", "e4m3", 2, 4096, scaling)
        assert (sent == 4096).all()

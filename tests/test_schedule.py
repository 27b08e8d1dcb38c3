"""Every schedule is proven by payloads that are sets of ranks, and by the bytes it sends."""

from collections import defaultdict
from itertools import product

import numpy as np
import pytest
from every import every
from refusing import refused

from cpdhpc._cpu import add_word, begin_segment, end_list, make_list, resume_list, run_list
from cpdhpc.collectives.allreduce import Allreduce
from cpdhpc.collectives.engine import Exchange, ScheduleError, run
from cpdhpc.collectives.schedules import (
    ALGORITHMS,
    SCHEDULES,
    Algorithm,
    NodeLayout,
    Step,
    group_size,
    tree_children,
    tree_parent,
)
from cpdhpc.ops.cpu import WAITING
from cpdhpc.partition import chunk
from cpdhpc.world.ranks import Loopback, numbered

LIKE = np.empty(0, np.float32)
SIZES = [*range(1, 18), 31, 32, 33, 64]
FEW_MESSAGES = ["rhd", "tree", "dbtree"]
NODES = {
    "one node": [0] * 6,
    "nodes of 1": range(7),
    "2 x 2": [0, 0, 1, 1],
    "2 x 2 dealt in turn": [0, 1, 0, 1],
    "3 + 1": [0, 0, 0, 1],
    "1 + 3": [0, 1, 1, 1],
    "1 + 2 + 1": [0, 1, 1, 2],
    "3 + 2": [0, 0, 0, 1, 1],
    "uneven": [0] * 4 + [1] + [2] * 3 + [3] * 5 + [4] * 2,
    "uneven, mixed": [int(i**1.7) % 5 for i in range(23)],
    "7 x 8": [i // 8 for i in range(56)],
    "12 x 11 dealt in turn": [i % 12 for i in range(132)],
}
LAYOUTS = {name: NodeLayout(numbered(list(nodes))) for name, nodes in NODES.items()}


def one_node(ranks, piece=0):
    return NodeLayout((0,) * ranks, piece)


def disjoint_union(a, b):
    assert a & b == 0, f"counted twice: {a & b:b}"
    return a | b


class Masks:
    """The state of one rank, with a set of ranks, an integer, for each sum of a chunk."""

    def __init__(self, rank, chunks):
        self.rank = rank
        self.partial = [1 << rank] * chunks
        self.held = defaultdict(set)
        self.final = [None] * chunks

    def partial_sum(self, i):
        assert self.final[i] is None, "the partial sum of a finished chunk"
        for other in self.held.pop(i, ()):
            self.partial[i] = disjoint_union(self.partial[i], 1 << other)
        return self.partial[i]

    def contribution(self, i):
        return 1 << self.rank

    def finished(self, i):
        if self.final[i] is None:
            self.final[i] = self.partial_sum(i)
        return self.final[i]

    def reduce(self, i, source, mask):
        self.partial[i] = disjoint_union(self.partial_sum(i), mask)

    def hold(self, i, source, mask):
        assert mask == 1 << source and source not in self.held[i]
        assert self.partial[i] == 1 << self.rank, "held after the sum was formed"
        self.held[i].add(source)

    def copy(self, i, source, mask):
        assert self.final[i] is None, "received into a finished chunk"
        self.final[i] = mask


OUT = {"reduce": Masks.partial_sum, "hold": Masks.contribution, "copy": Masks.finished}
IN = {"reduce": Masks.reduce, "hold": Masks.hold, "copy": Masks.copy}


def masks_program(schedule, rank, layout):
    """Follow the steps with sets of ranks for sums; return the set of each finished chunk."""
    chunks = schedule.chunks(layout)
    state = Masks(rank, chunks)
    for number, step in enumerate(schedule.steps(rank, layout)):
        out = [OUT[step.kind](state, i) for i in step.send_chunks]
        assert [mask.bit_count() for mask in out] == list(step.send_terms)
        received = yield Exchange(
            step.send_to,
            None if step.send_to is None else np.array(out, object),
            step.recv_from,
            len(step.recv_chunks),
            number,
            step.recv_chunks,
            step.send_chunks,
        )
        if step.recv_from is None:
            continue
        assert [mask.bit_count() for mask in received] == list(step.recv_terms)
        for i, mask in zip(step.recv_chunks, received, strict=True):
            IN[step.kind](state, i, step.recv_from, mask)
    return [state.finished(i) for i in range(chunks)]


def run_masks(schedule, layout):
    world = Loopback(layout.ranks)
    programs = [masks_program(schedule, r, layout) for r in world.hosted]
    return run(world, lambda piece, take: programs, 1, LIKE, "masks")[0]


def assert_proven(schedule, layout):
    """Each contribution counts once, no deadlock, no message left over, the terms are right."""
    everyone = (1 << layout.ranks) - 1
    for masks in run_masks(schedule, layout):
        assert masks == [everyone] * schedule.chunks(layout), layout


@pytest.mark.parametrize("name", SCHEDULES)
def test_each_contribution_counts_once_in_every_final_chunk(name):
    for ranks, piece in product(SIZES, (0, 1) if name == "dbtree" else (0,)):
        assert_proven(SCHEDULES[name], one_node(ranks, piece))


@pytest.mark.parametrize("ranks", [200, pytest.param(1024, marks=pytest.mark.slow)])
@pytest.mark.parametrize("name", FEW_MESSAGES)
def test_the_same_for_many_ranks(name, ranks):
    for piece in (0, 1) if name == "dbtree" else (0,):
        assert_proven(SCHEDULES[name], one_node(ranks, piece))


def test_ring_and_nodes_for_many_ranks():
    assert_proven(SCHEDULES["ring"], one_node(100))
    assert_proven(SCHEDULES["hier"], NodeLayout(tuple(i // 10 for i in range(100))))


@pytest.mark.slow
def test_nodes_of_many_ranks():
    assert_proven(SCHEDULES["hier"], NodeLayout(tuple(i // 32 for i in range(1024))))


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({*SCHEDULES} - {*FEW_MESSAGES}))
def test_quadratic_numbers_of_messages_for_many_ranks(name):
    """One to two million messages: 10 to 48 s each, 1 GiB at most, on one core of an EPYC."""
    assert_proven(SCHEDULES[name], one_node(1024))


@every("name", LAYOUTS)
def test_layouts_of_nodes(name):
    assert_proven(SCHEDULES["hier"], LAYOUTS[name])


def test_any_dealing_of_ranks_to_nodes():
    for ranks in range(1, 34):
        dealt = np.random.default_rng(ranks).integers(0, 1 + ranks // 3, ranks)
        assert_proven(SCHEDULES["hier"], NodeLayout(numbered(dealt.tolist())))


@every("name", SCHEDULES)
def test_no_rank_sends_to_itself(name):
    for ranks, rank, piece in product((*range(1, 10), 16, 33), range(33), (0, 1)):
        if rank >= ranks:
            continue
        for step in SCHEDULES[name].steps(rank, one_node(ranks, piece)):
            assert rank not in (step.send_to, step.recv_from), ranks
            assert step.send_to is not None or step.recv_from is not None
            assert (step.send_to is None) == (len(step.send_chunks) == 0)
            assert (step.recv_from is None) == (len(step.recv_chunks) == 0)


def sent_chunks(name, rank, layout):
    """The number of chunks that a rank sends: on the way to sums, and of results."""
    counts = {"reduce": 0, "hold": 0, "copy": 0}
    for step in SCHEDULES[name].steps(rank, layout):
        counts[step.kind] += len(step.send_chunks)
    return counts["reduce"] + counts["hold"], counts["copy"]


def test_rhd_ring_and_direct_send_the_least_possible_number_of_chunks():
    for name, ranks in product(("rhd", "ring", "direct"), (*SIZES, 256)):
        assert SCHEDULES[name].chunks(one_node(ranks)) == ranks
        for rank in {0, ranks // 2, ranks - 1}:
            assert sent_chunks(name, rank, one_node(ranks)) == (ranks - 1, ranks - 1)


def test_rhd_takes_the_least_number_of_rounds():
    for ranks in (*SIZES, 256, 1024):
        steps = list(SCHEDULES["rhd"].steps(ranks // 3, one_node(ranks)))
        assert len(steps) == 2 * (ranks - 1).bit_length(), ranks


@every("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 33, 256])
def test_no_rank_is_interior_in_both_trees(ranks):
    """So that over two pieces no rank sends more than all the data twice: three halves and one."""
    interior = [set(), set()]
    for rank, piece in product(range(ranks), (0, 1)):
        steps = list(SCHEDULES["dbtree"].steps(rank, one_node(ranks, piece)))
        children = {step.recv_from for step in steps if step.kind == "reduce"} - {None}
        assert children == {step.send_to for step in steps if step.kind == "copy"} - {None}
        assert len(children) <= 2
        if children:
            interior[piece].add(rank)
    assert not interior[0] & interior[1]
    if ranks > 2:
        assert interior[0] and interior[1]


@every("ranks", [1, 2, 3, 4, 5, 6, 7, 8, 33, 256, 1024])
def test_the_binary_tree_is_one_in_order_and_not_deep(ranks):
    for place in range(1, ranks + 1):
        children = tree_children(place, ranks)
        assert all(tree_parent(child, ranks) == place for child in children)
        assert [child > place for child in children] == [False, True][: len(children)]
        depth, at = 0, place
        while (above := tree_parent(at, ranks)) is not None:
            depth, at = depth + 1, above
        assert depth < ranks.bit_length()


def expected_hier_chunks(rank, layout):
    """From the sizes of nodes alone: lanes, each a ring over nodes, are dealt to ranks in turn."""
    members = [r for r, node in enumerate(layout.nodes) if node == layout.nodes[rank]]
    count, lanes = max(layout.nodes) + 1, np.bincount(layout.nodes).max()
    own = len(range(members.index(rank), lanes, len(members)))
    between = (count - 1) * own
    return (lanes - own) * count + between, (len(members) - 1) * own * count + between


@every("name", LAYOUTS)
def test_hier_sends_what_its_formula_says(name):
    layout = LAYOUTS[name]
    sizes = np.bincount(layout.nodes)
    for rank in range(layout.ranks):
        sent = sent_chunks("hier", rank, layout)
        assert sent == expected_hier_chunks(rank, layout)
        if (sizes == sizes[0]).all():
            assert SCHEDULES["hier"].chunks(layout) == layout.ranks
            assert sent == (layout.ranks - 1, layout.ranks - 1)


@every("name", LAYOUTS)
def test_a_node_sends_no_more_than_a_ring_of_nodes(name):
    layout = LAYOUTS[name]
    count, lanes = max(layout.nodes) + 1, np.bincount(layout.nodes).max()
    left = [0] * count
    for rank, node in enumerate(layout.nodes):
        for step in SCHEDULES["hier"].steps(rank, layout):
            if step.send_to is not None and layout.nodes[step.send_to] != node:
                left[node] += len(step.send_chunks)
    assert left == [2 * (count - 1) * lanes] * count


def test_the_rings_of_a_torus():
    """Groups alike if the number of ranks has a divisor that suits, and 2 (p - 1) / p of the data.

    A rank then has one to send to in its group and one in the next group.
    """
    for ranks, size in ((1, 1), (5, 1), (6, 2), (9, 3), (60, 6), (64, 8), (100, 5), (1024, 8)):
        assert group_size(ranks) == size
    for ranks in (*SIZES, 11, 23, 38, 100, 256):
        layout, size = one_node(ranks), group_size(ranks)
        sent = [sent_chunks("torus", rank, layout) for rank in range(ranks)]
        chunks = SCHEDULES["torus"].chunks(layout)
        assert np.sum(sent, 0).tolist() == [chunks * (ranks - 1)] * 2
        most = np.max(sent, 0)  # who owns two columns hands on both
        assert most[0] <= chunks and most[1] <= 1.25 * chunks
        if ranks % size == 0:
            assert sent == [(ranks - 1, ranks - 1)] * ranks
            steps = list(SCHEDULES["torus"].steps(ranks // 2, layout))
            assert len({step.send_to for step in steps}) == min((size > 1) + (ranks > 1), ranks - 1)
            assert len(steps) == 2 * (size - 1 + ranks // size - 1)
    assert_proven(SCHEDULES["torus"], one_node(101))
    assert [SCHEDULES["torus"].chunks(one_node(ranks)) for ranks in (101, 997)] == [104, 1000]


def one_chunk(steps, chunks=1):
    return Algorithm(steps, lambda layout: chunks, ALGORITHMS["tree"], SCHEDULES["tree"].rounded)


def twice(rank, layout):
    for terms in (1, 2):
        yield Step("reduce", 1 - rank, (0,), (terms,), 1 - rank, (0,), (terms,))


def wait_for_each_other(rank, layout):
    source = (rank + 1) % layout.ranks
    yield Step("reduce", recv_from=source, recv_chunks=(0,), recv_terms=(1,))


def nobody_listens(rank, layout):
    if rank == 2:
        yield Step("copy", 1, (0, 1), (1, 1))


def not_from_rank_1(rank, layout):
    for step in SCHEDULES["gather"].steps(rank, layout):
        if step.recv_from == 1:
            step = step._replace(recv_from=None, recv_chunks=(), recv_terms=())
        if rank == 1:
            step = step._replace(send_to=None, send_chunks=(), send_terms=())
        yield step


def wrong_terms(rank, layout):
    yield Step("reduce", 1 - rank, (0,), (2,), 1 - rank, (0,), (1,))


def off_the_end(rank, layout):
    yield Step("copy", rank + 1, (0,), (1,))


@every(
    "steps, chunks, ranks, error, says",
    [
        (twice, 1, 2, AssertionError, "counted twice"),
        (wait_for_each_other, 1, 3, ScheduleError,
         "deadlock: rank 0 waits for rank 1, round 0, chunk 0"),
        (nobody_listens, 2, 3, ScheduleError,
         "left over: rank 2 to rank 1, round 0, chunk 0 and 1 more"),
        (not_from_rank_1, 1, 3, AssertionError, ""),
        (wrong_terms, 1, 2, AssertionError, ""),
        (off_the_end, 1, 2, ValueError, "sends to rank 2 of 0..1"),
    ],
)  # fmt: skip
def test_wrong_schedules_are_noticed(steps, chunks, ranks, error, says):
    with pytest.raises(error) as caught:
        assert_proven(one_chunk(steps, chunks), one_node(ranks))
    assert says in str(caught.value)


def sent_bytes(name, wire, ranks, n, accumulate=None, scaling="tile"):
    world = Loopback(ranks)
    xs = [np.zeros(n, np.float32)] * ranks
    Allreduce(wire, name, scaling, accumulate).run(world, xs)
    return world.bytes_sent, world.messages_sent


@every("wire, tile_bytes", [("raw", 4096), ("e4m3", 1024 + 1), ("e2m1fn", 513)])
@every("name", ["ring", "biring", "torus", "rhd", "direct", "hier"])
def test_the_least_possible_bytes_are_sent(name, wire, tile_bytes):
    """2 (p - 1) / p of the data from each rank, headers included, where p divides the tiles."""
    for ranks in (1, 2, 3, 4, 7, 8):
        sent, messages = sent_bytes(name, wire, ranks, ranks * 3 * 1024, "requantise")
        assert (sent == 2 * (ranks - 1) * 3 * tile_bytes).all()
        rounds = {"rhd": (ranks - 1).bit_length(), "torus": ranks // group_size(ranks)}
        rounds["torus"] += group_size(ranks) - 2
        assert (messages == 2 * rounds.get(name, ranks - 1)).all()


@every("nodes", [[0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 1, 2, 2, 2]])
def test_bytes_of_nodes(nodes):
    layout, world = NodeLayout(tuple(nodes)), Loopback(len(nodes), nodes=nodes)
    each = SCHEDULES["hier"].chunks(layout)
    method = Allreduce("e4m3", "hier", accumulate="float32")
    method.run(world, [np.zeros(each * 1024, np.float32)] * len(nodes))
    expected = [1025 * sum(sent_chunks("hier", rank, layout)) for rank in range(len(nodes))]
    assert world.bytes_sent.tolist() == expected


@every("n", [1, 1025, 5000])
@every("name", ["ring", "direct"])
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


def test_nodes_are_numbered_in_the_order_of_first_ranks():
    assert Loopback(5, nodes=["b", "a", "b", "c", "a"]).nodes == (0, 1, 0, 2, 1)
    assert Loopback(3).nodes == (0, 0, 0)
    with refused("Loopback", "nodes", "must be 3"):
        Loopback(3, nodes=[0, 1])


@every("ranks", [1, 2, 3, 5, 8, 9])
def test_tree_and_gather_send_what_their_formulas_say(ranks):
    whole_bytes = 5 * 1025
    sent, messages = sent_bytes("tree", "e4m3", ranks, 5000)
    assert sent.sum() == 2 * (ranks - 1) * whole_bytes
    assert messages[0] == (ranks - 1).bit_length()
    sent, _ = sent_bytes("dbtree", "e4m3", ranks, 5000)
    assert sent.sum() == 2 * (ranks - 1) * whole_bytes
    assert sent.max() <= 3 * whole_bytes
    sent, _ = sent_bytes("gather", "e4m3", ranks, 5000)
    assert (sent == (ranks - 1) * whole_bytes).all()


def test_shifts_travel_only_with_tile_scaling():
    for scaling in ("none", "static:2", "aps"):
        sent, _ = sent_bytes("ring", "e4m3", 2, 4096, scaling=scaling)
        assert (sent == 4096).all()


def written(schedule, nodes, pieces):
    """Return the call list of each rank, as Recording writes it, with words for all messages.

    A message to another node is told when it is started, and has left when the receiver has begun
    to wait for it, as long ones do that MPI does not buffer.
    """
    words = defaultdict(lambda: np.zeros(8, np.uint8))
    ranks, slots = len(nodes), min(schedule.window(len(nodes)), pieces)
    arrays = [(np.zeros(1, np.float32), np.zeros(1, np.float32)) for _ in nodes]
    lists = []
    for rank in range(ranks):
        near = [other for other in range(ranks) if other != rank and nodes[other] == nodes[rank]]
        ended = tuple(
            tuple(words["ended", slot, other] for other in (rank, *near)) for slot in range(slots)
        )
        calls = make_list(*arrays[rank], ended)
        for piece in range(pieces):
            begin_segment(calls, piece % slots)
            counts, steps, ends = defaultdict(int), [], []
            for step in schedule.steps(rank, NodeLayout(nodes, piece)):
                ways = (rank, step.send_to), (step.recv_from, rank)
                for (source, to), label in zip(ways, (-1, 0), strict=True):
                    if source is None or to is None:
                        continue
                    message = piece, source, to, counts[source, to]
                    counts[source, to] += 1
                    if nodes[source] != nodes[to]:
                        begun = words["begun", *message]
                        ends.append((begun, 0)) if to != rank else steps.append((begun, -1))
                    steps.append((words[message], label))
            for word, label in (*steps, *ends):
                add_word(calls, word, label)
        end_list(calls, 1, False, np.zeros(1, np.int64), 0, np.zeros(1, np.int64), 0)
        lists.append((calls, *arrays[rank]))
    return lists


def come_to_their_ends(lists, rng):
    """Run them by turns, in any order; whether all come to their ends.

    What can be done once can be done until it is done, so one order that ends stands for all.
    """
    waiting = [calls for calls, x, out in lists if run_list(calls, 1, 1, x, out) == WAITING]
    for _ in range(100 * len(lists)):
        rng.shuffle(waiting)
        waiting = [calls for calls in waiting if resume_list(calls, 1) == WAITING]
        if not waiting:
            return True
    return False


@pytest.mark.parametrize("name", SCHEDULES)
@pytest.mark.parametrize(
    "sizes", [(1, 2, 3, 4, 5, 8, 13), pytest.param(range(1, 34), marks=pytest.mark.slow)]
)
def test_call_lists_come_to_their_ends(name, sizes):
    """In the compiled runner, with more pieces than are under way, on one node and on several."""
    schedule, rng = SCHEDULES[name], np.random.default_rng(1)
    for ranks in sizes:
        for nodes in ((0,) * ranks, range(ranks), [r // 2 for r in range(ranks)]):
            lists = written(schedule, numbered(list(nodes)), schedule.window(ranks) + 3)
            assert come_to_their_ends(lists, rng), (ranks, nodes)
            assert come_to_their_ends(lists, rng), (ranks, nodes, "again")


def test_call_lists_that_wait_for_each_other_do_not_end():
    def patient(rank, layout):
        yield Step("copy", None, (), (), 1 - rank, (0,), (2,))
        yield Step("copy", 1 - rank, (0,), (2,))

    schedule = one_chunk(patient)
    for nodes in ((0, 0), (0, 1)):
        assert not come_to_their_ends(written(schedule, nodes, 2), np.random.default_rng(1))

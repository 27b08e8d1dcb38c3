"""Ranks that do not do the same are told who waits for whom, where, and the job would end.

Here the end of the job is SystemExit, as where MPI_Abort returns; tests/test_faults.py has jobs
that do end.
"""

import os
import re
import signal
import threading
import time
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from simulated_cupy import simulated

from cpdhpc.collectives.allreduce import Allreduce, allreduce
from cpdhpc.collectives.engine import Exchange, run
from cpdhpc.darray import Box, Layout, WindowPlan
from cpdhpc.torch.autograd import exchange, join
from cpdhpc.torch.reducer import GradientReducer
from cpdhpc.world import ending, gpu_messages
from cpdhpc.world.mpi import World, library_version

pytestmark = pytest.mark.two_ranks
X = np.ones(5000, np.float32)


class Doomed(World):
    """A world that waits long until hurry: from then on only for what never comes."""

    def _end(self):
        self.ended_s = time.monotonic()
        raise SystemExit(1)

    def hurry(self):
        self.barrier()
        self._timeout._timeout_s = 0.3


@pytest.fixture
def doomed(world, monkeypatch):
    monkeypatch.setattr(ending, "GRACE_S", 0.3)
    return Doomed(timeout_s=world.timeout_s)  # never freed: messages of it are under way


@pytest.fixture
def said(world, capsys):
    """Have ranks 0 and 1 do different things; return what each says, None where it goes on."""

    def act(*parts):
        ended = False
        try:
            for part in parts[world.process : world.process + 1]:
                part()
        except SystemExit:
            ended = True
        text = capsys.readouterr().err
        return world.gather(text if ended else None)

    return act


def nothing():
    pass


def one_exchange(to, source):
    yield Exchange(to, np.zeros(8, np.uint8), source, 8, 3, (5,), (6,))


def run_one(world, program):
    run(world, lambda piece, take: [program], 1, X, "test")


def test_calls_whose_messages_do_not_fit_are_both_named(doomed, said):
    """Open MPI tells the one with the shorter message; it tells the other."""
    if "MPICH" in library_version():
        pytest.skip("MPICH tells nobody")
    zero, one = said(
        lambda: doomed.max(np.zeros(2, np.int64), "two"),
        lambda: doomed.max(np.zeros(5, np.int64), "five"),
    )
    assert re.search(r"rank 0 \| two: .*TRUNCATE.*process, or thread, in another call\?", zero)
    assert "rank 1 | five: waited" in one


def test_a_rank_that_never_calls(doomed, said, monkeypatch):
    """And who has said so lets others say it, too, before the job ends."""
    say, said_s = ending.say, []
    monkeypatch.setattr(ending, "say", lambda lines: said_s.append(time.monotonic()) or say(lines))
    doomed.hurry()
    zero, one = said(lambda: allreduce(doomed, X, "e4m3", "tree"), nothing)
    assert re.fullmatch(r"rank 0 \| allreduce tree: arguments: waited [\d.]+ s for rank 1\n", zero)
    assert one is None
    assert doomed.process or doomed.ended_s - said_s[0] >= ending.GRACE_S


def test_a_message_that_never_comes(doomed, said):
    doomed.hurry()
    zero, one = said(lambda: run_one(doomed, one_exchange(None, 1)), nothing)
    assert re.fullmatch(r"rank 0 \| test: waited [\d.]+ s for rank 1, round 3, chunk 5\n", zero)
    assert one is None


def test_a_prepared_call_that_never_comes(doomed, said):
    prepared = Allreduce("raw", "tree").prepare(doomed, [X])
    for _ in range(3):
        prepared.run()
    doomed.hurry()
    zero, one = said(prepared.run, nothing)
    expected = r"rank 0 \| allreduce tree: waited [\d.]+ s for rank 1, round 0, chunk 0\n"
    assert re.fullmatch(expected, zero) and one is None


def test_a_call_that_is_known_and_never_comes(doomed, said):
    """Ranks of a node agree through memory, and name who does not come."""
    for _ in range(4):
        allreduce(doomed, X, "e4m3", "tree")
    assert doomed.board is not None
    doomed.hurry()
    zero, one = said(lambda: allreduce(doomed, X, "e4m3", "tree"), nothing)
    assert re.fullmatch(r"rank 0 \| allreduce tree: waited [\d.]+ s for rank 1\n", zero)
    assert one is None


@pytest.mark.parametrize(
    "prepared, where", [(True, "round 1, chunk 1"), (False, "round 0, chunk 0")]
)
def test_a_rank_that_is_stopped_while_it_waits(doomed, said, prepared, where):
    """By SIGSTOP, in a call list, or where arguments are compared: the other says what it lacks."""
    method, other = Allreduce("raw", "ring"), doomed.gather(os.getpid())[1]
    call = method.prepare(doomed, [X]).run if prepared else partial(method.run, doomed, [X])
    for _ in range(3):
        call()
    doomed.barrier()

    def late():
        while Path(f"/proc/{other}/stat").read_text().rpartition(")")[2].split()[0] != "T":
            time.sleep(0.01)
        doomed._timeout._timeout_s = 0.3
        try:
            call()
        finally:
            os.kill(other, signal.SIGCONT)

    def stopped():
        pause = threading.Timer(0.1, os.kill, (other, signal.SIGSTOP))
        pause.start()
        call()
        pause.join()

    zero, _ = said(late, stopped)
    expected = rf"rank 0 \| allreduce ring: waited [\d.]+ s for rank 1, {where}\n"
    assert re.fullmatch(expected, zero), zero


def test_an_interrupt_ends_the_wait_of_a_call_list(doomed):
    """Ctrl-C on a rank whose others do not come; what it interrupted is not run again."""
    method = Allreduce("raw", "tree")
    prepared = method.prepare(doomed, [X])
    for call in (prepared.run, lambda: method.run(doomed, [X])):
        for _ in range(3):
            call()
        caught = "nothing"
        if doomed.process == 0:
            threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT)).start()
            try:
                call()
            except KeyboardInterrupt:
                caught = "interrupt"
        assert doomed.gather(caught) == ["interrupt", "nothing"]
    wrong = ""
    try:
        if doomed.process == 0:
            prepared.run()
    except RuntimeError as error:
        wrong = str(error)
    assert doomed.gather(wrong)[0] == "allreduce tree: is freed, or was ended by a failure"


def test_a_gpu_that_is_never_done(doomed, said):
    with simulated() as (gpu, cupy):
        x = cupy.asarray(X)
        allreduce(doomed, x)
        doomed.hurry()
        gpu.stalled = gpu.null if doomed.process == 1 else None
        texts = said(*[lambda: allreduce(doomed, x)] * 2)
    lines = [line for text in texts if text for line in text.splitlines()]
    lines = [line for line in lines if "its own GPU is not done yet" in line]
    assert lines and all(line.startswith("rank 1 | allreduce ring: waited") for line in lines)


def test_an_error_in_the_middle(doomed, said):
    def broken():
        yield from one_exchange(None, None)
        raise MemoryError("no room")

    zero, one = said(nothing, lambda: run_one(doomed, broken()))
    assert zero is None and one.startswith("rank 1 | test: MemoryError: no room\n")


def plan_of(world, name="pixels"):
    layout = Layout.grid((8,), (world.size,))
    start, stop = layout.owner(world.rank)
    return WindowPlan(world, layout, Box((start[0] - 1,), (stop[0] + 1,)), "wrap", name=name)


def of_dtypes(plan):
    return [lambda kind=kind: plan.exchange(np.ones(4, kind)) for kind in (np.float32, np.float64)]


def never_exchanged(plan):
    plan.exchange(np.ones(4))
    return [lambda: plan.exchange(np.ones(4)), nothing]


def never_planned(plan):
    return [lambda: plan_of(plan.world, "late"), nothing]


def of_axes_there_before(plan):
    arrays = [np.ones((4, 2)), np.ones((4, 3))]
    for array in arrays:
        plan.exchange(array)
    return [lambda array=array: plan.exchange(array) for array in arrays]


def transposed(plan):
    return [lambda: plan.exchange(np.ones(4)), lambda: plan.accumulate(np.ones(plan.window.shape))]


WAITED = r"rank 0 \| %s: waited [\d.]+ s for rank 1\n"
PLANS = {  # what ranks do otherwise -> what is said
    never_exchanged: WAITED % "exchange of plan 'pixels'.*",
    never_planned: WAITED % "WindowPlan.*",
    of_dtypes: r"exchange of plan 'pixels': rank \d has exchange of float\d\d, further axes \(\), "
    r"wire raw, this rank exchange of float\d\d",
    of_axes_there_before: r"exchange of plan 'pixels': (waited [\d.]+ s for rank \d|rank \d is at "
    "number 0, of another shape)",
    transposed: r"plan 'pixels': rank \d has (exchange|accumulate) of float64",
}


@pytest.mark.parametrize("share_memory", [True, False])
@pytest.mark.parametrize("differ", PLANS, ids=lambda differ: differ.__name__)
def test_plans(world, doomed, said, differ, share_memory):
    doomed._share = share_memory
    parts = differ(plan_of(doomed))
    doomed.hurry()
    texts = [text for text in said(*parts) if text]
    assert re.search(PLANS[differ], "".join(texts)), texts


@pytest.mark.parametrize("known", [False, True])
def test_windows_of_gpu_arrays_on_one_rank_only(doomed, said, monkeypatch, known):
    """Where MPI takes GPU memory; whether that is known or is to be found out by all."""
    with simulated() as (gpu, cupy):
        gpu.aware = True
        answer = gpu_messages.Answer(True, "simulated")
        monkeypatch.setattr(gpu_messages, "query", lambda: answer)
        plan = plan_of(doomed)
        if known:
            gpu_messages.gpu_aware(doomed)
        doomed.hurry()
        x = np.ones(4)
        texts = said(lambda: plan.exchange(x), lambda: plan.exchange(cupy.asarray(x)))
    on_host = r"exchange of float64, further axes \(\), wire raw"
    on_gpu = f"{on_host}, from GPU memory" if known else "exchange of GPU arrays"
    lines = f"rank 1 has {on_gpu}, this rank {on_host}", f"rank 0 has {on_host}, this rank {on_gpu}"
    assert any(text and re.search(line, text) for line in lines for text in texts), texts
    assert not any(text and "waited" in text for text in texts), texts


@pytest.fixture
def graph(doomed):
    """A tensor of each rank, exchanged twice, the second time doubled."""
    plan = plan_of(doomed)
    leaf = torch.ones(4, requires_grad=True)
    graph = leaf, exchange(leaf, plan), exchange(2 * leaf, plan)
    doomed.hurry()
    return graph


def test_a_rank_whose_loss_leaves_out_an_exchange(graph, said):
    zero, one = said(lambda: graph[1].sum().backward(), nothing)
    assert re.search(r"rank 0 \| accumulate of plan 'pixels': waited [\d.]+ s for rank 1", zero)
    assert one is None


def test_a_backward_of_another_call_is_not_taken_for_this_one(graph, said):
    _, one, two = graph
    texts = said(lambda: (one + two).sum().backward(), lambda: one.sum().backward())
    # The call made last comes first in backward: 1,000,002 is of two, 1,000,001 of one.
    said_so = (
        "accumulate of plan 'pixels': rank 1 is at number 1000001, ",
        "accumulate of plan 'pixels': rank 0 is at number 1000002, ",
    )
    assert any(text and each in text for text, each in zip(texts, said_so, strict=True)), texts


def test_the_cure_for_both(world, graph):
    leaf, one, two = graph
    loss = join(one.sum(), two) if world.process else (one + two).sum()
    loss.backward()
    # A rank has 4 cells in its own window and 2 in the other's, and two, which is of doubled cells,
    # counts in rank 0's window only: 4 + 2 + 2 * 4 there, 4 + 2 + 2 * 2 on rank 1.
    assert world.gather(int(leaf.grad.sum())) == [14, 10]


def test_a_plain_loop_with_overlap_goes_on_until_a_rank_does_not_come(doomed, said):
    model = torch.nn.Linear(64, 10)
    reducer = GradientReducer(model, doomed, "lowbit", bucket_mib=0.001, overlap=True)

    def step():
        model.zero_grad()
        model(torch.ones(2, 64)).sum().backward()
        reducer.reduce()

    step()
    step()
    doomed.hurry()
    threads = threading.active_count()
    zero, one = said(step, nothing)
    assert re.search(r"rank 0 \| allreduce \w+: arguments: waited .* s for rank 1\n", zero)
    assert one is None and threading.active_count() <= threads

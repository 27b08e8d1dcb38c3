"""Programs of torch.distributed, unchanged, over MPI: each gives what it gives over gloo."""

import copy
import importlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.join import Join
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.debug import _clear_sharding_prop_cache
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

import cpdhpc.torch

pytestmark = pytest.mark.usefixtures("one_thread")

assert cpdhpc.torch, "makes the backend known"

Program = Callable[[], Any]
STEPS = 3
KEPT: list[Any] = []  # groups: gloo aborts where a thread of its own lets go of one last


def over(backend: str, program: Program) -> Any:
    """What a program returns over a backend. Its processes are those of MPI, for gloo too."""
    _clear_sharding_prop_cache()  # its results have meshes of earlier programs, without groups now
    dist.init_process_group(backend, init_method="mpi://")
    try:
        return program()
    finally:
        if backend == "gloo":
            KEPT.extend(dist.distributed_c10d._world.pg_map)
        dist.destroy_process_group()


def assert_as_gloo(program: Program, ulp: float = 2**-23) -> None:
    """The same values over both; of two ranks the same bits, as two numbers' sum has no order.

    Of more ranks sums are rounded n - 1 times in another order, each by half an ulp of the dtype in
    which they are added. STEPS steps of rate 0.1 and momentum 0.9 add up 0.1 * (1 + 1.9 + 2.71)
    times the error of a gradient, here less than 4; the factor 8 is for what then grows.
    """
    ours, theirs = over("cpdhpc", program), over("gloo", program)
    bound = 0 if dist_size() == 2 else 8 * 0.561 * 4 * (dist_size() - 1) * ulp / 2
    assert len(ours) == len(theirs) > 0
    for one, other in zip(ours, theirs, strict=True):
        assert one.dtype == other.dtype and torch.isfinite(one).all()
        torch.testing.assert_close(one, other, rtol=bound, atol=bound)


def dist_size() -> int:
    from cpdhpc.world.mpi import running_mpi

    return int(running_mpi().COMM_WORLD.Get_size())


def network(width: int = 16) -> nn.Module:
    torch.manual_seed(1)
    return nn.Sequential(
        nn.Linear(8, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 4)
    )


def batch(step: int, rows: int = 4) -> tuple[torch.Tensor, torch.Tensor]:
    """What this rank learns from in a step."""
    generator = torch.Generator().manual_seed(100 * step + dist.get_rank())
    return torch.randn(rows, 8, generator=generator), torch.randn(rows, 4, generator=generator)


def trained(model: nn.Module, optimizer: torch.optim.Optimizer | None = None) -> nn.Module:
    optimizer = optimizer or torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(STEPS):
        x, y = batch(step)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
    return model


def values(model: nn.Module) -> list[torch.Tensor]:
    return [
        (p.full_tensor() if isinstance(p, DTensor) else p).detach().clone()
        for p in model.parameters()
    ]


def ddp(
    hook: Callable[[DistributedDataParallel], None] | None = None,
    bucket_cap_mb: float = 0.0005,
    **options: Any,
) -> Program:
    """A training in several buckets, unless they may be large."""

    def program() -> list[torch.Tensor]:
        model = DistributedDataParallel(network(), bucket_cap_mb=bucket_cap_mb, **options)
        if hook is not None:
            hook(model)
        return values(trained(model))

    return program


def power_sgd(model: DistributedDataParallel) -> None:
    state = powerSGD_hook.PowerSGDState(
        None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=0.5
    )
    model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)


HOOKS: dict[str, Program] = {
    "none": ddp(),
    "static_graph": ddp(static_graph=True, gradient_as_bucket_view=True),
    "unused": ddp(find_unused_parameters=True),
    "allreduce": ddp(lambda m: m.register_comm_hook(None, default_hooks.allreduce_hook)),
    "fp16": ddp(lambda m: m.register_comm_hook(None, default_hooks.fp16_compress_hook)),
    "power_sgd": ddp(power_sgd, bucket_cap_mb=25),
}


@pytest.mark.parametrize("name", HOOKS)
def test_distributed_data_parallel(name: str) -> None:
    assert_as_gloo(HOOKS[name], 2**-10 if name == "fp16" else 2**-23)


def test_callbacks_of_several_buckets_that_wait_for_calls() -> None:
    """PowerSGD's do. Over gloo now and then both of its threads wait in them, for ever."""
    (first, *_), again = over("cpdhpc", ddp(power_sgd)), over("cpdhpc", ddp(power_sgd))
    assert torch.equal(first, again[0])

    def everyone() -> list[torch.Tensor]:
        outs = [torch.empty_like(first) for _ in range(dist.get_world_size())]
        dist.all_gather(outs, first)
        return outs

    assert all(torch.equal(first, each) for each in over("cpdhpc", everyone))


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
def test_fully_shard(precision: str) -> None:
    def program() -> list[torch.Tensor]:
        model = network()
        policy = MixedPrecisionPolicy()
        if precision == "bfloat16":
            policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32, torch.float32)
        for layer in (*model[::2], model):
            fully_shard(layer, mp_policy=policy)
        return values(trained(model))

    assert_as_gloo(program)


def test_fully_shard_of_replicas() -> None:
    def program() -> list[torch.Tensor]:
        size = dist.get_world_size()
        shards = 2 if size % 2 == 0 else 1
        mesh = init_device_mesh("cpu", (size // shards, shards), mesh_dim_names=("r", "s"))
        model = network()
        for layer in (*model[::2], model):
            fully_shard(layer, mesh=mesh)
        return values(trained(model))

    assert_as_gloo(program)


def test_zero_redundancy_optimizer() -> None:
    def program() -> list[torch.Tensor]:
        model = DistributedDataParallel(network())
        optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.Adam, lr=0.01)
        return values(trained(model, optimizer))

    assert_as_gloo(program)


def test_tensor_parallel() -> None:
    def program() -> list[torch.Tensor]:
        size = dist.get_world_size()
        mesh = init_device_mesh("cpu", (size,))
        plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
        model = parallelize_module(network(width=4 * size), mesh, plan)
        torch.manual_seed(5)
        x = torch.randn(3, 8)
        model(x).square().sum().backward()
        grads = [p.grad for p in model.parameters()]
        return [g.full_tensor() if isinstance(g, DTensor) else g for g in grads]

    assert_as_gloo(program)


def test_dtensor() -> None:
    def program() -> list[torch.Tensor]:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        torch.manual_seed(2)
        rows = distribute_tensor(torch.randn(7, 6), mesh, [Shard(0)])
        columns = rows.redistribute(mesh, [Shard(1)])
        product = rows.redistribute(mesh, [Replicate()]).T @ rows
        return [columns.full_tensor(), product.full_tensor(), rows.sum().full_tensor()]

    assert_as_gloo(program)


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B])
def test_pipeline(schedule: type) -> None:
    def program() -> list[torch.Tensor]:
        rank, size = dist.get_rank(), dist.get_world_size()
        torch.manual_seed(rank)
        part = nn.Linear(8, 8)
        stage = PipelineStage(part, rank, size, torch.device("cpu"))
        pipe = schedule(stage, n_microbatches=4, loss_fn=nn.functional.mse_loss)
        torch.manual_seed(9)
        x, target = torch.randn(8, 8), torch.randn(8, 8)
        losses: list[torch.Tensor] = []
        given = (x,) if rank == 0 else ()
        last = rank == size - 1
        pipe.step(*given, target=target if last else None, losses=losses if last else None)
        return [part.weight.grad, part.bias.grad, *losses]

    assert_as_gloo(program)


def test_join() -> None:
    def program() -> list[torch.Tensor]:
        model = DistributedDataParallel(network())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with Join([model]):
            for step in range(2 + dist.get_rank()):
                x, y = batch(step)
                optimizer.zero_grad()
                nn.functional.mse_loss(model(x), y).backward()
                optimizer.step()
        return values(model)

    assert_as_gloo(program)


def test_a_checkpoint_of_gloo_is_read_over_mpi(
    tmp_path_factory: pytest.TempPathFactory, world: Any
) -> None:
    from torch.distributed import checkpoint

    folder = Path(world.gather(str(tmp_path_factory.mktemp("checkpoint")))[0])

    def sharded() -> nn.Module:
        model = network()
        fully_shard(model)
        return model

    def save() -> list[torch.Tensor]:
        model = trained(sharded())
        checkpoint.save(model.state_dict(), checkpoint_id=folder)
        return values(model)

    def load() -> list[torch.Tensor]:
        model = sharded()
        state = model.state_dict()
        checkpoint.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        return values(model)

    saved, loaded = over("gloo", save), over("cpdhpc", load)
    assert all(map(torch.equal, saved, loaded)) and len(saved) == len(loaded) > 0


def test_the_state_of_one_rank_is_sent_to_all() -> None:
    def program() -> list[torch.Tensor]:
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict

        model, of_first = network(), network().state_dict()
        fully_shard(model)
        state = {name: each + 1 for name, each in of_first.items()} if not dist.get_rank() else {}
        options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
        set_model_state_dict(model, state, options=options)
        return values(model)

    assert_as_gloo(program)


def test_a_checkpoint_is_saved_while_the_program_goes_on(
    tmp_path_factory: pytest.TempPathFactory, world: Any
) -> None:
    from torch.distributed import checkpoint

    folders = [
        Path(world.gather(str(tmp_path_factory.mktemp("checkpoint")))[0]) / name for name in "ab"
    ]

    def program() -> list[torch.Tensor]:
        model = network()
        fully_shard(model)
        folder = folders.pop()
        state = trained(model).state_dict()
        group = dist.new_group()  # of the thread that saves
        checkpoint.async_save(state, checkpoint_id=folder, process_group=group).result()
        trained(model)
        checkpoint.load(state, checkpoint_id=folder)
        model.load_state_dict(state)
        return values(model)

    assert_as_gloo(program)


def test_compiled() -> None:
    def program() -> list[torch.Tensor]:
        from torch.distributed._functional_collectives import all_gather_single, all_reduce

        def function(x: torch.Tensor) -> torch.Tensor:
            total = all_reduce(x * 2, "sum", dist.group.WORLD)
            return all_gather_single(total + 1, 0, dist.group.WORLD)

        x = torch.arange(6.0) + dist.get_rank()
        model = DistributedDataParallel(network())
        compiled = torch.compile(model, backend="aot_eager")
        result = torch.compile(function, backend="aot_eager", fullgraph=True)(x)
        return [result, function(x), *values(trained(compiled))]

    assert_as_gloo(program)


def test_accelerate(monkeypatch: pytest.MonkeyPatch) -> None:
    """The example for Hugging Face's Accelerate: the bits of gloo; in few bits as many digits."""
    accelerate = pytest.importorskip("accelerate", reason="accelerate is not installed")
    pytest.importorskip("sklearn")
    monkeypatch.syspath_prepend(Path(__file__).parents[2] / "inputs")
    example = importlib.import_module("accelerated")
    found = []

    def program(wire: str | None = None) -> list[torch.Tensor]:
        accelerate.state.AcceleratorState._reset_state(reset_partial_state=True)
        if wire is not None:
            cpdhpc.torch.set_wires(all_reduce=wire, from_bytes=16)
        parameters, accuracy = example.train(epochs=2)
        found.append(accuracy)
        return [*parameters, torch.tensor(accuracy)]

    assert_as_gloo(program)
    exact, rounded = over("cpdhpc", program), over("cpdhpc", lambda: program("e4m3"))
    assert not any(map(torch.equal, exact[:-1], rounded[:-1])), "rounded"
    assert min(found) > 0.8 and max(found) - min(found) < 0.03, found


def test_an_error_in_backward_arrives() -> None:
    """Gradients of other shapes by rank: torch asks for the same parameters, this finds others."""

    def program() -> list[torch.Tensor]:
        layer = nn.Linear(3, 2)

        def hook(gradient: torch.Tensor) -> torch.Tensor:
            dist.all_reduce(torch.ones(3 + dist.get_rank()))
            return gradient

        layer.weight.register_hook(hook)
        with pytest.raises(RuntimeError, match="process group differs: all_reduce SUM"):
            layer(torch.ones(1, 3)).sum().backward()
        return []

    over("cpdhpc", program)


def test_two_models_at_a_time() -> None:
    """Groups that overlap, with calls under way on both."""

    def program() -> list[torch.Tensor]:
        models = [DistributedDataParallel(copy.deepcopy(network())) for _ in range(2)]
        groups = [dist.new_group() for _ in range(2)]
        xs = [torch.ones(50_000) * (i + 1) for i in range(4)]
        works = [dist.all_reduce(x, group=groups[i % 2], async_op=True) for i, x in enumerate(xs)]
        for model in models:
            trained(model)
        for work in works[::-1]:
            work.wait()
        return [*values(models[0]), *xs]

    assert_as_gloo(program)


@pytest.mark.parametrize("wire", ["e4m3", "nvfp4"])
def test_sums_of_few_bits_inside_ddp(wire: str) -> None:
    """The parameters are those of gradients that are rounded and summed by cpdhpc.allreduce."""

    def rounded() -> list[torch.Tensor]:
        cpdhpc.torch.set_wires(all_reduce=wire, from_bytes=256)
        return values(trained(DistributedDataParallel(network())))

    def by_hand() -> list[torch.Tensor]:
        world, model = cpdhpc.World(), network()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        order: list[nn.Parameter] = list(model.parameters())
        for step in range(STEPS):
            x, y = batch(step)
            optimizer.zero_grad()
            nn.functional.mse_loss(model(x), y).backward()
            grouped = order if step == 0 else order[::-1]  # DDP makes its bucket anew
            share = 1 / world.size  # by which DDP multiplies
            flat = torch.cat([p.grad.reshape(-1) * share for p in grouped])
            total = torch.from_numpy(cpdhpc.allreduce(world, flat.numpy(), wire=wire))
            for p, each in zip(grouped, total.split([p.numel() for p in grouped]), strict=True):
                p.grad.copy_(each.reshape(p.shape))
            optimizer.step()
        world.free()
        return [p.detach() for p in model.parameters()]

    ours, wanted = over("cpdhpc", rounded), over("cpdhpc", by_hand)
    exact = over("cpdhpc", lambda: values(trained(DistributedDataParallel(network()))))
    assert not all(map(torch.equal, ours, exact)), "rounded"
    for one, other in zip(ours, wanted, strict=True):
        assert torch.equal(one, other)


def test_only_many_floating_point_values_are_rounded() -> None:
    def program() -> list[torch.Tensor]:
        cpdhpc.torch.set_wires(all_reduce={"wire": "e2m1fn", "accumulate": "exact"})
        small, whole = torch.full((100,), 1.03), torch.arange(100_000)
        most, many = torch.full((100_000,), 1.03), torch.full((100_000,), 1.03)
        works = [
            dist.all_reduce(small, async_op=True),
            dist.all_reduce(whole, async_op=True),
            dist.all_reduce(most, dist.ReduceOp.MAX, async_op=True),
            dist.all_reduce(many, dist.ReduceOp.AVG, async_op=True),
        ]
        for work in works[::-1]:
            work.wait()
        ranks = dist.get_world_size()
        assert torch.equal(whole, torch.arange(100_000) * ranks)
        assert (most == torch.tensor(1.03)).all() and (many == 1).all()
        assert torch.allclose(small, torch.full((100,), 1.03 * ranks))
        low = torch.full((100_000,), 1.03, dtype=torch.bfloat16)
        dist.all_reduce(low)
        assert (low == ranks).all()
        last = dist.get_rank() == dist.get_world_size() - 1
        for wrong, words in [
            ("e9m9x", "set_wires: all_reduce: "),
            ({"op": "mean"}, "set_wires: all_reduce.'op'.: known are accumulate, "),
            (3, "set_wires: all_reduce=3: must be a wire or a mapping"),
        ]:
            with pytest.raises((ValueError, TypeError), match=words):
                cpdhpc.torch.set_wires(all_reduce=wrong if last else "e4m3")
        cpdhpc.torch.set_wires()
        dist.all_reduce(many := torch.full((100_000,), 1.03))
        assert torch.allclose(many, torch.full((100_000,), 1.03 * ranks))
        return []

    over("cpdhpc", program)


def test_few_bits_inside_fully_shard() -> None:
    """Gradients in e4m3 with an exact sum, parameters in e4m3; the sharded ones stay float32."""

    def program() -> list[torch.Tensor]:
        seen: list[str] = []
        cpdhpc.torch.set_wires(
            reduce_scatter={"wire": "e4m3", "accumulate": "exact"}, all_gather="e4m3", from_bytes=16
        )
        model = network()
        for layer in (*model[::2], model):
            fully_shard(layer)
        with torch.profiler.profile() as profile:
            trained(model)
        seen += [each.name for each in profile.events() if each.name.startswith("cpdhpc:")]
        assert {"cpdhpc:_all_gather_base", "cpdhpc:_reduce_scatter_base"} <= set(seen)
        cpdhpc.torch.set_wires()
        return values(model)

    def exact() -> list[torch.Tensor]:
        model = network()
        for layer in (*model[::2], model):
            fully_shard(layer)
        return values(trained(model))

    few, all_bits = over("cpdhpc", program), over("cpdhpc", exact)
    distance = max((a - b).abs().max().item() for a, b in zip(few, all_bits, strict=True))
    assert 0 < distance < 0.2


@pytest.mark.parametrize("wire", ["e4m3", "e2m1fn"])
def test_calls_by_a_wire_are_those_of_the_library(wire: str) -> None:
    def program() -> list[torch.Tensor]:
        rank, ranks = dist.get_rank(), dist.get_world_size()
        cpdhpc.torch.set_wires(reduce_scatter=wire, all_gather=wire, from_bytes=0)
        world = cpdhpc.World()
        torch.manual_seed(rank)
        x, share, whole = torch.randn(5000), torch.empty(5000), torch.empty(5000 * ranks)
        dist.all_gather_into_tensor(whole, x)
        assert torch.equal(whole, torch.from_numpy(cpdhpc.all_gather(world, x.numpy(), wire)))
        for op, name in ((dist.ReduceOp.SUM, "sum"), (dist.ReduceOp.AVG, "mean")):
            given = torch.randn(5000 * ranks)
            dist.reduce_scatter_tensor(share, given, op)
            wanted = cpdhpc.reduce_scatter(world, given.numpy(), wire, op=name)
            assert torch.equal(share, torch.from_numpy(wanted))
        world.free()
        return []

    over("cpdhpc", program)

"""The process group that torch.distributed calls, with torch's names of methods."""

from __future__ import annotations

from collections.abc import Callable, Generator, Sequence
from datetime import timedelta
from functools import lru_cache, wraps
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import distributed
from torch._C._distributed_c10d import PrefixStore
from torch.distributed import ProcessGroup
from torch.distributed.distributed_c10d import GroupName

from ...errors import UserError
from . import NAME, forms, programs, quick
from .channel import REFUSED, Channel, Link
from .forms import Form
from .host import Hosted, overlap
from .programs import Tensor
from .progress import CALLS, NOTHING, Operation, Step, Waits, engine, untraced
from .quick import Quick, described, listed
from .reductions import premultiplied, reduction_of

Method = Callable[..., Any]
Started = Any  # an Operation; None if it has ended and its caller would have waited
PROFILER = (
    "_profiler_enabled",
    "_record_function_with_args_enter",
    "_record_function_with_args_exit",
)
PROFILING, ENTER, EXIT = (getattr(torch.autograd, name) for name in PROFILER)

LOOKS = 1000  # times that a board is read in vain in a call that the program waits for
SETTLE_S = 30.0  # for unfinished calls when their group is destroyed


@lru_cache(1024)
def rows(
    name: str, shape: torch.Size, size_bytes: int, splits: tuple[int, ...], ranks: int
) -> list[slice]:
    """Return the bytes of each rank's rows of a tensor; splits: their numbers, or nothing."""
    count = shape[0] if shape else 0
    if not splits:
        if count % ranks or not shape:
            raise ValueError(f"{name} has {count} rows: must be a multiple of {ranks}")
        splits = (count // ranks,) * ranks
    if len(splits) != ranks or sum(splits) != count or min(splits) < 0:
        raise ValueError(
            f"{name}_split_sizes={list(splits)}: must be {ranks} numbers with the sum {count}"
        )
    each = size_bytes // count if count else 0
    return [slice(each * a, each * b) for a, b in pairwise([0, *accumulate(splits)])]


def first_step(program: Waits, ends: Sequence[Callable[[], None]]) -> Step | None:
    """Run a program as far as possible; return the step that it waits for, None at its end."""
    try:
        return next(program)
    except BaseException as error:
        for end in ends:
            end()
        if not isinstance(error, StopIteration):
            raise
        return None


def group_beside(group: ProcessGroup, timeout_s: float, store: Any, device: torch.device) -> Any:
    """Return a group of the backend that was requested for a device; None if it is this one."""
    config = distributed.distributed_c10d._world.pg_backend_config.get(group, "")
    asked = distributed.distributed_c10d.BackendConfig(distributed.Backend(config))
    name = asked.get_device_backend_map().get(device.type, NAME)
    if name == NAME:
        return None
    if name != "nccl":
        raise UserError(f"{NAME}: backend {name!r} for {device.type}: must be 'nccl' or {NAME!r}")
    rank, size = group.rank(), group.size()
    store = PrefixStore(f"{device.type}/", store)
    options = distributed.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=timeout_s)
    backend = distributed.ProcessGroupNCCL(store, rank, size, options)
    beside = distributed.ProcessGroup(store, rank, size)
    kind = distributed.ProcessGroup.BackendType.NCCL
    beside._set_default_backend(kind)
    beside._register_backend(device, kind, backend)
    beside._set_group_name(GroupName(f"{group.group_name}/{name}"))
    return beside


def by_device(form: Form | None = None) -> Callable[[Method], Method]:
    """Delegate a method to another backend if that was requested for the tensors' device.

    form: the method's usual signature, if torch allows others
    """

    def decorate(method: Method) -> Method:
        @untraced
        @wraps(method)
        def call(group: MpiGroup, *arguments: Any, **named: Any) -> Any:
            if form is not None and (named or not form.is_usual(arguments)):
                arguments, named = form.usual(arguments, named), {}
            first = arguments[0]
            while type(first) is list and first:
                first = first[0]
            if not getattr(first, "is_cpu", True):
                other = group.other(first.device)
                if other is not None:
                    return getattr(other, method.__name__)(*arguments, **named)
            return method(group, *arguments, **named)

        return call

    return decorate


def at_once(prepare: Callable[..., Quick | None]) -> Callable[[Method], Method]:
    """Make a call of a method in one exchange if it is of a usual kind; see quick.py."""

    def decorate(method: Method) -> Method:
        @untraced
        @wraps(method)
        def call(group: MpiGroup, *arguments: Any, **named: Any) -> Any:
            if not named and arguments and group.is_quick(arguments[-1]):
                found = prepare(group.channel, *arguments)
                if found is not None and group.channel.begin(LOOKS, *found):
                    return None
            return method(group, *arguments, **named)

        return call

    return decorate


class MpiGroup(ProcessGroup):
    """A process group over MPI, created by torch.distributed.

    store, rank, size: torch's; channel: the communicator; members: MPI's processes, by rank
    timeout_s: default time-out of calls
    """

    # torch asks these of a group, or of what get_backend returns
    supports_splitting = supports_coalescing = supports_shrinking = False
    supports_reconfigure = supports_window = False
    supports_abort_hooks = supports_completion_hooks = False
    supports_time_estimate = _supports_time_estimate = False

    def __init__(
        self,
        store: Any,
        rank: int,
        size: int,
        channel: Channel,
        members: list[int],
        timeout_s: float,
    ) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]  # torch's other constructor
        self.store, self.channel, self.members = store, channel, members
        self.timeout_s = timeout_s
        self._engine = engine()
        self.wires: Any = None  # of set_wires
        self._name = self._description = ""
        self._others: dict[str, Any] = {}

    def getBackendName(self) -> str:  # torch's name
        """Return "cpdhpc"."""
        return NAME

    def getGroupName(self) -> str:
        """Return the group's name."""
        return self._name

    def setGroupName(self, name: str) -> None:
        """Set the group's name."""
        self._name = name

    def getGroupDesc(self) -> str:
        """Return the group's description."""
        return self._description

    def setGroupDesc(self, description: str) -> None:
        """Set the group's description."""
        self._description = description

    @property
    def _device_types(self) -> list[torch.device]:
        """The device whose tensors messages can use, once torch has registered the group.

        Before that it would attach a recorder, which only groups in C++ can have.
        """
        registered = self in distributed.distributed_c10d._world.pg_map
        return [torch.device("cpu")] if registered else []

    def get_backend(self, device: Any) -> Any:
        """Return this group: it is its own backend."""
        return self

    _get_backend = get_backend

    def supports_tensor_alloc(self, _: Any) -> bool:
        """Return False: FSDP2 allocates its buffers itself."""
        return False

    def set_timeout(self, timeout: timedelta) -> None:
        """Set the time-out of later calls."""
        self.timeout_s = timeout.total_seconds()

    _set_default_timeout = set_timeout

    def shutdown(self) -> None:
        """Free the communicator, for destroy_process_group.

        Unfinished calls fail after SETTLE_S.
        """
        self._engine.settle(self.channel, SETTLE_S)
        for other in self._others.values():
            if other is not None:
                other.shutdown()
        if self.wires is not None:
            self.wires.free()
        self.channel.free()

    def abort(self) -> None:
        """Do nothing: unfinished calls end by their time-outs."""

    def other(self, device: torch.device) -> Any:
        """Return the group of another backend requested for a device, or None.

        For "cpu:cpdhpc,cuda:nccl", of which torch creates only the first group.
        """
        if device.type not in self._others:
            self._others[device.type] = group_beside(self, self.timeout_s, self.store, device)
        return self._others[device.type]

    # Operations

    def is_quick(self, opts: Any) -> bool:
        """Whether a call can be made in one exchange, unless its tensors forbid it."""
        return not (
            getattr(opts, "asyncOp", True)
            or self.channel.board is None
            or self.wires is not None
            or self._engine.forked
            or CALLS.path
            or PROFILING()
        )

    def _start(
        self,
        title: str,
        call: str,
        program: Waits,
        tensors: Sequence[Tensor],
        result: Any,
        opts: Any = None,
        path: str = "",
        ends: list[Callable[[], None]] | None = None,
    ) -> Started:
        """Begin an operation; the thread advances it unless the caller will wait, as opts say.

        Returns None if it has ended and the caller would have waited: torch's functions allow that.
        """
        if self._engine.forked:
            raise RuntimeError(
                f"{call}: this process was made by fork: only the one that started MPI may call"
            )
        ends = [] if ends is None else ends
        waits = not getattr(opts, "asyncOp", True)
        step = NOTHING
        if PROFILING():  # an event may end in another thread than it began in
            handle = ENTER(f"{NAME}:{title}", *tensors)
            ends.append(lambda: self._engine.elsewhere(EXIT, handle).result())
        elif waits and not torch.is_inference_mode_enabled():
            first = first_step(program, ends)
            if first is None:
                return None
            step = first
        timeout = opts if isinstance(opts, timedelta) else getattr(opts, "timeout", None)
        timeout_s = timeout.total_seconds() if timeout is not None else 0.0
        operation = Operation(
            self._engine,
            self.channel,
            program,
            call,
            path,
            result,
            timeout_s if timeout_s > 0 else self.timeout_s,
            ends,
            step,
        )
        if not operation.move() and not waits:
            self._engine.proceed(operation)
        return operation

    def _collective(
        self,
        title: str,
        make: Callable[[Link, Hosted], tuple[str, Waits]],
        tensors: Sequence[Tensor],
        result: Any,
        opts: Any,
    ) -> Started:
        """Begin a collective call; make: returns its text and its program, or raises."""
        link, hosted = self.channel.next_call(), Hosted()
        try:
            if torch.is_inference_mode_enabled():  # whose tensors other threads cannot write
                with torch.inference_mode(False):
                    call, program = make(link, hosted)
            else:
                call, program = make(link, hosted)
        except Exception as error:  # all ranks raise it
            call, hosted = f"{title}: {error or type(error).__name__}", Hosted()
            program = link.agree(REFUSED + call)
        program = hosted.around(program)
        if not getattr(opts, "asyncOp", True):
            link.looks = LOOKS
        return self._start(title, call, program, tensors, result, opts, link.path, link.ends)

    def _by_wires(self, name: str, tensors: Sequence[Tensor], op: str = "") -> bool:
        """Whether a call is sent in few bits; tensors: a rank's share of it."""
        return self.wires is not None and all(self.wires.takes(name, x, op) for x in tensors)

    def _moved(
        self,
        name: str,
        link: Link,
        call: str,
        xs: Sequence[Tensor],
        outs: Sequence[Tensor],
        op: str = "",
    ) -> Waits:
        """Return the program of a call that is sent in few bits."""
        each = zip(xs, outs, strict=True)
        return programs.one_by_one([self.wires.move(name, link, call, x, o, op) for x, o in each])

    @at_once(quick.all_reduce)
    @by_device(forms.ALL_REDUCE)
    def allreduce(self, tensors: list[Tensor], opts: Any = None) -> Started:
        """Reduce tensors in place."""
        sparse = bool(tensors) and tensors[0].is_sparse
        return self._collective(
            "sparse_all_reduce" if sparse else "all_reduce",
            lambda link, hosted: self._all_reduce(link, hosted, tensors, opts.reduceOp),
            tensors,
            tensors,
            opts,
        )

    allreduce_coalesced = allreduce

    def _all_reduce(
        self, link: Link, hosted: Hosted, tensors: list[Tensor], op: Any
    ) -> tuple[str, Waits]:
        kind = op.op
        reductions = [reduction_of(kind, each.dtype, link.size) for each in tensors]
        name = reductions[0].name
        call = listed(tensors, f"all_reduce {name} ")
        if tensors[0].is_sparse:
            if name != "SUM":
                raise ValueError(f"{name} of a sparse tensor: must be SUM")
            (x,) = tensors
            call = f"{described(x, 'all_reduce SUM sparse ')} of {x.sparse_dim()} sparse axes"
            return call, programs.all_reduce_sparse(link, call, x)
        if name == "PREMUL_SUM":
            for each in (x.detach() for x in tensors):
                each.copy_(premultiplied(op, each))
        if self._by_wires("all_reduce", tensors, name):
            xs = [hosted.both(x) for x in tensors]
            return call, self._moved("all_reduce", link, call, xs, xs, name)
        return call, programs.all_reduce(link, call, [hosted.both(x) for x in tensors], reductions)

    @by_device(forms.REDUCE)
    def reduce(self, tensors: list[Tensor], opts: Any) -> Started:
        """Reduce a tensor into the root's."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            (x,), op, root = tensors, opts.reduceOp, opts.rootRank
            reduction = reduction_of(op.op, x.dtype, link.size)
            call = described(x, f"reduce {reduction.name} to rank {root} ")
            given = hosted.input(premultiplied(op, x))
            out = hosted.both(x) if link.rank == root else given
            return call, programs.reduce(link, call, given, root, reduction, out)

        return self._collective("reduce", make, tensors, tensors, opts)

    @at_once(quick.broadcast)
    @by_device(forms.BROADCAST)
    def broadcast(self, tensors: list[Tensor], opts: Any) -> Started:
        """Send the root's tensors to all."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            root = opts.rootRank
            call = listed(tensors, f"broadcast from rank {root} ")
            return call, programs.broadcast(link, call, [hosted.both(x) for x in tensors], root)

        return self._collective("broadcast", make, tensors, tensors, opts)

    @by_device(forms.ALL_GATHER)
    def allgather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any = None
    ) -> Started:
        """Send each rank's tensors to all, as lists."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            call = "all_gather " + "; ".join(map(listed, output_tensors))
            for outs, x in zip(output_tensors, input_tensors, strict=True):
                self._check_list("tensor_list", outs)
                self._check_like("tensor", x, outs[link.rank])
            to = [[hosted.output(each) for each in outs] for outs in output_tensors]
            each = zip(input_tensors, to, strict=True)
            ins = [hosted.apart(x, outs, link.rank) for x, outs in each]
            return call, programs.all_gather(link, call, to, ins)

        return self._collective("all_gather", make, input_tensors, output_tensors, opts)

    def allgather_coalesced(
        self, output_lists: list[list[Tensor]], input_list: list[Tensor], opts: Any = None
    ) -> Started:
        """Send each rank's tensors to all; output_lists: a list for each rank."""
        by_input = output_lists
        if {len(each) for each in output_lists} != {self.channel.size}:
            by_input = [list(outs) for outs in zip(*output_lists, strict=False)]
        return self.allgather(by_input, input_list, opts)

    @by_device()
    def all_gather_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, title: str = ""
    ) -> Started:
        """Send each rank's tensors to all, concatenated in the order of ranks."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            call = listed(outputs, listed(inputs, "all_gather_into_tensor ") + " to ")
            outs, wholes = [], []
            for out, x in zip(outputs, inputs, strict=True):
                self._check_parts("input_tensor", x, "output_tensor", out)
                wholes.append(hosted.output(out))
                outs.append([*wholes[-1].tensor_split(link.size)])
            if self._by_wires("all_gather", inputs):
                ins = [hosted.input(x) for x in inputs]
                return call, self._moved("all_gather", link, call, ins, wholes)
            each = zip(inputs, outs, strict=True)
            ins = [hosted.apart(x, to, link.rank) for x, to in each]
            return call, programs.all_gather(link, call, outs, ins)

        return self._collective(title or "all_gather", make, inputs, outputs, opts)

    allgather_into_tensor_coalesced = all_gather_single_coalesced

    @at_once(quick.all_gather)
    def all_gather_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Started:
        """Send each rank's tensor to all, concatenated in the order of ranks."""
        title = "_all_gather_base"
        return self.all_gather_single_coalesced([output], [input], opts, title)

    _allgather_base = all_gather_single

    @by_device()
    def reduce_scatter_single_coalesced(
        self, outputs: list[Tensor], inputs: list[Tensor], opts: Any = None, title: str = ""
    ) -> Started:
        """Reduce tensors; each rank gets its equal share."""
        opts = opts or distributed.ReduceScatterOptions()

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            op = opts.reduceOp
            reductions = [reduction_of(op.op, x.dtype, link.size) for x in inputs]
            call = listed(inputs, f"reduce_scatter_tensor {reductions[0].name} ")
            for out, x in zip(outputs, inputs, strict=True):
                self._check_parts("output", out, "input", x)
            outs = [hosted.output(out) for out in outputs]
            each = zip(outs, inputs, strict=True)
            ins = [self._not_at(hosted, out, premultiplied(op, x)) for out, x in each]
            if self._by_wires("reduce_scatter", outputs, reductions[0].name):
                name = reductions[0].name
                return call, self._moved("reduce_scatter", link, call, ins, outs, name)
            return call, programs.reduce_scatter(link, call, outs, ins, reductions)

        return self._collective(title or "reduce_scatter", make, inputs, outputs, opts)

    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced

    @at_once(quick.reduce_scatter)
    def reduce_scatter_single(self, output: Tensor, input: Tensor, opts: Any = None) -> Started:
        """Reduce a tensor; each rank gets its equal share."""
        title = "_reduce_scatter_base"
        return self.reduce_scatter_single_coalesced([output], [input], opts, title)

    _reduce_scatter_base = reduce_scatter_single

    @by_device(forms.REDUCE_SCATTER)
    def reduce_scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any = None
    ) -> Started:
        """Reduce lists of tensors; each rank gets its own one."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            (out,), (ins,), op = output_tensors, input_tensors, opts.reduceOp
            reduction = reduction_of(op.op, out.dtype, link.size)
            call = listed(ins, f"reduce_scatter {reduction.name} ")
            self._check_list("input_list", ins)
            self._check_like("output", out, ins[link.rank])
            whole = hosted.input(premultiplied(op, torch.cat([each.reshape(-1) for each in ins])))
            counts = [each.numel() for each in ins]
            given = link, call, hosted.output(out), whole, counts, reduction
            return call, programs.reduce_scatter_uneven(*given)

        return self._collective("reduce_scatter", make, input_tensors[0], output_tensors, opts)

    @by_device(forms.GATHER)
    def gather(
        self, output_tensors: list[list[Tensor]], input_tensors: list[Tensor], opts: Any
    ) -> Started:
        """Send all ranks' tensors to the root."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            (x,), root = input_tensors, opts.rootRank
            call = f"gather to rank {root} {described(x)}"
            outs: list[Tensor] = []
            if link.rank == root:
                self._check_list("gather_list", output_tensors[0])
                for each in output_tensors[0]:
                    self._check_like("tensor", x, each)
                outs = [hosted.output(each) for each in output_tensors[0]]
            return call, programs.gather(link, call, outs, hosted.apart(x, outs, root), root)

        return self._collective("gather", make, input_tensors, output_tensors, opts)

    @by_device()
    def gather_single(self, output: Tensor, input: Tensor, opts: Any) -> Started:
        """Send all ranks' tensors to the root, concatenated in the order of ranks."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            root = opts.rootRank
            call = described(input, f"gather_single to rank {root} ")
            outs: list[Tensor] = []
            if link.rank == root:
                self._check_parts("tensor", input, "gather_tensor", output)
                outs = [*hosted.output(output).tensor_split(link.size)]
            return call, programs.gather(link, call, outs, hosted.apart(input, outs, root), root)

        return self._collective("gather", make, [input], [output], opts)

    @by_device(forms.SCATTER)
    def scatter(
        self, output_tensors: list[Tensor], input_tensors: list[list[Tensor]], opts: Any
    ) -> Started:
        """Send each rank one of the root's tensors."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            (out,), root = output_tensors, opts.rootRank
            call = f"scatter from rank {root} {described(out)}"
            ins: list[Tensor] = []
            if link.rank == root:
                self._check_list("scatter_list", input_tensors[0])
                for each in input_tensors[0]:
                    self._check_like("tensor", out, each)
                ins = [hosted.input(each) for each in input_tensors[0]]
            return call, programs.scatter(link, call, hosted.output(out), ins, root)

        return self._collective("scatter", make, output_tensors, output_tensors, opts)

    @by_device()
    def alltoall(
        self, output_tensors: list[Tensor], input_tensors: list[Tensor], opts: Any = None
    ) -> Started:
        """Send each rank its own tensor, as lists."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            for name, each in (("output", output_tensors), ("input", input_tensors)):
                self._check_list(f"{name}_tensor_list", each)
            dtypes = {each.dtype for each in (*output_tensors, *input_tensors)}
            if len(dtypes) > 1:
                raise TypeError(f"tensors are of {dtypes}: must be of one dtype")
            call = f"all_to_all {str(dtypes.pop())[6:]}"
            outs = [hosted.output(each) for each in output_tensors]
            ins = [hosted.apart(each, outs) for each in input_tensors]
            to, given = ([link.memory(x) for x in each] for each in (outs, ins))
            return call, programs.all_to_all(link, call, to, given, (outs, ins))

        return self._collective("all_to_all", make, input_tensors, output_tensors, opts)

    @at_once(quick.all_to_all)
    @by_device()
    def all_to_all_single(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: list[int],
        input_split_sizes: list[int],
        opts: Any = None,
    ) -> Started:
        """Send each rank its rows of a tensor."""

        def make(link: Link, hosted: Hosted) -> tuple[str, Waits]:
            if output.dtype != input.dtype:
                raise TypeError(f"output is {output.dtype}: must be {input.dtype}, as the input")
            call = f"all_to_all_single {str(input.dtype)[6:]}"
            result = hosted.output(output)
            values = hosted.apart(input, [result])
            out, x = link.memory(result), link.memory(values)
            size, splits = link.size, (tuple(output_split_sizes), tuple(input_split_sizes))
            to = [out[each] for each in rows("output", output.shape, len(out), splits[0], size)]
            given = [x[each] for each in rows("input", input.shape, len(x), splits[1], size)]
            return call, programs.all_to_all(link, call, to, given, (result, values))

        return self._collective("all_to_all", make, [input], [output], opts)

    alltoall_base = all_to_all_single

    @untraced
    def barrier(self, opts: Any = None) -> Started:
        """Wait for all ranks."""
        return self.meeting("barrier", opts)

    def meeting(self, call: str, opts: Any = None) -> Started:
        """Wait for all ranks to make a call of this name."""

        def make(link: Link, _: Hosted) -> tuple[str, Waits]:
            return call, programs.barrier(link, call)

        return self._collective(call, make, [], [], opts)

    def monitored_barrier(
        self, timeout: timedelta | None = None, wait_all_ranks: bool = False
    ) -> None:
        """Wait for all ranks; the error names those that are missing."""
        opts = distributed.BarrierOptions()
        if timeout is not None:
            opts.timeout = timeout
        self.barrier(opts).wait()

    # Messages between two ranks

    @by_device()
    def send(self, tensors: list[Tensor], dst_rank: int, tag: int) -> Started:
        """Send a tensor to a rank."""
        call = f"send to rank {dst_rank} {listed(tensors)}"
        channel, mine = self.channel, 2 * self._checked(tag) + 1
        (x,) = (Hosted().input(each) for each in tensors)

        def program() -> Generator[Step, None, None]:
            requests = channel.send(channel.memory(x), dst_rank, mine)
            yield Step(requests, [dst_rank] * len(requests))

        return self._start("send", call, program(), tensors, tensors)

    @by_device()
    def recv(self, tensors: list[Tensor], src_rank: int, tag: int) -> Started:
        """Receive a tensor from a rank."""
        return self._receive("recv", tensors, src_rank, tag)

    @by_device()
    def recv_anysource(self, tensors: list[Tensor], tag: int) -> Started:
        """Receive a tensor from any rank."""
        return self._receive("recvAnySource", tensors, self.channel.mpi.ANY_SOURCE, tag)

    def _receive(self, title: str, tensors: list[Tensor], source: int, tag: int) -> Started:
        who = f"rank {source}" if source >= 0 else "any rank"
        call = f"recv from {who} {listed(tensors)}"
        hosted, mine = Hosted(), 2 * self._checked(tag) + 1
        (x,) = (hosted.output(each) for each in tensors)
        arrived: list[int] = []
        ends: list[Callable[[], None]] = []
        program = programs.receive(self.channel, call, x, source, mine, arrived, ends)
        operation = self._start(title, call, hosted.around(program), tensors, tensors, ends=ends)
        assert isinstance(operation, Operation), "no options: it may proceed"
        operation.sources = arrived
        return operation

    def _checked(self, tag: int) -> int:
        if not 0 <= tag < self.channel.most_tag:
            raise ValueError(f"{NAME}: tag={tag}: must be 0..{self.channel.most_tag - 1}")
        return tag

    # Arguments

    def _not_at(self, hosted: Hosted, out: Tensor, x: Tensor) -> Tensor:
        """Return values, flat, that an output shares at most at this rank's part."""
        values = hosted.input(x)
        own = values.data_ptr() + self.channel.rank * out.nbytes
        return values.clone() if overlap(values, out) and out.data_ptr() != own else values

    def _check_list(self, name: str, tensors: Sequence[Tensor]) -> None:
        if len(tensors) != self.channel.size:
            raise ValueError(
                f"{name} has {len(tensors)} tensors: must have {self.channel.size}, one a rank"
            )

    def _check_like(self, name: str, tensor: Tensor, other: Tensor) -> None:
        if tensor.dtype != other.dtype or tensor.numel() != other.numel():
            raise ValueError(f"{name} is {described(tensor)}: must be like {described(other)}")

    def _check_parts(self, name: str, part: Tensor, whole_name: str, whole: Tensor) -> None:
        size = self.channel.size
        if part.dtype != whole.dtype or part.numel() * size != whole.numel():
            raise ValueError(
                f"{whole_name} is {described(whole)}: must have the dtype and {size} times the "
                f"elements of {name}, {described(part)}"
            )

"""Base classes of gradient averaging, and the checks and helpers that methods share."""

from __future__ import annotations

from abc import ABCMeta, abstractmethod
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields
from inspect import Signature, signature
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeVar
from zlib import crc32

import numpy as np
import numpy.typing as npt

from ..collectives.allreduce import Allreduce, Unagreed
from ..collectives.checks import NonFiniteGradient, check_alike, is_finite
from ..collectives.method import AUTO, Machine, as_machine, configured
from ..formats import TILE, FloatFormat, TableFormat
from ..methods import USUAL, suggest
from ..ops import backend_of, on_gpu, to_host
from ..ops.common import NONFINITE_BITS
from ..options import Allowed, check_fields
from ..randomness import Key, random_key
from ..table_formats import spelled
from ..world.ranks import RankFailure, Ranks, is_agreed
from .bucket import Bucket, State

Array = npt.NDArray[Any]
Name = TypeVar("Name")
HALF_ULP = 2.0**103  # of the largest float32: adding less never makes a finite value overflow
BLOCK_VALUES = 1 << 15  # a few arrays of this many values fit in a core's cache


@dataclass(frozen=True)
class Context:
    """The inputs of a call of aggregate besides the gradients.

    state: arrays that the method keeps; seed: of this bucket; iteration: from 0
    epoch: passes over the samples so far, 0.0 if unknown
    loss_scale: factor of the gradients; options in the unit of gradients must be scaled by it
    out: float32[bucket.size], scratch memory. A method that writes its mean there, with zeros
        between layers, and returns it as Mean.flat saves a copy
    agreed: argument of the first Allreduce.run of a method that compares; 0: none
    """

    world: Ranks
    state: State
    seed: int = 0
    iteration: int = 0
    epoch: float = 0.0
    loss_scale: float = 1.0
    out: Array | None = None
    agreed: int = 0

    @property
    def outs(self) -> list[Array] | None:
        """The argument outs of an all-reduce that writes into out."""
        return None if self.out is None else [self.out]

    def key(self, name: str, rank: int = 0) -> Key:
        """Return the key of the random numbers of a name, this iteration and a rank.

        If all processes pass the same rank, as 0, all of them draw the same numbers.
        """
        return random_key(self.seed, crc32(name.encode()), self.iteration, rank)


@dataclass(frozen=True)
class Column:
    """A figure of each layer that a method adds to the record.

    counted: if True, observe counts values of a rank's gradient, and the record has their share
        of the non-zero values of all ranks; else Mean.layers has the figure, equal on all ranks
    """

    long_name: str
    counted: bool = False
    units: str = "1"


@dataclass(frozen=True)
class Mean:
    """The mean gradient and its figures.

    flat: float32[bucket.size], identical on all ranks
    layers: float64[layers] by the names of columns that are not counted, identical on all ranks
    is_finite: whether finite() made it, so that flat is known to be finite; replace resets it
    """

    flat: Array
    layers: Mapping[str, Array] = field(default_factory=dict)
    is_finite: bool = field(default=False, init=False)

    @classmethod
    def finite(cls, flat: Array, layers: Mapping[str, Array] | None = None) -> Mean:
        """Return a mean that all ranks have checked for NaN and infinity: averaged skips that."""
        mean = cls(flat, layers or {})
        object.__setattr__(mean, "is_finite", True)
        return mean


class Checked(ABCMeta):
    """Metaclass that checks the fields of a new object by the rules for tables of job files.

    Job files are read without calling the class, so nothing is checked twice. Raises ConfigError.
    """

    def __call__(cls: type[Name], *given: Any, **options: Any) -> Name:
        made: Any = type.__call__(cls, *given, **options)
        if "__dataclass_fields__" in vars(cls):
            table = {each.name: getattr(made, each.name) for each in fields(made) if each.init}
            check_fields(cls, as_table(table), cls.__name__)
        return made

    @property
    def __signature__(cls) -> Signature:
        """The fields, which inspect.signature shows instead of the arguments of __call__."""
        _, *parameters = signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return Signature(parameters)


def as_table(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a job file writes them: names of formats, numbers of Python."""
    return {
        key: value.name
        if isinstance(value, FloatFormat)
        else spelled(value)
        if isinstance(value, TableFormat)
        else value.item()
        if isinstance(value, np.generic)
        else value
        for key, value in options.items()
    }


@dataclass(frozen=True)
class Aggregator(metaclass=Checked):
    """A way of averaging gradients over the ranks: a frozen configuration, stored with results.

    Raises ConfigError, a ValueError, if a field is not what its annotation allows.
    """

    align: ClassVar[int] = 1  # layers start on multiples of this many values
    columns: ClassVar[Mapping[str, Column]] = {}  # figures of each layer in the record
    stateless: ClassVar[bool] = False  # keeps nothing by default, as stages of a network need
    __pydantic_config__: ClassVar[Any] = {"extra": "forbid", "strict": True, "allow_inf_nan": False}

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return the schema by which pydantic reads the table of a job file, strict in its values.

        The table itself may be a dict instead of an Aggregator.
        """
        return {**handler(source), "strict": False}

    @property
    def has_momentum(self) -> bool:
        """Whether means include momentum, so that the optimiser must have none."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether ranks keep residuals, so that momentum above most_momentum loses accuracy.

        docs/reference/compression.md, "When a method that holds values back may have momentum".
        """
        return False

    @property
    def compares(self) -> bool:
        """Whether the first message of aggregate is an all-reduce that compares Context.agreed."""
        return False

    @property
    def most_momentum(self) -> float:
        """The largest momentum, of optimiser or method, that residuals allow."""
        return 0.5

    @abstractmethod
    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks of their gradients. Collective: all processes call.

        gradients: one float32[bucket.size] per hosted rank, in the layout of bucket; unchanged.
            If they are CuPy's, so are the mean and the state of each value
        Raises NonFiniteGradient on all ranks if a gradient or the mean is not finite. A method
        that calls checked_mean before it changes its state, and returns Mean.finite, leaves the
        state unchanged then; the mean of any other is checked by averaged, after the change.
        """

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError if an option names a layer that the model does not have."""

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Array]:
        """Return int64[layers] for each counted column of one rank's gradient; absent ones are 0.

        gradient: float32[bucket.size]; mean: the result of aggregate
        """
        return {}


@dataclass(frozen=True)
class DenseMessages(Aggregator):
    """A method whose messages are all-reduces of dense arrays, in any wire.

    wire, algorithm, scaling: of the all-reduces, as in cpdhpc.allreduce
    Raises ValueError if one is unknown or two exclude each other.
    """

    wire: str = "raw"
    algorithm: str = USUAL
    scaling: str | None = None

    def __post_init__(self) -> None:
        self._allreduce(seed=0)

    def _allreduce(self, seed: int) -> Allreduce:
        return configured(
            Allreduce,
            wire=self.wire,
            algorithm=self.algorithm,
            scaling=self.scaling,
            op="mean",
            seed=seed,
        )

    def _mean(self, parts: Mapping[Name, Sequence[Array]], context: Context) -> dict[Name, Array]:
        """Return the mean of each part over all ranks, in one all-reduce. Collective.

        parts: by name, float32 of one shape, of each hosted rank
        """
        if not parts:
            return {}
        shapes = tuple(each[0].shape for each in parts.values())
        box = Bucket(tuple(map(str, parts)), shapes, 1 if self.wire == "raw" else TILE)
        flats = [
            box.flatten([each[row] for each in parts.values()])
            for row in range(len(context.world.hosted))
        ]
        method = self._allreduce(context.seed)
        mean = method.run(
            context.world, flats, iteration=context.iteration, segments=box.segments
        ).arrays[0]
        if not is_finite(mean):  # identical on all ranks, and so is the answer
            raise NonFiniteGradient([box.names[i] for i in nonfinite_layers(mean, box)], [])
        return dict(zip(parts, box.views(mean), strict=True))


LOSSES = {  # the effect of encoding on the values of a layer
    "aps_shift": Column("k of the scale 2**k; NaN: layers have none"),
    "underflow_share": Column(
        "share of non-zero gradient values, over all ranks, that become zero", counted=True
    ),
    "saturated_share": Column(
        "share of non-zero gradient values, over all ranks, that saturate", counted=True
    ),
}


Layers = Annotated[tuple[str, ...], Allowed(is_array=True)]  # an option: names of parameters


def check_known(option: str, given: Collection[str], names: Collection[str]) -> None:
    """Raise ValueError if an option names a layer that the model does not have."""
    for name in given:
        if name not in names:
            raise ValueError(f"{option}: no layer is called {name!r}: {suggest(name, names)}")


def mean_in_float32(
    gradients: Sequence[Array],
    bucket: Bucket,
    layers: Collection[str],
    context: Context,
    flat: Array,
    algorithm: str = USUAL,
) -> None:
    """Write the float32 mean of some layers into flat. Collective, unless there are none.

    gradients: float32[bucket.size] of each hosted rank
    Raises NonFiniteGradient on all ranks.
    """
    segments = [segment for segment in bucket.segments if segment.name in layers]
    if not segments:
        return
    parts = [np.concatenate([g[a:b] for _, a, b in segments]) for g in gradients]
    method = configured(Allreduce, wire="raw", algorithm=algorithm, op="mean")
    mean, end = method.run(context.world, parts).arrays[0], 0
    for _, a, b in segments:
        flat[a:b], end = mean[end : end + b - a], end + b - a
    if not np.isfinite(mean).all():  # identical on all ranks, and so is the answer
        raise nonfinite(context.world, gradients, bucket, nonfinite_layers(flat, bucket))


def shared_largest(
    world: Ranks, gradients: Sequence[Array], bucket: Bucket, largest: Array
) -> Array:
    """Return the largest values over all ranks, float32[k]. Collective.

    largest: float32[k] of this process, 0 or more; NaN or infinite if a gradient is
    Raises NonFiniteGradient on all ranks, naming the layers.
    """
    bits = world.max(largest.astype(np.float32).view(np.int32).astype(np.int64), "largest values")
    if bits.size and bits.max() >= REFUSED:  # check_place has failed on a process
        world.agree(None, "gradients")
    if bits.size and bits.max() >= NONFINITE_BITS:
        raise nonfinite(world, gradients, bucket)
    return bits.astype(np.int32).view(np.float32)


def raise_unless_finite(world: Ranks, gradients: Sequence[Array], bucket: Bucket) -> None:
    """Raise NonFiniteGradient on all ranks if one holds NaN or infinity. Collective."""
    shared_largest(world, gradients, bucket, amax(gradients))


def amax(xs: Sequence[Array]) -> Array:
    """Return the largest magnitude of all float32[n], NumPy's float32[1]; NaN if one is."""
    return as_float(bits_of_largest(xs))


def bits_of_largest(xs: Sequence[Array]) -> int:
    """Return the float32 bits of the largest magnitude of all float32[n]."""
    return max(int(to_host(backend_of(x).amax_tiles(x)).max(initial=0)) for x in xs)


def as_float(bits: int) -> Array:
    """Return the float32 with these bits, float32[1], as amax returns it."""
    return np.array([bits], np.uint32).view(np.float32)


def blocks(x: Array, multiple: int = 1) -> Iterator[slice]:
    """Yield consecutive slices of x that fit in a core's cache; on a GPU one slice of all.

    multiple: the length of all but the last is a multiple of it, about BLOCK_VALUES
    Several steps on each value go through memory once if they are done block by block.
    """
    step = max(1, x.size if on_gpu(x) else BLOCK_VALUES // multiple * multiple, multiple)
    for start in range(0, x.size, step):
        yield slice(start, min(start + step, x.size))


def zeros(n: int, like: Array) -> Array:
    """Return zeros, float32[n], on the device of like; on the CPU without a pass over memory."""
    return np.zeros_like(like, shape=(n,)) if on_gpu(like) else np.zeros(n, np.float32)


REFUSED = 1 << 32  # above the bits of any float32
RESIDUAL = "residual"  # name of residuals in a state
PLACES = ("numpy.ndarray", "cupy.ndarray")  # allowed types of gradients


def check_place(method: object, world: Ranks, gradients: Sequence[Array], count: int = 1) -> None:
    """Raise TypeError on all ranks unless the gradients of each process are NumPy's or CuPy's.

    Collective if it raises: the other processes then raise in the call that must follow, of
    shared_largest with count values or of raise_unless_finite.
    """
    came = sorted({f"{type(x).__module__}.{type(x).__qualname__}" for x in gradients})
    if len(came) > 1 or came[0] not in PLACES:
        world.max(np.full(count, REFUSED), "largest values")
        world.agree(
            TypeError(
                f"{type(method).__name__}: gradients: {' and '.join(came)}: must be "
                f"{' or '.join(PLACES)}"
                f"{', the same on all hosted ranks' if len(came) > 1 else ''}"
            ),
            "gradients",
        )


def machine_of_auto(
    name: str, algorithm: str, machine: Machine | str | Path | None
) -> Machine | None:
    """Return the machine of algorithm "auto", its file read once; None for the default.

    name: of the class, for errors. Raises ValueError if a machine comes with another algorithm;
    else as collectives.method.as_machine.
    """
    if machine is None:
        return None
    if algorithm != AUTO:
        raise ValueError(
            f"{name}: machine: only algorithm='auto' chooses by it: algorithm={algorithm!r}"
        )
    return as_machine(machine)


def nonfinite_layers(flat: Array, bucket: Bucket) -> list[int]:
    """Return the indices of the layers in which a buffer holds NaN or infinity."""
    return [i for i, view in enumerate(bucket.views(flat)) if not np.isfinite(view).all()]


def checked_mean(world: Ranks, flat: Array, gradients: Sequence[Array], bucket: Bucket) -> Array:
    """Return flat, a mean that is identical on all ranks, after a check for overflow.

    Raises NonFiniteGradient on all ranks, naming the layers. Collective only if it raises.
    """
    if is_finite(flat):
        return flat
    raise nonfinite(world, gradients, bucket, nonfinite_layers(flat, bucket))


def averaged(method: Aggregator, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
    """Return the mean of a method, with finite values only. Collective.

    A mean that the method has not checked (Mean.finite) is checked here; one small message tells
    all ranks the result, or the error that the method raised on one of them.
    Raises NonFiniteGradient on all ranks, naming layers and ranks; TypeError or ValueError on all
    if a method returns on one anything but a Mean of contiguous float32[bucket.size].
    """
    mean, error, bad, world = None, None, list[int](), context.world
    try:
        mean = method.aggregate(gradients, bucket, context)
    except (NonFiniteGradient, RankFailure, Unagreed):  # which all ranks raise
        raise
    except Exception as raised:
        if is_agreed(raised):
            raise
        error = raised  # perhaps of this rank only
    else:
        if isinstance(mean, Mean) and mean.is_finite:
            return mean
        error = _problem(type(method).__name__, mean, bucket)
    if isinstance(mean, Mean) and error is None and not is_finite(mean.flat):
        bad = nonfinite_layers(mean.flat, bucket)
    if any(check_alike(world, error, {}, [len(bad)], f"{type(method).__name__}: mean")):
        everywhere = {i for process in world.gather(bad) for i in process}
        raise nonfinite(world, gradients, bucket, sorted(everywhere))
    assert isinstance(mean, Mean), "else all ranks have raised"
    return mean


def _problem(name: str, mean: object, bucket: Bucket) -> Exception | None:
    """Return the error of a method's result, not of its values; None if there is none."""
    if not isinstance(mean, Mean):
        return TypeError(f"{name}.aggregate: returned {type(mean).__name__}: must be a Mean")
    flat: object = mean.flat
    came = f"{type(flat).__module__}.{type(flat).__qualname__}"
    if came not in PLACES:
        return TypeError(f"{name}.aggregate: mean: {came}: must be {' or '.join(PLACES)}")
    try:
        bucket.views(mean.flat)
    except ValueError as error:
        return ValueError(f"{name}.aggregate: mean: {str(error).partition(': ')[2]}")
    return None


def nonfinite(
    world: Ranks, gradients: Sequence[Array], bucket: Bucket, in_mean: Sequence[int] = ()
) -> NonFiniteGradient:
    """Return the error that names the layers and ranks of non-finite values. Collective.

    in_mean: layers whose mean is not finite, named if all gradients are finite
    """
    own = [
        (layer, rank)
        for rank, flat in zip(world.hosted, gradients, strict=True)
        for layer in nonfinite_layers(flat, bucket)
    ]
    found = [each for process in world.gather(own) for each in process]
    layers = sorted({layer for layer, _ in found}) or in_mean
    return NonFiniteGradient(
        [bucket.names[layer] for layer in layers], sorted({rank for _, rank in found})
    )

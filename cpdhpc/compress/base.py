"""What every way of averaging gradients over the ranks has in common."""

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
HALF_ULP = 2.0**103  # of the largest float32: less takes no finite value beyond it
BLOCK_VALUES = 1 << 15  # that are looked at together: a few arrays of them fit in a core's cache


@dataclass(frozen=True)
class Context:
    """What a method is told of the moment.

    state: what the method keeps; seed: of this bucket; iteration: from 0
    epoch: how often all samples have been seen, 0.0 where nobody says
    loss_scale: what gradients are multiplied by, which options in their unit have to follow
    out: float32[bucket.size] that is of use to nobody: where the mean is made there, with zeros
        between layers, and is Mean.flat itself, it is not copied
    agreed: of Allreduce.run, for the first one of a method that compares; 0: nothing
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
        """out as an all-reduce takes it."""
        return None if self.out is None else [self.out]

    def key(self, name: str, rank: int = 0) -> Key:
        """Return the key of the random numbers that name, this iteration and a rank choose.

        With one rank for all processes, as 0, all of them draw the same.
        """
        return random_key(self.seed, crc32(name.encode()), self.iteration, rank)


@dataclass(frozen=True)
class Column:
    """A figure that a method offers for each layer, as it stands in the record.

    counted: observe counts values of a rank's gradient, and the record has the share of the
    non-zero values of all ranks; else Mean.layers has it, alike on all ranks
    """

    long_name: str
    counted: bool = False
    units: str = "1"


@dataclass(frozen=True)
class Mean:
    """The mean gradient, and what it took to get it.

    flat: float32[bucket.size], the same bits on every rank
    layers: float64[layers] by the names of columns that are not counted, alike on every rank
    is_finite: whether flat is known to be finite, as finite() says; a copy by replace is unknown
    """

    flat: Array
    layers: Mapping[str, Array] = field(default_factory=dict)
    is_finite: bool = field(default=False, init=False)

    @classmethod
    def finite(cls, flat: Array, layers: Mapping[str, Array] | None = None) -> Mean:
        """Return a mean whose method has looked at flat, on all ranks: nobody looks once more."""
        mean = cls(flat, layers or {})
        object.__setattr__(mean, "is_finite", True)
        return mean


class Checked(ABCMeta):
    """A class whose objects are judged when they are made as a table of a job file is.

    That reads a table by no call of the class, so nothing is judged twice. Raises ConfigError.
    """

    def __call__(cls: type[Name], *given: Any, **options: Any) -> Name:
        made: Any = type.__call__(cls, *given, **options)
        if "__dataclass_fields__" in vars(cls):
            table = {each.name: getattr(made, each.name) for each in fields(made) if each.init}
            check_fields(cls, as_table(table), cls.__name__)
        return made

    @property
    def __signature__(cls) -> Signature:
        """What inspect.signature shows: the fields, in place of what __call__ above takes."""
        _, *parameters = signature(cls.__init__).parameters.values()  # type: ignore[misc]
        return Signature(parameters)


def as_table(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return options as a job file has them: formats by name, Python's numbers."""
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

    Raises ConfigError, a ValueError, where a field is not what its annotation allows.
    """

    align: ClassVar[int] = 1  # layers start on multiples of this many values
    columns: ClassVar[Mapping[str, Column]] = {}  # what the record has of each layer
    stateless: ClassVar[bool] = False  # keeps nothing by default: goes with stages of a network
    __pydantic_config__: ClassVar[Any] = {
        "extra": "forbid",
        "strict": True,
        "allow_inf_nan": False,
    }

    @classmethod
    def __get_pydantic_core_schema__(cls, source: Any, handler: Any) -> Any:
        """Return how pydantic reads the table of a job file: strict about its values."""
        return {**handler(source), "strict": False}  # the table itself need be no Aggregator

    @property
    def has_momentum(self) -> bool:
        """Whether means have some, so that the optimiser must have none."""
        return False

    @property
    def holds_back(self) -> bool:
        """Whether values wait on a rank, so that momentum above most_momentum loses accuracy.

        docs/reference/compression.md, "When a method that holds values back may have momentum".
        """
        return False

    @property
    def compares(self) -> bool:
        """Whether the first message of aggregate is an all-reduce that compares Context.agreed."""
        return False

    @property
    def most_momentum(self) -> float:
        """The most momentum that goes with values that wait, the optimiser's or the method's."""
        return 0.5

    @abstractmethod
    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        """Return the mean over all ranks of their gradients. Collective: all processes call.

        gradients: one float32[bucket.size] per hosted rank, as bucket lays them out; unchanged.
            CuPy arrays, too: then the mean and what is kept of each value are CuPy's
        Raises NonFiniteGradient on all ranks where a gradient or the mean is not finite, with what
        is kept unchanged: checked_mean before anything is kept, and then Mean.finite. The mean
        of a method that does not is checked by averaged, after the method has kept what it keeps.
        """

    def check_layers(self, names: Collection[str]) -> None:
        """Raise ValueError where an option names a layer that is not among the model's."""

    def observe(self, gradient: Array, bucket: Bucket, mean: Mean) -> Mapping[str, Array]:
        """Return int64[layers] of counted columns, of one rank's gradient; those not there are 0.

        gradient: float32[bucket.size]; mean: what aggregate made of it and the others
        """
        return {}


@dataclass(frozen=True)
class DenseMessages(Aggregator):
    """A method that makes of gradients what can be all-reduced, in any wire.

    wire, algorithm, scaling: of the all-reduces, as in cpdhpc.allreduce
    Raises ValueError where one is unknown or does not go with another.
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
        if not is_finite(mean):  # the same bits, so the same answer, on all ranks
            raise NonFiniteGradient([box.names[i] for i in nonfinite_layers(mean, box)], [])
        return dict(zip(parts, box.views(mean), strict=True))


LOSSES = {  # what encoding does to the values of a layer
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
    """Raise ValueError where an option names a layer that the model has not."""
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
    Raises NonFiniteGradient on all ranks alike.
    """
    segments = [segment for segment in bucket.segments if segment.name in layers]
    if not segments:
        return
    parts = [np.concatenate([g[a:b] for _, a, b in segments]) for g in gradients]
    method = configured(Allreduce, wire="raw", algorithm=algorithm, op="mean")
    mean, end = method.run(context.world, parts).arrays[0], 0
    for _, a, b in segments:
        flat[a:b], end = mean[end : end + b - a], end + b - a
    if not np.isfinite(mean).all():  # the same bits, so the same answer, on all ranks
        raise nonfinite(context.world, gradients, bucket, nonfinite_layers(flat, bucket))


def shared_largest(
    world: Ranks, gradients: Sequence[Array], bucket: Bucket, largest: Array
) -> Array:
    """Return the largest values of all ranks, float32[k]. Collective.

    largest: float32[k] of this process, 0 or more, one NaN or infinite where a gradient is
    Raises NonFiniteGradient on all ranks, naming the layers.
    """
    bits = world.max(largest.astype(np.float32).view(np.int32).astype(np.int64), "largest values")
    if bits.size and bits.max() >= REFUSED:  # by check_place on some process
        world.agree(None, "gradients")
    if bits.size and bits.max() >= NONFINITE_BITS:
        raise nonfinite(world, gradients, bucket)
    return bits.astype(np.int32).view(np.float32)


def raise_unless_finite(world: Ranks, gradients: Sequence[Array], bucket: Bucket) -> None:
    """Raise NonFiniteGradient on all ranks where one holds NaN or infinity. Collective."""
    shared_largest(world, gradients, bucket, amax(gradients))


def amax(xs: Sequence[Array]) -> Array:
    """Return the largest magnitude of all float32[n], float32[1], NumPy's: NaN where one is."""
    return as_float(bits_of_largest(xs))


def bits_of_largest(xs: Sequence[Array]) -> int:
    """Return the float32 bits of the largest magnitude of all float32[n]."""
    return max(int(to_host(backend_of(x).amax_tiles(x)).max(initial=0)) for x in xs)


def as_float(bits: int) -> Array:
    """Return the float32 of some bits, float32[1], as amax returns it."""
    return np.array([bits], np.uint32).view(np.float32)


def blocks(x: Array, multiple: int = 1) -> Iterator[slice]:
    """Yield slices of x.size values, one after the other, that stay in a core's cache.

    x: on a GPU there is one; multiple: all but the last are as long as a multiple of it, about
        BLOCK_VALUES
    What takes several steps for each value goes through memory once if done block by block.
    """
    step = max(1, x.size if on_gpu(x) else BLOCK_VALUES // multiple * multiple, multiple)
    for start in range(0, x.size, step):
        yield slice(start, min(start + step, x.size))


def zeros(n: int, like: Array) -> Array:
    """Return float32[n] where like lies, zeros that no pass over the CPU's memory has to write."""
    return np.zeros_like(like, shape=(n,)) if on_gpu(like) else np.zeros(n, np.float32)


REFUSED = 1 << 32  # above the bits of any float32
RESIDUAL = "residual"  # the name of what waits, in a state
PLACES = ("numpy.ndarray", "cupy.ndarray")  # allowed types of gradients


def check_place(
    method: Aggregator, world: Ranks, gradients: Sequence[Array], count: int = 1
) -> None:
    """Raise TypeError on all ranks unless the gradients of each process are NumPy's or CuPy's.

    Collective where it raises: the other processes go on to shared_largest of count values, or to
    raise_unless_finite, and hear of it there.
    """
    came = sorted({f"{type(x).__module__}.{type(x).__qualname__}" for x in gradients})
    if len(came) > 1 or came[0] not in PLACES:
        world.max(np.full(count, REFUSED), "largest values")
        world.agree(
            TypeError(
                f"{type(method).__name__}: gradients: {' and '.join(came)}: must be "
                f"{' or '.join(PLACES)}"
                f"{', on all hosted ranks alike' if len(came) > 1 else ''}"
            ),
            "gradients",
        )


def machine_of_auto(
    name: str, algorithm: str, machine: Machine | str | Path | None
) -> Machine | None:
    """Return the machine of algorithm "auto", its file read once; None for the default.

    name: of the class, for errors. Raises ValueError where there is a machine and another
    algorithm; else as collectives.method.as_machine.
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
    """Return a mean, float32[bucket.size], alike on all ranks, which finite values may overflow.

    Raises NonFiniteGradient on all ranks, naming the layers. Collective only where it raises.
    """
    if is_finite(flat):
        return flat
    raise nonfinite(world, gradients, bucket, nonfinite_layers(flat, bucket))


def averaged(method: Aggregator, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
    """Return the mean that a method makes, all of whose values are finite. Collective.

    Where the method has not looked itself (Mean.finite), its mean is looked at here, and all ranks
    hear in one small message what any has found, or what the method has raised there.
    Raises NonFiniteGradient on all ranks, naming layers and ranks; TypeError or ValueError on all
    where a method returns on one anything but a Mean of contiguous float32[bucket.size].
    """
    mean, error, bad, world = None, None, list[int](), context.world
    try:
        mean = method.aggregate(gradients, bucket, context)
    except (NonFiniteGradient, RankFailure, Unagreed):  # which all ranks raise
        raise
    except Exception as raised:
        if is_agreed(raised):
            raise
        error = raised  # of one rank, for all that is known
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
    """Return what is wrong with what a method returned, but for values that are not finite."""
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
    """Return the error that names where non-finite values came from. Collective.

    in_mean: the layers where they show in the mean, named where no gradient holds any
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

"""Records the tensors of layers in training: a model's hooks, and one file of all ranks."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Self

import numpy as np

from ... import store
from ...collectives import sparse
from ...collectives.checks import alike_on_all
from ...config import ConfigError, validate
from ...methods import suggest
from ...ops import to_host
from ...whole_files import as_path
from ...world.ranks import Loopback, Ranks
from .recording import KIND, KINDS, Array, KindName, Recording, kept_rows

if TYPE_CHECKING:
    import torch

GEOMETRY = ("kernel_size", "stride", "padding", "dilation", "groups", "padding_mode")


class _Part(NamedTuple):
    """An array of a rank, or of process 0 if rank is -1; rows: before it was thinned."""

    kind: KindName
    name: str
    rank: int
    rows: int
    values: Array


About = tuple[KindName, str, int, int, tuple[int, ...]]  # a _Part with the shape of its values


class Recorder:
    """Records the tensors of a model's layers in some iterations. Collective, and step too.

    model: its layers with parameters that match are recorded, in training mode only
    path: of the file; when step returns it has all arrays of the iteration, or none
    reducer: a GradientReducer of the model; None: one process, and the gradients in p.grad
    resume: continue the file, if there is one, from the iteration passed to begin
    layers, ... seed: the keys of [record] in a job file; see Recording
    Changes no bit of training. The layers' gradients are of the loss times its scale.
    Raises UserError on all processes for patterns that match no layer, or a file that exists,
    cannot be written, or has other settings.

        with Recorder(model, Path("run.h5"), reducer, every=100) as recorder:
            for inputs, targets in batches:
                optimizer.zero_grad()
                loss_function(model(inputs), targets).backward()
                mean = reducer.reduce()
                optimizer.step()
                recorder.step(mean)
    """

    def __init__(
        self,
        model: torch.nn.Module,
        path: Path | str,
        reducer: Any = None,
        *,
        resume: bool = False,
        layers: Sequence[str] = ("*",),
        tensors: Sequence[KindName] = tuple(KINDS),
        every: int = 0,
        count: int = 20,
        iterations: Sequence[int] = (),
        max_mib: float = 256.0,
        thin: bool = False,
        seed: int = 0,
    ) -> None:
        settings = {
            "layers": layers, "tensors": tensors, "every": every, "count": count,
            "iterations": iterations, "max_mib": max_mib, "thin": thin, "seed": seed,
        }  # fmt: skip
        self.model, self.reducer = model, reducer
        self.world: Ranks = Loopback() if reducer is None else reducer.world
        with alike_on_all(self.world, "Recorder: arguments") as alike:
            self.path = as_path("Recorder", path)
            alike |= {"path": str(self.path), "resume": resume, **settings}
            self.settings = validate(Recording, settings, "Recorder")
            self._find_layers()
            if not self.settings.number:
                raise ConfigError("Recorder: every and iterations: nothing is recorded: set one")
        self.world.on_first(partial(self._open, resume), "Recorder")
        self._most: dict[tuple[str, str], int] | None = None  # rows, by kind and name
        self._handles = [
            layer.register_forward_hook(partial(self._forward, name))
            for name, layer in self.layers.items()
        ]
        self.begin(0)

    def _find_layers(self) -> None:
        own = {
            name: layer
            for name, layer in self.model.named_modules()
            if any(True for _ in layer.parameters(recurse=False))
        }
        for pattern in self.settings.layers:
            if not any(fnmatchcase(name, pattern) for name in own):
                raise ConfigError(
                    f"Recorder: layers: {pattern!r} matches none: "
                    f"{suggest(pattern, [name or repr(name) for name in own])}"
                )
        self.layers = {
            name: layer
            for name, layer in own.items()
            if any(fnmatchcase(name, pattern) for pattern in self.settings.layers)
        }
        self.parameters = {
            f"{name}.{key}".lstrip("."): parameter
            for name, layer in self.layers.items()
            for key, parameter in layer.named_parameters(recurse=False)
            if parameter.requires_grad
        }

    def _open(self, resume: bool) -> None:
        """Create the file, or check that it is one to continue."""
        self._made = False
        notes = {
            "kind": KIND,
            "settings": self.settings.model_dump_json(exclude={"file"}),
            "layers": json.dumps({name: _described(each) for name, each in self.layers.items()}),
        }
        if not (resume and self.path.exists()):
            if self.path.exists():
                raise ConfigError(f"Recorder: path={self.path}: exists already: not replaced")
            store.write(self.path, {}, notes)
            self._made = True
            return
        there = store.read_attributes(self.path)
        for key, value in notes.items():
            if there.get(key) != value:
                raise ConfigError(
                    f"Recorder: path={self.path}: has other {key}: {there.get(key)} there, "
                    f"{value} here"
                )

    def _take_back(self) -> None:
        """Remove the file if it is empty, as it would block the next run."""
        if self._made:
            self.path.unlink()

    def begin(self, iteration: int) -> None:
        """Set the number of the next iteration: 0 without a call, and one more with each step.

        The file's content from there on is replaced when the next iteration is recorded.
        """
        self.iteration = iteration
        self._wanted = self.settings.wants(iteration)
        self._looks = self._wanted or self._most is None
        self._seen: dict[tuple[KindName, str, int], dict[int, Array]] = {}
        self._before: dict[str, Array] = {}
        self._scale = 1.0 if self.reducer is None else self.reducer.loss_scale
        if self._wanted and self.world.process == 0:
            self._before = {name: _copied(each) for name, each in self.parameters.items()}

    def _forward(self, name: str, layer: Any, inputs: Any, outputs: Any) -> None:
        """Record a layer's input, and register a hook for the gradient of its output."""
        entered, given = _first(inputs), _first(outputs)
        if not self._looks or not self.model.training or entered is None:
            return
        hosted = 0 if self.reducer is None else self.reducer.playing
        calls = self._seen.setdefault(("activations", name, hosted), {})
        number = len(calls)  # backward runs in another order
        calls[number] = _copied(entered)
        if given is not None and given.requires_grad:
            left = self._seen.setdefault(("errors", name, hosted), {})
            given.register_hook(partial(_keep, left, number))

    def step(self, mean: Any = None) -> None:
        """End an iteration, and write it if it is one to record. Collective.

        mean: the result of reducer.reduce; None: there is none, for example in a skipped step
        Raises UserError on all processes if arrays are too large or cannot be written.
        """
        if self._looks:
            parts = self.world.agreed(
                lambda: [*self._of_parameters(mean), *self._of_layers()], "Recorder.step", Exception
            )
            if self._most is None:
                try:
                    self._most = self._fitting(parts)
                except ConfigError:  # on all processes
                    self.world.on_first(self._take_back, "Recorder.step")
                    raise
            if self._wanted:
                self._write([self._thinned(each) for each in parts])
        self.begin(self.iteration + 1)

    def _of_parameters(self, mean: Any) -> Iterator[_Part]:
        own = [self._gradients(flat) for flat in self._flats]
        for hosted, gradients in zip(self.world.hosted, own, strict=True):
            yield from self._parts("gradients", hosted, gradients)
        if self.world.process or not self._wanted:
            return
        if mean is not None and self.reducer is not None:
            yield from self._parts("mean", -1, self._gradients(to_host(mean.flat)))
        yield from self._parts("weights", -1, self._before)
        after = {name: _copied(each) for name, each in self.parameters.items()}
        with np.errstate(invalid="ignore"):
            updates = {name: after[name] - before for name, before in self._before.items()}
        yield from self._parts("updates", -1, updates)

    @property
    def _flats(self) -> Sequence[Array | None]:
        return [None] if self.reducer is None else [to_host(x) for x in self.reducer.flats]

    def _gradients(self, flat: Array | None) -> dict[str, Array]:
        """Return the gradients in a buffer of the reducer, or p.grad, by the parameter's name."""
        if flat is None:
            return {n: _copied(p.grad) for n, p in self.parameters.items() if p.grad is not None}
        bucket = self.reducer.bucket
        found = dict(zip(bucket.names, bucket.views(flat), strict=True))
        return {name: found[name] for name in self.parameters if name in found}

    def _of_layers(self) -> Iterator[_Part]:
        for (kind, name, hosted), calls in self._seen.items():
            if not calls:  # no backward reached it
                continue
            whole = _joined([calls[number] for number in sorted(calls)])
            yield from self._parts(kind, self.world.hosted[hosted], {name: whole})

    def _parts(self, kind: KindName, rank: int, arrays: Mapping[str, Array]) -> Iterator[_Part]:
        """Yield arrays of a kind, not thinned, if it is recorded."""
        if kind in self.settings.tensors:
            for name, values in arrays.items():
                rows = values if values.ndim else values.reshape(1)
                yield _Part(kind, name, rank, len(rows), rows)

    def _thinned(self, part: _Part) -> _Part:
        most = (self._most or {}).get((part.kind, part.name), part.rows)
        if part.rows <= most:
            return part
        return part._replace(values=part.values[kept_rows(self.settings.seed, part.rows, most)])

    def _fitting(self, parts: Sequence[_Part]) -> dict[tuple[str, str], int]:
        """Return the number of rows of an array to be kept, by kind and name. Collective.

        Raises ConfigError on all processes if that is 0, or the arrays do not all fit.
        """
        everyone = self.world.gather([_about(each) for each in parts], "Recorder.step")
        sizes = [(about[:2], about[4]) for each in everyone for about in each]
        alone = [kind for kind in self.settings.tensors if not KINDS[kind].of_ranks]
        shapes = [(n, tuple(p.shape) or (1,)) for n, p in self.parameters.items()]
        sizes = [each for each in sizes if each[0][0] not in alone]  # as some come later
        sizes += [((kind, name), shape) for kind in alone for name, shape in shapes]
        room = self.settings.max_mib * 2**20 / self.settings.number
        need = sum(4 * math.prod(shape) for _, shape in sizes)
        share = min(1.0, room / max(need, 1))
        if share < 1 and not self.settings.thin:
            raise self._too_large(need)
        most = dict[tuple[str, str], int]()
        for key, shape in sizes if self.settings.thin else ():
            most[key] = max(most.get(key, 1), int(share * shape[0]))
        least = sum(
            4 * min(most.get(key, shape[0]), shape[0]) * math.prod(shape[1:])
            for key, shape in sizes
        )
        if least > room:
            raise self._too_large(least)
        return most

    def _too_large(self, size_bytes: int) -> ConfigError:
        of = self.settings
        whole = size_bytes * of.number / 2**20
        return ConfigError(
            f"Recorder: max_mib={of.max_mib:g}: {of.number} iterations take {whole:.4g} MiB: "
            f"should be more, or layers, tensors or iterations fewer"
            + ("" if of.thin else ", or thin=true")
        )

    def _write(self, parts: Sequence[_Part]) -> None:
        """Write the arrays of all ranks. Collective."""
        everything = _collected(self.world, parts)
        self.world.on_first(partial(self._append, everything), "Recorder.step")

    def _append(self, parts: Sequence[_Part]) -> None:
        """Add the iteration to the file, replacing it and later ones."""
        rooms = store.contents(self.path)[1]
        former = {name: room for name, room in rooms.items() if _iteration(name) < self.iteration}
        arrays = _datasets(self.iteration, parts, self._scale)
        size_bytes = sum(4 * math.prod(room.shape) for room in former.values())
        size_bytes += sum(values.nbytes for values, _ in arrays.values())
        if size_bytes > self.settings.max_mib * 2**20:
            raise ConfigError(
                f"Recorder: max_mib={self.settings.max_mib:g}: iteration {self.iteration} has "
                f"larger arrays than the first: {size_bytes / 2**20:.4g} MiB are needed by now"
            )
        later = {str(_iteration(name)) for name in rooms.keys() - former.keys()}
        store.append(self.path, arrays, later)

    def close(self) -> None:
        """Remove the hooks from the model."""
        for handle in self._handles:
            handle.remove()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        """Close; recorded data stays."""
        self.close()


def _keep(left: dict[int, Array], number: int, gradient: Any) -> None:
    left[number] = _copied(gradient)


def _copied(tensor: Any) -> Array:
    from ...ops.tensors import values_of

    return np.array(values_of(tensor.detach().float()))


def _first(given: Any) -> Any:
    """Return the first tensor of floating-point numbers, None if there is none."""
    several = given if isinstance(given, tuple | list) else (given,)
    floats = (x for x in several if hasattr(x, "is_floating_point") and x.is_floating_point())
    return next(floats, None)


def _joined(arrays: Sequence[Array]) -> Array:
    """Return arrays concatenated; flattened if they differ in more than the first axis."""
    if len({each.shape[1:] for each in arrays}) > 1:
        arrays = [each.reshape(-1) for each in arrays]
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)


def _about(part: _Part) -> About:
    return part.kind, part.name, part.rank, part.rows, part.values.shape


def _collected(world: Ranks, parts: Sequence[_Part]) -> list[_Part]:
    """Return the parts of all ranks on process 0, none elsewhere. Collective."""
    abouts = world.gather([_about(each) for each in parts], "Recorder.step")
    first = world.process == 0
    flats = [
        {} if first else {0: _flat([each.values for each in parts if each.rank == rank])}
        for rank in world.hosted
    ]
    came = sparse.neighbours(world, flats)[0]
    if not first:
        return []
    found = list(parts)
    for rank, flat in came.items():
        start = 0
        for kind, name, of_rank, rows, shape in (each for other in abouts for each in other):
            if of_rank == rank:
                values = flat[start : start + math.prod(shape)].reshape(shape)
                found.append(_Part(kind, name, rank, rows, values))
                start += values.size
    return found


def _flat(arrays: Sequence[Array]) -> Array:
    return np.concatenate([np.empty(0, np.float32), *(each.reshape(-1) for each in arrays)])


def _datasets(
    iteration: int, parts: Sequence[_Part], scale: float
) -> dict[str, tuple[Array, dict[str, Any]]]:
    """Return the arrays of an iteration by their place in the file, with attributes."""
    grouped: dict[tuple[KindName, str], list[_Part]] = {}
    for part in sorted(parts, key=lambda each: each.rank):
        grouped.setdefault((part.kind, part.name), []).append(part)
    found = {}
    for (kind, name), each in grouped.items():
        arrays = [part.values for part in each]
        values = np.stack(arrays) if kind == "gradients" else _joined(arrays)
        notes = {
            "long_name": KINDS[kind].long_name,
            "units": "1",
            "name": name,
            "rows": [part.rows for part in each],
            "loss_scale": scale,
        }
        found[f"{iteration}/{kind}/{name.replace('/', ':') or '(model)'}"] = values, notes
    return found


def _iteration(dataset: str) -> int:
    return int(dataset.partition("/")[0])


def _described(layer: torch.nn.Module) -> dict[str, Any]:
    """Return the type of a layer and its options that its products depend on."""
    plain = {name: getattr(layer, name) for name in GEOMETRY if hasattr(layer, name)}
    return {"type": type(layer).__name__, **plain}

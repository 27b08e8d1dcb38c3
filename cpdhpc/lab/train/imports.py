"""A user's own functions in a job file, named by import = "package.module:name"."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, ConfigDict, Field, field_validator

from ...compress.base import Aggregator
from ...config import ConfigError, Section, told, validate
from ...methods import nearest
from .data import Data
from .losses import Loss, LossFunction, Metric, MetricFunction
from .models import Model
from .samples import StreamedData

if TYPE_CHECKING:
    import torch


def _checked(name: str) -> str:
    if not re.fullmatch(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*", name):
        raise ValueError('must be "module:function", or "package.module:function"')
    return name


Named = Annotated[str, Field(alias="import"), AfterValidator(_checked)]


class Imported(Section):
    """Common base of tables that name a function; their other keys are its arguments."""

    model_config = ConfigDict(extra="allow", populate_by_name=True)
    of: ClassVar[str]  # the table

    imported: Named
    import_from: str = ""

    @property
    def where(self) -> str:
        """The prefix of errors."""
        return f'{self.of}.import="{self.imported}"'

    @property
    def function(self) -> str:
        """The function's name, without its module."""
        return self.imported.partition(":")[2]

    @contextmanager
    def _found(self) -> Iterator[Callable[..., Any]]:
        """Yield the function; until the end its modules are searched in import_from first.

        Raises ConfigError, in one line, for errors of the import and of the block.
        """
        module = self.imported.partition(":")[0]
        sys.path.insert(0, self.import_from)
        try:
            with told(self.where):
                there = importlib.import_module(module)
                found = getattr(there, self.function, None)
                if not callable(found):
                    names = [name for name, value in vars(there).items() if callable(value)]
                    meant = nearest(self.function, names)
                    said = f": did you mean {' or '.join(meant)}?" if meant else ""
                    raise ConfigError(
                        f"{self.where}: module {module} has no function {self.function}{said}"
                    )
                yield found
        finally:
            sys.path.remove(self.import_from)

    def call(self) -> Any:
        """Return the function's result. Raises ConfigError for any error that it raises."""
        with self._found() as function:
            return function(**(self.model_extra or {}))

    def with_options(self, *given: str) -> Callable[..., Any]:
        """Return the function of two arguments, with the options added to each call.

        given: further keyword arguments that it must accept
        Raises ConfigError, also from the returned function for errors of the user's.
        """
        options = dict(self.model_extra or {})
        with self._found() as function:
            inspect.signature(function).bind(None, None, **options, **dict.fromkeys(given))

        def called(*arguments: Any, **further: Any) -> Any:
            with told(self.where):
                return function(*arguments, **options, **further)

        return called


class ImportedModel(Model, Imported):
    """[model] import = "package.module:function": the network that the function returns.

    import: a function or any callable, such as a class; its arguments are the table's other keys
    import_from: directory that is searched for modules first; default: the job file's
    """

    of: ClassVar[str] = "model"

    def build(self, sample_shape: tuple[int, ...], classes: int) -> torch.nn.Module:
        """Return the network. Raises ConfigError if it is not one. See Model.build."""
        import torch

        model = self.call()
        if not isinstance(model, torch.nn.Module):
            raise ConfigError(
                f"{self.where}: returned {type(model).__name__}: must be a torch.nn.Module"
            )
        return model


class ImportedData(Data, Imported):
    """[data] import = "package.module:function": two map-style torch datasets, train and test.

    import: any callable that returns the two; its arguments are the other keys of the table.
        Items are pairs (input, target), which torch's default_collate combines; targets must suit
        the loss
    import_from: directory that is searched for modules first; default: the job file's
    """

    of: ClassVar[str] = "data"

    def load(self) -> StreamedData:
        """Return the two. Raises ConfigError if they are not datasets. See Data.load."""
        from .samples import MapStyle

        found, where = self.call(), self.where
        if not isinstance(found, tuple | list) or len(found) != 2:
            raise ConfigError(f"{where}: returned {type(found).__name__}: must be (train, test)")
        for name, dataset in zip(("train", "test"), found, strict=True):
            missing = [m for m in ("__len__", "__getitem__") if not hasattr(dataset, m)]
            try:
                problem = f"has no {missing[0]}" if missing else "" if len(dataset) else "is empty"
            except Exception as error:
                problem = f"has no length: {type(error).__name__}: {' '.join(str(error).split())}"
            if problem:
                raise ConfigError(f"{where}: {name} dataset {type(dataset).__name__} {problem}")
        train, test = (MapStyle(where, dataset) for dataset in found)
        if train.sample_shape != test.sample_shape:
            raise ConfigError(
                f"{where}: inputs have shape {train.sample_shape} for training, "
                f"{test.sample_shape} for the test"
            )
        return StreamedData(train, test, train.sample_shape, train.classes, self.import_from)


class ImportedAggregator(Imported):
    """[gradient] import = "package.module:name": an Aggregator, or a callable that returns one.

    import: of a class derived from Aggregator, whose fields are the other keys of the table, or of
        any callable that returns an Aggregator
    import_from: directory that is searched for modules first; default: the job file's
    has_momentum, holds_back, stateless: unknown before build
    """

    of: ClassVar[str] = "gradient"
    has_momentum: ClassVar[bool] = False
    holds_back: ClassVar[bool] = False
    stateless: ClassVar[bool] = False
    most_momentum: ClassVar[float] = 0.0

    @property
    def aggregator(self) -> str:
        """Its name, instead of the name of a row."""
        return self.imported

    def build(self) -> Aggregator:
        """Return it. Raises ConfigError if it is not one, or its options are wrong."""
        with self._found() as found:
            options = dict(self.model_extra or {})
            if inspect.isclass(found) and issubclass(found, Aggregator):
                return validate(found, options, self.where)
            made = found(**options)
        if not isinstance(made, Aggregator):
            raise ConfigError(
                f"{self.where}: returned {type(made).__name__}: must be a compress.Aggregator"
            )
        return made


class ImportedLoss(Loss, Imported):
    """[loss] import = "package.module:function": a function (outputs, targets, reduction="mean").

    import: of a function like those of torch.nn.functional: by default it returns the mean over
        all targets, with reduction="none" a value for each; its further arguments are the
        other keys of the table
    import_from: directory that is searched for modules first; default: the job file's
    """

    of: ClassVar[str] = "loss"

    @property
    def label(self) -> str:
        return self.function

    def build(self) -> LossFunction:
        return self.with_options("reduction")


class ImportedMetric(Metric, Imported):
    """[metric] import = "package.module:function": the mean of the function's values.

    import: of a function (outputs, targets) that returns a value for each target or sample; its
        further arguments are the other keys of the table
    better: which scores are
    import_from: directory that is searched for modules first; default: the job file's
    """

    of: ClassVar[str] = "metric"

    better: Literal["higher", "lower"] = "higher"

    @field_validator("imported")
    @classmethod
    def _is_not_the_loss(cls, imported: str) -> str:
        if imported.endswith(":loss"):
            raise ValueError("should have another name: records already have a test_loss")
        return imported

    @property
    def label(self) -> str:
        return self.function

    @property
    def lower(self) -> bool:
        return self.better == "lower"

    def build(self) -> MetricFunction:
        return self.with_options()

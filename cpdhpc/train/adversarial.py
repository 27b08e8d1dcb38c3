"""[adversarial]: training on samples and on copies of them that a small change makes worse."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, model_validator

from ..config import Section


class Adversarial(Section):
    """[adversarial]: half of the loss is of copies, samples + epsilon sign(gradient of the loss).

    epsilon: largest change of an input value; 0: no copies
    tau: age of the parameters, in steps, that copies are made by. 0: those of the step, so that its
        two gradients come one after the other; 1 or more: copies do not wait for the last step
    alternate: "turns": each rank does both halves; "ranks": the first half of the ranks has the
        samples, the other the copies, which takes an even number of ranks
    trained: false: copies are evaluated, by the parameters then, and not trained on
    low, high: what values of copies stay within; not given: anything
    Batch norms have statistics of their own for copies; those of samples are evaluated.
    Source: Liu et al., Concurrent Adversarial Learning for Large-Batch Training, arXiv 2106.00221.
    """

    epsilon: Annotated[float, Field(ge=0)] = 0.0
    tau: Annotated[int, Field(ge=0)] = 1
    alternate: Literal["turns", "ranks"] = "turns"
    trained: bool = True
    low: float | None = None
    high: float | None = None

    @model_validator(mode="after")
    def _low_is_below_high(self) -> Adversarial:
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise ValueError(f"low={self.low}: should be below high={self.high}")
        return self

"""[train] of a job file: how long, on how many samples at once, where, and what is written."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, field_validator, model_validator

from ...config import Above0, Positive, Section, Whole
from ...torch.controllers import DEFAULT_RATE
from ...torch.loss_scaling import check_scale

Seed = Annotated[int, Field(ge=0, lt=2**63)]


class Train(Section):
    """[train]: the run itself.

    epochs: times that all training samples are seen; learning_rate: before the schedule's factor
    settings: "recommended": where [gradient] holds values back, momentum is at most what goes with
        that, 0.7, 0.5 or 0; steps stay as long, by another learning_rate, where momentum adds up
    seeds: of weights, order and chance; a run for each; seed = S is seeds = [S]
    virtual_ranks: ranks that each process plays; bits are those of so many processes
    batch: samples of all ranks together; threads: of torch, and of kernels where overlap is off;
        0 for OMP_NUM_THREADS where it is set, else the cores the rank owns
    loss_scaling: "dynamic" halves the scale where a gradient overflows on any rank, skips the step
        on all, and doubles it after 2,000 steps without
    loss_scale: what the loss is multiplied by, and means are divided by; a power of two. Default:
        1, and 65,536 to begin with where it is dynamic
    bucket_mib, overlap: gradients are reduced in buckets of at most so many MiB, the last layers
        first, and with overlap while backward goes on; overlap changes no bit, bucket_mib may
    image_grid: rows and columns of ranks that share each image; [1, 1]: images are not split
    telemetry_every: iterations; checkpoint_every: epochs; timeout_s: the longest wait for others
    keep_every: epochs, after each of which the weights are kept in a file of their own
        (influence), beside the checkpoint, which is overwritten; 0: none are
    record_gradients: iterations, from 0, of which the gradients of every rank go to files of their
        own, 4 bytes a value and rank each (bench compress)
    device: where models compute and gradients are averaged; "gpu": each process on one of its own
    oversubscribe_gpus: let processes of a node share GPUs where there are too few
    gpu_direct: whether MPI is given GPU memory: "auto" where it takes it, else it goes through the
        host; "required" refuses to begin where it does not; "never"
    autocast: the dtype of torch.autocast in forward; "float16" goes best with dynamic scaling
    """

    epochs: Positive = 10
    batch: Positive = 64
    learning_rate: Above0 = DEFAULT_RATE
    settings: Literal["given", "recommended"] = "given"
    seeds: Annotated[tuple[Seed, ...], Field(strict=False, min_length=1)] = (0,)
    virtual_ranks: Positive = 1
    image_grid: Annotated[tuple[Positive, Positive], Field(strict=False)] = (1, 1)
    threads: Whole = 0
    loss_scaling: Literal["static", "dynamic"] = "static"
    loss_scale: Annotated[float | None, AfterValidator(check_scale)] = None
    bucket_mib: Above0 = 25.0
    overlap: bool = False
    telemetry_every: Positive = 10
    checkpoint_every: Positive = 1
    keep_every: Whole = 0
    timeout_s: Above0 = 600.0
    record_gradients: Annotated[tuple[Whole, ...], Field(strict=False, max_length=100)] = ()
    device: Literal["cpu", "gpu"] = "cpu"
    gpu_direct: Literal["auto", "required", "never"] = "auto"
    oversubscribe_gpus: bool = False
    autocast: Literal["none", "bfloat16", "float16"] = "none"

    @property
    def kept_epochs(self) -> range:
        """The epochs, from 1, after which weights are kept."""
        return (
            range(self.keep_every, self.epochs + 1, self.keep_every)
            if self.keep_every
            else range(0)
        )

    @model_validator(mode="after")
    def _weights_are_kept(self) -> Train:
        if self.keep_every > self.epochs:
            raise ValueError(f"keep_every={self.keep_every}: should be up to epochs={self.epochs}")
        return self

    @field_validator("seeds")
    @classmethod
    def _each_seed_once(cls, seeds: tuple[int, ...]) -> tuple[int, ...]:
        for seed in seeds:
            if seeds.count(seed) > 1:
                raise ValueError(f"{seed} is there twice: both runs would write the same files")
        return seeds

    @model_validator(mode="after")
    def _what_is_needed_is_given(self) -> Train:
        if self.gpu_direct == "required" and self.device != "gpu":
            raise ValueError("gpu_direct='required' needs device='gpu'")
        if self.overlap and self.virtual_ranks > 1:
            raise ValueError("overlap=true needs virtual_ranks=1")
        if self.image_grid != (1, 1) and (self.overlap or self.virtual_ranks > 1):
            raise ValueError("image_grid other than [1, 1] needs virtual_ranks=1, overlap=false")
        return self

    @model_validator(mode="before")
    @classmethod
    def _one_seed(cls, raw: Any) -> Any:
        if not isinstance(raw, dict) or "seed" not in raw:
            return raw
        if "seeds" in raw:
            raise ValueError("seed and seeds: give one of them")
        seed = raw["seed"]
        if type(seed) is not int or not 0 <= seed < 2**63:
            raise ValueError(f"seed={seed!r}: should be an integer, 0 or more and below 2**63")
        return {key: value for key, value in raw.items() if key != "seed"} | {
            "seeds": [raw["seed"]]
        }

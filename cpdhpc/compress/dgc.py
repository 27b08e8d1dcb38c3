"""Deep gradient compression: top-k of accumulated gradients with momentum."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Annotated, Literal

import numpy as np

from ..ops import backend_of
from ..options import Allowed
from .base import Array, Context, Mean
from .bucket import Bucket
from .momentum import MOMENTUM, keep_momenta, pushed
from .sparse import Density, LargestValues, Warmup, coded_layers


@dataclass(frozen=True)
class Dgc(LargestValues):
    """The mean of the largest values of each rank's accumulated gradients with momentum.

    The optimiser must be SGD without momentum of its own: u = momentum u + gradient, v = v + u, and
    the largest values of v are sent. Layers that travel whole get their momentum from the mean.
    momentum: of the method, in place of the optimiser's; 0: none
    masking: set u, too, to 0 at the values that are sent, else it continues; not during warmup,
        when most of u would be lost
    dense_epochs: until then the density is 1
    clip_norm: a rank's gradient of a layer is scaled down to this 2-norm times ranks**-0.5; 0: not
    Source: Lin et al.: Deep gradient compression, ICLR 2018: momentum correction, local gradient
    clipping, momentum factor masking, warm-up.
    """

    aggregator: Literal["dgc"] = "dgc"
    momentum: Annotated[float, Allowed(ge=0, lt=1)] = 0.9
    masking: bool = True
    clip_norm: Annotated[float, Allowed(ge=0, le=1e30)] = 0.0
    density: Density = 0.001
    warmup: Warmup = (0.25, 0.0625, 0.015, 0.004)

    @property
    def has_momentum(self) -> bool:
        return self.momentum > 0

    @property
    def most_momentum(self) -> float:
        """See Aggregator.most_momentum: residuals are small in the first epochs, during warmup."""
        return 0.7

    def aggregate(self, gradients: list[Array], bucket: Bucket, context: Context) -> Mean:
        layers = coded_layers(self, gradients, bucket, context, is_dense=False)
        layers = replace(layers, gradients=[self._clipped(x, bucket, context) for x in gradients])
        waiting, momenta, chosen = layers.largest_waiting(
            self._density(context), self.within, self.momentum
        )
        sent = self._send(waiting, chosen, layers)
        flat = layers.mean(sent.mean, sent.most, waiting)
        whole = set(bucket.names) - set(layers.coded.names)
        pushed_whole = pushed(flat, bucket, whole, self.momentum, context)
        for name, start, stop in bucket.segments:
            if name in whole:
                flat[start:stop] = pushed_whole[name]
        for u, (indices, _) in zip(momenta, chosen, strict=True):
            if self.masking and context.epoch >= max(self.dense_epochs, len(self.warmup)):
                backend_of(u).clear(u, indices)
        layers.keep(waiting)
        layers.keep(momenta, MOMENTUM)
        keep_momenta(pushed_whole, context)
        return Mean.finite(flat, layers.shares(sent.shares))

    def _clipped(self, gradient: Array, bucket: Bucket, context: Context) -> Array:
        """Return a rank's gradient, its layers scaled down if their norm is too large."""
        if not self.clip_norm:
            return gradient
        out, kernels = gradient.copy(), backend_of(gradient)
        limit = self.clip_norm * context.loss_scale / context.world.ranks**0.5
        for x in bucket.views(out):
            norm = np.sqrt(kernels.square_sum(x.reshape(-1)))
            if limit < norm < np.inf:  # _send finds values that are not finite
                kernels.multiply(x, np.float32(limit / norm), x)
        return out

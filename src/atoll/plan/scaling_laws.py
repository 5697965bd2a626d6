"""Suggests settings for a model of a given size, by the fits of the Scaling Laws for DiLoCo paper.

The fits are for its recipe: AdamW (0.9, 0.99), 1000 steps of warm-up and a cosine to 5 %, a clip of 1, 20 tokens a
parameter, sequences of 2048, outer Nesterov at 0.9, a period of 30. Measured from 35 million to 2.4 billion parameters,
checked at 4 and 10 billion, with 1, 2, 4 and 8 workers; beyond, they are a guess. The loss has no floor in these fits:
at 10 billion parameters it comes out 3 % below what was measured.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from atoll._util.checks import check_whole

SEQUENCE = 2048
"""Tokens of a sequence in the paper."""
TOKENS_PER_PARAMETER = 20
"""Tokens of a whole run per parameter, unless they are given (Chinchilla)."""
SMALLEST, LARGEST = 35_000_000, 10_000_000_000
"""Parameters between which the fits were measured or checked."""
MOST_WORKERS = 8
HIGHEST_LEARNING_RATE = 3e-3
"""Cap on the inner learning rate: below 80 million parameters the fit exceeds it, for small models by far."""


class _Power(NamedTuple):
    """Computes scale * parameters ** exponent."""

    scale: float
    exponent: float

    def at(self, parameters: int) -> float:
        return self.scale * math.pow(parameters, self.exponent)


class _Fits(NamedTuple):
    loss: _Power
    batch: _Power


_BY_WORKERS = {
    1: _Fits(_Power(18.363, -0.0961), _Power(0.01361, 0.435)),
    2: _Fits(_Power(18.768, -0.0969), _Power(0.00769, 0.479)),
    4: _Fits(_Power(19.762, -0.0992), _Power(0.00535, 0.510)),
    8: _Fits(_Power(21.051, -0.1018), _Power(0.01859, 0.455)),
}
_OUTER_LEARNING_RATES = {1: 0.4, 2: 0.6, 4: 0.6, 8: 0.8}


def _joint(workers: int) -> _Fits:
    """Return the joint fits over sizes and workers, for numbers of workers that were not measured."""
    return _Fits(_Power(19.226 * workers**0.0116, -0.0985), _Power(0.00709 * workers**0.3399, 0.4695))


def learning_rate(parameters: int, workers: int) -> float:
    """Return the peak inner learning rate, to two digits; runs whose file gives none use it."""
    return float(f"{min(HIGHEST_LEARNING_RATE, _fitted_rate(parameters, workers)):.2g}")


def _fitted_rate(parameters: int, workers: int) -> float:
    """Return the joint fit: the one for 8 workers alone falls too fast with size, to a sixth of this at 1 billion."""
    return _Power(22256.0 * workers**0.2929, -0.8827).at(parameters)


@dataclass(frozen=True, slots=True, kw_only=True)
class Defaults:
    """Holds suggested settings, and the loss to expect with them."""

    learning_rate: float
    """Peak inner learning rate; see `learning_rate`."""
    batch_sequences: int
    """Sequences of 2048 tokens in a step of all workers together."""
    batch_tokens: int
    """The same in tokens."""
    outer_learning_rate: float
    """For Nesterov with a momentum of 0.9."""
    loss: float
    """Final loss on C4, nats per token."""
    tokens: int
    """Tokens to train on, all workers together: 20 a parameter."""
    outside: str
    """How this is beyond what was measured, in words; empty if it is not."""
    doubt: str
    """Why the learning rate is not what the fit says, in words; empty if it is."""


def defaults(parameters: int, workers: int) -> Defaults:
    """Return settings for a model of this size, by the fits for this number of workers where there are any."""
    check_whole("parameters", parameters, why="it counts what is trained")
    check_whole("workers", workers)
    fits = _BY_WORKERS.get(workers) or _joint(workers)
    sequences = max(1, round(fits.batch.at(parameters)))
    return Defaults(
        learning_rate=learning_rate(parameters, workers),
        batch_sequences=sequences,
        batch_tokens=sequences * SEQUENCE,
        outer_learning_rate=_outer_learning_rate(workers),
        loss=fits.loss.at(parameters),
        tokens=TOKENS_PER_PARAMETER * parameters,
        outside=_outside(parameters, workers),
        doubt=_doubt(parameters, workers),
    )


def _outer_learning_rate(workers: int) -> float:
    """Interpolate the best measured rates over the logarithm of workers; beyond eight workers return that of eight."""
    known = np.log(list(_OUTER_LEARNING_RATES))
    return float(np.interp(math.log(workers), known, list(_OUTER_LEARNING_RATES.values())))


def _outside(parameters: int, workers: int) -> str:
    reasons = []
    if not SMALLEST <= parameters <= LARGEST:
        reasons.append(f"{parameters:,} parameters are outside the 35 million to 10 billion that were measured")
    if workers > MOST_WORKERS:
        reasons.append(f"{workers} workers are more than the 8 that were measured")
    return "; ".join(reasons)


def _doubt(parameters: int, workers: int) -> str:
    fitted = _fitted_rate(parameters, workers)
    if fitted <= HIGHEST_LEARNING_RATE:
        return ""
    return f"the learning rate is capped at {HIGHEST_LEARNING_RATE:g}, the fit has {fitted:.2g}"

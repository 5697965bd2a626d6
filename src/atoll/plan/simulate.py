"""When everything happens: the papers' event model of training over slow lines, layer by layer, and beyond it.

A step of L layers is 3L - 1 pieces of equal length: L forward, then from the last layer to the first its backward for
parameters and, but for the first layer, for activations. Every worker has a line that carries one thing after the
other. Two ways to send are modelled:

    layer by layer   a layer leaves when its own backward is done, and must be back before its own forward, `delay`
                     steps later than the next: the papers' simulator, and what DistributedDataParallel comes close to
    after the step   a fragment leaves when the step is over and must be back when the step `delay` later is over: what
                     atoll does

`core.schedule` says what is due when, so training and this cannot disagree. On top of the papers: latency, jitter,
outages, machines and lines of different speeds, stragglers, lost rounds, and other ways to exchange.

Times of many rates are computed at once: everything is an array [workers, rates], with one row while workers are alike.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Literal, NamedTuple

import numpy as np

from atoll._util.checks import check_number, check_whole
from atoll.errors import ConfigError
from atoll.plan.job import Job, due_steps
from atoll.plan.lines import Array, Exchange, Lines, Place

# ---------------------------------------------------------------------- what is asked for


@dataclass(frozen=True, slots=True, kw_only=True)
class Luck:
    """What happens to workers at random, repeatable by a seed."""

    straggle: float = 0.0
    """Chance of a step to be slow."""
    straggle_pace: float = 2.0
    """How long a slow step takes, in steps."""
    drop: float = 0.0
    """Chance that a worker's part of a round is lost: the others do without it."""
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("straggle", "drop"):
            if not 0 <= getattr(self, name) <= 1:
                raise ConfigError(f"{name} must be a chance between 0 and 1, got {getattr(self, name)!r}")
        check_number("straggle_pace", self.straggle_pace, least=1, why="a slow step is no faster than others")
        check_whole("seed", self.seed, least=0, why="it makes chances repeatable")

    @property
    def steady(self) -> bool:
        """Whether nothing is left to chance."""
        return not self.straggle and not self.drop


NO_LUCK = Luck()

Layers = tuple[tuple[int, ...], ...]
"""Per fragment the layers it is made of, in equal parts; layers are counted from 1."""


def strided(layers: int, each: int) -> Layers:
    """Fragments of `each` layers, as far apart as can be: of P fragments the p-th has p, p + P, p + 2P, and so on."""
    check_whole("layers", layers)
    check_whole("layers per fragment", each)
    if each > layers:
        raise ConfigError(f"a fragment of {each} layers is more than the model has ({layers})")
    return dealt(layers, -(-layers // each))


def dealt(layers: int, count: int) -> Layers:
    """Layers dealt to so many fragments in turn."""
    return tuple(tuple(range(first, layers + 1, count)) for first in range(1, count + 1))


# ---------------------------------------------------------------------- what comes out


class Span(NamedTuple):
    """Something that went on for a while at one worker; seconds since the start."""

    worker: int
    kind: Literal["computing", "waiting", "carrying"]
    begin_s: float
    end_s: float
    fragment: int | None = None
    """What the line carried."""


@dataclass(frozen=True, slots=True)
class Simulated:
    """A run as it would go; arrays are [workers, rates], with one row if all workers are alike."""

    ends_s: Array
    """[steps + 1, workers, rates]: when each step was over, and with it what had to be waited for."""
    computed_s: Array
    """[steps + 1, workers]: seconds of computing until then."""
    sent_bytes: Array
    """Per worker, in all."""
    spans: tuple[Span, ...]
    """What went on at the first rate, if it was asked for."""

    def utilisation(self, since: int = 0, until: int | None = None) -> Array:
        """[rates]: of the time between the ends of two steps, the part in which workers computed (their mean)."""
        until = len(self.ends_s) - 1 if until is None else until
        computed = self.computed_s[until] - self.computed_s[since]
        took = self.ends_s[until] - self.ends_s[since]
        share: Array = (computed[:, None] / took).mean(axis=0)
        return share


# ---------------------------------------------------------------------- the model


def simulate(
    job: Job,
    places: Sequence[Place],
    *,
    layers: Layers | None = None,
    layer_count: int | None = None,
    rates: Sequence[float] | Array | None = None,
    exchange: Exchange = "shots",
    luck: Luck = NO_LUCK,
    record: bool = False,
) -> Simulated:
    """Run a job of which nothing but the times is real; what is unsent at its end stays so.

    One place stands for all workers. With `layers`, fragments travel layer by layer, otherwise after the step. `rates`
    replace those of the places by several at once, in bits per second.
    """
    if len(places) not in (1, job.workers):
        raise ConfigError(f"{len(places)} places for {job.workers} workers: give one, or one each")
    run = _Run(job, _apart(job, places, luck), layers, layer_count, rates, exchange, luck, record)
    for step, dues in due_steps(job.schedules(), job.steps):
        run.to(step, dues[0].send, [due.apply for due in dues])
    return run.end()


def _apart(job: Job, places: Sequence[Place], luck: Luck) -> tuple[Place, ...]:
    """One place if workers are alike for ever, else one each."""
    alike = len(set(places)) == 1 and places[0].steady and luck.steady and len(job.lanes()) == 1
    if alike:
        return (places[0],)
    return tuple(places) if len(places) > 1 else tuple(places) * job.workers


class _Run:
    """The clocks of all workers and lines, and the rounds on their way."""

    def __init__(
        self,
        job: Job,
        places: tuple[Place, ...],
        layers: Layers | None,
        layer_count: int | None,
        rates: Sequence[float] | Array | None,
        exchange: Exchange,
        luck: Luck,
        record: bool,
    ) -> None:
        self.job, self.places, self.luck = job, places, luck
        self.depth = layer_count or max((layer for group in layers or () for layer in group), default=1)
        if layers is not None and len(layers) != len(job.payload_bytes):
            raise ConfigError(f"{len(layers)} groups of layers for {len(job.payload_bytes)} fragments: give one each")
        self.chunks = _chunks(job, layers)
        self.lines = Lines(job.workers, places, rates, exchange)
        self.dice = np.random.default_rng(luck.seed)
        shape = (len(places), self.lines.rates)
        self.lane_of = _lane_of(job, len(places))
        self.delays = [schedule.delay for schedule in job.schedules()]
        self.step = 0
        self.paces = self._paces()
        self.computed_s = np.concatenate([np.zeros((1, len(places))), np.cumsum(self.paces, axis=0)])
        self.waited_s = np.zeros(shape)
        self.waits: list[tuple[int, Array]] = [(0, self.waited_s)]
        self.back: dict[tuple[int, int], list[tuple[int, Array]]] = {}
        self.forward: list[tuple[int, Array]] = []
        self.sent_bytes = np.zeros(shape[0])
        self.spans: list[Span] | None = [] if record else None

    def _paces(self) -> Array:
        """[steps, workers]: seconds of computing of every step."""
        base = self.job.step_s * np.array([place.pace for place in self.places])
        paces = np.broadcast_to(base, (self.job.steps, len(base)))
        if self.luck.straggle:
            slow = self.dice.random(paces.shape) < self.luck.straggle
            paces = np.where(slow, paces * self.luck.straggle_pace, paces)
        return paces

    # Layer by layer, what is applied after one step is waited for within the next.

    def to(self, step: int, sends: Sequence[int], applies: Sequence[Sequence[int]]) -> None:
        """Go on to the end of a step after which something is due."""
        if self.forward and step > self.step + 1:
            self._finish_step(self.step + 1)
        self._finish_step(step, sends)
        for worker, lane in enumerate(self.lane_of):
            for fragment in applies[lane]:
                self._need(worker, self.back[step - self.delays[lane], fragment])
        oldest = step - self.job.period
        self.back = {sent: chunks for sent, chunks in self.back.items() if sent[0] > oldest}

    def _finish_step(self, step: int, sends: Sequence[int] = ()) -> None:
        """Compute up to the end of a step; wait in its forward for what is due there, send in or after its backward."""
        unit = self.paces[step - 1][:, None] / (3 * self.depth - 1)
        begin = self.computed_s[step - 1][:, None] + self.waited_s
        forward_end = begin + self.depth * unit
        for layer, arrival in self.forward:
            forward_end = np.maximum(forward_end, arrival + (self.depth - layer + 1) * unit)
        self.forward = []
        self._wait(step, begin, forward_end - (begin + self.depth * unit))
        over = self.computed_s[step][:, None] + self.waited_s
        self._send(step, sends, forward_end, unit, over)
        self.step = step

    def _send(self, step: int, sends: Sequence[int], forward_end: Array, unit: Array, over: Array) -> None:
        lost = {f: self.dice.random(len(self.places)) < self.luck.drop for f in sends} if self.luck.drop else {}
        # Lines take what is ready first: the last layers, whichever fragments they belong to.
        ordered = sorted(((-layer, f, size) for f in sends for layer, size in self.chunks[f]), key=lambda c: c[0])
        for behind, fragment, size in ordered:
            layer = -behind
            done = 2 * (self.depth - layer + 1) - (layer == 1)
            ready = over if layer == 0 else forward_end + done * unit
            begun, passed, arrival = self.lines.carry(size, ready, lost.get(fragment), self.dice)
            self.back.setdefault((step, fragment), []).append((layer, arrival))
            self.sent_bytes += self.lines.sent(size)
            self._note_carried(fragment, begun, passed)

    def _need(self, worker: int, chunks: Sequence[tuple[int, Array]]) -> None:
        """A worker applies a round: it waits for it now, or in the next forward if it came layer by layer."""
        for layer, arrival in chunks:
            if layer:
                mine = np.full_like(arrival, -np.inf)
                mine[worker] = arrival[worker]
                self.forward.append((layer, mine))
            else:
                now = self.computed_s[self.step][worker] + self.waited_s[worker]
                late = np.zeros_like(self.waited_s)
                late[worker] = np.maximum(0.0, arrival[worker] - now)
                self._wait(self.step, self.computed_s[self.step][:, None] + self.waited_s, late)

    def _wait(self, step: int, at: Array, late: Array) -> None:
        if not late.any():
            return
        if self.spans is not None:
            waiting = zip(at[:, 0], late[:, 0], strict=True)
            self.spans += [Span(w, "waiting", begin, begin + s) for w, (begin, s) in enumerate(waiting) if s > 0]
        self.waited_s = self.waited_s + late
        self.waits.append((step, self.waited_s))

    def _note_carried(self, fragment: int, begun: Array, passed: Array) -> None:
        if self.spans is not None:
            carried = zip(begun[:, 0], passed[:, 0], strict=True)
            self.spans += [Span(w, "carrying", b, e, fragment) for w, (b, e) in enumerate(carried) if e > b]

    def end(self) -> Simulated:
        """What has been seen, step by step."""
        if self.forward and self.step < self.job.steps:
            self._finish_step(self.step + 1)
        waited = np.zeros((self.job.steps + 1, *self.waited_s.shape))
        known = [(step, list(group)[-1][1]) for step, group in groupby(self.waits, key=lambda wait: wait[0])]
        for (step, value), (until, _) in zip(known, [*known[1:], (self.job.steps + 1, None)], strict=True):
            waited[step:until] = value
        ends = self.computed_s[:, :, None] + waited
        return Simulated(ends, self.computed_s, self.sent_bytes, tuple(self._all_spans(ends)))

    def _all_spans(self, ends: Array) -> Iterator[Span]:
        """Those noted, and computing wherever a worker did not wait."""
        if self.spans is None:
            return
        yield from self.spans
        for worker in range(len(self.places)):
            since = 0.0
            for span in [s for s in self.spans if s.worker == worker and s.kind == "waiting"]:
                if span.begin_s > since:
                    yield Span(worker, "computing", since, span.begin_s)
                since = span.end_s
            if ends[-1, worker, 0] > since:
                yield Span(worker, "computing", since, float(ends[-1, worker, 0]))


def _chunks(job: Job, layers: Layers | None) -> list[list[tuple[int, float]]]:
    """Per fragment what travels at once, (layer, bytes); layer 0 stands for all of it."""
    if layers is None:
        return [[(0, float(size))] for size in job.payload_bytes]
    return [
        [(layer, size / len(group)) for layer in group] for size, group in zip(job.payload_bytes, layers, strict=True)
    ]


def _lane_of(job: Job, rows: int) -> list[int]:
    """For every row of the arrays, which of the job's schedules it follows."""
    lanes: Mapping[int, int] = {worker: n for n, workers in enumerate(job.lanes()) for worker in workers}
    return [lanes[row] for row in range(rows)] if job.schedules() else []

"""Trains the workers of this process: one inner step, evaluation, and the state that a checkpoint holds.

Every inner step, for every worker that trains: the next batch, forward, backward; under data-parallel the gradients
are averaged; clip, inner optimizer, then the outer loop. `Lockstep` has what differs between the methods.
"""

import copy
import math
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch import Tensor

from atoll import checkpoint
from atoll.errors import CheckpointError, ConfigError, NonFiniteError
from atoll.link.base import Link
from atoll.outer.lockstep import Lockstep
from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Gradients, Sync
from atoll.outer.roll_back import Guard
from atoll.outer.stats import Counters
from atoll.runs.events import Outcome
from atoll.settings.config import RunConfig
from atoll.train.data.batches import Batches
from atoll.train.progress.reporter import Reporter
from atoll.train.ranks import fsdp
from atoll.train.ranks.worker_ranks import Model, WorkerRanks
from atoll.train.step.backward import Backward, LossFunction, autocast
from atoll.train.step.cuda_graph import BackwardPass, capture_small_passes
from atoll.train.step.inner_optimizer import InnerOptimizer, learning_rate


@dataclass(slots=True)
class LocalWorker:
    """One worker of this process."""

    number: int
    """Its number in the run."""
    model: Model
    loss: LossFunction
    inner: InnerOptimizer
    backward: BackwardPass
    loop: OuterLoop | None = None
    """None if the only worker does not synchronise."""
    draws: int = 0
    """Batches it has taken."""


class Trainer:
    """Trains the workers of one process: call `step` until `done`, then `finish`.

    Args:
        config: The run's settings, resolved.
        start: The model that all workers start from, on its device.
        batches: The training batches of every worker.
        held_out: Batches to evaluate on, each [rows, sequence + 1], int64.
        links: The workers' links, in worker order; none if the only worker does not synchronise.
        ranks: The ranks of the worker, if this process is one of several.
    """

    def __init__(
        self,
        config: RunConfig,
        start: Model,
        batches: Batches,
        held_out: Sequence[Tensor],
        links: Sequence[Link] = (),
        ranks: WorkerRanks | None = None,
    ) -> None:
        assert config.train.steps is not None
        self.config = config
        self.steps = 0
        """Inner steps made, including one under way."""
        self.ranks = ranks or WorkerRanks()
        self._batches = batches
        self._held_out = held_out
        self._local = self._make_workers(start, [link.worker for link in links] or [0])
        weights = batches.weights() if config.data.weighting == "examples" else [1.0] * config.sync.workers
        self.reporter = Reporter(config, [worker.number for worker in self._local], weights, self.ranks)
        self._sync = config.synchronisation()
        self._lockstep = None if self._sync is None else Lockstep(self._make_loops(self._sync, links, weights))
        self.best = math.inf
        """Lowest held-out loss so far, nats per token."""
        self._last_loss = math.nan
        self._evaluated_at = 0

    def _make_workers(self, start: Model, numbers: Sequence[int]) -> list[LocalWorker]:
        config, models = self.config, [start, *(copy.deepcopy(start) for _ in numbers[1:])]
        if config.compile is True:
            for model in models:  # one graph serves all: the parameters are its inputs
                model.compile()
        losses = [self.ranks.wrap(model) for model in models]
        inner = [InnerOptimizer(model, config.train) for model in models]
        passes: Sequence[BackwardPass] = [Backward(*each, config) for each in zip(losses, inner, strict=True)]
        if self.ranks.count == 1:
            passes = capture_small_passes(config, models, passes)
        return [LocalWorker(*each) for each in zip(numbers, models, losses, inner, passes, strict=True)]

    def _make_loops(self, sync: Sync | Gradients, links: Sequence[Link], weights: Sequence[float]) -> list[OuterLoop]:
        observing = self.ranks.is_leader or not self.ranks.hold_whole_model
        try:
            loops = [
                OuterLoop(
                    worker.model,
                    sync,
                    link,
                    weight=weights[link.worker],
                    guard=Guard(leave_out_nonfinite=True, outlier_ratio=self.config.sync.outlier_ratio),
                    offload=self.config.sync.offload,
                    observer=self.reporter.observe if observing and link is links[0] else None,
                )
                for worker, link in zip(self._local, links, strict=True)
            ]
        except ConfigError as error:  # all else was checked with the run file
            raise ConfigError(
                f'sync.fragments: "{self.config.sync.fragments}" does not fit this model, '
                f'"whole" and "balanced:2" fit any: {error}'
            ) from error
        for worker, loop in zip(self._local, loops, strict=True):
            if not self.ranks.hold_whole_model:
                fsdp.check_fragments(worker.model, loop.fragments, self.ranks.count)
            worker.loop = loop
        self.reporter.loops = loops
        return loops

    @property
    def models(self) -> list[Model]:
        """The models of this process's workers, in worker order."""
        return [worker.model for worker in self._local]

    @property
    def _loops(self) -> Sequence[OuterLoop]:
        return self._lockstep.loops if self._lockstep is not None else ()

    def join(self) -> None:
        """Join the workers of other processes; LinkError names what they do not agree on."""
        for loop in self._loops:
            loop.join()
        if self.reporter.members is not None and self._loops[0].joined_at is not None:
            self._follow(since=None)

    @property
    def evaluates(self) -> bool:
        """Whether this process evaluates the outer parameters, which are the same on every worker.

        The lowest worker does; where workers come and go, the lowest of those that train.
        """
        link = self._loops[0].link if self._loops else None
        lowest = min(link.weights(self.steps)) if link is not None and link.elastic else 0
        return self._local[0].number == lowest

    @property
    def done(self) -> bool:
        """Whether all inner steps are made."""
        return self.steps >= (self.config.train.steps or 0)

    @property
    def epochs(self) -> float:
        """The number of times that the whole run reads the text of worker 0."""
        return self._batches.epoch(0, self.config.train.steps or 0)

    @property
    def parameters(self) -> int:
        """The number of parameters of the model."""
        return sum(p.numel() for p in self.models[0].parameters())

    # ------------------------------------------------------------------ one inner step

    def step(self) -> None:
        """Make one inner step of every worker that trains, and then the outer loop's step."""
        self.reporter.began_s = time.perf_counter()
        self.steps += 1
        rate = learning_rate(self.steps, self.config.train)
        before = self.reporter.counters()
        training = {n: worker for n, worker in enumerate(self._local) if worker.loop is None or worker.loop.trains}
        losses = {n: self._backward(worker) for n, worker in training.items()}
        if self._lockstep is not None:
            self._lockstep.average_gradients()
            self._check_any_gradient_is_finite(before)
        norms = {n: worker.inner.clip() for n, worker in training.items()}
        for n, worker in training.items():
            if self._is_nonfinite(losses[n], norms[n]) and worker.loop is not None:
                worker.loop.roll_back()
            else:
                worker.inner.step(rate)
        if self._lockstep is not None:
            self._lockstep.step()
            if self._loops[0].counters.rejoins > before[0].rejoins:
                self._follow(since=self.steps)
            self._report_faults(before)
        self.reporter.add_step(self.steps, losses, norms, before)
        if self.steps == 1 or self.steps % self.config.train.log_every == 0 or self.done:
            self.check_finite()
            self.reporter.write_step(self.steps, rate)

    def _follow(self, since: int | None) -> None:
        """Go on where the run is that this worker has joined: with its step, and the batch of that step."""
        (loop,), (worker,) = self._loops, self._local
        assert self.reporter.members is not None
        self.reporter.members.joined(loop.steps, since)
        self.reporter.jump(loop.steps - self.steps)
        self.steps = worker.draws = loop.steps

    def _backward(self, worker: LocalWorker) -> Tensor:
        """Compute the gradients of a worker's next batch; return its mean cross-entropy, a detached scalar."""
        batch = self.ranks.own_rows(self._batches.batch(worker.number, worker.draws))
        worker.draws += 1
        cross_entropy = worker.backward(batch)
        if not self.ranks.hold_whole_model:
            fsdp.share_nonfinite(worker.model)
        return self.ranks.mean(cross_entropy)

    # ------------------------------------------------------------------ non-finite numbers

    def _is_nonfinite(self, loss: Tensor, norm: Tensor) -> bool:
        """Return whether a worker's loss or gradient is known to be non-finite without waiting for a GPU.

        On a GPU, the delta shows it after the next send. Under data-parallel, non-finite gradients were left out of
        the mean.
        """
        if torch.device(self.config.device).type != "cpu" or isinstance(self._sync, Gradients):
            return False
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            return False
        if self._lockstep is None:
            self._raise_nonfinite()
        return True

    def check_finite(self) -> None:
        """Raise NonFiniteError if no finite parameters are left; waits for a GPU, so call it seldom."""
        if self._lockstep is None and not self.reporter.totals.is_finite:
            self._raise_nonfinite()
        if self.done and self._evaluated_at == self.steps and not math.isfinite(self._last_loss):
            self._raise_nonfinite("held-out loss")

    def _check_any_gradient_is_finite(self, before: list[Counters]) -> None:
        """Stop data-parallel training if no gradient is finite: parameters are equal, so none ever will be."""
        left_out = [
            loop.counters.rounds_left_out > then.rounds_left_out and loop.counters.rounds_applied == then.rounds_applied
            for loop, then in zip(self._loops, before, strict=True)
        ]
        if isinstance(self._sync, Gradients) and all(left_out):
            self._raise_nonfinite("gradient of every worker")

    def _raise_nonfinite(self, what: str = "loss or gradient") -> NoReturn:
        raise NonFiniteError(
            f"step {self.steps}: the {what} is not finite; checkpoints of earlier steps are intact. "
            "Start another run with a lower train.lr, a longer train.warmup or a lower train.clip"
        )

    def _report_faults(self, before: list[Counters]) -> None:
        """Report workers that were rolled back or left out of a round in this step."""
        for loop, then in zip(self._loops, before, strict=True):
            if loop.counters.roll_backs > then.roll_backs:
                what = "loss or delta not finite, or far too large: rolled back to the anchor"
                self.reporter.write_fault(self.steps, loop.link.worker, what)
            if (rounds := loop.counters.rounds_left_out - then.rounds_left_out) > 0 and not self._has_just_joined(loop):
                large = loop.counters.rounds_outlier > then.rounds_outlier
                why = "its delta was far larger than expected" if large else "its work was not finite"
                what = f"left out of {rounds} round{'s' if rounds > 1 else ''}: {why}"
                self.reporter.write_fault(self.steps, loop.link.worker, what)

    def _has_just_joined(self, loop: OuterLoop) -> bool:
        """Return whether rounds leave a worker out because it has not trained for a period since it joined."""
        return loop.joined_at is not None and loop.steps - loop.joined_at <= loop.sync.ahead

    # ------------------------------------------------------------------ the outer parameters

    @contextmanager
    def outer_model(self) -> Iterator[Model]:
        """Yield the model with the outer parameters, to evaluate or export; then restore its live parameters."""
        model = self.models[0]
        with self._loops[0].anchor() if self._loops else nullcontext(), torch.no_grad():
            model.eval()
            try:
                yield model
            finally:
                model.train()

    def evaluate(self) -> bool:
        """Measure the held-out loss of the outer parameters; return whether it is the lowest so far."""
        self.reporter.began_s = time.perf_counter()
        device = torch.device(self.config.device)
        total, tokens = torch.zeros((), dtype=torch.float64, device=device), 0
        with self.outer_model(), autocast(self.config):
            for batch, counts in self.ranks.own_batches(self._held_out):
                predicted = batch.shape[0] * (batch.shape[1] - 1) * counts
                total += self._local[0].loss(batch.to(device)).cross_entropy * predicted
                tokens += predicted
        sum_of_all, tokens_of_all = self.ranks.sum([total.item(), tokens])
        loss = sum_of_all / tokens_of_all
        is_best = loss < self.best
        self.best, self._last_loss, self._evaluated_at = min(self.best, loss), loss, self.steps
        self.reporter.write_eval(self.steps, loss, best=is_best)
        return is_best

    def finish(self) -> None:
        """Bring all workers to one final model."""
        began = self.reporter.began_s = time.perf_counter()
        if self._lockstep is not None:
            before = self.reporter.counters()
            with warnings.catch_warnings():  # the run's first note has said it
                warnings.filterwarnings("ignore", "finish.. after .* before the first send", UserWarning)
                self._lockstep.finish()
            self._report_faults(before)
        self.reporter.totals.seconds += time.perf_counter() - began

    def end(self, outcome: Outcome) -> None:
        """Write the event that says how the run ended."""
        self.reporter.write_end(self.steps, outcome, self._last_loss, self.best)

    # ------------------------------------------------------------------ checkpoints

    @property
    def seconds(self) -> float:
        """Seconds of training so far, over resumes."""
        return self.reporter.totals.seconds

    def state_dict(self) -> dict[str, Any]:
        """Return everything that the rest of the run depends on, as far as this rank holds it."""
        return {
            "ranks": self.ranks.count,
            "steps": self.steps,
            "draws": [worker.draws for worker in self._local],
            "models": [fsdp.local_state(model.state_dict()) for model in self.models],
            "inner": [worker.inner.state_dict() for worker in self._local],
            "outer": [loop.state_dict() for loop in self._loops],
            "tally": self.reporter.totals.state_dict(),
            "best": self.best,
            "last_loss": self._last_loss,
            "random": checkpoint.rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from a state, with the same bits."""
        if (ranks := state.get("ranks", 1)) != self.ranks.count:
            raise CheckpointError(
                f"the checkpoint is of a worker of {ranks} ranks, this one has {self.ranks.count}: resume with {ranks}"
            )
        states = zip(self._local, state["models"], state["inner"], state["draws"], strict=True)
        for worker, model, inner, draws in states:
            fsdp.load_model(worker.model, model)
            worker.inner.load_state_dict(inner)
            worker.draws = draws
        for loop, saved in zip(self._loops, state["outer"], strict=True):
            loop.load_state_dict(saved)
        self.reporter.totals.load_state_dict(state["tally"], torch.device(self.config.device))
        self.steps, self.best, self._last_loss = state["steps"], state["best"], state["last_loss"]
        checkpoint.set_rng_state(state["random"])

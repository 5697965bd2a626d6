"""The training of a run's workers in this process, all or one: what one inner step is, and all that it leaves behind.

Every inner step, for every worker that trains: the next batch, forward, backward; under data-parallel the gradients
are averaged; clip, inner optimizer, then the outer loop. What differs between the methods is inside `Lockstep`.
"""

import copy
import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from typing import Any, NoReturn

import torch
from torch import Tensor

from atoll import checkpoint
from atoll.errors import CheckpointError, ConfigError, NonFiniteError
from atoll.link.base import Link
from atoll.outer.lockstep import Lockstep
from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Gradients, Sync
from atoll.outer.stats import Counters
from atoll.runs.events import Outcome
from atoll.settings.config import RunConfig
from atoll.train.data.batches import Batches
from atoll.train.model.decoder import Decoder
from atoll.train.progress.reporter import Account
from atoll.train.ranks import fsdp as shards
from atoll.train.ranks.worker_ranks import Model, Team
from atoll.train.step.backward import Backward, autocast
from atoll.train.step.cuda_graph import recorded_where_it_pays
from atoll.train.step.optimizer import InnerOptimizer, learning_rate


class Trainer:
    """A run's workers in this process: `step` until `done`, then `finish`. `config` must be resolved.

    `links` are their ends of what carries rounds, in worker order; none for a worker by itself. If this process is one
    of several ranks of a worker, `team` has the others.
    """

    def __init__(
        self,
        config: RunConfig,
        start: Model,
        batches: Batches,
        held_out: Sequence[Tensor],
        links: Sequence[Link] = (),
        team: Team | None = None,
    ) -> None:
        assert config.train.steps is not None
        self.config = config
        self.steps = 0
        """Inner steps made, or begun."""
        self.team = team or Team()
        self._batches = batches
        self._held_out = held_out
        self._device = torch.device(config.device)
        self.workers = [link.worker for link in links] or [0]
        """Numbers of the workers in this process; all lists here are in their order."""
        self.models: list[Model] = [start, *(copy.deepcopy(start) for _ in self.workers[1:])]
        if config.compile is True:
            for model in self.models:  # the parameters are inputs of the graph, so one graph serves all
                model.compile()
        self._passes = [self.team.wrap(model) for model in self.models]
        self._inner = [InnerOptimizer(model, config.train) for model in self.models]
        backwards = [Backward(forward, inner, config) for forward, inner in zip(self._passes, self._inner, strict=True)]
        one_rank = self.team.ranks == 1
        self._backwards = recorded_where_it_pays(config, self.models, backwards) if one_rank else backwards
        self._draws = [0 for _ in self.workers]  # batches that each has taken
        self._weights = batches.weights() if config.data.weighting == "examples" else [1.0] * config.sync.workers
        self.account = Account(config, self.workers, self._weights, self.team)
        """What is reported."""
        self._sync = config.synchronisation()
        self._loops = self._make_loops(self._sync, links) if self._sync is not None else []
        self._crew = Lockstep(self._loops) if self._loops else None
        self.account.loops = self._loops
        self.best = math.inf
        """Lowest held-out loss so far, nats per token."""
        self._last_loss = math.nan
        self._evaluated_at = 0

    def _make_loops(self, sync: Sync | Gradients, links: Sequence[Link]) -> list[OuterLoop]:
        observing = self.team.leads or not self.team.whole
        try:
            loops = [
                OuterLoop(
                    model,
                    sync,
                    link,
                    weight=self._weights[link.worker],
                    leave_out_nonfinite=True,
                    outlier_ratio=self.config.sync.outlier_ratio,
                    offload=self.config.sync.offload,
                    observer=self.account.observe if observing and link is links[0] else None,
                )
                for model, link in zip(self.models, links, strict=True)
            ]
        except ConfigError as misfit:  # all else was checked with the run file
            raise ConfigError(
                f'sync.fragments: "{self.config.sync.fragments}" does not fit this model, '
                f'"whole" and "balanced:2" fit any: {misfit}'
            ) from misfit
        for loop in loops:
            self.team.check_fragments(self.models[0], loop.fragments)
        return loops

    def join(self) -> None:
        """Meet the workers of other processes; LinkError names what they do not agree on."""
        for loop in self._loops:
            loop.join()

    @property
    def evaluates(self) -> bool:
        """Whether this process measures the outer parameters, which are the same on every worker."""
        return self.workers[0] == 0

    @property
    def done(self) -> bool:
        """Whether all inner steps have been made."""
        return self.steps >= (self.config.train.steps or 0)

    @property
    def epochs(self) -> float:
        """How often the whole run goes through the text of worker 0."""
        return self._batches.epoch(0, self.config.train.steps or 0)

    @property
    def parameters(self) -> int:
        """Parameters of the model."""
        return sum(p.numel() for p in self.models[0].parameters())

    def introduce(self) -> None:
        """Write down what this run is."""
        model = self.models[0]
        vocabulary = model.config.vocabulary if isinstance(model, Decoder) else model.vocabulary
        self.account.introduce(self.parameters, vocabulary)

    # ------------------------------------------------------------------ one inner step

    def step(self) -> None:
        """One inner step of every worker that trains, and what the outer loop does after it."""
        self.account.clock_s = time.perf_counter()
        self.steps += 1
        rate = learning_rate(self.steps, self.config.train)
        before = self.account.counted()
        training = [n for n in range(len(self.models)) if self._crew is None or self._loops[n].trains]
        losses = {n: self._backward(n) for n in training}
        if self._crew is not None:
            self._crew.average_gradients()
            self._check_someone_is_finite(before)
        norms = {n: self._inner[n].clip() for n in training}
        for n in training:
            if self._is_spoilt(losses[n], norms[n]):
                self._loops[n].roll_back()
            else:
                self._inner[n].step(rate)
        if self._crew is not None:
            self._crew.step()
            self._tell_faults(before)
        self.account.add(self.steps, losses, norms, before)
        if self.steps % self.config.train.log_every == 0 or self.done:
            self.check_finite()
            self.account.log(self.steps, rate)

    def _backward(self, n: int) -> Tensor:
        """Gradients of the next batch of the n-th worker here; returns its mean cross-entropy, a detached scalar."""
        batch = self.team.share(self._batches.batch(self.workers[n], self._draws[n]))
        self._draws[n] += 1
        cross_entropy = self._backwards[n](batch)
        self.team.make_alike(self.models[n])
        return self.team.mean(cross_entropy)

    # ------------------------------------------------------------------ numbers that are not finite

    def _is_spoilt(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether a worker's loss or gradient is not finite, as far as that can be asked for free.

        On a GPU it would have to wait for the step; there the delta tells, after the next send. Under data-parallel the
        gradient has told, and the mean that came back is good.
        """
        if self._device.type != "cpu" or isinstance(self._sync, Gradients):
            return False
        if math.isfinite(loss.item()) and math.isfinite(norm.item()):
            return False
        if self._crew is None:
            self._stop()
        return True

    def check_finite(self) -> None:
        """Stop if nothing finite is left to go on with; waits for a GPU, so ask before a report or a save."""
        if self._crew is None and not self.account.tally.is_finite:
            self._stop()
        if self.done and self._evaluated_at == self.steps and not math.isfinite(self._last_loss):
            self._stop("held-out loss")

    def _check_someone_is_finite(self, before: list[Counters]) -> None:
        """Under data-parallel all have the same parameters: if no gradient is finite, none will ever be again."""
        nobody = [
            loop.counters.rounds_left_out > then.rounds_left_out and loop.counters.rounds_applied == then.rounds_applied
            for loop, then in zip(self._loops, before, strict=True)
        ]
        if isinstance(self._sync, Gradients) and all(nobody):
            self._stop("gradient of every worker")

    def _stop(self, what: str = "loss or gradient") -> NoReturn:
        raise NonFiniteError(
            f"step {self.steps}: the {what} is not finite; checkpoints of earlier steps are intact. "
            "Start another run with a lower train.lr, a longer train.warmup or a lower train.clip"
        )

    def _tell_faults(self, before: list[Counters]) -> None:
        """Report who was rolled back or left out of a round in this step."""
        for n, (loop, then) in enumerate(zip(self._loops, before, strict=True)):
            if loop.counters.roll_backs > then.roll_backs:
                told = "loss or delta not finite, or far too large: rolled back to the anchor"
                self.account.fault(self.steps, self.workers[n], told)
            if (rounds := loop.counters.rounds_left_out - then.rounds_left_out) > 0:
                large = loop.counters.rounds_outlier > then.rounds_outlier
                why = "its delta was far larger than expected" if large else "its work was not finite"
                told = f"left out of {rounds} round{'s' if rounds > 1 else ''}: {why}"
                self.account.fault(self.steps, self.workers[n], told)

    # ------------------------------------------------------------------ the outer parameters

    @contextmanager
    def outer_model(self) -> Iterator[Model]:
        """The model with the outer parameters, to evaluate or to write down; afterwards it trains on as it was."""
        model = self.models[0]
        with self._loops[0].anchor() if self._loops else nullcontext(), torch.no_grad():
            model.eval()
            try:
                yield model
            finally:
                model.train()

    def evaluate(self) -> bool:
        """Measure the held-out loss of the outer parameters; returns whether it is the lowest so far."""
        self.account.clock_s = time.perf_counter()
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        with self.outer_model(), autocast(self.config):
            for batch, counts in self.team.deal(self._held_out):
                predicted = batch.shape[0] * (batch.shape[1] - 1) * counts
                total += self._passes[0](batch.to(self._device)).cross_entropy * predicted
                tokens += predicted
        sum_of_all, tokens_of_all = self.team.total([total.item(), tokens])
        loss = sum_of_all / tokens_of_all
        is_best = loss < self.best
        self.best, self._last_loss, self._evaluated_at = min(self.best, loss), loss, self.steps
        self.account.evaluated(self.steps, loss, best=is_best)
        return is_best

    def finish(self) -> None:
        """Bring all workers to one final model."""
        began = self.account.clock_s = time.perf_counter()
        if self._crew is not None:
            before = self.account.counted()
            self._crew.finish()
            self._tell_faults(before)
        self.account.tally.seconds += time.perf_counter() - began

    def end(self, outcome: Outcome) -> None:
        """Write down how the run ended."""
        self.account.end(self.steps, outcome, self._last_loss, self.best)

    # ------------------------------------------------------------------ checkpoints

    @property
    def seconds(self) -> float:
        """Spent on this run so far, over resumes."""
        return self.account.tally.seconds

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on, as far as this rank holds it."""
        return {
            "ranks": self.team.ranks,
            "steps": self.steps,
            "draws": list(self._draws),
            "models": [shards.own(model.state_dict()) for model in self.models],
            "inner": [inner.state_dict() for inner in self._inner],
            "outer": [loop.state_dict() for loop in self._loops],
            "tally": self.account.state_dict(),
            "best": self.best,
            "last_loss": self._last_loss,
            "random": checkpoint.rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, to the bit."""
        if (ranks := state.get("ranks", 1)) != self.team.ranks:
            raise CheckpointError(
                f"the checkpoint is of a worker of {ranks} ranks, this one has {self.team.ranks}: resume with {ranks}"
            )
        for model, saved in zip(self.models, state["models"], strict=True):
            shards.load_model(model, saved)
        for inner, saved in zip(self._inner, state["inner"], strict=True):
            inner.load_state_dict(saved)
        for loop, saved in zip(self._loops, state["outer"], strict=True):
            loop.load_state_dict(saved)
        self.account.load_state_dict(state["tally"], self._device)
        self.steps, self._draws = state["steps"], list(state["draws"])
        self.best, self._last_loss = state["best"], state["last_loss"]
        checkpoint.set_rng_state(state["random"])

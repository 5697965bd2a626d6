"""The training of one model on several workers of one process: what one inner step is, and all that it leaves behind.

Every inner step, for every worker that trains: the next batch, forward, backward; under data-parallel the gradients
are averaged; clip, inner optimizer, then the outer loop. What differs between the methods is inside `Crew`.
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
from atoll.applied import Applied
from atoll.config import RunConfig
from atoll.crew import Crew
from atoll.errors import ConfigError, NonFiniteError
from atoll.events import End, Eval, Fault, Outcome, Round, Sink, Start, Step
from atoll.link.local import local
from atoll.loop import OuterLoop
from atoll.metrics import Metrics
from atoll.sync import Gradients, Sync
from atoll.train.batches import Batches
from atoll.train.hub import HubModel
from atoll.train.inner import InnerOptimizer, learning_rate
from atoll.train.model import Decoder
from atoll.train.tally import Tally

Model = Decoder | HubModel


class Trainer:
    """All workers of a run: `step` until `done`, then `finish`. `config` must be resolved."""

    def __init__(self, config: RunConfig, start: Model, batches: Batches, held_out: Sequence[Tensor]) -> None:
        assert config.train.steps is not None
        self.config = config
        self.steps = 0
        """Inner steps made."""
        self.sink: Sink = Metrics([])
        """Where events go."""
        self._batches = batches
        self._held_out = held_out
        self._device = torch.device(config.device)
        workers = config.sync.workers
        self.models: list[Model] = [start, *(copy.deepcopy(start) for _ in range(workers - 1))]
        self._inner = [InnerOptimizer(model, config.train) for model in self.models]
        self._draws = [0] * workers  # batches that each worker has taken
        self._weights = batches.weights() if config.data.weighting == "examples" else [1.0] * workers
        self._sync = config.synchronisation()
        self._loops = self._make_loops(self._sync) if self._sync is not None else []
        self._crew = Crew(self._loops) if self._loops else None
        if config.compile is True:
            for model in self.models:  # the parameters are inputs of the graph, so one graph serves all
                model.compile()
        self._tally = Tally(workers)
        self.best = math.inf
        """Lowest held-out loss so far, nats per token."""
        self._last_loss = math.nan
        self._evaluated_at = 0

    def _make_loops(self, sync: Sync | Gradients) -> list[OuterLoop]:
        ends = local(self.config.sync.workers, faults=self.config.faults_of_link())
        try:
            return [
                OuterLoop(
                    model,
                    sync,
                    end,
                    weight=weight,
                    leave_out_nonfinite=True,
                    observer=self._observe if end.worker == 0 else None,
                )
                for model, end, weight in zip(self.models, ends, self._weights, strict=True)
            ]
        except ConfigError as misfit:  # all else was checked with the run file
            raise ConfigError(
                f'sync.fragments: "{self.config.sync.fragments}" does not fit this model, '
                f'"whole" and "balanced:2" fit any: {misfit}'
            ) from misfit

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
        config, model = self.config, self.models[0]
        workers = config.sync.workers
        fragments = [fragment.numel for fragment in self._loops[0].fragments] if self._loops else []
        codec = self._sync.codec if self._sync else None
        self.sink.write(
            Start(
                name=config.name,
                method=config.sync.method,
                workers=workers,
                steps=config.train.steps or 0,
                parameters=self.parameters,
                tokens_per_step=self._tokens_per_step,
                period=self._sync.period if isinstance(self._sync, Sync) else 1,
                delay=[self._sync.delay_of(w, workers) if isinstance(self._sync, Sync) else 0 for w in range(workers)],
                codec=codec.format if codec else "none",
                fragments=fragments,
                payload_bytes=[codec.payload_bytes(numel) for numel in fragments] if codec else [],
                vocabulary=model.config.vocabulary if isinstance(model, Decoder) else model.vocabulary,
                device=config.device,
                threads=config.threads or 0,
                weights=self._weights,
            )
        )

    # ------------------------------------------------------------------ one inner step

    def step(self) -> None:
        """One inner step of every worker that trains, and what the outer loop does after it."""
        began = time.perf_counter()
        self.steps += 1
        rate = learning_rate(self.steps, self.config.train)
        before = self._left_out_so_far()
        training = [w for w in range(len(self.models)) if self._crew is None or self._loops[w].trains]
        losses = {worker: self._backward(worker) for worker in training}
        if self._crew is not None:
            self._crew.average_gradients()
            self._check_someone_is_finite(before)
        norms = {worker: self._inner[worker].clip() for worker in training}
        for worker in training:
            if self._is_spoilt(losses[worker], norms[worker]):
                self._loops[worker].roll_back()
            else:
                self._inner[worker].step(rate)
        if self._crew is not None:
            self._crew.step()
            self._tell_faults(before)
        self._tally.add(losses, norms, self._tokens_per_step, time.perf_counter() - began)
        if self.steps % self.config.train.log_every == 0 or self.done:
            self._log(rate)

    @property
    def _tokens_per_step(self) -> int:
        return self.config.train.batch * (self.config.train.sequence or 0)

    def _backward(self, worker: int) -> Tensor:
        """Gradients of a worker's next batch; returns its mean cross-entropy, a detached scalar."""
        model, accumulate = self.models[worker], self.config.train.accumulate
        batch = self._batches.batch(worker, self._draws[worker])
        self._draws[worker] += 1
        if self._device.type == "cuda":
            batch = batch.pin_memory().to(self._device, non_blocking=True)
        self._inner[worker].zero_grad()
        cross_entropy = torch.zeros((), device=self._device)
        for part in batch.chunk(accumulate):
            with self._autocast():
                loss = model.loss(part)
            (loss.total / accumulate).backward()
            cross_entropy += loss.cross_entropy / accumulate
        return cross_entropy

    def _autocast(self) -> Any:
        bf16 = self.config.precision == "bf16"
        return torch.autocast(self._device.type, torch.bfloat16) if bf16 else nullcontext()

    # ------------------------------------------------------------------ numbers that are not finite

    def _is_spoilt(self, loss: Tensor, norm: Tensor) -> bool:
        """Whether a worker's loss or gradient is not finite, as far as that can be asked for free.

        On a GPU it would have to wait for the step; there the delta tells, at the next send. Under data-parallel the
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
        if self._crew is None and not self._tally.is_finite:
            self._stop()
        if self.done and self._evaluated_at == self.steps and not math.isfinite(self._last_loss):
            self._stop("held-out loss")

    def _check_someone_is_finite(self, before: list[tuple[int, int]]) -> None:
        """Under data-parallel all have the same parameters: if no gradient is finite, none will ever be again."""
        left_out = [loop.counters.rounds_left_out > count for loop, (_, count) in zip(self._loops, before, strict=True)]
        if isinstance(self._sync, Gradients) and all(left_out):
            self._stop("gradient of every worker")

    def _stop(self, what: str = "loss or gradient") -> NoReturn:
        raise NonFiniteError(
            f"step {self.steps}: the {what} is not finite; checkpoints of earlier steps are intact. "
            "Start another run with a lower train.lr, a longer train.warmup or a lower train.clip"
        )

    def _left_out_so_far(self) -> list[tuple[int, int]]:
        """Roll-backs and rounds left out, per worker."""
        return [(loop.counters.roll_backs, loop.counters.rounds_left_out) for loop in self._loops]

    def _tell_faults(self, before: list[tuple[int, int]]) -> None:
        """Report who was rolled back or left out of a round in this step."""
        for worker, (loop, (roll_backs, left_out)) in enumerate(zip(self._loops, before, strict=True)):
            if loop.counters.roll_backs > roll_backs:
                self._inner[worker].reset()  # it may have seen what was not finite
                self._fault(worker, "loss or delta not finite: rolled back to the anchor")
            if (rounds := loop.counters.rounds_left_out - left_out) > 0:
                self._fault(worker, f"left out of {rounds} round{'s' if rounds > 1 else ''}: its work was not finite")

    def _fault(self, worker: int, what: str) -> None:
        self.sink.write(Fault(step=self.steps, worker=worker, what=what))

    # ------------------------------------------------------------------ what is reported

    def _observe(self, applied: Applied) -> None:
        sent = applied.round_id
        loop = self._loops[0]
        assert self._sync is not None
        self.sink.write(
            Round(
                step=sent.step,
                fragment=sent.fragment,
                applied=applied.step,
                members=list(applied.members),
                expected=len(loop.link.weights(max(1, sent.step))),
                norm=applied.norm,
                cosine=applied.cosine,
                bytes=self._sync.codec.payload_bytes(loop.fragments[sent.fragment].numel),
            )
        )

    def _log(self, rate: float) -> None:
        self.check_finite()
        interval = self._tally.take()
        self.sink.write(
            Step(
                step=self.steps,
                tokens=self._tally.tokens,
                seconds=self._tally.seconds,
                step_s=interval.step_s,
                loss=interval.losses,
                lr=rate,
                grad_norm=interval.norms,
                tokens_per_s=interval.tokens_per_s,
                participants=interval.participants,
                **self._traffic(),
            )
        )

    def _traffic(self) -> dict[str, Any]:
        counters = [loop.counters for loop in self._loops]
        return {
            "bytes_sent": [c.bytes_sent for c in counters] or [0],
            "bytes_received": [c.bytes_received for c in counters] or [0],
            "wait_s": [c.wait_s for c in counters] or [0.0],
        }

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
        began = time.perf_counter()
        total, tokens = torch.zeros((), dtype=torch.float64, device=self._device), 0
        with self.outer_model() as model, self._autocast():
            for batch in self._held_out:
                predicted = batch.shape[0] * (batch.shape[1] - 1)
                total += model.loss(batch.to(self._device)).cross_entropy * predicted
                tokens += predicted
        loss = total.item() / tokens
        is_best = loss < self.best
        self.best, self._last_loss, self._evaluated_at = min(self.best, loss), loss, self.steps
        self._tally.seconds += time.perf_counter() - began
        self.sink.write(
            Eval(step=self.steps, tokens=self._tally.tokens, seconds=self._tally.seconds, loss=loss, best=is_best)
        )
        return is_best

    def finish(self) -> None:
        """Bring all workers to one final model."""
        began = time.perf_counter()
        if self._crew is not None:
            before = self._left_out_so_far()
            self._crew.finish()
            self._tell_faults(before)
        self._tally.seconds += time.perf_counter() - began

    def end(self, outcome: Outcome) -> None:
        """Write down how the run ended."""
        self.sink.write(
            End(
                step=self.steps,
                tokens=self._tally.tokens,
                seconds=self._tally.seconds,
                step_s=self._tally.step_s,
                loss=self._last_loss,
                best_loss=self.best,
                outcome=outcome,
                **self._traffic(),
            )
        )

    # ------------------------------------------------------------------ checkpoints

    @property
    def seconds(self) -> float:
        """Spent on this run so far, over resumes."""
        return self._tally.seconds

    def state_dict(self) -> dict[str, Any]:
        """Everything that the rest of the run depends on."""
        return {
            "steps": self.steps,
            "draws": list(self._draws),
            "models": [model.state_dict() for model in self.models],
            "inner": [inner.state_dict() for inner in self._inner],
            "outer": [loop.state_dict() for loop in self._loops],
            "tally": self._tally.state_dict(),
            "best": self.best,
            "last_loss": self._last_loss,
            "random": checkpoint.rng_state(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on from a state, to the bit."""
        for model, saved in zip(self.models, state["models"], strict=True):
            model.load_state_dict(saved)
        for inner, saved in zip(self._inner, state["inner"], strict=True):
            inner.load_state_dict(saved)
        for loop, saved in zip(self._loops, state["outer"], strict=True):
            loop.load_state_dict(saved)
        self._tally.load_state_dict(state["tally"], self._device)
        self.steps, self._draws = state["steps"], list(state["draws"])
        self.best, self._last_loss = state["best"], state["last_loss"]
        checkpoint.set_rng_state(state["random"])

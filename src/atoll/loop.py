"""OuterLoop: the one loop that runs the whole family, and the only place where core, link and a live model meet.

After every inner step, on every worker, in this order:

    send    each fragment due:  delta = start - local;  payload = encode(delta);  the link opens a round
    apply   each fragment due:  mean of the decoded payloads;  the outer step moves the anchor
    merge   blend: local = alpha * local + (1 - alpha) * anchor
            eager: local = anchor + what the worker's own newest delta will do to it

The clock is `step()`, never an optimizer hook: a loss scaler that skips an optimizer step must not shift one
worker's schedule. The inner optimizer is never stepped; its state is dropped only when a worker is rolled back.

Every operation is a generator, so that one caller can take several workers through it in turn (`Crew`). It yields
twice: when all that can be refused is prepared and nothing of this step has been done, and when it has sent, before it
waits. What a GPU still encodes when it is sent is refused later, where the next thing is due (`_settle`).
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

import torch
from torch import Tensor, nn

from atoll.agreement import (
    check_arguments,
    check_saved,
    frozen_terms,
    live_checksums,
    starting_terms,
    terms_of,
    warn_of_buffers,
)
from atoll.applied import Observer
from atoll.core.flat import CPU, Window, check_coverage, scatter, state_dtype, trainable
from atoll.core.fragments import Whole, describe, split
from atoll.core.guard import OUTLIER_RATIO
from atoll.core.outer import Blend
from atoll.core.schedule import Schedule
from atoll.errors import AtollError, NonFiniteError
from atoll.exchange import Exchange
from atoll.gradients import GradientAverage
from atoll.link.base import Contribution, Link, RoundId
from atoll.loaded import Loads
from atoll.optimizers import InnerOptimizers
from atoll.replica import Replica
from atoll.rounds import Rounds
from atoll.shelf import shelves
from atoll.state import Counters, FragmentState, Outgoing
from atoll.sync import Gradients, Sync
from atoll.undone import MergeWatch


class OuterLoop:
    """Keeps a model in step with the other workers' copies of it.

    Make it once the model has its starting parameters, the same on every worker, and call `step()` once per
    training iteration, after the inner optimizer's step; call `finish()` at the end. `weight` is this worker's part
    in every mean, for instance the number of examples in its shard. With `leave_out_nonfinite`, a worker whose delta
    (or gradient) holds a NaN or an infinity is left out of the round and rolled back instead of stopping with an error.
    A delta whose norm is more than `outlier_ratio` times what the worker's own last rounds and the other workers'
    deltas lead to expect is left out as well, and the worker rolled back; None lets every finite delta count. Torch
    optimizers of a worker that is rolled back forget their state; `on_roll_back` is called then, to reset any other.
    With `offload`, for a model on a GPU, anchors, velocities and the like are kept in the host's memory and fetched for
    the fragment that is due. An `observer` is told of every round that this worker applies.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Sync | Gradients,
        link: Link,
        *,
        weight: float = 1.0,
        leave_out_nonfinite: bool = False,
        outlier_ratio: float | None = OUTLIER_RATIO,
        on_roll_back: Callable[[], object] | None = None,
        offload: bool = False,
        observer: Observer | None = None,
    ) -> None:
        check_arguments(model, sync, link, weight, outlier_ratio)
        warn_of_buffers(model)
        self.model = model
        self.sync = sync
        self.link = link
        self.steps = 0
        self.fragments = split(model, sync.fragments if isinstance(sync, Sync) else Whole())
        dtype = state_dtype(trainable(model))
        self._windows = [Window(model, fragment.parameters, dtype) for fragment in self.fragments]
        trailing = sync.trailing(link.workers) if isinstance(sync, Sync) else ()
        self._exchange = Exchange(
            link,
            sync.codec,
            float(weight),
            self._windows,
            trailing,
            tolerant=leave_out_nonfinite,
            outlier_ratio=outlier_ratio if isinstance(sync, Sync) and link.workers > 1 else None,
        )
        self._gradients = GradientAverage(self._exchange, self._windows[0])
        self._optimizers = InnerOptimizers(model)
        self._shelves = shelves(offload=offload)
        self._states: list[FragmentState] = []
        self._replicas: list[Replica] = []
        if isinstance(sync, Sync):
            self._schedule = Schedule(sync.period, len(self._windows), sync.delay_of(link.worker, link.workers))
            self._watch = MergeWatch(self._windows, self._schedule, eager=sync.eager)
            feedback = sync.codec.feedback
            for window in self._windows:
                state = FragmentState.fresh(window, sync.outer.slot_names, eager=sync.eager, feedback=feedback)
                self._shelves.take(state)
                self._states.append(state)
            self._replicas = [Replica(s, self._exchange, n, sync.outer) for n, s in enumerate(self._states)]
        self._rounds = Rounds(self._exchange, self._replicas, observer)
        self._loads = Loads(model)
        self._frozen = frozen_terms(model)  # at the start: a worker's running average of its parameters is its own
        self._on_roll_back = on_roll_back
        self._in_a_row = 0  # roll-backs since the last delta that could be sent
        self._merged = False
        self._due: set[int] = set()
        self._joined = self._lent = self._finished = False

    # ------------------------------------------------------------------ what a training script calls

    @property
    def trains(self) -> bool:
        """Whether this worker makes the coming inner step; always, unless the link has it absent or slow."""
        return self.link.trains(self.steps + 1)

    def is_due(self, step: int) -> bool:
        """Whether anything is sent or applied after this inner step (from 1)."""
        if isinstance(self.sync, Gradients):
            return False
        due = self._schedule.due(step)
        return bool(due.send or due.apply)

    @property
    def counters(self) -> Counters:
        """Rounds, bytes and seconds of waiting so far."""
        return self._exchange.counters

    @property
    def merged(self) -> bool:
        """Whether the last step(), roll_back() or finish() wrote into the model's parameters.

        An optimizer that steps on copies of them must copy them anew then, or it undoes the merge.
        """
        return self._merged

    @property
    def anchor_step(self) -> int:
        """The inner step that the outer parameters stand for: their oldest fragment holds what was sent after it."""
        return min((state.step for state in self._states), default=self.steps)

    def join(self) -> None:
        """Meet the others, as the first step would (between machines it waits for all); LinkError says what differs."""
        if self._joined:
            return
        self._loads.check()
        if self._loads.frozen:
            self._frozen = frozen_terms(self.model)
        here = {"inner steps made (load the same checkpoint on all)": str(self.steps), **self._frozen}
        if not self.steps:  # from there on, rounds compare
            here |= starting_terms([s.anchor for s in self._states] or [w.read() for w in self._windows])
        self.link.join({**self._terms(), **here}, self._exchange.weight)
        self._joined = True
        self._rounds.take_up()

    def step(self) -> None:
        """Count one inner step; send and apply what is due after it."""
        in_turn([self._step()])

    def average_gradients(self) -> None:
        """Under DataParallel, replace the gradients by their mean over the workers; otherwise do nothing.

        Call it between backward() and the inner optimizer's step (after unscaling, before clipping).
        """
        in_turn([self._average_gradients()])

    def finish(self) -> None:
        """Bring every worker to the same final model.

        Rounds in flight are applied; what was trained since the last send is exchanged once more and plainly
        averaged, so that no work is lost and no momentum overshoots; the live parameters become the anchor.
        """
        in_turn([self._finish()])

    @torch.no_grad()
    def roll_back(self) -> None:
        """Give up what this worker has trained and not yet sent, for instance after a loss that is not finite.

        Its parameters become the anchor, and the next round of every fragment is completed without it. Torch optimizers
        that step them forget their state; `on_roll_back` is for others. Under DataParallel there is nothing to roll
        back.
        """
        if self._lent:
            raise AtollError("the model holds the anchor: leave the `with outer.anchor()` block first")
        self.counters.roll_backs += 1
        self._optimizers.reset()
        self._start_anew()
        for state in self._states:
            state.left_out = True
        if self._on_roll_back is not None:
            self._on_roll_back()

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """Lend the outer parameters: inside, the model holds the anchor; afterwards its own parameters again.

        They are those of the last round that was applied, and so up to a period and a delay old: of `anchor_step`.
        """
        if self._lent:
            raise AtollError("anchor() is already in use: leave the first `with` block before entering another")
        # The tensors themselves are kept: freezing the model inside must not keep its own values from coming back.
        self._shelves.settle()
        own = [(state.window.parameters(), self._shelves.kept(state.window.read())) for state in self._states]
        self._lent, self._loads.watching = True, False
        try:
            for state in self._states:
                state.window.write(state.anchor)
            yield self.model
        finally:
            self._lent, self._loads.watching = False, True
            for parameters, values in own:
                scatter(values, parameters)

    def describe(self) -> str:
        """A readable table of the fragments."""
        return describe(self.fragments)

    # ------------------------------------------------------------------ one step

    def _step(self) -> Iterator[None]:
        self._begin()
        step = self.steps + 1
        if isinstance(self.sync, Gradients):
            self._gradients.end_step()
            self.steps = step
            return
        due = self._schedule.due(step)
        self._merged, is_due = False, bool(due.send or due.apply)
        if is_due:
            self._watch.check(self.link)  # of steps before: a GPU may still be at this one
        self._watch.stepped()
        if is_due:
            self._settle(due.send)
        self._leave_runaway(due.send)
        for fragment in due.apply:
            self._windows[fragment].parameters()  # what could not be written later is refused now
        self._use({*due.send, *due.apply})
        outgoing = self._prepare([RoundId(step, fragment) for fragment in due.send])
        yield
        self.steps = step
        self._send(outgoing)
        del outgoing  # the deltas' memory
        yield
        keep = self.sync.merge.alpha if isinstance(self.sync.merge, Blend) else None
        self._merged |= self._watch.merging(step)
        lost = {f: self._rounds.apply(RoundId(step - self._schedule.delay, f), step, keep) for f in due.apply}
        if due.apply:
            self._leave_outliers()
        if keep is None and self.link.present(step):
            for fragment in due.send:
                self._replicas[fragment].restart(step, lost.get(fragment))
        self._rounds.drop(step - max(self.sync.delays))
        if self.link.present(step + 1) and not self.link.present(step):
            self._start_anew()
        coming = self._schedule.due(step + 1)
        self._watch.merged(step)
        self._shelves.turn_to({*coming.send, *coming.apply})

    def _use(self, fragments: set[int]) -> None:
        """Have what is remembered of these fragments where it can be worked with."""
        self._due = fragments
        self._shelves.use(fragments)

    def _begin(self) -> None:
        """Check that this is the moment, and meet the other workers if it is the first."""
        if self._lent:
            raise AtollError("the model holds the anchor: leave the `with outer.anchor()` block first")
        if self._finished:
            raise AtollError("finish() has been called: make a new OuterLoop to train on")
        self._loads.check()
        self.join()
        self.link.check()

    # ------------------------------------------------------------------ send

    def _prepare(self, round_ids: Sequence[RoundId]) -> list[Outgoing]:
        """Measure and encode what is to be sent; a value that cannot be is refused here, before anything changes."""
        if round_ids:
            check_coverage(self.model, self._windows)
        wait = self._schedule.delay == 0  # later on, a GPU has a step to work on while it is waited for
        return [self._replicas[round_id.fragment].outgoing(round_id, wait=wait) for round_id in round_ids]

    def _send(self, outgoing: Sequence[Outgoing]) -> None:
        if outgoing and self.link.on_any_rank(self._spoilt(outgoing)):
            self._give_up()
        elif any(
            isinstance(o.offer, Contribution) and not self._states[o.round_id.fragment].left_out for o in outgoing
        ):
            self._in_a_row = 0
        self._rounds.send(outgoing)

    def _spoilt(self, outgoing: Sequence[Outgoing]) -> bool:
        """Whether a delta could not be sent for not being finite; the work in the other fragments is no better then."""
        return any(o.offer is None and self.link.present(o.round_id.step) for o in outgoing)

    def _settle(self, sending: Collection[int]) -> None:
        """Learn whether what a GPU was still encoding when it was sent could be; if not, act on it now."""
        unsent = self._rounds.unsent()
        spoilt = [(round_id, flight.offer) for round_id, flight in unsent if flight.offer and not flight.forgotten]
        if spoilt:
            if not self._exchange.tolerant:
                raise self._exchange.refusal(*spoilt[0])
            self._give_up([round_id.fragment for round_id, _ in spoilt], sending)
        elif any(flight.offer is not None and not flight.forgotten for _, flight in self._rounds.waiting()):
            self._in_a_row = 0
        self._rounds.leave_out(unsent)

    def _leave_runaway(self, sending: Collection[int]) -> None:
        """Start anew in the step after a delta was sent that is far larger than this worker's last ones."""
        sent = self._schedule.due(self.steps).send if self.steps else ()
        if sent and self._schedule.delay and self._exchange.outlier_ratio is not None:
            runaways = self._rounds.runaways(self.steps)
            if self.link.on_any_rank(bool(runaways)):
                self._roll_back_less(runaways, sending)

    def _leave_outliers(self) -> bool:
        """Start anew after rounds that have left out this worker's delta, unless it has done so since."""
        outliers, self._rounds.outliers = self._rounds.outliers, {}
        if self._exchange.outlier_ratio is None or not self.link.on_any_rank(any(outliers.values())):
            return False
        self._roll_back_less([fragment for fragment, holds in outliers.items() if holds])
        return True

    def _roll_back_less(self, fragments: Collection[int], sending: Collection[int] = ()) -> None:
        """Roll back; the rounds of these fragments that do without this worker are under way, so not the next as well.

        Unless they are among those `sending` now, in which there is nothing since.
        """
        self.roll_back()
        for fragment in fragments:
            self._states[fragment].left_out = fragment in sending

    def _give_up(self, fragments: Collection[int] = (), sending: Collection[int] = ()) -> None:
        """Roll back, for a delta was not finite; if it is so every time, NonFiniteError says what the cause may be."""
        self._roll_back_less(fragments, sending)
        self._in_a_row += 1
        if self._in_a_row > 1 and self._on_roll_back is None and not self._optimizers.found:
            raise NonFiniteError(
                f"worker {self.link.worker}, step {self.steps}: rolled back {self._in_a_row} times in a row, for no "
                "delta was finite. Its inner optimizer probably keeps NaN in its state: reset it after a roll-back, "
                "OuterLoop(..., leave_out_nonfinite=True, on_roll_back=inner.state.clear)"
            )

    def _start_anew(self) -> None:
        """Join, come back or be rolled back: take the anchor, and nothing of one's own."""
        self._merged = True
        self._loads.forget()
        self._shelves.settle()
        for state in self._states:
            state.forget()
        self._shelves.use(self._due)
        self._rounds.forsake()

    # ------------------------------------------------------------------ the end

    def _finish(self) -> Iterator[None]:
        self._begin()
        if isinstance(self.sync, Gradients):
            self._finished = True
            return
        self._watch.stepped()
        self._watch.check(self.link)
        self._settle(range(len(self._states)))
        check_coverage(self.model, self._windows)
        everything = [RoundId(self.steps, fragment, last=True) for fragment in range(len(self._states))]
        deltas, spoilt = [], False
        for round_id in everything:
            replica = self._at(round_id)
            delta = replica.delta()
            spoilt |= self._spoilt([replica.outgoing_of(round_id, delta)])  # what can be refused is refused now
            deltas.append(self._shelves.kept(delta))
        spoilt = self.link.on_any_rank(spoilt)
        yield
        self._finished = True
        if spoilt:
            self._give_up()
            deltas = [torch.zeros_like(delta) for delta in deltas]
        for round_id, flight in self._rounds.waiting():
            replica, delta = self._at(round_id), self._measured(round_id, deltas)
            lost = self._rounds.apply(round_id, self.steps)
            replica.settle(delta, flight, lost=lost is not None)
            deltas[round_id.fragment] = self._shelves.kept(delta)
        if self._leave_outliers():
            deltas = [torch.zeros_like(delta) for delta in deltas]
        last = [round_id for round_id in everything if self._has_unsent(round_id.fragment)]
        for round_id in last:
            self._send([self._at(round_id).outgoing_of(round_id, self._measured(round_id, deltas))])
        del deltas
        yield
        for round_id in last:
            self._at(round_id)
            self._rounds.apply_last(round_id, self.steps)
        self._shelves.settle()
        for state in self._states:
            state.window.write(state.anchor)
        self._merged = True
        self._rounds.drop(self.steps)

    def _at(self, round_id: RoundId) -> Replica:
        """The replica of a round's fragment, and nothing of the others where it would need room."""
        self._shelves.turn_to({round_id.fragment})
        self._use({round_id.fragment})
        return self._replicas[round_id.fragment]

    def _measured(self, round_id: RoundId, deltas: Sequence[Tensor]) -> Tensor:
        return deltas[round_id.fragment].to(self._windows[round_id.fragment].device)

    def _has_unsent(self, fragment: int) -> bool:
        """Whether some worker holds work of this fragment that has not arrived: the same answer on every worker.

        It was trained since the last send, or lost in one of the last two rounds: an eager worker learns of a loss when
        it has already sent again.
        """
        recent_gap = 0 < self._states[fragment].gap > self.steps - 2 * self._schedule.period
        return recent_gap or not self._schedule.is_send(fragment, self.steps)

    # ------------------------------------------------------------------ data-parallel

    def _average_gradients(self) -> Iterator[None]:
        if isinstance(self.sync, Gradients):
            self._begin()
            check_coverage(self.model, self._windows)
            yield from self._gradients.average(self.steps + 1)

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Everything the loop is, rounds in flight included; the model and the inner optimizer save themselves."""
        if self._lent:
            raise AtollError("the model holds the anchor: leave the `with outer.anchor()` block before saving")
        self._shelves.settle()
        return {
            "steps": self.steps,
            "finished": self._finished,
            "ahead": self.sync.ahead if self.link.workers > 1 else 0,  # for `checkpoint.save`
            **self._identity(),
            "base": self._frozen,
            "fragments": [state.state_dict() for state in self._states],
            "flights": self._rounds.state_dict(),
            "mean_residuals": self._rounds.residuals_state_dict(),
            "counters": asdict(self.counters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what state_dict gave, to the bit; call it before the first step, with the model restored."""
        if self._joined:
            raise AtollError("load_state_dict() must come before the first step of a new OuterLoop")
        identity = self._identity()
        check_saved(state, identity, self._windows)
        self._frozen = dict(state.get("base", identity["frozen"]))
        self._loads.forget()
        self._loads.frozen = False
        self.steps = state["steps"]
        self._shelves.settle()
        for fragment, saved in zip(self._states, state["fragments"], strict=True):
            fragment.load_state_dict(saved)
        self._rounds.load_state_dict(state["flights"])
        for residual, saved in zip(self._exchange.mean_residuals, state.get("mean_residuals", ()), strict=False):
            residual.load_state_dict(saved, CPU)
        self._exchange.counters = Counters(**state["counters"])

    def _terms(self) -> dict[str, str]:
        return terms_of(self.link, self.sync, self._windows, self._exchange.outlier_ratio)

    def _identity(self) -> dict[str, Any]:
        """What a saved state is compared with before it is loaded."""
        terms = self._terms()
        live, weight = live_checksums(self._windows), self._exchange.weight
        own = {"worker": self.link.worker, "weight": weight, "terms": terms}
        return {**own, "frozen": frozen_terms(self.model), "live": live}


def in_turn(parts: list[Iterator[None]]) -> None:
    """Take each to its next yield, round after round, until all have ended."""
    ended = object()
    with torch.no_grad():
        while parts:
            parts = [part for part in parts if next(part, ended) is not ended]

"""Runs the whole family of algorithms in one loop.

After every inner step, on every worker, in this order:

    send    each fragment due:  delta = start - local;  payload = encode(delta);  the link opens a round
    apply   each fragment due:  mean of the decoded payloads;  the outer step moves the anchor
    merge   blend: local = alpha * local + (1 - alpha) * anchor
            eager: local = anchor + what the worker's own newest delta will do to it

The clock is `step()`, never an optimizer hook: a loss scaler that skips an optimizer step must not shift one worker's
schedule. The inner optimizer is never called.

Every operation has three phases, so that one caller can take several workers through it (`Lockstep`): prepare, in which
nothing of the step has been done yet and all that can be refused is; send; and apply, which waits for other workers.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any, ClassVar

import torch
from torch import nn

from atoll.core.flat import Window, check_coverage, scatter, state_dtype, trainable
from atoll.core.fragments import Whole, describe, split
from atoll.core.schedule import Due, Schedule
from atoll.errors import AtollError, ConfigError, ExcludedError
from atoll.link.base import STEPS_MADE, Contribution, Link, RoundId
from atoll.outer import admission
from atoll.outer import finish as ending
from atoll.outer.agreement import (
    check_arguments,
    check_saved,
    frozen_terms,
    live_checksums,
    starting_terms,
    terms_of,
    trained_terms,
    warn_of,
)
from atoll.outer.backend import backend_for
from atoll.outer.exchange import Exchange
from atoll.outer.flight import Flight
from atoll.outer.fragment import FragmentReplica
from atoll.outer.gradients import GradientAverage
from atoll.outer.offload import Offload, OnDevice
from atoll.outer.presets import Gradients, Sync
from atoll.outer.roll_back import Guard, InnerOptimizers, RollBacks
from atoll.outer.rounds import Rounds
from atoll.outer.stats import Counters, Observer
from atoll.outer.watch import ModelWatch

NOTHING = Due((), ())


class OuterLoop:
    """Keeps a model in step with the other workers' copies of it.

    Make it once the model has its starting parameters, the same on every worker. Call `step()` once per training
    iteration, after the inner optimizer's step, and `finish()` at the end.

    Args:
        model: The model that this worker trains.
        sync: An algorithm: `DiLoCo(...)`, `Streaming(...)`, `Eager(...)` or another preset.
        link: This worker's end of a link.
        weight: This worker's part in every mean, for instance the number of examples in its shard.
        guard: Which deltas are left out of a round instead of counted or refused; see `Guard`.
        offload: Keeps anchors, velocities and the like of a model on a GPU in the host's memory and prefetches them for
            the fragment that is due.
        observer: Is told of every round that this worker applies.
    """

    def __init__(
        self,
        model: nn.Module,
        sync: Sync | Gradients,
        link: Link,
        *,
        weight: float = 1.0,
        guard: Guard = Guard(),
        offload: bool = False,
        observer: Observer | None = None,
    ) -> None:
        check_arguments(model, sync, link, weight, observer)
        if not isinstance(guard, Guard):
            raise ConfigError(f"guard must be an atoll.Guard(...), got {guard!r}", setting="guard", value=guard)
        warn_of(model, sync)
        self.model = model
        self.sync = sync
        self.link = link
        self.steps = 0
        self.fragments = split(model, sync.fragments if isinstance(sync, Sync) else Whole())
        dtype = state_dtype(trainable(model))
        windows = [Window(model, fragment.parameters, dtype) for fragment in self.fragments]
        trailing = sync.trailing(link.workers) if isinstance(sync, Sync) else ()
        ratio = guard.outlier_ratio if isinstance(sync, Sync) and link.workers > 1 else None
        exchange = Exchange(link, sync.codec, float(weight), windows, trailing=trailing, outlier_ratio=ratio)
        self._gradients: GradientAverage | None = None
        self._schedule: Schedule | None = None
        residence = Offload() if offload and isinstance(sync, Sync) else OnDevice()
        replicas: list[FragmentReplica] = []
        if isinstance(sync, Sync):
            self._schedule = Schedule(sync.period, len(windows), sync.delay_of(link.worker, link.workers))
            for window in windows:
                replicas.append(FragmentReplica(backend_for(window, sync.codec), sync))
                residence.add(replicas[-1])
        else:
            self._gradients = GradientAverage(
                exchange, backend_for(windows[0], sync.codec), leave_out_nonfinite=guard.leave_out_nonfinite
            )
        self._rounds = Rounds(
            exchange,
            replicas,
            observer,
            offload=residence,
            leave_out_nonfinite=guard.leave_out_nonfinite,
            longest_delay=max(sync.delays) if isinstance(sync, Sync) else 0,
        )
        eager = isinstance(sync, Sync) and sync.eager
        self._watch = ModelWatch(model, windows, self._schedule, eager=eager)
        self._roll_backs = RollBacks(self._rounds, self._watch, InnerOptimizers(model), guard.on_roll_back)
        self._status = "new"  # then "joined", then "finished"
        self._sending: dict[RoundId, Flight] = {}

    # ------------------------------------------------------------------ what a training script calls

    @property
    def trains(self) -> bool:
        """Whether this worker makes the coming inner step; always, unless the link has it absent or slow."""
        return self.link.trains(self.steps + 1)

    def is_due(self, step: int) -> bool:
        """Whether anything is sent or applied after this inner step (from 1)."""
        due = self._due(step)
        return bool(due.send or due.apply)

    @property
    def counters(self) -> Counters:
        """Rounds, bytes and seconds of waiting so far."""
        return self._rounds.exchange.counters

    @property
    def merged(self) -> bool:
        """Whether the last step(), roll_back() or finish() wrote into the model's parameters.

        An optimizer that steps on copies of them must copy them again then, or it undoes the merge.
        """
        return self._watch.merged

    @property
    def joined_at(self) -> int | None:
        """The step at which this worker last joined a run that was under way; None if it started with the others."""
        return self._watch.joined_at

    @property
    def anchor_step(self) -> int:
        """The inner step that the outer parameters stand for: their oldest fragment holds what was sent after it."""
        return min((replica.step for replica in self._rounds.replicas), default=self.steps)

    @torch.no_grad()
    def join(self) -> None:
        """Meet the other workers, as the first step would; between machines it waits for all of them.

        If they are under way, the model takes over the outer parameters, and `steps` the step that they have come to.

        Raises:
            LinkError: Another worker has other settings or other parameters; the message says which.
        """
        self._check_not_lent()
        if self._status != "new":
            return
        self._watch.loads.check()
        self._watch.joining()
        start = {STEPS_MADE: str(self.steps)}
        if not self.steps:  # from there on, rounds compare
            anchors = [replica.anchor for replica in self._rounds.replicas]
            start |= starting_terms(anchors or [window.read() for window in self._windows])
        terms = {**self._terms(), **trained_terms(self._windows), **self._watch.base}
        admitted = self.link.join(terms, self._rounds.exchange.member.weight, start)
        self.link.unfinished = self._schedule is not None and self.link.workers > 1
        if admitted is None:
            self._rounds.reopen()
        else:
            admission.enter(self, admitted)
        self._status = "joined"

    @torch.no_grad()
    def step(self) -> None:
        """Count one inner step; send and apply what is due after it.

        Over an elastic link, `steps` is the clock of the run, and may jump here: if this worker joins a run under way,
        or was cut off and joins again. So a training loop reads it: `while outer.steps < n: batch(outer.steps + 1)`.
        """
        if self._status == "new":
            self.join()
            if self.joined_at is not None:
                return  # the inner step before it was not the run's
        try:
            for phase in self.STEP:
                phase(self)
        except ExcludedError:
            admission.rejoin(self)

    @torch.no_grad()
    def average_gradients(self) -> None:
        """Replace the gradients by their mean over the workers under DataParallel; otherwise do nothing.

        Call it between backward() and the inner optimizer's step (after unscaling, before clipping).
        """
        for phase in self.AVERAGE_GRADIENTS:
            phase(self)

    @torch.no_grad()
    def finish(self) -> None:
        """Bring every worker to the same final model.

        Rounds in flight are applied; what was trained since the last send is exchanged once more and plainly averaged:
        no work is lost, no momentum overshoots. The live parameters become the anchor. Save again afterwards.
        """
        for phase in self.FINISH:
            phase(self)

    @torch.no_grad()
    def roll_back(self) -> None:
        """Give up what this worker has trained and not yet sent, for instance after a loss that is not finite.

        Its parameters become the anchor, and the next round of every fragment is completed without it. Torch optimizers
        that step them forget their state; `Guard.on_roll_back` is for others. DataParallel has nothing to roll back.
        """
        self._check_not_lent()
        self._roll_backs.roll_back()

    @contextmanager
    def anchor(self) -> Iterator[nn.Module]:
        """Lend the outer parameters: inside, the model holds the anchor; afterwards its own parameters again.

        They are those of the last round that was applied, and so up to a period and a delay old: of `anchor_step`.
        """
        if self._watch.lent:
            raise AtollError("anchor() is already in use: leave the first `with` block before entering another")
        self._rounds.offload.bring_home()
        # The tensors themselves are kept: freezing the model inside must not keep its own values from coming back.
        own = [(r.window.parameters(), self._rounds.offload.kept(r.window.read())) for r in self._rounds.replicas]
        self._watch.lent = True
        try:
            for replica in self._rounds.replicas:
                replica.window.write(replica.anchor)
            yield self.model
        finally:
            self._watch.lent = False
            for parameters, values in own:
                scatter(values, parameters)

    def describe(self) -> str:
        """Return a readable table of the fragments."""
        return describe(self.fragments)

    # ------------------------------------------------------------------ one step: prepare, send, apply

    def _prepare_step(self) -> None:
        """Check everything that can be refused, and encode what is due."""
        self._sending = {}  # of an operation that was refused
        self._begin()
        if self._gradients is not None:
            self._gradients.end_step()
            return
        step = self.steps + 1
        due = self._due(step)
        self._watch.merged = False
        self._watch.stepped(self.link, judge=bool(due.send or due.apply))
        if due.send or due.apply:
            self._roll_backs.settle(due.send, self.steps)
        if self._schedule is not None and self._schedule.delay and self._due(self.steps).send:
            self._roll_backs.leave_runaway(self.steps, due.send)
        for fragment in due.apply:
            self._windows[fragment].parameters()  # what could not be written later is refused now
        self._rounds.offload.use({*due.send, *due.apply})
        if due.send:
            check_coverage(self.model, self._windows)
            wait = self._schedule is not None and self._schedule.delay == 0  # later on, a GPU has a step to encode in
            ids = [RoundId(step, fragment) for fragment in due.send]
            self._sending = {round_id: self._rounds.prepare(round_id, wait=wait) for round_id in ids}

    def _send_step(self) -> None:
        """Count the step and send what was prepared."""
        self.steps += 1
        self._send()

    def _apply_step(self) -> None:
        """Wait for the rounds that are due, let them move the anchor, and merge it into the live parameters."""
        if self._schedule is None:
            return
        step, due = self.steps, self._due(self.steps)
        self._watch.merging(step)
        lost = {f: self._rounds.apply(RoundId(step - self._schedule.delay, f), step) for f in due.apply}
        if due.apply:
            self._roll_backs.leave_outliers()
        if self.link.present(step):
            for fragment in due.send:
                self._rounds.begin_period(fragment, step, lost.get(fragment))
        self._rounds.put_back()
        self._rounds.drop(step)
        if self.link.present(step + 1) and not self.link.present(step):
            self._roll_backs.start_anew()
        self._watch.merged_at(step)
        admission.tell_advanced(self, step, max(0, step - self._schedule.delay))
        coming = self._due(step + 1)
        self._rounds.offload.prefetch({*coming.send, *coming.apply})

    def _begin(self) -> None:
        """Check that this is the moment, and meet the other workers if it is the first."""
        if self._status == "finished":
            raise AtollError("finish() has been called: make a new OuterLoop to train on")
        self._watch.loads.check()
        self.join()
        self.link.check()

    def _check_not_lent(self) -> None:
        if self._watch.lent:
            raise AtollError("the model holds the anchor: leave the `with outer.anchor()` block first")

    def _due(self, step: int) -> Due:
        return NOTHING if self._schedule is None else self._schedule.due(step)

    @property
    def _windows(self) -> list[Window]:
        return list(self._rounds.exchange.windows)

    def _send(self) -> None:
        """Send what was prepared, unless some of it is not finite: then none of this worker's work is any good."""
        sending, self._sending = self._sending, {}
        if sending and self.link.on_any_rank(self._roll_backs.is_spoilt(sending)):
            self._roll_backs.give_up(self.steps)
        elif any(
            isinstance(flight.offer, Contribution) and not self._rounds.replicas[round_id.fragment].left_out
            for round_id, flight in sending.items()
        ):
            self._roll_backs.in_a_row = 0
        self._rounds.send(sending)

    # ------------------------------------------------------------------ data-parallel

    def _send_gradients(self) -> None:
        if self._gradients is not None:
            self._begin()
            check_coverage(self.model, self._windows)
            self._gradients.send(self.steps + 1)

    def _apply_gradients(self) -> None:
        if self._gradients is not None:
            self._gradients.apply()

    STEP: ClassVar = (_prepare_step, _send_step, _apply_step)
    AVERAGE_GRADIENTS: ClassVar = (_send_gradients, _apply_gradients)
    FINISH: ClassVar = (ending.prepare, ending.send, ending.apply)

    # ------------------------------------------------------------------ resume

    def state_dict(self) -> dict[str, Any]:
        """Return everything the loop is, rounds in flight included; the model and the inner optimizer save themselves.

        The tensors are copies.
        """
        if self._watch.lent:
            raise AtollError("the model holds the anchor: leave the `with outer.anchor()` block before saving")
        self._rounds.offload.bring_home()
        return {
            "steps": self.steps,
            "finished": self._status == "finished",
            "ahead": self.sync.ahead if self.link.workers > 1 else 0,  # for `checkpoint.save`
            **self._identity(),
            "base": self._watch.base,
            **self._rounds.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from what state_dict gave, to the bit; call it before the first step, with the model restored."""
        if self._status != "new":
            raise AtollError("load_state_dict() must come before the first step of a new OuterLoop")
        identity = self._identity()
        check_saved(state, identity, self._windows)
        self._watch.base = state.get("base", identity["frozen"])
        self._watch.loads.forget()
        self._watch.loads.frozen = False
        self.steps = state["steps"]
        self._rounds.offload.bring_home()
        self._rounds.load_state_dict(state)

    def _terms(self) -> dict[str, str]:
        return terms_of(self.link, self.sync, self._windows, self._rounds.exchange.outlier_ratio)

    def _identity(self) -> dict[str, Any]:
        """Return what a saved state is compared with before it is loaded."""
        return {
            "worker": self.link.worker,
            "weight": self._rounds.exchange.member.weight,
            "terms": self._terms(),
            "frozen": frozen_terms(self.model),
            "live": live_checksums(self._windows),
        }

"""Opens one worker's rounds on the link, applies them to the replicas, and saves them while they are in flight."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from typing import Any

from torch import Tensor

from atoll._util.device_values import DeviceValues
from atoll.core.allreduce import MeanResidual
from atoll.core.flat import CPU, sums_of_pieces
from atoll.errors import LinkError, NonFiniteError
from atoll.link.base import FragmentState, Offer, Round, RoundId
from atoll.outer.exchange import Exchange
from atoll.outer.flight import Flight
from atoll.outer.fragment import FragmentReplica
from atoll.outer.offload import OnDevice
from atoll.outer.stats import Counters, Observer, Products

COUNTED = "newest round that counted worker "
"""Begins the name of a count in a FragmentState; the worker's number follows."""


class Rounds:
    """Sends and applies one worker's rounds of all fragments; an observer is told of each that is applied."""

    def __init__(
        self,
        exchange: Exchange,
        replicas: Sequence[FragmentReplica],
        observer: Observer | None,
        *,
        offload: OnDevice,
        leave_out_nonfinite: bool,
        longest_delay: int,
    ) -> None:
        self.exchange = exchange
        self.replicas = replicas
        self.offload = offload
        """Where the replicas' vectors are kept."""
        self._observer = observer
        self.leave_out_nonfinite = leave_out_nonfinite
        """Whether a delta that is not finite is left out of its round instead of raising NonFiniteError."""
        self._longest_delay = longest_delay  # inner steps, of any worker
        self._flights: dict[RoundId, Flight] = {}
        self.counted = [dict.fromkeys(range(exchange.link.workers), 0) for _ in replicas]
        """By fragment: worker -> step of the newest applied round that counted it; not of all after a resume."""
        self._owed: list[tuple[int, Tensor]] = []  # fragments and payloads that `put_back` puts back
        self.outliers: dict[int, bool] = {}
        """Fragments whose rounds have just left out this worker's delta, and whether it still holds that work."""

    # ------------------------------------------------------------------ send

    def prepare(self, round_id: RoundId, *, wait: bool = True, delta: Tensor | None = None) -> Flight:
        """Measure and encode what is to be sent; NonFiniteError before anything has changed.

        Args:
            round_id: The round.
            wait: Whether to wait until it is known that the payload can be sent.
            delta: What to encode, if it was measured before.
        """
        exchange, replica = self.exchange, self._replica(round_id)
        if not exchange.link.present(round_id.step):
            return Flight()
        seed = exchange.seed(round_id)
        try:
            if delta is None:
                delta, offer = replica.prepare(exchange.member, seed, wait=wait)
            else:
                offer = replica.encode(delta, exchange.member, seed)
        except NonFiniteError as error:
            if self.leave_out_nonfinite:
                return Flight()
            raise NonFiniteError(f"worker {exchange.link.worker}, {round_id}, {error}") from error
        return Flight(offer, delta)

    def send(self, flights: Mapping[RoundId, Flight]) -> None:
        """Open these rounds; a worker that was rolled back since its last send puts nothing in."""
        for round_id, flight in flights.items():
            replica = self._replica(round_id)
            if replica.left_out:
                flight.offer = None
                self.exchange.counters.rounds_left_out += 1
            replica.left_out = False
            if flight.offer is not None:
                flight.undo = replica.sent(flight.offer.payload, flight.delta)
                for earlier in self._flights_of(round_id.fragment):
                    earlier.keeps = False  # this one carries the work
            flight.delta = None
            self._flights[round_id] = flight  # even if the link refuses: the payload has been taken off what is left
            flight.pending = self.exchange.open(round_id, flight.offer)

    def follow(self, round_id: RoundId) -> None:
        """Open a round that does without this worker: it joins the others, and receives the result."""
        self._flights[round_id] = Flight(pending=self.exchange.open(round_id, None))

    def unsendable(self) -> list[tuple[RoundId, Flight]]:
        """Return the rounds whose offer could not be sent after all; waits for what a GPU was still encoding."""
        found = []
        for round_id, flight in self._flights.items():
            if flight.offer is not None:
                if (sent := flight.offer.settled()) is None:
                    found.append((round_id, flight))
                else:
                    flight.offer = sent
        return found

    def refusal(self, round_id: RoundId, offer: Offer) -> NonFiniteError:
        """Return the error for an offer that could not be sent: the parameter is looked up in the payload."""
        window, where = self.exchange.windows[round_id.fragment], ""
        if offer.payload.numel():  # pragma: no cover (a payload of kernels; a resumed run has none)
            values = self.exchange.codec.largest(offer.payload, window.numel)
            names = dict.fromkeys(window.locate(index) for index in (values.start, values.stop - 1))
            where = f", parameter {' or '.join(map(repr, names))}"
        at = f"worker {self.exchange.link.worker}, {round_id}{where}"
        return NonFiniteError(f"{at}: a value was not finite, or too large to be sent")

    def leave_out(self, unsendable: Sequence[tuple[RoundId, Flight]]) -> None:
        """Note that these rounds are completed without this worker."""
        for round_id, flight in unsendable:
            flight.offer = None
            self.exchange.take_back(round_id)

    def runaways(self, step: int) -> list[int]:
        """Return the fragments sent after this step whose delta is many times larger than the worker's last ones.

        Whether they count is for all workers to decide; but the worker should not train on from where they led. Waits
        for a GPU.
        """
        found = []
        for round_id, flight in self._flights.items():
            ratio = self.exchange.ratio_of(round_id.fragment)
            if ratio is None or round_id.step != step or flight.offer is None or flight.forgotten:
                continue
            sent, norms = flight.offer.settled(), self._replica(round_id).norms
            if sent is not None and norms.is_runaway(sent.member.size.norm, ratio):
                found.append(round_id.fragment)
        return found

    # ------------------------------------------------------------------ apply

    def waiting(self) -> list[tuple[RoundId, Flight]]:
        """Return the rounds that this worker has sent and not yet applied."""
        return [(round_id, flight) for round_id, flight in self._flights.items() if not flight.applied]

    def _flights_of(self, fragment: int) -> list[Flight]:
        return [flight for round_id, flight in self.waiting() if round_id.fragment == fragment]

    def apply(self, round_id: RoundId, step: int, *, merging: bool = True) -> Flight | None:
        """Wait for a round and let it move the anchor after this step; merge it into the live parameters.

        A worker whose payload was lost does not merge: it keeps its own parameters, and its next delta carries the
        work. One that sent nothing, or has started anew since, has no such work and takes the result. An empty round
        moves nothing.

        Returns:
            The flight, if the round has lost work of this worker.
        """
        flight, replica, worker = self._flights[round_id], self._replica(round_id), self.exchange.link.worker
        completed = self._collect(flight)
        flight.applied = True
        flight.counted = tuple(member.worker for member in completed.members)
        self.counted[round_id.fragment] |= dict.fromkeys(flight.counted, round_id.step)
        if not self.exchange.is_complete(completed):
            replica.gap = round_id.step
        missed = flight.offer is not None and all(member.worker != worker for member in completed.members)
        outlier = any(member.worker == worker for member in completed.outliers)
        self._count(replica, flight, completed, missed=missed, outlier=outlier)
        if merging and flight.owed is not None and worker not in flight.counted:
            self._owed.append((round_id.fragment, flight.owed))
            self.exchange.counters.rounds_missed += 1
        if outlier:
            self.outliers[round_id.fragment] = not flight.forgotten
        lost = missed and not flight.forgotten  # of an outlier it does not matter: its worker is rolled back
        alpha = replica.merge.alpha if merging else None
        if alpha is not None and flight.keeps:
            alpha = None
            with replica.moving_along():
                self._outer_step(completed, step, None)
        else:
            self._outer_step(completed, step, None if lost else alpha)
        if alpha is not None and lost:
            replica.restore(flight.undo)
        elif alpha is not None and completed.members:
            self._thin_out(round_id.fragment, alpha)
        return flight if lost else None

    def put_back(self) -> None:
        """Put back work that was sent before a cut-off and did not count, as rounds just applied show."""
        for fragment, payload in self._owed:
            self.replicas[fragment].put_back(payload)
        self._owed = []

    def begin_period(self, fragment: int, step: int, lost: Flight | None) -> None:
        """Start a fragment's next period after a send, where the merge is eager."""
        replica = self.replicas[fragment]
        if replica.merge.alpha is not None:
            return
        payload = lost.offer.payload if lost and lost.offer else None
        replica.merge.begin_period(replica, self.exchange.share(step), payload)

    def _count(
        self, replica: FragmentReplica, flight: Flight, completed: Round, *, missed: bool, outlier: bool
    ) -> None:
        counters, norms = self.exchange.counters, replica.norms
        counters.count_outliers(len(completed.outliers), own=outlier)
        if outlier:
            norms.left_out()
        elif missed:
            counters.rounds_missed += 1
        elif flight.offer is not None and (sent := flight.offer.settled()) is not None:
            norms.counted(sent.member.size.norm)

    def apply_last(self, round_id: RoundId, step: int) -> None:
        """Let the round that ends a run move the anchor: by the plain mean, so that no momentum overshoots."""
        completed = self._collect(self._flights[round_id])
        outlier = any(member.worker == self.exchange.link.worker for member in completed.outliers)
        self.exchange.counters.count_outliers(len(completed.outliers), own=outlier)
        self._outer_step(completed, step, None, plain_mean=True)

    def _collect(self, flight: Flight) -> Round:
        assert flight.pending is not None
        return self.exchange.collect(flight.pending)

    def _outer_step(self, completed: Round, step: int, alpha: float | None, *, plain_mean: bool = False) -> None:
        products, replica = Products() if self._observer else None, self._replica(completed.round_id)
        if completed.members:
            replica.outer_step(completed, products, alpha, plain_mean=plain_mean)
        if self._observer and products:
            sums = DeviceValues(sums_of_pieces(replica.anchor)) if self.exchange.link.elastic else None
            self._observer(replace(products.applied(completed, step), version=replica.version, anchor_sums=sums))

    def _thin_out(self, fragment: int, alpha: float) -> None:
        """Note that the live parameters hold less of what is in flight: an anchor was blended in."""
        for flight in self._flights_of(fragment):
            flight.held *= alpha

    def unsent_work(self, round_id: RoundId, flight: Flight, delta: Tensor, *, lost: bool) -> None:
        """Correct a last delta, measured before this round came in, to hold all that has not arrived and no more.

        A blending worker's parameters still held what it had sent (or part of it), and an eager worker had started
        beyond it.
        """
        replica = self._replica(round_id)
        if flight.offer is None or flight.forgotten:
            if flight.owed is not None and self.exchange.link.worker not in flight.counted and flight.applied:
                delta.add_(replica.backend.decode(flight.owed))
            return
        held = flight.held if replica.merge.own is None else 0.0
        delta.add_(replica.backend.decode(flight.offer.payload), alpha=lost - held)
        if flight.undo is not None:
            delta.add_(flight.undo)

    # ------------------------------------------------------------------ start anew, resume

    def start_anew(self) -> None:
        """Join, come back or be rolled back: take the anchor, and nothing of the worker's own."""
        self.offload.bring_home()
        for replica in self.replicas:
            replica.forget()
        self.offload.use_again()
        for flight in self._flights.values():
            flight.forgotten = True  # what it had sent is no longer in the live parameters
            flight.keeps, flight.owed = False, None

    def forget(self) -> None:
        """Drop everything that is in flight: the worker was cut off, or joins the others where they are."""
        self._flights = {}
        self.exchange.mean_residuals = [MeanResidual() for _ in self.exchange.mean_residuals]

    def drop(self, step: int) -> None:
        """Forget rounds that every worker has applied at this step."""
        kept = {r: flight for r, flight in self._flights.items() if r.step > step - self._longest_delay}
        self._flights = kept
        for fragment, residual in enumerate(self.exchange.mean_residuals):
            residual.drop(self._oldest(fragment))

    def shared(self, fragment: int, applied: int) -> FragmentState:
        """Return copies of what all workers have alike, once all rounds up to step `applied` are in it."""
        counts, vectors = self.replicas[fragment].shared()
        counted = {f"{COUNTED}{worker}": step for worker, step in self.counted[fragment].items()}
        copies = {name: vector.to(CPU, copy=True) for name, vector in vectors.items()}
        up_to = max(applied, self.replicas[fragment].step)  # its newest round may be later
        return FragmentState(fragment, up_to, {**counts, **counted}, copies)

    def take_shared(self, fragment: int, state: FragmentState) -> None:
        """Take over what `shared` gave on another worker; LinkError if it does not fit."""
        counted = {f"{COUNTED}{worker}": worker for worker in range(self.exchange.link.workers)}
        counts = {name: count for name, count in state.counts.items() if name not in counted}
        try:
            if state.fragment != fragment or state.applied < 0:
                raise LinkError(f"it is of fragment {state.fragment} up to step {state.applied}")
            self.replicas[fragment].take_shared(counts, state.vectors)
        except LinkError as problem:
            raise LinkError(f"fragment {fragment}: another worker's state of it does not fit: {problem}") from None
        self.counted[fragment] = {
            worker: state.counts[name] for name, worker in counted.items() if name in state.counts
        }

    def reopen(self) -> None:
        """Open again, in a resumed run, what was in flight when it was saved."""
        for round_id, flight in self._flights.items():
            flight.pending = self.exchange.reopen(round_id, flight.offer)

    def state_dict(self) -> dict[str, Any]:
        """Return the replicas, all rounds in flight, what reducing means had lost before them, and the counters."""
        residuals = enumerate(self.exchange.mean_residuals)
        return {
            "fragments": [replica.state_dict() for replica in self.replicas],
            "flights": [{"id": tuple(round_id), **flight.state_dict()} for round_id, flight in self._flights.items()],
            "mean_residuals": [residual.state_dict(self._oldest(fragment)) for fragment, residual in residuals],
            "counters": asdict(self.exchange.counters),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take back what state_dict gave; `reopen` opens the rounds when the link is joined."""
        for replica, saved in zip(self.replicas, state["fragments"], strict=True):
            replica.load_state_dict(saved)
        self._flights, self.counted = {}, [{} for _ in self.replicas]
        for saved in state["flights"]:
            round_id = RoundId(*saved["id"])
            device = self._replica(round_id).window.device
            self._flights[round_id] = Flight.from_state_dict(saved, self.exchange.member, device)
        for residual, saved in zip(self.exchange.mean_residuals, state.get("mean_residuals", ()), strict=False):
            residual.load_state_dict(saved, CPU)
        self.exchange.counters = Counters(**state["counters"])

    def _oldest(self, fragment: int) -> RoundId | None:
        return min((round_id for round_id in self._flights if round_id.fragment == fragment), default=None)

    def _replica(self, round_id: RoundId) -> FragmentReplica:
        return self.replicas[round_id.fragment]

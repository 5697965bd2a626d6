"""One worker's rounds: what it sends goes on its way, and what comes back moves its anchors."""

from collections.abc import Mapping, Sequence
from typing import Any

from atoll.applied import Applied, Observer, Products
from atoll.exchange import Exchange
from atoll.link.base import Round, RoundId
from atoll.replica import Replica
from atoll.state import Flight, FragmentState, Outgoing


class Rounds:
    """Of all fragments, `replicas[fragment]`; an `observer` is told of every one that this worker applies."""

    def __init__(self, exchange: Exchange, replicas: Sequence[Replica], observer: Observer | None) -> None:
        self._exchange = exchange
        self._replicas = replicas
        self._observer = observer
        self._flights: dict[RoundId, Flight] = {}
        self.outliers: dict[int, bool] = {}
        """Fragments of which rounds have just left out this worker's delta, and whether it still holds that work."""

    def waiting(self) -> list[tuple[RoundId, Flight]]:
        """Those which this worker has sent and not yet applied."""
        return [(round_id, flight) for round_id, flight in self._flights.items() if not flight.applied]

    def send(self, outgoing: Sequence[Outgoing]) -> None:
        """Open a round for each; a worker that was rolled back since its last send puts nothing in."""
        for round_id, delta, offer in outgoing:
            state = self._state(round_id)
            sent = None if state.left_out else offer
            flight = Flight(sent)
            self._exchange.counters.rounds_left_out += state.left_out
            state.left_out = False
            if sent is not None and state.own is not None:
                state.newest = sent.payload
            if sent is not None and delta is not None and state.residual is not None:
                flight.restore = state.hold_back(delta, self._exchange.decode(sent.payload, round_id.fragment))
            flight.pending = self._exchange.open(round_id, sent)
            self._flights[round_id] = flight

    def unsent(self) -> list[tuple[RoundId, Flight]]:
        """Those whose offer could not be sent after all; waits for what was still encoded when it was sent."""
        found = []
        for round_id, flight in self._flights.items():
            if flight.offer is not None:
                if (sent := flight.offer.settled()) is None:
                    found.append((round_id, flight))
                else:
                    flight.offer = sent
        return found

    def leave_out(self, unsent: Sequence[tuple[RoundId, Flight]]) -> None:
        """Note that these are completed without this worker."""
        for round_id, flight in unsent:
            flight.offer = None
            self._exchange.take_back(round_id)

    def take_up(self) -> None:
        """Open again, in a resumed run, what was in flight when it was saved."""
        for round_id, flight in self._flights.items():
            flight.pending = self._exchange.reopen(round_id, flight.offer)

    def apply(self, round_id: RoundId, step: int, keep: float | None = None) -> Flight | None:
        """Let a round move the anchor after this step; returns the flight if it has lost work of this worker.

        With `keep`, the anchor is blended into the live parameters, of which so much stays; if the round is empty,
        nothing moves. A worker whose payload was lost does not blend: it keeps its own, and its next delta carries the
        work. One that sent nothing, or has started anew since, has no such work and takes the result.
        """
        flight, worker = self._flights[round_id], self._exchange.link.worker
        completed = self._collect(flight)
        flight.applied = True
        if not self._exchange.is_complete(completed):
            self._state(round_id).gap = round_id.step
        missed = flight.offer is not None and all(member.worker != worker for member in completed.members)
        outlier = any(member.worker == worker for member in completed.outliers)
        self._count(round_id, flight, completed, missed=missed, outlier=outlier)
        if outlier:
            self.outliers[round_id.fragment] = not flight.forgotten
        lost = missed and not flight.forgotten  # of an outlier it does not matter: its worker is rolled back
        self._outer_step(completed, step, None if lost else keep)
        if keep is not None and lost:
            self._state(round_id).restore(flight)
        elif keep is not None and completed.members:
            self._thin_out(round_id.fragment, keep)
        return flight if lost else None

    def _count(self, round_id: RoundId, flight: Flight, completed: Round, *, missed: bool, outlier: bool) -> None:
        counters, norms = self._exchange.counters, self._state(round_id).norms
        counters.count_outliers(len(completed.outliers), own=outlier)
        if outlier:
            norms.left_out()
        elif missed:
            counters.rounds_missed += 1
        elif flight.offer is not None and (sent := flight.offer.settled()) is not None:
            norms.counted(sent.member.size.norm)

    def runaways(self, step: int) -> list[int]:
        """Fragments that this worker sent after this step, many times larger than its last ones; waits for a GPU.

        Whether they count is for all to decide. But where they were trained from is no place to go on from.
        """
        found = []
        for round_id, flight in self._flights.items():
            ratio = self._exchange.ratio_of(round_id.fragment)
            if ratio is None or round_id.step != step or flight.offer is None or flight.forgotten:
                continue
            sent, norms = flight.offer.settled(), self._state(round_id).norms
            if sent is not None and norms.is_runaway(sent.member.size.norm, ratio):
                found.append(round_id.fragment)
        return found

    def apply_last(self, round_id: RoundId, step: int) -> None:
        """Let the round that ends a run move the anchor: by the plain mean, so that no momentum overshoots."""
        completed = self._collect(self._flights[round_id])
        outlier = any(member.worker == self._exchange.link.worker for member in completed.outliers)
        self._exchange.counters.count_outliers(len(completed.outliers), own=outlier)
        self._outer_step(completed, step, plainly=True)

    def forsake(self) -> None:
        """Note that this worker has started anew: what it had sent is no longer in its live parameters."""
        for flight in self._flights.values():
            flight.forgotten = True

    def drop(self, step: int) -> None:
        """Forget those sent at this step or before, which every worker has applied."""
        self._flights = {round_id: flight for round_id, flight in self._flights.items() if round_id.step > step}
        for fragment, residual in enumerate(self._exchange.mean_residuals):
            residual.drop(self._oldest(fragment))

    def _oldest(self, fragment: int) -> RoundId | None:
        """The first round of this fragment that is in flight."""
        return min((round_id for round_id in self._flights if round_id.fragment == fragment), default=None)

    def _state(self, round_id: RoundId) -> FragmentState:
        return self._replicas[round_id.fragment].state

    def _collect(self, flight: Flight) -> Round:
        assert flight.pending is not None
        return self._exchange.collect(flight.pending)

    def _outer_step(self, completed: Round, step: int, keep: float | None = None, *, plainly: bool = False) -> None:
        if not completed.members:
            if self._observer:
                outliers = tuple(member.worker for member in completed.outliers)
                self._observer(Applied(completed.round_id, step, (), completed.passage, outliers=outliers))
            return
        products = Products() if self._observer else None
        self._replicas[completed.round_id.fragment].outer_step(completed, products, keep, plainly=plainly)
        if self._observer and products:
            self._observer(products.applied(completed, step))

    def _thin_out(self, fragment: int, keep: float) -> None:
        """Rounds in flight carry work of which the live parameters now hold less: an anchor was blended in."""
        for round_id, flight in self.waiting():
            if round_id.fragment == fragment:
                flight.held *= keep

    def state_dict(self) -> list[dict[str, Any]]:
        """All that are in flight."""
        return [{"id": tuple(round_id), **flight.state_dict()} for round_id, flight in self._flights.items()]

    def residuals_state_dict(self) -> list[dict[str, Any]]:
        """By fragment, what reducing means had lost before the rounds in flight; empty without error feedback."""
        residuals = enumerate(self._exchange.mean_residuals)
        return [residual.state_dict(self._oldest(fragment)) for fragment, residual in residuals]

    def load_state_dict(self, flights: Sequence[Mapping[str, Any]]) -> None:
        """Take back what state_dict gave; `take_up` opens them when the link is joined."""
        self._flights = {}
        for saved in flights:
            round_id = RoundId(*saved["id"])
            device = self._state(round_id).window.device
            worker, weight = self._exchange.link.worker, self._exchange.weight
            self._flights[round_id] = Flight.from_state_dict(saved, worker, weight, device)

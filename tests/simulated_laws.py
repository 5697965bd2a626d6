"""Checks the laws of rounds between changing members, at every event of a simulated network.

- Two processes complete a round alike, unless the view that one of them completed it in, or a later one, has left the
  other behind. So what a survivor has completed stands, and anchors are the same at every version.
- All members of a view come to the same decision, and what is held counts in it.
- What is settled never changes, whatever becomes of the process that said so.
- A process that knows of a lost member, or that is in a flush, completes nothing.
- A message of a process that is no member any more changes nothing.
- In the end everybody has all rounds, no payload counts twice, and nobody keeps anything.
"""

from collections import defaultdict
from typing import TYPE_CHECKING, Any

from atoll.link.base import RoundId
from atoll.link.net.actions import Complete, Message
from atoll.link.net.protocol import Protocol
from atoll.link.net.views import Decision, Process, Told, View, era_of

if TYPE_CHECKING:
    from simulated_net import Net
    from simulated_worker import Worker

Payloads = tuple[Any, ...]
Result = tuple[Payloads, frozenset[int]]
"""What a round holds, and the seats that owed a payload to it."""


class Laws:
    """Remembers what has happened in a simulated network, and compares."""

    def __init__(self, net: "Net") -> None:
        self.net = net
        self.completed: defaultdict[RoundId, list[tuple[int, Process, Result]]] = defaultdict(list)
        """Round -> adopted view, process and result of every completion."""
        self.decisions: dict[int, Decision] = {}
        self.settled: dict[RoundId, Payloads] = {}
        self.seen_settled: dict[Process, int] = {}

    def check_round(self, worker: "Worker", action: Complete) -> Payloads:
        """Check a round that a worker completes, and return the payloads that are averaged in it."""
        round_id, protocol = action.round_id, worker.protocol
        assert not protocol.is_flushing, "completed in a flush"
        assert not any(map(protocol.view.has, worker.lost)), "completed in spite of a loss"
        assert not any(process == worker.me for _, process, _ in self.completed[round_id]), "completed twice"
        era = protocol.eras[-1]
        assert round_id.step < era.first_step or len(era.owing) >= self.net.plan.min_workers, "too few members"
        if action.payloads is not None:
            payloads = tuple(action.payloads.values())
            assert [p.owner for p in payloads] == list(action.payloads), "not the payload of its owner"
        else:
            assert action.means is not None
            assert len(action.means) == len(action.attempt.members), "not all parts"
            assert len(set(action.means)) == 1, f"parts of different members: {action.means}"
            payloads = action.means[0]
        assert payloads or self._is_left_by_all(worker, round_id), f"{round_id} is a round of nobody"
        assert all(p.round_id == round_id for p in payloads)
        assert tuple(p.owner for p in payloads) == action.attempt.members
        owing = self.net.views[era_of(protocol.eras, round_id.step).view].owing
        assert action.due == {member.seat for member in owing}, "not those that owed a payload at first"
        self._compare(round_id, protocol.adopted, worker.me, (payloads, action.due))
        return payloads

    def _is_left_by_all(self, worker: "Worker", round_id: RoundId) -> bool:
        """Return whether all that owed a payload to a round are lost, or were left behind."""
        view, era = worker.protocol.view, era_of(worker.protocol.eras, round_id.step)
        owing = self.net.views[era.view].owing
        return all(not view.has(member) or view.late.get(member.seat, -1) >= round_id.step for member in owing)

    def _compare(self, round_id: RoundId, view: int, me: Process, result: Result) -> None:
        """Check that a round is completed as by all others that are members of the same view, or of a later one."""
        for other_view, other, others in self.completed[round_id]:
            if others != result:
                early, late = sorted([(view, me), (other_view, other)])
                is_left_behind = early[0] < late[0] and not self.net.views[late[0]].has(early[1])
                assert is_left_behind, f"{round_id} differs: {me} in view {view}, {other} in view {other_view}"
        self.completed[round_id].append((view, me, result))

    def check_decision(self, worker: "Worker", decision: Decision) -> None:
        """Check that all decide alike, and that what is held counts where whole payloads go or the owner remains."""
        first = self.decisions.setdefault(decision.view.number, decision)
        if first is not decision:
            assert first == decision, f"{worker.me} decides otherwise on view {decision.view.number}"
            return
        told = worker.protocol.flush._told[decision.view.number]
        for round_id, attempt in decision.attempts.items():
            known = [one.rounds[round_id] for one in told.values() if round_id in one.rounds]
            if any(one.done for one in known):
                continue
            newest = max((one.attempt for one in known), key=lambda one: one.view)
            held = {owner for one in known for owner in one.held if owner in newest.members}
            if newest.in_parts:
                held &= set(decision.view.members)
            assert held <= set(attempt.members), f"{round_id}: {held - set(attempt.members)} do not count"

    def check_proposal(self, worker: "Worker", view: View) -> None:
        """Check that a follower neither removes members that train nor leaves them behind."""
        before = worker.protocol.view
        if worker.me.seat in before.following:
            assert {*view.owing} >= {*before.owing}, f"{worker.me} follows, and proposes members that train away"
            assert view.late == before.late, f"{worker.me} follows, and leaves members behind"

    def check_settled(self, worker: "Worker") -> None:
        """Check that what a worker takes for settled is what all others took for it."""
        step, seen = worker.protocol.settled_step, self.seen_settled.get(worker.me, 0)
        if step <= seen:
            return
        self.seen_settled[worker.me] = step
        for chain in worker.anchors.values():
            for round_id, payloads in reversed(chain):
                if round_id.step <= seen:
                    break
                if round_id.step <= step:
                    settled = self.settled.setdefault(round_id, payloads)
                    assert settled == payloads, f"{round_id} was settled otherwise before {worker.me} did"

    def check_stranger(self, worker: "Worker", sender: Process, message: Message, view: int) -> None:
        """Check that a message of a process that is no member of the newest view changes nothing."""
        protocol = worker.protocol
        is_early = message.view > protocol.view.number if isinstance(message, Told) else view > protocol.adopted
        if is_early or protocol.view.has(sender):
            worker.do(protocol.receive(sender, message, view))
            return
        before = fingerprint(protocol)
        assert not protocol.receive(sender, message, view), f"{worker.me} acts on what {sender} sent: {message}"
        assert fingerprint(protocol) == before, f"{worker.me} keeps what {sender} sent: {message}"

    def check_end(self) -> None:
        """Check that everybody has arrived at the same anchors, and that nothing is kept."""
        net, plan = self.net, self.net.plan
        members = [w for w in net.workers if w.alive]
        if not any(w.protocol.has_caught_up for w in members):  # those that had the shared state are gone
            gone = [w for w in net.workers if w.has_state and not w.alive]
            assert all(w.finished or w.me in net.faults.hit for w in gone), "nobody is left"
            return
        stuck = [(w.me, w.step, w.has_state, w.protocol.is_held_up) for w in members if not w.finished]
        assert not stuck, f"no progress by {net.now:.1f} s: {stuck}"
        assert {w.me for w in members} == set(net.registry.view.members), "not a member in the end"
        for fragment in range(plan.fragments):
            chains = [w.anchors[fragment] for w in members]
            assert all(chain == chains[0] for chain in chains), f"anchors of fragment {fragment} differ"
            sent = [r for step in range(1, plan.steps + 1) for r in plan.due(step) if r.fragment == fragment]
            assert [r for r, _ in chains[0]] == sent, "a round was left out or applied twice"
            payloads = [payload for _, averaged in chains[0] for payload in averaged]
            assert len(payloads) == len(set(payloads)), "a payload counted twice"
            assert all(self.settled.get(r, averaged) == averaged for r, averaged in chains[0]), "settled otherwise"
        if len(net.views) == 1:
            everyone = {Process(seat, 1) for seat in range(plan.seats)}
            assert all({p.owner for p in averaged} == everyone for _, averaged in members[0].anchors[0])
        for worker in members:
            check_memory(worker.protocol)


def check_memory(protocol: Protocol) -> None:
    """Check that a member keeps nothing of rounds that all have applied, nor of processes that are gone."""
    members, applied = set(protocol.view.members), protocol._applied._said
    assert not protocol._rounds, f"{protocol.me} keeps rounds {sorted(protocol._rounds)}: {applied}"
    assert not protocol.flush._early, f"{protocol.me} keeps messages"
    assert not protocol._waiting, f"{protocol.me} keeps offers"
    assert len(protocol.eras) == 1, f"{protocol.me} keeps eras {protocol.eras}"
    assert protocol.flush._told.keys() <= {protocol.view.number}, f"{protocol.me} keeps what was told in older views"
    assert applied.keys() <= members, f"{protocol.me} keeps {applied.keys() - members}"


def fingerprint(protocol: Protocol) -> Any:
    """Return all that a member knows, as one value."""
    rounds = {
        round_id: (
            known.attempt,
            known.done,
            known.result,
            dict(known.held),
            dict(known.means),
            {key: dict(parts) for key, parts in known.parts.items()},
        )
        for round_id, known in protocol._rounds.items()
    }
    told = {number: dict(known) for number, known in protocol.flush._told.items()}
    return protocol.eras, rounds, dict(protocol._applied._said), told, len(protocol.flush._early)

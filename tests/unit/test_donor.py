"""A donor gives a joiner what cannot change any more, and only to those that follow and have asked."""

from dataclasses import dataclass, field

from atoll.link.base import FragmentState, RoundId
from atoll.link.net.actions import Action, Adopt, Send
from atoll.link.net.donor import Donor
from atoll.link.net.flush import MOST_TOLD
from atoll.link.net.messages import Ask
from atoll.link.net.protocol import Protocol
from atoll.link.net.views import Decision, Process, Told, View

ME, OTHER, JOINER, LATE = (Process(seat, 10 + seat) for seat in range(4))


@dataclass
class Nothing:
    """A member's part in a round to which it has nothing to contribute."""

    whole: None = None

    def part_count(self, members: int) -> int:
        return members

    def part(self, part: int, members: int) -> None:
        return None


@dataclass
class Net:
    """Members whose messages arrive at once, and worker 0's donor."""

    protocols: dict[Process, Protocol] = field(default_factory=dict)
    given: list[tuple[int, int, int]] = field(default_factory=list)
    """Seat of the joiner, fragment, and the step up to which all rounds are in it."""
    decisions: list[Decision] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.protocols = {process: Protocol(process, 0) for process in (ME, OTHER)}
        self.donor = Donor(self.protocols[ME], self.give)
        self.view = View(1, {0: ME.life, 1: OTHER.life})
        self.show()

    def give(self, joiner: Process, state: FragmentState) -> None:
        self.given.append((joiner.seat, state.fragment, state.applied))

    def show(self) -> None:
        """Let all members know of the newest view."""
        sends: list[tuple[Process, Send]] = []
        for process, protocol in self.protocols.items():
            sends += self.note(process, protocol.on_view(self.view))
        self.deliver(sends)

    def note(self, process: Process, actions: list[Action]) -> list[tuple[Process, Send]]:
        for action in actions:
            if isinstance(action, Adopt) and process == ME:
                self.decisions.append(action.decision)
                self.donor.adopt(action.decision)
        return [(process, action) for action in actions if isinstance(action, Send)]

    def deliver(self, sends: list[tuple[Process, Send]]) -> None:
        while sends:
            sender, send = sends.pop(0)
            to = self.protocols.get(send.to)
            if to is not None and self.view.has(send.to):
                sends += self.note(send.to, to.receive(sender, send.message, send.view))

    def admit(self, joiner: Process) -> None:
        self.protocols[joiner] = Protocol(joiner, None)
        self.view = self.view.admitting(*joiner)
        self.show()

    def lose(self, process: Process) -> None:
        del self.protocols[process]
        self.view = self.view.without([process.seat])
        self.show()

    def round(self, step: int) -> None:
        """Complete a round on the members that train; nobody has applied it."""
        for process in (ME, OTHER):
            self.deliver(self.note(process, self.protocols[process].open(RoundId(step, 0), Nothing())))

    def apply(self, process: Process, step: int) -> None:
        self.deliver(self.note(process, self.protocols[process].has_applied(step)))
        if process == ME:
            self.donor.give_settled()

    def heard(self) -> None:
        """Do as a member does after others' progress."""
        self.donor.give_settled()


def state(fragment: int, applied: int) -> FragmentState:
    return FragmentState(fragment, applied, {}, {})


def test_a_copy_is_given_once_every_member_has_applied_its_rounds() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(JOINER, Ask((0, 2), 0))
    net.round(5)
    net.apply(ME, 5)
    net.donor.add([state(0, 5)])
    assert net.given == []
    net.apply(OTHER, 4)
    net.heard()
    assert net.given == []
    net.apply(OTHER, 5)
    net.heard()
    assert net.given == [(2, 0, 5)]
    net.heard()
    assert net.given == [(2, 0, 5)]
    assert net.donor.wanted(5) == [2]


def test_a_copy_without_rounds_that_can_change_is_given_at_once() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(JOINER, Ask((1,), 0))
    net.donor.add([state(1, 3)])
    assert net.given == [(2, 1, 3)]


def test_nothing_is_copied_after_the_last_exchange() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(JOINER, Ask((0, 1), 0))
    net.donor.add([state(1, 3)])
    assert net.donor.wanted(5) == [0]
    net.donor.is_over = True
    assert net.donor.wanted(5) == []


def test_only_what_was_asked_for_is_copied_and_once() -> None:
    net = Net()
    net.admit(JOINER)
    assert net.donor.wanted(100) == []
    net.donor.ask(JOINER, Ask((3, 1), 7))
    assert net.donor.wanted(6) == []
    assert net.donor.wanted(7) == [1, 3]
    net.round(9)
    net.donor.add([state(1, 9)])
    assert net.donor.wanted(9) == [3]
    net.donor.add([state(3, 9)])
    assert net.donor.wanted(9) == [] and net.given == []


def test_only_followers_are_answered() -> None:
    net = Net()
    for process in (OTHER, JOINER):  # one trains, one is no member
        net.donor.ask(process, Ask((0,), 0))
    assert net.donor.wanted(100) == []
    net.donor.add([state(0, 0)])
    assert net.given == []


def test_an_older_life_of_a_follower_is_not_answered() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(Process(JOINER.seat, 99), Ask((0,), 0))
    net.donor.ask(JOINER, Ask((1,), 0))
    net.donor.add([state(0, 3), state(1, 3)])
    assert (2, 1, 3) in net.given
    assert (2, 0, 3) not in net.given


def test_an_older_copy_is_not_for_a_later_joiner() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(JOINER, Ask((0,), 0))
    net.round(5)
    net.donor.add([state(0, 4)])  # it can be given: no round up to 4 is open
    assert net.given == [(2, 0, 4)]
    net.donor.ask(JOINER, Ask((1,), 0))
    net.donor.add([state(1, 5)])
    net.admit(LATE)
    net.donor.ask(LATE, Ask((1,), 6))
    for process in (ME, OTHER):
        net.apply(process, 5)
    net.heard()
    assert net.given[1:] == [(2, 1, 5)]
    assert net.donor.wanted(6) == [1]
    net.donor.add([state(1, 6)])
    assert net.given[2:] == [(3, 1, 6)]


def test_two_joiners_share_a_copy() -> None:
    net = Net()
    for joiner in (JOINER, LATE):
        net.admit(joiner)
        net.donor.ask(joiner, Ask((0,), 2))
    assert net.donor.wanted(2) == [0]
    net.donor.add([state(0, 2)])
    assert sorted(net.given) == [(2, 0, 2), (3, 0, 2)]


def test_a_lost_joiner_is_forgotten_with_its_copies() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(JOINER, Ask((0, 1), 0))
    net.round(5)
    net.donor.add([state(0, 5)])
    net.lose(JOINER)
    assert net.donor.wanted(100) == []
    net.admit(LATE)
    net.donor.ask(LATE, Ask((0,), 0))
    assert net.donor.wanted(5) == [0]  # a copy that was made for another is gone
    for process in (ME, OTHER):
        net.apply(process, 5)
    net.heard()
    assert net.given == []
    net.donor.add([state(0, 5)])
    assert net.given == [(3, 0, 5)]


def test_a_copy_that_waits_outlives_another_joiner() -> None:
    net = Net()
    net.admit(JOINER)
    net.donor.ask(JOINER, Ask((0,), 0))
    net.round(5)
    net.donor.add([state(0, 5)])
    net.admit(LATE)
    net.lose(LATE)
    for process in (ME, OTHER):
        net.apply(process, 5)
    net.heard()
    assert net.given == [(2, 0, 5)]


def test_what_one_process_tells_of_views_that_never_come_is_forgotten() -> None:
    net = Net()
    protocol = net.protocols[ME]
    for number in range(2, 1000):
        protocol.receive(OTHER, Told(number, 1, 0, 0, 0, (), {}), 1)
    told = protocol.flush._told
    assert sum(OTHER in known for known in told.values()) == len(told) - 1 == MOST_TOLD

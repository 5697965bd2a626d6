"""Members that are fixed, over real connections: what they take from each other, and whom they blame."""

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.link.base import Contribution, Member, Round, RoundId
from atoll.link.net.actions import Mean, Part, Result, RoundMessage, Whole
from atoll.link.net.event_loop import event_loop
from atoll.link.net.fixed_member import Fault, FixedMember
from atoll.link.net.messages import PartMean, encode_round
from atoll.link.net.open_round import OpenRound
from atoll.link.net.protocol import Protocol
from atoll.link.net.run_keys import throw_away
from atoll.link.net.views import Attempt, Process, Told, View

pytestmark = pytest.mark.processes

REDUCTION = Reduction(Codec("fp32"), 1000)
AT = RoundId(3, 0)


def contribution(worker: int, weight: float = 1.0) -> Contribution:
    return Contribution(Member(worker, weight, 0, 0), torch.zeros(REDUCTION.payload_bytes, dtype=torch.uint8))


class Crew:
    """All members of a run, in this process, and what they complain about."""

    def __init__(self, workers: int, deadline_s: float) -> None:
        self.processes = [Process(worker, 10 + worker) for worker in range(workers)]
        self.faults: list[list[Fault]] = [[] for _ in range(workers)]
        self.staging = ThreadPoolExecutor(1)
        self.members = event_loop().run(self._start(deadline_s))

    async def _start(self, deadline_s: float) -> list[FixedMember]:
        keys, made, addresses = throw_away(len(self.processes)), list[FixedMember](), {}
        for me, identity, faults in zip(self.processes, keys.workers, self.faults, strict=True):
            member = FixedMember(me, len(self.processes), identity, 1.0, 20.0, deadline_s, faults.append)
            addresses[me] = await member.peers.start("127.0.0.1:0")
            made.append(member)
        for me, member in zip(self.processes, made, strict=True):
            others = {peer: address for peer, address in addresses.items() if peer != me}
            event_loop().begin(member.meet(others, 20.0))
        return made

    def open(self, worker: int, at: RoundId = AT) -> OpenRound:
        opened = OpenRound(at, contribution(worker), REDUCTION)
        self.members[worker].start(opened, self.staging)
        return opened

    def exchange(self, at: RoundId = AT) -> list[Round]:
        return [opened.wait() for opened in [self.open(worker, at) for worker in range(len(self.members))]]

    def send(self, sender: int, to: int, message: RoundMessage) -> None:
        async def send() -> None:
            header, body = encode_round(message, 1)
            self.members[sender].peers.send_bulk(self.processes[to], header, body.numpy().data)

        event_loop().run(send())

    def fault(self, worker: int) -> Fault:
        """The first thing that a worker complains about."""
        until = time.monotonic() + 30
        while not self.faults[worker]:
            assert time.monotonic() < until
            time.sleep(0.01)
        return self.faults[worker][0]

    def close(self) -> None:
        for member in self.members:
            event_loop().run(member.close())
        self.staging.shutdown()


@pytest.fixture
def crew(request: pytest.FixtureRequest) -> Iterator[Crew]:
    workers, deadline_s = getattr(request, "param", (3, 60.0))
    crew = Crew(workers, deadline_s)
    crew.exchange(RoundId(1, 0))
    yield crew
    crew.close()


def test_complete_rounds_leave_nothing_behind(crew: Crew) -> None:
    for step in range(2, 12):
        assert all(len(done.members) == 3 for done in crew.exchange(RoundId(step, 0)))
    event_loop().run(asyncio.sleep(0))  # the training thread has a round a moment before it is forgotten
    for member in crew.members:
        assert not member.protocol._rounds and not member.rounds._open and member.position() is None
    assert not any(crew.faults)


MEAN = PartMean((Member(2, 1.0, 0, 0),), (), torch.zeros(4, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.float64))


@pytest.mark.parametrize(
    ("message", "why"),
    [
        (
            Whole(AT, Process(2, 12), contribution(2)),
            "sent a payload of step 3, fragment 0 that only another",
        ),
        (Mean(AT, 1, 2, MEAN), "sent a payload of step 3, fragment 0 that only another"),
        (Result(AT, Attempt(1, (Process(0, 10),)), (MEAN,)), "sent a payload of step 3, fragment 0 that only another"),
        (Whole(AT, Process(1, 11), contribution(1, 9.0)), "sent a weight of 9.0 where 1.0 was agreed at the start"),
        (Part(AT, 1, 0, contribution(1, 9.0)), "sent a weight of 9.0 where 1.0 was agreed at the start"),
    ],
)
def test_a_member_speaks_for_itself_only(message: RoundMessage, why: str, crew: Crew) -> None:
    crew.send(1, 0, message)
    fault = crew.fault(0)
    assert (fault.worker, fault.closed) == (1, False) and fault.why.startswith(why), fault


def test_a_member_that_parts_says_why_and_one_that_closes_does_not(crew: Crew) -> None:
    event_loop().post(lambda: crew.members[1].part("left: tired"))
    event_loop().post(crew.members[2].part)
    assert crew.fault(0) in (Fault(1, "left: tired"), Fault(2, "closed its connection", closed=True))
    until = time.monotonic() + 30
    while len(crew.faults[0]) < 2 and time.monotonic() < until:
        time.sleep(0.01)
    assert {fault.worker for fault in crew.faults[0]} == {1, 2}


@pytest.mark.parametrize("crew", [(3, 0.5), (4, 0.5)], indirect=True)
def test_a_member_that_does_not_come_to_a_round_is_named_after_the_deadline(crew: Crew) -> None:
    for worker in (0, 1):
        crew.open(worker)
    assert crew.members[0].position() == "step 3, fragment 0"
    for worker in (0, 1):
        fault = crew.fault(worker)
        assert fault.worker == 2 and fault.why.startswith(
            "did not send its part within 0.5 s: it was stopped or cut off"
        )


def test_a_round_waits_for_payloads_first_and_then_for_means() -> None:
    members = [Process(worker, 1) for worker in range(4)]
    protocol = Protocol(members[0], None, 4)
    protocol.on_view(View(1, {member.seat: member.life for member in members}))
    for member in members[1:]:
        protocol.receive(member, Told(1, 0, 0, None, 0, (), {}), 0)
    assert protocol.awaited(AT) == []
    opened = OpenRound(AT, contribution(0), REDUCTION)
    opened.settle()
    protocol.open(AT, opened)
    assert protocol.awaited(AT) == members[1:]
    for member in members[1:3]:
        protocol.receive(member, Part(AT, 1, 0, contribution(member.seat)), 1)
    assert protocol.awaited(AT) == [members[3]]
    protocol.receive(members[3], Part(AT, 1, 0, contribution(3)), 1)
    protocol.receive(members[2], Mean(AT, 1, 2, MEAN), 1)
    assert protocol.awaited(AT) == [members[0], members[1], members[3]]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def begin() -> None:
        await work()

    event_loop().run(begin())


def test_members_that_cannot_be_reached_are_named() -> None:
    async def alone() -> None:
        member = FixedMember(Process(1, 5), 2, "none", 1.0, 5.0, 5.0, lambda fault: None)
        await member.peers.start("127.0.0.1:0")
        try:
            with pytest.raises(
                Exception, match=r"worker 1 cannot connect .* worker 0 did not open a connection within"
            ):
                await member.meet({Process(0, 7): "127.0.0.1:1"}, 0.5)
        finally:
            await member.close()

    run(alone)

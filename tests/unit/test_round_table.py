"""The rounds of one worker: what fits them, what waits, and how they are completed. No network."""

import asyncio
from collections.abc import Iterator

import pytest
import torch

from atoll.core.allreduce import PART_BYTES, MeanResidual, Reduction
from atoll.core.codec import Codec
from atoll.core.outliers import Size
from atoll.errors import LinkError
from atoll.link.base import Contribution, Member, Round, RoundId
from atoll.link.net import round_table
from atoll.link.net.actions import Complete, Mean, Part, Reduce, Result, Whole
from atoll.link.net.held_bytes import MESSAGE_COST
from atoll.link.net.messages import PartMean
from atoll.link.net.open_round import BadPayloadError, OpenRound
from atoll.link.net.round_table import RoundTable
from atoll.link.net.views import Attempt, Process

WORKERS = 5
NUMEL = 5 * 4096
SMALL = Reduction(Codec("fp32"), NUMEL)
LARGE = Reduction(Codec("fp32"), 10 * PART_BYTES)
"""So large that a member reduces several parts."""
ME, PEER = Process(0, 10), Process(1, 11)
ALL = tuple(Process(seat, 10 + seat) for seat in range(WORKERS))
FIVE, FOUR = Attempt(1, ALL), Attempt(2, ALL[:4])


class Table:
    """A round table that keeps what was reduced."""

    def __init__(self) -> None:
        self.reduced: list[tuple[Reduce, PartMean | Exception]] = []
        self.table = RoundTable(WORKERS, lambda reduce, mean: self.reduced.append((reduce, mean)))

    def open(
        self, step: int, fragment: int = 0, reduction: Reduction = SMALL, own: Contribution | None = None
    ) -> OpenRound:
        opened = OpenRound(RoundId(step, fragment), own, reduction)
        opened.settle()
        self.table.add(opened)
        return opened

    async def until_reduced(self, count: int) -> None:
        async with asyncio.timeout(10):
            while len(self.reduced) < count:
                await asyncio.sleep(0.002)


@pytest.fixture
def made() -> Iterator[Table]:
    made = Table()
    yield made
    made.table.close()


def payload(numel_bytes: int, worker: int = PEER.seat, value: float = 1.0) -> Contribution:
    member = Member(worker, 1.0, 0, 7, Size(1.0, 1.0))
    return Contribution(member, torch.full((numel_bytes // 4,), value).view(torch.uint8))


def whole(step: int = 1, fragment: int = 0, size: int = SMALL.payload_bytes, worker: int = PEER.seat) -> Whole:
    return Whole(RoundId(step, fragment), PEER, payload(size, worker))


def mean(size: int, there: int = 1) -> PartMean:
    members = tuple(Member(worker, 1.0, 0, 7) for worker in range(there))
    return PartMean(members, (), torch.zeros(size, dtype=torch.uint8), torch.zeros(there, there, dtype=torch.float64))


# ---------------------------------------------------------------------- sizes


def test_a_whole_payload_has_the_size_of_its_fragment(made: Table) -> None:
    made.open(1)
    made.open(1, fragment=1, reduction=LARGE)
    assert made.table.check(PEER, whole(), 1)
    assert made.table.check(PEER, Whole(RoundId(1, 0), PEER, None), 1)
    assert made.table.check(PEER, whole(fragment=1, size=LARGE.payload_bytes), 1)
    for size in (0, SMALL.payload_bytes - 4, SMALL.payload_bytes + 4, LARGE.payload_bytes):
        with pytest.raises(ValueError, match=f"{size} bytes where {SMALL.payload_bytes} were due"):
            made.table.check(PEER, whole(size=size), 1)


def test_a_payload_is_of_its_owner(made: Table) -> None:
    """It may be passed on by another: the owner may be lost."""
    made.open(1)
    assert made.table.check(Process(3, 13), whole(), 1)
    with pytest.raises(ValueError, match="a payload of worker 2 as worker 1's"):
        made.table.check(PEER, whole(worker=2), 1)


@pytest.mark.parametrize("reduction", [SMALL, LARGE])
def test_a_part_has_a_size_that_some_number_of_members_gives_it(made: Table, reduction: Reduction) -> None:
    made.open(1, reduction=reduction)
    allowed: dict[int, set[int]] = {}
    for members in (4, 5):
        count = reduction.part_count(members)
        for part in range(count):
            allowed.setdefault(part, set()).add(reduction.part_bytes(part, count))
    for part, sizes in allowed.items():
        for size in sizes:
            assert made.table.check(PEER, Part(RoundId(1, 0), 1, part, payload(size)), 1)
            assert made.table.check(PEER, Mean(RoundId(1, 0), 1, part, mean(size)), 1)
        for size in (min(sizes) - 4, max(sizes) + 4):
            with pytest.raises(ValueError, match=f"^{size} bytes where {max(sizes)} were due"):
                made.table.check(PEER, Part(RoundId(1, 0), 1, part, payload(size)), 1)
            with pytest.raises(ValueError, match=f"^a mean of {size} bytes where {max(sizes)} were due"):
                made.table.check(PEER, Mean(RoundId(1, 0), 1, part, mean(size)), 1)
    assert made.table.check(PEER, Part(RoundId(1, 0), 1, 0, None), 1)
    assert made.table.check(PEER, Mean(RoundId(1, 0), 1, 0, PartMean((), (), None, torch.zeros(0, 0))), 1)
    for part in (max(allowed) + 1, 1 << 62):
        for message in (Part(RoundId(1, 0), 1, part, None), Mean(RoundId(1, 0), 1, part, mean(4))):
            with pytest.raises(ValueError, match=f"part {part} of a round that has fewer"):
                made.table.check(PEER, message, 1)


def test_a_part_is_of_its_sender(made: Table) -> None:
    made.open(1)
    size = SMALL.part_bytes(0, 5)
    with pytest.raises(ValueError, match="a part of worker 2"):
        made.table.check(PEER, Part(RoundId(1, 0), 1, 0, payload(size, worker=2)), 1)


def test_a_result_has_all_parts_of_its_attempt(made: Table) -> None:
    made.open(1, reduction=LARGE)
    for attempt in (FOUR, FIVE):
        count = LARGE.part_count(len(attempt.members))
        sizes = [LARGE.part_bytes(part, count) for part in range(count)]
        means = tuple(mean(size) for size in sizes)
        assert made.table.check(PEER, Result(RoundId(1, 0), attempt, means), 1)
        for some in (means[:-1], (*means, means[0]), ()):
            with pytest.raises(ValueError, match=f"a result of {len(some)} parts where {count} were due"):
                made.table.check(PEER, Result(RoundId(1, 0), attempt, some), 1)
        with pytest.raises(ValueError, match=f"where {sizes[-1]} were due"):
            made.table.check(PEER, Result(RoundId(1, 0), attempt, (*means[:-1], mean(sizes[-1] + 4))), 1)


# ---------------------------------------------------------------------- before the fragment is opened


def test_what_comes_before_its_fragment_waits_for_it(made: Table) -> None:
    made.open(1, fragment=0)
    early = [(PEER, whole(step, 1, size=size), 3) for step, size in ((4, SMALL.payload_bytes), (5, 8))]
    for sender, message, view in early:
        assert not made.table.check(sender, message, view)
    assert not made.table.check(PEER, whole(6, 2), 3)
    made.open(4, fragment=1)
    assert made.table.take_unchecked(1) == early
    assert made.table.take_unchecked(1) == []
    assert made.table.check(*early[0])
    with pytest.raises(ValueError, match="8 bytes"):
        made.table.check(*early[1])
    assert len(made.table.take_unchecked(2)) == 1


def test_messages_of_a_fragment_that_is_never_opened_go_with_their_rounds(made: Table) -> None:
    late = [(PEER, Whole(RoundId(step, 777), PEER, None), 1) for step in (1, 2, 3)]
    for sender, message, view in late:
        assert not made.table.check(sender, message, view)
    made.table.drop(2)
    assert made.table._unchecked == {777: late[2:]}
    made.table.drop(3)
    assert made.table._unchecked == {}


def test_a_member_may_send_so_much_ahead_whatever_rounds_it_names(made: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(round_table, "MOST_HELD", 20_000)
    assert not any(made.table.receive(PEER, RoundId(step, step % 7), 1000) for step in range(9))
    assert made.table.receive(PEER, RoundId(3, 0), 1000)
    assert not made.table.receive(ALL[2], RoundId(3, 0), 1000)
    made.table.drop(4)  # some of these are applied
    assert not any(made.table.receive(PEER, RoundId(10**9, 0), 0) for _ in range(9))
    assert made.table.receive(PEER, RoundId(10**9, 0), 2000)
    made.open(10, reduction=LARGE)  # whose payload is larger
    monkeypatch.setattr(round_table, "MOST_HELD", LARGE.payload_bytes)
    assert not any(made.table.receive(ALL[3], RoundId(11, 0), LARGE.payload_bytes) for _ in range(10))
    assert any(made.table.receive(ALL[3], RoundId(12, 0), LARGE.payload_bytes) for _ in range(10))


# ---------------------------------------------------------------------- where this worker is


def test_rounds_that_are_applied_are_dropped(made: Table) -> None:
    for step in (2, 4, 6):
        made.open(step)
        made.table.sent_bytes[RoundId(step, 0)] += 10
        made.table.receive(PEER, RoundId(step, 0), 10)
    assert not made.table.drop(1)
    assert made.table.last_applied == -1
    assert made.table.drop(4)
    assert made.table.last_applied == 4
    assert not made.table.drop(5)
    assert set(made.table.sent_bytes) == {RoundId(6, 0)}
    assert [made.table._received.of_round(RoundId(step, 0)) for step in (2, 4, 6)] == [0, 0, 10]
    assert made.table.drop(6)


def test_all_is_complete_when_no_round_is_waited_for(made: Table) -> None:
    assert made.table.all_complete
    rounds = [made.open(step, fragment) for step, fragment in ((8, 0), (7, 1), (7, 0))]
    for opened in rounds:
        assert not made.table.all_complete
        made.table.complete(Complete(opened.round_id, Attempt(1, (ME,)), {ME: None}, None, frozenset()))
    assert made.table.all_complete


def test_a_round_that_is_forgotten_leaves_nothing_behind(made: Table) -> None:
    for step in (2, 4):
        made.open(step)
        made.table.sent_bytes[RoundId(step, 0)] += 10
        made.table._received.add(PEER, RoundId(step, 0), 10)
    made.table.forget(RoundId(4, 0))
    assert set(made.table.sent_bytes) == set(made.table._open) == {RoundId(2, 0)}
    assert [made.table._received.of_round(RoundId(step, 0)) for step in (2, 4)] == [10, 0]
    assert made.table._received.add(PEER, RoundId(2, 0), 0) < 3 * MESSAGE_COST


def test_every_member_known_step_counts(made: Table) -> None:
    made.open(1)
    made.table.check(PEER, whole(step=9), 1)
    assert made.table.newest_step == 9


def test_a_failure_ends_every_wait_and_keeps_what_is_complete(made: Table) -> None:
    first, second = made.open(1, own=payload(SMALL.payload_bytes, 0)), made.open(2)
    made.table.complete(Complete(first.round_id, Attempt(1, (ME,)), {ME: first.whole}, None, frozenset({0})))
    made.table.fail(RuntimeError("it is over"))
    made.table.fail(RuntimeError("again"))
    assert isinstance(first.wait(), Round)
    with pytest.raises(RuntimeError, match="it is over"):
        second.wait()
    assert made.table.all_complete


# ---------------------------------------------------------------------- reduce and complete


def parts_of(opened: OpenRound, part: int, members: int = 4) -> dict[Process, Contribution | None]:
    count = opened.part_count(members)
    size = opened.reduction.part_bytes(part, count)
    return {ALL[worker]: payload(size, worker, 1.0 + worker / 7) for worker in range(members)}


async def reduce_two_rounds(made: Table, feedback: bool) -> None:
    residual = MeanResidual() if feedback else None

    def reduction(step: int) -> Reduction:
        return Reduction(Codec("fp32"), NUMEL, order=(step, 0), residual=residual)

    first, second, other = made.open(1, 0, reduction(1)), made.open(2, 0, reduction(2)), made.open(1, 1, reduction(1))
    for opened in (second, first, other):
        made.table.reduce(Reduce(opened.round_id, 1, 0, parts_of(opened, 0)))
    await made.until_reduced(2 if feedback else 3)
    await asyncio.sleep(0.05)
    done = [reduce.round_id for reduce, _ in made.reduced]
    assert sorted(done) == sorted([(1, 0, False), (1, 1, False)] + ([] if feedback else [(2, 0, False)]))
    means = tuple(mean(SMALL.part_bytes(part, 4), 4) for part in range(4))
    made.table.complete(Complete(other.round_id, FOUR, None, means, frozenset()))
    await asyncio.sleep(0.05)
    assert len(made.reduced) == len(done)  # another fragment's
    made.table.complete(Complete(first.round_id, FOUR, None, means, frozenset()))
    await made.until_reduced(3)
    assert sorted(reduce.round_id for reduce, _ in made.reduced) == [(1, 0, False), (1, 1, False), (2, 0, False)]
    assert all(isinstance(result, PartMean) for _, result in made.reduced)


@pytest.mark.parametrize("feedback", [True, False])
def test_with_feedback_reductions_wait_for_the_fragments_earlier_round(made: Table, feedback: bool) -> None:
    asyncio.run(reduce_two_rounds(made, feedback))


def reduced(made: Table, action: Reduce) -> PartMean | Exception:
    async def work() -> None:
        made.table.reduce(action)
        await made.until_reduced(1)

    asyncio.run(work())
    return made.reduced[0][1]


def test_a_part_is_reduced_between_all_that_have_one(made: Table) -> None:
    opened = made.open(1)
    parts = parts_of(opened, 3)
    parts[ALL[1]] = None
    result = reduced(made, Reduce(opened.round_id, 1, 3, parts))
    assert isinstance(result, PartMean) and result.mean is not None
    assert [member.worker for member in result.members] == [0, 2, 3]
    size = result.mean.numel() // 4
    assert size == SMALL.part_bytes(3, 4) // 4
    torch.testing.assert_close(result.mean.view(torch.float32), torch.full((size,), 1 + 5 / 21))
    values = torch.tensor([1.0, 1 + 2 / 7, 1 + 3 / 7]).double()
    torch.testing.assert_close(result.inner, size * values.outer(values))


def test_a_part_of_nobody_has_no_mean(made: Table) -> None:
    opened = made.open(1)
    result = reduced(made, Reduce(opened.round_id, 1, 0, dict.fromkeys(ALL[:4])))
    assert isinstance(result, PartMean)
    assert result.members == () and result.mean is None


def test_an_outlier_does_not_enter_the_mean(made: Table) -> None:
    opened = made.open(1, reduction=Reduction(Codec("fp32"), NUMEL, outlier_ratio=10.0))
    parts = parts_of(opened, 0)
    exploded = Member(2, 1.0, 0, 7, Size(1e6, 1.0))
    parts[ALL[2]] = Contribution(exploded, torch.full((opened.reduction.part_bytes(0, 4) // 4,), 1e6).view(torch.uint8))
    result = reduced(made, Reduce(opened.round_id, 1, 0, parts))
    assert isinstance(result, PartMean) and result.mean is not None
    assert [member.worker for member in result.members] == [0, 1, 3] and result.outliers == (exploded,)
    assert float(result.mean.view(torch.float32).max()) < 2


def test_a_part_of_another_cut_names_its_sender(made: Table) -> None:
    """Its size fits a round between five, and this one is between four."""
    opened = made.open(1)
    parts = parts_of(opened, 0)
    parts[PEER] = payload(SMALL.part_bytes(0, 5))
    result = reduced(made, Reduce(opened.round_id, 1, 0, parts))
    assert isinstance(result, BadPayloadError) and result.sender == PEER
    assert str(result) == f"sent {SMALL.part_bytes(0, 5)} bytes of part 0 where {SMALL.part_bytes(0, 4)} were due"


def test_a_round_that_was_dropped_is_not_reduced(made: Table) -> None:
    opened = made.open(1)
    made.table.drop(1)
    asyncio.run(asyncio.sleep(0))
    made.table.reduce(Reduce(opened.round_id, 1, 0, parts_of(opened, 0)))
    assert made.reduced == []


def test_one_shot_gives_the_payloads_in_seat_order(made: Table) -> None:
    opened = made.open(1, own=payload(SMALL.payload_bytes, 0, 5.0))
    theirs = payload(SMALL.payload_bytes, 1, 6.0)
    made.table.sent_bytes[opened.round_id] = 30
    made.table.receive(PEER, opened.round_id, 40)
    arrived = {ME: opened.whole, PEER: theirs, ALL[2]: None}
    made.table.complete(Complete(opened.round_id, Attempt(1, ALL[:3]), arrived, None, frozenset({0, 1, 2})))
    completed = opened.wait()
    assert [member.worker for member in completed.members] == [0, 1]
    assert [float(sent.view(torch.float32)[0]) for sent in completed.payloads] == [5.0, 6.0]
    assert completed.complete is False and completed.reduced is None
    assert completed.transfer is not None
    assert (completed.transfer.sent_bytes, completed.transfer.received_bytes) == (30, 40)
    assert completed.transfer.done_s >= completed.transfer.opened_s


@pytest.mark.parametrize(("due", "complete"), [({0, 1, 2, 3}, True), ({0, 1, 2}, False), ({0, 1, 2, 3, 4}, False)])
def test_a_round_is_complete_if_all_that_were_due_have_arrived(made: Table, due: set[int], complete: bool) -> None:
    opened = made.open(1)
    out = (Member(3, 1.0, 0, 7),)
    members = tuple(Member(worker, 1.0, 0, 7) for worker in range(3))
    inner = torch.ones(3, 3, dtype=torch.float64)
    parts = [torch.full((SMALL.part_bytes(p, 4) // 4,), float(p)).view(torch.uint8) for p in range(4)]
    means = tuple(PartMean(members, out, part, inner) for part in parts)
    made.table.complete(Complete(opened.round_id, FOUR, None, means, frozenset(due)))
    completed = opened.wait()
    assert completed.complete is complete
    assert completed.members == members and completed.outliers == out and completed.payloads == ()
    assert completed.reduced is not None and torch.equal(completed.reduced, torch.cat(parts))
    assert completed.inner is not None and torch.equal(completed.inner, 4 * inner)


def test_a_round_of_nobody_is_empty(made: Table) -> None:
    opened = made.open(1)
    nothing = PartMean((), (), None, torch.zeros(0, 0, dtype=torch.float64))
    made.table.complete(Complete(opened.round_id, FOUR, None, (nothing,) * 4, frozenset()))
    completed = opened.wait()
    assert completed.members == () and completed.reduced is None


def test_reducers_must_have_counted_the_same_members(made: Table) -> None:
    opened = made.open(1)
    means = tuple(mean(SMALL.part_bytes(part, 4), 4 - part // 3) for part in range(4))
    made.table.complete(Complete(opened.round_id, FOUR, None, means, frozenset()))
    with pytest.raises(LinkError, match="its reducers counted different members"):
        opened.wait()


@pytest.mark.parametrize(("attempt", "noted"), [(FOUR, True), (Attempt(1, ALL[:3]), False)])
def test_the_cut_of_a_round_is_noted_for_the_residuals(made: Table, attempt: Attempt, noted: bool) -> None:
    residual = MeanResidual()
    opened = made.open(1, reduction=Reduction(Codec("fp32"), NUMEL, order=(1, 0), residual=residual))
    if noted:
        means = tuple(mean(SMALL.part_bytes(p, 4), 4) for p in range(4))
        action = Complete(opened.round_id, attempt, None, means, frozenset())
    else:
        action = Complete(opened.round_id, attempt, dict.fromkeys(attempt.members), None, frozenset())
    made.table.complete(action)
    state = residual.state_dict(None)
    assert state["members"] == ((0, 1, 2, 3) if noted else ())


def test_waiting_calls_what_is_to_be_done_meanwhile(made: Table) -> None:
    opened, calls = made.open(1), 0

    def meanwhile() -> None:
        nonlocal calls
        calls += 1
        if calls == 3:
            made.table.complete(Complete(opened.round_id, Attempt(1, (ME,)), {ME: None}, None, frozenset()))

    assert opened.wait(meanwhile).members == ()
    assert calls == 3

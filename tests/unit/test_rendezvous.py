"""Where workers find each other: addresses, seats, what is told and heard, and a store that may be gone."""

import asyncio
import json
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from shutil import copytree
from typing import Any

import pytest

from atoll.errors import ConfigError, LinkError
from atoll.link.base import describe_differences
from atoll.link.net.identity import Identity
from atoll.link.net.meeting_point import MeetingPoint, SayReply, SayRequest
from atoll.link.net.registry import Insecure
from atoll.link.net.rendezvous import Rendezvous, Waiting, parse_address
from atoll.link.net.root_cause import FailureReport, root_cause
from atoll.link.net.run_keys import KeyRing, RunKeys, throw_away
from atoll.link.seat import Seat
from fleet import free_port


def arrive(address: str, seat: Seat, join_s: float, keys: KeyRing | None = None, **waiting: Any) -> Rendezvous:
    """One process at the meeting point."""
    return Rendezvous(address, seat, keys.workers[seat.worker] if keys else "none", Waiting(join_s, **waiting))


@contextmanager
def meetings(workers: int, join_s: float = 5.0) -> Iterator[list[Rendezvous]]:
    """All workers of a run, in this process."""
    address = f"127.0.0.1:{free_port()}"
    there = [arrive(address, Seat(worker, workers), join_s) for worker in range(workers)]
    yield there
    for rendezvous in reversed(there):
        rendezvous.leave()


@pytest.mark.parametrize(
    ("text", "parsed"),
    [
        ("10.0.0.1:29500", ("10.0.0.1", 29500)),
        ("[::1]:1", ("::1", 1)),
        (" reef.example:65535 ", ("reef.example", 65535)),
    ],
)
def test_addresses(text: str, parsed: tuple[str, int]) -> None:
    assert parse_address(text) == parsed


@pytest.mark.parametrize(
    "text",
    [
        *("", ":", "10.0.0.1", "10.0.0.1:", ":29500", "a:0", "a:65536", "a:x", "a:-1", "a:٣"),
        *("a..b:29500", ".a:29500", f"{'a' * 64}.example:29500", "\ud800:29500", "a\0b:29500", "a:" + "1" * 5000),
    ],
)
def test_addresses_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="address must be HOST:PORT of worker 0") as refused:
        parse_address(text)
    assert len(str(refused.value)) < 200


def test_seats() -> None:
    seat = Seat(1, 3, 0, 2)
    assert str(seat) == "worker 1 rank 0" and str(Seat(1, 3)) == "worker 1"
    assert [str(peer) for peer in seat.peers()] == ["worker 0 rank 0", "worker 1 rank 0", "worker 2 rank 0"]
    assert len(list(seat.all())) == 6
    assert [s.hosts for s in seat.all()] == [True, False, False, False, False, False]


def test_what_is_told_is_heard_by_all() -> None:
    with meetings(3) as there:
        for rendezvous in there:
            rendezvous.publish("greeting", {"from": rendezvous.seat.worker, "all": [1, 2.5, None, "ü"]})
        for rendezvous in there:
            heard = dict(rendezvous.collect("greeting", rendezvous.seat.all()))
            assert {seat.worker: said["from"] for seat, said in heard.items()} == {0: 0, 1: 1, 2: 2}
            assert heard[rendezvous.seat]["all"] == [1, 2.5, None, "ü"]


def test_who_is_missing_is_named_after_a_while() -> None:
    with meetings(3, join_s=0.3) as there:
        there[0].publish("greeting", 1)
        with pytest.raises(LinkError, match=r"worker 1, worker 2 came, but did not get this far within 0\.3 s"):
            list(there[0].collect("greeting", there[0].seat.all()))
        assert there[0].poll("greeting", [Seat(1, 3)]) == {}
        assert there[0].poll("greeting", there[0].seat.all(), 0.1) == {Seat(0, 3): 1}


def test_waiting_is_told_and_who_never_came_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.link.net.rendezvous._SOON_S", 0.05)
    address, said = f"127.0.0.1:{free_port()}", list[str]()
    host = arrive(address, Seat(0, 3), 0.3, on_wait=said.append)
    with pytest.raises(LinkError, match=r"worker 1, worker 2 did not come .* \(--worker 1, --worker 2\).* firewall"):
        list(host.collect("greeting", host.seat.all()))
    assert said == [f"waiting for worker 1, worker 2 at {address}, at most 0.3 s"]
    said.clear()
    nowhere = f"127.0.0.1:{free_port()}"
    with pytest.raises(LinkError, match="Connection refused"):
        arrive(nowhere, Seat(1, 2), 0.3, on_wait=said.append)
    assert said == [f"waiting for worker 0 at {nowhere}, at most 0.3 s"]


def test_waiting_ends_when_this_process_is_told_to_stop() -> None:
    address, asked = f"127.0.0.1:{free_port()}", list[bool]()

    def stop() -> None:
        asked.append(True)
        if len(asked) > 3:
            raise KeyboardInterrupt

    host = arrive(address, Seat(0, 2), 60, check_interrupts=stop)
    with pytest.raises(KeyboardInterrupt):
        list(host.collect("greeting", host.seat.all()))
    asked.clear()
    with pytest.raises(KeyboardInterrupt):
        arrive(f"127.0.0.1:{free_port()}", Seat(1, 2), 60, check_interrupts=stop)


@pytest.mark.parametrize("worker", [1, 2])
def test_another_number_of_workers_is_refused_at_once_on_both_sides(worker: int) -> None:
    with meetings(1, join_s=60.0) as there:
        host = arrive(f"127.0.0.1:{free_port()}", Seat(0, 2), 60.0)
        told = rf"worker {worker} and worker 0 differ in sync.workers: 3 against 2"
        with pytest.raises(LinkError, match=told):
            arrive(host.address, Seat(worker, 3), 60.0)
        with pytest.raises(LinkError, match=told):
            list(host.collect("greeting", host.seat.all()))
        with pytest.raises(LinkError, match=r"worker 1 and worker 0 differ in sync\.workers: 2 against 1"):
            arrive(there[0].address, Seat(1, 2), 60.0)


def test_a_run_that_is_complete_is_not_disturbed_by_one_of_another_size() -> None:
    with meetings(2) as there:
        for one in there:
            one.publish("greeting", 1)
        list(there[0].collect("greeting", there[0].seat.all()))
        with pytest.raises(LinkError, match=r"differ in sync\.workers"):
            arrive(there[0].address, Seat(2, 3), 5.0)
        there[0].publish("bye", 1)
        threading.Timer(0.2, there[1].publish, ("bye", 1)).start()
        assert len(list(there[0].collect("bye", there[0].seat.all()))) == 2


@pytest.mark.parametrize(
    ("address", "advice"),
    [
        ("192.0.2.1:29500", "Cannot assign requested address; it is not an address of this machine"),
        ("no-such-host.invalid:29500", "; check the name, or give the IP address of this machine"),
    ],
)
def test_what_is_advised_about_an_address_fits_what_is_wrong_with_it(address: str, advice: str) -> None:
    with pytest.raises(LinkError, match=advice) as refused:
        arrive(address, Seat(0, 2), 1.0)
    assert "another port" not in str(refused.value)


def test_all_differences_are_named_up_to_three() -> None:
    mine = {"period": "5", "codec": "int8", "alpha": "0.5", "delay": "1", "model": "a"}
    assert describe_differences(mine, mine) is None
    assert describe_differences(mine, mine | {"period": "6"}) == "period: 5 against 6"
    assert describe_differences(mine, {"model": "a", "delay": "1", "codec": "int8", "alpha": "1"}) == (
        "period: 5 against left out; alpha: 0.5 against 1"
    )
    assert describe_differences(mine, {"model": "a"}) == (
        "period: 5 against left out; codec: int8 against left out; alpha: 0.5 against left out; and 1 more"
    )


def test_who_has_left_is_not_waited_for() -> None:
    with meetings(2, join_s=60.0) as there:
        there[1].try_publish(
            "failure", FailureReport(1, "left: no text to train on", "before the first round")._asdict()
        )
        with pytest.raises(LinkError, match="worker 1 left: no text to train on"):
            list(there[0].collect("greeting", there[0].seat.peers()))


def test_what_was_published_before_its_worker_left_is_heard() -> None:
    def publish_and_leave() -> None:  # after the first look for the value
        there[1].publish("greeting", "good-bye")
        raise LinkError("worker 1 left")

    with meetings(2, join_s=60.0) as there:
        assert dict(there[0].collect("greeting", [Seat(1, 2)], publish_and_leave)) == {Seat(1, 2): "good-bye"}


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nonsense"])
def test_what_is_no_json_is_refused_with_its_name(text: str) -> None:
    with meetings(2) as there:
        there[1]._client._ask("Say", SayRequest(name="greeting/1.0", text=text), SayReply, 5.0)
        with pytest.raises(LinkError, match="worker 1 published something under 'greeting' that is no JSON"):
            list(there[0].collect("greeting", [Seat(1, 2)]))
        assert there[0].poll("greeting", [Seat(1, 2)]) == {}


def test_a_seat_is_taken_once() -> None:
    with meetings(2) as there, pytest.raises(LinkError, match=r"worker 1 is at .* already: another run uses"):
        arrive(there[0].address, Seat(1, 2), 30.0)


def test_a_process_whose_answer_was_lost_may_ask_for_its_seat_again() -> None:
    with meetings(2) as there:
        assert there[1]._client.take(there[1].seat, there[1]._life, 5.0).state == "ours"
        assert there[1]._client.take(there[1].seat, there[1]._life + 1, 5.0).state == "taken"


def test_who_comes_again_before_it_is_known_to_have_left_is_not_taken_for_another() -> None:
    address = f"127.0.0.1:{free_port()}"
    first = [arrive(address, Seat(worker, 2), 5.0) for worker in range(2)]
    arrived = threading.Event()

    def come() -> None:
        arrive(address, Seat(1, 2), 20.0)
        arrived.set()

    threading.Thread(target=come, daemon=True).start()
    assert not arrived.wait(0.5)
    first[1].leave()
    first[0].leave()
    first.clear()
    host = arrive(address, Seat(0, 2), 5.0)
    assert arrived.wait(10)
    host.leave()


def test_a_port_is_taken_once() -> None:
    with (
        meetings(1) as there,
        pytest.raises(LinkError, match=r"worker 0 cannot listen at .* another port"),
    ):
        arrive(there[0].address, Seat(0, 1), 5.0)


def test_the_next_run_waits_until_the_one_before_has_left_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    first = [arrive(address, Seat(worker, 2), 5.0) for worker in range(2)]
    first[1].leave()
    arrived = threading.Event()

    def come() -> None:
        arrive(address, Seat(1, 2), 20.0).publish("again", True)
        arrived.set()

    threading.Thread(target=come, daemon=True).start()
    assert not arrived.wait(0.5)  # the host of the first is still there
    first[0].leave()
    first.clear()
    host = arrive(address, Seat(0, 2), 5.0)
    assert dict(host.collect("again", [Seat(1, 2)]))
    assert arrived.wait(10)


def test_a_host_that_is_gone_is_an_error_that_says_so_or_no_answer_but_never_a_hang() -> None:
    with meetings(2) as there:
        guest = there[1]
        there[0]._close_point()
        assert not guest.try_publish("failure", 1)
        assert guest.poll("failure", [Seat(0, 2)], 60.0) == {}
        with pytest.raises(LinkError, match=r"worker 0 at .* does not answer any more"):
            guest.publish("greeting", 1)


def test_a_question_ends_when_the_connection_is_closed_meanwhile() -> None:
    with meetings(1) as there:
        asking = ThreadPoolExecutor(1).submit(there[0]._client.look, ["never/0.0"], 5.0, 2.0)
        time.sleep(0.3)
        there[0]._client.close()
        with pytest.raises(LinkError, match="does not answer any more"):
            asking.result(20)


@pytest.fixture
def far(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """A meeting point whose answers take a while."""
    delay, say = {"s": 0.0}, MeetingPoint._say

    async def slowly(point: MeetingPoint, caller: int | None, request: SayRequest) -> SayReply:
        await asyncio.sleep(delay["s"])
        return await say(point, caller, request)

    monkeypatch.setattr(MeetingPoint, "_say", slowly)
    yield delay
    delay["s"] = 0.0


def test_an_answer_that_is_slow_to_come_can_be_waited_for_and_is_no_reason_to_ask_no_more(
    far: dict[str, float],
) -> None:
    with meetings(2) as there:
        guest, seats = there[1], list(there[1].seat.all())
        far["s"] = 0.6
        assert not guest.try_publish("failure", 1, 0.2)
        assert guest.answers
        assert guest.try_publish("stop", 7, 15.0)
        there[0].publish("stop", 8)
        assert guest.poll("stop", seats, 15.0) == {Seat(0, 2): 8, Seat(1, 2): 7}
        far["s"] = 0.0


def test_a_host_that_is_silent_again_and_again_is_not_asked_any_more(
    far: dict[str, float], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.link.net.meeting_client.SILENT_S", 0.5)
    with meetings(2) as there:
        guest, far["s"] = there[1], 5.0
        assert not guest.try_publish("end", 1, 0.3) and guest.answers
        assert not guest.try_publish("end", 1, 0.3) and not guest.answers
        began = time.monotonic()
        assert not guest.try_publish("left", 1, 60.0) and time.monotonic() < began + 20.0
        far["s"] = 0.0


def test_who_tells_of_another_has_not_left_itself() -> None:
    """Its connections close as well, by which the link learns who is at the root."""

    def check() -> None:
        raise LinkError("step 8: worker 2 is gone")

    with meetings(3) as there:
        there[1].try_publish("failure", closed(2)._asdict())
        with pytest.raises(LinkError, match="step 8: worker 2 is gone"):
            list(there[0].collect("greeting", [Seat(1, 3)], check))


# ---------------------------------------------------------------------- who may write what


def test_a_worker_writes_under_its_own_name_only() -> None:
    keys, address = throw_away(2), f"127.0.0.1:{free_port()}"
    there = [arrive(address, Seat(worker, 2), 5.0, keys) for worker in range(2)]
    there[1].publish("greeting", "mine")
    with pytest.raises(LinkError, match="worker 1 may not write as worker 0"):
        there[1]._client.say("greeting/0.0", "yours", 5.0)
    assert there[0].poll("greeting", there[0].seat.all()) == {Seat(1, 2): "mine"}
    with pytest.raises(LinkError, match="worker 1 may not write as worker 0"):  # it takes no seat but its own
        Rendezvous(address, Seat(0, 2, 1, 2), keys.workers[1], Waiting(5.0))
    for one in reversed(there):
        one.leave()


@pytest.mark.parametrize("security", ["of another run", "none"])
def test_strangers_are_refused_and_cost_nothing(security: str) -> None:
    keys, address = throw_away(2), f"127.0.0.1:{free_port()}"
    host = arrive(address, Seat(0, 2), 5.0, keys)
    proof: Identity | Insecure = throw_away(2).workers[1] if security == "of another run" else "none"
    with pytest.raises(LinkError, match=r"another run, or a stranger|does not answer as worker 0 does"):
        Rendezvous(address, Seat(1, 2), proof, Waiting(1.0))
    assert host.poll("seat", host.seat.all()) == {Seat(0, 2): True}
    host.leave()


@pytest.mark.parametrize(("revoked", "why"), [(1, "is revoked"), (0, "another seat, or one that is revoked")])
def test_a_revoked_seat_is_refused(tmp_path: Path, revoked: int, why: str) -> None:
    keys, address = RunKeys.new(tmp_path, 2), f"127.0.0.1:{free_port()}"
    stolen = copytree(keys.folder / f"worker-{revoked}", tmp_path / "stolen")
    keys.revoke(Identity.load(stolen).bearer)
    shown = [Identity.load(stolen if worker == revoked else keys.folder / f"worker-{worker}") for worker in range(2)]
    host = Rendezvous(address, Seat(0, 2), shown[0], Waiting(5.0))
    with pytest.raises(LinkError, match=why):
        Rendezvous(address, Seat(1, 2), shown[1], Waiting(1.0))
    assert host.poll("seat", host.seat.all()) == {Seat(0, 2): True}
    host.leave()


@pytest.mark.parametrize(
    ("name", "text"), [("misfit", "1"), ("a/b", "1"), ("A/0.0", "1"), ("../0.0", "1"), ("x" * 81, "")]
)
def test_names_that_nobody_has_are_refused(name: str, text: str) -> None:
    with meetings(1) as there, pytest.raises((LinkError, ValueError)):
        there[0]._client._ask("Say", SayRequest(name=name, text=text), SayReply, 5.0)


def test_the_board_has_room_for_so_much_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.link.net.meeting_point.TOTAL_CHARACTERS", 100)
    with meetings(1) as there:
        there[0].publish("greeting", "x" * 60)
        there[0].publish("greeting", "y" * 60)  # in place of the other
        with pytest.raises(LinkError, match=r"no room for more/0\.0"):
            there[0].publish("more", "z" * 60)


# ---------------------------------------------------------------------- who is to blame


def closed(worker: int) -> FailureReport:
    return FailureReport(worker, "closed its connection", "step 8, fragment 1", closed=True)


def late(worker: int) -> FailureReport:
    return FailureReport(worker, "did not send its part", "step 8, fragment 1")


@pytest.mark.parametrize(
    ("reports", "root"),
    [
        ({0: closed(2), 1: closed(2)}, 2),  # killed
        ({0: late(2), 1: closed(0)}, 2),  # stopped; worker 1 has only seen worker 0 close
        ({0: closed(1), 1: closed(0)}, 2),  # nobody has seen it, and it tells nothing
        ({0: late(1), 1: late(2), 2: closed(0)}, 2),  # who was late had to wait
        ({0: late(1), 1: closed(0)}, 2),  # the same, and the slow one is stopped
        ({0: late(2), 1: closed(0), 2: closed(0)}, 2),  # too slow, but there
        ({0: closed(2), 1: closed(0), 2: FailureReport(2, "left: tired", "after step 7, fragment 0")}, 2),
        ({0: closed(1), 1: closed(2), 2: FailureReport(2, "failed: OSError", "step 8, fragment 1")}, 2),
        ({0: FailureReport(2, "sent a weight of nan", "step 8, fragment 1"), 1: closed(0), 2: closed(0)}, 2),
    ],
)
def test_all_name_the_same_worker(reports: dict[int, FailureReport], root: int) -> None:
    for me in reports.keys() - {root}:
        error = root_cause(me, reports, 3, reached=True)
        assert error.worker == root and f"worker {root} " in str(error), error
        assert str(error).startswith(("step 8", "after step 7"))
    if root in reports and reports[root].worker != root:
        assert f"of this one, worker {root}" in str(root_cause(root, reports, 3, reached=True))


def test_what_a_worker_says_of_itself_counts_for_more_than_that_it_was_late() -> None:
    reports = {0: late(1), 1: FailureReport(1, "left: it was interrupted", "step 8, fragment 1")}
    assert str(root_cause(0, reports, 2, reached=True)) == "step 8, fragment 1: worker 1 left: it was interrupted"


def test_who_says_that_it_has_left_is_the_root_and_not_one_that_has_said_nothing_yet() -> None:
    reports = {0: closed(2), 1: FailureReport(1, "left: tired", "step 8, fragment 1"), 2: closed(1)}
    assert str(root_cause(0, reports, 4, reached=True)).startswith("step 8, fragment 1: worker 1 left: tired")


def test_without_the_store_worker_0_is_to_blame() -> None:
    assert "worker 0 closed its connection" in str(root_cause(1, {1: closed(0)}, 3, reached=False))
    error = root_cause(1, {1: closed(2)}, 3, reached=False)
    assert error.worker == 0 and "does not answer, and worker 2 closed its connection" in str(error)


@pytest.mark.parametrize(
    "said",
    [
        *(None, 7, "x", [], {}, {"worker": 1}, {"worker": 9, "why": "", "round": "", "closed": True}),
        {"worker": "1", "why": "x", "round": "y", "closed": False},
        {"worker": 1, "why": 3, "round": "y", "closed": False},
        {"worker": -1, "why": "x", "round": "y", "closed": False},
    ],
)
def test_what_is_no_report_is_passed_over(said: object) -> None:
    assert FailureReport.read(said, 3) is None


def test_a_report_survives_json() -> None:
    report = FailureReport(1, "sent a weight of nan", "step 3, fragment 0", closed=False)
    assert FailureReport.read(json.loads(json.dumps(report._asdict())), 3) == report

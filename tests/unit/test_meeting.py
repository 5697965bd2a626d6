"""Where workers find each other: addresses, seats, what is told and heard, and a store that may be gone."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from atoll.errors import ConfigError, LinkError
from atoll.link.blame import Report, verdict
from atoll.link.meeting import Meeting, Seat, in_time, open_store, parse_address
from fleet import free_port


@contextmanager
def meetings(workers: int, join_s: float = 5.0) -> Iterator[list[Meeting]]:
    """All workers of a run, in this process."""
    address = f"127.0.0.1:{free_port()}"
    there = [Meeting(address, Seat(worker, workers), join_s) for worker in range(workers)]
    yield there
    for meeting in reversed(there):
        meeting.leave()


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


@pytest.mark.parametrize("text", ["", ":", "10.0.0.1", "10.0.0.1:", ":29500", "a:0", "a:65536", "a:x", "a:-1", "a:٣"])
def test_addresses_that_cannot_be(text: str) -> None:
    with pytest.raises(ConfigError, match="address must be HOST:PORT of worker 0"):
        parse_address(text)


def test_seats() -> None:
    seat = Seat(1, 3, 0, 2)
    assert str(seat) == "worker 1 rank 0" and str(Seat(1, 3)) == "worker 1"
    assert [str(peer) for peer in seat.peers()] == ["worker 0 rank 0", "worker 1 rank 0", "worker 2 rank 0"]
    assert len(list(seat.all())) == 6
    assert [s.hosts for s in seat.all()] == [True, False, False, False, False, False]


def test_what_is_told_is_heard_by_all() -> None:
    with meetings(3) as there:
        for meeting in there:
            meeting.tell("greeting", {"from": meeting.seat.worker, "all": [1, 2.5, None, "ü"]})
        for meeting in there:
            heard = dict(meeting.hear("greeting", meeting.seat.all()))
            assert {seat.worker: said["from"] for seat, said in heard.items()} == {0: 0, 1: 1, 2: 2}
            assert heard[meeting.seat]["all"] == [1, 2.5, None, "ü"]


def test_who_is_missing_is_named_after_a_while() -> None:
    with meetings(3, join_s=0.3) as there:
        there[0].tell("greeting", 1)
        with pytest.raises(LinkError, match=r"worker 1, worker 2 did not come within 0\.3 s"):
            list(there[0].hear("greeting", there[0].seat.all()))
        assert there[0].heard("greeting", Seat(1, 3)) is None
        assert there[0].heard_by("greeting", there[0].seat.all(), 0.1) == {Seat(0, 3): 1}


def test_who_has_left_is_not_waited_for() -> None:
    with meetings(2, join_s=60.0) as there:
        there[1].tell_at_last("failure", Report(1, "left: no text to train on", "before the first round")._asdict())
        with pytest.raises(LinkError, match="worker 1 left: no text to train on"):
            list(there[0].hear("greeting", there[0].seat.peers()))


@pytest.mark.parametrize("text", ["", "{", "[" * 100_000, "nonsense"])
def test_what_is_no_json_is_refused_with_its_name(text: str) -> None:
    with meetings(2) as there:
        there[1]._store.set("greeting/1.0", text)
        with pytest.raises(LinkError, match="worker 1 left something under 'greeting' that is no JSON"):
            list(there[0].hear("greeting", [Seat(1, 2)]))
        assert there[0].heard("greeting", Seat(1, 2)) is None


def test_a_seat_is_taken_once() -> None:
    with meetings(2) as there, pytest.raises(LinkError, match=r"worker 1 is at .* already: another run uses"):
        Meeting(there[0].address, Seat(1, 2), 5.0)


def test_a_port_is_taken_once() -> None:
    with (
        meetings(1) as there,
        pytest.raises(LinkError, match=r"worker 0 cannot listen at .* another port"),
    ):
        Meeting(there[0].address, Seat(0, 1), 5.0)


def test_the_next_run_waits_until_the_one_before_has_left_the_address() -> None:
    address = f"127.0.0.1:{free_port()}"
    first = [Meeting(address, Seat(worker, 2), 5.0) for worker in range(2)]
    first[1].leave()
    arrived = threading.Event()

    def come() -> None:
        Meeting(address, Seat(1, 2), 20.0).tell("again", True)
        arrived.set()

    threading.Thread(target=come, daemon=True).start()
    assert not arrived.wait(0.5)  # the host of the first is still there
    first[0].leave()
    first.clear()
    host = Meeting(address, Seat(0, 2), 5.0)
    assert dict(host.hear("again", [Seat(1, 2)]))
    assert arrived.wait(10)


def test_a_store_that_is_gone_is_an_error_that_says_so_or_no_answer_but_never_a_hang() -> None:
    with meetings(2) as there:
        guest = there[1]
        there[0]._store = open_store("127.0.0.1", free_port(), is_master=True)  # the old one closes
        assert not guest.tell_at_last("failure", 1)
        assert guest.heard_by("failure", [Seat(0, 2)], 60.0) == {}
        with pytest.raises(LinkError, match=r"worker 0 at .*, where all meet, does not answer any more"):
            guest.tell("greeting", 1)


def test_a_call_that_does_not_return_is_left_behind() -> None:
    with pytest.raises(TimeoutError):
        in_time(lambda: time.sleep(30), 0.05)
    assert in_time(lambda: 7, 5.0) == 7
    with pytest.raises(ZeroDivisionError):
        in_time(lambda: 1 // 0, 5.0)


# ---------------------------------------------------------------------- who is to blame


def closed(worker: int) -> Report:
    return Report(worker, "closed its connection", "step 8, fragment 1", closed=True)


def late(worker: int) -> Report:
    return Report(worker, "did not send its part", "step 8, fragment 1")


@pytest.mark.parametrize(
    ("reports", "root"),
    [
        ({0: closed(2), 1: closed(2)}, 2),  # killed
        ({0: late(2), 1: closed(0)}, 2),  # stopped; worker 1 has only seen worker 0 close
        ({0: closed(1), 1: closed(0)}, 2),  # nobody has seen it, and it tells nothing
        ({0: late(1), 1: late(2), 2: closed(0)}, 2),  # who was late had to wait
        ({0: late(1), 1: closed(0)}, 2),  # the same, and the slow one is stopped
        ({0: late(2), 1: closed(0), 2: closed(0)}, 2),  # too slow, but there
        ({0: closed(2), 1: closed(0), 2: Report(2, "left: tired", "after step 7, fragment 0")}, 2),
        ({0: closed(1), 1: closed(2), 2: Report(2, "failed: OSError", "step 8, fragment 1")}, 2),
        ({0: Report(2, "sent a weight of nan", "step 8, fragment 1"), 1: closed(0), 2: closed(0)}, 2),
    ],
)
def test_all_name_the_same_worker(reports: dict[int, Report], root: int) -> None:
    for me in reports.keys() - {root}:
        told = verdict(me, reports, 3, reached=True)
        assert f"worker {root}" in told.split(",")[1] or told.split(": ")[1].startswith(f"worker {root}"), told
        assert told.startswith(("step 8", "after step 7"))
    if root in reports and reports[root].worker != root:
        assert f"of this one, worker {root}" in verdict(root, reports, 3, reached=True)


def test_without_the_store_worker_0_is_to_blame() -> None:
    assert "worker 0 closed its connection" in verdict(1, {1: closed(0)}, 3, reached=False)
    told = verdict(1, {1: closed(2)}, 3, reached=False)
    assert "worker 0, where all meet, does not answer, and worker 2 closed its connection" in told


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
    assert Report.read(said, 3) is None


def test_a_report_survives_json() -> None:
    report = Report(1, "sent a weight of nan", "step 3, fragment 0", closed=False)
    assert Report.read(json.loads(json.dumps(report._asdict())), 3) == report

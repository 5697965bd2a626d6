"""Who starts a run, with whom, and who joins one: real links and a registry on loopback."""

import threading
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest

from atoll.errors import LinkError
from atoll.link.base import STEPS_MADE, Admission
from atoll.link.net import entrance
from atoll.link.net.elastic_link import ElasticLink
from atoll.link.net.event_loop import event_loop
from elastic_links import ElasticRun, elastic_run

pytestmark = pytest.mark.processes  # waits for connections more than it computes

TERMS = {"period": "5"}
NEW = {STEPS_MADE: "0", "parameters": "abc"}


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ElasticRun]:
    with elastic_run(getattr(request, "param", 3), tmp_path) as made:
        yield made


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(entrance, "_AFTER_S", 1.0)
    monkeypatch.setattr(entrance, "_SOON_S", 0.3)


Joining = Future[Admission | None]


def joining(link: ElasticLink, start: Mapping[str, str] = NEW, weight: float = 1.0) -> Joining:
    """Join in a thread."""
    joined: Joining = Future()

    def work() -> None:
        try:
            joined.set_result(link.join(TERMS, weight, start))
        except BaseException as fault:
            joined.set_exception(fault)

    threading.Thread(target=work, daemon=True).start()
    return joined


def members(link: ElasticLink) -> dict[int, bool]:
    """Seat -> whether it follows, by the view that a link has adopted."""
    member = link._member
    assert member is not None and not member.protocol.is_flushing
    view = member.protocol.view
    return {process.seat: process.seat in view.following for process in view.members}


def agreed(links: list[ElasticLink], expected: dict[int, bool]) -> None:
    """Wait until all links have adopted the same members."""
    until = time.monotonic() + 20
    while True:
        found: list[Any] = []
        for link in links:
            member = link._member
            found.append(None if member is None or member.protocol.is_flushing else members(link))
        if found == [expected] * len(links):
            return
        assert time.monotonic() < until, found
        time.sleep(0.02)


def close(*links: ElasticLink) -> None:
    for link in links:
        link.close("the test has ended")


def gone(*links: ElasticLink) -> None:
    """End links as killed processes do, without a word."""
    for link in links:
        assert link._member is not None
        event_loop().run(link._member.peers.close(""))
        event_loop().run(link._member.membership.close())


def test_all_that_are_present_start_in_the_first_view(run: ElasticRun) -> None:
    links = run.links()
    waiting = [joining(link, weight=1.0 + link.worker) for link in links[:2]]
    time.sleep(0.5)
    assert not any(one.done() for one in waiting)  # the third has not come
    waiting.append(joining(links[2], weight=3.0))
    assert [one.result(20) for one in waiting] == [None] * 3
    agreed(links, {0: False, 1: False, 2: False})
    for link in links:
        assert link._member is not None and link._member.protocol.view.number == 1
        assert link.weights(1) == link.weights(100) == {0: 1.0, 1: 2.0, 2: 3.0}
    close(*links)


def test_enough_workers_start_late(run: ElasticRun) -> None:
    links = [run.link(worker, min_workers=2, join_s=0.5) for worker in range(2)]
    waiting = [joining(link) for link in links]
    assert [one.result(20) for one in waiting] == [None, None]
    agreed(links, {0: False, 1: False})
    close(*links)


def test_too_few_workers_do_not_start_and_say_who_is_missing(run: ElasticRun) -> None:
    link = run.link(1, min_workers=2, join_s=1.0)
    said: list[str] = []
    link.hooks.on_wait = said.append
    with pytest.raises(LinkError, match=r"^workers 0, 2 did not come within 1 s$") as caught:
        joining(link).result(20)
    assert caught.value.worker == 1
    assert said == ["workers 0, 2 did not come; waiting at most 1 s"]
    with pytest.raises(LinkError, match="did not come"):  # it can be tried again
        joining(link).result(20)


def test_who_finds_others_at_work_follows(run: ElasticRun) -> None:
    first = [run.link(worker, join_s=0.5) for worker in (0, 2)]
    for one in [joining(link) for link in first]:
        assert one.result(20) is None
    late = run.link(1)
    before = {STEPS_MADE: "7", "parameters": "other"}  # what it starts from does not count
    assert joining(late, before, weight=2.0).result(20) is not None
    agreed([*first, late], {0: False, 1: True, 2: False})
    assert late.weights(5) == {0: 1.0, 2: 1.0}
    close(*first, late)


def test_a_seat_is_taken_again_by_another_process(run: ElasticRun) -> None:
    links = run.links(join_s=0.5)
    for one in [joining(link) for link in links]:
        assert one.result(20) is None
    gone(links[1])
    agreed([links[0], links[2]], {0: False, 2: False})
    again = run.link(1)
    assert joining(again).result(20) is not None
    agreed([links[0], again, links[2]], {0: False, 1: True, 2: False})
    for link in (links[0], links[2]):  # nothing is left of the older process
        assert link._member is not None and again._member is not None
        assert [known for known in link._member.greetings if known.seat == 1] == [again._member.protocol.me]
    close(links[0], again, links[2])


def test_nobody_joins_a_run_that_is_over(run: ElasticRun) -> None:
    links = [run.link(worker, join_s=0.5) for worker in range(2)]
    for one in [joining(link) for link in links]:
        assert one.result(20) is None
    closing = [threading.Thread(target=link.close) for link in links]
    for thread in closing:
        thread.start()
    for thread in closing:
        thread.join(20)
    with pytest.raises(LinkError, match="worker 2 comes too late: the others have finished the run; copy the model"):
        joining(run.link(2)).result(20)


def test_a_run_that_was_left_with_a_reason_is_not_over(run: ElasticRun) -> None:
    links = [run.link(worker, join_s=0.5) for worker in range(2)]
    for one in [joining(link) for link in links]:
        assert one.result(20) is None
    close(*links)
    alone = run.link(2, join_s=0.5)
    assert joining(alone).result(20) is None
    agreed([alone], {2: False})
    assert alone._member is not None and alone._member.protocol.view.number > 1
    close(alone)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_workers_that_begin_from_nothing_must_begin_alike(run: ElasticRun) -> None:
    links = run.links()
    waiting = [joining(links[0]), joining(links[1], {**NEW, "parameters": "xyz"})]
    with pytest.raises(LinkError, match="worker 0 and worker 1 differ in parameters: abc against xyz"):
        waiting[0].result(20)
    with pytest.raises(LinkError, match=r"worker 1 and worker 0 differ in parameters: xyz against abc|worker 0"):
        waiting[1].result(20)
    close(*links)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_other_terms_are_named_at_the_start(run: ElasticRun) -> None:
    links = run.links()
    links[1].hooks.terms = {"period": "6"}
    waiting = [joining(link) for link in links]
    for one in waiting:
        with pytest.raises(LinkError, match=r"differ in period: [56] against [56]"):
            one.result(20)
    close(*links)


def resumed(step: int) -> dict[str, str]:
    return {STEPS_MADE: str(step), "parameters": f"of step {step}"}


@pytest.mark.parametrize(
    ("saved", "start"),
    [((100, 100, 200), {0, 1}), ((100, 200, 200), {1, 2}), ((100, 300, 200), {1}), ((100, 100, 100), {0, 1, 2})],
)
def test_after_a_crash_most_or_the_furthest_start_and_the_rest_joins(
    run: ElasticRun, saved: tuple[int, ...], start: set[int]
) -> None:
    links = run.links()
    waiting = [joining(link, resumed(step)) for link, step in zip(links, saved, strict=True)]
    admissions = [one.result(20) for one in waiting]
    assert {worker for worker, admission in enumerate(admissions) if admission is None} == start
    agreed(links, {worker: worker not in start for worker in range(3)})
    close(*links)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_fresh_worker_joins_those_that_resume(run: ElasticRun) -> None:
    links = run.links()
    waiting = [joining(links[0]), joining(links[1], resumed(100))]
    admissions = [one.result(20) for one in waiting]
    assert admissions[0] is not None and admissions[1] is None
    close(*links)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_waiting_for_others_can_be_interrupted(run: ElasticRun) -> None:
    link = run.link(0)
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked > 2:
            raise KeyboardInterrupt

    link.hooks.check_interrupts = check
    with pytest.raises(KeyboardInterrupt):
        joining(link).result(20)
    other = run.link(1, join_s=0.5)
    assert joining(other).result(20) is None  # the first has withdrawn
    agreed([other], {1: False})
    close(other)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_link_joins_once(run: ElasticRun) -> None:
    links = run.links()
    for one in [joining(link) for link in links]:
        one.result(20)
    with pytest.raises(LinkError, match="worker 0 has joined already"):
        links[0].join(TERMS, 1.0, NEW)
    close(*links)


@pytest.mark.parametrize("run", [2], indirect=True)
def test_a_seat_that_is_taken_twice_ends_the_first(run: ElasticRun) -> None:
    links = run.links()
    for one in [joining(link) for link in links]:
        one.result(20)
    again = run.link(1)
    second = joining(again)
    first = links[1]._member
    until = time.monotonic() + 20
    while first is not None and first.error is None and time.monotonic() < until:
        time.sleep(0.02)
    with pytest.raises(LinkError, match=r"worker 1 was started again elsewhere|gone on without worker 1"):
        links[1].check()
    assert second.result(20) is not None
    close(links[0], again)
    close(links[1])

"""One process among others: peers that misbehave, donors that are lost, and where a process can be reached."""

import asyncio
import json
import os
import ssl
import threading
import time
from collections.abc import Callable, Coroutine, Iterator
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import ConfigError, LinkError
from atoll.link.base import STEPS_MADE, Contribution, FragmentState, Member, RoundId
from atoll.link.net import flush, round_table
from atoll.link.net.actions import Progress, Whole
from atoll.link.net.elastic_link import ElasticLink
from atoll.link.net.embedded_client import EmbeddedRegistry
from atoll.link.net.etcd import EtcdRegistry
from atoll.link.net.event_loop import EventLoop, event_loop
from atoll.link.net.membership import Announcement
from atoll.link.net.messages import Ask, encode_control, encode_round
from atoll.link.net.open_registry import open_registry
from atoll.link.net.own_address import addresses_of
from atoll.link.net.views import Process
from elastic_links import ElasticRun, elastic_run

pytestmark = pytest.mark.processes  # waits for connections more than it computes

START = {STEPS_MADE: "0"}
NUMEL = 100


@pytest.fixture
def run(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[ElasticRun]:
    with elastic_run(getattr(request, "param", 3), tmp_path) as made:
        yield made


def in_thread(work: Callable[[], Any]) -> "Future[Any]":
    done: Future[Any] = Future()

    def act() -> None:
        try:
            done.set_result(work())
        except BaseException as fault:
            done.set_exception(fault)

    threading.Thread(target=act, daemon=True).start()
    return done


def started(run: ElasticRun, workers: int = 0, **options: Any) -> list[ElasticLink]:
    """Start the first workers of a run together."""
    count = workers or run.workers
    given = {"join_s": 20.0} if count == run.workers else {"join_s": 0.5, "min_workers": count}
    links = [run.link(worker, **{**given, **options}) for worker in range(count)]
    for joined in [in_thread(partial(link.join, {}, 1.0, START)) for link in links]:
        assert joined.result(20) is None
    return links


def until(condition: Callable[[], bool], seconds: float = 15.0) -> None:
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def inside(link: ElasticLink) -> Any:
    assert link._member is not None
    return link._member


def process(link: ElasticLink) -> Process:
    me: Process = inside(link).protocol.me
    return me


def seats(link: ElasticLink) -> list[int]:
    protocol = inside(link).protocol
    return [] if protocol.is_flushing else [member.seat for member in protocol.view.members]


def close(*links: ElasticLink) -> None:
    for link in links:
        link.close("the test has ended")


def vanish(link: ElasticLink) -> None:
    event_loop().run(inside(link).peers.close(""))
    event_loop().run(inside(link).membership.close())


def contribution(worker: int, numel: int = NUMEL) -> Contribution:
    return Contribution(Member(worker, 1.0, 0, 7), torch.ones(numel).view(torch.uint8))


def reduction(step: int) -> Reduction:
    return Reduction(Codec("fp32"), NUMEL, order=(step, 0, 0))


def say(sender: ElasticLink, to: ElasticLink, header: bytes, body: bytes | None = None) -> None:
    peers, receiver = inside(sender).peers, process(to)

    async def send() -> None:
        if body is None:
            peers.send(receiver, header)
        else:
            peers.send_bulk(receiver, header, body)

    event_loop().run(send())


def bad_whole(numel: int) -> tuple[bytes, bytes]:
    header, body = encode_round(Whole(RoundId(1, 0), Process(1, 1), contribution(1, numel)), 1)
    return header, body.numpy().tobytes()


def test_one_that_cannot_go_on_blames_nobody(run: ElasticRun) -> None:
    links = started(run)
    late = links[0].open(RoundId(1, 0), contribution(0), reduction(1))

    async def fail() -> None:
        inside(links[0]).fail(LinkError("it was interrupted"))

    async def lose() -> None:
        inside(links[0]).lost(process(links[1]), "closed its connection")

    event_loop().run(fail())
    with pytest.raises(LinkError, match="interrupted"):
        late.wait()
    for pending in [link.open(RoundId(1, 0), contribution(link.worker), reduction(1)) for link in links[1:]]:
        assert [member.worker for member in pending.wait().members] == [0, 1, 2]
    time.sleep(0.3)
    assert not inside(links[0]).losses
    event_loop().run(lose())
    time.sleep(0.3)
    assert seats(links[1]) == seats(links[2]) == [0, 1, 2]
    close(*links)


def test_a_process_that_is_gone_is_no_longer_dialled(run: ElasticRun) -> None:
    links = started(run, 2)
    member, gone = inside(links[0]), Process(2, 5)

    async def change(present: bool) -> tuple[Process, ...]:
        member.membership.present.pop(2, None)
        if present:
            member.membership.present[2] = Announcement(life=5, addresses=["127.0.0.1:1"])
        member.on_change()
        wanted: tuple[Process, ...] = member.peers.wanted
        return wanted

    assert event_loop().run(change(present=True)) == (gone,)
    assert event_loop().run(change(present=False)) == ()
    close(*links)


def test_an_error_in_the_background_ends_the_process(run: ElasticRun) -> None:
    links = started(run, 2)

    async def fail() -> None:
        raise KeyError("a view that nobody expects")

    async def spawn() -> None:
        inside(links[0]).membership.spawn(fail())

    event_loop().run(spawn())
    until(lambda: inside(links[0]).error is not None)
    with pytest.raises(LinkError, match="worker 0 failed: KeyError: 'a view"):
        links[0].check()
    close(*links)


@pytest.mark.parametrize("last", [True, False])
def test_a_donor_ends_with_the_last_exchange(run: ElasticRun, last: bool) -> None:
    links = started(run)
    pending = [link.open(RoundId(1, 0, last), contribution(link.worker), reduction(1)) for link in links]
    assert not any(inside(link).donor.is_over for link in links)
    for one in pending:
        one.wait()
    assert {inside(link).donor.is_over for link in links} == {last}
    close(*links)


def test_the_weights_of_a_round_are_told_once_its_members_are_certain(run: ElasticRun) -> None:
    links = started(run)
    view = inside(links[0]).protocol.view

    async def adopt(link: ElasticLink) -> None:
        inside(link)._act(inside(link).protocol.on_view(view.leaving_behind([], 0)))

    event_loop().run(adopt(links[0]))
    assert links[0].weights(1) == {0: 1.0, 1: 1.0, 2: 1.0}  # it has not opened a round of this step
    links[0].open(RoundId(1, 0), contribution(0), reduction(1))
    asking = in_thread(partial(links[0].weights, 1))
    time.sleep(0.2)
    assert not asking.done()
    for link in links[1:]:
        event_loop().run(adopt(link))
    assert asking.result(15) == {0: 1.0, 1: 1.0, 2: 1.0}
    close(*links)


@pytest.mark.parametrize(
    ("header", "body", "why"),
    [
        (b"hello", None, "it sent not a message of atoll"),
        (json.dumps({"kind": "progress", "view": 1, "applied": 1, "more": 1}).encode(), None, "Extra inputs"),
        (b"\xff" * 20, b"abc", "it sent not a message of atoll"),
        (*bad_whole(NUMEL + 1), "it sent 404 bytes where 400 were due"),
    ],
)
def test_the_others_go_on_without_a_member_that_sends_nonsense(
    run: ElasticRun, header: bytes, body: bytes | None, why: str
) -> None:
    links = started(run)
    pending = [link.open(RoundId(1, 0), contribution(link.worker), reduction(1)) for link in links[::2]]
    say(links[1], links[0], header, body)
    until(lambda: seats(links[0]) == seats(links[2]) == [0, 2])
    for one in pending:
        assert [member.worker for member in in_thread(one.wait).result(20).members] == [0, 2]
    until(lambda: inside(links[1]).error is not None)
    with pytest.raises(LinkError, match=rf"worker 0 refuses this worker: .*{why}"):
        links[1].check()
    close(*links)


@pytest.mark.parametrize("how", ["far rounds", "no fragments", "no views"])
def test_the_others_go_on_without_a_member_that_floods_them(
    run: ElasticRun, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(round_table, "MOST_HELD", 20 * len(bad_whole(NUMEL)[1]))
    monkeypatch.setattr(flush, "MOST_EARLY", 10)
    links = started(run)
    pending = [link.open(RoundId(1, 0), contribution(link.worker), reduction(1)) for link in links[::2]]
    me = process(links[1])
    for step in range(2, 40):
        if how == "no views":
            say(links[1], links[0], encode_control(Progress(step), 10**6 + step))
        else:
            fragment = 0 if how == "far rounds" else step
            header, body = encode_round(Whole(RoundId(step, fragment), me, contribution(1)), 1)
            say(links[1], links[0], header, body.numpy().tobytes())
    until(lambda: seats(links[0]) == seats(links[2]) == [0, 2])
    for one in pending:
        assert [member.worker for member in in_thread(one.wait).result(20).members] == [0, 2]
    until(lambda: inside(links[1]).error is not None)
    with pytest.raises(LinkError, match=r"worker 0 refuses this worker: it sent (more than|too many)"):
        links[1].check()
    close(*links)


def test_a_joiner_that_is_sent_more_than_it_can_hold_ends_itself(
    run: ElasticRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    links = started(run, 2)
    joiner = run.link(2)
    admission = in_thread(lambda: joiner.join({}, 1.0, START)).result(20)
    collected = in_thread(lambda: list(admission.states(1)))
    monkeypatch.setattr(round_table, "MOST_HELD", 1000)
    for step in range(1, 10):
        header, body = encode_round(Whole(RoundId(step, 0), process(links[1]), contribution(1)), 1)
        say(links[1], joiner, header, body.numpy().tobytes())
    with pytest.raises(LinkError, match="worker 2 cannot keep up"):
        collected.result(20)
    close(joiner)
    until(lambda: seats(links[0]) == seats(links[1]) == [0, 1])
    close(*links)


def test_a_round_that_is_waited_for_ends_with_the_error(run: ElasticRun) -> None:
    links = started(run)
    pending = links[0].open(RoundId(1, 0), contribution(0), reduction(1))
    waiting = in_thread(pending.wait)
    links[0].interrupt()
    with pytest.raises(LinkError, match="worker 0 was interrupted"):
        waiting.result(20)
    with pytest.raises(LinkError, match="worker 0 was interrupted"):
        in_thread(links[0].open(RoundId(2, 0), contribution(0), reduction(2)).wait).result(20)
    close(*links)


# ---------------------------------------------------------------------- joiners


def state(step: int) -> Callable[[int], FragmentState]:
    return lambda fragment: FragmentState(fragment, step, {"version": step}, {"anchor": torch.full((3,), 1.0 * step)})


def test_another_donor_gives_what_a_lost_one_has_not(run: ElasticRun) -> None:
    links = started(run, 2)
    joiner = run.link(2)
    admission = in_thread(lambda: joiner.join({}, 1.0, START)).result(20)
    collected = in_thread(lambda: list(admission.states(4)))
    until(lambda: inside(links[0]).donor.wanted(0) == [0, 2] and inside(links[1]).donor.wanted(0) == [1, 3])
    vanish(links[0])
    until(lambda: inside(links[1]).donor.wanted(0) == [0, 1, 2, 3])
    links[1].advanced(5, 5, state(5))
    found = collected.result(20)
    assert [(one.fragment, one.applied, one.counts) for one in found] == [(n, 5, {"version": 5}) for n in range(4)]
    assert all(torch.equal(one.vectors["anchor"], torch.full((3,), 5.0)) for one in found)
    close(links[1], joiner)


def test_nobody_is_given_a_fragment_that_there_is_not(run: ElasticRun) -> None:
    links = started(run, 2)
    joiner = run.link(2)
    admission = in_thread(lambda: joiner.join({}, 1.0, START)).result(20)
    collected = in_thread(lambda: list(admission.states(2)))
    say(joiner, links[0], encode_control(Ask((0, 7), 0), 1))
    until(lambda: 7 in inside(links[0]).donor.wanted(0) and 1 in inside(links[1]).donor.wanted(0))

    def two(fragment: int) -> FragmentState:
        return [state(5)(0), state(5)(1)][fragment]

    for link in links:
        link.advanced(5, 5, two)
    assert [one.fragment for one in collected.result(20)] == [0, 1]
    until(lambda: not inside(links[0]).donor.wanted(100))
    close(*links, joiner)


def test_a_joiner_that_is_promoted_owes_payloads_from_the_boundary_on(run: ElasticRun) -> None:
    links = started(run, 2)
    for link in links:
        link.advanced(6, 0, state(0))
    joiner = run.link(2)
    admission = in_thread(lambda: joiner.join({}, 3.0, START)).result(20)
    assert admission.newest_step() == 6  # where it was admitted
    boundary = in_thread(admission.promote).result(20)
    assert boundary == 6
    until(lambda: all(2 in link.weights(7) for link in (*links, joiner)))
    for link in links:
        assert link.weights(6) == {0: 1.0, 1: 1.0}
        assert link.weights(7) == {0: 1.0, 1: 1.0, 2: 3.0}
    assert joiner.weights(7) == {0: 1.0, 1: 1.0, 2: 3.0}
    close(*links, joiner)


def test_a_joiner_learns_that_the_run_has_ended_meanwhile(run: ElasticRun) -> None:
    links = started(run, 2)
    joiner = run.link(2)
    admission = in_thread(lambda: joiner.join({}, 1.0, START)).result(20)
    collected = in_thread(lambda: list(admission.states(1)))
    for closing in [in_thread(link.close) for link in links]:
        closing.result(30)
    with pytest.raises(LinkError, match="worker 2 comes too late"):
        collected.result(20)
    close(joiner)


def test_only_followers_get_states(run: ElasticRun) -> None:
    links = started(run)
    say(links[1], links[0], encode_control(Ask((0,), 0), 1))
    say(links[1], links[2], encode_control(Ask((0,), 0), 1))
    links[2].advanced(1, 1, state(1))
    time.sleep(0.2)
    assert inside(links[0]).donor.wanted(100) == [] and inside(links[2]).donor.wanted(100) == []
    close(*links)


# ---------------------------------------------------------------------- addresses


@pytest.mark.parametrize(
    ("listening", "registry", "expected"),
    [
        ("127.0.0.5:7", "127.0.0.1:99", ["127.0.0.5:7"]),
        ("0.0.0.0:7", "127.0.0.1:99", ["127.0.0.1:7"]),
        ("[::]:7", "127.0.0.1:99", ["127.0.0.1:7"]),
        ("0.0.0.0:7", "etcd://127.0.0.1:99,10.0.0.1:3/run", ["127.0.0.1:7"]),
        ("0.0.0.0:7", "no port", [f"{os.uname().nodename}:7"]),
        ("0.0.0.0:7", "no.such.host.invalid:5", [f"{os.uname().nodename}:7"]),
    ],
)
def test_the_address_by_which_the_registry_is_reached_is_announced(
    listening: str, registry: str, expected: list[str]
) -> None:
    assert addresses_of(listening, registry) == expected


def opened(address: str, security: Any, environment: dict[str, str]) -> Any:
    async def work() -> Any:
        registry = open_registry(address, security, environment)
        await registry.close()
        return registry

    return event_loop().run(work())


def test_an_address_names_its_kind_of_registry(run: ElasticRun) -> None:
    identity = run.keys.workers[0]
    assert isinstance(opened("127.0.0.1:99", identity, {}), EmbeddedRegistry)
    for security, environment in (("none", {}), (identity, {"ATOLL_ETCD_CA": "none"})):
        registry = opened("etcd://127.0.0.1:99/run", security, environment)
        assert isinstance(registry, EtcdRegistry) and registry._gateway._options.security == "none"
    registry = opened("etcd://127.0.0.1:99/run", identity, {"ATOLL_ETCD_USER": "u", "ATOLL_ETCD_PASSWORD": "p"})
    assert isinstance(registry._gateway._options.security, ssl.SSLContext)
    assert (registry._gateway._options.user, registry._gateway._options.password) == ("u", "p")


@pytest.mark.parametrize(
    "environment", [{"ATOLL_ETCD_CA": "/no/file"}, {"ATOLL_ETCD_CERT": "/no/file", "ATOLL_ETCD_KEY": "/no/file"}]
)
def test_a_file_that_cannot_be_read_is_an_error(run: ElasticRun, environment: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="ATOLL_ETCD_CA, ATOLL_ETCD_CERT and ATOLL_ETCD_KEY must be paths of PEM"):
        opened("etcd://127.0.0.1:99/run", run.keys.workers[0], environment)


# ---------------------------------------------------------------------- the event loop


async def returning(value: Any) -> Any:
    await asyncio.sleep(0.01)
    if isinstance(value, BaseException):
        raise value
    return value


@pytest.mark.parametrize("check", [None, lambda: None])
def test_work_returns_or_raises(check: Callable[[], None] | None) -> None:
    loop = EventLoop()
    assert loop.run(returning(5), check) == 5
    for error in (TimeoutError("its own"), KeyError("x")):
        with pytest.raises(type(error), match=str(error.args[0])):
            loop.run(returning(error), check)


def test_an_interrupted_wait_cancels_the_work() -> None:
    loop, ended = EventLoop(), threading.Event()

    async def work() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    calls = iter([None, None, KeyboardInterrupt()])

    def check() -> None:
        if (fault := next(calls)) is not None:
            raise fault

    with pytest.raises(KeyboardInterrupt):
        loop.run(work(), check)
    assert ended.wait(5)


def test_there_is_one_loop_in_a_process() -> None:
    assert event_loop() is event_loop()
    called: Future[str] = Future()
    event_loop().post(lambda: called.set_result(threading.current_thread().name))
    assert called.result(5) == "atoll link"


def test_a_forked_child_has_its_own_loop() -> None:
    event_loop()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            work: Coroutine[Any, Any, Any] = returning(0)
            code = event_loop().run(work)
        finally:
            os._exit(code)
    end = time.monotonic() + 10
    while (waited := os.waitpid(pid, os.WNOHANG))[0] == 0 and time.monotonic() < end:
        time.sleep(0.01)
    if waited[0] == 0:
        os.kill(pid, 9)
        os.waitpid(pid, 0)
    assert waited == (pid, 0)

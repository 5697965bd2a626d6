"""The link between machines, with real processes: the same bits as in one process, and one LinkError for all."""

import gc
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from atoll import DataParallel, DiLoCo, Guard, Lockstep, OuterLoop, Streaming, Sync, connect, local
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Contribution, Link, Member, RoundId
from atoll.link.net import fixed_link, member, messages
from atoll.link.net.actions import Mean, RoundMessage
from atoll.link.net.fixed_link import NetLink
from atoll.link.net.meeting_point import SayReply, SayRequest
from atoll.link.net.peers import Peers, Sending
from atoll.link.net.run_keys import throw_away
from atoll.link.net.views import Process
from atoll.outer.presets import Gradients
from atoll.train.ranks import control
from fleet import Ending, Fleet, Me, Worker
from harness import PRESETS, Problem, Toy, bits, by_part, gradient, inner_step, preset, toy
from sites import Sites, available

pytestmark = pytest.mark.processes

NO_SITES = available()
far_apart = pytest.mark.skipif(NO_SITES is not None, reason=f"no sites here: {NO_SITES}")
SLACK_S = 2.0 + 1.0
"""The issue allows 2 s after the deadline; one more for machines that do other things at the same time."""

# ---------------------------------------------------------------------- the same bits

CODECS = ("fp64", "fp32", "bf16", "fp16", "int8", "int4", "e3m0", "e2m1")
STEPS = 14


def case(name: str, workers: int) -> tuple[Problem, Sync | Gradients]:
    weights = tuple(1.0 + worker for worker in range(workers))
    problem = Problem((300, 1, 1000, 257), workers, weights, STEPS, dtype=torch.float32)
    if name in PRESETS:
        return problem, preset(name, workers)
    if name in CODECS:
        return problem, Streaming(period=6, fragments=by_part(4), delay=2, codec=name)
    if name == "large":  # several chunks a message, several parts a member
        return replace(problem, sizes=(600_000,), steps=2), DiLoCo(period=2)
    if name == "data-parallel":
        return problem, DataParallel(codec="bf16")
    return problem, Streaming(period=6, fragments=by_part(4), delay=5)


CASES = (*PRESETS, *CODECS, "large", "data-parallel", "left out", "resumed")


def make(problem: Problem, sync: Sync | Gradients, link: Link) -> OuterLoop:
    return OuterLoop(
        Toy(problem.start, problem.sizes, problem.dtype),
        sync,
        link,
        weight=problem.all_weights[link.worker],
        guard=Guard(leave_out_nonfinite=True),
    )


def advance(crew: Lockstep, step: int, problem: Problem, sync: Sync | Gradients, name: str) -> None:
    """One step of some workers, which may be one: it trains, and worker 1 may lose its numbers."""
    for loop in crew.loops:
        if isinstance(sync, Gradients):
            model = toy(loop)
            whole = torch.tensor(gradient(loop.link.worker, step, model.vector()))
            for p, part in zip(model.parameters(), whole.split([p.numel() for p in model.parameters()]), strict=True):
                p.grad = part.to(p.dtype)
        else:
            inner_step(loop, problem.inner)
        if name == "left out" and step == 9 and loop.link.worker == 1:
            with torch.no_grad():
                next(loop.model.parameters())[0] = torch.nan
    crew.average_gradients()
    if isinstance(sync, Gradients):
        with torch.no_grad():
            for p in (p for loop in crew.loops for p in loop.model.parameters()):
                assert p.grad is not None
                p.sub_(problem.inner * p.grad)
    crew.step()


def here(name: str, workers: int) -> list[list[bytes]]:
    """What the link inside one process makes of it, before and after finish()."""
    problem, sync = case(name, workers)
    crew = Lockstep([make(problem, sync, link) for link in local(workers)])
    for step in range(1, problem.steps + 1):
        advance(crew, step, problem, sync, name)
    before = [bits(loop) for loop in crew.loops]
    crew.finish()
    return [one + bits(loop) for one, loop in zip(before, crew.loops, strict=True)]


def elsewhere(me: Me, name: str) -> list[bytes]:
    """The same of one worker with a process of its own. All cases use one port, one after another."""
    problem, sync = case(name, me.workers)
    link = me.link()
    loop = make(problem, sync, link)
    for step in range(1, problem.steps + 1):
        if name == "resumed" and step == 12:  # rounds of steps 7 to 11 are in flight
            model, outer = loop.model.state_dict(), loop.state_dict()
            assert any(not flight["applied"] for flight in outer["flights"])
            link.close()
            link = me.link()
            loop = make(problem, sync, link)
            loop.model.load_state_dict(model)
            loop.load_state_dict(outer)
        advance(Lockstep([loop]), step, problem, sync, name)
    before = bits(loop)
    loop.finish()
    link.close()
    assert loop.counters.wire_received > 0
    return before + bits(loop)


def all_cases(me: Me) -> dict[str, list[bytes]]:
    return {name: elsewhere(me, name) for name in CASES}


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_processes_end_with_the_same_bits_as_workers_of_one_process(workers: int, tmp_path: Path) -> None:
    with Fleet(tmp_path, workers).start(all_cases) as fleet:
        expected = {name: here(name, workers) for name in CASES}
        for worker, results in enumerate(fleet.results()):
            for name in CASES:
                assert results[name] == expected[name][worker], f"worker {worker}, {name}"


# ---------------------------------------------------------------------- a worker is lost

REDUCTION = Reduction(Codec("fp32"), 1000)
BIG = Reduction(Codec("fp32"), 10_000_000)  # 16 s on a line of 20 Mbit/s


def part(worker: int, reduction: Reduction = REDUCTION) -> Contribution:
    return Contribution(Member(worker, 1.0, 0, 0), torch.zeros(reduction.payload_bytes, dtype=torch.uint8))


def joined(me: Me, rounds: int = 2) -> NetLink:
    """A link that has carried some rounds."""
    link = me.link()
    link.join({"period": "5"}, 1.0)
    for step in range(rounds):
        assert len(link.open(RoundId(step, 0), part(me.worker), REDUCTION).wait().members) == me.workers
    return link


def until_it_fails(link: NetLink) -> None:
    """Training, as far as a link can see."""
    while True:
        link.check()
        time.sleep(0.02)


def go_on(me: Me, how: str) -> None:
    """Make two rounds, wait for a word, and go on as told, in round 2."""
    link = joined(me)
    me.say("ready")
    me.hear()
    if how == "idle":
        until_it_fails(link)
    pending = link.open(RoundId(2, 0), part(me.worker), REDUCTION)
    if how == "train":
        until_it_fails(link)
    pending.wait()  # may go well, where the others have sent their parts before they gave up
    until_it_fails(link)


def lose(fleet: Fleet, strike: Callable[[], object], *victims: int) -> float:
    """Let all be ready, strike, let the others go on; returns when it struck."""
    for worker in fleet.crew:
        assert worker.said() == "ready"
    at = time.monotonic()
    strike()
    for worker in fleet.others(*victims):
        worker.tell()
    return at


def check_blame(survivors: Sequence[Worker], victim: int, before: float, rounds: Sequence[str]) -> list[str]:
    """All end in time, with a LinkError that names the same worker and the round."""
    for survivor in survivors:
        ending = survivor.ending()
        assert ending.at < before + SLACK_S, (ending.at - before, ending)
        assert any(ending.error.startswith(f"LinkError: {named}: worker {victim}") for named in rounds), ending
    return [survivor.error() for survivor in survivors]


IN_ROUND_2 = ("step 2, fragment 0", "after step 1, fragment 0")
"""As those name it that had opened it, and those that had not."""
EARLY = (*IN_ROUND_2, "step 1, fragment 0")
"""As IN_ROUND_2; what is sent for round 2 may come while a worker still waits for the end of round 1."""
KILLED = "closed its connection without a word: it was killed, or has crashed"


@pytest.mark.parametrize("workers", [2, 3, 4])
@pytest.mark.parametrize("how", ["wait", "train", "idle"])
def test_a_killed_worker_is_named_by_all_others_at_once(workers: int, how: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleets = {
            victim: stack.enter_context(Fleet(tmp_path / str(victim), workers).start(go_on, how))
            for victim in {0, workers - 1}
        }
        for victim, fleet in fleets.items():
            at = lose(fleet, fleet[victim].kill, victim)  # the deadline is 30 s: it is not what they wait for
            errors = check_blame(fleet.others(victim), victim, at, IN_ROUND_2)
            assert all(KILLED in error for error in errors), errors


def test_who_wakes_up_after_the_others_have_left_blames_the_killed_one_too(tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleets = [stack.enter_context(Fleet(tmp_path / how, 4).start(go_on, how)) for how in ("wait", "train", "idle")]
        for fleet in fleets:
            for worker in fleet.crew:
                assert worker.said() == "ready"
            fleet[3].signal(signal.SIGSTOP)
            fleet[0].kill()
            for worker in fleet.others(0):
                worker.tell()
        for fleet in fleets:
            fleet[1].ending(), fleet[2].ending()
            at = time.monotonic()
            fleet[3].signal(signal.SIGCONT)  # it finds three connections closed at once, and no store to ask at
            [error] = check_blame([fleet[3]], 0, at, IN_ROUND_2)
            assert KILLED in error


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_a_stopped_worker_is_named_by_all_others_after_the_deadline(workers: int, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleets = {
            (victim, how): stack.enter_context(
                Fleet(tmp_path / f"{victim} {how}", workers, deadline_s=2.0).start(go_on, how)
            )
            for victim, how in product({0, 1, workers - 1}, ["wait", "train"])
        }
        struck = {
            (victim, how): lose(fleet, partial(fleet[victim].signal, signal.SIGSTOP), victim)
            for (victim, how), fleet in fleets.items()
        }
        for (victim, how), fleet in fleets.items():
            errors = check_blame(fleet.others(victim), victim, struck[victim, how] + 2.0, IN_ROUND_2)
            assert any("within 2 s: it was stopped or cut off, or the link is too slow" in error for error in errors)


def test_a_worker_that_wakes_up_too_late_is_told_so(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2, deadline_s=1.0).start(go_on, "wait") as fleet:
        lose(fleet, lambda: fleet[1].signal(signal.SIGSTOP), 1)
        fleet[0].ending()
        fleet[1].signal(signal.SIGCONT)
        fleet[1].tell()
        assert "worker 0" in fleet[1].error() and "LinkError" in fleet[1].error()


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_two_lost_at_once_are_not_waited_for_either(strike: signal.Signals, tmp_path: Path) -> None:
    with Fleet(tmp_path, 4, deadline_s=2.0).start(go_on, "wait") as fleet:
        at = lose(fleet, lambda: list(map(os.kill, (fleet[0].pid, fleet[2].pid), (strike, strike))), 0, 2)
        for survivor in fleet.others(0, 2):
            ending = survivor.ending()
            assert ending.at < at + 2.0 + SLACK_S
            assert "LinkError" in ending.error and ("worker 0" in ending.error or "worker 2" in ending.error)


class Deadly(Reduction):
    """Reduction whose handling stops the process: when its own parts are cut, or when the parts of all are reduced."""

    strike = signal.SIGKILL
    phase = 1

    def cut(self, payload: torch.Tensor, part: int, count: int) -> torch.Tensor:
        if self.phase == 1:
            self.fall()
        return super().cut(payload, part, count)

    def reduced(self, *arguments: Any, **named: Any) -> torch.Tensor:
        self.fall()
        return super().reduced(*arguments, **named)

    def fall(self) -> None:
        os.kill(os.getpid(), self.strike)
        time.sleep(5.0)  # another thread may be the first to see the signal


def die_inside(me: Me, victim: int, strike: signal.Signals, phase: int) -> None:
    link = joined(me)
    reduction = REDUCTION
    if me.worker == victim:
        Deadly.strike, Deadly.phase = strike, phase
        reduction = Deadly(REDUCTION.codec, REDUCTION.numel)
    link.open(RoundId(2, 0), part(me.worker), reduction).wait()


@pytest.mark.parametrize("strike", [signal.SIGKILL, signal.SIGSTOP])
def test_a_worker_lost_in_either_phase_of_two_shots_is_named(strike: signal.Signals, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleets = {}
        began = time.monotonic()
        for victim, phase in product((0, 3), (1, 2)):
            fleet = Fleet(tmp_path / f"{victim} {phase}", 4, deadline_s=2.0)
            fleets[victim, phase] = stack.enter_context(fleet.start(die_inside, victim, strike, phase))
        for (victim, _), fleet in fleets.items():
            for survivor in fleet.others(victim):
                survivor.ending()
            assert time.monotonic() < began + 30
            check_blame(fleet.others(victim), victim, time.monotonic(), IN_ROUND_2)


def send_some(me: Me, victim: int) -> None:
    """In round 2, the victim's parts reach one other worker only."""
    link = joined(me)
    if me.worker == victim:
        send, sent = Peers.send_bulk, list[Process]()

        def sometimes(peers: Peers, peer: Process, header: bytes, body: memoryview, **options: bool) -> Sending | None:
            sent.append(peer)
            return send(peers, peer, header, body, **options) if peer == sent[0] else None

        pytest.MonkeyPatch().setattr(Peers, "send_bulk", sometimes)
    pending = link.open(RoundId(2, 0), part(me.worker), REDUCTION)
    if me.worker == victim:
        time.sleep(0.5)
        os.kill(os.getpid(), signal.SIGSTOP)
    pending.wait()


def test_one_that_sent_to_some_and_then_stopped_is_named_not_those_who_wait_for_it(tmp_path: Path) -> None:
    """Worker 0 has its part of worker 3, so it waits for the means of workers 1 and 2, which wait for worker 3."""
    with Fleet(tmp_path, 4, deadline_s=2.0) as fleet:
        fleet.start(send_some, 3)
        for survivor in fleet.others(3):
            survivor.ending()
        check_blame(fleet.others(3), 3, time.monotonic(), IN_ROUND_2)


def corrupting(how: str) -> Callable[[RoundMessage, int], tuple[bytes, torch.Tensor]]:
    """What a broken worker sends in round 2."""

    def encode(message: RoundMessage, view: int) -> tuple[bytes, torch.Tensor]:
        header, body = messages.encode_round(message, view)
        if message.round_id.step < 2 or isinstance(message, Mean):
            return header, body
        if how == "noise":
            return os.urandom(len(header)), body
        if how == "payload":
            return header, body[:-4].clone()
        fields = json.loads(header)
        fields["member"][{"weight": "weight", "another weight": "weight", "worker": "worker"}[how]] = (
            -1.0 if how == "weight" else 9
        )
        return json.dumps(fields).encode(), body

    return encode


GARBAGE = {
    "noise": "sent not a message of atoll",
    "payload": "sent ",
    "worker": "sent a pa",
    "weight": "sent not a message of atoll",
    "another weight": "sent a weight of 9.0 where 1.0 was agreed at the start",
}


def send_garbage(me: Me, victim: int, how: str) -> None:
    if me.worker == victim:
        pytest.MonkeyPatch().setattr(member, "encode_round", corrupting(how))
    link = joined(me)
    link.open(RoundId(2, 0), part(me.worker), REDUCTION).wait()
    until_it_fails(link)


@pytest.mark.parametrize("how", GARBAGE)
def test_garbage_is_refused_with_the_sender_the_round_and_what_is_wrong_with_it(how: str, tmp_path: Path) -> None:
    with ExitStack() as stack:
        fleets = {
            (workers, victim): stack.enter_context(
                Fleet(tmp_path / f"{workers} {victim}", workers).start(send_garbage, victim, how)
            )
            for workers, victim in ((2, 0), (4, 3))
        }
        for (_, victim), fleet in fleets.items():
            for survivor in fleet.others(victim):
                error = survivor.error()
                assert any(error.startswith(f"LinkError: {at}: worker {victim} {GARBAGE[how]}") for at in EARLY), error
            told = fleet[victim].error()
            assert "has reported of this one" in told and GARBAGE[how] in told


def leave(me: Me, leaver: int) -> None:
    link = joined(me)
    if me.worker == leaver:
        with pytest.raises(ZeroDivisionError), link:
            raise ZeroDivisionError("the learning rate is gone")
        return
    until_it_fails(link)


@pytest.mark.parametrize("leaver", [0, 1])
def test_a_worker_that_leaves_says_why_and_training_stops_at_the_next_step(leaver: int, tmp_path: Path) -> None:
    with Fleet(tmp_path, 3).start(leave, leaver) as fleet:
        for survivor in fleet.others(leaver):
            expected = f"LinkError: after step 1, fragment 0: worker {leaver} left: the learning rate is gone"
            assert survivor.error() == expected
        fleet[leaver].result()


def vanish(me: Me) -> None:
    link = joined(me)
    if me.worker == 0:
        until_it_fails(link)
    del link
    gc.collect()
    me.hear()


def test_a_link_that_is_dropped_without_close_is_noticed(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2).start(vanish) as fleet:
        assert "worker 1 closed its connection" in fleet[0].error()


# ---------------------------------------------------------------------- lost before the first round, or at the end


def go_no_further(me: Me, how: str) -> None:
    """Join; worker 1 agrees to the terms, and then does not connect to the others."""
    link = me.link()
    if me.worker == 1:

        def instead(*_: object) -> None:
            if how == "stays away":
                me.hear()
            raise ZeroDivisionError("no network card")

        pytest.MonkeyPatch().setattr(link, "_connect", instead)
    with link:
        link.join({}, 1.0)


@pytest.mark.parametrize(
    ("how", "join_s", "told"),
    [
        ("leaves", 30.0, ": worker 1 left: no network card"),  # while they compare terms, or later
        ("stays away", 1.0, "worker 1 came, but did not get this far within 1 s"),
    ],
)
def test_a_worker_that_is_lost_while_connections_are_made_is_named(
    how: str, join_s: float, told: str, tmp_path: Path
) -> None:
    with Fleet(tmp_path, 3, join_s=join_s) as fleet:
        fleet.start(go_no_further, how)
        for survivor in fleet.others(1):
            began = time.monotonic()
            assert told in survivor.error(), survivor.error()
            assert time.monotonic() < began + 10.0


def come_to_the_end(me: Me) -> float:
    """Close when told to; returns how long that took."""
    link = joined(me)
    me.say("ready")
    me.hear()
    began = time.monotonic()
    link.close()
    return time.monotonic() - began


@pytest.mark.parametrize("victim", [0, 1])
def test_who_is_killed_is_not_waited_for_at_the_end(victim: int, tmp_path: Path) -> None:
    with Fleet(tmp_path, 2, deadline_s=60.0).start(come_to_the_end) as fleet:
        lose(fleet, lambda: None, victim)
        time.sleep(0.3)
        fleet[victim].kill()
        assert fleet[1 - victim].result() < 0.3 + 2.0 + SLACK_S  # worker 0 keeps the store for two seconds more


def wait_at(me: Me, place: str) -> None:
    """Come to a place of a run where all meet, except worker 1."""
    link = joined(me)
    me.say("ready")
    me.hear()
    with link:
        if me.worker == 1:
            me.hear()
        link.gather(place, True)


@pytest.mark.parametrize("how", ["kill", "interrupt"])
def test_who_waits_for_others_after_the_first_round_notices_a_loss_and_heeds_ctrl_c(how: str, tmp_path: Path) -> None:
    with Fleet(tmp_path, 3, join_s=600.0).start(wait_at, "finished") as fleet:
        at = lose(fleet, lambda: None)
        time.sleep(0.3)
        if how == "kill":
            fleet[1].kill()
            died = "worker 1 closed its connection without a word: it was killed, or has crashed"
            expected = dict.fromkeys((0, 2), f"LinkError: after step 1, fragment 0: {died}")
        else:
            fleet[0].signal(signal.SIGINT)
            expected = {0: "KeyboardInterrupt: ", 2: "worker 0 left: KeyboardInterrupt"}
        for worker, told in expected.items():
            ending = fleet[worker].ending()
            assert told in ending.error, (worker, ending.error)
            assert ending.at < at + 0.3 + 2.0 + SLACK_S, (worker, ending.at - at)  # two for worker 0 to keep the store


def finish_late(me: Me) -> None:
    """Meet at the end; worker 1 evaluates for longer than workers may take to come at the start."""
    link = joined(me)
    if me.worker == 1:
        time.sleep(me.join_s + 0.7)
    control.ControlPlane(link=link).wait_for_all("finished")
    link.close()


def test_an_evaluation_at_the_end_may_take_longer_than_workers_may_take_to_come(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2, join_s=1.5).start(finish_late) as fleet:
        fleet.results()


def ask_for_others(me: Me) -> tuple[bool, float]:
    """Has everybody finished? Worker 0 has; returns the answer, and how long it took to hear from late others."""
    pytest.MonkeyPatch().setattr(control, "FINISHED_WAIT_S", 3.0)
    link, began = me.link(), time.monotonic()
    done = control.ControlPlane(link=link).all_finished(me.worker == 0)
    if not done:
        if me.worker == 1:
            time.sleep(3.5)
        link.join({}, 1.0)
    link.close()
    return done, time.monotonic() - began


def test_a_finished_worker_asks_for_the_others_briefly_and_then_has_the_patience_of_the_others(tmp_path: Path) -> None:
    with Fleet(tmp_path / "alone", 2) as fleet:
        done, took_s = fleet.add(0, ask_for_others).result()
        assert done and took_s < 3.0 + 2.0 + 10.0
    with Fleet(tmp_path / "both", 2).start(ask_for_others) as fleet:
        for done, took_s in fleet.results():
            assert not done and took_s > 3.5


# ---------------------------------------------------------------------- on a line that can be cut


def big_round(me: Me) -> None:
    link = joined(me)
    me.say("ready")
    me.hear()
    link.open(RoundId(2, 0), part(me.worker, BIG), BIG).wait()


@far_apart
@pytest.mark.parametrize("victim", [0, 2])
@pytest.mark.parametrize("how", ["kill", "stop", "cut"])
def test_a_worker_lost_in_the_middle_of_a_payload_is_named(how: str, victim: int, tmp_path: Path) -> None:
    with Sites(count=3, rate="20mbit") as sites, Fleet(tmp_path, 3, sites, deadline_s=3.0) as fleet:
        fleet.start(big_round)
        at = lose(fleet, lambda: None)
        time.sleep(1.0)
        strikes = {
            "kill": fleet[victim].kill,
            "stop": lambda: fleet[victim].signal(signal.SIGSTOP),
            "cut": sites[victim].cut,
        }
        strikes[how]()
        check_blame(fleet.others(victim), victim, at + 3.0, ("step 2, fragment 0",))


@far_apart
@pytest.mark.parametrize("victim", [0, 1])
def test_a_worker_that_is_cut_off_is_named_by_the_others_and_itself_ends_too(victim: int, tmp_path: Path) -> None:
    with Sites(count=4) as sites, Fleet(tmp_path, 4, sites, deadline_s=2.0) as fleet:
        fleet.start(go_on, "wait")
        at = lose(fleet, sites[victim].cut)
        check_blame(fleet.others(victim), victim, at + 2.0, IN_ROUND_2)
        ending: Ending = fleet[victim].ending()
        assert ending.at < at + 2.0 + SLACK_S and "LinkError: step 2, fragment 0: worker" in ending.error


def finish_and_exit(me: Me) -> int:
    link = me.link()
    link.join({}, 1.0)
    members = link.open(RoundId(1, 0), part(me.worker, SLOW), SLOW).wait().members
    link.close()
    os.kill(os.getpid(), signal.SIGCONT)  # the process is gone with the next line
    return len(members)


SLOW = Reduction(Codec("fp32"), 1_000_000)


@far_apart
def test_a_process_that_ends_after_close_takes_nobodys_last_bytes_along(tmp_path: Path) -> None:
    with Sites(count=2, rate="50mbit") as sites, Fleet(tmp_path, 2, sites) as fleet:
        sites[1].rate("10mbit")  # it gets and gives everything later than the other
        fleet.start(finish_and_exit)
        assert fleet.results() == [2, 2]


# ---------------------------------------------------------------------- who does not belong together


def model_of(sizes: Sequence[int] = (300,)) -> Toy:
    return Toy(Problem(sizes=tuple(sizes)).start, sizes, torch.float32)


def stranger(me: Me, odd: str) -> None:
    """Begin a run that is like that of the others but for one thing, if this is worker 1."""
    sync, model = DiLoCo(period=5), model_of()
    if me.worker == 1:
        match odd:
            case "model":
                model = model_of((301,))
            case "period":
                sync = DiLoCo(period=6)
            case "codec":
                sync = DiLoCo(period=5, codec="int8")
            case "start":
                next(model.parameters()).data[7] += 1e-7
            case "atoll version":
                pytest.MonkeyPatch().setattr(fixed_link, "__version__", "99.0")
            case "wire version":
                pytest.MonkeyPatch().setattr(fixed_link, "WIRE_FORMAT", "99")
    link = me.link()
    loop = OuterLoop(model, sync, link)
    me.say("ready")
    me.hear()
    with link:
        loop.step()


DIFFERENCES = {
    "model": "differ in layout of fragment 0: ",
    "period": "differ in period: ",
    "codec": "differ in codec: ",
    "start": "differ in starting parameters (seed alike ",
    "atoll version": "differ in atoll: ",
    "wire version": "differ in wire format: ",
}


@pytest.mark.parametrize("odd", DIFFERENCES)
def test_a_worker_of_another_run_is_refused_and_all_say_how_it_differs(odd: str, tmp_path: Path) -> None:
    with Fleet(tmp_path, 3).start(stranger, odd) as fleet:
        at = lose(fleet, lambda: None)
        for worker in fleet.crew:
            ending = worker.ending()
            assert ending.at < at + 5.0
            assert "LinkError" in ending.error and "worker 1" in ending.error and DIFFERENCES[odd] in ending.error


def waiting(me: Me) -> None:
    link = me.link()
    me.say("ready")
    link.join({}, 1.0)
    me.say("joined")
    me.hear()
    link.close()


def test_a_worker_that_does_not_come_is_named(tmp_path: Path) -> None:
    with Fleet(tmp_path, 3, join_s=1.0) as fleet:
        fleet.add(0, waiting)
        fleet.add(2, waiting)
        assert ": worker 1 did not come within 1 s: start it" in fleet[0].error()
        # Worker 0 may have gone first, and its store with it.
        assert "worker 1 did not come" in fleet[1].error() or "worker 0" in fleet[1].error()


def test_nobody_there(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2, join_s=1.0) as fleet:
        worker = fleet.add(1, waiting)
        assert f"worker 1 finds no worker 0 at {fleet.address} in 1 s" in worker.error()


def test_a_second_run_at_the_same_address_is_told_so_and_the_first_goes_on(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2).start(waiting) as fleet:
        for worker in fleet.crew:
            assert [worker.said(), worker.said()] == ["ready", "joined"]
        host, guest = fleet.add(0, waiting), fleet.add(1, waiting)
        assert f"worker 0 cannot listen at {fleet.address}: Address already in use" in host.error()
        assert f"worker 1 is at {fleet.address} already: another run uses this address" in guest.error()
        for worker in (fleet[0], fleet[1]):
            worker.tell()
        for worker in (fleet[0], fleet[1]):
            worker.result()


def leave_early(me: Me) -> None:
    link = me.link()
    if me.worker == 1:
        link.close("no text to train on")
    else:
        link.join({}, 1.0)


def test_a_worker_that_leaves_before_it_has_come_is_not_waited_for(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2) as fleet:
        host = fleet.add(0, leave_early)
        time.sleep(0.5)
        fleet.add(1, leave_early).result()
        assert "worker 1 left: no text to train on" in host.error()


def make_steps(me: Me, steps: int) -> None:
    torch.manual_seed(0)
    link = me.link()
    loop = OuterLoop(torch.nn.Linear(3, 3), DiLoCo(period=2), link)
    for _ in range(steps + 3 * me.worker):
        loop.step()
    loop.finish()
    link.close()


def test_who_makes_more_steps_than_the_others_is_told_so(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2, deadline_s=1.0).start(make_steps, 4) as fleet:
        error = fleet[1].error()
        told = "step 6, fragment 0: worker 0 has finished and left, after step 4, fragment 0"
        assert f"LinkError: all workers must make the same number of steps: {told}" in error
        fleet[0].result()


def serve(talk: str) -> Iterator[int]:
    """Something else that listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.settimeout(0.1)
        over = threading.Event()

        def accept() -> None:
            kept = []
            while not over.is_set():
                try:
                    stream, _ = server.accept()
                except TimeoutError:
                    continue
                if talk == "http":
                    stream.sendall(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n" * 10)
                if talk == "closes":
                    stream.close()
                kept.append(stream)
            for stream in kept:
                stream.close()

        thread = threading.Thread(target=accept)
        thread.start()
        yield server.getsockname()[1]
        over.set()
        thread.join()


@pytest.fixture
def something_else(request: pytest.FixtureRequest) -> Iterator[int]:
    yield from serve(request.param)


@pytest.mark.parametrize("something_else", ["http", "silent", "closes"], indirect=True)
def test_what_listens_there_is_something_else(something_else: int, tmp_path: Path) -> None:
    with Fleet(tmp_path, 2, join_s=2.0, keys="none") as fleet:
        began = time.monotonic()
        ending = fleet.add(1, waiting, port=something_else).ending()
        assert f"LinkError: worker 1 finds no worker 0 at 127.0.0.1:{something_else} in 2 s" in ending.error
        assert "(a service listens there, but does not answer as worker 0 does)" in ending.error
        assert ending.at < began + 10


@pytest.mark.parametrize("something_else", ["http"], indirect=True)
def test_what_listens_there_does_not_speak_tls(something_else: int, tmp_path: Path) -> None:
    with Fleet(tmp_path, 2) as fleet:
        assert "does not speak TLS" in fleet.add(1, waiting, port=something_else).error()


def test_a_worker_with_the_keys_of_another_run_is_refused_and_the_run_goes_on(tmp_path: Path) -> None:
    with Fleet(tmp_path / "one", 2) as fleet, Fleet(tmp_path / "other", 2) as other:
        fleet.add(0, waiting)
        assert fleet[0].said() == "ready"
        assert "another run, or a stranger" in other.add(1, waiting, port=fleet.port).error()
        fleet.add(1, waiting)
        assert fleet[0].said() == "joined"
        for worker in fleet.crew:
            worker.tell()
        fleet.results()


def test_a_worker_that_is_stopped_is_lost_after_silence_long_before_the_deadline(tmp_path: Path) -> None:
    with Fleet(tmp_path, 3, silent_s=2.0, deadline_s=200.0).start(go_on, "wait") as fleet:
        at = lose(fleet, lambda: fleet[1].signal(signal.SIGSTOP), 1)
        errors = check_blame(fleet.others(1), 1, at + 2.0 + SLACK_S, IN_ROUND_2)
        assert any("was silent for 2 s: stopped, or cut off" in error for error in errors)


def read_garbage(me: Me, key: str, text: str) -> None:
    link = me.link()
    if me.worker == 1:
        link.rendezvous()._client._ask("Say", SayRequest(name=f"{key}/1.0", text=text), SayReply, 5.0)
        me.hear()
    link.join({"period": "5"}, 1.0)


@pytest.mark.parametrize(
    "text",
    ["", "{", "[1, 2", "7", '"x"', "[]", "[1, 2]", '{"period": 5}', "[" * 5000, '"\\ud800"', "[{}, null]"],
)
def test_garbage_in_the_store_is_a_link_error(text: str, tmp_path: Path) -> None:
    with Fleet(tmp_path, 2).start(read_garbage, "terms", text) as fleet:
        assert fleet[0].error().startswith("LinkError: "), fleet[0].error()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        ({"address": "x"}, "HOST:PORT"),
        ({"address": "127.0.0.1:99999"}, "HOST:PORT"),
        ({"address": 5}, "HOST:PORT of worker 0, like .* got 5"),
        ({"worker": 2}, "worker must be a whole number from 0 to 1"),
        ({"worker": -1}, "worker must be a whole number from 0 to 1"),
        ({"workers": 0}, "workers"),
        ({"worker": None}, "worker and workers are missing"),
        ({"address": None}, "address is missing"),
        ({"deadline_s": 0.0}, "deadline_s must be"),
        ({"deadline_s": "5"}, "deadline_s must be a number of seconds .* got '5'"),
        ({"join_s": None}, "join_s must be"),
        ({"join_s": float("nan")}, "join_s must be"),
        ({"silent_s": -1.0}, "silent_s must be"),
        ({}, "keys is missing: .* `atoll keys new RUN --workers N`; on a private cable, keys=.none."),
        ({"keys": "/nowhere/worker-1"}, "/nowhere/worker-1/run.pem: cannot be read"),
    ],
)
def test_what_cannot_be_is_refused_before_anybody_is_met(options: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        connect(**{"address": "127.0.0.1:29500", "worker": 1, "workers": 2, **options})


def test_a_worker_needs_its_own_keys(tmp_path: Path) -> None:
    throw_away(2).save(tmp_path)
    with pytest.raises(ConfigError, match=r"worker-0 holds the keys of worker 0, and this is worker 1"):
        connect("127.0.0.1:29500", worker=1, workers=2, keys=tmp_path / "worker-0")
    with pytest.raises(TypeError, match="unexpected keyword argument 'patience_s'"):
        connect("127.0.0.1:29500", worker=1, workers=2, keys="none", patience_s=3)  # type: ignore[call-arg]


def test_a_link_of_one_worker_carries_rounds_of_its_own(tmp_path: Path) -> None:
    with Fleet(tmp_path, 1).start(_alone) as fleet:
        assert fleet.results() == [1]


def _alone(me: Me) -> int:
    link = joined(me)
    members = link.open(RoundId(5, 0), part(0), REDUCTION).wait().members
    link.close()
    return len(members)


def misused(me: Me) -> None:
    link = me.link()
    with pytest.raises(LinkError, match="has not joined"):
        link.open(RoundId(1, 0), part(me.worker), REDUCTION)
    link.join({}, 1.0)
    with pytest.raises(LinkError, match="has joined already"):
        link.join({}, 1.0)
    link.close()
    link.close()
    link.close("again")
    for call in (link.check, link.rendezvous, lambda: link.open(RoundId(1, 0), part(me.worker), REDUCTION)):
        with pytest.raises(LinkError, match=f"the link of worker {me.worker} is closed"):
            call()
    me.link().close()  # one that has met nobody


def test_calls_out_of_order_are_refused_and_closing_twice_is_not(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2).start(misused) as fleet:
        fleet.results()


# ---------------------------------------------------------------------- what is left behind


def footprint() -> tuple[int, int]:
    """(threads, open files) of this process."""
    return len(os.listdir("/proc/self/task")), len(os.listdir("/proc/self/fd"))


def many_rounds(me: Me) -> list[tuple[int, int]]:
    link = joined(me)
    seen = []
    for step in range(2, 203):
        link.open(RoundId(step, 0), part(me.worker), REDUCTION).wait()
        if step in (20, 200):
            time.sleep(0.2)
            seen.append(footprint())
    link.close()
    return seen


@pytest.mark.parametrize("workers", [2, 4])
def test_rounds_leave_no_threads_and_no_files_behind(workers: int, tmp_path: Path) -> None:
    with Fleet(tmp_path, workers).start(many_rounds) as fleet:
        for early, late in fleet.results():
            assert late[0] <= early[0] + 1 and late[1] <= early[1] + 1, (early, late)


def many_links(me: Me) -> list[tuple[int, int]]:
    seen = []
    for _ in range(9):
        joined(me).close()
        seen.append(footprint())
    return seen


def test_closed_links_leave_no_threads_and_no_files_behind_and_free_the_port(tmp_path: Path) -> None:
    with Fleet(tmp_path, 3).start(many_links) as fleet:
        for seen in fleet.results():
            (threads, files), late = map(min, zip(*seen[:4], strict=True)), seen[-4:]  # gRPC's threads come and go
            assert min(t for t, _ in late) <= threads + 1 and min(f for _, f in late) <= files + 2, seen


def interrupted(me: Me) -> str:
    link = joined(me)
    if me.worker == 1:
        until_it_fails(link)
    pending = link.open(RoundId(2, 0), part(me.worker), REDUCTION)
    me.say("ready")
    with pytest.raises(KeyboardInterrupt), link:
        pending.wait()
    return "interrupted"


def test_ctrl_c_ends_a_wait_at_once_and_the_others_are_told(tmp_path: Path) -> None:
    with Fleet(tmp_path, 2).start(interrupted) as fleet:
        assert fleet[0].said() == "ready"
        time.sleep(0.3)
        fleet[0].signal(signal.SIGINT)
        assert fleet[0].result() == "interrupted"
        assert fleet[1].error() == "LinkError: step 2, fragment 0: worker 0 left: KeyboardInterrupt"

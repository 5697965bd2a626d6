"""The link inside one process: agreement, faults as data, and errors instead of hangs."""

import re
import subprocess
import sys
import threading
import warnings
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch

from atoll import DataParallel, DiLoCo, Eager, Lockstep, OuterLoop, Streaming, Sync, local
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.errors import ConfigError, LinkError
from atoll.link.base import Contribution, Member, RoundId
from atoll.link.local import Absence, Faults, LocalLink, run_local
from atoll.outer.presets import Gradients
from harness import Problem, Toy, by_part, inner_step, train, train_data_parallel

REDUCTION = Reduction(Codec("fp32"), 1)


def contribution(worker: int, value: float = 0.0) -> Contribution:
    return Contribution(Member(worker, 1.0, 0, 0), REDUCTION.codec.encode(torch.tensor([value])))


def test_members_come_in_worker_order_whoever_sends_first() -> None:
    links = local(3)
    at = RoundId(1, 0)
    pending = {w: links[w].open(at, contribution(w), REDUCTION) for w in (2, 0, 1)}
    for w in range(3):
        assert [m.worker for m in pending[w].wait().members] == [0, 1, 2]


def test_rounds_are_forgotten_once_everybody_has_them() -> None:
    for links in (local(2), local(4)):
        for step in range(50):
            pending = [link.open(RoundId(step, 0), contribution(link.worker), REDUCTION) for link in links]
            for p in pending:
                p.wait()
        # No public door shows this; a leak would hold every payload of a run.
        assert not links[0]._store.rounds


def test_lost_payloads_follow_the_seed() -> None:
    faults = Faults(drop=0.3, seed=11)
    lost = [faults.lost(w, RoundId(s, f)) for w in range(5) for s in range(200) for f in range(3)]
    assert lost == [
        Faults(drop=0.3, seed=11).lost(w, RoundId(s, f)) for w in range(5) for s in range(200) for f in range(3)
    ]
    assert 0.27 < sum(lost) / len(lost) < 0.33
    other = [Faults(drop=0.3, seed=12).lost(w, RoundId(s, f)) for w in range(5) for s in range(200) for f in range(3)]
    assert lost != other


def test_what_is_lost_depends_on_the_seed_the_worker_and_the_round() -> None:
    def lost(seed: int, worker: int, fragment: int = 0) -> list[bool]:
        return [Faults(drop=0.3, seed=seed).lost(worker, RoundId(step, fragment)) for step in range(1, 401)]

    all_of_them = [lost(0, 0), lost(1, 0), lost(0, 1), lost(0, 0, 1)]
    assert all(a != b for n, a in enumerate(all_of_them) for b in all_of_them[:n]) and lost(0, 0) == all_of_them[0]
    assert all(80 < sum(one) < 160 for one in all_of_them)


def test_a_slow_worker_makes_its_share_of_steps() -> None:
    faults = Faults(speeds={1: 0.3})
    assert sum(faults.trains(1, t) for t in range(1, 1001)) == 300
    assert sum(faults.trains(0, t) for t in range(1, 1001)) == 1000


def test_absences() -> None:
    faults = Faults(absences=(Absence(worker=1, first=1, last=4), Absence(worker=2, first=3)))
    assert [faults.present(1, t) for t in (1, 4, 5)] == [False, False, True]
    assert [faults.present(2, t) for t in (2, 3, 1000)] == [True, False, False]
    assert faults.present(0, 3)
    assert not faults.trains(1, 2)


def test_weights_follow_who_is_present() -> None:
    links = local(3, faults=Faults(absences=(Absence(worker=2, first=5),)))
    for link, weight in zip(links, (1.0, 3.0, 4.0), strict=True):
        link.join({}, weight)
    assert links[1].weights(4) == {0: 1.0, 1: 3.0, 2: 4.0}
    assert links[1].weights(5) == {0: 1.0, 1: 3.0}


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: local(0), "workers must be a whole number of at least 1, got 0"),
        (lambda: Faults(drop=1.5), "drop must be a probability between 0 and 1, got 1.5"),
        (lambda: Faults(speeds={1: 0.0}), "speed of worker 1 must be above 0 and at most 1, got 0.0"),
        (
            lambda: Absence(worker=0, first=5, last=4),
            "an absence lasts from first >= 1 to last >= first, whole numbers, got 5 to 4",
        ),
        (lambda: Absence(worker=0, first=0), "an absence lasts"),
        (lambda: Absence(worker=0, first=1.5), "an absence lasts"),  # type: ignore[arg-type]
        (lambda: Faults(absences=Absence(worker=0)), "absences must be a tuple"),  # type: ignore[arg-type]
        (lambda: local(2, faults={"drop": 0.1}), "faults must be a Faults"),  # type: ignore[arg-type]
        (lambda: local(2, timeout_s=-1), "timeout_s must be a number of seconds above 0, got -1"),
        (lambda: local(2, faults=Faults(speeds={2: 0.5})), "faults name worker 2; workers are 0 to 1"),
        (lambda: local(2, faults=Faults(absences=(Absence(worker=-1),))), "faults name worker -1"),
    ],
)
def test_refusals(make, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(ConfigError, match=message):
        make()


def test_workers_with_different_settings_are_told_what_differs() -> None:
    links = local(2)
    problem = Problem(workers=2)
    a = OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=5), links[0])
    b = OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=6), links[1])
    with pytest.raises(LinkError, match="worker 1 and worker 0 differ in period: 6 against 5"):
        Lockstep([a, b]).step()


def test_workers_with_different_models_are_told_so() -> None:
    links = local(2)
    problem = Problem(workers=2)
    a = OuterLoop(Toy(problem.start, (5, 5)), DiLoCo(period=5), links[0])
    b = OuterLoop(Toy(problem.start, (2, 8)), DiLoCo(period=5), links[1])
    with pytest.raises(
        LinkError, match="differ in layout of fragment 0: 2 parameters of float64, 10 values, an"
    ) as met:
        Lockstep([a, b]).step()
    named = "trained parameter 'parts.0.values' (make the same model on all): (2,) float64 against (5,) float64"
    assert str(met.value).endswith(f"; {named}; and 1 more")


def test_workers_with_different_depths_get_one_line_each_of_fragments_and_parameters() -> None:
    loops = [
        OuterLoop(Toy(np.zeros(sum(sizes)), sizes), Streaming(fragments=by_part(len(sizes))), link)
        for link, sizes in zip(local(2), ((3,) * 6, (4,) * 7), strict=True)
    ]
    with pytest.raises(LinkError) as met:
        Lockstep(loops).step()
    message = str(met.value)
    assert message.count("layout of fragment") == message.count("trained parameter ") == 1
    assert len(message) < 700 and re.search(r"and \d+ more$", message)


def test_workers_with_parameters_of_different_dtypes_are_told_so() -> None:
    """From one anchor they would end with different models, also where bf16 can hold the start."""
    links, start = local(2), np.zeros(10)
    loops = [
        OuterLoop(Toy(start, (5, 5), dtype), DiLoCo(period=5), link)
        for dtype, link in zip((torch.float32, torch.bfloat16), links, strict=True)
    ]
    with pytest.raises(LinkError, match=r"2 parameters of bfloat16, .* against 2 parameters of float32"):
        Lockstep(loops).step()


@pytest.mark.parametrize("sync", [DiLoCo(period=2), DataParallel()])
def test_workers_that_start_differently_are_told_so(sync: Sync | Gradients) -> None:
    problem = Problem(workers=2)
    starts, links = (problem.start, problem.start + 1e-9), local(2)
    loops = [OuterLoop(Toy(x, problem.sizes), sync, link) for x, link in zip(starts, links, strict=True)]
    run = train_data_parallel if isinstance(sync, Gradients) else train
    with pytest.raises(LinkError, match=r"worker 1 and worker 0 differ in starting parameters .*: checksum"):
        run(loops, 1, 0.1)


def test_workers_that_stopped_at_different_steps_cannot_resume_together() -> None:
    problem = Problem(workers=2)
    stopped, resumed = problem.loops(DiLoCo(period=5)), problem.loops(DiLoCo(period=5))
    for worker, steps in enumerate((3, 1)):
        train(stopped, steps, 0.1)
        resumed[worker].model.load_state_dict(stopped[worker].model.state_dict())
        resumed[worker].load_state_dict(stopped[worker].state_dict())
    with pytest.raises(LinkError, match=r"worker 1 and worker 0 differ in inner steps made .*: 4 against 3"):
        Lockstep(resumed).step()


def test_joining_before_the_first_step_is_allowed_and_done_once() -> None:
    loops = Problem(workers=2).loops(DiLoCo(period=2))
    for loop in (*loops, *loops):
        loop.join()
    train(loops, 4, 0.1)
    assert loops[0].counters.rounds_applied == 2


def test_an_anchor_that_diverges_is_found_in_the_next_round() -> None:
    loops = Problem(workers=3).loops(Streaming(period=4, fragments=by_part(4)))
    train(loops, 10, 0.1)
    states = [loop.state_dict() for loop in loops]
    states[2]["fragments"][1]["anchor"][0] += 1e-12
    resumed = Problem(workers=3).loops(Streaming(period=4, fragments=by_part(4)))
    for loop, old, state in zip(resumed, loops, states, strict=True):
        loop.model.load_state_dict(old.model.state_dict())
        loop.load_state_dict(state)
    with pytest.raises(
        LinkError, match="fragment 1: workers 0 and 2 have different anchors: they have diverged by round"
    ):
        train(resumed, 8, 0.1)


def test_one_caller_who_forgets_the_crew_is_told_at_once() -> None:
    loops = Problem(workers=2).loops(DiLoCo(period=3))
    for _ in range(2):
        for loop in loops:
            loop.step()
    with pytest.raises(LinkError, match="step 3, fragment 0: worker 0 waits for worker 1, which the same thread steps"):
        loops[0].step()


def test_a_worker_that_fails_takes_the_others_down_with_its_reason() -> None:
    problem = Problem(workers=3)
    seen: list[str] = []

    def work(link: LocalLink) -> None:
        loop = OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=4), link)
        try:
            for step in range(8):
                inner_step(loop, 0.1)
                if link.worker == 1 and step == 5:
                    raise ValueError("out of coffee")
                loop.step()
        except LinkError as error:
            seen.append(str(error))
            raise

    with pytest.raises(ValueError, match="out of coffee"):
        run_local(work, local(3))
    assert len(seen) == 2
    assert all("worker 1 left without sending: ValueError: out of coffee" in message for message in seen)


FEWER = "all workers must make the same number of steps and then call finish"


@pytest.mark.parametrize(
    ("steps", "finishes", "message"),
    [
        (
            (12, 10),
            True,
            r"worker 1 called finish\(\) after step 10, worker 0 sent step 12 last and has not called finish\(\)",
        ),
        ((13, 11), True, r"worker \d called finish\(\) after step 1\d, worker \d "),
        (
            (12, 9),
            True,
            r"worker 1 sent step 9 last and ended, worker 0 sent step 12 last and has not called finish\(\)",
        ),
        ((10, 10), False, r"worker 1 sent step 9 last and ended, worker 0 called finish\(\) after step 10"),
        ((4, 0), False, r"worker 1 sent nothing and ended, worker 0 sent step 3 last and has not called finish\(\)"),
    ],
)
def test_workers_that_make_different_numbers_of_steps_or_do_not_finish_are_told_so_at_once(
    steps: tuple[int, int], finishes: bool, message: str
) -> None:
    """Worker 1 makes fewer steps than worker 0, or does not call finish()."""
    problem = Problem(workers=2)

    def work(link: LocalLink) -> None:
        loop = OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=3), link)
        loop.join()
        for _ in range(steps[link.worker]):
            inner_step(loop, 0.1)
            loop.step()
        if finishes or link.worker == 0:
            loop.finish()

    with pytest.raises(LinkError, match=rf"^{FEWER}\(\): {message}") as met:
        run_local(work, local(2, timeout_s=60))
    assert met.value.round_id is not None


def test_who_waits_in_finish_for_a_worker_that_goes_on_without_it_is_told_so() -> None:
    loops = Problem(workers=2).loops(DiLoCo(period=3), local(2, timeout_s=0.1))
    train(loops, 4, 0.1)
    with ThreadPoolExecutor(1) as pool:
        error = pool.submit(loops[0].finish).exception()
    assert "worker 1 in 0.1 s: worker 1 sent step 3 last and has not called finish(); call finish() on" in str(error)
    loops = Problem(workers=2).loops(DiLoCo(period=3), local(2, timeout_s=0.1))
    train(loops, 4, 0.1)
    with pytest.raises(LinkError, match=r"which the same thread steps: .*Lockstep\(loops\)\.finish\(\)"):
        loops[0].finish()


@pytest.mark.parametrize(("steps", "unsent"), [(3, "4 of 4"), (7, "1 of 4"), (8, None), (0, None)])
def test_a_run_that_ends_before_every_fragment_was_sent_says_so(steps: int, unsent: str | None) -> None:
    loops = Problem(workers=2).loops(Streaming(period=5, fragments=by_part(4)))
    train(loops, steps, 0.1)
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("default")
        Lockstep(loops).finish()
    found = [str(warning.message) for warning in seen]
    assert found == [] if unsent is None else (len(found) == 1 and f"before the first send of {unsent} fra" in found[0])


def test_a_worker_that_never_comes_is_named() -> None:
    links = local(2, timeout_s=0.05)
    with pytest.raises(LinkError, match=r"step 7, fragment 2: nothing from worker 1 in 0.05 s"):
        links[0].open(RoundId(7, 2), contribution(0), REDUCTION).wait()


def test_an_eager_worker_waits_for_late_comers_to_know_its_share() -> None:
    problem = Problem(workers=2)
    links = local(2, timeout_s=10)
    started = threading.Event()

    def work(link: LocalLink) -> Mapping[int, float]:
        if link.worker == 1:
            started.wait()
        loop = OuterLoop(Toy(problem.start, problem.sizes), Eager(period=1), link, weight=1.0 + link.worker)
        started.set()
        for _ in range(3):
            inner_step(loop, 0.1)
            loop.step()
        return link.weights(3)

    assert run_local(work, links) == [{0: 1.0, 1: 2.0}] * 2


def test_a_worker_that_missed_a_round_cannot_go_on_unnoticed() -> None:
    """Its version of the anchor is then another, and that is an error even though fingerprints cannot be compared."""
    loops = Problem(workers=2).loops(DiLoCo(period=2))
    train(loops, 4, 0.1)
    states = [loop.state_dict() for loop in loops]
    states[1]["fragments"][0]["version"] -= 1
    resumed = Problem(workers=2).loops(DiLoCo(period=2))
    for loop, old, state in zip(resumed, loops, states, strict=True):
        loop.model.load_state_dict(old.model.state_dict())
        loop.load_state_dict(state)
    with pytest.raises(LinkError, match="workers 0 and 1 have different anchors: they have diverged by round 1"):
        train(resumed, 2, 0.1)


def test_threads_may_change_between_steps() -> None:
    """Thread ids are reused by the system; a worker is where it last sent from."""
    loops = Problem(workers=2, steps=12).loops(DiLoCo(period=2), local(2, timeout_s=20))
    for _ in range(3):
        errors: list[BaseException] = []

        def work(loop: OuterLoop, errors: list[BaseException] = errors) -> None:
            try:
                for _ in range(4):
                    inner_step(loop, 0.1)
                    loop.step()
            except BaseException as error:
                errors.append(error)

        threads = [threading.Thread(target=work, args=(loop,)) for loop in loops]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not errors


def test_a_closed_link_and_a_second_loop_on_one_link_are_refused() -> None:
    problem = Problem(workers=1)
    (link,) = local(1)
    loop = OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=1), link)
    loop.step()
    with pytest.raises(LinkError, match="worker 0 has joined already"):
        OuterLoop(Toy(problem.start, problem.sizes), DiLoCo(period=1), link).step()
    link.close("the show is over")
    with pytest.raises(LinkError, match="the link of worker 0 is closed: the show is over"):
        loop.step()


@pytest.mark.processes
def test_an_interrupt_stops_all_workers() -> None:
    script = """
import signal, time
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.link.base import RoundId
from atoll.link.local import local, run_local
signal.signal(signal.SIGALRM, signal.default_int_handler)
signal.setitimer(signal.ITIMER_REAL, 1.0)
def work(link):
    for _ in range(2000):
        time.sleep(0.05)
        link.open(RoundId(1, 0), None, Reduction(Codec(), 6))
run_local(work, local(2))
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60, check=False)
    assert "KeyboardInterrupt" in done.stderr  # long before the 100 s of work: that would be past the timeout

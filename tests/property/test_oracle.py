"""The library against plain NumPy, to 1e-12 in fp64, over generated settings; 400 cases and more in all."""

from typing import Any

import numpy as np
from hypothesis import assume, given
from hypothesis import strategies as st

from atoll import DataParallel, Delayed, DiLoCo, Eager, Nesterov, OuterLoop, Streaming
from atoll.core.block_formats import BLOCK
from atoll.core.codec import Codec
from atoll.core.outer_step import Blend
from atoll.link.local import Absence, Faults
from example_counts import examples
from harness import Problem, by_part, snapshot, train, train_data_parallel, train_in_threads
from oracle import codecs, reference

LR = st.sampled_from([0.1, 0.4, 0.7, 1.0])
MOMENTUM = st.sampled_from([0.0, 0.5, 0.9])


@st.composite
def faults(draw: st.DrawFn, workers: int, steps: int) -> Faults:
    absences = []
    for worker in draw(st.sets(st.integers(0, workers - 1), max_size=workers - 1)):
        first = draw(st.integers(1, steps))
        last = draw(st.none() | st.integers(first, steps))
        absences.append(Absence(worker=worker, first=first, last=last))
    return Faults(
        drop=draw(st.sampled_from([0.0, 0.0, 0.3, 0.6, 1.0])),
        seed=draw(st.integers(0, 1000)),
        absences=tuple(absences),
        speeds=draw(st.dictionaries(st.integers(0, workers - 1), st.sampled_from([0.3, 0.5, 1.0]), max_size=2)),
    )


@st.composite
def problems(draw: st.DrawFn, *, faulty: bool = True, fragments: int = 5) -> Problem:
    workers = draw(st.integers(1, 5))
    steps = draw(st.integers(1, 22))
    size = st.integers(1, 4) | st.sampled_from([BLOCK, 5 * BLOCK + 3])  # of several members' parts, too
    return Problem(
        sizes=tuple(draw(st.lists(size, min_size=1, max_size=fragments))),
        workers=workers,
        weights=draw(st.just(()) | st.tuples(*[st.floats(0.1, 10)] * workers)),
        steps=steps,
        faults=draw(faults(workers, steps)) if faulty else Faults(),
    )


def agree(loops: list[OuterLoop], expected: list[tuple[Any, Any, Any]]) -> None:
    for loop, reference_state in zip(loops, expected, strict=True):
        for mine, theirs in zip(snapshot(loop), reference_state, strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-12, atol=1e-12)


@given(problems(), st.integers(1, 9), LR, MOMENTUM)
@examples(80)
def test_diloco(problem: Problem, period: int, lr: float, momentum: float) -> None:
    loops = problem.loops(DiLoCo(period=period, codec="fp64", outer=Nesterov(lr, momentum)))
    train(loops, problem.steps, problem.inner)
    agree(loops, reference.diloco(**problem.oracle_arguments(), period=period, lr=lr, momentum=momentum))


@given(
    st.data(),
    problems(),
    st.integers(1, 9),
    LR,
    MOMENTUM,
    st.sampled_from([0.0, 0.3, 0.5, 1.0]),
    st.booleans(),
)
@examples(100)
def test_streaming(
    data: st.DataObject,
    problem: Problem,
    period: int,
    lr: float,
    momentum: float,
    alpha: float,
    threads: bool,
) -> None:
    delays = data.draw(st.tuples(*[st.integers(0, period)] * problem.workers), label="delays")
    sync = Streaming(
        period=period,
        fragments=by_part(len(problem.sizes)),
        delay=delays,
        codec="fp64",
        merge=Blend(alpha),
        outer=Nesterov(lr, momentum),
    )
    if threads:
        loops = train_in_threads(problem, sync)
    else:
        loops = problem.loops(sync)
        train(loops, problem.steps, problem.inner)
    expected = reference.streaming(
        **problem.oracle_arguments(),
        period=period,
        lr=lr,
        momentum=momentum,
        slices=problem.slices,
        delays=delays,
        alpha=alpha,
    )
    agree(loops, expected)


def test_rounding_of_a_worker_that_did_not_train_makes_no_outlier_of_the_others() -> None:
    away = (Absence(worker=0, first=3), Absence(worker=1, first=1))
    faults = Faults(drop=0.3, seed=596, absences=away, speeds={0: 0.3})
    problem = Problem(sizes=(BLOCK,), workers=3, steps=3, faults=faults)
    loops = problem.loops(
        Streaming(
            period=1, fragments=by_part(1), delay=0, codec="fp64", merge=Blend(0.3), outer=Nesterov(0.1, momentum=0.0)
        )
    )
    train(loops, problem.steps, problem.inner)
    assert not any(loop.counters.outliers_seen for loop in loops)
    settings = {"period": 1, "lr": 0.1, "momentum": 0.0, "slices": problem.slices, "delays": (0, 0, 0), "alpha": 0.3}
    agree(loops, reference.streaming(**problem.oracle_arguments(), **settings))


@given(problems(), st.integers(1, 9), LR, MOMENTUM)
@examples(60)
def test_delayed(problem: Problem, period: int, lr: float, momentum: float) -> None:
    loops = problem.loops(Delayed(period=period, codec="fp64", outer=Nesterov(lr, momentum)))
    train(loops, problem.steps, problem.inner)
    agree(loops, reference.delayed(**problem.oracle_arguments(), period=period, lr=lr, momentum=momentum))


@given(problems(faulty=False), st.integers(1, 9), LR, MOMENTUM)
@examples(60)
def test_eager_as_the_paper_writes_it(problem: Problem, period: int, lr: float, momentum: float) -> None:
    loops = problem.loops(Eager(period=period, codec="fp64", outer=Nesterov(lr, momentum)))
    train(loops, problem.steps, problem.inner)
    arguments = problem.oracle_arguments(without="there trains lost")
    agree(loops, reference.eager(**arguments, period=period, lr=lr, momentum=momentum))


@given(problems(), st.integers(1, 9), LR, MOMENTUM)
@examples(50)
def test_streaming_eager_with_faults(problem: Problem, period: int, lr: float, momentum: float) -> None:
    sync = Eager(period=period, fragments=by_part(len(problem.sizes)), codec="fp64", outer=Nesterov(lr, momentum))
    loops = problem.loops(sync)
    train(loops, problem.steps, problem.inner)
    expected = reference.eager_with_faults(
        **problem.oracle_arguments(), period=period, lr=lr, momentum=momentum, slices=problem.slices
    )
    agree(loops, expected)


@given(problems(faulty=False), st.sampled_from([0.0, 0.4]))
@examples(40)
def test_data_parallel(problem: Problem, drop: float) -> None:
    problem = Problem(problem.sizes, problem.workers, problem.weights, problem.steps, faults=Faults(drop=drop))
    loops = problem.loops(DataParallel(codec="fp64"))
    train_data_parallel(loops, problem.steps, problem.inner)
    agree(loops, reference.data_parallel(**problem.oracle_arguments(without="there trains")))


LOSSY = st.tuples(st.sampled_from(["int8", "e3m0", "e2m1", "lloyd4", "lloyd2"]), st.sampled_from([0.0, 1.0, 0.7]))
LOSSY |= st.tuples(st.just("top64"), st.sampled_from([1.0, 0.9]))


@given(st.data(), problems(), st.integers(1, 9), LOSSY)
@examples(50)
def test_streaming_with_a_lossy_wire(
    data: st.DataObject, problem: Problem, period: int, lossy: tuple[str, float]
) -> None:
    name, feedback = lossy
    assume(name != "lloyd2" or problem.workers <= 3)  # a mean's rounding error would decide the sign of a zero
    delays = data.draw(st.tuples(*[st.integers(0, period)] * problem.workers), label="delays")
    codec = Codec(name, feedback=feedback)
    loops = problem.loops(Streaming(period=period, fragments=by_part(len(problem.sizes)), delay=delays, codec=codec))
    train(loops, problem.steps, problem.inner)
    expected = reference.streaming(
        **problem.oracle_arguments(codecs.Wire(name)),
        period=period,
        lr=0.6,
        momentum=0.9,
        slices=problem.slices,
        delays=delays,
        alpha=0.25,
        feedback=feedback,
    )
    agree(loops, expected)


@given(problems(), st.integers(1, 9), LOSSY)
@examples(40)
def test_eager_with_a_lossy_wire(problem: Problem, period: int, lossy: tuple[str, float]) -> None:
    name, feedback = lossy
    assume(name != "lloyd2" or problem.workers <= 3)  # a mean's rounding error would decide the sign of a zero
    codec = Codec(name, feedback=feedback)
    outer = Nesterov(0.4, 0.9)
    loops = problem.loops(Eager(period=period, fragments=by_part(len(problem.sizes)), codec=codec, outer=outer))
    train(loops, problem.steps, problem.inner)
    expected = reference.eager_with_faults(
        **problem.oracle_arguments(codecs.Wire(name)),
        period=period,
        lr=0.4,
        momentum=0.9,
        slices=problem.slices,
        feedback=feedback,
    )
    agree(loops, expected)

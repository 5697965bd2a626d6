"""Closed forms against brute force."""

from hypothesis import given
from hypothesis import strategies as st

from atoll.core.codec import Codec
from atoll.core.schedule import Schedule
from atoll.plan import cost
from atoll.plan.line import Line
from atoll.plan.method import Job, Method, Model
from atoll.plan.simulate import time_of


@st.composite
def methods(draw: st.DrawFn) -> tuple[Model, Method]:
    layers, gradients = draw(st.integers(1, 14)), draw(st.booleans())
    period = 1 if gradients else draw(st.integers(1, 12))
    model = Model(parameters=draw(st.integers(1, 5000)), layers=layers, step_s=1.0)
    method = Method(
        name="any",
        period=period,
        each=draw(st.none() | st.integers(1, layers)),
        delay=0 if gradients else draw(st.integers(0, period)),
        codec=Codec(draw(st.sampled_from(["fp32", "bf16", "int8", "e3m0"]))),
        eager=draw(st.booleans()),
        gradients=gradients,
    )
    return model, method


@given(methods())
def test_fragments_make_up_the_model(chosen: tuple[Model, Method]) -> None:
    model, method = chosen
    assert sum(method.values(model)) == model.parameters
    assert sorted(layer for group in method.layers(model) for layer in group) == list(range(1, model.layers + 1))


@given(methods(), st.integers(1, 6), st.integers(0, 60))
def test_bytes_of_a_run_are_those_of_its_rounds(chosen: tuple[Model, Method], workers: int, steps: int) -> None:
    model, method = chosen
    job = method.job(model, workers, steps)
    assert cost.bytes_of_run(model, method, workers, steps) == time_of(job, Line(1e6)).bytes_per_worker


@given(methods(), st.integers(1, 6))
def test_bytes_per_step_are_those_of_a_period(chosen: tuple[Model, Method], workers: int) -> None:
    model, method = chosen
    sent = [
        time_of(Job(
            steps=periods * method.period, step_s=1.0, period=method.period, payload_bytes=method.payload_bytes(model),
            delay=0, workers=workers, gradients=method.gradients, finish=False,
        ), Line(1e6)).bytes_per_worker
        for periods in (4, 5)
    ]  # fmt: skip
    assert round(cost.bytes_per_step(model, method, workers) * method.period, 6) == sent[1] - sent[0]


@given(methods())
def test_most_in_flight_by_brute_force(chosen: tuple[Model, Method]) -> None:
    model, method = chosen
    payloads = method.payload_bytes(model)
    schedule = Schedule(method.period, len(payloads), method.delay)
    first = 3 * method.period
    most = max(
        sum(
            size
            for sent in range(step - method.delay, step + 1)
            for fragment, size in enumerate(payloads)
            if schedule.is_send(fragment, sent)
        )
        for step in range(first, first + method.period)
    )
    assert cost._most_in_flight(method, payloads) == most


@given(methods(), st.integers(1, 6))
def test_memory_never_falls_with_delay_and_offloading_never_adds(chosen: tuple[Model, Method], workers: int) -> None:
    model, method = chosen
    whole, offloaded = (cost.extra_bytes(model, method, workers, offload=offload) for offload in (False, True))
    assert 0 <= offloaded <= whole

"""Bytes, bandwidth, memory and waiting that can be checked by hand, and against the papers' examples."""

import math
from dataclasses import replace

import numpy as np
import pytest

from atoll.core.codec import Codec
from atoll.errors import ConfigError
from atoll.plan import cost
from atoll.plan.line import Line
from atoll.plan.method import METHODS, Method, Model, methods_for
from atoll.plan.simulate import steady_wait_s

TEN = Model(parameters=1000, layers=10, step_s=1.0)
FP32 = Codec("fp32")
WHOLE = Method(name="whole", period=10, codec=FP32)
HALVES = Method(name="halves", period=10, each=5, codec=FP32)


def exposed_s(model: Model, method: Method, workers: int, link: Line) -> float:
    job = method.job(model, workers, 0)
    return float(steady_wait_s(job, np.array([link.bits_per_s]), latency_s=link.latency_s)[0])


def test_bytes_of_a_period() -> None:
    assert cost.round_bytes(TEN, WHOLE, 2) == (4000,)
    assert cost.round_bytes(TEN, HALVES, 2) == (2000, 2000)
    assert cost.round_bytes(TEN, HALVES, 4) == (3000, 3000)
    assert cost.bytes_per_step(TEN, HALVES, 2) == 400
    assert cost.bytes_per_step(TEN, METHODS["data-parallel"], 2) == 2000
    assert cost.average_bits_per_s(TEN, HALVES, 2) == 3200
    assert cost.peak_bits_per_s(TEN, HALVES, 2) == 16000
    assert cost.peak_bits_per_s(TEN, replace(HALVES, delay=4), 2) == 4000
    assert cost.peak_bits_per_s(TEN, replace(HALVES, delay=HALVES.period), 2) == 3200  # both are under way


def test_a_run_sends_what_it_has_not_sent_yet_at_its_end() -> None:
    assert cost.bytes_of_run(TEN, WHOLE, 2, 20) == 2 * 4000
    assert cost.bytes_of_run(TEN, WHOLE, 2, 21) == 3 * 4000
    assert cost.bytes_of_run(TEN, HALVES, 2, 15) == 2 * 2000 + 2000
    assert cost.bytes_of_run(TEN, WHOLE, 2, 0) == 0


def test_what_is_in_no_layer_is_a_fragment_of_its_own() -> None:
    """Ten layers of 60 and an embedding of 400."""
    model = replace(TEN, rest=400)
    assert HALVES.values(model) == (300, 300, 400) and HALVES.layers(model)[-1] == (1,)
    assert WHOLE.values(model) == (1000,)
    assert cost.bytes_per_step(model, HALVES, 2) == cost.bytes_per_step(TEN, HALVES, 2)


def test_waiting() -> None:
    line = Line(8000, latency_s=0.5)  # 4 s for everything
    assert exposed_s(TEN, WHOLE, 2, line) == 4.5
    assert exposed_s(TEN, replace(WHOLE, delay=3), 2, line) == 1.5
    assert exposed_s(TEN, replace(WHOLE, delay=5), 2, line) == 0
    assert exposed_s(TEN, HALVES, 2, line) == 5.0
    assert exposed_s(TEN, HALVES, 1, line) == 0


def test_rounds_that_leave_together_wait_together() -> None:
    """Ten fragments in five steps: five pairs, each of them on its way once."""
    crowded = Method(name="crowded", period=5, each=1, codec=FP32)
    assert exposed_s(TEN, crowded, 2, Line(8000, latency_s=0.5)) == 4 + 5 * 0.5


def test_what_hides_behind_another_s_waiting_is_not_counted_twice() -> None:
    """Ten rounds, one a step, four of which are under way together: every fifth can wait on its own account."""
    crowded = Method(name="crowded", period=10, each=1, delay=4, codec=FP32)
    assert not cost.rounds_apart(10, 4, list(range(10)))
    assert exposed_s(TEN, crowded, 2, Line(math.inf, latency_s=6.0)) == 2 * (6.0 - 4.0)


def test_a_line_that_is_never_free() -> None:
    slow = Line(2000)  # 16 s for everything
    assert exposed_s(TEN, replace(WHOLE, delay=10), 2, slow) == 16 - 10


def test_memory_by_hand() -> None:
    vectors = 2 * 4 * 1000
    assert cost.training_bytes(TEN) == 16_000
    assert cost.extra_bytes(TEN, WHOLE, 2) == vectors + 2 * 4000
    assert cost.extra_bytes(TEN, WHOLE, 4) == vectors + 2 * 4000
    assert cost.extra_bytes(TEN, replace(WHOLE, eager=True), 2) == vectors + 4 * 1000 + 2 * 4000
    assert cost.extra_bytes(TEN, HALVES, 3) == vectors + 3 * 2000
    assert cost.extra_bytes(TEN, replace(HALVES, delay=5), 3) == vectors + 3 * 4000
    assert cost.extra_bytes(TEN, HALVES, 3, offload=True) == vectors // 2 + 3 * 2000
    assert cost.extra_bytes(TEN, replace(WHOLE, velocities=0), 2) == 4 * 1000 + 2 * 4000
    assert cost.extra_bytes(TEN, replace(WHOLE, velocities=2), 2) == 3 * 4 * 1000 + 2 * 4000
    kept_back = Codec("e3m0", feedback=True)
    assert cost.extra_bytes(
        TEN, replace(WHOLE, codec=kept_back), 2
    ) == vectors + 4 * 1000 + 2 * kept_back.payload_bytes(1000)
    # The next round of a fragment leaves before its last one, a whole period old, is applied.
    assert cost.extra_bytes(TEN, replace(WHOLE, delay=10), 2) == vectors + 2 * 2 * 4000


def test_memory_of_the_streaming_paper_s_example() -> None:
    """100B parameters, 3 of 108 layers: 2 vectors of fp32 for them are 22 GB (it prints 20) on 1,117 GiB."""
    model = Model(parameters=10**11, layers=108, step_s=4.9)
    without_gradients = 3 / 4 * cost.training_bytes(model)
    assert without_gradients / 2**30 == pytest.approx(1117, rel=1e-3)
    streaming = METHODS["streaming"]
    payloads = 2 * max(streaming.payload_bytes(model))
    offloaded = cost.extra_bytes(model, streaming, 2, offload=True)
    assert (offloaded - payloads) / 1e9 == pytest.approx(22.2, rel=0.01)
    assert (offloaded - payloads) / without_gradients == pytest.approx(0.02, abs=0.002)
    in_place = cost.extra_bytes(model, METHODS["diloco"], 2) - 2 * max(METHODS["diloco"].payload_bytes(model))
    assert in_place / without_gradients == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"period": 0}, "period must be a whole number of at least 1, got 0"),
        ({"delay": 11}, r"delay must be between 0 and period \(10\), got 11"),
        ({"delay": -1}, "delay must be a whole number of at least 0, got -1"),
        ({"gradients": True}, "on every step and used at once: period must be 1 and delay 0, got 10 and 0"),
        ({"gradients": True, "period": 1, "delay": 1}, "period must be 1 and delay 0, got 1 and 1"),
    ],
)
def test_refused_methods(settings: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(WHOLE, **settings)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"parameters": 0}, "parameters must be a whole number of at least 1, got 0"),
        ({"layers": 0}, "layers must be a whole number of at least 1, got 0"),
        ({"rest": 1000}, "rest must be less than parameters"),
        ({"step_s": 0.0}, "the time of a step must be a finite number of seconds above 0, got 0.0"),
        ({"step_s": math.inf}, "the time of a step must be a finite number"),
    ],
)
def test_refused_models(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        replace(TEN, **settings)  # type: ignore[arg-type]


def test_more_layers_each_than_layers() -> None:
    with pytest.raises(ConfigError, match=r"a fragment of 11 layers is more than the model has \(10\)"):
        replace(HALVES, each=11).layers(TEN)


def test_methods_by_name() -> None:
    def delays(name: str, *periods: int) -> list[int]:
        return [methods_for(TEN, [name], period)[0].delay for period in periods]

    assert [method.name for method in methods_for(TEN)] == list(METHODS)
    assert [(m.name, m.period, m.delay) for m in methods_for(TEN, ["eager", "streaming"], 30)] == [
        ("eager", 30, 30),
        ("streaming", 30, 1),
    ]
    assert methods_for(TEN, ["data-parallel"], 30) == [METHODS["data-parallel"]]
    assert delays("eager", 30, 100, 300) == [30, 100, 300]
    assert delays("streaming", 1, 30, 300) == [1, 1, 1]
    with pytest.raises(ConfigError, match=r"method must be one of data-parallel, diloco, .*; got 'dilocoo'"):
        methods_for(TEN, ["dilocoo"])

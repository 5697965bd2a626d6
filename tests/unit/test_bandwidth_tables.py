"""What the papers print, and what the model of their simulator makes of it."""

import re
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest

import bandwidth_tables as paper
from atoll.core.codec import Codec
from atoll.plan import cost
from atoll.plan.forecast import bandwidth_needed, utilisation
from atoll.plan.method import METHODS, Method, Model
from atoll.plan.paper_grid import GRID_BITS_PER_S, STRETCH, bandwidth_on_grid

LLAMA = Model(parameters=405 * 10**9, layers=126, step_s=26.9)
DEEPSEEK = Model(parameters=671 * 10**9, layers=61, step_s=20.1)


@cache
def cells() -> list[paper.Comparison]:
    return list(paper.compare())


def test_all_cells_are_there() -> None:
    assert [sum(c.table == table for c in cells()) for table in (4, 5)] == [75, 45]
    assert len({(c.model, c.method, c.level) for c in cells()}) == 120


def test_every_cell_of_table_4_is_within_one_grid_step_and_most_are_exact() -> None:
    apart = [c.steps_apart for c in cells() if c.table == 4]
    assert all(steps is not None and abs(steps) <= 1 for steps in apart)
    assert apart.count(0) >= 65


def test_printed_values_are_grid_points_but_for_rounding() -> None:
    for rows in paper.PRINTED.values():
        for printed in (value for row in rows.values() for value in row):
            nearest = GRID_BITS_PER_S[np.abs(GRID_BITS_PER_S / 1e9 - printed).argmin()] / 1e9
            assert abs(nearest - printed) < 0.06  # 86.85 is printed as 86.8


@pytest.mark.parametrize("name", paper.MODELS)
def test_blocking_diloco_layer_by_layer_in_closed_form(name: str) -> None:
    """All layers leave in the backward, from 2 pieces after its start on, and the first is needed after its end.

    A step has 3L - 1 pieces. Layer l is ready after 2 (L - l + 1) of backward's 2L - 1 (layer 1: at its end), and takes
    c on the line. Either the line is what is waited for, all the way from layer L on: layer 1 comes L c after piece 2;
    or a later one arrives late for its own forward. The longest of these is the step.
    """
    model, method = paper.MODELS[name], METHODS["diloco"]
    layers, pieces = model.layers, 3 * model.layers - 1
    piece = model.step_s / pieces
    for rate, got in zip(
        GRID_BITS_PER_S,
        utilisation(model, method, 2, GRID_BITS_PER_S, layered=True),
        strict=True,
    ):
        c = 8 * max(method.payload_bytes(model)) / layers / rate
        ready = {layer: (2 * (layers - layer + 1) - (layer == 1)) * piece for layer in range(1, layers + 1)}
        # The line is free for layer l when layers L..l+1 have passed: with equal times between, first or last rules.
        back = {
            layer: max(ready[first] + (first - layer + 1) * c for first in range(layer, layers + 1))
            for layer in (1, 2, layers)
        }
        over = (2 * layers - 1) * piece
        late = max(0.0, *(back[layer] - over - (layer - 1) * piece for layer in back))
        total = method.period * model.step_s
        assert got == pytest.approx(total / (total + late), rel=1e-9)


def test_blocking_diloco_is_nearly_the_rule_of_thumb() -> None:
    """CU = H T / (H T + max(0, X / B - 2 T / 3))."""
    for model in paper.MODELS.values():
        rates = GRID_BITS_PER_S
        exact = utilisation(model, METHODS["diloco"], 2, rates, layered=True)
        total = 100 * model.step_s
        rough = total / (total + np.maximum(0, 16 * model.parameters / rates - 2 * model.step_s / 3))
        assert np.abs(exact - rough).max() < 0.001


@pytest.mark.parametrize("model", [LLAMA, DEEPSEEK], ids=["405B", "671B"])
def test_larger_models(model: Model) -> None:
    """Near 100 % at about 4 Gbit/s for streaming in 4 bits, and at about 1 Tbit/s for data-parallel."""
    streaming = utilisation(model, METHODS["streaming"], 2, np.array([4e9]), layered=True)[0]
    assert streaming > 0.97
    needed = bandwidth_needed(model, METHODS["data-parallel"], 2, 0.99, layered=True)
    assert 0.3e12 < needed < 2e12


def test_four_hundred_times_fewer_bits() -> None:
    """Tables 1 and 7: 441 against 1.10, 16 bits on every step against 4 bits once in a hundred."""
    model = paper.MODELS["1B"]
    four_bits, all_bits = (cost.bytes_per_step(model, METHODS[m], 2) for m in ("streaming", "data-parallel"))
    # Our 4 bits are 4.0625: every 128 values share a byte.
    assert all_bits / four_bits * (4 + 8 / 128) / 4 == pytest.approx(400, rel=1e-3)
    for printed in (441 / 1.10, 1767 / 4.42, 4418 / 11.05):
        assert all_bits / four_bits == pytest.approx(printed, rel=0.02)


def test_peak_bandwidth_is_eight_times_lower_in_fragments() -> None:
    model = paper.MODELS["1B"]
    streaming, diloco = (cost.peak_bits_per_s(model, METHODS[m], 2) for m in ("streaming-blocking", "diloco"))
    assert diloco / streaming == pytest.approx(24 / 3, rel=1e-6)


def test_hours_of_overtraining_at_one_gigabit() -> None:
    """Table 1, 25B tokens: 0.67 h of computing, 109 h data-parallel, 0.88 h streaming; 1.16B parameters by its bits."""
    model = Model(parameters=1_160_000_000, layers=24, step_s=0.1)
    hours = {}
    for name in ("data-parallel", "streaming"):
        share = utilisation(model, METHODS[name], 2, np.array([1e9]), layered=True)[0]
        hours[name] = 0.67 / float(share)
    assert hours["data-parallel"] == pytest.approx(109, rel=0.15)
    assert hours["streaming"] == pytest.approx(0.88, rel=0.25)


def test_eager_cannot_do_with_less_than_the_line_must_carry() -> None:
    """The Eager paper prints 0.2 Gbit/s for 1B at 99 %, where 4 bits in 10 s are 0.4: a run too short to see it."""
    eager = Method(name="eager", period=100, each=3, delay=100, codec=Codec("e3m0"), eager=True)
    for model in paper.MODELS.values():
        least = cost.average_bits_per_s(model, eager, 2)
        for level in (0.5, 0.99):
            assert bandwidth_needed(model, eager, 2, level, layered=True) == pytest.approx(level * least, rel=0.02)
        just_too_little = np.array([0.97 * least])
        assert utilisation(model, eager, 2, just_too_little, layered=True)[0] == pytest.approx(0.97)


def test_table_5_is_near_a_run_of_two_periods_and_not_a_run_under_way() -> None:
    added = [c for c in cells() if c.table == 5]
    apart = {h: [c.two_periods_apart for c in added if c.method.endswith(h)] for h in ("-30", "-100")}
    assert all(steps is not None and abs(steps) <= 1 for steps in apart["-30"]) and apart["-30"].count(0) == 27
    assert all(steps is not None and abs(steps) <= 2 for steps in apart["-100"])
    for c in added:
        if c.method == "outer-100":
            assert c.ours is not None and c.ours > c.paper


@pytest.mark.parametrize("name", paper.MODELS)
def test_half_of_the_rate_is_enough_for_two_periods_with_a_round_hidden_behind_one(name: str) -> None:
    """A line at half of what a period needs has the first period's payloads carried when the second ends."""
    model, method = paper.MODELS[name], paper.TABLE_5["1 outer step, H 100"]
    line = 8 * sum(method.payload_bytes(model)) / (100 * STRETCH * model.step_s)
    busy = np.interp([line / 2, line], GRID_BITS_PER_S, paper.two_periods(model, method))
    assert busy[0] > 0.9 and busy[1] == pytest.approx(1)
    under_way = utilisation(model, method, 2, np.array([STRETCH * line / 2]), layered=True)
    assert under_way[0] == pytest.approx(0.5, rel=0.01)


def test_a_table_of_another_step_time_is_another_table() -> None:
    model = replace(paper.MODELS["1B"], step_s=1.0)
    found = bandwidth_on_grid(model, METHODS["streaming"])
    assert found[0.99] is not None and found[0.99] < 1e9
    assert bandwidth_on_grid(replace(model, step_s=1e-6), METHODS["data-parallel"])[0.99] is None


def test_the_page_shows_the_table_as_printed(capsys: pytest.CaptureFixture[str]) -> None:
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    shown = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)[1]
    paper.show(cells())
    printed = capsys.readouterr().out
    assert "68 of 75 on the exact grid point, all within one" in printed
    assert printed.split() == shown.split()
    told = Path(__file__).parents[2].joinpath("docs", "papers.md").read_text()
    for count, of in re.findall(r"(\d+) of (45|30)\b", " ".join(printed.split())):
        assert f"{count} of the {of}" in told

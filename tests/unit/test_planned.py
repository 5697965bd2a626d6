"""The picture of a plan: every method once above and once below, and the link where it is."""

import math
from pathlib import Path

import numpy as np
import pytest

from atoll.plan.line import Line
from atoll.plan.method import METHODS, Method, Model
from atoll.report import planned
from atoll.report.canvas import LIGHT

MODEL = Model(parameters=10**9, layers=24, step_s=0.1)
NAMED: dict[str, Method] = {f"<{name}>": method for name, method in METHODS.items()}


def test_every_method_is_a_curve_and_a_timeline() -> None:
    upper, lower = planned.draw(MODEL, NAMED, 2, Line(1e9, 0.01)).axes
    curves = [line for line in upper.lines if len(line.get_xdata()) > 2]  # type: ignore[arg-type]
    assert len(curves) == 2 * len(METHODS)
    said = [text.get_text() for text in lower.texts]
    assert all(name in said for name in NAMED) and sum("computing" in text for text in said) == len(METHODS)


def test_the_link_is_marked() -> None:
    upper = planned.draw(MODEL, NAMED, 2, Line(4e9, 0.01)).axes[0]
    assert "4 Gbit/s, 10 ms" in [text.get_text() for text in upper.texts]
    assert any(set(line.get_xdata()) == {4.0} for line in upper.lines)  # type: ignore[arg-type]


def test_the_target_is_a_line_and_both_kinds_of_curves_are_named() -> None:
    figure = planned.draw(MODEL, NAMED, 2, Line(4e9, 0.01), 0.8)
    upper = figure.axes[0]
    assert any(set(line.get_ydata()) == {0.8} for line in upper.lines)  # type: ignore[arg-type]
    assert [upper.get_yticks()[0], upper.get_yticks()[-1]] == [0, 1]
    named = [text.get_text() for text in figure.legends[0].get_texts()]
    assert named[-2:] == ["best possible", "as atoll sends"]


def test_kinks_are_not_cut() -> None:
    """Between two points of an axis of six decades a curve of one over the rate moves by 2 % at most."""
    upper = planned.draw(MODEL, {"one": METHODS["eager"]}, 2, Line(1e9)).axes[0]
    best = max(upper.lines, key=lambda line: line.get_linewidth()).get_ydata()
    assert max(abs(np.diff(best))) < 0.03


@pytest.mark.parametrize("link", [Line(1.0), Line(1e15), Line(math.inf), Line(1e6, 100.0)])
def test_extreme_links_can_be_drawn(link: Line) -> None:
    planned.draw(MODEL, {"one": METHODS["streaming"]}, 2, link)


@pytest.mark.parametrize("name", METHODS)
def test_a_single_method_or_worker_can_be_drawn(name: str) -> None:
    planned.draw(MODEL, {"one": METHODS[name]}, 1, Line(1e9))


def test_timelines_fill_the_window() -> None:
    lower = planned.draw(MODEL, NAMED, 2, Line(1e8)).axes[1]
    window_s = lower.get_xlim()[1]
    for bars in lower.collections:
        if bars.get_alpha() is None and len(bars.get_paths()):
            ends = [path.get_extents().x1 for path in bars.get_paths()]
            assert max(ends) <= window_s * (1 + 1e-9)


def test_small_models_have_an_axis_in_mbit() -> None:
    tiny = Model(parameters=10**5, layers=6, step_s=0.1)
    upper = planned.draw(tiny, {"one": METHODS["diloco"]}, 2, Line(1e6)).axes[0]
    assert "Mbit/s" in upper.get_xlabel()


def test_the_same_plan_is_the_same_file(tmp_path: Path) -> None:
    for name in ("a.png", "b.png"):
        planned.write(MODEL, {"one": METHODS["diloco"]}, 2, Line(1e9), 0.95, tmp_path / name)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()
    assert LIGHT.paper == "#ffffff"

"""Figures of the 35M comparison: README and the docs have those of the raw metrics in benchmarks/results."""

import json
from pathlib import Path
from statistics import mean

import numpy as np
import numpy.typing as npt
import pytest

from atoll import Blend, Eager, Nesterov, Streaming, Sync
from atoll._util.units import bytes_text
from papers_rows import Row
from papers_table import FIRST_TEXT, PRESET, RARE_PRESET, RESULTS, costs_of_4_bits, load, table

ROOT = Path(__file__).resolve().parent.parent
FRESH = load(RESULTS / "books-c6b298e9")
FIRST = load(RESULTS / FIRST_TEXT)
EIGHT, MUON, DATA_PARALLEL_MUON, TOP64, FASTER_TOP64 = (
    Row.parse(text).name
    for text in (
        "streaming-30,workers=8,batch=8,alpha=0.25,lr=0.6",
        "streaming-30,optimizer=muon,lr=0.7,m=0.6,inner=0.006",
        "data-parallel,workers=1,batch=64,optimizer=muon,inner=0.006",
        "streaming-30,codec=top64,feedback=0.95,outer=sgd,lr=1.0",
        "streaming-30,codec=top64,feedback=0.95,outer=sgd,lr=3.0,alpha=0.0",
    )
)


def words(page: str) -> str:
    """Return a page of the project with single spaces."""
    return " ".join((ROOT / page).read_text(encoding="utf-8").split())


def above(row: str, other: str = "data-parallel", step: int | None = None) -> float:
    """Return by how many percent of the other's loss a row ends above it, or is above it after a step."""
    if step is None:
        return float(100 * (FRESH[row].end.loss / FRESH[other].end.loss - 1))
    one, two = (next(event.loss for event in FRESH[name].evals if event.step == step) for name in (row, other))
    return float(100 * (one / two - 1))


def again(row: str) -> float:
    """Return the gap with seed 1 to data-parallel with seed 1."""
    return above(f"{row}-seed1", "data-parallel-seed1")


def times_fewer(row: str, other: str) -> float:
    """Return how many times fewer bytes a worker sends than in another row."""
    return mean(FRESH[other].end.bytes_sent) / mean(FRESH[row].end.bytes_sent)


@pytest.mark.parametrize("folder", [FIRST_TEXT, "books-c6b298e9", "books-c6b298e9-51.2M", "books-3bf087d0-51.2M"])
def test_tables_are_those_of_the_raw_metrics(folder: str) -> None:
    page = (ROOT / "docs" / "results.md").read_text(encoding="utf-8")
    assert "\n".join(table(load(RESULTS / folder))) in page


LOWER, RARE, FP32 = "streaming-30-lr0.7-m0.6", "streaming-100", "streaming-30-fp32"
SPARSE = bytes_text(mean(FRESH[FASTER_TOP64].end.bytes_sent))
LATE = {row: (above(row, step=1560), above(row, step=6240), above(row)) for row in ("diloco-30", "streaming-30")}
TO_SAME = FRESH[MUON].gap(FRESH[DATA_PARALLEL_MUON]).removeprefix("+")
SEEDS = [abs(above(row) - again(row)) for row in ("streaming-30", PRESET, LOWER, FP32)]
SENTENCES = [
    "ends {:.2f} and {:.2f} % *below* data-parallel (two seeds) at a {:.0f}th of its bytes".format(
        -above(PRESET), -again(PRESET), times_fewer(PRESET, "data-parallel")
    ),
    "DiLoCo with an outer learning rate of 0.4 ends {:.2f} % above (one seed), sends {:.0f} times as many bytes".format(
        above("diloco-30"), times_fewer(PRESET, "diloco-30")
    ),
    "a momentum of 0.5 it ends {:.2f} % above (one seed), with the preset's 0.4 and 0.9 {:.2f} %".format(
        above("eager-30-lr0.8-m0.5"), above("eager-30")
    ),
    f"sends a third of the bytes of period 30 and ends {above(RARE_PRESET):.2f} % above (one seed)",
    f"so the same tokens in total, end {above(EIGHT):.1f} % above data-parallel (one seed)",
    f"tokens and steps of the other rows, end {above(EIGHT):.2f} % above data-parallel",
    "this model has {:.1f} % on BLiMP (guesses: 50 %) and {:.1f} % on LAMBADA".format(
        *(100 * FRESH[EIGHT].scores[task].accuracy for task in ("blimp", "lambada_openai"))
    ),
    f"0.6 ends {-above(PRESET):.2f} % below data-parallel, and {-again(PRESET):.2f} % below with another seed",
    "0.5 with 0.4 ends {:.2f} and {:.2f} % above".format(above("streaming-30"), again("streaming-30")),
    "in fp32 ends {:.2f} % above data-parallel, in e3m0 {:.2f} %; with another seed {:.2f} and {:.2f} %".format(
        above(FP32), above("streaming-30"), again(FP32), again("streaming-30")
    ),
    *costs_of_4_bits(FRESH),
    "{:.2f} points (`streaming-30`), {:.2f} (the preset), {:.2f} (0.7 and 0.6) and {:.2f} (fp32)".format(*SEEDS),
    "DiLoCo-30 ends {:.2f} % above data-parallel".format(above("diloco-30")),
    "Streaming-30 ends {:.2f} % above data-parallel, at a {:.0f}th of data-parallel's payload bytes".format(
        above("streaming-30"), times_fewer("streaming-30", "data-parallel")
    ),
    "payload bytes, and {:.2f} % with another seed".format(again("streaming-30")),
    f"it ends {above(LOWER):.2f} % above, and {again(LOWER):.2f} % with another seed",
    (
        "ends {:.2f} % above data-parallel with the preset's settings. With alpha 0.5 it ends {:.2f} % above "
        "with 0.4 and 0.9 (the paper has 1.4 %), and {:.2f} % above with 0.8 and 0.5"
    ).format(above(RARE_PRESET), above(RARE), above(f"{RARE}-lr0.8-m0.5")),
    "ends {:.2f} % above with 0.8 and 0.5, {:.2f} % with 0.4 and 0.7, and {:.2f} % with the preset's".format(
        above("eager-30-lr0.8-m0.5"), above("eager-30-lr0.4-m0.7"), above("eager-30")
    ),
    "has at +3.1 %, ends {:.2f} % above".format(above("streaming-eager-30")),
    "newest delta, ends {:.1f} % above".format(above("delayed-30")),
    "DiLoCo-30 is {:.2f} % below data-parallel after a fifth of the steps".format(-LATE["diloco-30"][0]),
    "{:.2f} % above after four fifths, and {:.2f} % above at the end".format(*LATE["diloco-30"][1:]),
    "Streaming-30 goes from {:.2f} % below to {:.2f} % and {:.2f} % above".format(
        -LATE["streaming-30"][0], *LATE["streaming-30"][1:]
    ),
    f"with Muon inside ends {-above(MUON):.2f} % below data-parallel with AdamW",
    f"Data-parallel with Muon ends {-above(DATA_PARALLEL_MUON):.2f} % below",
    f"so Streaming ends {TO_SAME} above data-parallel with the same optimizer",
    "while with AdamW and alpha 0.5 it ends {:.2f} % above".format(above("streaming-30")),
    f"ends {above(FASTER_TOP64):.2f} % above data-parallel**, {above(FASTER_TOP64, PRESET):.2f} % above the preset",
    f"at an {times_fewer(FASTER_TOP64, PRESET):.0f}th of its bytes: {SPARSE}",
    f"SparseLoCo's own 1.0, and alpha 0.5, it ends {above(TOP64):.2f} % above",
    *costs_of_4_bits(FIRST),
]


@pytest.mark.parametrize("sentence", SENTENCES)
def test_sentences_have_the_figures_of_the_raw_metrics(sentence: str) -> None:
    assert sentence in words("docs/results.md")


@pytest.mark.parametrize(("row", "preset"), [(PRESET, Streaming(period=30)), (RARE_PRESET, Streaming())])
def test_the_rows_of_the_preset_have_its_settings(row: str, preset: Sync) -> None:
    trained = json.loads((RESULTS / "books-c6b298e9" / f"{row}.json").read_text())
    assert isinstance(preset.merge, Blend) and isinstance(preset.outer, Nesterov)
    assert (trained["sync.alpha"], trained["sync.delay"]) == (preset.merge.alpha, preset.delay)
    assert (trained["sync.outer_lr"], trained["sync.outer_momentum"]) == (preset.outer.lr, preset.outer.momentum)
    assert (trained["sync.codec"], trained["sync.period"]) == (preset.codec.format, preset.period)


def test_the_row_of_eager_has_its_settings() -> None:
    trained, outer = json.loads((RESULTS / "books-c6b298e9" / "eager-30.json").read_text()), Eager().outer
    assert outer == Nesterov(trained["sync.outer_lr"], trained["sync.outer_momentum"])


def test_the_pairs_of_eager_change_places_as_the_page_says() -> None:
    pairs = ("eager-30-lr0.8-m0.5", "eager-30-lr0.4-m0.7")
    higher, lower = ([above(row, step=step) for step in range(780, 6241, 390)] for row in pairs)
    assert all(one > other for one, other in zip(higher, lower, strict=True))
    assert abs(above(pairs[0]) - above(pairs[1])) < max(SEEDS)
    assert "0.8 and 0.5 was above 0.4 and 0.7 from a tenth to four fifths of the steps" in words("docs/results.md")


def test_period_100_sends_a_third_of_the_bytes() -> None:
    assert round(times_fewer(RARE_PRESET, PRESET), 1) == 3.3


def test_the_faster_top64_swings_as_the_page_says() -> None:
    gaps = [above(FASTER_TOP64, step=step) for step in range(1950, 3901, 390)]
    page = f"the gap swings between {min(gaps):.1f} and {max(gaps):.1f} % from a quarter to half of the steps"
    assert page in words("docs/results.md")


def test_data_parallel_hardly_depends_on_the_seed() -> None:
    assert abs(above("data-parallel-seed1")) < 0.01 and "differs by less than 0.01 %" in words("docs/results.md")


def test_readme_and_algorithms_repeat_figures_of_the_raw_metrics() -> None:
    readme, sent = words("README.md"), [mean(FRESH[name].end.bytes_sent) for name in (PRESET, "data-parallel")]
    assert f"ended {-again(PRESET):.2f} to {-above(PRESET):.2f} % below data-parallel's held-out loss" in readme
    assert f"payloads of {bytes_text(sent[0])} a worker instead of {bytes_text(sent[1])}" in readme
    assert f"a third of these bytes, ended {above(RARE_PRESET):.2f} % above (one seed)" in readme
    assert f"so the same tokens in total, {above(EIGHT):.1f} % above" in readme
    algorithms = words("docs/algorithms.md")
    assert f"[{above(TOP64):.2f} % of the loss](results.md" in algorithms
    assert f"`SGD(lr=3.0)` and alpha 0, {above(FASTER_TOP64):.2f} %." in algorithms


def test_the_decision_on_defaults_has_figures_of_the_raw_metrics() -> None:
    page = (ROOT / "docs" / "decisions" / "0035-outer-defaults.md").read_text(encoding="utf-8")
    for label, method in (
        ("Streaming, period 30", "streaming-30"),
        ("Streaming, period 100", "streaming-100"),
        ("Eager, period 30", "eager-30"),
    ):
        cells = []
        for row in (method, *(f"{method}-{pair}" for pair in ("lr0.4-m0.7", "lr0.7-m0.6", "lr0.8-m0.5"))):
            first = f"{above(row):+.2f} %" if row in FRESH else ""
            cells.append(f"{first}, seed 1: {again(row):+.2f} %" if f"{row}-seed1" in FRESH else first)
        assert " ".join(f"| {label} | {' | '.join(cells)} |".split()) in page
    assert f"(alpha 0.25, 0.6, 0.9), period 100 ends {above(RARE_PRESET):.2f} % above" in page
    assert f"are {above(RARE) - above(f'{RARE}-lr0.8-m0.5'):.2f} points better" in page
    assert f"Streaming-30 with Muon ends {TO_SAME[:6]}" in " ".join(page.split())


def test_the_decision_on_alpha_has_figures_of_the_raw_metrics_and_of_its_formula() -> None:
    page = (ROOT / "docs" / "decisions" / "0040-alpha-of-streaming.md").read_text(encoding="utf-8")
    for alpha, lr, momentum, row in (
        (0.0, 0.4, 0.9, None),
        (0.5, 0.4, 0.9, "streaming-30"),
        (0.5, 0.7, 0.6, LOWER),
        (0.25, 0.6, 0.9, PRESET),
    ):
        settings, gain = f"{alpha:g}, {lr:g}, {momentum:g}", lr / (1 - momentum)
        step = f"{gain / (1 - alpha + alpha * gain):.2f} p"
        note = "" if row else " (`diloco-30`)"
        assert f"| {settings}{note} | {step} | {remaining(alpha, lr, momentum):.2f} |" in page
        if row is not None:
            assert f"| {settings} | {above(row):+.2f} % | {again(row):+.2f} % |" in page


def test_the_decision_on_alpha_compares_rows_with_each_other() -> None:
    first, second = FRESH[PRESET].gap(FRESH["streaming-30"]), FRESH[f"{PRESET}-seed1"].gap(FRESH["streaming-30-seed1"])
    page = words("docs/decisions/0040-alpha-of-streaming.md")
    assert f"end {first[1:]} and {second[1:]} below alpha 0.5 with 0.4" in page and first[0] == second[0] == "-"
    assert f"as the seeds of any row differ ({max(SEEDS):.2f} points)" in page
    assert f"it ends {FRESH[PRESET].gap(FRESH['diloco-30'])[1:]} below `diloco-30`" in page


def test_the_decision_on_alpha_has_the_figures_of_period_100() -> None:
    found = "{:.2f} % above data-parallel with the new settings; with alpha 0.5, "
    page = words("docs/decisions/0040-alpha-of-streaming.md")
    first = [100 * (FIRST[row].end.loss / FIRST["data-parallel"].end.loss - 1) for row in (f"{RARE}-lr0.6", RARE)]
    assert "ended {:.2f} % above data-parallel with 0.6, and {:.2f} % above with 0.4".format(*first) in page
    figures = (found + "{:.2f} % (0.4 and 0.9) and {:.2f} %").format(
        *map(above, (RARE_PRESET, RARE, f"{RARE}-lr0.8-m0.5"))
    )
    assert figures in page


def test_the_page_of_papers_has_figures_of_the_raw_metrics() -> None:
    page = words("docs/papers.md")
    assert f"Streaming-30, one seed: {above(FASTER_TOP64):.2f} % above data-parallel at an 18th" in page
    assert f"Streaming-100 {above(RARE):+.2f} % (+1.4), with alpha 0.25 and 0.6 too {above(RARE_PRESET):+.2f} %" in page
    costs = [FRESH[f"streaming-30{seed}"].gap(FRESH[f"{FP32}{seed}"]) for seed in ("", "-seed1")]
    assert f"4 bits cost {costs[0]} and {costs[1]} (two seeds)" in page
    assert (
        "Eager-30 {:+.2f} %, with outer 0.8 and 0.5 {:+.2f} %, with 0.4 and 0.7 {:+.2f} %".format(
            above("eager-30"), above("eager-30-lr0.8-m0.5"), above("eager-30-lr0.4-m0.7")
        )
        in page
    )


def remaining(alpha: float, lr: float, momentum: float) -> float:
    """Return the share of a perturbation that is left after a round without progress."""

    def after(state: npt.NDArray[np.float64]) -> list[float]:
        anchor, local, velocity = state
        velocity = momentum * velocity + (anchor - local)
        anchor = anchor - lr * (anchor - local + momentum * velocity)
        return [anchor, alpha * local + (1 - alpha) * anchor, velocity]

    found = np.linalg.eigvals(np.array([after(unit) for unit in np.eye(3)]).T)
    return float(sorted(np.abs(found))[1])  # the largest is 1: a shift of everything stays

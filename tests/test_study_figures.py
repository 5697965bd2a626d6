"""Figures of the small studies: docs/studies.md and docs/papers.md have those of the raw file, and no others."""

import re
from contextlib import closing
from pathlib import Path

import pytest

import studies
import studies_table
from atoll._util.units import bytes_text
from atoll.runs.events import End, Event, Jsonl, RoundApplied, Start
from atoll.settings.study import read, shipped

ROOT = Path(__file__).resolve().parent.parent
ABOUT, RESULTS = studies_table.load()
FIGURE = r"[+-]?\d+\.\d+(?= %|,| and \S+ %)|\d\.\d{2,3}\b"
"""A percentage, one of a list of percentages, or a loss."""


def gap(run: str, against: str) -> float:
    """Return by how many percent of the other's loss a run ends above it; both are of the same study."""
    study = run.partition("/")[0]
    return float(100 * (RESULTS[run]["loss"] / RESULTS[f"{study}/{against}"]["loss"] - 1))


def gaps(study: str, runs: str, against: str) -> list[float]:
    """Return the gaps of several runs; {} in the other's name stands for the number in the run's."""
    return [gap(f"{study}/{run}", against.format(re.sub(r"^\D+", "", run))) for run in runs.split()]


def above(study: str, runs: str, against: str) -> str:
    return ", ".join(f"{value:+.1f}" for value in gaps(study, runs, against)) + " %"


def losses(study: str, runs: str) -> str:
    return ", ".join(f"{RESULTS[f'{study}/{run}']['loss']:.3f}" for run in runs.split())


def cosines(study: str, runs: str) -> str:
    return ", ".join(f"{RESULTS[f'{study}/{run}']['cosine']:.2f}" for run in runs.split())


def spread(study: str) -> float:
    """Return how far the runs of a study are apart, in percent."""
    ended = [result["loss"] for name, result in RESULTS.items() if name.startswith(f"{study}/")]
    return float(100 * (max(ended) / min(ended) - 1))


def periods(method: str) -> str:
    return " ".join(f"{method}-{period}" for period in studies_table.PERIODS.split())


def without(text: str, sentences: list[str]) -> str:
    """Return a text without these sentences, each of which must be there."""
    for sentence in sentences:
        assert sentence in text
        text = text.replace(sentence, "")
    return text


def thousands(*runs: str) -> str:
    return f"{sum(RESULTS[run]['tokens'] for run in runs) / 1000:.0f}"


def one(study: str, run: str, against: str, sign: int = 1) -> str:
    return f"{sign * gap(f'{study}/{run}', against):.1f} %"


def two(study: str, runs: str, against: str, sign: int = 1) -> str:
    first, second = gaps(study, runs, against)
    return f"{sign * first:.1f} and {sign * second:.1f} %"


def sentences_of_diloco() -> list[str]:
    nats = [RESULTS[f"drops/{of}drop-50"]["loss"] - RESULTS[f"drops/{of}drop-00"]["loss"] for of in ("", "clusters-")]
    return [
        f"they end {two('workers', 'clusters-2 clusters-4', 'workers-{}')} above mixed text",
        f"{one('workers', 'clusters-8', 'workers-8')} with eight;",
        f"it is {one('noniid', 'equal-weights', 'iid')} with four workers",
        f"doubling and halving are {one('compute', 'doubling', 'halving')} apart",
        f"the ramps {one('compute', 'ramp-up', 'ramp-down')}.",
        f"below SGD ({one('outer', 'nesterov', 'sgd', -1)}), heavy ball ({one('outer', 'nesterov', 'momentum', -1)})",
        f"and Adam ({-gap('outer/nesterov', 'adam'):.1f} and {one('outer', 'nesterov', 'adam-tuned', -1)})",
        f"{one('period', 'diloco-032', 'diloco-008')} from period 8 to 32",
        f"Period 4 ends {one('period', 'diloco-004', 'diloco-008')} above 8",
        f"ends {two('start', 'after-120 after-240', 'after-0')} above one from the beginning",
        f"with {thousands('start/after-120', 'pretrained/steps-120')} and "
        f"{thousands('start/after-240', 'pretrained/steps-240')} instead of {thousands('start/after-0')} thousand",
        f"costs {one('drops', 'drop-50', 'drop-00')} with mixed text and "
        f"{one('drops', 'clusters-drop-50', 'clusters-drop-00')} with one kind each, "
        f"{nats[0]:.2f} and {nats[1]:.2f} nats a byte",
        f"up to {one('one-worker', 'diloco-016', 'adamw', -1)} below AdamW with the same learning rate (period 16,",
        f"ends {one('one-worker', 'adamw-lr-4e-3', 'diloco-016', -1)} below that",
    ]


def sentences_of_the_others() -> list[str]:
    """Those of Streaming DiLoCo, Eager Updates, codecs and cosines."""
    naive = gaps("eager", periods("delayed"), "diloco-{}")
    streaming = RESULTS["period/period-008"]["loss"] / RESULTS["period/diloco-008"]["loss"] - 1
    sent = [bytes_text(RESULTS[f"sparse/{run}"]["bytes_sent"]) for run in ("lloyd2", "e3m0", "top64")]
    norms = ", ".join(f"{RESULTS[f'workers/clusters-{n}']['norm']:.2f}" for n in (2, 4, 8))
    spreads = [RESULTS[f"workers/workers-{n}"]["cosine_deviation"] for n in (2, 4, 8)]
    first, second, last = (f"{value:z.2f}" for value in RESULTS["period/period-008"]["cosine_thirds"])
    return [
        "all six end within 0.1 %",
        "all six runs end within 0.2 %",
        f"(period 96 instead of 4) costs {one('period', 'period-096', 'period-004')} and sends 24 times fewer bytes",
        f"DiLoCo itself loses {one('period', 'diloco-096', 'diloco-004')}",
        f"a delay of five steps instead of one costs {one('delays', 'delay-1-5', 'delay-1-1')}",
        f"a delay of a whole period {one('delays', 'delay-1-12', 'delay-1-1')}",
        f"eight are {one('tokens', 'batch-8', 'batch-2')} above two when the batch of all is equal",
        f"{one('tokens', 'steps-8', 'steps-2')} when each worker's is",
        f"share {thousands('tokens/batch-2')} thousand tokens",
        f"{one('overlap', 'delay1-alpha0.0', 'delay0-alpha0.0')} at one step of 12",
        f"{one('overlap', 'delay4-alpha0.0', 'delay0-alpha0.0')} at four",
        f"8 of 12 steps it is {one('overlap', 'delay8-alpha0.5', 'delay8-alpha0.0', -1)} better than keeping none",
        f"it costs {one('overlap', 'delay1-alpha0.5', 'delay1-alpha0.0')} here",
        f"with alpha 0.5, ends {100 * streaming:.1f} % above DiLoCo at period 8",
        f"by {two('eager', 'eager-008 eager-032', 'delayed-{}-lr-0.35', -1)} at periods 8 and 32",
        f"costs {min(naive[:4]):.1f} to {max(naive[:4]):.1f} % at periods 4 to 32 and {naive[4]:.1f} % at 96",
        f"It is {one('eager', 'eager-032', 'diloco-032')} above at period 32 and "
        f"{one('eager', 'eager-008', 'diloco-008')} at period 8",
        f"cost {one('sparse', 'lloyd2', 'fp32')}, with feedback {one('sparse', 'lloyd2-feedback', 'fp32')}",
        f"({sent[0]} a worker instead of {sent[1]})",
        f"(`top64`, {sent[2]}) costs {one('sparse', 'top64', 'fp32-sgd')} against the same outer optimizer in fp32",
        f"and {one('sparse', 'top64', 'fp32')} against Nesterov",
        f"({norms} with 2, 4, 8)",
        f"{min(spreads):.2f} to {max(spreads):.2f} with mixed text",
        f"goes from {first} through {second} to {last};",
    ]


def test_figures_of_the_studies_are_those_of_the_raw_file() -> None:
    page = (ROOT / "docs" / "studies.md").read_text(encoding="utf-8")
    tables = [studies_table.table(rows, RESULTS) for rows in studies_table.TABLES.values()]
    page = without(page, ["\n".join(table) for table in [*tables, studies_table.cosines(RESULTS)]])
    version = ABOUT["torch"].partition("+")[0]
    made = f"({ABOUT['cores']} cores, CPU only, Python {ABOUT['python']}, torch {version})"
    ours = [made, f"{len(RESULTS)} runs", *sentences_of_diloco(), *sentences_of_the_others()]
    ours += [
        f"twice the learning rate ({above('one-worker', 'diloco-008', 'adamw-lr-4e-3')})",
        f"at period 8 ({above('eager', 'eager-008', 'diloco-008')})",
        f"two bits within 1 % ({above('sparse', 'lloyd2', 'fp32')})",
        f"within 5 % ({above('sparse', 'top64', 'fp32-sgd')})",
    ]
    theirs = ["costs 2.1 % of perplexity, 0.02 nats a token", "less than 0.2 % up to ten steps"]
    theirs += ["(the paper: 12.7 % at 500M)", "the paper has 0.4 % at 500M", "about 0.1, 0 and -0.1"]
    settings = ["a byte-level decoder of 0.12 million", "inner learning rate 0.002", "(the preset has 0.25)"]
    rest = without(" ".join(page.split()), ours + theirs + settings)
    assert re.findall(FIGURE, rest) == []
    assert spread("codecs") < 0.1 and spread("fragments") < 0.2


def cells_of_the_papers() -> list[str]:
    """Results as the rows of docs/papers.md repeat them."""
    by_alpha = [gap(f"overlap/delay{delay}-alpha0.5", f"delay{delay}-alpha0.0") for delay in (8, 1, 4)]
    adam = [-gap("outer/nesterov", run) for run in ("adam", "adam-tuned")]
    apart = gap("compute/doubling", "halving"), gap("compute/ramp-up", "ramp-down")
    lowered = [gaps("eager", f"delayed-008-lr-{lr} delayed-032-lr-{lr}", "diloco-{:.3}") for lr in ("0.35", "0.15")]
    return [
        f"small, i.i.d.: {losses('workers', 'workers-1 workers-2 workers-4 workers-8')} for 1, 2, 4, 8 workers;",
        f"not i.i.d.: {losses('workers', 'clusters-2 clusters-4 clusters-8')} for 2, 4, 8 "
        f"({above('workers', 'clusters-2 clusters-4 clusters-8', 'workers-{}')}; the paper: no higher)",
        f"small: after 0, 120, 240 of 480 steps {losses('start', 'after-0 after-120 after-240')}:",
        f"small, DiLoCo: {losses('period', periods('diloco'))} at period 4, 8, 16, 32, 96 "
        f"({above('period', 'diloco-096', 'diloco-004')}); "
        f"Streaming {above('period', 'period-096', 'period-004')} from 4 to 96",
        f"small: {above('noniid', 'clusters', 'iid')} by examples, "
        f"{above('noniid', 'equal-weights', 'iid')} with equal weights |",
        f"small: Nesterov {one('outer', 'nesterov', 'sgd', -1)} below SGD, "
        f"{adam[0]:.1f} and {adam[1]:.1f} % below Adam |",
        f"small: schedules of equal compute {apart[0]:.1f} and {apart[1]:.1f} % apart |",
        f"small: {above('drops', 'drop-50', 'drop-00')} at half of all messages, "
        f"not i.i.d. {above('drops', 'clusters-drop-50', 'clusters-drop-00')}",
        f"small: {one('one-worker', 'diloco-016', 'adamw', -1)} below AdamW of the same learning rate at period 16, "
        f"but AdamW at twice the rate ends {one('one-worker', 'adamw-lr-4e-3', 'diloco-016', -1)} below that",
        f"small: {cosines('period', periods('diloco'))} at period 4, 8, 16, 32, 96; "
        f"{cosines('workers', 'workers-2 workers-4 workers-8')} for 2, 4, 8 workers",
        "and the whole model end within 0.2 %",
        "small: all within 0.1 %",
        f"small: at a delay of 8 of 12 steps alpha 0.5 ends {-by_alpha[0]:.1f} % below 0, "
        f"at 1 and 4 steps {by_alpha[1]:.1f} and {by_alpha[2]:.1f} % above",
        "small: second worker 3, 5, 8, 12 steps late instead of 1: "
        + above("delays", "delay-1-3 delay-1-5 delay-1-8 delay-1-12", "delay-1-1"),
        f"small: {losses('tokens', 'batch-2 batch-4 batch-8')} for 2, 4, 8 workers with the same batch of all; "
        f"{losses('tokens', 'steps-2 batch-4 steps-8')} with the same batch of each",
        f"Delayed {above('eager', periods('delayed'), 'diloco-{}')}, "
        f"Eager {above('eager', periods('eager'), 'diloco-{}')}",
        f"outer rate 0.35 {lowered[0][0]:+.1f} and {lowered[0][1]:+.1f} %, "
        f"0.15 {lowered[1][0]:+.1f} and {lowered[1][1]:+.1f} %",
    ]


def test_figures_of_the_papers_page_are_those_of_the_raw_file() -> None:
    theirs = ["the paper: +2.9 % of perplexity", "the paper, not i.i.d.: +2.1 % of perplexity", "cost under 0.2 %"]
    theirs += ["(the paper, 500M: 2.73 against 2.67)"]
    page = without((ROOT / "docs" / "papers.md").read_text(encoding="utf-8"), cells_of_the_papers() + theirs)
    small = [row for row in page.splitlines() if "`atoll compare" in row and "papers.py" not in row]
    assert len(small) >= 15
    assert [figure for row in small for figure in re.findall(FIGURE, row)] == []


def test_the_raw_file_has_every_run_and_every_claim_holds_in_it() -> None:
    runs = [f"{study}/{run}" for study in shipped() for run in read([Path(study)]).runs]
    assert list(RESULTS) == runs
    assert studies_table.RESULTS.stat().st_size < 60_000
    assert [claim for holds, claim in studies.verdicts(RESULTS) if not holds] == []


def test_every_run_but_those_that_others_begin_with_is_in_a_table() -> None:
    shown = {
        f"{row.study}/{row.run.format(value)}"
        for rows in studies_table.TABLES.values()
        for row in rows
        for value in row.varied.split()
    }
    assert {run for run in RESULTS if run not in shown} == {f"pretrained/steps-{n}" for n in (120, 240, 480)}


@pytest.mark.parametrize("alone", [False, True])
def test_a_run_is_summed_up_by_its_events(tmp_path: Path, alone: bool) -> None:
    start = Start(
        name="a", method="diloco", workers=2, steps=9, parameters=4, tokens_per_step=8, period=1, delay=[0, 0],
        codec="fp32", fragments=[4], payload_bytes=[16], vocabulary=256, device="cpu", threads=1, weights=[1.0, 1.0],
    )  # fmt: skip
    rounds = [
        RoundApplied(step=step, fragment=0, applied=step, members=[0, 1], expected=2, norm=float(step),
                     cosine=None if alone else step / 10, bytes=16)
        for step in range(1, 10)
    ]  # fmt: skip
    totals = {"step": 9, "tokens": 144, "seconds": 1.0, "step_s": 0.1, "bytes_received": [0, 0], "wait_s": [0.0, 0.0]}
    end = End(**totals, bytes_sent=[100, 200], loss=2.123456, best_loss=2.0, outcome="finished")  # type: ignore[arg-type]
    with closing(Jsonl(tmp_path / "metrics.jsonl")) as sink:
        events: list[Event] = [start, *rounds, end]
        for event in events:
            sink.write(event)
    found = studies.summary(tmp_path / "metrics.jsonl")
    assert (found.pop("loss"), found.pop("tokens"), found.pop("bytes_sent")) == (2.12346, 144, 150)
    ours = {"cosine": 0.5, "cosine_deviation": 0.2582, "cosine_thirds": [0.2, 0.5, 0.8], "norm": 5.0}
    assert found == ({} if alone else ours)


def test_results_are_read_as_they_were_written(tmp_path: Path) -> None:
    studies.write(ABOUT, RESULTS, tmp_path / "studies.json")
    assert (tmp_path / "studies.json").read_bytes() == studies_table.RESULTS.read_bytes()
    assert studies_table.load(tmp_path / "studies.json") == (ABOUT, RESULTS)

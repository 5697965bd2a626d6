"""Runs with a process per worker: their folders read as one run, and what was measured in numbers and pictures."""

import io
import json
import math
import re
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.collections import PolyCollection
from rich.console import Console

from atoll import report
from atoll.errors import DataError
from atoll.plan.line import Line
from atoll.report.canvas import LIGHT
from atoll.report.figures import pictures
from atoll.report.lanes import Span, lanes, rows, waits
from atoll.report.record import log_of, merge
from atoll.report.words import warnings_of
from atoll.runs.events import End, Eval, Event, Fault, RoundApplied, Start, Step
from atoll.watch.report_page import report_content, write
from example_counts import examples
from made_up_runs import BEGAN, MadeUpRun, save, save_workers

LINK = Line(1e6)
FAR = MadeUpRun()


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_workers(tmp_path_factory.mktemp("runs") / "far", FAR.events())


@pytest.fixture(scope="module")
def record(far: Path) -> report.RunRecord:
    return report.load(far)


# ---------------------------------------------------------------------- one run from several folders


def test_the_folders_of_workers_are_one_run(far: Path, record: report.RunRecord) -> None:
    assert (record.name, record.start.workers, record.start.worker, record.start.began) == ("far", 3, None, BEGAN)
    assert record.workers == (0, 1, 2)
    assert record.finished and record.step == 80 and record.tokens == 80 * 3 * 512
    assert [len(step.loss) for step in record.steps] == [3] * 8
    assert all(None not in step.loss and step.participants == 3 for step in record.steps)
    assert record.per_worker("bytes_sent") == 4 * 40_000 + 3 * 60_000
    assert {r.worker for r in record.rounds} == {0} and len(record.rounds) == 6
    assert len(record.evals) == 8 and record.loss == 2.1
    assert [found.folder for found in report.load_all([far.parent, far])] == [far]


def test_seconds_and_utilisation_are_by_each_workers_own_clock(record: report.RunRecord) -> None:
    own = [(part.end, part.start.worker) for part in record.processes]
    shares = [1 - end.wait_s[w] / end.seconds for end, w in own if end is not None and w is not None]
    assert len(shares) == 3 and record.utilisation == pytest.approx(sum(shares) / 3)
    assert record.end is not None and record.end.seconds == max(end.seconds for end, _ in own if end)
    waited_s = record.per_worker("wait_s")
    assert waited_s == pytest.approx(sum(record.end.wait_s) / 3) and waited_s > 0.5
    assert record.per_worker("hidden_s") > waited_s
    sent, received = record.per_worker("wire_sent"), record.per_worker("wire_received")
    assert sent == received == 2 * (3 * 40_064 + 3 * 60_064)


def test_a_run_of_one_process_is_as_before(tmp_path: Path) -> None:
    whole = merge([part for events in FAR.events() if (part := log_of(events))])
    found = report.load(save(tmp_path / "run", [whole.start, *whole.steps, *whole.rounds, *whole.evals]))
    assert (found.steps, found.rounds, found.evals) == (whole.steps, whole.rounds, whole.evals)
    assert found.workers == (0, 1, 2) and len(found.processes) == 1


def test_workers_whose_folders_are_elsewhere_are_left_out_of_means(tmp_path: Path) -> None:
    _, one, two = FAR.events()
    some = report.load(save_workers(tmp_path / "gone", [[], one, two]))  # nothing has happened in worker 0's yet
    assert some.workers == (1, 2) and some.per_worker("bytes_sent") == 340_000 and some.evals == ()
    assert [r.worker for r in some.rounds] == [1] * 6
    (words,) = warnings_of([some])
    assert "Worker 0 of far left no numbers here" in words
    alone = report.load(tmp_path / "gone" / "worker-2")
    assert alone.workers == (2,) and alone.per_worker("bytes_sent") == 340_000
    assert "Workers 0, 1 of far left no numbers here" in " ".join(warnings_of([alone]))


def test_workers_that_stopped_at_different_steps(tmp_path: Path) -> None:
    zero, one, two = FAR.events()
    short = [e for e in zero[:-1] if getattr(e, "applied", getattr(e, "step", 0)) <= 40]
    found = report.load(save_workers(tmp_path / "run", [short, one, two]))
    last = next(e for e in reversed(short) if isinstance(e, Step))
    assert found.finished and found.step == 80, "the others have finished"
    assert found.end is not None and found.end.bytes_sent == [last.bytes_sent[0], 340_000, 340_000]
    assert [step.participants for step in found.steps] == [3] * 4 + [2] * 4
    assert [step.loss[0] is None for step in found.steps] == [False] * 4 + [True] * 4
    assert {step.bytes_sent[0] for step in found.steps[3:]} == {last.bytes_sent[0]}, "what it sent stays sent"
    assert [(r.step, r.fragment) for r in found.rounds] == [
        (r.step, r.fragment) for r in one if isinstance(r, RoundApplied)
    ]
    nobody = [[e for e in events if not isinstance(e, End)] for events in (zero, one)]
    assert report.load(save_workers(tmp_path / "killed", [*nobody, two[:-1]])).end is None
    stops = [[replace(e, outcome="interrupted") if isinstance(e, End) else e for e in es] for es in (zero, one, two)]
    stopped = report.load(save_workers(tmp_path / "stopped", stops))
    assert stopped.end is not None and stopped.end.outcome == "interrupted" and not stopped.finished
    measured = [
        [replace(e, best_loss=best) if isinstance(e, End) else e for e in es]
        for best, es in zip((3.0, 2.0, math.nan), stops, strict=True)
    ]
    twice = report.load(save_workers(tmp_path / "twice", measured)).end
    assert twice is not None and twice.best_loss == 2.0
    assert report.load(save_workers(tmp_path / "mixed", [nobody[0], *stops[1:]])).end is None


def test_faults_are_those_of_all_workers_told_once(tmp_path: Path) -> None:
    zero, one, two = FAR.events()
    late, early = Fault(step=40, worker=0, what="late"), Fault(step=30, worker=1, what="early")
    found = report.load(save_workers(tmp_path / "run", [[*zero, late, early], [*one, early], two]))
    assert found.faults == (early, late)


def test_folders_that_do_not_belong_together(tmp_path: Path, far: Path) -> None:
    zero, one, _ = FAR.events()
    other = MadeUpRun(steps=60).events()[1]
    with pytest.raises(DataError, match=r"run: workers 0 and 1 are not of one run: steps is 80 and 60"):
        report.load(save_workers(tmp_path / "run", [zero, other]))
    with pytest.raises(DataError, match=r"worker-1.metrics\.jsonl: .* in worker-1 it should be worker 1, got 0"):
        report.load(save_workers(tmp_path / "copied", [zero, zero]))
    with pytest.raises(DataError, match="worker must be between 0 and 2, got 7"):
        report.load(save(tmp_path / "seven", [replace(FAR.start(0), worker=7)]))
    with pytest.raises(DataError, match=r"worker-0.metrics\.jsonl has no start event"):
        report.load(save_workers(tmp_path / "empty", [[], []]))
    (save_workers(tmp_path / "torn", [zero, one]) / "worker-1" / "metrics.jsonl").write_text("{\n")
    with pytest.raises(DataError, match=r"worker-1.metrics\.jsonl, line 1 is damaged"):
        report.load(tmp_path / "torn")


def test_runs_that_are_only_named_like_workers_stay_apart(tmp_path: Path) -> None:
    whole = replace(FAR.start(0), worker=None)
    for number in (1, 2):
        save(tmp_path / "study" / f"worker-{number}", [replace(whole, name=f"with {number}")])
    assert [found.name for found in report.load_all([tmp_path / "study"])] == ["with 1", "with 2"]
    single = MadeUpRun(workers=1, step_s=(0.1,), late_s=(0.0,))
    save(tmp_path / "single" / "worker-0", [replace(single.start(0), worker=None)])  # the only one is all of them
    assert report.load(tmp_path / "single").workers == (0,)


# ---------------------------------------------------------------------- any run, split in any way


def split(event: Event, worker: int) -> Event | None:
    """What a worker's process would have written in place of the whole run's event."""
    match event:
        case Start():
            return replace(event, worker=worker)
        case Step() | End():
            changes: dict[str, Any] = {
                name: [value if w == worker else 0 for w, value in enumerate(getattr(event, name))]
                for name in ("bytes_sent", "bytes_received", "wait_s", "hidden_s", "wire_sent", "wire_received")
            }
            if isinstance(event, Step):
                changes["participants"] = 1
                for name in ("loss", "grad_norm"):
                    changes[name] = [v if w == worker else None for w, v in enumerate(getattr(event, name))]
            return replace(event, **changes)
        case RoundApplied():
            return replace(event, worker=worker)
        case Fault():
            return event if event.worker == worker else None
        case Eval():
            return event if worker == 0 else None
    return event


counts = st.integers(0, 2**50)
floats = st.integers(0, 2**20).map(lambda n: n / 64)  # sums of these are exact


@st.composite
def runs(draw: st.DrawFn) -> list[Event]:
    """The events of a whole run."""
    workers = draw(st.integers(2, 4))

    def each(values: st.SearchStrategy[Any]) -> list[Any]:
        return draw(st.lists(values, min_size=workers, max_size=workers))

    def totals() -> dict[str, Any]:
        found: dict[str, Any] = {name: each(counts) for name in ("bytes_sent", "bytes_received")}
        found |= {name: each(counts) for name in ("wire_sent", "wire_received")}
        return found | {name: each(floats) for name in ("wait_s", "hidden_s")}

    events: list[Event] = [replace(FAR.start(0), worker=None, workers=workers, delay=[5] * workers)]
    for step in sorted(draw(st.sets(st.integers(1, 80), max_size=5))):
        losses, norms = each(st.none() | floats), each(st.none() | floats)
        trained = sum(loss is not None or norm is not None for loss, norm in zip(losses, norms, strict=True))
        events.append(
            Step(
                step=step, tokens=draw(counts), seconds=draw(floats), step_s=draw(floats), loss=losses, lr=1e-3,
                grad_norm=norms, tokens_per_s=draw(floats), participants=trained, **totals(),
            )
        )  # fmt: skip
        if draw(st.booleans()):
            events.append(
                RoundApplied(step=step, fragment=0, applied=step, members=[0], expected=2, norm=1.0, cosine=None,
                             bytes=4, opened_s=1.0, done_s=2.0)
            )  # fmt: skip
            events.append(Eval(step=step, tokens=1, seconds=1.0, loss=draw(floats), best=False))
            events.append(Fault(step=step, worker=draw(st.integers(0, workers - 1)), what="lost"))
    if draw(st.booleans()):
        best = draw(floats)
        events.append(
            End(step=80, tokens=2**50, seconds=2.0**20, step_s=draw(floats), loss=best, best_loss=best,
                outcome=draw(st.sampled_from(("finished", "interrupted"))), **totals())
        )  # fmt: skip
    return events


def means(record: report.RunRecord) -> tuple[float, float]:
    return record.per_worker("bytes_sent"), record.per_worker("wait_s")


@examples(60)
@given(runs())
def test_the_parts_of_a_run_merge_to_the_whole(events: list[Event]) -> None:
    start = events[0]
    assert isinstance(start, Start)
    pieces = [[piece for e in events if (piece := split(e, w))] for w in range(start.workers)]
    with TemporaryDirectory() as folder:
        whole = report.load(save(Path(folder) / "whole", events))
        merged = report.load(save_workers(Path(folder) / "parts", pieces))
    assert merged.start == whole.start
    assert (merged.steps, merged.rounds, merged.evals) == (whole.steps, whole.rounds, whole.evals)
    assert (merged.faults, merged.end) == (whole.faults, whole.end)
    assert (merged.workers, means(merged)) == (whole.workers, means(whole))


@examples(60)
@given(runs(), st.data())
def test_some_of_the_parts_say_the_same_of_their_workers(events: list[Event], data: st.DataObject) -> None:
    start = events[0]
    assert isinstance(start, Start)
    here = sorted(data.draw(st.sets(st.integers(0, start.workers - 1), min_size=1)))
    parts = [log_of([piece for e in events if (piece := split(e, worker))]) for worker in here]
    merged = merge([part for part in parts if part])
    for mine, whole in zip(merged.steps, (e for e in events if isinstance(e, Step)), strict=True):
        for worker in range(start.workers):
            there = worker in here
            assert mine.loss[worker] == (whole.loss[worker] if there else None)
            assert mine.wire_sent[worker] == (whole.wire_sent[worker] if there else 0)


def test_files_of_before_these_numbers_merge_too() -> None:
    old = [
        [replace(e, hidden_s=[], wire_sent=[], wire_received=[]) if isinstance(e, Step | End) else e for e in events]
        for events in FAR.events()
    ]
    merged = merge([part for events in old if (part := log_of(events))])
    assert merged.end is not None and merged.end.wire_sent == [] and merged.end.bytes_sent == [340_000] * 3


# ---------------------------------------------------------------------- the table


def test_waits_are_columns_where_there_is_a_wire(record: report.RunRecord) -> None:
    (row,) = report.summary([record], LINK)
    assert row.wait_s == record.per_worker("wait_s") and row.utilisation == record.utilisation
    assert record.end is not None
    silent = replace(record, name="near", end=replace(record.end, wire_sent=[0] * 3, wire_received=[0] * 3))
    (quiet,) = report.summary([silent], LINK)
    assert quiet.wait_s is quiet.utilisation is None
    both, alone = (report_content(report.summary(of, LINK), LINK) for of in ([record, silent], [silent]))
    shown = [dict(zip(both["summary"]["columns"], row, strict=True)) for row in both["summary"]["rows"]]
    assert re.fullmatch(r"8\d %", shown[0]["computing here"]) and shown[1]["computing here"] == "-"
    assert "waited here" in shown[0] and "are measured:" in both["summary"]["words"]
    assert ["put on the wire, per worker", "601 kB", "-"] in both["tables"][-1]["rows"]
    told = json.dumps([alone["summary"], alone["tables"]])
    assert not [word for word in ("waited", "computing here", "measured:", "on the wire, per") if word in told]


def test_the_table_with_waits_fits_a_terminal(record: report.RunRecord) -> None:
    console = Console(width=80, file=io.StringIO())
    table = [replace(record, name=name) for name in ("streaming", "diloco", "data-parallel")]
    console.print(report.rich_table(report.summary(table, LINK), LINK))
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "\u2026" not in shown and "data-parallel " in shown and "busy: measured" in shown
    assert re.search(r"1x +\d+,\d+ +8\d % +\d", shown)


# ---------------------------------------------------------------------- the timeline


def test_lanes_are_what_was_measured(record: report.RunRecord) -> None:
    found = lanes(record)
    assert [(lane.worker, lane.begin_s) for lane in found] == [(0, 0.0), (1, 0.25), (2, 0.5)]
    for lane, part in zip(found, record.processes, strict=True):
        assert part.end is not None
        waited_s = sum(wait.end_s - wait.begin_s for wait in lane.waits)
        assert waited_s == pytest.approx(part.end.wait_s[lane.worker])
        assert lane.utilisation == pytest.approx(1 - waited_s / part.end.seconds)
        assert lane.end_s == pytest.approx(lane.begin_s + part.end.seconds)
    ends = [[span.end_s for span in lane.flights] for lane in found]
    assert ends[0] == pytest.approx(ends[1]) and ends[0] == pytest.approx(ends[2]), "a round ends for all at once"


spans = st.lists(st.tuples(st.integers(0, 40), st.integers(1, 12)).map(lambda s: Span(s[0], s[0] + s[1])), max_size=20)


@given(spans)
def test_no_two_of_a_row_overlap_and_no_row_is_too_many(found: list[Span]) -> None:
    found = sorted(found)
    placed = rows(found)
    for row in set(placed):
        mine = [span for span, at in zip(found, placed, strict=True) if at == row]
        assert all(before.end_s <= after.begin_s for before, after in pairwise(mine))
    busiest = max((sum(a.begin_s <= b.begin_s < a.end_s for a in found) for b in found), default=0)
    assert max(placed, default=-1) + 1 == busiest


def test_a_worker_waits_for_one_round_after_the_other() -> None:
    ended = [(2.5, 2.0), (2.0, 1.0), (4.0, 0.0), (5.0, math.nan)]
    assert list(waits(ended, 0.5)) == [Span(1.0, 2.0), Span(2.0, 2.5)]
    assert list(waits(ended[1:2], 1.75)) == [Span(1.75, 2.0)]


def bars(record: report.RunRecord, colour: str) -> list[list[tuple[float, float]]]:
    """From where to where the bars of a colour go in the measured timeline, lane by lane."""
    drawn = pictures(report.summary([record], LINK), LINK)
    axes = drawn["measured"](LIGHT).axes[0]
    want = matplotlib.colors.to_rgba(colour)
    return [
        [(float(path.vertices[:, 0].min()), float(path.vertices[:, 0].max())) for path in made.get_paths()]  # type: ignore[index,union-attr]
        for made in axes.collections
        if isinstance(made, PolyCollection) and np.allclose(np.asarray(made.get_facecolor())[:1], want)
    ]


def test_the_measured_timeline_is_drawn_to_scale(record: report.RunRecord) -> None:
    waits = bars(record, LIGHT.idle)
    computing = [made for made in bars(record, LIGHT.of(0)) if made]
    assert len(computing) == 3
    for lane, waited, worked in zip(lanes(record), waits, computing, strict=True):
        assert waited[0] == pytest.approx(lane.waits[0])
        assert worked[0] == pytest.approx((lane.begin_s, lane.waits[0].begin_s))
        assert worked[1][0] == pytest.approx(lane.waits[0].end_s)


def test_the_report_has_what_is_measured_and_what_is_modelled(far: Path, tmp_path: Path) -> None:
    written = write([far], tmp_path / "page.html", link=LINK, png=tmp_path / "png")
    assert {"measured.png", "timeline.png"} <= {path.name for path in written}
    (row,) = report.summary([report.load(far)], LINK)
    content = report_content([row], LINK)
    measured = {one["worker"]: one for one in content["runs"][0]["now"]["workers"]}
    for lane in lanes(row.record):
        assert [wait[:2] for wait in measured[lane.worker]["waits"]] == [pytest.approx(wait) for wait in lane.waits]
        assert [flight[:2] for flight in measured[lane.worker]["flights"]] == [pytest.approx(f) for f in lane.flights]
    assert content["modelled"] is not None and content["modelled"]["link"] == "1 Mbit/s"


def test_without_times_or_without_a_wire_the_timeline_is_modelled(record: report.RunRecord) -> None:
    untimed = [
        replace(part, rounds=tuple(replace(r, opened_s=math.nan, done_s=math.nan) for r in part.rounds))
        for part in record.processes
    ]
    assert record.end is not None
    silent = replace(record.end, wire_sent=[0] * 3, wire_received=[0] * 3)
    for changed in (replace(record, processes=tuple(untimed)), replace(record, end=silent)):
        keys = list(pictures(report.summary([changed], LINK), LINK))
        assert "timeline" in keys and "measured" not in keys


@pytest.mark.parametrize("broken", [{"began": 0.0}, {"began": math.nan}, {"began": BEGAN + 3600}])
def test_clocks_that_are_wrong_do_not_hide_a_worker(record: report.RunRecord, broken: dict[str, Any]) -> None:
    first = record.processes[0]
    parts = (replace(first, start=replace(first.start, **broken)), *record.processes[1:])
    begins = [waited[0][0] for waited in bars(replace(record, processes=parts), LIGHT.idle)]
    assert len(begins) == 3 and max(begins) < 10


def test_many_workers_and_many_rounds_are_drawn(tmp_path: Path) -> None:
    many = MadeUpRun(
        workers=10, step_s=(0.1,) * 10, late_s=(0.0,) * 10, delay=20, payload_bytes=(4000,) * 10, travel_s=9.0
    )  # fmt: skip
    found = report.load(save_workers(tmp_path / "many", many.events()))
    assert max(lanes(found)[0].rows) > 6
    drawn = pictures(report.summary([found], LINK), LINK)
    words = [text.get_text() for text in drawn["measured"](LIGHT).axes[0].texts]
    assert words[::2] == [f"far, worker {worker}" for worker in range(8)]

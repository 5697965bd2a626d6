"""The sections of a watched run say what the report says, and what nobody has told they do not make up."""

import json
import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from atoll import report
from atoll.report.lanes import Span, lanes
from atoll.report.presence import presences
from atoll.runs.events import End, Eval, Event, Failed, Fault, Lost, Members, Resumed, RoundApplied, Start, Step
from atoll.runs.lines import Lines
from atoll.runs.sample import Sample
from atoll.watch import process
from atoll.watch.compose import compose
from atoll.watch.folders import Folders
from atoll.watch.lane_times import window_section
from atoll.watch.live_run import LiveRun, read_run
from atoll.watch.sections import Sections
from atoll.watch.serialise import to_json
from atoll.watch.source import About, News
from made_up_runs import BEGAN, MadeUpRun, save, save_workers
from watch_fixture import ELASTIC, SETTINGS, elastic_events, live_run, made_sections

VOYAGE = MadeUpRun(steps=200, delay=10, travel_s=1.2)
HEARD = BEGAN + 60.0


def sections_of(logs: Sequence[Sequence[Event]], *, later_s: float = 1.0, share: float = 1.0) -> Sections:
    return compose(live_run(logs, HEARD), share, HEARD + later_s)


def until(logs: list[list[Event]], step: int) -> list[list[Event]]:
    """What had been told after a step."""
    return [
        [e for e in log if getattr(e, "applied", getattr(e, "step", 0)) <= step and not isinstance(e, End)]
        for log in logs
    ]


# ---------------------------------------------------------------------- the report's figures


@pytest.mark.parametrize("elastic", [False, True])
def test_figures_are_those_of_the_report(tmp_path: Path, elastic: bool) -> None:
    logs = elastic_events() if elastic else VOYAGE.events()
    folder = save_workers(tmp_path / "run", logs)
    record, found = report.load(folder), compose(read_run(Folders([folder])), 1.0, time.time())
    run = found["run"]
    assert (run["step"], run["tokens"], run["name"]) == (record.step, record.tokens, record.name)
    assert run["utilisation"] == pytest.approx(record.utilisation)
    assert run["state"] == "finished"
    assert [row[3] for row in found["loss"]["anchor"]] == [e.loss for e in record.evals]
    assert record.last is not None
    for name, total in (
        ("sent_bytes", "wire_sent"),
        ("payload_bytes", "bytes_sent"),
        ("received_bytes", "wire_received"),
    ):
        assert [worker[name] for worker in found["traffic"]["workers"]] == getattr(record.last, total)  # type: ignore[literal-required]
    assert found["outer"]["step"] == sorted(r.step for r in record.rounds)
    assert found["faults"]["count"] >= record.missed + len(record.faults)
    assert [*found["loss"]["workers"]] == ["0", "1", "2"]
    assert found["loss"]["workers"]["1"]["mean"] == [e.loss[1] for e in record.processes[1].steps]


def test_a_window_of_the_whole_run_has_the_lanes_of_the_report(tmp_path: Path) -> None:
    folder = save_workers(tmp_path / "run", VOYAGE.events())
    expected = lanes(report.load(folder))
    run = live_run(VOYAGE.events())
    window = window_section(run, Span(-1.0, 1e6))
    for lane, shown in zip(expected, window["workers"], strict=True):
        assert shown["worker"] == lane.worker
        assert [row[:2] for row in shown["flights"]] == [pytest.approx([*span], abs=1e-6) for span in lane.flights]
        assert [row[4] for row in shown["flights"]] == list(lane.rows)
        assert [row[2] for row in shown["flights"]] == [r.step for r in lane.rounds]
        assert shown["waits"] == [pytest.approx([*span], abs=1e-6) for span in lane.waits]


def test_buckets_of_waiting_add_up_to_the_waits(tmp_path: Path) -> None:
    expected = lanes(report.load(save_workers(tmp_path / "run", VOYAGE.events())))
    for lane, shown in zip(expected, sections_of(VOYAGE.events())["lanes"]["workers"], strict=True):
        assert len(shown["waiting"]) == len(shown["flying"])
        assert shown["from_s"] == pytest.approx(lane.begin_s)
        waited = sum(shown["waiting"][:-1]) * shown["bucket_s"]
        assert waited == pytest.approx(sum(end - begin for begin, end in lane.waits), rel=0.05)
        assert sum(shown["flying"][:-1]) * shown["bucket_s"] == pytest.approx(
            sum(end - begin for begin, end in lane.flights), rel=0.1
        )


def test_members_over_time_are_the_presences_of_the_report(tmp_path: Path) -> None:
    record = report.load(save_workers(tmp_path / "run", elastic_events()))
    shown = made_sections()["lanes"]["workers"]
    for seat, lane in zip(presences(record), shown, strict=True):
        kinds = [span[2] for span in lane["spans"] if span[2] in ("training", "catching up")]
        assert len(kinds) == len(seat.training) + len(seat.following)
        assert [mark[1] for mark in lane["marks"] if mark[1] != "resumed"] == ["lost"] * len(seat.lost) + [
            "joined"
        ] * len(seat.joined)
    assert [span[2] for span in shown[2]["spans"]] == ["training", "away", "catching up", "training"]
    assert "closed its connection" in shown[2]["marks"][0][2]
    edges = [edge for span in shown[2]["spans"] for edge in span[:2]]
    assert edges == sorted(edges) and edges[-1] == made_sections()["run"]["seconds"]


# ---------------------------------------------------------------------- one clock


def test_a_resumed_worker_goes_on_at_the_time_of_the_others() -> None:
    """Its own clock stands still while it is away."""
    first, _, third = sections_of(elastic_events())["now"]["workers"]
    others = {row[2]: row[1] for row in first["flights"]}
    assert len(third["flights"]) > 8
    assert all(abs(row[1] - others[row[2]]) < 0.01 for row in third["flights"])
    assert 25 < (sections_of(elastic_events())["run"]["seconds"] or 0.0) < 26
    logs = [[replace(e, began=0.0) if isinstance(e, Resumed) else e for e in log] for log in elastic_events()]
    behind = [others[row[2]] - row[1] for row in sections_of(logs)["now"]["workers"][2]["flights"]]
    assert max(behind) > 4, "older files do not tell"


def test_without_the_time_of_the_start_all_begin_together() -> None:
    logs = [[replace(e, began=0.0) if isinstance(e, Start) else e for e in log] for log in VOYAGE.events()]
    found = sections_of(logs)
    assert [lane["spans"][0][0] for lane in found["lanes"]["workers"]] == [0.0, 0.0, 0.0]
    assert 20 < found["lanes"]["end_s"] < 40


def test_absences_in_one_process_are_shown() -> None:
    start = replace(VOYAGE.start(None), worker=None)
    steps = [e for e in VOYAGE.events()[0] if isinstance(e, Step)][:6]
    away = [replace(e, loss=[2.0, None if 20 < e.step <= 40 else 2.1, 2.2]) for e in steps]
    spans = sections_of([[start, *away]])["lanes"]["workers"][1]["spans"]
    assert [span[2] for span in spans] == ["training", "away", "training"]
    assert [spans[1][0], spans[1][1]] == pytest.approx([steps[1].seconds, steps[3].seconds], abs=1e-5)


def test_each_worker_of_one_process_has_its_own_curve() -> None:
    steps = [e for e in VOYAGE.events()[0] if isinstance(e, Step)]
    log: list[Event] = [replace(VOYAGE.start(None), worker=None), *(replace(e, loss=[1.0, None, 3.0]) for e in steps)]
    curves = sections_of([log])["loss"]["workers"]
    assert [set(curves[worker]["mean"]) for worker in ("0", "1", "2")] == [{1.0}, set(), {3.0}]


# ---------------------------------------------------------------------- states


def state(logs: Sequence[Sequence[Event]], **how: float) -> tuple[str, str]:
    run = sections_of(logs, **how)["run"]
    return run["state"], run["state_words"]


def test_states_by_the_events() -> None:
    logs = VOYAGE.events()
    assert state([])[0] == "waiting to begin"
    assert state(until(logs, 0))[0] == "training"
    assert state(until(logs, 100)) == ("training", "All 3 workers make steps.")
    assert state(until(logs, 100), share=0.25) == ("reading", "Reading what has happened so far: 25 %.")
    assert state(logs)[0] == "finished"
    stopped = [[replace(e, outcome="interrupted", step=90) if isinstance(e, End) else e for e in log] for log in logs]
    assert state([[e for e in log if getattr(e, "step", 0) <= 90] for log in stopped])[0] == "interrupted"
    went_on = [[*log, Resumed(step=90, seconds=20.0)] for log in stopped]
    assert state([[e for e in log if getattr(e, "step", 0) <= 90] for log in went_on])[0] == "training"


def test_states_by_what_is_not_heard() -> None:
    logs = until(VOYAGE.events(), 103)  # rounds of step 100 are on their way
    assert state(logs, later_s=1.0)[0] == "training"
    assert state(logs, later_s=6.0)[0] == "waiting for a round"
    assert state(logs, later_s=31.0)[0] == "silent"
    late = [[replace(e, seconds=10 * e.seconds) if isinstance(e, Step) else e for e in log] for log in logs]
    assert state(late, later_s=31.0)[0] == "training", "it writes every 12 s"
    assert state(late, later_s=50.0)[0] == "waiting for a round"
    assert state(late, later_s=140.0)[0] == "silent"


def test_a_round_is_on_its_way_from_its_send_until_it_is_applied() -> None:
    def sent(step: int) -> list[list[int]]:
        found = sections_of(until(VOYAGE.events(), step))["now"]["workers"]
        assert {str(worker["on_their_way"][0][:2]) for worker in found if worker["on_their_way"]} in (
            set(),
            {str([step, 0])},
        )
        return [row[:2] for row in found[0]["on_their_way"]]

    assert sent(100) == [[100, 0]]
    assert sections_of(VOYAGE.events())["now"]["workers"][0]["on_their_way"] == []


def test_one_silent_worker_is_named_and_its_lane_ends() -> None:
    logs = until(VOYAGE.events(), 100)
    run = LiveRun(About(name="far"))
    run.take([News(process=str(n), events=log, heard=HEARD + (0 if n == 1 else 40)) for n, log in enumerate(logs)])
    early = [e for e in logs[1] if getattr(e, "step", 0) <= 50]
    run.take([News(process="1", events=early, heard=HEARD)])
    found = compose(run, 1.0, HEARD + 41.0)
    assert found["run"]["state"] == "training"
    assert "Worker 1 has not written anything for long." in found["run"]["state_words"]
    assert [span[2] for span in found["lanes"]["workers"][1]["spans"]] == ["training", "gone"]
    assert [span[2] for span in found["lanes"]["workers"][0]["spans"]] == ["training"]


def test_workers_that_write_but_make_no_step_stall() -> None:
    logs = until(VOYAGE.events(), 100)
    run = live_run(logs, HEARD)
    run.take([News(process=f"worker-{n}", heard=HEARD + 50.0) for n in range(3)])
    assert compose(run, 1.0, HEARD + 51.0)["run"]["state"] == "stalled"
    assert compose(run, 1.0, HEARD + 20.0)["run"]["state"] == "training"


def test_too_few_members_are_a_pause() -> None:
    logs = until(elastic_events(), 100)
    alone = Members(step=100, view=5, members=[0], following=[], boundary=90, seconds=13.0)
    found = sections_of([[*log, alone] for log in logs])
    assert found["run"]["state"] == "paused" and "1 of at least 2 workers" in found["run"]["state_words"]
    assert found["lanes"]["workers"][0]["spans"][-1][2] == "paused"


def test_time_left_follows_the_last_steps() -> None:
    run = sections_of(until(VOYAGE.events(), 100))["run"]
    assert run["left_s"] == pytest.approx(100 * 0.125, rel=0.15)
    assert run["ends_at"] == pytest.approx(HEARD + (run["left_s"] or 0.0))
    assert sections_of(VOYAGE.events())["run"]["left_s"] is None
    slow = until(VOYAGE.events(), 100)
    slow[1] = [replace(e, seconds=3 * e.seconds) if isinstance(e, Step) else e for e in slow[1]]
    assert sections_of(slow)["run"]["left_s"] == pytest.approx(3 * (run["left_s"] or 0.0), rel=0.1)


# ---------------------------------------------------------------------- faults, lines, samples


def test_the_speed_of_a_run_that_has_ended_is_its_mean() -> None:
    logs = [
        [replace(e, tokens_per_s=1e6 if e.step < 200 else 7.0) if isinstance(e, Step) else e for e in log]
        for log in VOYAGE.events()
    ]
    end = next(e for e in logs[0] if isinstance(e, End))
    mean = pytest.approx(end.tokens / end.seconds, rel=0.01)
    assert sections_of(logs)["run"]["tokens_per_s"] == mean
    open_ = [[e for e in log if not isinstance(e, End)] for log in logs]
    assert sections_of(open_)["run"]["tokens_per_s"] == 7.0
    failed = [[*log, Failed(step=200, seconds=end.seconds, why="OutOfMemory")] for log in open_]
    assert (failed_run := sections_of(failed)["run"])["state"] == "failed" and failed_run["tokens_per_s"] == mean


def test_faults_have_kinds_and_are_told_once() -> None:
    found = made_sections()["faults"]
    assert [(fault["kind"], fault["step"]) for fault in found["latest"] if fault["kind"] in ("guarded", "lost")] == [
        ("lost", 80),
        ("guarded", 60),
    ]
    dropped = [fault["step"] for fault in found["latest"] if fault["kind"] == "dropped"]
    assert len(dropped) == len(set(dropped)) == 4, "two workers tell of each"
    assert found["latest"] == sorted(found["latest"], key=lambda fault: -(fault["at_s"] or 0.0))
    log = [*VOYAGE.events()[0], *(Fault(step=n, worker=0, what=f"left out of {n} rounds: x") for n in range(500))]
    many = sections_of([log])["faults"]
    assert (many["count"], len(many["latest"])) == (500, 200)
    told = [
        [*log, *(Fault(step=n, worker=w, what=f"left out of {n} rounds: x") for n in range(500) for w in (1, 2))]
        for log in VOYAGE.events()
    ]
    assert sections_of(told)["faults"]["count"] == 1000, "three workers tell of each"
    strange = [*VOYAGE.events()[0], *(Fault(step=n, worker=n, what="x") for n in range(3, 900))]
    run = live_run([strange], HEARD)
    assert len(run.logs()[0].faults) == 1, "numbers of workers that are not of the run take no memory"
    words = {
        "rolled back": "loss not finite: rolled back to the anchor",
        "left out": "left out of 1 round: its work was not finite",
    }
    for kind, what in words.items():
        (fault,) = sections_of([[*until(VOYAGE.events(), 20)[0], Fault(step=20, worker=0, what=what)]])["faults"][
            "latest"
        ]
        assert (fault["kind"], fault["words"]) == (kind, what)


def test_a_failed_run_says_why_until_it_goes_on() -> None:
    logs = until(VOYAGE.events(), 40)
    for worker, log in enumerate(logs):
        log.append(Failed(step=40, seconds=8.0 + worker, why=f"worker {worker}: loss is not finite\x1b[31m"))
    run = sections_of(logs)["run"]
    assert run["state"] == "failed"
    assert "Failed after step 40 of 200: worker 0: loss is not finite" in run["state_words"]
    assert "\x1b" not in run["state_words"] and "atoll train --resume continues it" in run["state_words"]
    assert [lane["spans"][-1][2] for lane in sections_of(logs)["lanes"]["workers"][:2]] == ["gone", "gone"]
    one = [*logs[:1], *until(VOYAGE.events(), 40)[1:]]
    assert sections_of(one)["run"]["state"] == "training", "others go on"
    resumed = [[*log, Resumed(step=40, seconds=9.0, began=BEGAN + 40)] for log in logs]
    assert sections_of(resumed)["run"]["state"] != "failed"


def test_a_run_with_one_step_event_is_not_silent_before_the_next_is_due() -> None:
    (start, *_), step = VOYAGE.events()[0], next(e for e in VOYAGE.events()[0] if isinstance(e, Step))
    log = [start, replace(step, step=1, step_s=6.0)]
    assert sections_of([log], later_s=45.0)["run"]["state"] != "silent"
    assert sections_of([log], later_s=700.0)["run"]["state"] == "silent"


def test_a_loss_that_workers_tell_at_different_steps_is_one() -> None:
    logs = elastic_events()
    lost = [(n, e) for n, log in enumerate(logs) for e in log if isinstance(e, Lost)]
    assert len(lost) > 1, "several tell of it"
    for moved, (n, event) in enumerate(lost):
        logs[n] = [replace(e, step=e.step - moved) if e is event else e for e in logs[n]]
    found = sections_of(logs)["faults"]["latest"]
    assert sum(fault["kind"] == "lost" for fault in found) == 1


def test_pairs_have_rates_and_capacities() -> None:
    def lines(seconds: float, sent: int) -> Lines:
        return Lines(
            step=10,
            seconds=seconds,
            worker=1,
            sent_bytes=[sent, 0, 0],
            received_bytes=[0, 0, 7],
            capacity=[5e5, None, None],
        )

    logs = until(VOYAGE.events(), 20)
    assert sections_of(logs)["traffic"]["pairs"] == []
    logs[1] += [lines(5.0, 1000), lines(10.0, 6000)]
    (pair,) = sections_of(logs)["traffic"]["pairs"]
    assert (pair["from"], pair["to"], pair["sent_bytes"], pair["capacity"]) == (1, 0, 6000, 5e5)
    assert pair["rate"] == pytest.approx(1000.0)


def test_the_plan_is_that_of_the_line_of_the_run_file() -> None:
    traffic = sections_of(VOYAGE.events())["traffic"]
    assert traffic["planned"] is not None
    sent = (40_000 + 60_000) * 2 / (20 * 0.11)  # to two others, in a period of 20 steps
    assert traffic["planned"]["bytes_per_s"] == pytest.approx(sent, rel=0.3)
    assert 0.5 < (traffic["planned"]["utilisation"] or 0.0) < 1
    assert "700 kbit/s" in traffic["planned"]["words"]
    assert traffic["data_parallel_bytes"] == 200 * 4 * 25_000


def test_samples_are_the_newest_first_and_few() -> None:
    log: list[Event] = [
        VOYAGE.start(None),
        *(Sample(step=n, seconds=float(n), prompt="p", text=f"t{n}\x1b[31m\n") for n in range(50)),
    ]
    found = sections_of([log])["samples"]
    assert [sample["step"] for sample in found] == [*range(49, 29, -1)]
    assert found[0] == {"step": 49, "prompt": "p", "text": "t49\\x1b[31m\n"}


def test_scores_and_settings_are_those_of_the_report() -> None:
    assert ["link.emulate", "0.7Mbit/s"] in made_sections()["settings"]
    assert made_sections()["scores"] == []


# ---------------------------------------------------------------------- much, damaged, hostile


def test_many_events_make_few_points() -> None:
    start = replace(VOYAGE.start(0), steps=10**6)
    step = next(e for e in VOYAGE.events()[0] if isinstance(e, Step))
    round_ = next(e for e in VOYAGE.events()[0] if isinstance(e, RoundApplied))
    log: list[Event] = [start]
    for n in range(1, 5001):
        log.append(replace(step, step=n, seconds=float(n), loss=[1000.0 if n == 77 else 2.0, None, None]))
        log.append(replace(round_, step=n, opened_s=n - 0.9, done_s=n - 0.1, waited_s=0.2))
        log.append(Eval(step=n, tokens=n, seconds=float(n), loss=2.0, best=False))
    found = sections_of([log])
    assert len(found["loss"]["anchor"]) <= 401 and found["loss"]["anchor"][-1][0] == 5000
    assert len(found["loss"]["workers"]["0"]["mean"]) <= 400
    assert max(value for value in found["loss"]["workers"]["0"]["high"] if value) == 1000.0, "a peak is not lost"
    (lane,) = found["lanes"]["workers"]
    assert len(lane["waiting"]) <= 400
    assert lane["waiting"][:-1] == pytest.approx([0.2] * (len(lane["waiting"]) - 1), abs=0.03)
    assert lane["flying"][:-1] == pytest.approx([0.8] * (len(lane["flying"]) - 1), abs=0.1)
    assert found["now"]["from_s"] == pytest.approx(4940.0)
    assert 55 <= len(found["now"]["workers"][0]["flights"]) <= 61
    window = window_section(live_run([log]), Span(0.0, 1e6))
    assert len(window["workers"][0]["waits"]) <= 2000 and len(window["workers"][0]["flights"]) <= 2000
    assert len(to_json(found)) < 200_000


def test_old_rounds_are_forgotten_one_by_one_when_there_are_too_many(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(process, "MOST_FLIGHTS", 10)
    window = window_section(live_run(VOYAGE.events()), Span(0.0, 1e6))
    steps = [row[2] for row in window["workers"][0]["flights"]]
    assert 5 <= len(steps) <= 10 and steps[-1] == 190


@pytest.mark.parametrize("at", [3.0, 12.0, 22.0])
def test_windows_find_rounds_wherever_they_are(at: float, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = window_section(live_run(VOYAGE.events()), Span(0.0, 1e6))["workers"][0]["flights"]
    monkeypatch.setattr(process, "_BLOCK", 3)
    found = window_section(live_run(VOYAGE.events()), Span(at, at + 2.0))["workers"][0]["flights"]
    expected = [row[2] for row in whole if row[0] < at + 2.0 and row[1] > at]
    assert expected and [row[2] for row in found] == expected


def test_time_that_two_rounds_were_waited_for_counts_once() -> None:
    round_ = next(e for e in VOYAGE.events()[0] if isinstance(e, RoundApplied))
    times = ((20, 10.1, 0.1), (30, 10.15, 0.15))
    rounds = [replace(round_, step=n, opened_s=1.0, done_s=done_s, waited_s=waited_s) for n, done_s, waited_s in times]
    step = next(e for e in VOYAGE.events()[0] if isinstance(e, Step))
    found = sections_of([[VOYAGE.start(0), *rounds, replace(step, seconds=12.0)]])
    (lane,), (now,) = found["lanes"]["workers"], found["now"]["workers"]
    assert sum(lane["waiting"]) * lane["bucket_s"] == pytest.approx(0.15, abs=1e-3)
    assert now["waits"] == [pytest.approx([10.0, 10.15], abs=1e-5)]


def test_a_process_of_another_run_is_left_out_and_named() -> None:
    logs = VOYAGE.events()
    other = [replace(e, worker=1, steps=77) if isinstance(e, Start) else e for e in logs[1]]
    run = live_run([logs[0], other, logs[2]])
    run.take([News(process="worker-1", heard=HEARD)])  # also later
    found = compose(run, 1.0, HEARD)
    assert [lane["worker"] for lane in found["lanes"]["workers"]] == [0, 2]
    assert "not of one run: steps is 200 and 77" in found["run"]["state_words"]


def test_before_it_begins_the_run_and_its_first_troubles_are_named() -> None:
    run = LiveRun(About(name="far"))
    assert compose(run, 1.0, HEARD)["run"]["state_words"] == "No worker of far has begun yet."
    run.take([News(process=str(n), heard=HEARD, trouble=f"worker {n} is cut off") for n in range(6)])
    words = compose(run, 1.0, HEARD)["run"]["state_words"]
    assert words.startswith(
        "No worker of far has begun yet. Problem: worker 0 is cut off. Problem: worker 1 is cut off."
    )
    assert words.endswith("Problem: worker 3 is cut off. And 2 more.")


@pytest.mark.parametrize("changes", [{"workers": 10**6}, {"workers": 0}, {"worker": 3}, {"worker": -1}])
def test_a_start_that_cannot_be_is_refused(changes: dict[str, Any]) -> None:
    found = sections_of([[replace(VOYAGE.start(0), **changes)]])
    assert found["run"]["state"] == "waiting to begin"
    assert "cannot be that of a run" in found["run"]["state_words"]


def test_numbers_that_are_not_finite_or_far_too_large_are_no_accident() -> None:
    logs = VOYAGE.events()
    wild: list[Event] = []
    for e in logs[0]:
        if isinstance(e, Step):
            e = replace(
                e, seconds=math.nan if e.step % 20 else 1e300, tokens_per_s=math.inf, loss=[math.nan], wait_s=[]
            )
        if isinstance(e, RoundApplied):
            e = replace(e, norm=math.inf, cosine=None, opened_s=-1e300, done_s=1e300, fragment=10**15, step=2**70)
        wild.append(e)
    text = to_json(sections_of([wild]))
    json.loads(text, parse_constant=pytest.fail)
    json.loads(to_json(sections_of([[replace(VOYAGE.start(0), period=0, delay=[], payload_bytes=[-1])]])))


HOSTILE = "</script><script>alert(1)</script><!-- & \u2028 \x00\x1b[2J \ud800 '\""


def test_hostile_text_stays_text() -> None:
    logs = until(VOYAGE.events(), 20)
    logs[0][0] = replace(VOYAGE.start(0), name=HOSTILE, method=HOSTILE, codec=HOSTILE, device=HOSTILE)
    logs[0] += [
        Fault(step=20, worker=0, what=HOSTILE * 1000),
        Sample(step=20, seconds=1.0, prompt=HOSTILE, text=HOSTILE * 1000),
    ]
    run = LiveRun(About(name=HOSTILE, settings={HOSTILE: {HOSTILE: [HOSTILE, {HOSTILE: HOSTILE}]}}))
    run.take([News(process=HOSTILE, events=logs[0], heard=HEARD, trouble=HOSTILE)])
    text = to_json(compose(run, 1.0, HEARD))
    assert not set(b"<>&\n\r\x00\x1b") & set(text), "it may stand in a page and in one line of an event"
    assert "\u2028" not in text.decode()
    found = json.loads(text)
    assert found["run"]["method"].startswith("</script><script>alert(1)")
    assert len(found["faults"]["latest"][0]["words"]) <= 300 and len(text) < 40_000


def test_numbers_are_short_and_exact_enough() -> None:
    value = {"a": [1234567.123456, 0.00012345678, 12, None, math.inf, True], "b": 1 / 3, "began": 1_700_000_000.123456}
    assert json.loads(to_json(value)) == {
        "a": [1234567.1235, 0.0001235, 12, None, None, True],
        "b": 0.3333,
        "began": 1_700_000_000.1235,
    }


def test_settings_come_from_the_run_file(tmp_path: Path) -> None:
    found = compose(read_run(Folders([save(tmp_path / "far", VOYAGE.events()[0])])), 1.0, time.time())
    assert ["sync.workers", "3"] in found["settings"]
    assert SETTINGS["name"] == ELASTIC.name


def test_a_worker_that_is_gone_does_not_count_in_the_time_left() -> None:
    logs = until(VOYAGE.events(), 180)
    both = live_run(logs, HEARD)
    late = live_run([logs[0], until(VOYAGE.events(), 20)[1]], HEARD)
    late.heard[[*late.processes][1]] = HEARD - 1e4
    assert late.left_s(HEARD) == pytest.approx(both.left_s(HEARD), rel=0.2)


def test_a_second_process_of_the_same_worker_is_refused_in_words() -> None:
    logs = VOYAGE.events()
    run = live_run([logs[0], logs[0]], HEARD)
    assert len(run.processes) == 1
    (words,) = run.troubles
    assert "worker 0 is shown as" in words

"""Traces of runs: what Perfetto and chrome://tracing ask of the format, and that times are those of the events."""

import json
import math
from collections import defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from typer.testing import CliRunner

from atoll import report
from atoll.cli.main import app
from atoll.errors import AtollError, ConfigError
from atoll.runs.events import Event, Fault, Resumed, RoundApplied, Start, Step
from example_counts import examples
from made_up_runs import BEGAN, MadeUpRun, save, save_workers

FAR = MadeUpRun(delay=20, payload_bytes=(40_000, 60_000, 20_000), travel_s=1.5)


def traced(folder: Path) -> list[dict[str, Any]]:
    """The entries of a trace, which are all as the format has them."""
    path = report.write_trace([folder], folder.parent / "trace.json")
    content = json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)
    entries: list[dict[str, Any]] = content["traceEvents"]
    assert content["displayTimeUnit"] == "ms"
    check(entries)
    return entries


def check(entries: list[dict[str, Any]]) -> None:
    named, last = set(), 0
    tracks: dict[tuple[int, int], list[tuple[int, int]]] = defaultdict(list)
    for entry in entries:
        assert {"name", "ph", "ts", "pid", "tid", "args"} <= set(entry)
        assert all(isinstance(entry[key], int) and entry[key] >= 0 for key in ("ts", "pid", "tid"))
        match entry["ph"]:
            case "M":
                assert last == 0, "names come first"
                named.add((entry["pid"], entry["tid"]))
                continue
            case "X":
                assert isinstance(entry["dur"], int) and entry["dur"] >= 0
                tracks[entry["pid"], entry["tid"]].append((entry["ts"], entry["ts"] + entry["dur"]))
            case "C":
                assert entry["args"] and all(isinstance(value, int | float) for value in entry["args"].values())
            case "i":
                assert entry["s"] == "t"
            case other:
                pytest.fail(f"unknown phase {other}")
        assert entry["ts"] >= last, "in order of time"
        last = entry["ts"]
        assert (entry["pid"], entry["tid"]) in named
    for spans in tracks.values():  # one that reaches into the next would be drawn as if inside it
        assert all(before <= after for (_, before), (after, _) in pairwise(spans))


def spans(entries: list[dict[str, Any]], pid: int, track: str) -> list[dict[str, Any]]:
    """The spans of a worker's tracks that have such a name, or begin with it."""
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in entries if e["name"] == "thread_name"}
    mine = [e for e in entries if e["ph"] == "X" and e["pid"] == pid]
    return [e for e in mine if names[pid, e["tid"]].startswith(track)]


@pytest.fixture(scope="module")
def far(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_workers(tmp_path_factory.mktemp("runs") / "far", FAR.events())


def test_every_worker_is_a_process_with_its_tracks(far: Path) -> None:
    entries = traced(far)
    names = [e["args"]["name"] for e in entries if e["name"] == "process_name"]
    assert names == ["far, worker 0", "far, worker 1", "far, worker 2"]
    tracks = [e["args"]["name"] for e in entries if e["name"] == "thread_name" and e["pid"] == 1]
    assert tracks == ["inner steps", "waiting", "rounds", "rounds 2", "rounds 3", "rounds 4"]
    assert {e["name"] for e in entries if e["ph"] == "C"} == {"loss", "payload", "wire"}
    assert {e["name"] for e in entries if e["ph"] == "i" and e["pid"] == 1} == {"evaluation", "saved"}


def test_times_are_those_of_the_events_by_one_clock(far: Path) -> None:
    entries = traced(far)
    for worker, events in enumerate(FAR.events()):
        late_s = FAR.late_s[worker]
        rounds = [e for e in events if isinstance(e, RoundApplied)]
        drawn = sorted(spans(entries, worker + 1, "rounds"), key=lambda e: (e["ts"], e["args"]["fragment"]))
        assert [e["ts"] for e in drawn] == [round(1e6 * (late_s + r.opened_s)) for r in rounds]
        assert [e["ts"] + e["dur"] for e in drawn] == [round(1e6 * (late_s + r.done_s)) for r in rounds]
        assert [e["args"]["bytes"] for e in drawn] == [r.bytes for r in rounds]
        assert [e["args"]["hidden_s"] for e in drawn] == [r.hidden_s for r in rounds]
        steps = [e for e in events if isinstance(e, Step)]
        inner = spans(entries, worker + 1, "inner steps")
        assert [e["name"] for e in inner][:2] == ["steps 1 to 10", "steps 11 to 20"]
        assert [e["ts"] + e["dur"] for e in inner] == [round(1e6 * (late_s + s.seconds)) for s in steps]
        waiting = spans(entries, worker + 1, "waiting")
        assert sum(e["dur"] for e in waiting) == pytest.approx(1e6 * steps[-1].wait_s[worker], abs=len(waiting) + 1)
        assert sum(e["args"]["waited_s"] for e in inner) == pytest.approx(steps[-1].wait_s[worker])
        for wait in waiting:  # inside the inner steps that it held up
            assert any(e["ts"] - 1 <= wait["ts"] and wait["ts"] + wait["dur"] <= e["ts"] + e["dur"] + 1 for e in inner)


def test_moments_are_told_where_they_belong(tmp_path: Path) -> None:
    zero, one, two = FAR.events()
    lost = Fault(step=12, worker=1, what="left out")
    run = save_workers(tmp_path / "far", [zero, [*one, lost, Resumed(step=20, seconds=3.5)], two])
    moments = [e for e in traced(run) if e["ph"] == "i" and e["name"] in ("fault", "resumed")]
    second = next(e for e in one if isinstance(e, Step) and e.step == 20)
    assert sorted((e["name"], e["pid"], e["ts"]) for e in moments) == [
        ("fault", 2, round(1e6 * (0.25 + second.seconds))),
        ("resumed", 2, 3_750_000),
    ]
    assert {e["name"]: e["args"] for e in moments}["fault"] == {"step": 12, "what": "left out"}


def test_several_runs_are_side_by_side_however_far_apart_they_were(tmp_path: Path, far: Path) -> None:
    later = MadeUpRun(name="later").events()
    events = [[replace(e, began=e.began + 1e6) if isinstance(e, Start) else e for e in es] for es in later]
    other = save_workers(tmp_path / "later", events)
    path = report.write_trace([far, other], tmp_path / "both.json")
    entries = json.loads(path.read_text())["traceEvents"]
    check(entries)
    assert {e["pid"] for e in entries} == set(range(1, 7))
    assert max(e["ts"] for e in entries) < 60e6


def test_a_run_of_one_process_and_a_file_without_times_have_a_trace(tmp_path: Path) -> None:
    record = report.load(save_workers(tmp_path / "parts", FAR.events()))
    rounds = [replace(r, opened_s=math.nan, done_s=math.nan) for r in record.rounds]
    steps = [replace(s, hidden_s=[], wire_sent=[], wire_received=[]) for s in record.steps]
    whole = save(tmp_path / "whole", [replace(record.start, began=0.0), *steps, *rounds])
    entries = traced(whole)
    assert [len(spans(entries, worker, "inner steps")) for worker in (1, 2, 3)] == [8] * 3
    assert not spans(entries, 1, "rounds") and not spans(entries, 1, "waiting")
    begun = traced(save(tmp_path / "begun" / "run", [record.start]))
    assert {e["ph"] for e in begun} == {"M"}


def test_requests_that_are_refused(far: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="at least one run, got none"):
        report.write_trace([], tmp_path / "trace.json")
    with pytest.raises(ConfigError, match=r"is a folder; give the file to write, such as \S+trace\.json"):
        report.write_trace([far], tmp_path)
    (tmp_path / "file").write_text("mine")
    with pytest.raises(AtollError, match="cannot be written"):
        report.write_trace([far], tmp_path / "file" / "trace.json")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_the_command_writes_it_beside_the_page(far: Path, tmp_path: Path) -> None:
    page, trace = tmp_path / "page.html", tmp_path / "trace.json"
    result = CliRunner().invoke(app, ["report", str(far), "--out", str(page), "--trace", str(trace)])
    assert result.output.split() == ["wrote", str(page), "wrote", str(trace)]
    check(json.loads(trace.read_text())["traceEvents"])


seconds = st.floats(0, 1e6) | st.just(math.nan)


@examples(40)
@given(
    st.lists(st.tuples(seconds, seconds, seconds), max_size=12),
    st.lists(seconds, max_size=5),
    st.sampled_from([0.0, math.nan, BEGAN]),
)
def test_any_times_make_a_trace_that_loads(
    rounds: list[tuple[float, float, float]], reports: list[float], began: float
) -> None:
    """Also those that a clock which was set back, or a damaged file, leaves behind."""
    first, step, sent = (next(e for e in FAR.events()[0] if e.event == tag) for tag in ("start", "step", "round"))
    assert isinstance(first, Start) and isinstance(step, Step) and isinstance(sent, RoundApplied)
    events: list[Event] = [replace(first, began=began)]
    events += [replace(sent, opened_s=a, done_s=b, waited_s=w) for a, b, w in rounds]
    events += [
        replace(step, step=n, seconds=at, loss=[math.nan] * 3, wait_s=[at] * 3) for n, at in enumerate(reports, 1)
    ]
    with TemporaryDirectory() as folder:
        run = save(Path(folder) / "run", events)
        path = report.write_trace([run], Path(folder) / "trace.json")
        content = json.loads(path.read_text("utf-8"), parse_constant=pytest.fail)
    for entry in content["traceEvents"]:
        assert entry["ts"] >= 0 and entry.get("dur", 0) >= 0

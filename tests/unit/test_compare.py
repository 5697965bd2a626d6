"""`atoll compare`, with real processes: all runs end in one table, a failed one takes no other down."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from atoll.cli.compare import check_starts, compare, steps_note, verdict
from atoll.errors import ConfigError
from atoll.plan.line import parse_line
from atoll.report import load, summary
from atoll.runs.events import End, Jsonl, Resumed, read
from atoll.runs.scored import Scored
from atoll.settings.study import Claim
from atoll.settings.study import read as read_study
from kills import gone, with_mark

pytestmark = pytest.mark.processes

STUDY = """
[model]
layers = 2
width = 16
heads = 1
feedforward = 32
context = 16
[data]
source = {source!r}
cache = {cache!r}
[train]
steps = {steps}
batch = 2
eval_tokens = 64
save_every = 5
log_every = 2
[sync]
period = 4
fragments = "blocks:1"
[study]
title = "A study"
[[study.runs]]
name = "one"
[[study.runs]]
name = "other"
sync.codec = "fp32"
[[study.claims]]
say = "they are close"
run = "one"
against = "other"
at_least = -0.5
at_most = 0.5
"""


@pytest.fixture
def study(tmp_path: Path) -> Path:
    text = tmp_path / "corpus"
    text.mkdir()
    for number in range(10):
        (text / f"{number}.txt").write_text(f"{number} reef lagoon islet tide surf sand " * 60)
    file = tmp_path / "study.toml"
    file.write_text(STUDY.format(source=str(text), cache=str(tmp_path / "tokens"), steps=12))
    return file


def test_all_runs_end_in_a_table_a_claim_and_a_report(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert compare([study], out=out, jobs=2) == 0
    told = capsys.readouterr().out
    assert "A study" in told and "holds: they are close (one" in told and "report.html" in told
    assert "the claims are meant" not in told
    assert (out / "report.html").exists() and list((out / "pictures").glob("*.png"))
    ends = {name: read(out / name / "metrics.jsonl")[-1] for name in ("one", "other")}
    assert all(isinstance(end, End) and end.outcome == "finished" for end in ends.values())
    metrics = Jsonl(out / "one" / "metrics.jsonl", at=(out / "one" / "metrics.jsonl").stat().st_size)
    metrics.write(Scored(task="piqa", weights="final", documents=9, accuracy=0.5, stderr=0.125, chance=0.5))
    metrics.close()
    before = (out / "one" / "metrics.jsonl").stat()
    study.write_text(study.read_text().replace("steps = 12", "steps = 20"))
    assert compare([study], ["train.steps=12"], out=out) == 0  # nothing is run again
    again = capsys.readouterr().out
    assert "one: finished already" in again and "held-out loss" not in again
    assert "\nthe claims are meant for the file's 20 steps, which were changed:\nholds: they are close" in again
    assert "piqa, 9 documents, chance 50.0 %" in again and "50.00 ± 12.50 %" in again and "50.00 ± 12.50 %" not in told
    assert (out / "one" / "metrics.jsonl").stat().st_mtime_ns == before.st_mtime_ns
    rows = summary([load(out / name) for name in ("one", "other")], parse_line("1Mbit/s"))
    wrong = Claim(say="far apart", run="one", against="other", at_least=0.9)
    assert verdict(wrong, rows).startswith("does not hold: far apart (one")


@pytest.mark.parametrize(
    ("name", "overrides", "note"),
    [
        ("start", [], []),
        ("start", ["train.batch=2"], []),
        ("start", ["train.steps=40"], ["the claims are meant for the file's 240, 360, 480 steps, which were changed:"]),
        ("drops", ["train.steps=481"], ["the claims are meant for the file's 480 steps, which were changed:"]),
    ],
)
def test_claims_are_meant_for_the_steps_of_their_file(name: str, overrides: list[str], note: list[str]) -> None:
    assert steps_note([Path(name)], read_study([Path(name)], overrides)) == note


def test_files_that_need_overrides_or_have_no_steps_have_claims_too(study: Path) -> None:
    study.write_text(study.read_text().replace("steps = 12\n", ""))
    changed = read_study([study], ["train.steps=40"])
    assert steps_note([study], changed) == ["the claims are meant for the file's own steps, which were changed:"]
    study.write_text(study.read_text().replace("batch = 2", "batch = 2\naccumulate = 3"))
    assert steps_note([study], read_study([study], ["train.steps=40", "train.accumulate=2"])) == []


def test_a_model_to_begin_from_must_be_there_before_anything_is_trained(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as error:
        check_starts(read_study([Path("start")]))
    missing = "run after-120: model.hf: there is no folder 'runs/pretrained/steps-120/model'"
    assert str(error.value) == f"{missing}; train it first: atoll compare pretrained"
    with pytest.raises(ConfigError, match="atoll compare pretrained"):
        compare([Path("start")])
    assert not (tmp_path / "runs").exists()
    for number in (120, 240):
        (tmp_path / f"runs/pretrained/steps-{number}/model").mkdir(parents=True)
    check_starts(read_study([Path("start")]))
    text = study.read_text().partition("[data]")[2]
    study.write_text("[data]" + text.replace('sync.codec = "fp32"', 'model.hf = "o/one/model"'))
    check_starts(read_study([study], out=Path("o")))  # which the run before it makes
    with pytest.raises(ConfigError, match=r"run other: model\.hf: there is no folder 'o/one/model'; train or copy it"):
        check_starts(read_study([study], out=Path("p")))
    check_starts(read_study([study], ["model.hf=owner/name"]))  # for the hub to find


@pytest.mark.slow
def test_a_run_that_fails_is_told_and_the_others_end(
    study: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    study.write_text(
        study.read_text().replace('sync.codec = "fp32"', "train.sequence = 100000\nmodel.context = 100000")
    )
    assert compare([study], out=out, jobs=1) == 1
    captured = capsys.readouterr()
    assert "error: run other failed:" in captured.err and "tokens, but" in captured.err
    assert "Traceback" not in captured.err
    assert (out / "one" / "model").exists() and (out / "report.html").exists()


@pytest.mark.slow
def test_a_study_that_was_changed_is_refused_before_anything_is_trained(
    study: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "3")
    out = tmp_path / "out"
    assert compare([study], out=out, jobs=2) == 0
    assert json.loads((out / "one" / "about.json").read_text())["threads"] == 3
    before = (out / "report.html").stat()
    study.write_text(study.read_text().replace('sync.codec = "fp32"', 'sync.codec = "bf16"'))
    with pytest.raises(ConfigError, match=r"sync\.codec was 'fp32', is 'bf16'.*; --fresh trains the study again"):
        compare([study], out=out)
    assert (out / "report.html").stat() == before
    assert compare([study], out=out, fresh=True) == 0


@pytest.mark.slow
def test_interrupted_it_saves_all_runs_and_the_same_command_goes_on(study: Path, tmp_path: Path) -> None:
    study.write_text(study.read_text().replace("steps = 12", "steps = 600"))
    out = tmp_path / "out"
    command = [sys.executable, "-m", "atoll", "compare", str(study), "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    logs = [out / name / "metrics.jsonl" for name in ("one", "other")]
    deadline = time.monotonic() + 120
    while not all(log.exists() and b'"step"' in log.read_bytes() for log in logs):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)  # as Ctrl-C in a terminal
    _, errors = process.communicate(timeout=120)
    assert process.returncode == 130 and b"Traceback" not in errors
    stopped = [read(log)[-1] for log in logs]
    assert all(isinstance(end, End) and end.outcome == "interrupted" and 0 < end.step < 600 for end in stopped)
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for log, end in zip(logs, stopped, strict=True):
        events = read(log)
        assert [event.step for event in events if isinstance(event, Resumed)] == [end.step]  # type: ignore[union-attr]
        assert isinstance(events[-1], End) and events[-1].outcome == "finished"


@pytest.mark.slow
def test_killed_it_leaves_no_trainer_behind_and_they_save(study: Path, tmp_path: Path) -> None:
    study.write_text(study.read_text(encoding="utf-8").replace("steps = 12", "steps = 100000"), encoding="utf-8")
    out, scratch = tmp_path / "out", tmp_path / "scratch"
    scratch.mkdir()
    command = [sys.executable, "-m", "atoll", "compare", str(study), "--out", str(out), "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, env=os.environ | {"TMPDIR": str(scratch)})
    logs = [out / name / "metrics.jsonl" for name in ("one", "other")]
    deadline = time.monotonic() + 120
    while not all(log.exists() and b'"step"' in log.read_bytes() for log in logs):
        assert process.poll() is None and time.monotonic() < deadline
        time.sleep(0.1)
    assert len(with_mark(str(scratch))) == 2
    process.kill()
    process.wait()
    left = not gone(str(scratch), within_s=100)
    for pid in with_mark(str(scratch)):
        os.kill(pid, signal.SIGKILL)
    assert not left, "trainers were left behind"
    ends = [read(log)[-1] for log in logs]
    assert all(isinstance(end, End) and end.outcome == "interrupted" and end.step < 100000 for end in ends)

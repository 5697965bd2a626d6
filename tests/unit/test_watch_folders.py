"""Folders of a run are followed while they grow, are cut, are damaged or come later."""

import os
import time
from pathlib import Path

import pytest

from atoll.errors import ConfigError
from atoll.runs.events import End, Event, Jsonl, RoundApplied, Step
from atoll.watch import folders
from atoll.watch.compose import compose
from atoll.watch.folders import Folders
from atoll.watch.live_run import LiveRun, read_run
from atoll.watch.sections import Sections
from made_up_runs import MadeUpRun, save, save_workers

VOYAGE = MadeUpRun()


def look(source: Folders, run: LiveRun) -> Sections:
    """The sections after as many polls as a search for folders takes."""
    for _ in range(folders._RESCAN):
        run.take(source.poll())
    return compose(run, source.share, 0.0)


def append(folder: Path, events: list[Event]) -> None:
    file = folder / "metrics.jsonl"
    sink = Jsonl(file, file.stat().st_size)
    for event in events:
        sink.write(event)
    sink.close()


def test_a_run_is_followed_from_before_its_first_event(tmp_path: Path) -> None:
    folder = tmp_path / "far"
    folder.mkdir()
    source = Folders([folder])
    run = LiveRun(source.about())
    first = look(source, run)
    assert (first["run"]["state"], first["run"]["name"]) == ("waiting to begin", "far")
    logs = VOYAGE.events()
    save(folder / "worker-1", logs[1][:10])
    assert [lane["worker"] for lane in look(source, run)["lanes"]["workers"]] == [1]
    save(folder / "worker-0", logs[0])
    append(folder / "worker-1", logs[1][10:])
    found = look(source, run)
    assert [lane["worker"] for lane in found["lanes"]["workers"]] == [0, 1]
    assert found["run"]["state"] == "finished"
    assert ["sync.workers", "3"] in found["settings"] or run.about != source.about()
    assert source.about().settings["sync"] == {"workers": 3}


@pytest.mark.parametrize("given", ["run", "workers", "both"])
def test_folders_of_workers_may_be_given_one_by_one_and_count_once(tmp_path: Path, given: str) -> None:
    folder = save_workers(tmp_path / "far", VOYAGE.events())
    workers = [folder / f"worker-{n}" for n in range(3)]
    (tmp_path / "link").symlink_to(folder)
    both = [folder, *workers, tmp_path / "link"]
    source = Folders({"run": [folder], "workers": workers, "both": both}[given])
    assert len(source.poll()) == 3
    found = compose(read_run(Folders({"run": [folder], "workers": workers, "both": both}[given])), 1.0, time.time())
    assert [lane["worker"] for lane in found["lanes"]["workers"]] == [0, 1, 2]
    assert found["run"]["state"] == "finished"


def test_much_is_read_part_by_part(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folders, "MOST_EVENTS", 7)
    source = Folders([save(tmp_path / "far", VOYAGE.events()[0])])
    run, shares = LiveRun(source.about()), list[float]()
    while not shares or shares[-1] < 1:
        news = source.poll()
        assert len(news[0].events) <= 7
        run.take(news)
        shares.append(source.share)
    assert len(shares) > 3 and shares == sorted(shares)
    assert 0 < shares[0] < 0.5
    assert run.record() is not None and run.step == 80


def test_a_file_that_was_cut_and_rewritten_is_read_anew(tmp_path: Path) -> None:
    log = VOYAGE.events()[0]
    folder = save(tmp_path / "far", log)
    source = Folders([folder])
    run = LiveRun(source.about())
    assert look(source, run)["run"]["state"] == "finished"
    half = [e for e in log if getattr(e, "step", 0) <= 40 and not isinstance(e, End)]
    file = folder / "metrics.jsonl"
    file.write_bytes(b"".join(file.read_bytes().splitlines(keepends=True)[: len(half)]))
    found = look(source, run)
    assert (found["run"]["state"], found["run"]["step"]) == ("training", 40)
    assert found["loss"]["workers"]["0"]["step"][-1] == 40
    append(folder, log[len(half) :])
    assert look(source, run)["run"]["state"] == "finished"
    assert len(look(source, run)["outer"]["step"]) == len({e.step for e in log if isinstance(e, RoundApplied)})


def test_a_file_that_is_gone_leaves_what_was_known(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", VOYAGE.events()[0])
    source = Folders([folder])
    run = LiveRun(source.about())
    look(source, run)
    (folder / "metrics.jsonl").unlink()
    assert look(source, run)["run"]["step"] == 80


def test_a_damaged_line_is_told_and_what_came_before_is_shown(tmp_path: Path) -> None:
    folder = save_workers(tmp_path / "far", VOYAGE.events())
    file = folder / "worker-1" / "metrics.jsonl"
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join([*lines[:20], b'{"event":"step","step":"x"}\n', *lines[20:]]))
    source = Folders([folder])
    run = LiveRun(source.about())
    for _ in range(2):
        found = look(source, run)
        assert source.share == 1.0
        assert "line 21 is damaged" in found["run"]["state_words"]
        assert len(found["loss"]["workers"]["1"]["step"]) > 1
        assert found["loss"]["workers"]["0"]["step"][-1] == 80
    file.write_bytes(b"".join(lines))  # mended
    assert "damaged" not in look(source, run)["run"]["state_words"]


def test_a_torn_last_line_is_not_read_and_not_waited_for(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", VOYAGE.events()[0])
    file = folder / "metrics.jsonl"
    os.truncate(file, file.stat().st_size - 5)
    source = Folders([folder])
    found = look(source, LiveRun(source.about()))
    assert source.share == 1.0
    assert found["run"]["state"] != "reading" and found["run"]["step"] == 80


def test_a_run_file_that_is_damaged_costs_the_settings_alone(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", VOYAGE.events()[0])
    (folder / "run.toml").write_text("name = [")
    found = compose(read_run(Folders([folder])), 1.0, time.time())
    assert (found["settings"], found["run"]["state"]) == ([], "finished")


def test_when_a_process_was_heard_is_the_time_of_its_file(tmp_path: Path) -> None:
    folder = save(tmp_path / "far", [e for e in VOYAGE.events()[0] if not isinstance(e, End)])
    os.utime(folder / "metrics.jsonl", (1000.0, 1000.0))
    source = Folders([folder])
    run = LiveRun(source.about())
    run.take(source.poll())
    assert compose(run, 1.0, 1001.0)["run"]["updated"] == 1000.0
    assert compose(run, 1.0, 1100.0)["run"]["state"] == "silent"
    assert any(isinstance(e, Step) for e in VOYAGE.events()[0])


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    save(tmp_path / "runs" / "one", VOYAGE.events()[0])
    save(tmp_path / "runs" / "two", VOYAGE.events()[0])
    save(tmp_path / "home" / "one", VOYAGE.events()[0])
    several, single = "is no run, but holds 2: give .*one or another", "is no run, but holds 1: give .*one$"
    problems = {"none": "does not exist", "file": "is a file", "runs": several, "home": single}
    for name, problem in problems.items():
        with pytest.raises(ConfigError, match=problem) as refused:
            Folders([tmp_path / name])
        assert refused.value.setting == "run" and refused.value.value == str(tmp_path / name)

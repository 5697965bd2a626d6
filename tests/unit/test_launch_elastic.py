"""`atoll launch` for runs whose workers come and go, and `atoll status`."""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from atoll.cli import main as cli
from atoll.cli.launch import LaunchOptions
from atoll.cli.launch_elastic import MOST_RESTARTS, _Output, is_elastic, serve_registry
from atoll.cli.processes import ProcessExit, ProcessSpec, supervise
from atoll.cli.status import lines, pace
from atoll.core.allreduce import Reduction
from atoll.core.codec import Codec
from atoll.link.base import Contribution, Member, RoundId
from atoll.link.net.event_loop import event_loop
from atoll.link.net.identity import Identity
from atoll.link.net.membership import Announcement
from atoll.link.net.registry import VIEW, Entry, Update, presence_key
from atoll.link.net.run_keys import throw_away
from atoll.link.net.view_record import encode_view
from atoll.link.net.views import View
from atoll.link.net.worker_status import WorkerStatus, ask
from atoll.runs.events import Joined, Lost, Step, read
from elastic_links import elastic_run
from kills import gone, with_mark

PATIENCE_S = 120.0
RUN = """
seed = 5
device = "cpu"
threads = 1
model = {{layers = 2, width = 16, heads = 1, head_width = 16, feedforward = 16, context = 16}}
data = {{source = '{folder}/texts', cache = '{folder}/tokens'}}
train = {{steps = 100_000, batch = 2, eval_every = 100_000, eval_tokens = 32, log_every = 1, save_every = 100}}
sync = {{workers = 2, period = 8, delay = 3, codec = "int8"}}
link = {{elastic = true, silent_s = 20.0}}
"""


def exits(name: str, status: int) -> ProcessExit:
    return ProcessExit(ProcessSpec(name, [], {}, Path("log")), status, "error: why", False)


# ---------------------------------------------------------------------- who is started again


def test_a_dead_worker_is_started_again_but_not_for_ever(capsys: pytest.CaptureFixture[str]) -> None:
    output = _Output(["worker 0", "worker 1"], restart=True)
    assert [output.again(exits("worker 1", -9)) for _ in range(MOST_RESTARTS + 2)] == [True] * MOST_RESTARTS + [
        False
    ] * 2
    output.end(exits("worker 1", -9))
    assert "worker 1 is gone (killed by signal 9): it is not started again" in capsys.readouterr().out
    assert output.again(exits("worker 0", 1))  # each has its own number
    output.end(exits("worker 0", 1))
    assert capsys.readouterr().out == "worker 0 is gone (why): it is started again\n"


@pytest.mark.parametrize("status", [2, 130])
def test_one_that_is_refused_or_was_stopped_is_not_started_again(status: int) -> None:
    assert not _Output(["worker 0"], restart=True).again(exits("worker 0", status))


def test_nobody_is_started_again_after_a_worker_has_finished(capsys: pytest.CaptureFixture[str]) -> None:
    output = _Output(["worker 0", "worker 1"], restart=True)
    assert output.again(exits("worker 1", 1))
    output.end(exits("worker 0", 0))
    assert not output.again(exits("worker 1", 1))
    output.end(exits("worker 1", 1))
    assert capsys.readouterr().out == "worker 1 is gone (why): the others have finished the run\n"


def test_without_the_option_no_worker_is_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    output = _Output(["worker 0"], restart=False)
    assert not output.again(exits("worker 0", -9))
    output.end(exits("worker 0", -9))
    assert capsys.readouterr().out == "worker 0 is gone (killed by signal 9): the others go on\n"


@pytest.mark.processes
def test_supervised_processes_are_started_again_and_the_others_go_on(tmp_path: Path) -> None:
    fails_once = (
        "import pathlib, sys; p = pathlib.Path(sys.argv[1]); there = p.exists(); p.touch(); sys.exit(not there)"
    )
    scripts = {"worker 0": "import time; time.sleep(1)", "worker 1": fails_once, "worker 2": "import sys; sys.exit(3)"}
    jobs = [
        ProcessSpec(name, [sys.executable, "-c", script, str(tmp_path / "mark")], os.environ, tmp_path / f"{name}.txt")
        for name, script in scripts.items()
    ]
    outcome = supervise(jobs, together=False, grace_s=0.0, again=lambda ended: ended.status == 1)
    ended = sorted((ended.job.name, ended.status) for ended in outcome.ended)
    assert ended == [("worker 0", 0), ("worker 1", 0), ("worker 1", 1), ("worker 2", 3)]
    assert outcome.failed is not None and outcome.failed.job.name == "worker 2"


def test_which_runs_are_elastic(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("[link]\nelastic = true\n")
    assert is_elastic(LaunchOptions(file=file))
    assert not is_elastic(LaunchOptions(file=file, changes=["link.elastic=false"]))
    file.write_text("")
    assert not is_elastic(LaunchOptions(file=file))
    assert is_elastic(LaunchOptions(file=file, changes=["link.elastic=true"]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (["--restart"], "--restart: is for workers that come and go"),
        (["--set", "link.elastic=true", "--link", "1Gbit/s"], "link.emulate: cannot be set with link.elastic"),
        (["--set", "link.elastic=true", "--set", "link.min_workers=3"], "link.min_workers: must be from 1 to"),
    ],
)
def test_options_that_cannot_be(tmp_path: Path, options: list[str], words: str) -> None:
    (tmp_path / "run.toml").write_text("sync.workers = 2\n")
    line = ["launch", str(tmp_path / "run.toml"), "--out", str(tmp_path / "runs"), *options]
    result = CliRunner().invoke(cli.app, line)
    assert result.exit_code == 2 and words in " ".join(result.output.split())
    assert not (tmp_path / "runs").exists()


# ---------------------------------------------------------------------- with real processes


def when(happens: Callable[[], object], launched: "subprocess.Popen[str]") -> None:
    until = time.monotonic() + PATIENCE_S
    while not happens():
        assert launched.poll() is None and time.monotonic() < until
        time.sleep(0.05)


@pytest.mark.processes
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_worker_that_dies_is_back_and_ctrl_c_stops_all(tmp_path: Path, ranks: int) -> None:
    (tmp_path / "texts").mkdir()
    for number in range(8):
        (tmp_path / "texts" / f"{number}.txt").write_text(f"{number} reef lagoon islet " * 20)
    (tmp_path / "run.toml").write_text(RUN.format(folder=tmp_path))
    places = [tmp_path / "runs" / "run" / f"worker-{worker}" for worker in range(2)]

    def has(worker: int, kind: type) -> bool:
        path = places[worker] / "metrics.jsonl"
        return path.exists() and any(isinstance(event, kind) for event in read(path))

    file = str(tmp_path / "run.toml")
    line = [sys.executable, "-m", "atoll", "launch", file, "--restart", "--ranks", str(ranks)]
    out = (tmp_path / "out.txt").open("w")
    with out, subprocess.Popen(line, cwd=tmp_path, stdout=out, stderr=subprocess.STDOUT, text=True) as launched:
        try:
            when(lambda: has(0, Step) and has(1, Step), launched)
            victims = with_mark(f"{file}\0--worker\0001\0")  # with torchrun, if it has several ranks
            assert len(victims) == (1 if ranks == 1 else 1 + ranks)
            for victim in sorted(victims):
                os.kill(victim, signal.SIGKILL)
            when(lambda: has(0, Lost) and has(0, Joined), launched)
            launched.send_signal(signal.SIGINT)
            assert launched.wait(PATIENCE_S) == 130
        finally:
            launched.kill()
    said = (tmp_path / "out.txt").read_text()
    assert "worker 1 is gone (killed by signal 9): it is started again" in said
    assert (
        f"stopped; continue with: atoll launch {file} --workers 2 {'--ranks 2 ' * (ranks - 1)}--restart --resume"
        in said
    )
    assert said.count("and saved; the others go on, and the same command comes back") == 2
    assert gone(file)


# ---------------------------------------------------------------------- status


def entries(view: View | None, **present: float) -> Update:
    held = {} if view is None else {VIEW: Entry(encode_view(view), 1)}
    for name, since in present.items():
        seat = int(name.removeprefix("w"))
        known = Announcement(life=seat + 10, addresses=[f"h{seat}:1"], since=since)
        held[presence_key(seat)] = Entry(known.model_dump_json().encode(), 2)
    return Update(2, held, True)


def test_the_status_of_a_run() -> None:
    view = View(7, {0: 10, 1: 11, 2: 12, 3: 1}, frozenset({2}))
    assert lines(entries(view, w0=900.0, w2=880.0, w3=999.0, w4=0.0), 1000.0) == [
        "view 7: 3 workers training",
        "worker 0: training, present for 1:40, at h0:1",
        "worker 1: training, not present",
        "worker 2: catching up, present for 2:00, at h2:1",
        "worker 3: started again, not yet a member, present for 0:01, at h3:1",
        "worker 4: not a member, present, at h4:1",
    ]
    assert lines(entries(None), 0.0) == ["no view yet: the run has not begun"]
    ended = lines(entries(view.ending()), 0.0)
    assert ended[0] == "view 8: the run is finished" and not any("training" in line for line in ended)


def test_how_fast_workers_are_is_told_below_them() -> None:
    before = WorkerStatus(step=10, sent_bytes=1_000, received_bytes=5_000_000, rounds=[])
    now = WorkerStatus(step=35, sent_bytes=500, received_bytes=9_000_000, rounds=[(32, 0), (33, 1), (34, 2), (35, 0)])
    rounds = "step 32, fragment 0; step 33, fragment 1; step 34, fragment 2 and 1 more"
    told = f"step 35, 12.5 steps/s, 0 B/s out and 2.00 MB/s in, rounds on their way: {rounds}"
    assert pace(before, now, 2.0) == told
    assert pace(now, now.model_copy(update={"rounds": []}), 2.0).endswith(", no round on its way")
    view = View(7, {0: 10, 1: 11})
    shown = lines(entries(view, w0=900.0, w1=900.0), 1000.0, {1: told})
    assert [line[:10] for line in shown] == ["view 7: 2 ", "worker 0: ", "worker 1: ", "  step 35,"]


@pytest.mark.processes
def test_an_observer_is_told_how_far_workers_are_and_a_stranger_is_not(tmp_path: Path) -> None:
    with elastic_run(2, tmp_path) as run:
        links = run.links()
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda link: link.join({}, 1.0), links))
        round_id, sent = RoundId(4, 0), Contribution(Member(0, 1.0, 0, 0), torch.zeros(4, dtype=torch.uint8))
        links[0].open(round_id, sent, Reduction(Codec("fp32"), 1))
        links[0].advanced(4, 0, lambda fragment: pytest.fail("nobody joins"))
        members = [link._member for link in links]
        addresses = {seat: members[0].membership.present[seat].addresses for seat in (0, 1) if members[0] is not None}

        def until(happens: Callable[[dict[int, WorkerStatus]], bool], security: Identity) -> dict[int, WorkerStatus]:
            end = time.monotonic() + 30
            while not happens(told := event_loop().run(ask(addresses, security))):
                assert time.monotonic() < end, told
            return told

        told = until(lambda told: len(told) == 2 and told[1].received_bytes > 0, run.keys.observer)
        assert told[0].rounds == [(4, 0)] and told[0].step == 4 and told[0].sent_bytes > 0
        assert told[1].rounds == [] and told[1].step == 0
        assert event_loop().run(ask(addresses, throw_away(2).observer)) == {}
        assert event_loop().run(ask(addresses, run.keys.registry)) == {}  # of the run, but none of its business
        assert event_loop().run(ask(addresses, "none")) == {}
        for link in links:
            link.close("the test has ended")


def test_status_asks_a_registry_with_the_keys_of_an_observer() -> None:
    with serve_registry(1, None) as (address, keys):
        result = CliRunner().invoke(cli.app, ["status", address, "--keys", str(keys / "observer")])
        assert (result.exit_code, result.output) == (0, "no view yet: the run has not begun\n")


@pytest.mark.parametrize(
    "options", [[], ["--security", "none", "--keys", "k"], ["--security", "x"], ["--keys", "/nowhere"]]
)
def test_status_refuses_what_does_not_fit(options: list[str]) -> None:
    result = CliRunner().invoke(cli.app, ["status", "127.0.0.1:1", *options])
    assert result.exit_code == 2


def test_a_registry_that_does_not_answer_is_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("atoll.cli.status.WAIT_S", 0.3)
    result = CliRunner().invoke(cli.app, ["status", "127.0.0.1:1", "--security", "none"])
    assert result.exit_code == 1 and "does not answer within 0.3 s" in " ".join(result.output.split())

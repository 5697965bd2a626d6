"""`atoll launch`, with real processes: whole lines, one culprit, and nobody left behind however it ends."""

import json
import os
import pty
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import ANY

import pytest
from typer.testing import CliRunner

from atoll._util.signals import EXIT_WITH_PARENT
from atoll.cli import main as cli
from atoll.cli.launch import (
    TORCHRUN_AFTERMATH,
    LaunchOptions,
    by_torchrun,
    command,
    environment,
    free_ports,
    resume_command,
)
from atoll.cli.processes import ProcessExit, ProcessObserver, ProcessSpec, supervise
from atoll.settings.config import RunConfig, load, parse
from kills import gone, with_mark

pytestmark = pytest.mark.processes

SITES = Path(__file__).resolve().parents[2] / "examples" / "sites"

# The supervisor has a process of its own here, so that it can be interrupted and killed.
SUPERVISOR = """
import json, os, sys
from pathlib import Path
from atoll.cli.processes import ProcessSpec, supervise
folder, settings, *scripts = sys.argv[1:]
jobs = [
    ProcessSpec(f"worker {k}", [sys.executable, "-c", script], os.environ, Path(folder) / f"worker-{k}" / "log.txt")
    for k, script in enumerate(scripts)
]
out = supervise(jobs, **json.loads(settings))
blamed = out.failed and [out.failed.job.name, out.failed.status, out.failed.said]
print("OUTCOME", json.dumps([blamed, out.interrupted, {e.job.name: e.status for e in out.ended}]))
"""

WAITS = """
import signal, sys, time
from pathlib import Path
def saying(words, code):
    def act(*_):
        time.sleep(0.3)
        print(words, flush=True)
        if code is not None:
            sys.exit(code)
    return act
def forever():
    print("ready", flush=True)
    while True:
        time.sleep(0.01)
"""
SAVES = WAITS + "signal.signal(signal.SIGINT, saying('got INT', None))\nprint('ready', flush=True)\ntime.sleep(1)\n"
SAVES += "print('saved', flush=True)\nsys.exit(130)"
SAVES_ON_TERM = WAITS + "signal.signal(signal.SIGTERM, saying('saved on TERM', 130))\nforever()"
DEAF_TO_INT = WAITS + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nforever()"
FOLLOWS = "from atoll._util.signals import exit_with_parent\nexit_with_parent(patience_s=1)\n"
DEAF = WAITS + "signal.signal(signal.SIGINT, signal.SIG_IGN)\nsignal.signal(signal.SIGTERM, signal.SIG_IGN)\nforever()"


class Supervised:
    """A supervisor at work on stand-ins for workers, and what it has printed so far."""

    def __init__(self, folder: Path, scripts: list[str], settings: dict[str, float]) -> None:
        self.folder, self.output = folder, folder / "output"
        folder.mkdir(parents=True, exist_ok=True)
        with self.output.open("wb") as output:
            self.process = subprocess.Popen(
                [sys.executable, "-c", SUPERVISOR, str(folder), json.dumps(settings), *scripts],
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def wait_for(self, text: str, times: int = 1) -> None:
        """Until it has been printed so often."""
        deadline = time.monotonic() + 30
        while self.output.read_text().count(text) < times:
            assert self.process.poll() is None and time.monotonic() < deadline, self.output.read_text()
            time.sleep(0.02)

    def end(self) -> tuple[Any, bool, dict[str, int]]:
        """Who is blamed, whether it was interrupted, and the status of each."""
        self.process.wait(timeout=60)
        text = self.output.read_text()
        assert "OUTCOME" in text, text
        blamed, interrupted, ended = json.loads(text.rpartition("OUTCOME ")[2])
        return blamed, interrupted, ended


Start = Callable[..., Supervised]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    started: list[Supervised] = []

    def begin(*scripts: str, **settings: float) -> Supervised:
        started.append(Supervised(tmp_path, [marked(script, tmp_path) for script in scripts], settings))
        return started[-1]

    yield begin
    for supervised in started:
        supervised.process.kill()
        supervised.process.wait()
    left = not gone(str(tmp_path))
    for pid in with_mark(str(tmp_path)):
        os.kill(pid, signal.SIGKILL)
    assert not left, "workers were left behind"


def marked(script: str, folder: Path) -> str:
    """With the folder in its command line, to be found by."""
    return f"{script}\n# {folder}"


# ---------------------------------------------------------------------- lines and logs

CHATTER = """
import sys, time
for number in range(300):
    sys.stdout.write(f"line {number} of")  # in two pieces, which others' lines could come between
    sys.stdout.flush()
    sys.stdout.write(f" %s\\n")
    sys.stdout.flush()
    if number %% 100 == 50:
        print("careful", file=sys.stderr, flush=True)
        time.sleep(0.02)
sys.stdout.write("no newline at the end")
"""


def test_every_line_is_shown_whole_after_its_worker_and_is_in_its_log(start: Start) -> None:
    supervised = start(*(CHATTER % name for name in ("a", "b", "c")))
    assert supervised.end() == (None, False, {"worker 0": 0, "worker 1": 0, "worker 2": 0})
    shown: dict[str, list[str]] = {}
    for line in supervised.output.read_text().splitlines()[:-1]:
        name, bar, text = line.partition(" | ")
        assert bar, line
        shown.setdefault(name, []).append(text)
    for worker, name in enumerate("abc"):
        said = [f"line {number} of {name}" for number in range(300)]
        for at in (51, 152, 253):
            said.insert(at, "careful")
        said.append("no newline at the end")
        assert shown[f"worker {worker}"] == said
        log = (supervised.folder / f"worker-{worker}" / "log.txt").read_text()
        assert log.endswith("\n".join(said)) and log.startswith("--- 20")


def test_a_log_goes_on_after_what_is_there_and_only_the_new_is_shown(start: Start, tmp_path: Path) -> None:
    for words in ("first", "second"):
        supervised = start(f"print('the {words} time', end='')")
        supervised.end()
    assert "worker 0 | the second time" in supervised.output.read_text()
    assert "the first time\n" not in supervised.output.read_text()
    log = (tmp_path / "worker-0" / "log.txt").read_text()
    assert re.fullmatch(r"--- 20.*\nthe first time\n--- 20.*\nthe second time", log, re.DOTALL), log


def test_odd_bytes_and_progress_bars_are_shown_as_far_as_they_go(start: Start) -> None:
    script = r"import os; os.write(1, b'10 %\r50 %\r100 %\n\xff\xfe caf\xc3\xa9\n\n   \n')"
    supervised = start(script)
    assert supervised.end()[0] is None
    lines = supervised.output.read_text().splitlines()
    assert lines[0] == "worker 0 | 100 %" and lines[1].endswith(" café") and len(lines) == 5


def test_escape_sequences_are_shown_and_not_obeyed(start: Start, tmp_path: Path) -> None:
    said = r"b'\x1b[2J\x07 caf\xc3\xa9 \xe2\x80\xae\nerror: \x1b]0;x\x07\n'"
    supervised = start(f"import os; os.write(1, {said}); raise SystemExit(1)")
    assert supervised.end()[0][2] == "error: \x1b]0;x\x07"
    first, second, _ = supervised.output.read_text(encoding="utf-8").splitlines()
    assert first == r"worker 0 | \x1b[2J\x07 café \u202e" and second == r"worker 0 | error: \x1b]0;x\x07"
    assert b"\x1b[2J\x07" in (tmp_path / "worker-0" / "log.txt").read_bytes()  # the log keeps what was said


def test_colour_only_on_a_terminal(start: Start, tmp_path: Path) -> None:
    start("print('here')").end()
    assert "\x1b" not in (tmp_path / "output").read_text()
    leader, follower = pty.openpty()
    line = [sys.executable, "-c", SUPERVISOR, str(tmp_path), "{}", "print('here [red]')"]
    plain = {key: value for key, value in os.environ.items() if key not in ("NO_COLOR", "COLUMNS")}
    subprocess.run(line, stdout=follower, check=True, env=plain | {"TERM": "xterm-256color"}, timeout=60)
    os.close(follower)
    shown = os.read(leader, 10_000).decode()
    os.close(leader)
    assert re.search(r"\x1b\[36mworker 0 \| \x1b\[0mhere \[red\]", shown), shown


# ---------------------------------------------------------------------- failures


def fails(words: str, code: int = 1, after_s: float = 0) -> str:
    return f"import sys, time; time.sleep({after_s}); print({words!r}, file=sys.stderr); sys.exit({code})"


def test_the_first_to_fail_is_named_with_its_last_line(start: Start) -> None:
    late = fails("error: something else", after_s=1)
    blamed, interrupted, ended = start(late, "print('hm')\n" + fails("the disk is full", code=3), late).end()
    assert blamed == ["worker 1", 3, "the disk is full"] and not interrupted
    assert ended == {"worker 0": 1, "worker 1": 3, "worker 2": 1}


def test_a_peer_that_ends_sooner_than_the_one_it_lost_is_not_blamed(start: Start) -> None:
    slow = fails("error: the disk is full") + "\n"
    slow = slow.replace("sys.exit(1)", "sys.stderr.flush(); time.sleep(0.6); print('bye'); sys.exit(1)")
    blamed, _, ended = start(fails("error: step 30: worker 2 is gone"), fails("error: worker 2 is gone"), slow).end()
    assert blamed == ["worker 2", 1, "error: the disk is full"]  # its error, not its farewell
    assert list(ended)[-1] == "worker 2"


def test_when_all_blame_each_other_it_is_the_first(start: Start) -> None:
    blamed, *_ = start(fails("error: worker 1 is gone", after_s=0.5), fails("error: worker 0 sends nonsense")).end()
    assert blamed[0] == "worker 1"


def test_a_killed_worker_is_blamed(start: Start) -> None:
    dies = "import os, time; print('alive', flush=True); time.sleep(0.3); os.kill(os.getpid(), 9)"
    blamed, _, _ = start(fails("error: a peer is gone", after_s=0.9), dies).end()
    assert blamed == ["worker 1", -signal.SIGKILL, "alive"]


def test_those_that_do_not_notice_a_failure_are_asked_then_killed(start: Start) -> None:
    supervised = start(SAVES_ON_TERM, DEAF, fails("error: no", after_s=1), grace_s=0.5, patience_s=1)
    blamed, interrupted, ended = supervised.end()
    assert blamed == ["worker 2", 1, "error: no"] and not interrupted
    assert ended == {"worker 0": 130, "worker 1": -signal.SIGKILL, "worker 2": 1}
    assert "worker 0 | saved on TERM" in supervised.output.read_text()


def test_a_worker_that_cannot_be_started_takes_the_others_along(tmp_path: Path) -> None:
    (tmp_path / "worker-1").write_text("in the way of its folder")
    scripts = [marked(DEAF_TO_INT, tmp_path), ""]
    line = [sys.executable, "-c", SUPERVISOR, str(tmp_path), "{}", *scripts]
    done = subprocess.run(line, capture_output=True, text=True, timeout=60)
    assert done.returncode == 1 and "FileExistsError" in done.stderr
    assert not with_mark(str(tmp_path))


def test_when_nobody_reads_any_more_all_are_stopped(tmp_path: Path) -> None:
    talks = marked(WAITS + "while True:\n    print('x', flush=True)\n    time.sleep(0.01)", tmp_path)
    line = [sys.executable, "-c", SUPERVISOR, str(tmp_path), "{}", talks, marked(SAVES_ON_TERM, tmp_path)]
    buffered = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    with subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env=buffered) as process:
        assert process.stdout and process.stdout.readline()
        until = time.monotonic() + 30
        while "\nready\n" not in (tmp_path / "worker-1" / "log.txt").read_text() and time.monotonic() < until:
            time.sleep(0.02)
        process.stdout.close()
        assert process.wait(timeout=60) == 1
    assert not with_mark(str(tmp_path))  # it has waited for them
    assert (tmp_path / "worker-1" / "log.txt").read_text().endswith("saved on TERM\n")


# ---------------------------------------------------------------------- several at a time, each for itself


class Heard(ProcessObserver):
    """An audience that keeps what it sees."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def show(self, name: str, line: str) -> None:
        self.order.append(f"{name}: {line}")

    def say(self, line: str) -> None:
        self.order.append(line)

    def look(self, name: str) -> None:
        if f"{name}?" not in self.order:
            self.order.append(f"{name}?")

    def end(self, ended: ProcessExit) -> None:
        self.order.append(f"{ended.job.name} ended {ended.status}{' asked' if ended.asked else ''}")


def test_those_that_are_no_team_run_one_after_another_whatever_becomes_of_each(tmp_path: Path) -> None:
    scripts = {"a": "print(1); raise SystemExit(3)", "b": "print(2)", "c": "import os; os.kill(os.getpid(), 9)"}
    jobs = [
        ProcessSpec(name, [sys.executable, "-c", text], os.environ, tmp_path / name) for name, text in scripts.items()
    ]
    heard = Heard()
    outcome = supervise(jobs, audience=heard, at_once=1, together=False, grace_s=0)
    assert [one.status for one in outcome.ended] == [3, 0, -signal.SIGKILL] and not outcome.interrupted
    alike = [line for line in heard.order if not line.endswith("?")]
    assert alike == ["a: 1", "a ended 3", "b: 2", "b ended 0", f"c ended {-signal.SIGKILL}"]
    assert heard.order.index("a ended 3") < heard.order.index("b?") < heard.order.index("b ended 0")


def test_interrupted_it_starts_none_of_those_that_wait(tmp_path: Path) -> None:
    mark = tmp_path / "started"
    first = "import os, signal, time; os.kill(os.getppid(), signal.SIGINT); time.sleep(60)"
    second = f"open({str(mark)!r}, 'w')"
    jobs = [
        ProcessSpec(text[:9], [sys.executable, "-c", text], os.environ, tmp_path / text[:4]) for text in (first, second)
    ]
    heard = Heard()
    outcome = supervise(jobs, audience=heard, at_once=1, together=False)
    assert outcome.interrupted and outcome.failed is None and not mark.exists()
    assert [(one.status, one.asked) for one in outcome.ended] == [(-signal.SIGINT, True)]


# ---------------------------------------------------------------------- stopping


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_reaches_each_worker_once_and_waits_until_it_has_saved(start: Start, number: signal.Signals) -> None:
    supervised = start(SAVES, SAVES)
    supervised.wait_for("| ready", times=2)
    os.killpg(supervised.process.pid, number)  # as a terminal does: to the whole group
    blamed, interrupted, ended = supervised.end()
    assert (blamed, interrupted, ended) == (None, True, {"worker 0": 130, "worker 1": 130})
    text = supervised.output.read_text()
    assert text.count("| got INT") == 2 and text.count("| saved") == 2 and text.count("stopping: all save first") == 1


def test_a_second_signal_kills_at_once_also_what_workers_have_started(start: Start, tmp_path: Path) -> None:
    # As torchrun does it: the ranks are in sessions of their own, and outlive it.
    rank = marked("import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)", tmp_path)
    agent = "import subprocess, sys\n"
    agent += f"subprocess.Popen([sys.executable, '-c', {rank!r}], start_new_session=True)\n" + DEAF_TO_INT
    supervised = start(agent, DEAF)
    supervised.wait_for("| ready", times=2)
    supervised.process.send_signal(signal.SIGINT)
    supervised.wait_for("stopping: all save first")
    time.sleep(0.5)
    assert supervised.process.poll() is None  # it waits for them
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.end() == (None, True, {"worker 0": -signal.SIGKILL, "worker 1": -signal.SIGKILL})
    assert gone(str(tmp_path), within_s=5)


def test_one_that_ignores_the_signal_is_killed_in_the_end(start: Start) -> None:
    supervised = start(SAVES, DEAF, patience_s=2)
    supervised.wait_for("| ready", times=2)
    supervised.process.send_signal(signal.SIGINT)
    assert supervised.end() == (None, True, {"worker 0": 130, "worker 1": -signal.SIGKILL})


def test_started_in_the_background_of_a_script_workers_still_hear_ctrl_c(tmp_path: Path) -> None:
    signal_of_script = f'exec {shlex.quote(sys.executable)} -c "$0" {tmp_path} \'{{}}\' "$1"'
    waits = "print('ready', flush=True)\nimport time\ntime.sleep(60)"  # has no handler of its own
    shell = ["bash", "-c", f"trap '' INT; {signal_of_script}", SUPERVISOR, waits]
    process = subprocess.Popen(shell, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert process.stdout and process.stdout.readline() == "worker 0 | ready\n"
    process.send_signal(signal.SIGTERM)
    told, _ = process.communicate(timeout=60)
    assert '{"worker 0": -2}' in told


def test_killed_itself_it_leaves_nobody_behind_and_workers_save(start: Start, tmp_path: Path) -> None:
    supervised = start(FOLLOWS + SAVES_ON_TERM, FOLLOWS + WAITS + "forever()", FOLLOWS + DEAF)
    supervised.wait_for("| ready", times=3)
    assert len(with_mark(str(tmp_path))) == 4
    supervised.process.kill()
    supervised.process.wait()
    assert gone(str(tmp_path))
    assert (tmp_path / "worker-0" / "log.txt").read_text().endswith("ready\nsaved on TERM\n")


def test_who_has_no_supervisor_follows_nobody() -> None:
    """Neither by a pipe that ends, nor, said to be supervised, by a standard input that is none."""
    script = "import os, time; from atoll._util.signals import exit_with_parent; exit_with_parent(); time.sleep(0.2); "
    script += "print(os.environ.get(%r))"
    for environment_, stdin in (({}, subprocess.PIPE), ({EXIT_WITH_PARENT: "1"}, subprocess.DEVNULL)):
        line = [sys.executable, "-c", script % EXIT_WITH_PARENT]
        with subprocess.Popen(line, stdin=stdin, stdout=subprocess.PIPE, env=os.environ | environment_) as process:
            told, _ = process.communicate(timeout=60)
            assert (process.returncode, told) == (0, b"None\n")


RANK = """
import os, signal, sys, time
got = []
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda number, _: got.append(number))
def say(words):  # at once: two ranks share the pipe, and print() may write word by word
    os.write(1, f"rank {os.environ['RANK']} {words}\\n".encode())
say("ready")
while not got:
    time.sleep(0.01)
time.sleep(0.5)
say("saved after " + " ".join(str(int(number)) for number in got))
sys.exit(130)
"""


def execute(command: list[str]) -> str:
    """A script that becomes this command."""
    return f"import os; os.execv({command[0]!r}, {command!r})"


@pytest.mark.slow
@pytest.mark.parametrize(("number", "heard"), [(signal.SIGINT, signal.SIGINT), (signal.SIGKILL, signal.SIGTERM)])
def test_the_ranks_of_torchrun_save_and_go_too(start: Start, tmp_path: Path, number: int, heard: int) -> None:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    supervised = start(execute([*by_torchrun(2, free_ports(1)[0], tmp_path / "logs"), sys.executable, str(script)]))
    supervised.wait_for(" ready", times=2)
    supervised.process.send_signal(number)
    supervised.process.wait(timeout=60)
    assert gone(str(tmp_path))
    log = (tmp_path / "worker-0" / "log.txt").read_text()
    assert all(f"rank {rank} saved after {heard}\n" in log for rank in range(2)), log


def test_one_that_stands_still_is_woken_to_hear_that_it_is_to_end(start: Start) -> None:
    supervised = start(WAITS + "forever()", "raise SystemExit(3)", grace_s=3.0, patience_s=60)
    supervised.wait_for("ready")
    pids: list[int] = []
    while len(pids) != 1:  # on a busy machine, the other one may still be there
        pids = [pid for pid in with_mark(str(supervised.folder)) if _is_child(pid, supervised.process.pid)]
    (pid,) = pids
    os.kill(pid, signal.SIGSTOP)
    began = time.monotonic()
    blamed, _, ended = supervised.end()
    assert blamed[0] == "worker 1" and ended["worker 0"] == -signal.SIGTERM
    assert time.monotonic() - began < 30, "its patience would be 60 s"


def _is_child(pid: int, parent: int) -> bool:
    with suppress(FileNotFoundError, ProcessLookupError):
        return f"PPid:\t{parent}\n" in Path(f"/proc/{pid}/status").read_text()
    return False


def test_signals_that_come_together_are_one(start: Start) -> None:
    """Some programs pass on a Ctrl-C that their children have had from the terminal, too."""
    supervised = start(SAVES, SAVES)
    supervised.wait_for("ready", 2)
    for _ in range(2):
        supervised.process.send_signal(signal.SIGINT)
    assert supervised.end() == (None, True, {"worker 0": 130, "worker 1": 130})


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["step 4", "W1116 x torch/distributed/elastic/ gone", "error: rank 0 is lost"], "error: rank 0 is lost"),
        (["error: no room", "W1116 x torch/distributed/elastic/ gone", "error: rank 0 is lost"], "error: no room"),
        (["step 4", "W1116 x torch/distributed/elastic/ gone", "anything"], "step 4"),
    ],
)
def test_a_reason_may_come_after_torchrun_has_begun_to_tell(tmp_path: Path, lines: list[str], said: str) -> None:
    script = "\n".join(f"print({line!r})" for line in lines) + "\nraise SystemExit(1)"
    job = ProcessSpec("worker 0", [sys.executable, "-c", script], os.environ, tmp_path / "log.txt", TORCHRUN_AFTERMATH)
    outcome = supervise([job])
    assert outcome.failed is not None and outcome.failed.said == said


# ---------------------------------------------------------------------- command lines

OPTIONS = LaunchOptions(file=Path("run.toml"))


def test_the_command_of_a_worker() -> None:
    plain = command(OPTIONS, Path("runs/run"), 1, 4, ("127.0.0.1:5000", Path("keys")))
    assert plain[0] == sys.executable
    assert " ".join(plain[1:]) == (
        "-m atoll train run.toml --worker 1 --address 127.0.0.1:5000 --keys keys/worker-1"
        " --set sync.workers=4 --set link.security=keys --view lines"
    )
    every = replace(
        OPTIONS,
        changes=["train.steps=5", "name=a b"],
        resume=True,
        out=Path("some where"),
        name="x",
        link="1Gbit/s,50ms",
        ranks=2,
    )
    assert command(every, Path("runs/run"), 0, 2, ("127.0.0.1:5000", Path("keys")), 6000)[1:] == [
        *("-c", ANY, "--nproc-per-node", "2", "--master-port", "6000"),
        *("--log-dir", "runs/run/worker-0/torchrun", "--no-python"),
        *(sys.executable, "-m", "atoll", "train", "run.toml", "--worker", "0", "--address", "127.0.0.1:5000"),
        *("--keys", "keys/worker-0", "--set", "train.steps=5", "--set", "name=a b"),
        *("--out", "some where", "--name", "x", "--link", "1Gbit/s,50ms"),
        *("--set", "sync.workers=2", "--set", "link.security=keys", "--resume", "--view", "lines"),
    ]
    assert " ".join(resume_command(every, parse("sync.workers = 2"))) == (
        "atoll launch run.toml --workers 2 --set train.steps=5 --set name=a b "
        "--out some where --name x --link 1Gbit/s,50ms --ranks 2 --resume"
    )


def test_workers_share_the_cores_unless_the_run_says_how_many_threads() -> None:
    def threads(text: str, cores: int, ranks: int = 1) -> str:
        return environment(parse(text), 0, ranks, {"OMP_NUM_THREADS": "given"}, cores)["OMP_NUM_THREADS"]

    assert threads("sync.workers = 3", cores=8) == "2"
    assert threads("sync.workers = 3", cores=2) == "1"
    assert threads("sync.workers = 2", cores=16, ranks=4) == "2"
    assert threads("threads = 5\nsync.workers = 3", cores=8) == "given"


def test_workers_share_the_gpus() -> None:
    def dealt(visible: str, workers: int, ranks: int = 1, device: str = "auto") -> list[str]:
        config = parse(f'device = "{device}"\nsync.workers = {workers}')
        base = {"CUDA_VISIBLE_DEVICES": visible}
        return [environment(config, worker, ranks, base)["CUDA_VISIBLE_DEVICES"] for worker in range(workers)]

    assert dealt("0,1,2,3", 2) == ["0", "1"]
    assert dealt("4,5", 3) == ["4", "5", "4"]
    assert dealt("0,1,2,3", 2, ranks=2) == ["0,1", "2,3"]
    assert dealt("0", 2, ranks=2) == ["0", "0"] and dealt("", 2) == ["", ""]  # the worker says what is missing
    assert dealt("0,1", 2, device="cpu") == dealt("0,1", 2, device="cuda:1") == ["0,1", "0,1"]


def test_ranks_write_whole_lines_and_have_time_to_save() -> None:
    base = {"PYTHONUNBUFFERED": "1"}
    assert environment(RunConfig(), 0, 1, base)["PYTHONUNBUFFERED"] == "1"
    several = environment(RunConfig(), 0, 2, base)
    assert several["PYTHONUNBUFFERED"] == "" and int(several["TORCH_ELASTIC_SHUTDOWN_TIMEOUT"]) >= 300


def test_the_launcher_is_light() -> None:
    script = "import sys, atoll.cli.launch; assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


def test_free_ports_are_all_different() -> None:
    assert len(set(free_ports(20))) == 20


# ---------------------------------------------------------------------- the command, before anything is started


def refused(*arguments: str | Path, code: int = 2) -> str:
    result = CliRunner().invoke(cli.app, ["launch", *map(str, arguments)])
    assert result.exit_code == code and "Traceback" not in result.stderr, result.output
    assert result.stdout == ""
    return result.stderr


def test_a_wrong_run_file_is_one_error_and_nothing_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("run.toml").write_text("[sync]\nperod = 3\n")
    text = refused("run.toml", "--workers", "4")
    assert text.count("sync.perod: unknown key; did you mean sync.period?") == text.count("error: ") == 1
    Path("run.toml").write_text("")
    assert "sync.workers" in refused("run.toml", "--workers", "5000")
    assert "use --set KEY=VALUE" in refused("run.toml", "--set", "sync.period")
    assert "name: must be letters" in refused("run.toml", "--name", "a/b")
    assert "'fast' is not a rate" in refused("run.toml", "--link", "fast")
    assert "faults.drop: " in refused("run.toml", "--set", "faults.drop=0.5")  # is for workers of one process
    assert '"none"' in refused("run.toml", "--workers", "1", "--set", "sync.method=none")
    assert "is a folder, not a run file" in refused(tmp_path)
    assert "no such file; `atoll init" in refused("absent.toml")
    assert [path.name for path in tmp_path.iterdir()] == ["run.toml"]


def test_options_that_cannot_be(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text("")
    for wrong in (["--wrokers", "2"], ["--workers", "0"], ["--ranks", "0"], ["--port", "70000"], ["--worker", "1"]):
        assert wrong[0] in refused(file, *wrong)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        text = refused(file, "--port", port, "--out", tmp_path / "runs")
    assert text.startswith(f"error: --port {port}: cannot be used on 127.0.0.1: ") and text.count("\n") == 1
    assert not (tmp_path / "runs").exists()


def test_a_run_that_has_begun_is_only_resumed(tmp_path: Path) -> None:
    file, folder = tmp_path / "run.toml", tmp_path / "runs" / "run" / "worker-1"
    file.write_text("")
    folder.mkdir(parents=True)
    (folder / "run.toml").write_text("")
    text = refused(file, "--out", tmp_path / "runs")
    assert text.startswith(f"error: {folder} holds a run already: continue it with --resume") and text.count("\n") == 1


# ---------------------------------------------------------------------- the command, with stand-ins for workers

LAUNCH = """
import sys
from atoll.cli import main as cli
from atoll.cli import launch
script = sys.argv.pop(1)
launch.command = lambda options, place, worker, *_: [sys.executable, "-c", script, str(worker)]
cli.main()
"""


def launching(folder: Path, script: str, *arguments: str) -> "subprocess.Popen[str]":
    (folder / "run.toml").write_text("")
    line = [sys.executable, "-c", LAUNCH, script, "launch", "run.toml", *arguments]
    return subprocess.Popen(
        line, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )


def test_launch_ends_well(tmp_path: Path) -> None:
    told, errors = launching(tmp_path, "import sys; print('I am', sys.argv[1])", "--workers", "3").communicate()
    assert "3 workers, worker 0 at 127.0.0.1:" in told and told.endswith(
        "all workers are done; the run is in runs/run\n"
    )
    assert all(f"worker {k} | I am {k}\n" in told for k in range(3)) and errors == ""
    assert sorted(path.name for path in tmp_path.glob("runs/run/worker-*/log.txt")) == ["log.txt"] * 3


@pytest.mark.parametrize(("worker_code", "code"), [(1, 1), (2, 2), (130, 1), (7, 1)])
def test_launch_names_the_worker_that_failed(tmp_path: Path, worker_code: int, code: int) -> None:
    script = f"import sys\nif sys.argv[1] == '1': print('error: oh [no]'); sys.exit({worker_code})"
    process = launching(tmp_path, script)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == code
    log = "runs/run/worker-1/log.txt"
    told, _, advice = errors.partition("\n")
    assert told == f"error: worker 1 failed first (exit status {worker_code}): oh [no]; its output is in {log}"
    resumed = "Once it is fixed, continue with: atoll launch run.toml --workers 2 --resume\n"
    assert advice == ("" if worker_code == 2 else resumed)  # wrong settings would be refused again


def test_launch_that_nobody_reads_any_more_stops_all_and_says_how_to_go_on(tmp_path: Path) -> None:
    process = launching(tmp_path, WAITS + "while True:\n    print('x')\n    time.sleep(0.01)")
    assert process.stdout and process.stderr and process.stdout.readline()
    process.stdout.close()
    errors = process.stderr.read()
    process.stderr.close()
    assert process.wait(timeout=60) == 1
    assert errors.startswith("error: standard output was closed") and errors.count("\n") == 1
    assert errors.endswith("continue with: atoll launch run.toml --workers 2 --resume\n")


def test_launch_tells_what_killed_a_worker(tmp_path: Path) -> None:
    script = "import os, sys\nif sys.argv[1] == '1': print('busy', flush=True); os.kill(os.getpid(), 11)"
    process = launching(tmp_path, script)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 1
    assert errors.startswith("error: worker 1 failed first (killed by SIGSEGV), its last line: busy; its output is in ")


FAILS_SLOWLY = """
import time
class Slow(Exception):
    def __str__(self):  # called when a part of the line is written: that of another rank may come between
        time.sleep(0.5)
        return "the reason"
raise Slow
"""


@pytest.mark.slow
def test_of_ranks_the_reason_is_named_and_not_what_torchrun_makes_of_it(tmp_path: Path) -> None:
    (tmp_path / "rank.py").write_text(FAILS_SLOWLY)
    ranks = [*by_torchrun(2, free_ports(1)[0], tmp_path / "logs"), sys.executable, "rank.py"]
    process = launching(tmp_path, execute(ranks), "--ranks=2", "--workers=1")
    told, errors = process.communicate(timeout=100)
    assert "ChildFailedError" in told and process.returncode == 1
    assert errors.startswith("error: worker 0 failed first (exit status 1): Slow: the reason; its output")


def test_launch_interrupted_says_how_to_go_on(tmp_path: Path) -> None:
    script = SAVES + "\n"
    script = script.replace("sys.exit(130)", "sys.exit(130 if sys.argv[1] == '0' else 1)")
    process = launching(tmp_path, script, "--set", "train.steps=5", "--name", "x")
    assert process.stdout
    seen = ""
    while seen.count("ready") < 2:
        seen += process.stdout.readline()
    os.killpg(process.pid, signal.SIGINT)
    _, errors = process.communicate(timeout=60)
    assert process.returncode == 130
    assert errors.splitlines() == [
        "warning: worker 1 may not have saved: saved",
        "stopped; continue with: atoll launch run.toml --workers 2 --set train.steps=5 --name x --resume",
    ]


def test_a_run_is_launched_once_at_a_time(tmp_path: Path) -> None:
    process = launching(tmp_path, WAITS + "forever()")
    try:
        assert process.stdout and "2 workers" in process.stdout.readline()
        result = CliRunner().invoke(cli.app, ["launch", str(tmp_path / "run.toml"), "--out", str(tmp_path / "runs")])
        assert result.exit_code == 1 and "is being trained by another `atoll launch`" in result.stderr
    finally:
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert process.returncode == 130


# ---------------------------------------------------------------------- the whole of it

SMALL = """
model = {{layers = 2, width = 16, heads = 1, head_width = 16, feedforward = 16, context = 16}}
data = {{source = '{source}', cache = '{cache}'}}
train = {{steps = {steps}, batch = 1, eval_every = 5, eval_tokens = 32, log_every = 1}}
sync = {{period = 4}}
"""


def real_run(folder: Path, steps: int) -> list[str]:
    texts = folder / "texts"
    texts.mkdir()
    for number in range(8):
        (texts / f"{number}.txt").write_text(f"{number} reef lagoon islet " * 20)
    file = folder / "run.toml"
    file.write_text(SMALL.format(source=texts, cache=folder / "tokens", steps=steps))
    assert load(file).sync.workers == 2
    return [sys.executable, "-m", "atoll", "launch", str(file), "--out", str(folder / "runs")]


@pytest.mark.slow
def test_two_real_workers_train_to_the_end(tmp_path: Path) -> None:
    done = subprocess.run([*real_run(tmp_path, 10), "--workers", "2"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "all workers are done" in done.stdout and "Traceback" not in done.stdout
    for worker in range(2):
        folder = tmp_path / "runs" / "run" / f"worker-{worker}"
        assert (folder / "metrics.jsonl").stat().st_size and (folder / "run.toml").exists()
        assert f"worker {worker} | " in done.stdout and "10" in (folder / "log.txt").read_text()


@pytest.mark.slow
def test_two_real_workers_are_stopped_and_resumed(tmp_path: Path) -> None:
    line = real_run(tmp_path, 400)
    process = subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)
    logs = [tmp_path / "runs" / "run" / f"worker-{worker}" / "metrics.jsonl" for worker in range(2)]
    deadline = time.monotonic() + 100
    while not all(log.exists() and b'"step"' in log.read_bytes() for log in logs):
        assert process.poll() is None and time.monotonic() < deadline, process.communicate()
        time.sleep(0.1)
    os.killpg(process.pid, signal.SIGINT)
    told, errors = process.communicate(timeout=100)
    assert process.returncode == 130 and "may not have saved" not in errors, told + errors
    assert errors.endswith(" --resume\n") and "stopped; continue with: atoll launch" in errors
    done = subprocess.run([*line, "--resume"], capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stdout + done.stderr
    assert all(log.with_name("log.txt").read_text().count("\n--- ") == 1 for log in logs)  # both starts in one log


# ---------------------------------------------------------------------- examples/sites


@pytest.mark.parametrize("name", ["by-hand.sh", "slurm.sbatch"])
def test_scripts_for_sites_parse(name: str) -> None:
    subprocess.run(["bash", "-n", str(SITES / name)], check=True)


def test_the_script_by_hand_starts_the_worker_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "python3").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "nvidia-smi").write_text("#!/bin/sh\nexit 9\n")
    for stand_in in tmp_path.iterdir():
        stand_in.chmod(0o755)
    path = os.environ | {"PATH": f"{tmp_path}:{os.environ['PATH']}"}
    line = ["bash", str(SITES / "by-hand.sh")]
    done = subprocess.run([*line, "1", "10.8.0.1:29400"], env=path, capture_output=True, text=True, check=True)
    assert done.stdout == (
        "-m atoll train run.toml --worker 1 --address 10.8.0.1:29400 --keys runs/run/keys/worker-1"
        " --resume --view lines\n"
    )
    assert subprocess.run([*line, "one"], env=path, capture_output=True).returncode == 2


def test_the_task_for_skypilot_parses_and_its_commands_too() -> None:
    yaml = pytest.importorskip("yaml")
    task = yaml.safe_load((SITES / "skypilot.yaml").read_text())
    assert task["num_nodes"] > 1 and "SKYPILOT_NODE_RANK" in task["run"] and "SKYPILOT_NODE_IPS" in task["run"]
    assert "ports" not in task["resources"]
    for key in ("setup", "run"):
        subprocess.run(["bash", "-n", "-c", task[key]], check=True)


def test_files_for_sites_are_short_and_make_keys() -> None:
    for file in SITES.iterdir():
        assert len(file.read_text().splitlines()) < 60, file
        assert "atoll keys new" in file.read_text() and "--keys" in file.read_text()

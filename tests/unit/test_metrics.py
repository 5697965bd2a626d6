"""Events on disk and in the tools that draw them: what comes back, what is refused, and what a failure leaves."""

import itertools
import json
import math
import multiprocessing
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import FrozenInstanceError, replace
from importlib.util import find_spec
from pathlib import Path

import pytest

from atoll.errors import AtollError, ConfigError, DataError
from atoll.runs.events import (
    End,
    Eval,
    Event,
    Fault,
    Jsonl,
    Resumed,
    RoundApplied,
    Saved,
    Start,
    Step,
    read,
    utilisation,
)
from atoll.runs.lines import Lines
from atoll.runs.sample import Sample
from atoll.runs.sinks import Metrics, TensorBoard, Trackio, WandB, scalars
from atoll.runs.tail import Tail
from full_disk import files_no_longer_than


def a_step(step: int, loss: list[float | None] | None = None) -> Step:
    return Step(
        step=step,
        tokens=step * 64,
        seconds=step * 0.5,
        step_s=0.25,
        loss=[3.5, 2.5] if loss is None else loss,
        lr=1e-3,
        grad_norm=[1.5, 0.5],
        tokens_per_s=128.0,
        bytes_sent=[100, 300],
        bytes_received=[7, 9],
        wait_s=[0.0, 0.5],
        participants=2,
    )


def an_eval(step: int, loss: float = 4.0) -> Eval:
    return Eval(step=step, tokens=step * 64, seconds=step * 0.5, loss=loss, best=True)


START = Start(
    name="demo",
    method="streaming",
    workers=2,
    steps=40,
    parameters=1000,
    tokens_per_step=32,
    period=10,
    delay=[1, 1],
    codec="e3m0",
    fragments=[600, 400],
    payload_bytes=[300, 200],
    vocabulary=256,
    device="cpu",
    threads=2,
    weights=[1.0, 2.0],
)
ROUND = RoundApplied(step=8, fragment=1, applied=9, members=[0, 1], expected=2, norm=0.25, cosine=0.5, bytes=200)
END = End(
    step=40,
    tokens=2560,
    seconds=20.0,
    step_s=0.25,
    loss=3.0,
    best_loss=2.75,
    bytes_sent=[500, 500],
    bytes_received=[500, 500],
    wait_s=[0.5, 0.0],
    outcome="finished",
)
MEASURED: list[Event] = [
    replace(START, worker=1, began=1.7e9),
    replace(a_step(10), hidden_s=[0.5, 0.25], wire_sent=[110, 310], wire_received=[10, 12]),
    replace(ROUND, worker=1, opened_s=4.0, done_s=6.5, waited_s=0.5, hidden_s=2.0, wire_sent=220, wire_received=230),
    replace(END, hidden_s=[0.5, 0.25], wire_sent=[510, 510], wire_received=[510, 510]),
]
ONE_OF_EACH: list[Event] = [
    START,
    a_step(10),
    ROUND,
    an_eval(10),
    Fault(step=11, worker=1, what='its loss is "nan"\nback to the anchor é\u2028'),
    Saved(step=12, seconds=6.0),
    Resumed(step=12, seconds=6.0),
    Lines(step=20, seconds=9.0, worker=1, sent_bytes=[7, 0], received_bytes=[9, 0], capacity=[1e6, None]),
    Sample(step=20, seconds=9.5, prompt="<b>The", text=' reef"\u2028\udc80'.encode(errors="replace").decode()),
    END,
]


def write(path: Path, events: list[Event], at: int | None = None) -> int:
    file = Jsonl(path, at)
    for event in events:
        file.write(event)
    position = file.position()
    file.close()
    return position


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "metrics.jsonl"


# ---- the file


def test_every_kind_of_event_comes_back(path: Path) -> None:
    assert write(path, ONE_OF_EACH) == path.stat().st_size
    assert read(path) == ONE_OF_EACH


def test_a_line_is_compact_json_that_names_its_event(path: Path) -> None:
    write(path, [Saved(step=12, seconds=6.0)])
    assert path.read_bytes() == b'{"event":"saved","step":12,"seconds":6.0}\n'


def test_an_event_is_a_value() -> None:
    saved = Saved(step=1, seconds=0.5)
    with pytest.raises(FrozenInstanceError):
        saved.step = 2  # type: ignore[misc]
    with pytest.raises(TypeError):
        Saved(1, 0.5)  # type: ignore[call-arg,arg-type]


def test_numbers_that_are_not_finite_are_null(path: Path) -> None:
    write(path, [an_eval(1, math.inf), a_step(2, [math.nan, -math.inf, None, 1.0])])
    lines = [json.loads(line, parse_constant=pytest.fail) for line in path.read_text().splitlines()]
    assert lines[0]["loss"] is None
    assert lines[1]["loss"] == [None, None, None, 1.0]
    evaluated, stepped = read(path)
    assert isinstance(evaluated, Eval) and math.isnan(evaluated.loss)
    assert isinstance(stepped, Step) and stepped.loss == [None, None, None, 1.0]


def test_an_event_can_be_read_at_once(path: Path) -> None:
    file = Jsonl(path)
    for count, event in enumerate(ONE_OF_EACH, 1):
        file.write(event)
        assert len(read(path)) == count
    file.close()


def test_text_that_no_file_can_hold_does_not_stop_a_run(path: Path) -> None:
    write(path, [Fault(step=1, worker=0, what="lone \ud800 surrogate")])
    assert read(path) == [Fault(step=1, worker=0, what="lone ? surrogate")]


def test_a_new_file_replaces_an_old_one(path: Path) -> None:
    write(path, ONE_OF_EACH)
    write(path, [ROUND])
    assert read(path) == [ROUND]


def test_closing_twice_does_no_harm(path: Path) -> None:
    file = Jsonl(path)
    file.close()
    file.close()


# ---- resume


def test_a_resume_cuts_what_came_after_the_checkpoint(path: Path) -> None:
    at = write(path, [START, a_step(10)])
    write(path, [a_step(20), an_eval(20)], at)
    file = Jsonl(path, at)
    file.write(a_step(20))
    file.close()
    assert file.missing == 0
    assert read(path) == [START, a_step(10), a_step(20)]


@pytest.mark.parametrize("keep", [0, 30, -1], ids=["nothing left", "a torn first line", "a torn last line"])
def test_a_resume_goes_on_after_whatever_whole_lines_are_left(path: Path, keep: int) -> None:
    at = write(path, [ROUND, ROUND])
    left = path.read_bytes()[:keep]
    path.write_bytes(left)
    whole = left.rfind(b"\n") + 1
    file = Jsonl(path, at)
    assert file.missing == at - whole
    file.write(END)
    file.close()
    assert read(path) == [ROUND] * left.count(b"\n") + [END]


def test_a_resume_without_a_file_begins_one(path: Path) -> None:
    file = Jsonl(path, 1000)
    assert file.missing == 1000
    file.write(END)
    file.close()
    assert read(path) == [END]


def test_a_resume_from_inside_a_long_line_keeps_the_lines_before(path: Path) -> None:
    first = write(path, [ROUND])
    write(path, [Fault(step=1, worker=0, what="x" * 200_000)], first)
    Jsonl(path, 150_000).close()
    assert read(path) == [ROUND]


# ---- what goes wrong


def test_a_full_disk_is_one_clear_line_and_leaves_whole_lines(path: Path) -> None:
    file = Jsonl(path)
    file.write(ROUND)
    with files_no_longer_than(path.stat().st_size + 40), pytest.raises(AtollError) as caught:
        file.write(END)
    assert str(caught.value) == f"{path} cannot be written: File too large"
    assert read(path) == [ROUND] and path.read_bytes().endswith(b"\n")
    with files_no_longer_than(2 * path.stat().st_size + 40), pytest.raises(AtollError):
        file.write(ROUND, END)  # there is room for the first, and neither is kept
    assert read(path) == [ROUND]
    file.write(END)  # space was made
    file.close()
    assert read(path) == [ROUND, END]


def test_a_folder_that_is_not_there_is_one_clear_line(tmp_path: Path) -> None:
    with pytest.raises(AtollError, match=r"^\S*none/metrics.jsonl cannot be written: No such file or directory$"):
        Jsonl(tmp_path / "none" / "metrics.jsonl")


@pytest.mark.parametrize(
    ("line", "complaint"),
    [
        (b"", "it is not JSON"),
        (b"{", "it is not JSON"),
        (b"\x00" * 20, "it is not JSON"),
        (b'{"event":"fault","step":1,"worker":0,"what":"\xff"}', "it is not JSON"),
        (b"[]", 'it has no "event"'),
        (b'{"step":1}', 'it has no "event"'),
        (b'{"event":"party"}', "its event is 'party', known are start, step, round,"),
        (b'{"event":["saved"]}', "its event is"),
        (b'{"event":"saved","step":1}', "saved.seconds: field required"),
        (b'{"event":"saved","step":"1","seconds":1}', "saved.step: input should be a valid integer"),
        (b'{"event":"saved","step":1.0,"seconds":1}', "saved.step: input should be a valid integer"),
        (b'{"event":"saved","step":true,"seconds":1}', "saved.step: input should be a valid integer"),
        (b'{"event":"saved","step":1,"seconds":"1"}', "saved.seconds: input should be a valid number"),
        (b'{"event":"fault","step":1,"worker":null,"what":""}', "fault.worker: input should be a valid integer"),
    ],
)
def test_damage_is_named_with_file_and_line(path: Path, line: bytes, complaint: str) -> None:
    write(path, [ROUND])
    path.write_bytes(path.read_bytes() + line + b"\n" + path.read_bytes())
    with pytest.raises(DataError) as caught:
        read(path)
    assert str(caught.value).startswith(f"{path}, line 2 is damaged: {complaint}")
    assert "\n" not in str(caught.value)


def test_what_was_measured_comes_back_and_files_of_before_it_read(path: Path) -> None:
    write(path, MEASURED)
    assert read(path) == MEASURED
    added = {"worker", "began", "hidden_s", "wire_sent", "wire_received", "opened_s", "done_s", "waited_s"}
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    path.write_text("".join(json.dumps({k: v for k, v in line.items() if k not in added}) + "\n" for line in lines))
    start, step, made, end = read(path)
    assert (start, step, end) == (START, a_step(10), END)
    assert isinstance(made, RoundApplied) and made.worker == made.wire_sent == made.waited_s == 0
    assert math.isnan(made.opened_s) and math.isnan(made.done_s)


def test_fields_of_a_newer_version_are_passed_over(path: Path) -> None:
    path.write_text('{"event":"saved","step":1,"seconds":2,"of_tomorrow":[1]}\n')
    assert read(path) == [Saved(step=1, seconds=2.0)]


def test_a_torn_last_line_is_passed_over_even_if_it_looks_whole(path: Path) -> None:
    write(path, [ROUND, END])
    path.write_bytes(path.read_bytes()[:-1])
    assert read(path) == [ROUND]


def test_a_missing_file_is_a_data_error(path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics.jsonl cannot be read: No such file or directory"):
        read(path)


def keep_writing(path: Path) -> None:
    file = Jsonl(path)
    for step in itertools.count():
        file.write(Saved(step=step, seconds=step / 2))


def test_a_writer_killed_at_any_moment_leaves_a_file_that_reads_and_goes_on(path: Path) -> None:
    writer = multiprocessing.get_context("spawn").Process(target=keep_writing, args=(path,))
    tail, seen = Tail(path), list[Event]()
    writer.start()
    try:
        deadline = time.monotonic() + 60
        while len(seen) < 2000 and time.monotonic() < deadline:
            seen += tail.new()
            time.sleep(0.01)
    finally:
        writer.kill()
        writer.join()
    seen += tail.new()
    assert len(seen) >= 2000
    assert seen == read(path) == [Saved(step=step, seconds=step / 2) for step in range(len(seen))]
    write(path, [END], path.stat().st_size)
    assert tail.new() == [END]


# ---- the tail


def test_a_tail_waits_for_the_file_and_for_whole_lines(path: Path, tmp_path: Path) -> None:
    write(tmp_path / "other", [ROUND, END])
    data = (tmp_path / "other").read_bytes()
    tail = Tail(path)
    assert tail.new() == []
    path.write_bytes(data[:20])
    assert tail.new() == []
    path.write_bytes(data[:-1])
    assert tail.new() == [ROUND]
    path.write_bytes(data)
    assert tail.new() == [END]
    assert tail.new() == []


def test_a_tail_begins_again_when_the_file_was_cut(path: Path) -> None:
    at = write(path, [START, a_step(10)])
    write(path, [a_step(20)], at)
    tail = Tail(path)
    assert len(tail.new()) == 3
    Jsonl(path, at).close()
    assert tail.new() == [START, a_step(10)]
    path.unlink()
    assert tail.new() == []
    write(path, [ROUND])
    assert tail.new() == [ROUND]


def test_a_tail_notices_a_file_that_was_cut_and_has_grown_past_where_it_was(path: Path) -> None:
    at = write(path, [START])
    write(path, [a_step(10)], at)
    tail = Tail(path)
    assert len(tail.new()) == 2
    write(path, [Resumed(step=0, seconds=0.0), a_step(11), a_step(22)], at)
    assert tail.new() == read(path)


def test_a_tail_names_the_line_that_is_damaged(path: Path) -> None:
    write(path, [ROUND, ROUND])
    tail = Tail(path)
    tail.new()
    path.write_bytes(path.read_bytes() + path.read_bytes() + b"{\n")
    assert tail.new() == [ROUND, ROUND], "those before it come first"
    for _ in range(2):
        with pytest.raises(DataError, match="line 5 is damaged"):
            tail.new()


def test_a_tail_may_be_read_part_by_part(path: Path) -> None:
    steps = [a_step(n) for n in range(10, 60, 10)]
    write(path, [START, *steps])
    tail = Tail(path)
    assert (tail.new(2), tail.new(3), tail.new(3), tail.new(3)) == ([START, steps[0]], steps[1:4], steps[4:], [])
    assert tail.offset == path.stat().st_size


# ---- several sinks


class Recorder:
    """A sink that remembers, and fails to close if told to."""

    def __init__(self, error: Exception | None = None) -> None:
        self.events: list[Event] = []
        self.error = error
        self.closed = False

    def write(self, event: Event) -> None:
        self.events.append(event)

    def close(self) -> None:
        self.closed = True
        if self.error:
            raise self.error


def test_all_sinks_get_everything_and_all_are_closed(path: Path) -> None:
    sinks = [Recorder(), Recorder(AtollError("disk full")), Recorder()]
    metrics = Metrics([*sinks, Jsonl(path)])
    for event in ONE_OF_EACH:
        metrics.write(event)
    with pytest.raises(AtollError, match="disk full"):
        metrics.close()
    assert all(sink.closed and sink.events == ONE_OF_EACH for sink in sinks)
    assert read(path) == ONE_OF_EACH


# ---- curves


def test_a_step_as_curves() -> None:
    where, curves = scalars(a_step(10, [3.0, None, 5.0, math.inf]))
    assert where == 10
    assert curves == {
        "lr": 1e-3,
        "participants": 2,
        "speed/step_s": 0.25,
        "speed/tokens_per_s": 128.0,
        "loss/mean": 4.0,
        "loss/worker0": 3.0,
        "loss/worker2": 5.0,
        "grad_norm/mean": 1.0,
        "grad_norm/worker0": 1.5,
        "grad_norm/worker1": 0.5,
        "bytes_sent/mean": 200.0,
        "bytes_sent/worker0": 100,
        "bytes_sent/worker1": 300,
        "bytes_received/mean": 8.0,
        "bytes_received/worker0": 7,
        "bytes_received/worker1": 9,
        "wait_s/mean": 0.25,
        "wait_s/worker0": 0.0,
        "wait_s/worker1": 0.5,
        "utilisation/mean": 0.95,
        "utilisation/worker0": 1.0,
        "utilisation/worker1": 0.9,
    }


def test_a_step_of_one_workers_process_as_curves_of_that_worker() -> None:
    """Zeros of the others are not measurements."""
    mine = replace(
        a_step(10, [None, 3.0]),
        grad_norm=[None, 2.0],
        bytes_sent=[0, 300],
        bytes_received=[0, 9],
        hidden_s=[0.0, 0.75],
        wire_sent=[0, 310],
        wire_received=[0, 320],
    )
    _, curves = scalars(mine)
    assert not [name for name in curves if name.endswith("worker0")]
    means = {name.removesuffix("/mean"): value for name, value in curves.items() if name.endswith("/mean")}
    assert means == {name.removesuffix("/worker1"): v for name, v in curves.items() if name.endswith("/worker1")}
    measured = {"wait_s": 0.5, "hidden_s": 0.75, "wire_sent": 310, "wire_received": 320, "utilisation": 0.9}
    assert {name: means[name] for name in measured} == measured


def test_what_a_round_took_as_curves() -> None:
    took = replace(
        ROUND, worker=1, opened_s=4.0, done_s=6.5, waited_s=0.5, hidden_s=2.0, wire_sent=220, wire_received=230
    )
    _, curves = scalars(took)
    assert {name: value for name, value in curves.items() if name.startswith("round_")} == {
        "round_s/fragment1": 2.5,
        "round_wait_s/fragment1": 0.5,
        "round_hidden_s/fragment1": 2.0,
        "round_wire_sent/fragment1": 220,
        "round_wire_received/fragment1": 230,
    }
    assert "round_s/fragment1" not in scalars(replace(took, wire_sent=0, wire_received=0))[1], "nothing travelled"


def test_the_share_of_time_that_is_not_waited() -> None:
    assert [utilisation(waited, 4.0) for waited in (0.0, 1.0, 4.0, 5.0, -1.0)] == [1.0, 0.75, 0.0, 0.0, 1.0]
    assert utilisation(1.0, 0.0) is utilisation(math.nan, 4.0) is utilisation(1.0, math.nan) is None


def test_other_events_as_curves() -> None:
    assert scalars(ROUND) == (
        9,
        {"outer_norm/fragment1": 0.25, "outer_cosine/fragment1": 0.5, "outer_members/fragment1": 2},
    )
    assert scalars(an_eval(10)) == (10, {"loss/held_out": 4.0})
    assert scalars(an_eval(10, math.nan)) == (10, {})
    assert all(
        not scalars(event)[1]
        for event in ONE_OF_EACH
        if isinstance(event, Start | Fault | Saved | Resumed | Lines | Sample | End)
    )


def curves_in(folder: Path) -> dict[str, list[tuple[int, float]]]:
    """What TensorBoard shows of a folder."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # what it imports
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
    shown = EventAccumulator(str(folder))
    shown.Reload()
    return {tag: [(at.step, at.value) for at in shown.Scalars(tag)] for tag in shown.Tags()["scalars"]}


def test_tensorboard_shows_the_curves_and_takes_back_what_a_resume_repeats(tmp_path: Path) -> None:
    board = TensorBoard(tmp_path)
    for event in (START, a_step(10), ROUND, an_eval(10, 4.0), a_step(20, [9.0, 9.0]), an_eval(20, 9.0)):
        board.write(event)
    board.close()
    assert curves_in(tmp_path)["loss/held_out"] == [(10, 4.0), (20, 9.0)]
    board = TensorBoard(tmp_path, resume_step=10)
    for event in (a_step(20), an_eval(20, 3.0)):
        board.write(event)
    board.close()
    shown = curves_in(tmp_path)
    assert shown["loss/held_out"] == [(10, 4.0), (20, 3.0)]
    assert shown["loss/mean"] == [(10, 3.0), (20, 3.0)]
    assert shown["loss/worker1"] == [(10, 2.5), (20, 2.5)]
    assert shown["outer_cosine/fragment1"] == [(9, 0.5)]
    assert set(shown) == {name for event in ONE_OF_EACH for name in scalars(event)[1]}


@pytest.mark.parametrize(
    ("package", "make"),
    [
        ("tensorboard", lambda folder: TensorBoard(folder)),
        ("wandb", lambda folder: WandB("islands", "demo", {}, folder)),
        ("trackio", lambda folder: Trackio("islands", "demo", {})),
    ],
)
def test_a_missing_package_says_how_to_get_it(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, package: str, make: Callable[[Path], object]
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    with pytest.raises(ConfigError) as caught:
        make(tmp_path)
    setting = "log.tensorboard = true" if package == "tensorboard" else f"log.{package} = 'islands'"
    assert str(caught.value).startswith(f"{setting} needs the package {package}, which cannot be imported (")
    assert str(caught.value).endswith(f"): pip install 'atoll[{package}]'")
    assert not any(tmp_path.iterdir())


def in_a_process_of_its_own(script: str, folder: Path, **environment: str) -> str:
    """Run a script, which finds `folder` in sys.argv[1], with this file's names at hand; what it prints."""
    script = f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r}); from test_metrics import *\n{script}"
    env = {**os.environ, "HOME": str(folder), **environment}
    done = subprocess.run([sys.executable, "-c", script, str(folder)], env=env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_wandb_gets_the_curves_and_a_resumed_run_keeps_its_id(tmp_path: Path) -> None:
    script = """
import warnings
for steps in ((10, 20), (20, 30)):
    sink = WandB("islands", "demo", {"train": {"lr": 0.5}}, sys.argv[1])
    for step in steps:
        sink.write(a_step(step)), sink.write(ROUND), sink.write(an_eval(step)), sink.write(START)
    sink.close(), sink.close()
sink.write(a_step(40))
"""
    in_a_process_of_its_own(script, tmp_path, WANDB_MODE="offline", WANDB_SILENT="true")
    kept = (tmp_path / "wandb" / "id").read_text()
    files = sorted(tmp_path.glob(f"wandb/offline-run-*-{kept}/run-{kept}.wandb"))
    assert files
    assert all(name.encode() in file.read_bytes() for file in files for name in scalars(a_step(1))[1])


@pytest.mark.skipif(not find_spec("wandb"), reason="wandb is not installed")
def test_wandb_that_cannot_start_is_a_config_error(tmp_path: Path) -> None:
    script = """
try:
    WandB("islands", "demo", {}, sys.argv[1])
except ConfigError as error:
    print(error)
"""
    said = in_a_process_of_its_own(
        script, tmp_path, WANDB_MODE="online", WANDB_API_KEY="", NETRC=str(tmp_path / "none")
    )
    assert said.startswith("log.wandb = 'islands': W&B did not start (")
    assert said.endswith(": log in with `wandb login`, or set WANDB_MODE=offline\n")


@pytest.mark.skipif(not find_spec("trackio"), reason="trackio is not installed")
def test_trackio_gets_the_curves_and_a_resumed_run_goes_on(tmp_path: Path) -> None:
    script = """
import sqlite3
for resume, step in ((False, 10), (True, 20), (False, 10)):
    sink = Trackio("islands", "demo", {"train": {"lr": 0.5}}, resume=resume)
    sink.write(a_step(step)), sink.write(an_eval(step)), sink.write(START)
    sink.close()
rows = sqlite3.connect(sys.argv[1] + "/islands.db").execute("select run_id, step, metrics from metrics").fetchall()
assert len(rows) == 6 and len({row[0] for row in rows}) == 2, rows
assert len({row[0] for row in rows[:4]}) == 1, rows
assert [row[1] for row in rows] == [10, 10, 20, 20, 10, 10], rows
assert json.loads(rows[0][2]) == scalars(a_step(10))[1], rows
try:
    Trackio("a/b", "demo", {})
except ConfigError as error:
    assert str(error).startswith("log.trackio = 'a/b': trackio did not start ("), error
"""
    in_a_process_of_its_own(script, tmp_path, TRACKIO_DIR=str(tmp_path))

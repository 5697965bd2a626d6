"""What a person sees of a run: live lines that fit the terminal, plain lines elsewhere, and times that make sense."""

import contextlib
import io
import math
import os
import pty
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.cells import cell_len

import atoll.train.progress.summary
from atoll.runs.events import End, Eval, Event, Fault, Resumed, RoundApplied, Saved, Start, Step
from atoll.train.progress.summary import RunSummary, mean_and_spread, sparkline
from atoll.train.progress.view import Board, preparing, view


def a_start(name: str = "demo", steps: int = 1000) -> Start:
    return Start(
        name=name,
        method="streaming",
        workers=4,
        steps=steps,
        parameters=3_214_000,
        tokens_per_step=2048,
        period=30,
        delay=[1] * 4,
        codec="e3m0",
        fragments=[10, 20],
        payload_bytes=[5, 10],
        vocabulary=256,
        device="cpu",
        threads=2,
        weights=[1.0] * 4,
    )


def a_step(step: int, seconds: float, loss: list[float | None] | None = None) -> Step:
    return Step(
        step=step,
        tokens=step * 8192,
        seconds=seconds,
        step_s=0.1,
        loss=[4.0, 4.1, 4.2, 4.3] if loss is None else loss,
        lr=1e-3,
        grad_norm=[1.0] * 4,
        tokens_per_s=81_920.0,
        bytes_sent=[step * 10_000] * 4,
        bytes_received=[0] * 4,
        wait_s=[0.0] * 4,
        participants=4,
    )


def an_eval(step: int, seconds: float, loss: float, best: bool = True) -> Eval:
    return Eval(step=step, tokens=step * 8192, seconds=seconds, loss=loss, best=best)


def an_end(step: int, seconds: float, interrupted: bool = False) -> End:
    return End(
        step=step,
        tokens=step * 8192,
        seconds=seconds,
        step_s=0.1,
        loss=3.91,
        best_loss=3.9,
        bytes_sent=[step * 10_000] * 4,
        bytes_received=[0] * 4,
        wait_s=[0.0] * 4,
        outcome="interrupted" if interrupted else "finished",
    )


ROUND = RoundApplied(step=3, fragment=0, applied=4, members=[0], expected=4, norm=1.0, cosine=None, bytes=5)
FAULT = Fault(step=600, worker=2, what="its loss is not finite [back to the anchor]")
UNTIL_610: list[Event] = [
    a_start(),
    *(a_step(step, step * 0.1) for step in range(10, 600, 10)),
    an_eval(590, 59.0, 3.5),
    an_eval(600, 60.0, 3.75, best=False),
    FAULT,
    a_step(610, 61.0),
    ROUND,
]


A_WORKER: list[Event] = [
    replace(a_start(), worker=2, began=1.7e9),
    replace(
        a_step(610, 61.0, [None, None, 4.25, None]),
        bytes_sent=[0, 0, 6_100_000, 0],
        wait_s=[0.0, 0.0, 6.1, 0.0],
        hidden_s=[0.0, 0.0, 30.0, 0.0],
        wire_sent=[0, 0, 18_400_000, 0],
        wire_received=[0, 0, 18_500_000, 0],
    ),
]
END_OF_A_WORKER = replace(
    an_end(1000, 100.0),
    bytes_sent=[0, 0, 10_000_000, 0],
    wait_s=[0.0, 0.0, 10.0, 0.0],
    wire_sent=[0, 0, 30_200_000, 0],
    wire_received=[0, 0, 30_400_000, 0],
)


def shown(kind: str, events: Sequence[Event], past: Sequence[Event] = ()) -> str:
    """All that a view writes, close included."""
    stream = io.StringIO()
    sink = view(kind, stream, past)
    for event in events:
        sink.write(event)
    sink.close()
    return stream.getvalue()


def frame(output: str) -> list[str]:
    """The last lines that a live view has drawn, as text."""
    last = re.split(r"\x1b\[2K|\x1b\[\?25l", output)[-1]
    return [line.rstrip() for line in re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]|\r", "", last).splitlines()]


class Clock:
    """A clock that stands still unless told."""

    now = 100.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture(autouse=True)
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """No seconds pass between an event and its time left, however busy the machine is."""
    clock = Clock()
    monkeypatch.setattr(atoll.train.progress.summary, "time", clock)
    return clock


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same terminal for every test, whoever runs it."""
    for name in ("NO_COLOR", "FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE", "LINES", "COLORTERM"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")


# ---- several numbers in few characters


def test_the_mean_of_losses_and_their_spread() -> None:
    assert [mean_and_spread(losses) for losses in ([], [4.0], [4.0, 5.0])] == ["-", "4.000", "4.500 (4.00-5.00)"]


def test_a_sparkline_is_high_where_the_values_are() -> None:
    assert sparkline([3.0, 2.0, 1.0]) == "█▅▁"
    assert sparkline([1.0, math.nan, 1.0]) == "▁ ▁"
    assert sparkline([]) == sparkline([math.nan]) == ""


# ---- how long it will take


def seen(*events: Event) -> RunSummary:
    state = RunSummary()
    for event in events:
        state = state.after(event)
    return state


def test_the_time_left_is_that_of_the_steps_left() -> None:
    assert seen(a_start(), a_step(10, 1.0)).left_s == pytest.approx(99)
    assert seen(a_start(), *(a_step(step, step * 0.1) for step in range(10, 510, 10))).left_s == pytest.approx(
        50, abs=0.5
    )


def test_the_time_left_is_unknown_before_the_first_step_and_zero_at_the_end() -> None:
    assert seen(a_start()).left_s is None
    assert seen(a_step(10, 1.0)).left_s is None
    assert seen(a_start(), a_step(10, 1.0), an_end(10, 1.0)).left_s == 0


def test_a_slow_first_step_does_not_spoil_the_time_left() -> None:
    assert seen(a_start(), a_step(10, 61.0), a_step(20, 62.0)).left_s == pytest.approx(98)


def test_after_a_resume_only_the_time_since_counts() -> None:
    slow: list[Event] = [a_start(), *(a_step(step, step * 1.0) for step in range(10, 510, 10))]
    resumed: list[Event] = [*slow, Resumed(step=500, seconds=500.0)]
    assert seen(*resumed, a_step(510, 501.0)).left_s == pytest.approx(49)
    assert seen(*resumed, a_step(510, 560.0), a_step(520, 561.0)).left_s == pytest.approx(48)
    without_the_past: list[Event] = [Resumed(step=500, seconds=500.0), a_step(510, 501.0)]
    assert seen(*without_the_past).step_s == pytest.approx(0.1)


def test_the_time_left_runs_down_between_events(clock: Clock) -> None:
    state = seen(a_start(), a_step(10, 1.0))
    clock.now += 9.0
    assert state.left_s == pytest.approx(90)
    clock.now += 900.0
    assert state.left_s == 0


def test_a_round_says_nothing_of_how_far_the_run_is() -> None:
    assert seen(a_start(), a_step(10, 1.0), ROUND).step == 10


# ---- lines


def test_lines_say_what_matters() -> None:
    events = [*UNTIL_610, Saved(step=610, seconds=61.5), an_end(610, 62.0, interrupted=True)]
    lines = shown("lines", events).splitlines()
    assert lines[0] == "demo: streaming, 4 workers, 3.21 M parameters, cpu, 1000 steps"
    assert (
        lines[1] == "   0:01  step 10/1000: loss 4.150 (4.00-4.30), 81.9 k tokens/s, 100 kB sent per worker, 1:39 left"
    )
    assert [line for line in lines if "held-out loss" in line][:-1] == [
        "   0:59  step 590/1000: held-out loss 3.500, best so far",
        "   1:00  step 600/1000: held-out loss 3.750, best 3.500",
    ]
    assert "   1:00  step 600/1000: worker 2: its loss is not finite [back to the anchor]" in lines
    assert "   1:02  step 610/1000: saved" in lines
    assert lines[-1] == (
        "demo: interrupted at step 610/1000, 5 M tokens in 1:02, held-out loss 3.910 (best 3.900), "
        "6.10 MB sent per worker, 1 fault"
    )


def test_lines_tell_of_steps_every_ten_seconds() -> None:
    steps = [line for line in shown("lines", UNTIL_610).splitlines() if ": loss" in line]
    assert [int(re.findall(r"step (\d+)", line)[0]) for line in steps] == [10, 110, 210, 310, 410, 510, 610]


def test_lines_tell_of_checkpoints_at_most_every_ten_seconds() -> None:
    saves = shown("lines", [Saved(step=n, seconds=n * 1.0) for n in range(25)]).splitlines()
    assert [line.split()[2] for line in saves] == ["0:", "10:", "20:"]


def test_lines_after_a_resume_do_not_repeat_the_past() -> None:
    events: list[Event] = [Resumed(step=610, seconds=61.0), a_step(620, 62.0), an_eval(620, 62.0, 3.6, best=False)]
    assert shown("lines", events, past=UNTIL_610).splitlines() == [
        "   1:01  step 610/1000: resumed",
        "   1:02  step 620/1000: loss 4.150 (4.00-4.30), 81.9 k tokens/s, 6.20 MB sent per worker, 0:38 left",
        "   1:02  step 620/1000: held-out loss 3.600, best 3.500",
    ]


def test_lines_of_a_worker_that_waits_for_others_far_away() -> None:
    lines = shown("lines", [*A_WORKER, END_OF_A_WORKER]).splitlines()
    assert lines == [
        "demo: streaming, worker 2 of 4, 3.21 M parameters, cpu, 1000 steps",
        "   1:01  step 610/1000: loss 4.250, 81.9 k tokens/s, 6.10 MB sent, on the wire 18.4 MB out and 18.5 MB in, "
        "waited 6.10 s (computing 90 %), 0:39 left",
        "demo: finished at step 1000/1000, 8.19 M tokens in 1:40, held-out loss 3.910 (best 3.900), 10.0 MB sent, "
        "on the wire 30.2 MB out and 30.4 MB in, waited 10.0 s (computing 90 %)",
    ]


def test_a_worker_that_measures_no_held_out_loss_does_not_speak_of_it() -> None:
    assert "held-out" not in shown("lines", [*A_WORKER, replace(END_OF_A_WORKER, loss=math.nan, best_loss=math.inf)])


def test_waiting_is_told_without_a_wire_if_it_shows_in_the_time() -> None:
    def waiting(seconds: float) -> str:
        return shown("lines", [a_start(), replace(a_step(100, 10.0), wait_s=[0.0, 2 * seconds] * 2)])

    assert "sent per worker, waited 1.00 s (computing 90 %), 1:30 left" in waiting(1.0)
    assert "waited" not in waiting(0.01) and "wire" not in waiting(1.0)


def test_lines_of_a_run_of_which_nothing_is_known_yet() -> None:
    assert shown("lines", [an_eval(5, 1.0, math.nan)]) == "   0:01  step 5: held-out loss -, best so far\n"


def test_a_worker_without_a_loss_is_left_out_of_the_mean() -> None:
    assert "loss 4.500 (4.00-5.00)," in shown("lines", [a_step(1, 1.0, [4.0, None, math.nan, 5.0])])
    assert "loss -," in shown("lines", [a_step(1, 1.0, [None, None])])


def test_none_is_silent() -> None:
    assert shown("none", [*UNTIL_610, an_end(1000, 99.0)]) == ""


# ---- live


def test_a_live_view_in_80_columns() -> None:
    bar = "━" * 29
    lines = frame(shown("live", UNTIL_610))
    assert lines[1].startswith(bar)
    assert lines == [
        "demo  streaming, 4 workers, 3.21 M parameters, cpu",
        lines[1].split("  ")[0] + "   61%  step 610/1000  0:39 left",
        "loss      4.150 (4.00-4.30)             tokens/s  81.9 k",
        "held out  3.750 (best 3.500)            sent      6.10 MB per worker",
        "          ▁█                            faults    1",
    ]


def test_an_evaluation_between_two_rounds_tells_of_which_step_it_is() -> None:
    late = [replace(e, anchor_step=600) if isinstance(e, Eval) else e for e in UNTIL_610]
    late[-1:] = [replace(an_eval(610, 61.5, 3.75, best=False), anchor_step=600)]
    assert frame(shown("live", late))[3].startswith("held out  3.750 (step 600, best 3.500)  ")
    assert "step 610/1000: held-out loss 3.750 (outer parameters of step 600), best 3.500" in shown("lines", late)
    late[-1:] = [replace(an_eval(610, 61.5, 3.75, best=False), anchor_step=610)]
    assert frame(shown("live", late))[3].startswith("held out  3.750 (best 3.500)   ")
    assert "step 610/1000: held-out loss 3.750, best 3.500" in shown("lines", late)


def test_a_live_view_of_a_worker_that_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    lines = frame(shown("live", A_WORKER))
    assert lines[0] == "demo  streaming, worker 2 of 4, 3.21 M parameters, cpu"
    assert lines[2:] == [
        "loss      4.250                         tokens/s  81.9 k",
        "held out  -                             sent      6.10 MB, on wire 18.4 MB",
        "computing 90 %                          waited    6.10 s",
        "                                        faults    0",
    ]
    monkeypatch.setenv("COLUMNS", "60")
    assert frame(shown("live", A_WORKER))[3] == "held out  -                   sent      6.10 MB"
    monkeypatch.setenv("COLUMNS", "40")
    assert frame(shown("live", A_WORKER))[-1] == "computing 90 %"


@pytest.mark.parametrize("width", [20, 40, 53, 54, 60, 80, 200])
def test_a_live_view_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    long = [a_start("a-run-with-a-name-that-is-far-too-long-for-any-terminal", steps=10**7)]
    evals = [an_eval(i, 1.0, 1e6 * i) for i in range(1, 40)]
    extreme: list[Event] = [*long, a_step(10**6, 1e7), *evals, FAULT]
    for events in (UNTIL_610, A_WORKER, extreme):
        lines = frame(shown("live", events))
        assert 4 <= len(lines) <= 6
        assert max(map(cell_len, lines)) <= width
        assert any("loss" in line for line in lines)


def test_a_narrow_terminal_gets_one_column(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    assert frame(shown("live", UNTIL_610))[2:] == [
        "loss      4.150 (4.00-4.30)",
        "held out  3.750 (best 3.500)",
        "tokens/s  81.9 k",
        "faults    1",
    ]


def test_a_live_view_before_the_first_step() -> None:
    lines = frame(shown("live", [a_start()]))
    assert lines[1].endswith("0%  step 0/1000")
    assert lines[2:] == [
        "loss      -                             tokens/s  -",
        "held out  -                             sent      -",
        "                                        faults    0",
    ]


def test_a_live_view_of_a_resumed_run_knows_its_past() -> None:
    lines = frame(shown("live", [Resumed(step=610, seconds=61.0), a_step(620, 63.0)], past=UNTIL_610))
    assert lines[1].endswith("62%  step 620/1000  1:16 left")
    assert "best 3.500" in lines[3]


def test_the_end_leaves_one_line_and_the_cursor() -> None:
    output = shown("live", [*UNTIL_610, an_end(1000, 99.0)])
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert frame(output) == [
        "demo: finished at step 1000/1000, 8.19 M tokens in 1:39, held-out loss 3.910 (best 3.900), "
        "10.0 MB sent per worker, 1 fault"
    ]


def test_a_view_closed_early_gives_the_cursor_back() -> None:
    output = shown("live", UNTIL_610)
    assert output.count("\x1b[?25l") == output.count("\x1b[?25h") == 1
    assert shown("live", []) == ""


def test_no_colour_is_respected(monkeypatch: pytest.MonkeyPatch) -> None:
    colours = re.compile(r"\x1b\[(?:\d+;)*(?:[349][0-8]|10[0-7])(?:;\d+)*m")
    assert colours.search(shown("live", UNTIL_610))
    monkeypatch.setenv("NO_COLOR", "1")
    output = shown("live", UNTIL_610)
    assert not colours.search(output)
    assert len(frame(output)) == 5


def test_a_terminal_without_unicode_gets_ascii() -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding="ascii")
    sink = view("live", stream)
    for event in UNTIL_610:
        sink.write(event)
    sink.close()
    board = Board(["demo"], "live", stream)
    board.update("demo", a_start())
    board.close()
    stream.flush()
    assert "step 610/1000" in raw.getvalue().decode("ascii")


def on_a_terminal(kind: str) -> str:
    """What a view writes to a real one."""
    ours, theirs = pty.openpty()
    with open(theirs, "w") as stream:
        sink = view(kind, stream)
        for event in (a_start(), a_step(10, 1.0)):
            sink.write(event)
        sink.close()
    output = b""
    with contextlib.suppress(OSError):  # a terminal that was left says so with an error
        while part := os.read(ours, 65536):
            output += part
    os.close(ours)
    return output.decode()


def test_auto_is_live_on_a_terminal_and_lines_elsewhere(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "\x1b[?25l" in on_a_terminal("auto")
    assert "\x1b" not in shown("auto", UNTIL_610)
    assert shown("auto", UNTIL_610) == shown("lines", UNTIL_610)
    with (tmp_path / "log").open("w") as stream:
        view("auto", stream).write(a_start())
    assert (tmp_path / "log").read_text().startswith("demo: streaming")
    monkeypatch.setenv("TERM", "dumb")
    dumb = on_a_terminal("auto")
    assert "\x1b" not in dumb and "   0:01  step 10/1000: loss" in dumb


# ---- several runs


def a_board(kind: str, **events: list[Event]) -> tuple[Board, io.StringIO]:
    stream = io.StringIO()
    board = Board([name.replace("_", "-") for name in events], kind, stream)
    for name, content in events.items():
        for event in content:
            board.update(name.replace("_", "-"), event)
    return board, stream


def test_a_board_has_one_row_a_run() -> None:
    board, stream = a_board(
        "live",
        data_parallel=[*UNTIL_610, an_end(1000, 99.0)],
        diloco=UNTIL_610,
        streaming=UNTIL_610,
        eager=[*UNTIL_610, an_end(700, 70.0, interrupted=True)],
        delayed=[],
    )
    board.fail("diloco", "the disk is full [no, really]")
    board.close()
    lines = frame(stream.getvalue())
    assert "diloco: failed: the disk is full [no, really]" in stream.getvalue()
    assert [re.split(r"  +", re.sub("[━╸╺]+", "", line)) for line in lines] == [
        ["run", "loss", "held out", "sent", "state"],
        ["data-parallel", "100%", "4.150", "3.750", "10.0 MB", "done"],
        ["diloco", "61%", "4.150", "3.750", "6.10 MB", "failed"],
        ["streaming", "61%", "4.150", "3.750", "6.10 MB", "running"],
        ["eager", "70%", "4.150", "3.750", "7.00 MB", "stopped"],
        ["delayed", "-", "-", "-", "waiting"],
        ["3 of 5 runs are through, about 2:19 left"],
    ]


@pytest.mark.parametrize("width", [40, 60, 71, 72, 80, 200])
def test_a_board_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, width: int) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    board, stream = a_board("live", a_run_with_a_name_that_is_far_too_long_for_it=UNTIL_610, short=[])
    board.close()
    lines = frame(stream.getvalue())
    assert len(lines) == 4
    assert max(map(cell_len, lines)) <= width
    assert "3.750" in lines[1] and "6.10 MB" in lines[1]
    assert width < 52 or "running" in lines[1]


def test_a_board_in_lines_names_the_run() -> None:
    board, stream = a_board("lines", diloco=[a_start(), a_step(10, 1.0), ROUND], eager=[an_end(1000, 99.0)])
    board.fail("diloco", "killed")
    board.close()
    assert stream.getvalue().splitlines() == [
        "diloco  streaming, 4 workers, 3.21 M parameters, cpu, 1000 steps",
        "diloco     0:01  step 10/1000: loss 4.150 (4.00-4.30), 81.9 k tokens/s, 100 kB sent per worker, 1:39 left",
        "eager   finished at step 1000, 8.19 M tokens in 1:39, held-out loss 3.910 (best 3.900), "
        "10.0 MB sent per worker",
        "diloco: failed: killed",
    ]


def test_a_silent_board() -> None:
    board, stream = a_board("none", diloco=UNTIL_610)
    board.fail("diloco", "killed")
    board.close()
    assert stream.getvalue() == ""


def test_the_time_left_for_all_runs() -> None:
    def left(**events: list[Event]) -> float | None:
        return a_board("none", **events)[0].left_s()

    half: list[Event] = [a_start(), a_step(500, 50.0)]  # 50 s of 100 left
    done = [*half, an_end(1000, 100.0)]
    assert left(a=half) == pytest.approx(50)
    assert left(a=half, b=half) == pytest.approx(50)
    assert left(a=half, b=[]) == pytest.approx(150)
    assert left(a=half, b=half, c=[], d=[]) == pytest.approx(150)
    assert left(a=done, b=half, c=[]) == pytest.approx(150)
    assert left(a=done, b=[a_start()]) == pytest.approx(100)
    assert left(a=done, b=done) == 0
    assert left(a=[], b=[]) is left(a=[a_start()]) is None


def test_a_run_that_begins_again_is_shown_from_its_beginning() -> None:
    board, stream = a_board("live", a=[*UNTIL_610, a_start(), a_step(10, 1.0)])
    board.close()
    row = frame(stream.getvalue())[1]
    assert " 1% " in row and "3.750" not in row


# ---- preparing


def test_preparing_in_lines_tells_the_beginning_and_the_end_of_every_stage() -> None:
    stream = io.StringIO()
    with preparing("lines", stream) as tell:
        for done in range(5001):
            tell("reading", done, None)
        for done in range(0, 10_001, 100):
            tell("tokenizing", done, 10_000)
    assert stream.getvalue().splitlines() == [
        "reading",
        "tokenizing: 0 B of 10.0 kB",
        "tokenizing: 10.0 kB of 10.0 kB",
    ]


def test_preparing_live_draws_a_bar_a_stage() -> None:
    stream = io.StringIO()
    with preparing("live", stream) as tell:
        for done in range(5001):
            tell("reading", done, None)
        tell("tokenizing", 10_000, 10_000)
    reading, tokenizing = frame(stream.getvalue())
    assert re.fullmatch(r"reading    ━+ 5\.0/5\.0 kB +0:00:\d\d", reading)
    assert re.fullmatch(r"tokenizing ━+ 10\.0/10\.0 kB 0:00:\d\d", tokenizing)


@pytest.mark.parametrize("kind", ["live", "lines", "none", "auto"])
def test_preparing_says_nothing_when_there_is_nothing_to_prepare(kind: str) -> None:
    stream = io.StringIO()
    with preparing(kind, stream):
        pass
    assert stream.getvalue() == ""


def test_preparing_that_fails_gives_the_terminal_back() -> None:
    def fail(stream: io.StringIO) -> None:
        with preparing("live", stream) as tell:
            tell("reading", 1, 10)
            raise ValueError("empty corpus")

    stream = io.StringIO()
    with pytest.raises(ValueError, match="empty corpus"):
        fail(stream)
    assert stream.getvalue().endswith("\x1b[?25h")


def test_most_of_what_is_told_is_not_drawn() -> None:
    stream = io.StringIO()
    with preparing("live", stream) as tell:
        for done in range(20_000):
            tell("reading", done, None)
    assert len(stream.getvalue()) < 20 * 20_000  # a drawing has some hundred characters

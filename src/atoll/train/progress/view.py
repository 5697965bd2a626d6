"""Shows runs while they train: a few live lines on a terminal, plain lines elsewhere."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TextIO

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll._util.units import bytes_text, count_text, loss_text, seconds_text
from atoll.errors import printable
from atoll.runs.events import End, Event, Resumed, Saved, Sink, Start, Step
from atoll.runs.sinks import Metrics
from atoll.train.data.cache import OnProgress, no_progress
from atoll.train.progress.summary import (
    RunSummary,
    computing_share,
    end_line,
    event_line,
    mean,
    mean_and_spread,
    run_title,
    sparkline,
    time_left,
    with_name,
)

QUIET_S = 10.0
"""Seconds between two plain lines that only report progress."""


def view(kind: str = "auto", stream: TextIO | None = None, past: Iterable[Event] = ()) -> Sink:
    """Return a sink that shows one run.

    Args:
        kind: "live", "lines", "none", or "auto": live on a terminal and lines elsewhere.
        stream: Where to write; None is standard output.
        past: Events of a run that is resumed, which are not shown again.
    """
    console = _console(kind, stream)
    if console is None:
        return Metrics([])
    run = RunSummary.of(past)
    return _LiveView(console, run) if _is_live(kind, console) else _LinesView(console, run)


def _console(kind: str, stream: TextIO | None) -> Console | None:
    return None if kind == "none" else Console(file=stream, force_terminal=True if kind == "live" else None)


def _is_live(kind: str, console: Console) -> bool:
    return kind == "live" or (kind == "auto" and console.is_terminal and not console.is_dumb_terminal)


def _print(console: Console, line: str, style: str = "") -> None:
    console.print(Text(printable(line), style), soft_wrap=True)


def _one_line(*parts: str | tuple[str, str]) -> Text:
    return Text.assemble(*parts, no_wrap=True, overflow="crop")


# ---- one run


class _LinesView:
    """Prints a line for every event that matters; for steps and for saves, one every ten seconds."""

    def __init__(self, console: Console, run: RunSummary, label: str = "") -> None:
        self._console = console
        self._run = run
        self._label = label  # before every line, where several runs share the console
        self._said_s: dict[type[Event], float] = {}  # when a kind of event last got a line

    def write(self, event: Event) -> None:
        """Print an event that is worth a line."""
        self._run = self._run.after(event)
        if isinstance(event, Start | Resumed):
            self._said_s.clear()
        if isinstance(event, Step | Saved):
            if event.seconds - self._said_s.get(type(event), -math.inf) < QUIET_S:
                return
            self._said_s[type(event)] = event.seconds
        if line := event_line(event, self._run):
            named = isinstance(event, Start | End) and not self._label
            _print(self._console, with_name(self._run, line) if named else self._label + line)

    def close(self) -> None:
        """Do nothing: every line is printed."""


class _LiveView:
    """Keeps a few lines in place until the run ends; they stay if it fails."""

    def __init__(self, console: Console, run: RunSummary) -> None:
        self._run = run
        self._live = Live(self, console=console, refresh_per_second=4)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        run, width = self._run, options.max_width
        if run.start:
            yield _one_line((printable(run.start.name), "bold"), "  ", (printable(run_title(run.start)), "dim"))
        yield _progress_bar(run, width)
        yield _fields(run, width, "" if options.ascii_only else sparkline(run.evals))

    def write(self, event: Event) -> None:
        """Update the lines."""
        self._run = self._run.after(event)
        if isinstance(event, End):
            self._live.transient = True
            self._live.stop()
            _print(self._live.console, with_name(self._run, end_line(event, self._run)))
        elif self._run.end is None:
            self._live.start()

    def close(self) -> None:
        """Give the terminal back."""
        self._live.stop()


def _progress_bar(run: RunSummary, width: int) -> Table | Text:
    """Return how far a run is, with a bar where there is room for it."""
    words = f"step {run.step}"
    if run.steps:
        words = f"{run.step / run.steps:4.0%}  step {run.step}/{run.steps}{time_left(run.left_s, '  ')}"
    room = width - cell_len(words) - 2
    if not run.steps or room < 8:
        return _one_line(words)
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(ProgressBar(run.steps, min(run.step, run.steps), width=room), _one_line(words))
    return line


def _fields(run: RunSummary, width: int, curve: str) -> Table:
    """Return losses, speed, bytes, waiting and faults in two columns, or the most important in one."""
    held_out = "-"
    if run.evaluated:
        of_step = f"step {run.evaluated.anchor_step}, " if run.evaluated.is_behind else ""
        held_out = f"{loss_text(run.evaluated.loss)} ({of_step}best {loss_text(run.best)})"
    loss, held = _field("loss", mean_and_spread(run.losses)), _field("held out", held_out)
    speed = _field("tokens/s", count_text(run.last.tokens_per_s) if run.last else "-")
    sent, share = _field("sent", _sent(run, width)), _field("computing", computing_share(run))
    faults = _field("faults", str(run.faults), "bold red" if run.faults else "")
    table = Table.grid(padding=(0, 1, 0, 0))
    if width < 54:
        for row in (loss, held, speed, faults if run.faults else share if run.waits else sent):
            table.add_row(row)
        return table
    table.add_column(width=min(40, width // 2) - 1)
    table.add_row(loss, speed)
    table.add_row(held, sent)
    if run.waits:
        table.add_row(share, _field("waited", seconds_text(run.waited_s)))
    table.add_row(_field("", curve, "cyan"), faults)
    return table


def _field(name: str, value: str, style: str = "") -> Text:
    return _one_line((f"{name:<9} ", "dim"), (value, style))


def _sent(run: RunSummary, width: int) -> str:
    """Return payload bytes, and bytes on the wire where there is a wire and room for them."""
    if run.last is None:
        return "-"
    if any(run.wire) and width >= 72:
        return f"{bytes_text(run.sent)}, on wire {bytes_text(run.wire[0])}"
    return bytes_text(run.sent) + ("" if run.alone else " per worker")


# ---- several runs


class Board:
    """Shows several runs side by side, one row each; `close` gives the terminal back."""

    def __init__(self, names: Sequence[str], kind: str = "auto", stream: TextIO | None = None) -> None:
        self._runs = {name: RunSummary() for name in names}
        self._state = dict.fromkeys(names, "waiting")
        self._lines: dict[str, _LinesView] = {}
        self._live: Live | None = None
        self._console = _console(kind, stream)
        if self._console is None:
            return
        if _is_live(kind, self._console):
            self._live = Live(self, console=self._console, refresh_per_second=4)
            self._live.start()
        else:
            width = min(24, max(map(len, names), default=0))
            self._lines = {name: _LinesView(self._console, RunSummary(), f"{name:<{width}}  ") for name in names}

    def update(self, name: str, event: Event) -> None:
        """Show an event of a run."""
        self._state[name] = {"finished": "done", "interrupted": "stopped"}.get(getattr(event, "outcome", ""), "running")
        self._runs[name] = self._runs[name].after(event)
        if name in self._lines:
            self._lines[name].write(event)

    def recall(self, name: str, events: Iterable[Event]) -> None:
        """Show a run that had finished before, given all its events."""
        self._runs[name] = RunSummary.of(events)
        self._state[name] = "done"
        if name in self._lines and self._console is not None:
            _print(self._console, f"{name}: finished already, it is not trained again")

    def fail(self, name: str, why: str) -> None:
        """Show that a run has failed, and why, in a line."""
        self._state[name] = "failed"
        if self._console is not None:
            _print(self._console, f"{name}: failed: {why}", "" if self._lines else "red")

    def close(self) -> None:
        """Leave the rows as they are, and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def left_s(self) -> float | None:
        """Estimate the seconds until all runs end, if as many train at a time as now; None if unknown."""
        known = [run.step_s * run.steps for run in self._runs.values() if run.step_s and run.steps]
        running = [self._runs[name].left_s for name, state in self._state.items() if state == "running"]
        waiting = sum(state == "waiting" for state in self._state.values())
        if not known or (not running and waiting):
            return None
        lefts = [mean(known) if left is None else left for left in running]
        return max(max(lefts, default=0.0), (sum(lefts) + waiting * mean(known)) / max(1, len(running)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = 12 if options.max_width >= 72 else 0
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        # The name takes what the numbers leave: 43 columns for them and their gaps, 2 for the bar's gap.
        table.add_column("run", no_wrap=True, max_width=max(8, options.max_width - 43 - (bar + 2 if bar else 0)))
        if bar:
            table.add_column("")
        for heading, width in (("", 4), ("loss", 6), ("held out", 8), ("sent", 8)):
            table.add_column(heading, justify="right", no_wrap=True, min_width=width)
        table.add_column("state", no_wrap=True, min_width=7)
        for name, run in self._runs.items():
            drawn = [ProgressBar(run.steps or 1, min(run.step, run.steps or 1), width=bar)] if bar else []
            share = f"{run.step / run.steps:.0%}" if run.steps else ""
            held_out = loss_text(run.evals[-1]) if run.evals else "-"
            numbers = (share, loss_text(mean(run.losses)), held_out, bytes_text(run.sent))
            table.add_row(Text(name, overflow="ellipsis"), *drawn, *numbers, _state_text(self._state[name]))
        yield table
        ended = sum(state not in ("waiting", "running") for state in self._state.values())
        rest = "" if ended == len(self._runs) else time_left(self.left_s(), ", about ")
        yield _one_line((f"{ended} of {len(self._runs)} runs are through{rest}", "dim"))


def _state_text(state: str) -> Text:
    return Text(state, {"waiting": "dim", "done": "green", "stopped": "yellow", "failed": "bold red"}.get(state, ""))


# ---- before a run


@contextmanager
def preparing(kind: str = "auto", stream: TextIO | None = None) -> Iterator[OnProgress]:
    """Yield a function that shows the progress of preparing tokens; nothing is shown before its first call."""
    console = _console(kind, stream)
    if console is None:
        yield no_progress
        return
    shown = _StageBars(console) if _is_live(kind, console) else _StageLines(console)
    try:
        yield shown.update
    finally:
        shown.close()


class _StageBars:
    """Draws one bar per stage, of bytes."""

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(24), DownloadColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), console=console)

    def update(self, stage: str, done: int, total: int | None) -> None:
        tasks = self._progress.tasks
        if not tasks or tasks[-1].description != stage:
            self._end_stage()
            self._progress.start()
            self._progress.add_task(stage, total=None)
        self._progress.update(self._progress.tasks[-1].id, completed=done, total=total)

    def _end_stage(self) -> None:
        if (tasks := self._progress.tasks) and tasks[-1].total is None:  # or the bar would look busy for ever
            self._progress.update(tasks[-1].id, total=tasks[-1].completed)

    def close(self) -> None:
        self._end_stage()
        self._progress.stop()


class _StageLines:
    """Prints a line when a stage begins, every ten seconds, and when all of it is done."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._stage = ""
        self._last_s = 0.0

    def update(self, stage: str, done: int, total: int | None) -> None:
        now = time.monotonic()
        if stage != self._stage or now - self._last_s >= QUIET_S or done == total:
            self._stage, self._last_s = stage, now
            amount = bytes_text(done) + ("" if total is None else f" of {bytes_text(total)}")
            _print(self._console, f"{stage}: {amount}" if done or total else stage)

    def close(self) -> None:
        """Do nothing: every line is printed."""

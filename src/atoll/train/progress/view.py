"""What a person sees of a run while it goes on: a few live lines on a terminal, plain lines anywhere else."""

import math
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Literal, TextIO, get_args

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderResult
from rich.live import Live
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from atoll._util.units import bytes_text, count_text, loss_text, seconds_text
from atoll.errors import ConfigError, printable
from atoll.runs.events import End, Event, Resumed, Sink, Start, Step
from atoll.settings.sections import View
from atoll.train.data.cache import Tell, silent
from atoll.train.progress.sentences import computing, left, named, sentence, summary, what
from atoll.train.progress.summary import Seen, mean, mean_and_spread, sparkline

QUIET_S = 10.0
"""In lines, seconds of a run between two that only say how far it is."""


def view(kind: str = "auto", stream: TextIO | None = None, past: Iterable[Event] = ()) -> Sink:
    """The view of one run, a sink: live on a terminal and lines elsewhere, unless `kind` says which.

    `past` are the events of a run that is resumed: shown as if seen, and not told again.
    """
    console = _console(kind, stream)
    if console is None:
        return _NoView()
    seen = Seen()
    for event in past:
        seen = seen.after(event)
    return _LiveView(console, seen) if _is_live(kind, console) else _LinesView(console, seen)


def _console(kind: str, stream: TextIO | None) -> Console | None:
    """Where to show things, nowhere if `kind` is none."""
    if kind not in get_args(View):
        raise ConfigError(f"log.view must be one of {', '.join(get_args(View))}, got {kind!r}")
    return None if kind == "none" else Console(file=stream, force_terminal=True if kind == "live" else None)


def _is_live(kind: str, console: Console) -> bool:
    return kind == "live" or (kind == "auto" and console.is_terminal and not console.is_dumb_terminal)


def _say(console: Console, line: str, style: str = "") -> None:
    console.print(Text(printable(line), style), soft_wrap=True)


# ---- one run


class _NoView:
    def write(self, event: Event) -> None: ...

    def close(self) -> None: ...


class _LinesView:
    """One line for what matters, and one every ten seconds for how far it is; `label` tells runs apart."""

    def __init__(self, console: Console, seen: Seen, label: str = "") -> None:
        self._console = console
        self._seen = seen
        self._label = label
        self._told = -math.inf

    def write(self, event: Event) -> None:
        """Say it, if it is worth a line."""
        self._seen = self._seen.after(event)
        if isinstance(event, Start | Resumed):
            self._told = -math.inf
        if isinstance(event, Step):
            if event.seconds - self._told < QUIET_S:
                return
            self._told = event.seconds
        if line := sentence(event, self._seen):
            alone = isinstance(event, Start | End) and not self._label
            _say(self._console, named(self._seen, line) if alone else self._label + line)

    def close(self) -> None:
        """Nothing is left to say."""


class _LiveView:
    """A few lines that stay in place. They go when the run ends; cut short, they stay as they were."""

    def __init__(self, console: Console, seen: Seen) -> None:
        self._console = console
        self._seen = seen
        self._live: Live | None = None

    def write(self, event: Event) -> None:
        """Show it."""
        self._seen = self._seen.after(event)
        if isinstance(event, End):
            self._stop(transient=True)
            _say(self._console, named(self._seen, summary(event, self._seen)))
        elif self._live is None and self._seen.end is None:
            self._live = Live(get_renderable=lambda: _Panel(self._seen), console=self._console, refresh_per_second=4)
            self._live.start()

    def close(self) -> None:
        """Give the terminal back."""
        self._stop(transient=False)

    def _stop(self, *, transient: bool) -> None:
        if self._live is not None:
            self._live.transient = transient
            self._live.stop()
            self._live = None


class _Panel:
    """The lines of a live view, as wide as the terminal allows: at most six, five if wide and nobody waits."""

    def __init__(self, seen: Seen) -> None:
        self._seen = seen

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        seen, width = self._seen, options.max_width
        if seen.start:
            name, kind = printable(seen.start.name), printable(what(seen.start))
            yield _cut(Text.assemble((name, "bold"), "  ", (kind, "dim")), width)
        yield _bar(seen, width)
        spark = "" if options.ascii_only else sparkline(seen.evals)
        held_out = "-"
        if seen.evaluated:
            of = f"step {seen.evaluated.anchor_step}, " if seen.evaluated.is_behind else ""
            held_out = f"{loss_text(seen.evaluated.loss)} ({of}best {loss_text(seen.best)})"
        loss = _field("loss", mean_and_spread(seen.losses))
        held = _field("held out", held_out)
        speed = _field("tokens/s", count_text(seen.last.tokens_per_s) if seen.last else "-")
        sent = _field("sent", _sent(seen, width))
        faults = _field("faults", str(seen.faults), "bold red" if seen.faults else "")
        if width < 54:
            share = _field("computing", computing(seen))
            rows = [loss, held, speed, faults if seen.faults else share if seen.waits else sent]
        else:
            pairs = [(loss, speed), (held, sent), (_field("", spark, "cyan"), faults)]
            if seen.waits:
                pairs.insert(2, (_field("computing", computing(seen)), _field("waited", seconds_text(seen.waited_s))))
            rows = [_side_by_side(*pair, width) for pair in pairs]
        for row in rows:
            yield _cut(row, width)


def _sent(seen: Seen, width: int) -> str:
    """Payload bytes, and those on the wire where there is one and room for it."""
    if seen.last is None:
        return "-"
    if any(seen.wire) and width >= 72:
        return f"{bytes_text(seen.sent)}, on wire {bytes_text(seen.wire[0])}"
    return bytes_text(seen.sent) + ("" if seen.alone else " per worker")


def _bar(seen: Seen, width: int) -> Table | Text:
    """How far, drawn and in words; the drawing only where there is room for it."""
    words = f"step {seen.step}"
    if seen.steps:
        words = f"{seen.step / seen.steps:4.0%}  step {seen.step}/{seen.steps}{left(seen.left_s, '  ')}"
    room = width - cell_len(words) - 2
    if not seen.steps or room < 8:
        return _cut(Text(words), width)
    line = Table.grid(padding=(0, 2, 0, 0))
    line.add_row(ProgressBar(seen.steps, min(seen.step, seen.steps), width=room), Text(words, no_wrap=True))
    return line


def _field(name: str, value: str, style: str = "") -> Text:
    return Text.assemble((f"{name:<9} ", "dim"), (value, style))


def _side_by_side(left: Text, right: Text, width: int) -> Text:
    column = min(40, width // 2)
    return Text.assemble(_cut(left, column - 1, pad=True), " ", right)


def _cut(text: Text, width: int, *, pad: bool = False) -> Text:
    """One line that is never wrapped."""
    text.no_wrap = True
    text.truncate(width, overflow="crop", pad=pad)
    return text


# ---- several runs


class Board:
    """Several runs side by side, one row each, for those who start them and hear of their events.

    Close it in the end, or the terminal stays taken.
    """

    def __init__(self, names: Sequence[str], kind: str = "auto", stream: TextIO | None = None) -> None:
        self._runs = {name: Seen() for name in names}
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
            self._lines = {name: _LinesView(self._console, Seen(), f"{name:<{width}}  ") for name in names}

    def update(self, name: str, event: Event) -> None:
        """Take an event of a run."""
        self._state[name] = {"finished": "done", "interrupted": "stopped"}.get(getattr(event, "outcome", ""), "running")
        self._runs[name] = self._runs[name].after(event)
        if name in self._lines:
            self._lines[name].write(event)

    def recall(self, name: str, events: Iterable[Event]) -> None:
        """Take all events of a run that was through before, and say no more of it."""
        for event in events:
            self._runs[name] = self._runs[name].after(event)
        self._state[name] = "done"
        if name in self._lines and self._console is not None:
            _say(self._console, f"{name}: finished already, it is not trained again")

    def fail(self, name: str, why: str) -> None:
        """Say that a run has died; `why` in a line."""
        self._state[name] = "failed"
        if self._console is not None:
            _say(self._console, f"{name}: failed: {why}", "" if self._lines else "red")

    def close(self) -> None:
        """Leave the rows as they are, and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def left_s(self) -> float | None:
        """Seconds until all runs are through, if as many run at a time as now; a guess for those that wait."""
        known = [seen.step_s * seen.steps for seen in self._runs.values() if seen.step_s and seen.steps]
        running = [self._runs[name].left_s for name, state in self._state.items() if state == "running"]
        waiting = sum(state == "waiting" for state in self._state.values())
        if not known or (not running and waiting):
            return None
        lefts = [mean(known) if left is None else left for left in running]
        return max(max(lefts, default=0.0), (sum(lefts) + waiting * mean(known)) / max(1, len(running)))

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        bar = 12 if options.max_width >= 72 else 0
        table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
        # The numbers come whole, and the name takes what they leave: 43 columns for them and the gaps, 2 for the bar's.
        table.add_column("run", no_wrap=True, max_width=max(8, options.max_width - 43 - (bar + 2 if bar else 0)))
        if bar:
            table.add_column("")
        for heading, width in (("", 4), ("loss", 6), ("held out", 8), ("sent", 8), ("state", 7)):
            justify: Literal["left", "right"] = "left" if heading == "state" else "right"
            table.add_column(heading, justify=justify, no_wrap=True, min_width=width)
        for name, seen in self._runs.items():
            drawn = [ProgressBar(seen.steps or 1, min(seen.step, seen.steps or 1), width=bar)] if bar else []
            table.add_row(Text(name, overflow="ellipsis"), *drawn, *_numbers(seen), _state_text(self._state[name]))
        yield table
        over = sum(state not in ("waiting", "running") for state in self._state.values())
        rest = "" if over == len(self._runs) else left(self.left_s(), ", about ")
        yield _cut(Text(f"{over} of {len(self._runs)} runs are through{rest}", "dim"), options.max_width)


def _numbers(seen: Seen) -> tuple[str, ...]:
    """The cells of a row: how far, training loss, held-out loss, bytes sent per worker."""
    share = f"{seen.step / seen.steps:.0%}" if seen.steps else ""
    held_out = loss_text(seen.evals[-1]) if seen.evals else "-"
    return share, loss_text(mean(seen.losses)), held_out, bytes_text(seen.sent)


def _state_text(state: str) -> Text:
    return Text(state, {"waiting": "dim", "done": "green", "stopped": "yellow", "failed": "bold red"}.get(state, ""))


# ---- before a run


@contextmanager
def preparing(kind: str = "auto", stream: TextIO | None = None) -> Iterator[Tell]:
    """Progress of preparing tokens: gives tell(stage, done, total or None); silent if it is never called."""
    console = _console(kind, stream)
    if console is None:
        yield silent
        return
    screen = _Bars(console) if _is_live(kind, console) else _Stages(console)
    teller = _Teller(screen)
    try:
        yield teller.tell
    finally:
        teller.finish()
        screen.close()


def _done_of_total(done: int, total: int | None) -> str:
    """Empty for a mere wait, of which there is nothing to count."""
    if not done and total is None:
        return ""
    return f"{done:,}" + ("" if total is None else f" of {total:,}")


class _Bars:
    """One bar a stage."""

    every_s = 0.1

    def __init__(self, console: Console) -> None:
        columns = (TextColumn("{task.description}"), BarColumn(24), TextColumn("{task.fields[count]}"))
        self._progress = Progress(*columns, TimeRemainingColumn(elapsed_when_finished=True), console=console)

    def begin(self, stage: str) -> None:
        self._progress.start()
        self._task = self._progress.add_task(stage, total=None, count="")

    def show(self, stage: str, done: int, total: int | None, *, last: bool) -> None:
        whole = done if last and total is None else total  # or the bar would look busy for ever
        self._progress.update(self._task, completed=done, total=whole, count=_done_of_total(done, total))

    def close(self) -> None:
        self._progress.stop()


class _Stages:
    """A line when a stage begins, every ten seconds, and when it is through."""

    every_s = QUIET_S

    def __init__(self, console: Console) -> None:
        self._console = console

    def begin(self, stage: str) -> None:
        pass

    def show(self, stage: str, done: int, total: int | None, *, last: bool) -> None:
        count = _done_of_total(done, total)
        _say(self._console, f"{stage}: {count}" if count else stage)

    def close(self) -> None:
        pass


class _Teller:
    """Takes what may be told once a document, and shows it now and then; the last of every stage for sure."""

    def __init__(self, screen: _Bars | _Stages) -> None:
        self._screen = screen
        self._untold: tuple[str, int, int | None] | None = None
        self._stage = ""
        self._shown = 0.0

    def tell(self, stage: str, done: int, total: int | None) -> None:
        if stage != self._stage:
            self.finish()
            self._screen.begin(stage)
            self._stage, self._shown = stage, -math.inf
        self._untold = (stage, done, total)
        now = time.monotonic()
        if now - self._shown >= self._screen.every_s:
            self._screen.show(*self._untold, last=False)
            self._untold, self._shown = None, now

    def finish(self) -> None:
        if self._untold is not None:
            self._screen.show(*self._untold, last=True)
            self._untold = None

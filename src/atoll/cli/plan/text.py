"""Prints a plan for people in 100 columns: a table, the recommendation, and settings to start with."""

import math
from collections.abc import Callable, Iterable, Mapping
from textwrap import wrap

from rich import box
from rich.console import Console, Group
from rich.table import Table
from rich.text import Text

from atoll._util.units import bytes_text, count_text, count_words, loss_text, percent_text, seconds_text, share_text
from atoll.plan import cost
from atoll.plan.forecast import Forecast
from atoll.plan.method import RUN_FILE_METHOD, label
from atoll.plan.paper_grid import LEVELS
from atoll.plan.planner import Plan
from atoll.plan.recommend import FEWEST_ROUNDS, Advice, periods_for
from atoll.plan.scaling_laws import SEQUENCE

WIDTH = 100
_OTHER_BATCH = 1.5  # times; below, time and bytes of a run are about the same


def show(plan: Plan) -> None:
    """Print a plan."""
    console = Console()
    console = Console(width=min(console.width, WIDTH)) if console.is_terminal else Console(width=WIDTH)
    console.print(Group(_heading(plan), _table(plan), Text("\n".join(_notes(plan)), style="dim")))
    for head, lines in (_advice(plan, console.width), _defaults(plan, console.width)):
        # Not wrapped: a backslash must be the last character of its line.
        console.print(Text.assemble((head, "bold"), *(f"\n{line}" for line in lines)), soft_wrap=True)


def _heading(plan: Plan) -> Text:
    request = plan.request
    model, workers = request.model, f"{request.workers} worker{'' if request.workers == 1 else 's'}"
    run = "" if request.steps is None else f", {request.steps:,} steps"
    lines = [
        f"{count_words(model.parameters)} parameters in {model.layers} layers, {workers}, "
        f"each with {request.link}{run}",
        f"a step takes {seconds_text(model.step_s)} of computing ({request.step_from})",
    ]
    return Text.assemble((lines[0], "bold"), "\n", lines[1], "\n")


# ---------------------------------------------------------------------- the table


def _table(plan: Plan) -> Table:
    """Return the methods side by side, one quantity a line."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for name, expected in plan.forecasts.items():
        table.add_column(Text(label(expected.method).replace(", ", "\n")), justify="right", no_wrap=True)
        assert name == expected.method.name
    for what, cell, last in _lines(plan):
        cells = [cell(expected) for expected in plan.forecasts.values()]
        if any(cells):
            table.add_row(Text(what), *map(Text, cells), end_section=last)
    return table


Line = tuple[str, Callable[[Forecast], str], bool]
"""A quantity's name, its value for a method (left out if "" for all), whether a gap follows."""


def _lines(plan: Plan) -> Iterable[Line]:
    yield "busy, best possible", lambda o: share_text(o.utilisation), False
    yield "busy, with atoll", lambda o: share_text(o.utilisation_with_atoll), False
    yield "waiting in a period", lambda o: seconds_text(o.wait_s_per_period), False
    yield "period, steps", lambda o: f"{o.method.period}", False
    yield "loss, against data-parallel", lambda o: percent_text(plan.penalties[o.method.name].loss), True
    yield "sent per step", lambda o: bytes_text(o.bytes_per_step), False
    run = plan.request.steps is not None
    yield "sent in a round", lambda o: bytes_text(o.bytes_per_round), not run
    yield "sent in the run", lambda o: bytes_text(o.bytes_of_run) if run else "", True
    for level in LEVELS:
        last = level == LEVELS[-1]
        yield f"bit/s for {100 * level:.0f} % busy", _needed(plan, level), last
    yield "memory added", lambda o: bytes_text(o.memory_bytes), False
    yield "  with sync.offload", _offloaded, True
    yield "time of the run", lambda o: seconds_text(o.run_s) if run else "", False
    yield "cost of the run", lambda o: _cost(plan, o), False


def _needed(plan: Plan, level: float) -> Callable[[Forecast], str]:
    def cell(expected: Forecast) -> str:
        rate = plan.needed[expected.method.name][level]
        return "-" if not rate else count_text(rate) if math.isfinite(rate) else "never"

    return cell


def _offloaded(expected: Forecast) -> str:
    return "-" if expected.memory_offloaded_bytes is None else bytes_text(expected.memory_offloaded_bytes)


def _cost(plan: Plan, expected: Forecast) -> str:
    total = plan.cost(expected)
    return "" if total is None else f"{total:,.0f}" if total >= 100 else f"{total:,.2f}"


def _notes(plan: Plan) -> Iterable[str]:
    yield "Bytes, waiting and memory are one worker's, the cost all workers'. busy: the share of its time in"
    yield "which it computes; best possible: every layer travels as soon as it can; with atoll, as bit/s: after"
    yield "the step. loss: what the papers measured at the nearest of their sizes, - where nobody has."
    if any(math.isinf(rate) for rates in plan.needed.values() for rate in rates.values()):
        yield "never: latency alone makes it wait longer."
    if RUN_FILE_METHOD in plan.forecasts:
        yield "this run: the run file's own settings, with its model's fragments as they are."
    if not plan.request.model.rest:
        yield "All layers are taken as equal and nothing as outside of them: a run file or --preset has its own."
    if plan.request.steps is None:
        yield "For bytes, time and cost of a whole run: --steps, or --tokens (of a step of one worker)."
    if plan.request.left_out:
        yield from wrap(f"Not in the figures, and it takes longer for them: {', '.join(plan.request.left_out)}.", WIDTH)
    yield from _memory(plan)
    yield ""


def _memory(plan: Plan) -> Iterable[str]:
    """Warn where a worker's chips are too small."""
    forecasts, (chips, chip_bytes) = plan.forecasts.values(), plan.request.memory
    if chip_bytes is None or not forecasts:
        return
    room = bytes_text(chip_bytes) if chips == 1 else f"{chips} x {bytes_text(chip_bytes)}"
    bare = f"parameters, gradients and AdamW's moments take {bytes_text(cost.training_bytes(plan.request.model))}"
    if large := [label(each.method) for each in forecasts if not plan.fits(each)]:
        which = "with any of these methods" if len(large) == len(forecasts) else f"with {'; '.join(large)}"
        text = f"Too large for {room}, before activations, {which}: {bare}, and what is added comes on top."
    elif any(plan.device_bytes(each) >= chip_bytes for each in forecasts):
        text = f"Too large for one chip of {room}: {bare}; share them between ranks, train.parallel = fsdp."
    else:
        return
    yield from wrap(text, WIDTH)


# ---------------------------------------------------------------------- advice


Passage = tuple[str, list[str]]
"""A heading, and lines within the width."""


def _advice(plan: Plan, width: int) -> Passage:
    found, target = plan.recommendation, share_text(plan.request.target)
    if plan.request.workers == 1:
        return found.next_level, ["  --set sync.method=none", ""]
    head = f"To be busy {target} of the time, least risky first:"
    if not found.reached:
        head = f"Nothing is busy {target} of the time on this link; closest:"
    lines = []
    for place, advice in enumerate(found.choices, 1):
        lines += _indented(_choice(plan, advice), width, first=f"  {place}. ", rest="     ")
        lines += pasted(advice.forecast.method.settings(), width)
    return head, [*lines, *_indented(found.next_level + _left_out(plan), width), ""]


def _left_out(plan: Plan) -> str:
    """Say why no choice is like a column of the table whose period is too long for the run."""
    steps = plan.request.steps or 0
    longest = max(periods_for(steps), default=0)
    if not any(method.period > max(longest, 1) for method in plan.request.methods):
        return ""
    most = f"no period of over {longest} steps" if longest else "only data-parallel"
    return f" For a run of {steps} steps {most} is advised: it would exchange fewer than {FEWEST_ROUNDS} times."


def _choice(plan: Plan, advice: Advice) -> str:
    expected = advice.forecast
    loss = f"Loss: {advice.source}."
    if advice.loss_penalty is not None:
        loss = f"Loss {percent_text(advice.loss_penalty)} against data-parallel ({advice.source})."
    run = ""
    if plan.request.steps is not None:
        price, sends = _cost(plan, expected), f"sends {bytes_text(expected.bytes_of_run)}"
        run = f" The run takes {seconds_text(expected.run_s)}" + (
            f", {sends} and costs {price}." if price else f" and {sends}."
        )
    large = "" if plan.fits(expected) is not False else " It does not fit into the memory given."
    return f"{advice.why}{run} {loss}{large}"


def pasted(settings: Mapping[str, str | int], width: int) -> list[str]:
    """Return options to paste behind a command, in lines that a shell reads as one."""
    lines = _indented(" ".join(f"--set\0{key}={value}" for key, value in settings.items()), width - 2, first="     ")
    return [line.replace("\0", " ") + " \\" for line in lines[:-1]] + [lines[-1].replace("\0", " ")]


def _indented(text: str, width: int, first: str = "  ", rest: str | None = None) -> list[str]:
    following = first if rest is None else rest
    return wrap(
        text, width, initial_indent=first, subsequent_indent=following, break_on_hyphens=False, break_long_words=False
    )


def _defaults(plan: Plan, width: int) -> Passage:
    values = plan.defaults
    told = (
        f"inner learning rate {values.learning_rate:g}, "
        f"batch {values.batch_sequences:,} sequences of {SEQUENCE} tokens over all workers, "
        f"outer learning rate {values.outer_learning_rate:.2g}, "
        f"{count_text(values.tokens)} tokens in all, "
        f"a loss of about {loss_text(values.loss)}."
    )
    told += f" Beyond what was measured, a guess: {values.outside}." if values.outside else ""
    told += f" In doubt: {values.doubt}." if values.doubt else ""
    return "To begin with, by the scaling laws of arXiv 2503.09799:", _indented(told + _other_batch(plan), width)


def _other_batch(plan: Plan) -> str:
    """Say where the table's batch is far from the suggested one."""
    if plan.request.tokens is None:
        return ""
    tokens, advised = plan.request.tokens * plan.request.workers, plan.defaults.batch_tokens
    if max(tokens, advised) <= _OTHER_BATCH * min(tokens, advised):
        return ""
    return f" The table is for another batch: {tokens:,} tokens in a step of all workers, not {advised:,}."

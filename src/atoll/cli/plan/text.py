"""Prints a plan for people in 100 columns: a table, the recommendation, and settings to start with."""

import math
from collections.abc import Callable, Iterator, Mapping
from functools import partial
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
from atoll.plan.recommend import FEWEST_ROUNDS, explain, periods_for
from atoll.plan.scaling_laws import SEQUENCE

WIDTH = 100
_OTHER_BATCH = 1.5  # times; below, time and bytes of a run are about the same


def show(plan: Plan) -> None:
    """Print a plan."""
    console = Console()
    console = Console(width=min(console.width, WIDTH)) if console.is_terminal else Console(width=WIDTH)
    console.print(Group(_heading(plan), _table(plan), Text("\n".join(_notes(plan)), style="dim")))
    for head, *lines in (_recommendation(plan, console.width), _defaults(plan, console.width)):
        # Not wrapped: a backslash must be the last character of its line.
        console.print(Text.assemble((head, "bold"), *(f"\n{line}" for line in lines)), soft_wrap=True)


def _heading(plan: Plan) -> Text:
    request, model = plan.request, plan.request.model
    workers = f"{request.workers} worker{'' if request.workers == 1 else 's'}"
    run = "" if request.steps is None else f", {request.steps:,} steps"
    size = f"{count_words(model.parameters)} parameters in {model.layers} layers"
    return Text.assemble(
        (f"{size}, {workers}, each with {request.link}{run}", "bold"),
        f"\na step takes {seconds_text(model.step_s)} of computing ({request.step_from})\n",
    )


# ---------------------------------------------------------------------- the table


def _table(plan: Plan) -> Table:
    """Return the methods side by side, one quantity a line; groups of lines have a gap between them."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for expected in plan.forecasts.values():
        table.add_column(Text(label(expected.method).replace(", ", "\n")), justify="right", no_wrap=True)
    for group in _quantities(plan):
        for name, cell in group.items():
            table.add_row(Text(name), *(Text(cell(expected)) for expected in plan.forecasts.values()))
        table.add_section()
    return table


def _quantities(plan: Plan) -> Iterator[dict[str, Callable[[Forecast], str]]]:
    """Yield groups of quantities: their names, and their values for a method."""
    run = plan.request.steps is not None
    yield {
        "busy, best possible": lambda o: share_text(o.utilisation),
        "busy, with atoll": lambda o: share_text(o.utilisation_with_atoll),
        "waiting in a period": lambda o: seconds_text(o.wait_s_per_period),
        "period, steps": lambda o: f"{o.method.period}",
        "loss, against data-parallel": lambda o: percent_text(o.penalty.loss),
    }
    yield {
        "sent per step": lambda o: bytes_text(o.bytes_per_step),
        "sent in a round": lambda o: bytes_text(o.bytes_per_round),
    } | ({"sent in the run": lambda o: bytes_text(o.bytes_of_run)} if run else {})
    yield {f"bit/s for {100 * level:.0f} % busy": partial(_needed, plan, level) for level in LEVELS}
    yield {"memory added": lambda o: bytes_text(o.memory_bytes), "  with sync.offload": _offloaded}
    if run:
        yield {"time of the run": lambda o: seconds_text(o.run_s)} | (
            {} if plan.request.price is None else {"cost of the run": lambda o: _cost(plan, o)}
        )


def _needed(plan: Plan, level: float, expected: Forecast) -> str:
    rate = plan.needed[expected.method.name][level]
    return "-" if not rate else count_text(rate) if math.isfinite(rate) else "never"


def _offloaded(expected: Forecast) -> str:
    return "-" if expected.memory_offloaded_bytes is None else bytes_text(expected.memory_offloaded_bytes)


def _cost(plan: Plan, expected: Forecast) -> str:
    total = plan.cost(expected)
    return "" if total is None else f"{total:,.0f}" if total >= 100 else f"{total:,.2f}"


def _notes(plan: Plan) -> Iterator[str]:
    request = plan.request
    yield "Bytes, waiting and memory are one worker's, the cost all workers'. busy: the share of its time in"
    yield "which it computes; best possible: every layer travels as soon as it can; with atoll, as bit/s: after"
    yield "the step. loss: what the papers measured at the nearest of their sizes, - where nobody has."
    if any(method.codec.format == "bf16" and method.name != RUN_FILE_METHOD for method in request.methods):
        yield "16 bits as in the Streaming paper, by sync.codec=bf16; DiLoCo's default, fp32, sends twice as much."
    if any(math.isinf(rate) for rates in plan.needed.values() for rate in rates.values()):
        yield "never: latency alone makes it wait longer."
    if RUN_FILE_METHOD in plan.forecasts:
        yield "this run: the run file's own settings, with its model's fragments as they are."
    if not request.model.rest:
        yield "All layers are taken as equal and nothing as outside of them: a run file or --preset has its own."
    if request.steps is None:
        yield "For bytes, time and cost of a whole run: --steps, or --tokens (of a step of one worker)."
    if request.left_out:
        yield from wrap(f"Not in the figures, and it takes longer for them: {', '.join(request.left_out)}.", WIDTH)
    yield from wrap(_memory(plan), WIDTH)
    yield ""


def _memory(plan: Plan) -> str:
    """Return a warning if a worker's chips are too small, else nothing."""
    forecasts, (chips, chip_bytes) = plan.forecasts.values(), plan.request.memory
    if chip_bytes is None:
        return ""
    room = bytes_text(chip_bytes) if chips == 1 else f"{chips} x {bytes_text(chip_bytes)}"
    bare = f"parameters, gradients and AdamW's moments take {bytes_text(cost.training_bytes(plan.request.model))}"
    if large := [label(each.method) for each in forecasts if not plan.fits(each)]:
        which = "with any of these methods" if len(large) == len(forecasts) else f"with {'; '.join(large)}"
        return f"Too large for {room}, before activations, {which}: {bare}, and what is added comes on top."
    if any(plan.device_bytes(each) >= chip_bytes for each in forecasts):
        return f"Too large for one chip of {room}: {bare}; share them between ranks, train.parallel = fsdp."
    return ""


# ---------------------------------------------------------------------- below the table: a heading, then lines


def _recommendation(plan: Plan, width: int) -> list[str]:
    found, target = plan.recommendation, share_text(plan.request.target)
    if plan.request.workers == 1:
        return [found.next_level, "  --set sync.method=none", ""]
    lines = [f"To be busy {target} of the time, least risky first:"]
    if not found.reached:
        lines = [f"Nothing is busy {target} of the time on this link; closest:"]
    for place, choice in enumerate(found.choices, 1):
        lines += _indented(_choice(plan, choice), width, first=f"  {place}. ", rest="     ")
        lines += pasted(choice.method.settings(), width)
    return [*lines, *_indented(found.next_level + _left_out(plan), width), ""]


def _left_out(plan: Plan) -> str:
    """Say why no choice is like a column of the table whose period is too long for the run."""
    steps = plan.request.steps or 0
    longest = max(periods_for(steps), default=0)
    if not any(method.period > max(longest, 1) for method in plan.request.methods):
        return ""
    most = f"no period of over {longest} steps" if longest else "only data-parallel"
    return f" For a run of {steps} steps {most} is advised: it would exchange fewer than {FEWEST_ROUNDS} times."


def _choice(plan: Plan, expected: Forecast) -> str:
    of_run, (loss, source) = plan.request.steps is not None, expected.penalty
    text = explain(expected, of_run=of_run)
    if of_run:
        sends, price = f"sends {bytes_text(expected.bytes_of_run)}", _cost(plan, expected)
        rest = f", {sends} and costs {price}" if price else f" and {sends}"
        text += f" The run takes {seconds_text(expected.run_s)}{rest}."
    text += f" Loss: {source}." if loss is None else f" Loss {percent_text(loss)} against data-parallel ({source})."
    return text + (" It does not fit into the memory given." if plan.fits(expected) is False else "")


def pasted(settings: Mapping[str, str | int], width: int) -> list[str]:
    """Return options to paste behind a command, in lines that a shell reads as one."""
    options = " ".join(f"--set\0{key}={value}" for key, value in settings.items())  # no line ends at a \0
    *lines, last = (line.replace("\0", " ") for line in _indented(options, width - 2, "     ", "     "))
    return [*(f"{line} \\" for line in lines), last]


def _indented(text: str, width: int, first: str = "  ", rest: str = "  ") -> list[str]:
    return wrap(
        text, width, initial_indent=first, subsequent_indent=rest, break_on_hyphens=False, break_long_words=False
    )


def _defaults(plan: Plan, width: int) -> list[str]:
    values = plan.defaults
    text = (
        f"inner learning rate {values.learning_rate:g}, "
        f"batch {values.batch_sequences:,} sequences of {SEQUENCE} tokens over all workers, "
        f"outer learning rate {values.outer_learning_rate:.2g}, "
        f"{count_text(values.tokens)} tokens in all, "
        f"a loss of about {loss_text(values.loss)}."
    )
    text += f" Beyond what was measured, a guess: {values.outside}." if values.outside else ""
    text += f" In doubt: {values.doubt}." if values.doubt else ""
    tokens, advised = (plan.request.tokens or 0) * plan.request.workers, values.batch_tokens
    if tokens and max(tokens, advised) > _OTHER_BATCH * min(tokens, advised):
        text += f" The table is for another batch: {tokens:,} tokens in a step of all workers, not {advised:,}."
    return ["To begin with, by the scaling laws of arXiv 2503.09799:", *_indented(text, width)]

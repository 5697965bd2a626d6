"""A plan for people: one table, what to choose, and the settings to begin with. 100 columns."""

import math
from collections.abc import Callable, Iterable
from itertools import groupby

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from atoll.plan import paper
from atoll.plan.laws import SEQUENCE
from atoll.plan.outlook import Outlook
from atoll.planner import LEVELS, OWN, Plan, label
from atoll.units import bytes_text, count_text, count_words, loss_text, seconds_text, share_text

WIDTH = 100


def show(plan: Plan) -> None:
    """Print all of it."""
    console = Console()
    console = Console(width=min(console.width, WIDTH)) if console.is_terminal else Console(width=WIDTH)
    console.print(Group(_heading(plan), _table(plan), Text("\n".join(_notes(plan)), style="dim")))
    console.print(_advice(plan))
    console.print(_defaults(plan))


def _heading(plan: Plan) -> Text:
    asked = plan.asked
    model, workers = asked.model, f"{asked.workers} worker{'' if asked.workers == 1 else 's'}"
    run = "" if asked.steps is None else f", {asked.steps:,} steps"
    lines = [
        f"{count_words(model.parameters)} parameters in {model.layers} layers, {workers}, each with {asked.link}{run}",
        f"a step takes {seconds_text(model.step_s)} of computing ({asked.step_from})",
    ]
    return Text.assemble((lines[0], "bold"), "\n", lines[1], "\n")


# ---------------------------------------------------------------------- the table


def _table(plan: Plan) -> Table:
    """Methods side by side: six or seven narrow columns fit, and every line compares one thing."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("")
    for name, seen in plan.outlooks.items():
        table.add_column(Text(label(seen.method).replace(", ", "\n")), justify="right", no_wrap=True)
        assert name == seen.method.name
    for what, cell, last in _lines(plan):
        cells = [cell(seen) for seen in plan.outlooks.values()]
        if any(cells):
            table.add_row(Text(what), *map(Text, cells), end_section=last)
    return table


Line = tuple[str, Callable[[Outlook], str], bool]
"""What it is called, what it is for a method ("" for everyone: left out), whether a gap follows."""


def _lines(plan: Plan) -> Iterable[Line]:
    yield "busy, best possible", lambda o: share_text(o.utilisation), False
    yield "busy, with atoll", lambda o: share_text(o.utilisation_with_atoll), False
    yield "waiting in a period", lambda o: seconds_text(o.wait_s_per_period), False
    yield "period, steps", lambda o: "1" if o.method.gradients else f"{o.method.period}", True
    yield "sent per step", lambda o: bytes_text(o.bytes_per_step), False
    run = plan.asked.steps is not None
    yield "sent in a round", lambda o: bytes_text(o.bytes_per_round), not run
    yield "sent in the run", lambda o: bytes_text(o.bytes_of_run) if run else "", True
    for level in LEVELS:
        last = level == LEVELS[-1]
        yield f"bit/s for {100 * level:.0f} % busy", _needed(plan, level), last
    yield "memory added", lambda o: bytes_text(o.memory_bytes), False
    yield "  with offload", lambda o: bytes_text(o.memory_offloaded_bytes), True
    yield "time of the run", lambda o: seconds_text(o.run_s) if run else "", False
    yield "cost of the run", lambda o: _cost(plan, o), False


def _needed(plan: Plan, level: float) -> Callable[[Outlook], str]:
    def cell(seen: Outlook) -> str:
        rate = plan.needed[seen.method.name][level]
        return count_text(rate) if math.isfinite(rate) else "never"

    return cell


def _cost(plan: Plan, seen: Outlook) -> str:
    cost = plan.cost(seen.method.name)
    return "" if cost is None else f"{cost:,.0f}" if cost >= 100 else f"{cost:,.2f}"


def _notes(plan: Plan) -> Iterable[str]:
    yield "Bytes, waiting and memory are one worker's. busy: the share of its time in which it computes; best"
    yield "possible: every layer travels as soon as it can; with atoll, as bit/s: after the step."
    if any(math.isinf(rate) for rates in plan.needed.values() for rate in rates.values()):
        yield "never: latency alone makes it wait longer."
    if OWN in plan.outlooks:
        yield "this run: the run file's own settings, with its model's fragments as they are."
    if plan.asked.steps is None:
        yield "For bytes, time and cost of a whole run: --steps, or --tokens (of a step of one worker)."
    yield ""


# ---------------------------------------------------------------------- advice


def _advice(plan: Plan) -> Group:
    found, target = plan.recommendation, share_text(plan.asked.target)
    head = f"To be busy {target} of the time, least risky first:"
    if not found.reached:
        head = f"Nothing is busy {target} of the time on this link; closest:"
    choices = Table.grid(padding=(0, 1, 0, 0))
    for place, advice in enumerate(found.choices, 1):
        if advice.loss_penalty is None:
            loss = f"Loss: {advice.source or 'nobody has measured it'}."
        else:
            loss = f"Loss {100 * advice.loss_penalty:+.1f} % against data-parallel ({advice.source})."
        choices.add_row(f"{place}.", Text(f"{advice.why} {loss}"))
    return Group(Text(head, style="bold"), _indented(choices), _indented(Text(found.next_level)), Text(""))


def _indented(what: RenderableType) -> Padding:
    return Padding(what, (0, 0, 0, 2), expand=False)


def _defaults(plan: Plan) -> Group:
    values = plan.defaults
    told = [
        f"inner learning rate {values.learning_rate:.2g}",
        f"batch {values.batch_sequences:,} sequences of {SEQUENCE} tokens over all workers",
        f"outer learning rate {values.outer_learning_rate:.2g}" if values.outer_learning_rate is not None else "",
        f"{count_text(values.tokens)} tokens in all",
        f"a loss of about {loss_text(values.loss)}",
    ]
    limits = f" Beyond what was measured: {values.outside}." if values.outside else ""
    limits += f" In doubt: {values.doubt}." if values.doubt else ""
    return Group(
        Text("To begin with, by the scaling laws of arXiv 2503.09799:", style="bold"),
        _indented(Text(", ".join(part for part in told if part) + "." + limits)),
    )


# ---------------------------------------------------------------------- the paper's table


def show_paper(cells: list[paper.Comparison]) -> None:
    """Table 4 of the Streaming DiLoCo paper beside ours."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    for head in ("model", "method"):
        table.add_column(head)
    for level in paper.LEVELS:
        table.add_column(f"{100 * level:.0f} %", justify="right", no_wrap=True)
    last = ""
    for (model, row), group in groupby(cells, key=lambda cell: (cell.model, cell.row)):
        if last not in ("", model):
            table.add_section()
        table.add_row("" if model == last else model, row, *map(_both, group))
        last = model
    console = Console(width=WIDTH)
    console.print(Text("Gbit/s for so much compute utilisation: the paper's / ours where they differ", style="bold"))
    console.print(table)
    console.print(summary(cells))


def _both(cell: paper.Comparison) -> Text:
    theirs = f"{printed(cell):.1f}"
    ours = "-" if cell.bits_per_s is None else f"{cell.bits_per_s / 1e9:.1f}"
    return Text(theirs) if cell.steps_apart == 0 else Text(f"{theirs} / {ours}", style="yellow")


def printed(cell: paper.Comparison) -> float:
    """What the paper has there, Gbit/s."""
    return paper.PRINTED[cell.model][cell.method][paper.LEVELS.index(cell.level)]


def summary(cells: list[paper.Comparison]) -> str:
    """In a line: how many cells are the same."""
    exact = sum(cell.steps_apart == 0 for cell in cells)
    most = max((abs(cell.steps_apart) if cell.steps_apart is not None else math.inf) for cell in cells)
    within = "all within one" if most <= 1 else f"the furthest {most:g} apart"
    return f"{exact} of {len(cells)} on the exact grid point, {within}"

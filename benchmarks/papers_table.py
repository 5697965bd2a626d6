"""Shows the losses of papers.py's rows beside data-parallel's, as a table and a picture."""

import json
import math
import re
import sys
from collections.abc import Mapping
from pathlib import Path
from statistics import mean
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from atoll._util.units import bytes_text
from atoll.runs.events import End, Eval, Start, Step, read
from atoll.runs.scored import Scored
from papers_rows import METHODS, REFERENCE, Row

RESULTS = Path(__file__).parent / "results"
FIRST_TEXT = "papers_35m"
"""Results on Python source, each token read five times."""
LOG_EVERY = 50
PAPER = {"diloco-30": 0.9, "streaming-30": 0.6, "streaming-100": 1.4, "streaming-eager-30": 3.1}
"""Gaps to data-parallel in percent at 35 million parameters: 3.54, 3.53, 3.56 and 3.62 against 3.51."""
TASKS = {"BLiMP": "blimp", "LAMBADA": "lambada_openai"}
"""Tasks of `atoll eval` by their heading: 67 sets of minimal pairs (guesses get 50 %); the last word of a passage."""
FARTHEST = 3.0
"""Percent from data-parallel that the picture of gaps has room for; Delayed is beyond."""
PRESET, RARE_PRESET = (Row.parse(f"streaming-{period},alpha=0.25,lr=0.6").name for period in (30, 100))
"""The rows of `atoll.Streaming(period=30)` and of `atoll.Streaming()`; the picture shows them too."""


class Result(NamedTuple):
    """Holds the metrics of one finished run."""

    start: Start
    steps: list[Step]
    evals: list[Eval]
    end: End
    losses: npt.NDArray[np.float32] | None
    """The loss of every held-out sequence, if they were kept."""
    books: npt.NDArray[np.uint16] | None
    """The book of every held-out sequence, if it is known; `books.py origins` finds it."""
    text: str | None
    """The digest of its text, if that was kept."""
    scores: dict[str, Scored]
    """Scores of the final model by task, if it was evaluated on tasks."""

    @classmethod
    def read(cls, path: Path) -> "Result":
        """Read a run from its metrics and the files beside them."""
        events = list(read(path))
        losses, known, books = path.with_suffix(".npy"), path.with_suffix(".json"), path.with_name("held_out_books.npy")
        return cls(
            start=next(event for event in events if isinstance(event, Start)),
            steps=[event for event in events if isinstance(event, Step)],
            evals=[event for event in events if isinstance(event, Eval)],
            end=next(event for event in events if isinstance(event, End)),
            losses=np.load(losses) if losses.exists() else None,
            books=np.load(books) if books.exists() else None,
            text=json.loads(known.read_text())["text"] if known.exists() else None,
            scores={event.task: event for event in events if isinstance(event, Scored) and event.weights == "final"},
        )

    @property
    def training_loss(self) -> float:
        """The mean loss of the workers' own parameters over the last 500 steps."""
        return mean(loss for step in self.steps[-500 // LOG_EVERY :] for loss in step.loss if loss is not None)

    def comparable(self, reference: "Result") -> bool:
        """Return whether this run read the same text as another, and as many tokens."""
        if self.text is None or reference.text is None:
            same = self.start.weights == reference.start.weights
        else:
            same = self.text == reference.text
        return same and self.end.tokens == reference.end.tokens

    def gap(self, reference: "Result") -> str:
        """Return how far the loss is above another run's, in percent, with a standard error if it is known.

        The gap is a ratio of two means over the same text, so text that is hard for both alike adds no error. The
        sequences of one book, or 16 neighbours where books are not known, count as one observation.
        """
        gap = f"{100 * (self.end.loss / reference.end.loss - 1):+.2f} %"
        if self.losses is None or reference.losses is None or self.losses.shape != reference.losses.shape:
            return gap
        ratio = self.losses.mean() / reference.losses.mean()
        apart = (self.losses - ratio * reference.losses) / reference.losses.mean()
        groups = self.books if self.books is not None else np.arange(len(apart)) // 16
        sums = np.bincount(groups, apart)[np.unique(groups)]
        error = math.sqrt(len(sums) / max(1, len(sums) - 1) * (sums**2).sum()) / len(apart)
        return f"{gap} ± {100 * error:.2f}"


def table(results: Mapping[str, Result]) -> list[str]:
    """Return the lines of the table, in Markdown; a task is a column if data-parallel was evaluated on it."""
    tasks = {head: task for head, task in TASKS.items() if task in results[REFERENCE].scores}
    heads = ["method", "held-out loss", "gap", "papers", "training loss", "payload bytes a worker", "tokens", *tasks]
    lines = [f"| {' | '.join(heads)} |", "|" + "---|" * len(heads)]
    for name, result in results.items():
        reference = reference_of(name, results)
        end, gap = result.end, "" if reference is result else result.gap(reference)
        paper = f"{PAPER[name]:+.1f} %" if name in PAPER else ""
        sent, tokens = bytes_text(mean(end.bytes_sent)), f"{end.tokens / 1e6:.0f} M"
        cells = [Row.named(name).text, f"{end.loss:.4f}", gap, paper, f"{result.training_loss:.3f}", sent, tokens]
        cells += [accuracy(result.scores.get(task)) for task in tasks.values()]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def accuracy(score: Scored | None) -> str:
    """Return an accuracy with its standard error over the documents, in percent."""
    if score is None:
        return ""
    return (
        f"{100 * score.accuracy:.2f} % ± {100 * score.stderr:.2f}" if score.stderr else f"{100 * score.accuracy:.2f} %"
    )


def reference_of(name: str, results: Mapping[str, Result]) -> Result:
    """Return data-parallel of the same seed, or of seed 0 if that was not trained."""
    seed = re.search(r"-seed\d+", name)
    return results.get(f"{REFERENCE}{seed[0] if seed else ''}", results[REFERENCE])


def costs_of_4_bits(results: Mapping[str, Result]) -> list[str]:
    """Say what e3m0 costs Streaming at period 30 against fp32: at the end, and over the last three quarters."""
    found = []
    for name, coarse in results.items():
        exact = results.get(name.replace("streaming-30", "streaming-30-fp32"))
        if exact is None or exact is coarse:
            continue
        pairs = zip(coarse.evals, exact.evals, strict=True)
        late = [100 * (one.loss / other.loss - 1) for one, other in pairs if one.tokens >= coarse.end.tokens / 4]
        found.append(
            f"{Row.named(name).text}: 4 bits cost {coarse.gap(exact)}; "
            f"in the {len(late)} evaluations of the last three quarters "
            f"{min(late):+.2f} to {max(late):+.2f} %, {mean(late):+.2f} % on average"
        )
    return found


def picture(results: Mapping[str, Result]) -> Figure:
    """Draw held-out losses over tokens without the first fifth, and their gaps to data-parallel."""
    figure = Figure(figsize=(12.5, 4.2), layout="constrained")
    losses, gaps = figure.subplots(1, 2)
    for name, result in ((name, result) for name, result in results.items() if name in {*METHODS, PRESET, RARE_PRESET}):
        known = {event.tokens: event.loss for event in reference_of(name, results).evals}
        late = [event for event in result.evals if event.tokens >= result.end.tokens / 5]
        tokens = [event.tokens / 1e6 for event in late]
        losses.plot(tokens, [event.loss for event in late], label=Row.named(name).text)
        gaps.plot(tokens, [100 * (event.loss / known[event.tokens] - 1) for event in late])
    losses.set_ylabel("held-out loss, nats per token")
    gaps.set_ylabel("gap to data-parallel, %")
    gaps.set_ylim(-1.5, FARTHEST)
    for axes in (losses, gaps):
        axes.set_xlabel("tokens of both workers, millions")
        axes.spines[["top", "right"]].set_visible(False)
    figure.legend(*losses.get_legend_handles_labels(), loc="outside right upper", frameon=False)
    return figure


def load(folder: Path) -> dict[str, Result]:
    """Return the finished runs on data-parallel's text and length, in the order of their rows."""
    found = {path.stem: Result.read(path) for path in sorted(folder.glob("*.jsonl"))}
    if REFERENCE not in found:
        sys.exit(f"{folder} has no {REFERENCE}.jsonl, with which all rows are compared: train {REFERENCE} first")
    names = sorted(found, key=lambda name: Row.named(name).order)
    reference, kept = found[REFERENCE], {}
    for name in names:
        one = found[name]
        if one.comparable(reference):
            kept[name] = one
        else:
            print(f"{name} is left out: its text or its number of tokens is not that of {REFERENCE}", file=sys.stderr)
    return kept

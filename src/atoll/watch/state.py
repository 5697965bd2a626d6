"""Says in words how a watched run is doing."""

from collections.abc import Sequence
from typing import Final, NamedTuple

from atoll._util.units import count_words
from atoll.report.load import plain_text
from atoll.report.record import RunRecord
from atoll.watch.live_run import LiveRun, sent_rounds
from atoll.watch.sections import State

PAUSE_S: Final = 3.0
"""Seconds without an event after which a worker that has rounds on their way is taken to wait for them."""
_TIMES = 3  # intervals between its step events, likewise
_LONGEST, _MOST_TROUBLES = 400, 4  # characters of a trouble, and troubles that are told


class Condition(NamedTuple):
    """Holds how a run is doing."""

    state: State
    words: str
    since: float | None = None
    """Unix time since which, where it is known."""


def condition(run: LiveRun, record: RunRecord | None, share: float, now: float) -> Condition:
    """Returns how the run is doing.

    Args:
        run: The run.
        record: Its events as one log; None before it begins.
        share: The share of its files that was read, 0 to 1.
        now: Unix time.
    """
    if share < 1 and (record is None or record.end is None):
        return Condition("reading", f"Reading what has happened so far: {100 * share:.0f} %.{_troubles(run)}")
    if record is None:
        words = f"No worker of {plain_text(run.about.name)} has begun yet."
        return Condition("waiting to begin", words + _troubles(run))
    found = (
        _ended(record)
        or _failed(run, record)
        or _paused(record)
        or _quiet(run, now)
        or _waiting(run, now)
        or _training(record)
    )
    return found._replace(words=found.words + _absent(run, now) + _troubles(run))


def _ended(record: RunRecord) -> Condition | None:
    if record.end is None:
        return None
    if record.finished:
        return Condition("finished", f"All {count_words(record.start.steps)} steps are made.")
    words = f"Stopped after step {count_words(record.step)} of {count_words(record.start.steps)}"
    return Condition("interrupted", f"{words}; {_how_to_go_on(record)}.")


def _failed(run: LiveRun, record: RunRecord) -> Condition | None:
    """Says whether no process goes on, and errors have ended some; tells the first error."""
    open_ = [process for process in run.processes.values() if process.end is None]
    if not open_ or not all(process.failure for process in open_):
        return None
    first = min(open_, key=lambda process: process.newest)
    words = f"Failed after step {count_words(record.step)} of {count_words(record.start.steps)}"
    return Condition("failed", f"{words}: {plain_text(first.failure)[:_LONGEST]}; {_how_to_go_on(record)}.")


def _how_to_go_on(record: RunRecord) -> str:
    return "the same commands continue it" if record.views else "atoll train --resume continues it"


def _quiet(run: LiveRun, now: float) -> Condition | None:
    """Says whether no process was heard for long, or none makes steps."""
    open_ = [name for name, process in run.processes.items() if process.end is None]
    newest = max(run.heard[name] for name in open_)
    if all(run.is_silent(name, now) for name in open_):
        words = "No worker has written anything for long: it was killed, its machine is off, or it hangs."
        return Condition("silent", words, newest)
    stepped = max(run.stepped.get(name, newest) for name in open_)
    if all(now - run.stepped.get(name, now) > run.patience_s(name) for name in open_):
        return Condition("stalled", "Workers are there, but no step was made for long.", stepped)
    return None


def _paused(record: RunRecord) -> Condition | None:
    newest = record.newest_view
    least = least_workers(record)
    if newest is None or len(newest.members) >= least:
        return None
    there = f"{len(newest.members)} of at least {least} workers"
    return Condition("paused", f"Paused until others come back: {there} are there.")


def least_workers(record: RunRecord) -> int:
    """Returns the fewest workers with which an elastic run trains."""
    link = record.config.get("link")
    least = link.get("min_workers", 1) if isinstance(link, dict) else 1
    return least if isinstance(least, int) else 1


def _waiting(run: LiveRun, now: float) -> Condition | None:
    """Says whether every worker has rounds on their way and is later than usual."""
    open_ = [(name, process) for name, process in run.processes.items() if process.end is None]
    late = [name for name, p in open_ if now - run.heard[name] > max(PAUSE_S, _TIMES * p.interval_s)]
    if len(late) < len(open_) or not any(sent_rounds(process) for _, process in open_):
        return None
    since = max(run.heard[name] for name in late)
    return Condition("waiting for a round", "Workers wait for a round: the line is slow, or one of them is.", since)


def _training(record: RunRecord) -> Condition:
    newest = record.newest_view
    there, all_ = len(newest.members) if newest else record.start.workers, record.start.workers
    if all_ == 1:
        return Condition("training", "The worker makes steps.")
    return Condition("training", f"{'All' if there == all_ else f'{there} of'} {all_} workers make steps.")


def _absent(run: LiveRun, now: float) -> str:
    """Names workers that are silent while others are not."""
    silent = sorted(w for n, p in run.processes.items() if run.is_silent(n, now) for w in p.tracks)
    there = any(not run.is_silent(name, now) and p.end is None for name, p in run.processes.items())
    if not silent or not there:
        return ""
    return f" {_workers(silent)} {'has' if len(silent) == 1 else 'have'} not written anything for long."


def _workers(numbers: Sequence[int]) -> str:
    named = ", ".join(map(str, numbers[:8])) + (" and others" if len(numbers) > 8 else "")
    return f"Worker{'' if len(numbers) == 1 else 's'} {named}"


def _troubles(run: LiveRun) -> str:
    shown, more = run.troubles[:_MOST_TROUBLES], run.troubles[_MOST_TROUBLES:]
    words = "".join(f" Problem: {plain_text(trouble)[:_LONGEST]}." for trouble in shown)
    return f"{words} And {len(more)} more." if more else words

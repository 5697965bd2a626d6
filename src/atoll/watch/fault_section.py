"""Composes the section of what went wrong, each once although several workers tell of it."""

from collections.abc import Iterable, Sequence
from typing import Any, Literal

from atoll.report.load import plain_text
from atoll.runs import events
from atoll.watch.live_run import LiveRun
from atoll.watch.process import MOST_KEPT, ProcessLog
from atoll.watch.sections import Fault, FaultsSection

_LONGEST = 300  # characters of words


def faults_section(run: LiveRun) -> FaultsSection:
    """Returns what went wrong, each once although several workers tell of it."""
    found: dict[tuple[Any, ...], Fault] = {}
    logs = run.logs()
    for process in logs:
        for kind in (events.Fault, events.Lost, events.RoundApplied):
            for at, event in process.kept[kind]:
                for fault in _faults(event):
                    which = _view_without(process, event) if isinstance(event, events.Lost) else fault["step"]
                    words = fault["words"] if kind is events.Fault else ""
                    key = (fault["kind"], which, fault["worker"], words)
                    found.setdefault(key, fault | {"at_s": run.since(process, at)})
    latest = sorted(found.values(), key=lambda fault: (fault["at_s"] or 0.0, fault["step"]), reverse=True)
    return {"count": max(len(latest), _count(logs)), "latest": latest[:MOST_KEPT]}


def _view_without(process: ProcessLog, lost: events.Lost) -> int | str:
    """Returns the view by which a worker is no longer a member: all tell of it, each at a step of its own."""
    views = (view for _, view in process.kept[events.Members] if view.step >= lost.step)
    gone = next((view.view for view in views if lost.worker not in [*view.members, *view.following]), None)
    return f"after step {lost.step}" if gone is None else gone


def _count(logs: Sequence[ProcessLog]) -> int:
    """Returns how much went wrong: faults and missed payloads, once although several processes tell of them."""
    workers = {worker for process in logs for worker in process.faults}
    faults = sum(max(process.faults[worker] for process in logs) for worker in workers)
    return faults + max((process.missed for process in logs), default=0)


def _faults(event: events.Event) -> Iterable[Fault]:
    match event:
        case events.Fault():
            words = plain_text(event.what)[:_LONGEST]
            yield {"at_s": None, "step": event.step, "worker": event.worker, "kind": _kind(words), "words": words}
        case events.Lost():
            words = f"no longer a member: {plain_text(event.why)[:_LONGEST]}"
            yield {"at_s": None, "step": event.step, "worker": event.worker, "kind": "lost", "words": words}
        case events.RoundApplied():
            came = f"{len(event.members)} of {event.expected} payloads"
            words = f"round of step {event.step}, fragment {event.fragment}: {came} came"
            yield {"at_s": None, "step": event.step, "worker": None, "kind": "dropped", "words": words}


def _kind(words: str) -> Literal["guarded", "left out", "rolled back", "fault"]:
    """Returns the kind of a fault by the trainer's words."""
    if "rolled back" in words:
        return "rolled back"
    if words.startswith("left out"):
        return "guarded" if "far larger" in words else "left out"
    return "fault"

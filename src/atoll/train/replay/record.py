"""Reads what the workers of an elastic run have recorded, and compares it between them."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from atoll.errors import DataError
from atoll.link.base import RoundId
from atoll.runs.events import Event, Joined, Members, read
from atoll.runs.evidence import AnchorMoved, Began, Excluded
from atoll.runs.layout import ANCHORS

IN_FLIGHT = 2
"""Rounds of one fragment that can be on their way at once: one that is cut off may complete them differently."""


@dataclass(slots=True)
class Stretch:
    """Holds what one worker recorded without interruption: between its start or a cut-off, and the next."""

    joined: int | None
    """The step after which it trains with the others; None if all started together."""
    since: int | None = None
    """Steps that it had trained before it was cut off, if it has joined again."""
    excluded: int | None = None
    """Steps that its outer loop had counted when it was cut off; None if it was not, or did not come back."""
    rounds: dict[RoundId, AnchorMoved] = field(default_factory=dict)

    @property
    def first(self) -> int:
        """The step after which it began."""
        return self.joined or 0

    @property
    def finished(self) -> bool:
        """Whether it went on to the end of the run."""
        return any(round_id.last for round_id in self.rounds)

    def is_final(self, round_id: RoundId) -> bool:
        """Return whether others cannot have completed a round differently after this worker was cut off or died."""
        later = [other for other in self.rounds if other.fragment == round_id.fragment and other > round_id]
        return self.finished or len(later) >= IN_FLIGHT


@dataclass(slots=True)
class Process:
    """Holds what one process of a worker recorded."""

    checkpoint: int | None
    """The step of the checkpoint that it loaded."""
    stretches: list[Stretch]

    @property
    def joined(self) -> int:
        """The step after which it began to train."""
        return self.stretches[0].first


@dataclass(frozen=True, slots=True)
class Difference:
    """Names the first round at which an anchor is not what it should be."""

    round_id: RoundId
    what: str


class RunRecord:
    """Holds the record of all workers.

    Args:
        events: By worker, the events of its anchors.jsonl.
    """

    def __init__(self, events: Mapping[int, Sequence[Event]]) -> None:
        self.processes = {worker: _processes(said) for worker, said in events.items()}
        """By worker, its processes in order."""
        self.views: dict[int, Members] = {}
        """By number."""
        for said in events.values():
            self.views |= {event.view: event for event in said if isinstance(event, Members)}
        began = [event for said in events.values() for event in said if isinstance(event, Began)]
        self.ranks = max((event.ranks for event in began), default=1)
        """Most ranks of one worker."""
        self.difference: Difference | None = None
        """The first round on which the workers do not agree."""
        self.rounds: dict[RoundId, AnchorMoved] = {}
        """Every round as the workers that went on completed it."""
        claims: dict[RoundId, list[tuple[int, Stretch]]] = {}
        for worker, stretch in self._stretches():
            for round_id in stretch.rounds:
                claims.setdefault(round_id, []).append((worker, stretch))
        for round_id in sorted(claims):
            self._settle(round_id, claims[round_id])

    def _stretches(self) -> Iterator[tuple[int, Stretch]]:
        for worker, processes in self.processes.items():
            yield from ((worker, stretch) for process in processes for stretch in process.stretches)

    def _settle(self, round_id: RoundId, claims: Iterable[tuple[int, Stretch]]) -> None:
        """Find out how a round was completed; note a difference if the workers do not agree."""
        final = [claim for claim in claims if claim[1].is_final(round_id)] or list(claims)
        first, stretch = final[0]
        self.rounds[round_id] = stretch.rounds[round_id]
        for worker, other in final[1:]:
            mine, theirs = outcome(stretch.rounds[round_id]), outcome(other.rounds[round_id])
            if mine != theirs and self.difference is None:
                what = f"worker {first} recorded {mine}, worker {worker} {theirs}"
                self.difference = Difference(round_id, what)

    @property
    def boundaries(self) -> set[int]:
        """The steps at which workers have joined."""
        return {stretch.joined for _, stretch in self._stretches() if stretch.joined is not None}

    def members_at(self, step: int) -> list[int]:
        """Return the workers that were due in rounds of a step."""
        views = sorted(self.views.values(), key=lambda view: view.view)
        return next((view.members for view in reversed(views) if view.boundary < step), views[0].members)

    def check_whole(self) -> None:
        """Raise a DataError if a worker takes part in a round, and nothing is recorded of how it trained."""
        for round_id, made in self.rounds.items():
            for worker in made.members:
                processes = self.processes.get(worker, [])
                if not any(process.joined < round_id.step for process in processes):
                    problem = f"{round_id}: worker {worker} took part, and no folder tells how it trained before"
                    raise DataError(f"{problem}: give the folders of all workers, or compare records with --check-only")


def outcome(moved: AnchorMoved) -> str:
    """Describe what all workers must have alike of a round."""
    return f"anchor {moved.fingerprint} at version {moved.version} from workers {moved.members}"


def read_worker(folder: Path) -> tuple[int, list[Event]]:
    """Return a worker's number and the events of its anchors.jsonl.

    Raises:
        DataError: The file is missing or damaged.
    """
    path = folder / ANCHORS
    if not path.exists():
        problem = f"{path} is missing: only workers of an elastic run (link.elastic) record what a replay needs"
        raise DataError(f"{problem}; give their folders, or that of the run", path=path)
    events = read(path)
    began = next((event for event in events if isinstance(event, Began)), None)
    if began is None:
        raise DataError(f'{path} has no "began" event: no process of this worker has trained', path=path)
    return began.worker, events


def round_of(moved: AnchorMoved) -> RoundId:
    """Return the round of an event."""
    return RoundId(moved.step, moved.fragment, moved.last)


def _processes(events: Sequence[Event]) -> list[Process]:
    processes: list[Process] = []
    for event in events:
        if isinstance(event, Began):
            if event.checkpoint is not None and event.joined is None and processes:
                _go_back(processes, event.checkpoint)
            else:
                processes.append(Process(event.checkpoint, [Stretch(event.joined)]))
        elif not processes:
            continue
        elif isinstance(event, AnchorMoved):
            processes[-1].stretches[-1].rounds[round_of(event)] = event
        elif isinstance(event, Excluded):
            if (cut := processes[-1].stretches[-1]).since is not None or len(processes[-1].stretches) == 1:
                cut.excluded = event.steps
                processes[-1].stretches.append(Stretch(None))
        elif isinstance(event, Joined) and event.since is not None:
            processes[-1].stretches[-1].joined, processes[-1].stretches[-1].since = event.at, event.since
    for process in processes:
        if len(process.stretches) > 1 and process.stretches[-1].since is None:  # it did not come back
            process.stretches.pop()
            process.stretches[-1].excluded = None
    return processes


def _go_back(processes: list[Process], step: int) -> None:
    """Forget what came after a step: all workers have started again from their checkpoints of it."""
    while len(processes) > 1 and processes[-1].joined > step:
        processes.pop()
    stretches = processes[-1].stretches
    while len(stretches) > 1 and (stretches[-1].since is None or stretches[-1].first > step):
        stretches.pop()
    stretches[-1].excluded = None
    for stretch in stretches:
        stretch.rounds = {round_id: moved for round_id, moved in stretch.rounds.items() if moved.applied <= step}

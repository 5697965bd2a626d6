"""The control plane of a run: what its processes gather, agree on and stop at, besides their rounds."""

import sys
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import Any

from atoll import checkpoint
from atoll._util.disk import sha256_of
from atoll._util.signals import Interrupts
from atoll.errors import LinkError
from atoll.link.base import LEFT_OUT, describe_differences
from atoll.link.net.fixed_link import NetLink
from atoll.link.net.traffic import Line
from atoll.link.seat import Seat
from atoll.settings.config import RunConfig, settings_of
from atoll.train.data.token_files import TokenData
from atoll.train.data.tokenizer import FILE, Bytes
from atoll.train.ranks.worker_ranks import WorkerRanks

FREE_TO_DIFFER = (
    *("out", "name", "device", "threads", "precision", "compile", "log.", "link.", "model.hf", "sync.offload"),
    *("data.source", "data.field", "data.cache", "data.limit"),
    *("train.keep", "train.accumulate", "train.eval_every", "train.eval_tokens", "train.log_every"),
)
"""Settings that may differ between workers: where and how each computes and writes, and its own text."""
FINISHED_WAIT_S = 20.0
"""Seconds for which a worker that has finished waits for others that may not have."""
STOP_WAIT_S = 15.0
"""Seconds for the other processes to report the same signal; Python handles one between two kernels."""
_LONGEST_S = 86_400.0  # to evaluate or export at the end; a worker that dies is noticed at once
RANKS_THAT_EXCHANGE = "ranks that exchange"
"""The term for the ranks of a worker that exchange a shard each: 1 where they hold the whole model."""
RESUME = "start every worker again with the same command and --resume"


class ControlPlane:
    """Connects all processes of a run: those of other workers, and the ranks of this one.

    All processes call the same methods in the same order. In a run of one process every method returns at once.
    """

    def __init__(self, ranks: WorkerRanks | None = None, link: NetLink | None = None) -> None:
        self.ranks = ranks or WorkerRanks()
        """The ranks of this process's worker."""
        self.link = link
        """This process's own link to other workers, if it has one."""

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[Seat, Any]:
        """Return what every process with a link says under a key, in worker order; JSON of one type."""
        return {} if self.link is None else self.link.gather(key, value, within_s)

    def lines(self) -> Mapping[int, Line]:
        """Return worker -> what this process has exchanged with it; empty without a link."""
        return {} if self.link is None else self.link.lines()

    def wait_for_all(self, place: str) -> None:
        """Wait until all processes reach this place of the run, however long they evaluate or export."""
        self.ranks.decide(lambda: bool(self.gather(place, True, _LONGEST_S)))

    def all_finished(self, finished: bool) -> bool:
        """Return whether the run has ended on every worker; one that has finished does not wait long.

        A worker killed while the others ended still needs their last rounds, so then all finish once more.
        """

        def ask() -> bool:
            try:
                said = self.gather("state", finished, FINISHED_WAIT_S if finished else None)
            except LinkError:
                if finished:
                    return True  # no other process is there
                raise
            return all(said.values()) if said else finished

        return self.ranks.decide(ask)

    # ------------------------------------------------------------------ agreement

    def agree_on_settings(self, config: RunConfig) -> None:
        """Compare run files before any work is done; LinkError names the differences."""
        self._agree("settings", settings_terms(config))

    def agree_on_data(self, data: TokenData) -> None:
        """Compare tokenizers, which must be the same, and texts, which may differ.

        Both in one exchange: if one rank fails at a first exchange, the others wait for it at a second.
        """
        self._agree("data", {**tokenizer_terms(data), "text": data.folder.name}, free=("text",))

    def _agree(self, key: str, mine: Mapping[str, str], free: Collection[str] = ()) -> None:
        self.ranks.decide(lambda: None if self.link is None else _compare(self.link, key, mine, free))

    def step_to_resume(self, steps: Sequence[int]) -> int | None:
        """Return the newest checkpoint that every process has, given the steps of those here.

        None with several processes: there is none. None in a run of one process: the newest good one, if any.
        """
        mine = self.ranks.common_steps(steps)
        if self.ranks.count == 1 and self.link is None:
            return None
        return self.ranks.decide(
            lambda: checkpoint.common_step(self.gather("checkpoints", mine) if self.link else {"here": mine})
        )

    # ------------------------------------------------------------------ stopping

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Add to a LinkError raised inside how to resume: every worker has a checkpoint by now."""
        try:
            yield
        except LinkError as error:
            if self.link is None or RESUME in str(error):  # another rank has said it
                raise
            raise LinkError(f"{error}; to go on, {RESUME}") from error


def settings_terms(config: RunConfig) -> dict[str, str]:
    """Return the settings that all workers must have alike."""
    settings = {key: value for key, value in settings_of(config).items() if not key.startswith(FREE_TO_DIFFER)}
    return {key: LEFT_OUT if value is None else str(value) for key, value in settings.items()}


def tokenizer_terms(data: TokenData) -> dict[str, str]:
    """Return what all workers must have alike of their tokens."""
    by_bytes = isinstance(data.tokenizer, Bytes)  # whichever version wrote their tokenizer.json
    tokenizer = "bytes" if by_bytes else sha256_of(data.folder / FILE)[:16]
    return {"tokenizer": tokenizer, "vocabulary": str(data.tokenizer.vocabulary)}


def _compare(link: NetLink, key: str, mine: Mapping[str, str], free: Collection[str]) -> None:
    """Compare terms with every other process; LinkError names a difference that is not `free`."""
    mine = {RANKS_THAT_EXCHANGE: str(link.seat.ranks), **mine}
    different_text = set()
    for seat, theirs in link.collect(key, mine):  # as they come: where the numbers of ranks differ, some never do
        ours, bound = ({name: text for name, text in one.items() if name not in free} for one in (mine, theirs))
        if differs := describe_differences(ours, bound):
            raise LinkError(f"{link.seat} and {seat} differ in {differs}")
        if any(theirs.get(name) != mine[name] for name in free):
            different_text.add(seat.worker)
    if different_text:
        others = f"worker{'s' if len(different_text) > 1 else ''} {', '.join(map(str, sorted(different_text)))}"
        print(f"note: {others} and this one (worker {link.worker}) have different text", file=sys.stderr)


class Stopped(SystemExit):
    """Ends a run that was told to stop and has saved, with status 130."""

    def __init__(self, *, together: bool) -> None:
        super().__init__(130)
        self.together = together
        """Whether all other processes of the run stop after the same step."""


class CoordinatedStop:
    """Decides after which step a run that was told to stop does so.

    A run resumes from a step that all workers have saved. So a worker that gets a signal tells the others how far it
    is, even while it waits for a round, and all train on to the furthest step. If not all got one, it stops alone.
    """

    def __init__(self, interrupts: Interrupts, control: ControlPlane, steps: Callable[[], int]) -> None:
        self._interrupts, self._steps = interrupts, steps
        self._ranks, self._link = control.ranks, control.link
        self._after: int | None = None
        self._has_told = False
        self.together = self._link is None
        """Whether all processes stop after the same step, and so can wait for each other before they leave."""
        if self._link is not None and self._ranks.is_leader:
            interrupts.on_first = self._tell

    def due(self) -> bool:
        """Return whether to stop now, between two steps; all ranks of a worker get the same answer."""
        if not self._ranks.any(bool(self._interrupts)):
            return False
        if self._after is None:
            self._after, self.together = self._ranks.from_leader(self._agree)
        return self._steps() >= self._after

    def _tell(self) -> None:
        """Tell the other workers after which step this one could stop."""
        link, step = self._link, self._steps() + 1  # a step that has just begun is not counted yet
        if self._has_told or link is None:
            return
        self._has_told = True

        def tell() -> None:
            with suppress(LinkError):  # it may have left already
                link.rendezvous().try_publish("stop", step, STOP_WAIT_S)

        # In a thread: this may be a signal handler, and the store may be far away.
        threading.Thread(target=tell, daemon=True).start()

    def _agree(self) -> tuple[int, bool]:
        """Return after which step to stop, and whether all workers do."""
        if self._link is None:
            return self._steps(), True
        self._tell()  # if another rank got the signal
        peers = self._link.seat.peers()
        # Not past the deadline of workers that wait in a round: they must hear why this one leaves.
        within_s = min(STOP_WAIT_S, self._link.deadline_s / 2)
        steps = self._link.rendezvous().poll("stop", peers, within_s)
        together = len(steps) == len(peers)
        return max(steps.values()) if together else self._steps(), together

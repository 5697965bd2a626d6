"""One worker of benchmarks/chaos.py: trains over an elastic link and writes down every round that it applies.

Its batches are a function of seat and step alone, and its loss is exact: the tokens come from a known distribution.
With `strike` it hits itself, its line or the registry at a moment that no other process could hit: while it joins,
sends, applies, flushes, is admitted, gives its state to a joiner, saves or finishes.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import atoll
from atoll import checkpoint
from atoll.core.allreduce import Reduction
from atoll.core.flat import fingerprint
from atoll.link.base import Admission, FragmentState, Offer, Pending, Round, RoundId
from atoll.link.net import elastic_link
from atoll.link.net.elastic_link import ElasticLink, ElasticOptions
from atoll.link.net.identity import Identity
from atoll.link.net.protocol import Protocol
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.views import Decision
from atoll.outer.stats import Applied

VOCABULARY = 32
BATCH = 64
SAMPLE_STEPS = 100
"""Inner steps between two looks at the memory, threads and open files of this process."""


@dataclass(frozen=True, kw_only=True)
class Strike:
    """Says what a worker does when it reaches a moment for the nth time."""

    moment: str
    count: int = 1
    signal: int = 0
    """Sent to the process `pid`."""
    pid: int = 0
    """0: this one."""
    command: tuple[str, ...] = ()
    """Run instead of a signal."""
    while_joining: bool = False
    """Whether moments count from the start, and not only once a round has counted all workers."""


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one worker is to do."""

    worker: int = 0
    workers: int = 3
    registry: str = ""
    folder: str = ""
    """Holds keys, events and checkpoints of all workers, and `last`, the step after which the run ends."""
    method: str = "streaming"
    codec: str = "e3m0"
    period: int = 8
    delay: int = 1
    width: int = 32
    step_s: float = 0.02
    """Seconds that an inner step takes at least."""
    silent_s: float = 5.0
    min_workers: int = 1
    listen: str = "127.0.0.1:0"
    save_every: int = 0
    strike: Strike | None = None

    @property
    def keys(self) -> Path:
        """The folder of this worker's bundle."""
        return Path(self.folder, "keys", f"worker-{self.worker}")

    @property
    def events(self) -> Path:
        """The file to which it appends what happens, a JSON object a line."""
        return Path(self.folder, f"worker-{self.worker}.jsonl")

    @property
    def saves(self) -> Path:
        """The folder of its checkpoints."""
        return Path(self.folder, f"saves-{self.worker}")

    @property
    def last(self) -> Path:
        """The file that says after which step the run ends; it comes when the harness has seen enough."""
        return Path(self.folder, "last")


# ---------------------------------------------------------------------- training


def make_sync(task: Task) -> Any:
    """Return the algorithm of a task."""
    if task.method == "diloco":
        return atoll.DiLoCo(period=task.period, codec=task.codec)
    if task.method == "eager":
        return atoll.Eager(period=task.period, codec=task.codec)
    return atoll.Streaming(
        period=task.period,
        delay=task.delay,
        codec=task.codec,
        fragments=atoll.Balanced(count=4),
        merge=atoll.Blend(0.5),  # losses in docs/machines.md are of this pair
        outer=atoll.Nesterov(0.4, 0.9),
    )


def make_model(task: Task) -> nn.Module:
    """Return the model that all workers start from: it predicts a token from the two before it."""
    torch.manual_seed(7)
    inside = [layer for _ in range(3) for layer in (nn.Linear(task.width, task.width), nn.GELU())]
    first = (nn.Embedding(VOCABULARY, task.width), nn.Flatten(), nn.Linear(2 * task.width, task.width), nn.GELU())
    return nn.Sequential(*first, *inside, nn.Linear(task.width, VOCABULARY))


def chances() -> Tensor:
    """Return the chance of each token after each pair of tokens, of shape (VOCABULARY**2, VOCABULARY)."""
    generator = torch.Generator().manual_seed(11)
    return torch.softmax(1.5 * torch.randn(VOCABULARY**2, VOCABULARY, generator=generator), 1)


def pairs(numbers: Tensor) -> Tensor:
    """Return the tokens of numbered pairs, of shape (..., 2)."""
    return torch.stack((numbers // VOCABULARY, numbers % VOCABULARY), -1)


def batch(table: Tensor, seat: int, step: int) -> tuple[Tensor, Tensor]:
    """Return the numbers of pairs of tokens, and the token after each."""
    generator = torch.Generator().manual_seed(1_000_003 * seat + step)
    before = torch.randint(VOCABULARY**2, (BATCH,), generator=generator)
    return before, torch.multinomial(table[before], 1, generator=generator).squeeze(1)


def held_out_loss(model: nn.Module, table: Tensor) -> float:
    """Return the cross-entropy over all that can be seen, each with its chance: the loss on endless fresh text."""
    with torch.no_grad():
        scores = model(pairs(torch.arange(VOCABULARY**2)))
        return float(cross_entropy(scores, table))


def resources() -> dict[str, int]:
    """Return what this process uses: resident kB, threads, open files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"rss_kb": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "files": files}


class Log:
    """Appends events to a file, one write each, with the machine's monotonic clock."""

    def __init__(self, path: Path, worker: int) -> None:
        self._file: TextIO = path.open("a", buffering=1)
        self._worker = worker

    def write(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"t": time.monotonic(), "worker": self._worker, "kind": kind, **fields}) + "\n")


# ---------------------------------------------------------------------- strikes


class Striker:
    """Strikes once, when its moment has come as often as it should; from any thread."""

    def __init__(self, strike: Strike | None, log: Log) -> None:
        self._strike, self._log = strike, log
        self._left = strike.count if strike else 0
        self.armed = strike is not None and strike.while_joining
        self._lock = threading.Lock()

    def waits_for(self, moment: str) -> bool:
        """Return whether this moment is still to come."""
        return self._strike is not None and self._strike.moment == moment and self._left > 0

    def reach(self, moment: str) -> None:
        """Note that a moment has come."""
        with self._lock:
            if not self.armed or not self.waits_for(moment):
                return
            self._left -= 1
            if self._left:
                return
        strike = self._strike
        assert strike is not None
        self._log.write("strikes", moment=moment)
        if strike.command:
            subprocess.run(strike.command, check=True)
        else:
            os.kill(strike.pid or os.getpid(), strike.signal)


class StruckLink(ElasticLink):
    """Tells a striker which moments its worker reaches."""

    def __init__(self, worker: int, workers: int, options: ElasticOptions, log: Log, striker: Striker) -> None:
        super().__init__(worker, workers, options)
        self.hooks.on_decision = self._on_decision
        self.finishing = False
        self._log, self._striker = log, striker

    @property
    def address(self) -> str:
        """HOST:PORT where the others reach this worker."""
        assert self._member is not None
        return self._member.membership.present[self.worker].addresses[0]

    def _on_decision(self, decision: Decision) -> None:
        view = decision.view
        self._log.write(
            "view",
            number=view.number,
            members=sorted(view.lives),
            following=sorted(view.following),
            boundary=decision.boundary,
        )

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join, and strike between the announcement and the first view if that is the moment."""
        threading.Thread(target=self._look_for_announcement, daemon=True).start()
        admission = super().join(terms, weight, start)
        return None if admission is None else _StruckAdmission(admission, self._striker.reach)

    def _look_for_announcement(self) -> None:
        while self._striker.waits_for("joining"):
            member = self._member
            if member is not None and self.worker in member.membership.present:
                self._striker.reach("joining")
            time.sleep(0.0005)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Open a round, and strike while it is sent if that is the moment."""
        pending = super().open(round_id, offer, reduction)
        if self._striker.waits_for("sending"):
            time.sleep(0.003)
            self._striker.reach("sending")
        if self.finishing or round_id.last:
            self._striker.reach("finishing")
        return _StruckPending(pending, self._striker.reach)

    def _give(self) -> None:
        member = self._member
        if member is not None and self._saves is not None and member.donor.wanted(self._saves[0]):
            self._striker.reach("giving")
        super()._give()


@dataclass
class _StruckPending:
    pending: Pending
    reach: Callable[[str], None]

    def wait(self) -> Round:
        completed = self.pending.wait()
        self.reach("applying")
        return completed


@dataclass
class _StruckAdmission:
    admission: Admission
    reach: Callable[[str], None]

    def states(self, fragments: int) -> Iterator[FragmentState]:
        for state in self.admission.states(fragments):
            yield state
            self.reach("admitting")

    def newest_step(self) -> int:
        return self.admission.newest_step()

    def promote(self) -> int:
        return self.admission.promote()


def strike_flushes(striker: Striker) -> None:
    """Let the striker know of every look at what the others have told: the second one is amid a flush."""

    class StruckProtocol(Protocol):
        def _adopt_if_all_told(self) -> None:
            if self.is_flushing:
                striker.reach("flushing")
            super()._adopt_if_all_told()

    vars(elastic_link)["Protocol"] = StruckProtocol


def strike_saves(striker: Striker) -> None:
    """Let the striker know of every file that is about to be safe on disk: only checkpoints are, in a worker."""
    really = os.fsync

    def fsync(descriptor: int) -> None:
        striker.reach("saving")
        really(descriptor)

    os.fsync = fsync  # type: ignore[assignment]


# ---------------------------------------------------------------------- the worker


class Worker:
    """Trains until the run ends."""

    def __init__(self, task: Task) -> None:
        self.task = task
        self.log = Log(task.events, task.worker)
        self.striker = Striker(task.strike, self.log)
        strike_flushes(self.striker)
        strike_saves(self.striker)
        security: Identity | Insecure = Identity.load(task.keys) if task.keys.exists() else INSECURE
        options = ElasticOptions(
            registry=task.registry,
            security=security,
            listen=task.listen,
            silent_s=task.silent_s,
            min_workers=task.min_workers,
            join_s=60.0,
        )
        self.link = StruckLink(task.worker, task.workers, options, self.log, self.striker)
        self.model = make_model(task)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3, weight_decay=0.0)
        self.outer = atoll.OuterLoop(self.model, make_sync(task), self.link, observer=self._observe)
        self._table = chances()

    def _observe(self, applied: Applied) -> None:
        self.striker.armed |= len(applied.members) == self.task.workers
        replica = self.outer._rounds.replicas[applied.round_id.fragment]
        self.log.write(
            "applied",
            round=list(applied.round_id),
            step=applied.step,
            members=list(applied.members),
            version=replica.version,
            anchor=f"{fingerprint(replica.anchor):016x}",
        )

    def run(self) -> None:
        """Train to the end."""
        outer, log = self.outer, self.log
        log.write("starts", pid=os.getpid())
        self._load()
        outer.join()
        log.write("joined", steps=outer.steps, at=outer.joined_at, address=self.link.address)
        while outer.steps < self._last():
            before, rejoins = outer.steps, outer.counters.rejoins
            began = time.monotonic()
            self._train()
            time.sleep(max(0.0, self.task.step_s - (time.monotonic() - began)))
            outer.step()
            log.write("step")
            if outer.counters.rejoins != rejoins:
                log.write("rejoined", steps=outer.steps, before=before)
            elif outer.steps != before + 1:
                log.write("jumped", steps=outer.steps, before=before)
            if not any(outer._rounds.waiting()):
                self.striker.reach("between")
            if self.task.save_every and outer.steps % self.task.save_every == 0:
                self._save()
            if outer.steps % SAMPLE_STEPS == 0:
                log.write("sample", step=outer.steps, **resources())
        self._finish()

    def _train(self) -> None:
        before, after = batch(self._table, self.task.worker, self.outer.steps + 1)
        loss = cross_entropy(self.model(pairs(before)), after)
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()

    def _finish(self) -> None:
        self.link.finishing = True
        self.outer.finish()
        whole = torch.cat([parameter.detach().flatten() for parameter in self.model.parameters()])
        self.log.write(
            "finished",
            loss=held_out_loss(self.model, self._table),
            model=f"{fingerprint(whole):016x}",
            steps=self.outer.steps,
            counters=asdict(self.outer.counters),
        )
        self.link.close()
        self.log.write("ends", **resources())

    def _last(self) -> float:
        with suppress(FileNotFoundError):
            return int(self.task.last.read_text())
        return float("inf")

    def _save(self) -> None:
        state = {"model": self.model.state_dict(), "outer": self.outer.state_dict()}
        checkpoint.save(self.task.saves, self.outer.steps, state)
        self.log.write("saved", steps=self.outer.steps)

    def _load(self) -> None:
        if checkpoint.steps(self.task.saves):
            steps, state = checkpoint.load(self.task.saves)
            self.model.load_state_dict(state["model"])
            self.outer.load_state_dict(state["outer"])
            self.log.write("loaded", steps=steps)


def main(task: Task) -> None:
    """Train to the end."""
    torch.set_num_threads(1)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the harness ends it
    Worker(task).run()


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))

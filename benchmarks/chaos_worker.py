"""One worker of benchmarks/chaos.py: trains over an elastic link and writes down every round that it applies.

    python benchmarks/chaos_worker.py TASK     # a Task as JSON; chaos.py writes it

Its "gradients" are a function of seat, step and parameters alone, so that a run can be replayed. With `die_at` it kills
itself at a moment that no other process could hit: while it sends, applies, flushes, joins, is admitted, or finishes.
"""

import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TextIO

import torch
from torch import Tensor, nn

import atoll
from atoll.core.allreduce import Reduction
from atoll.core.flat import fingerprint
from atoll.link.base import Admission, FragmentState, Offer, Pending, Round, RoundId
from atoll.link.net.elastic import ElasticLink, ElasticOptions
from atoll.link.net.identity import Identity
from atoll.link.net.registry import INSECURE, Insecure
from atoll.link.net.views import Decision
from atoll.outer.stats import Applied


@dataclass(frozen=True, kw_only=True)
class Task:
    """What one worker is to do."""

    worker: int
    workers: int
    registry: str
    keys: str
    """Folder of its bundle; empty for no security."""
    events: str
    """File to which it appends what happens, a JSON object a line."""
    method: str = "streaming"
    codec: str = "e3m0"
    period: int = 6
    delay: int = 1
    width: int = 32
    """The model has 6 layers of this width, squared."""
    steps: int = 400
    step_s: float = 0.02
    """Seconds that an inner step takes at least."""
    silent_s: float = 1.0
    min_workers: int = 1
    listen: str = "127.0.0.1:0"
    die_at: str = ""
    """MOMENT:COUNT, at which it kills itself."""


def make_sync(task: Task) -> Any:
    """Return the algorithm of a task."""
    if task.method == "diloco":
        return atoll.DiLoCo(period=task.period, codec=task.codec)
    if task.method == "eager":
        return atoll.Eager(period=task.period, codec=task.codec)
    return atoll.Streaming(period=task.period, delay=task.delay, codec=task.codec, fragments=atoll.Balanced(count=3))


def make_model(task: Task) -> nn.Module:
    """Return the model that all workers start from."""
    torch.manual_seed(7)
    return nn.Sequential(*(nn.Linear(task.width, task.width) for _ in range(6)))


def inner_step(model: nn.Module, seat: int, step: int) -> None:
    """Move the parameters towards a point that depends on seat and step."""
    generator = torch.Generator().manual_seed(1_000_003 * seat + step)
    with torch.no_grad():
        for parameter in model.parameters():
            target = torch.randn(parameter.shape, generator=generator) * 0.1 + 0.3
            parameter.lerp_(target, 0.05)


def resources() -> dict[str, int]:
    """Return what this process uses: resident kB, threads, open files."""
    status = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    files = len(list(Path("/proc/self/fd").iterdir()))
    return {"rss_kb": int(status["VmRSS"].split()[0]), "threads": int(status["Threads"]), "files": files}


class Log:
    """Appends events to a file, one write each, with the machine's monotonic clock."""

    def __init__(self, path: str, worker: int) -> None:
        self._file: TextIO = Path(path).open("a", buffering=1)  # noqa: SIM115 - open until the process ends
        self._worker = worker

    def write(self, kind: str, **fields: Any) -> None:
        """Write one event."""
        self._file.write(json.dumps({"t": time.monotonic(), "worker": self._worker, "kind": kind, **fields}) + "\n")


class DyingLink(ElasticLink):
    """Kills its process at a given moment."""

    def __init__(self, worker: int, workers: int, options: ElasticOptions, die_at: str) -> None:
        super().__init__(worker, workers, options)
        moment, _, count = die_at.partition(":")
        self._moment, self._left = moment, int(count or 1)
        self.hooks.on_decision = self._on_decision
        self.log: Log | None = None
        self.finishing = False

    def _die(self, moment: str) -> None:
        if moment == self._moment:
            self._left -= 1
            if self._left == 0:
                if self.log is not None:
                    self.log.write("dies", at=moment)
                os.kill(os.getpid(), signal.SIGKILL)

    def _on_decision(self, decision: Decision) -> None:
        if self.log is not None:
            view = decision.view
            members = sorted(view.lives)
            self.log.write(
                "view",
                number=view.number,
                members=members,
                following=sorted(view.following),
                boundary=decision.boundary,
            )
        self._die("flushing")

    def join(self, terms: Mapping[str, str], weight: float, start: Mapping[str, str] | None = None) -> Admission | None:
        """Join, and die on the way if that is the moment."""
        self._die("joining")
        admission = super().join(terms, weight, start)
        if admission is None or self._moment != "admitting":
            return admission
        return _DyingAdmission(admission, self._die)

    def open(self, round_id: RoundId, offer: Offer | None, reduction: Reduction) -> Pending:
        """Open a round, and die while it is sent if that is the moment."""
        pending = super().open(round_id, offer, reduction)
        if self._moment == "sending":
            time.sleep(0.003)
        self._die("sending")
        if self.finishing or round_id.last:
            self._die("finishing")
        return _DyingPending(pending, self._die)


@dataclass
class _DyingPending:
    pending: Pending
    die: Callable[[str], None]

    def wait(self) -> Round:
        completed = self.pending.wait()
        self.die("applying")
        return completed


@dataclass
class _DyingAdmission:
    admission: Admission
    die: Callable[[str], None]

    def states(self, fragments: int) -> Iterator[FragmentState]:
        for state in self.admission.states(fragments):
            yield state
            self.die("admitting")

    def newest_step(self) -> int:
        return self.admission.newest_step()

    def promote(self) -> int:
        return self.admission.promote()


def main(task: Task) -> None:
    """Train to the end."""
    torch.set_num_threads(1)
    log = Log(task.events, task.worker)
    log.write("starts", pid=os.getpid())
    security: Identity | Insecure = Identity.load(Path(task.keys)) if task.keys else INSECURE
    options = ElasticOptions(
        registry=task.registry,
        security=security,
        listen=task.listen,
        silent_s=task.silent_s,
        min_workers=task.min_workers,
        join_s=60.0,
    )
    link = DyingLink(task.worker, task.workers, options, task.die_at)
    link.log = log
    model = make_model(task)

    def observe(applied: Applied) -> None:
        replica = outer._rounds.replicas[applied.round_id.fragment]
        log.write(
            "applied",
            round=list(applied.round_id),
            step=applied.step,
            members=list(applied.members),
            version=replica.version,
            anchor=f"{fingerprint(replica.anchor):016x}",
        )

    outer = atoll.OuterLoop(model, make_sync(task), link, observer=observe)
    outer.join()
    log.write("joined", steps=outer.steps, at=outer.joined_at)
    while outer.steps < task.steps:
        began = time.monotonic()
        before = outer.steps
        inner_step(model, task.worker, outer.steps + 1)
        time.sleep(max(0.0, task.step_s - (time.monotonic() - began)))
        outer.step()
        if outer.steps != before + 1:
            log.write("rejoined", steps=outer.steps, before=before)
        if outer.steps % 250 == 0:
            log.write("sample", **resources())
    link.finishing = True
    outer.finish()
    whole: Tensor = torch.cat([p.detach().flatten() for p in model.parameters()])
    loss = float((whole - 0.3).square().mean())
    log.write(
        "finished", loss=loss, model=f"{fingerprint(whole):016x}", steps=outer.steps, counters=asdict(outer.counters)
    )
    link.close()
    log.write("ends")


if __name__ == "__main__":
    main(Task(**json.loads(sys.argv[1])))

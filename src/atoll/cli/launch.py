"""`atoll launch`: all workers of a run as processes on this machine, as they would be on machines of their own.

What a worker says goes to OUT/NAME/worker-K/log.txt. There, because that folder is all that worker K writes, and so all
of it that one has to keep, move or delete.
"""

import os
import random
import re
import shlex
import signal
import socket
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from atoll._util.disk import locked
from atoll._util.parent_death import PATIENCE_S
from atoll.cli.processes import ProcessExit, ProcessSpec, count_cores, supervise
from atoll.errors import AtollError, ConfigError, printable
from atoll.runs.layout import LOG, RUN, worker_folder
from atoll.settings.config import RunConfig, load

HERE = "127.0.0.1"
LOCK = ".launch"
_PORTS = range(20_000, 32_768)
_TORCHRUN = (
    "from atoll._util.parent_death import exit_with_parent; exit_with_parent(); "
    "from torch.distributed.run import main; main()"
)
TORCHRUN_TELLS = r"[EW]\d{4} .* torch/distributed/elastic/"
"""How torchrun's own account of a failure begins, after what a rank has said of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """What `atoll launch` is given; most of it is for `atoll train`."""

    file: Path
    changes: Sequence[str] = ()
    workers: int | None = None
    """None: as many as the file says."""
    ranks: int = 1
    """Processes of one worker, which share its batch; more than one are started by torchrun."""
    resume: bool = False
    out: Path | None = None
    name: str | None = None
    link: str | None = None
    port: int | None = None
    """None: one that is free."""


def launch(options: LaunchOptions) -> Path:
    """Run all workers to their ends and return the folder of the run.

    AtollError names the worker that failed first; KeyboardInterrupt says how to go on.
    """
    address = f"{HERE}:{_port(options.port)}"
    config = checked(options, address)
    place = Path(config.out).expanduser() / config.name
    if not options.resume:
        _refuse_begun(place, config.sync.workers)
    with _alone(place):
        jobs = plan(options, config, address)
        told = f"{len(jobs)} workers" if len(jobs) > 1 else "1 worker"
        where = f"each writes to {place}/worker-K, what it says to {LOG} there"
        try:
            outcome = supervise(jobs, f"{told}, worker 0 at {address}; {where}")
        except BrokenPipeError:
            why = "nobody reads what is printed here any more, so all workers were stopped"
            raise AtollError(f"{why}; continue with: {shlex.join(again(options, config))}") from None
    if outcome.failed:
        raise _failure(outcome.failed, shlex.join(again(options, config)))
    if outcome.interrupted and any(one.status for one in outcome.ended):  # not if they were done anyway
        _warn_of_unsaved(outcome.ended, options.ranks)
        raise KeyboardInterrupt(f"stopped; continue with: {shlex.join(again(options, config))}")
    return place


# ---------------------------------------------------------------------- before anything is started


def checked(options: LaunchOptions, address: str) -> RunConfig:
    """The run that all workers will read, refused here once instead of by every one of them."""
    workers = [] if options.workers is None else [f"sync.workers={options.workers}"]
    config = load(options.file, [*options.changes, *workers, f"link.address={address}"])
    given = {"out": options.out and str(options.out), "name": options.name, "link.emulate": options.link}
    config = config.changed(**{key: value for key, value in given.items() if value is not None})
    if config.link.emulate is not None:
        from atoll.plan.link import parse_link  # brings torch along, which this process has no other use for

        parse_link(config.link.emulate)
    return config


def _refuse_begun(place: Path, workers: int) -> None:
    for folder in (place, *(place / worker_folder(worker) for worker in range(workers))):
        if (folder / RUN).exists():
            raise ConfigError(
                f"{folder} holds a run already: continue it with --resume, choose another --name, or delete it"
            )


@contextmanager
def _alone(place: Path) -> Iterator[None]:
    """Hold a run's folder: a second launch would only add refusals to the logs of the first."""

    def refuse() -> None:
        raise AtollError(f"{place} is being trained by another `atoll launch`: wait for it, or choose another --name")

    place.mkdir(parents=True, exist_ok=True)
    with locked(place / LOCK, refuse):
        yield


def _port(wanted: int | None) -> int:
    if wanted is None:
        return free_ports(1)[0]
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # one that was just left is free
        try:
            probe.bind((HERE, wanted))
        except OSError as fault:
            why = f"cannot be used on {HERE}: {fault.strerror}"
            raise ConfigError(f"--port {wanted}: {why}; choose another, or leave it out for a free one") from None
    return wanted


def free_ports(count: int) -> list[int]:
    """Ports that nobody uses, all different; none that the kernel may hand to somebody else at any moment."""
    free = (port for port in random.sample(_PORTS, len(_PORTS)) if _is_free(port))
    return list(islice(free, count))


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        try:
            probe.bind((HERE, port))
        except OSError:
            return False
    return True


# ---------------------------------------------------------------------- what is started


def plan(options: LaunchOptions, config: RunConfig, address: str) -> list[ProcessSpec]:
    """One process a worker."""
    workers, place = config.sync.workers, Path(config.out).expanduser() / config.name
    meetings = free_ports(workers) if options.ranks > 1 else [None] * workers
    return [
        ProcessSpec(
            name=f"worker {worker}",
            command=command(options, place, worker, workers, address, meetings[worker]),
            environment=environment(config, worker, options.ranks),
            log=place / worker_folder(worker) / LOG,
            aftermath=TORCHRUN_TELLS if options.ranks > 1 else None,
        )
        for worker in range(workers)
    ]


def command(
    options: LaunchOptions, place: Path, worker: int, workers: int, address: str, meeting: int | None = None
) -> list[str]:
    """How one worker of the run at `place` is started; `meeting` is the port where its ranks find each other."""
    logs = place / worker_folder(worker) / "torchrun"
    return [
        *(by_torchrun(options.ranks, meeting, logs) if options.ranks > 1 else []),
        *(sys.executable, "-m", "atoll", "train", str(options.file)),
        *("--worker", str(worker), "--address", address),
        *_passed_on(options),
        *("--set", f"sync.workers={workers}"),  # after the others: the last one counts
        *(["--resume"] if options.resume else []),
        *("--view", "lines"),
    ]


def by_torchrun(ranks: int, meeting: int | None, logs: Path) -> list[str]:
    """What to put before a command so that torchrun starts it as so many ranks, who meet at port `meeting`."""
    return [
        *(sys.executable, "-c", _TORCHRUN),
        *("--nproc-per-node", str(ranks), "--master-port", str(meeting)),
        *("--log-dir", str(logs)),  # or each start would leave one in /tmp
        "--no-python",  # its own way to start Python writes lines in pieces, and those of other ranks come between
    ]


def again(options: LaunchOptions, config: RunConfig) -> list[str]:
    """The command that goes on from here."""
    workers, ranks = ["--workers", str(config.sync.workers)], ["--ranks", str(options.ranks)]
    return [
        *("atoll", "launch", str(options.file)),
        *workers,
        *_passed_on(options),
        *(ranks if options.ranks > 1 else []),
        "--resume",
    ]


def _passed_on(options: LaunchOptions) -> list[str]:
    given = {"--out": options.out, "--name": options.name, "--link": options.link}
    return [
        *(part for change in options.changes for part in ("--set", change)),
        *(part for option, value in given.items() if value is not None for part in (option, str(value))),
    ]


def environment(
    config: RunConfig, worker: int, ranks: int = 1, base: Mapping[str, str] = os.environ, cores: int | None = None
) -> dict[str, str]:
    """Ours, with a worker's share of the cores and of the GPUs: left alone, each would take all of them."""
    result = dict(base)
    if config.threads is None:
        cores = cores or count_cores()
        result["OMP_NUM_THREADS"] = str(max(1, cores // (config.sync.workers * ranks)))
    gpus = _gpus(base)
    if config.device in ("auto", "cuda") and len(gpus) >= ranks:
        mine = [gpus[(worker * ranks + rank) % len(gpus)] for rank in range(ranks)]
        result["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    if ranks > 1:
        result["PYTHONUNBUFFERED"] = ""  # or lines are written in pieces as well
        result.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{PATIENCE_S:.0f}")  # time to save; torchrun gives 30 s
    return result


def _gpus(base: Mapping[str, str]) -> list[str]:
    """What CUDA will call them, found without the seconds that importing torch takes."""
    if "CUDA_VISIBLE_DEVICES" in base:
        return [name for name in base["CUDA_VISIBLE_DEVICES"].split(",") if name]
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(number) for number in range(len(devices))]


# ---------------------------------------------------------------------- how it ended


def _failure(ended: ProcessExit, to_go_on: str) -> AtollError:
    """What went wrong first, and how to go on; status 2 is for settings, here as for the worker."""
    said = ended.said.removeprefix("error: ") or "it said nothing"
    how = f"(exit status {ended.status}): {said}"
    if ended.status < 0:  # then its last line is no reason
        oom = ", as the system does when memory runs out" if ended.status == -signal.SIGKILL else ""
        how = f"(killed by {signal.Signals(-ended.status).name}{oom}), its last line: {said}"
    told = f"{ended.job.name} failed first {how}; all it said is in {ended.job.log}"
    if ended.status == 2:
        return ConfigError(told)
    return AtollError(f"{told}\nOnce it is mended, continue with: {to_go_on}")


def _warn_of_unsaved(ended: Sequence[ProcessExit], ranks: int) -> None:
    """Who was stopped and did not end as one that has saved; of several ranks, torchrun hides how they ended."""
    fine = {0, 130} if ranks == 1 else {0, 1, 130}
    for one in ended:
        if one.status not in fine:
            said = printable(one.said) or "it said nothing"
            print(f"warning: {one.job.name} may not have saved: {said}", file=sys.stderr)

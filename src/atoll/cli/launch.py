"""Implements `atoll launch`: runs all workers as processes on this machine, as they would run on several.

The output of worker K goes to OUT/NAME/worker-K/log.txt, for that folder holds all that worker K writes.
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
from atoll._util.signals import PATIENCE_S
from atoll.cli.processes import ProcessExit, ProcessSpec, count_cores, supervise
from atoll.errors import AtollError, ConfigError, printable
from atoll.runs.layout import LOG, RUN, worker_folder
from atoll.settings.config import RunConfig, load

HERE = "127.0.0.1"
LOCK = ".launch"
_PORTS = range(20_000, 32_768)
_TORCHRUN = (
    "from atoll._util.signals import exit_with_parent; exit_with_parent(); "
    "from torch.distributed.run import main; main()"
)
TORCHRUN_AFTERMATH = r"[EW]\d{4} .* torch/distributed/elastic/"
"""Begins torchrun's own account of a failure, which follows the rank's error."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LaunchOptions:
    """Options of `atoll launch`; most are passed on to `atoll train`."""

    file: Path
    changes: Sequence[str] = ()
    workers: int | None = None
    """None for sync.workers of the file."""
    ranks: int = 1
    """Processes of one worker, which share its batch; torchrun starts more than one."""
    resume: bool = False
    out: Path | None = None
    name: str | None = None
    link: str | None = None
    port: int | None = None
    """None for a free one."""
    restart: bool = False
    """Start dead workers of an elastic run again."""


def launch(options: LaunchOptions) -> Path:
    """Run all workers to their ends and return the folder of the run.

    Raises:
        AtollError: A worker failed; the message names the first one.
        KeyboardInterrupt: Interrupted; the message says how to continue.
    """
    from atoll.link.net.run_keys import throw_away_folder

    address = f"{HERE}:{_port(options.port)}"
    config = checked(options, {"link.address": address, "link.keys": "keys", "link.security": "keys"})
    place = Path(config.out).expanduser() / config.name
    with folder_of(options, config), throw_away_folder(config.sync.workers) as keys:
        jobs = plan(options, config, address, keys)
        count = f"{len(jobs)} workers" if len(jobs) > 1 else "1 worker"
        where = f"each writes to {place}/worker-K, its output to {LOG} there"
        resume = shlex.join(resume_command(options, config))
        with stopping_at_a_closed_pipe(resume):
            outcome = supervise(jobs, f"{count}, worker 0 at {address}; {where}")
    if outcome.failed:
        raise failure(outcome.failed, resume)
    if outcome.interrupted and any(one.status for one in outcome.ended):  # else they were done anyway
        raise stopped(outcome.ended, options, resume)
    return place


# ---------------------------------------------------------------------- before the start


def checked(options: LaunchOptions, links: Mapping[str, str]) -> RunConfig:
    """Load the run that all workers will read; refuses it once, instead of in every worker.

    Args:
        options: What `atoll launch` was given.
        links: Settings that say how the workers meet, by dotted key.
    """
    where = {"out": options.out and str(options.out), "name": options.name}
    given = {"sync.workers": options.workers, "link.emulate": options.link}
    config = load(options.file, options.changes, {**where, **given, **links})
    if config.link.emulate is not None:
        from atoll.plan.line import parse_line  # imports torch, which this process needs for nothing else

        parse_line(config.link.emulate)
    return config


@contextmanager
def folder_of(options: LaunchOptions, config: RunConfig) -> Iterator[None]:
    """Make the folder of a run and keep it locked: a second launch would add errors to the logs of the first."""
    place = Path(config.out).expanduser() / config.name
    if not options.resume:
        _refuse_begun(place, config.sync.workers)
    place.mkdir(parents=True, exist_ok=True)
    busy = AtollError(f"{place} is being trained by another `atoll launch`: wait for it, or choose another --name")
    with locked(place / LOCK, busy):
        yield


def _refuse_begun(place: Path, workers: int) -> None:
    for folder in (place, *(place / worker_folder(worker) for worker in range(workers))):
        if (folder / RUN).exists():
            advice = "continue it with --resume, choose another --name, or delete it"
            raise ConfigError(f"{folder} holds a run already: {advice}", setting="name", value=place.name)


def _port(wanted: int | None) -> int:
    if wanted is None:
        return free_ports(1)[0]
    if (fault := _port_fault(wanted)) is not None:
        problem = f"--port {wanted}: cannot be used on {HERE}: {fault.strerror}"
        raise ConfigError(f"{problem}; choose another, or leave it out for a free one", setting="port", value=wanted)
    return wanted


def free_ports(count: int) -> list[int]:
    """Return free ports, all different, below those that the kernel gives to outgoing connections."""
    free = (port for port in random.sample(_PORTS, len(_PORTS)) if _port_fault(port) is None)
    return list(islice(free, count))


def _port_fault(port: int) -> OSError | None:
    """Return why no process can listen on a port; None if one can."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a port of an ended process is free
        try:
            probe.bind((HERE, port))
        except OSError as fault:
            return fault
    return None


# ---------------------------------------------------------------------- the processes


def plan(options: LaunchOptions, config: RunConfig, address: str, keys: Path) -> list[ProcessSpec]:
    """Describe one process for each worker, whose bundle is in `keys`."""
    workers, place = config.sync.workers, Path(config.out).expanduser() / config.name
    master_ports = free_ports(workers) if options.ranks > 1 else [None] * workers
    return [
        ProcessSpec(
            name=f"worker {worker}",
            command=command(options, place, worker, workers, (address, keys), master_ports[worker]),
            environment=environment(config, worker, options.ranks),
            log=place / worker_folder(worker) / LOG,
            aftermath=TORCHRUN_AFTERMATH if options.ranks > 1 else None,
        )
        for worker in range(workers)
    ]


def command(
    options: LaunchOptions,
    place: Path,
    worker: int,
    workers: int,
    meeting: tuple[str, Path],
    master_port: int | None = None,
) -> list[str]:
    """Return the command that starts one worker.

    Args:
        options: What `atoll launch` was given.
        place: Folder of the run.
        worker: The worker's number.
        workers: Number of workers.
        meeting: Address of worker 0, and the folder of all workers' keys.
        master_port: Torchrun's, for several ranks.
    """
    address, keys = meeting
    logs = place / worker_folder(worker) / "torchrun"
    return [
        *(by_torchrun(options.ranks, master_port, logs) if options.ranks > 1 else []),
        *(sys.executable, "-m", "atoll", "train", str(options.file)),
        *("--worker", str(worker), "--address", address, "--keys", str(keys / worker_folder(worker))),
        *train_options(options),
        *("--set", f"sync.workers={workers}", "--set", "link.security=keys"),  # after the others: the last one counts
        *(["--resume"] if options.resume else []),
        *("--view", "lines"),
    ]


def by_torchrun(ranks: int, master_port: int | None, logs: Path) -> list[str]:
    """Return what to put before a command so that torchrun starts it as `ranks` processes."""
    return [
        *(sys.executable, "-c", _TORCHRUN),
        *("--nproc-per-node", str(ranks), "--master-port", str(master_port)),
        *("--log-dir", str(logs)),  # instead of a new folder in /tmp
        "--no-python",  # its own start of Python mixes lines of several ranks
    ]


def resume_command(options: LaunchOptions, config: RunConfig) -> list[str]:
    """Return the command that resumes the run."""
    workers, ranks = ["--workers", str(config.sync.workers)], ["--ranks", str(options.ranks)]
    return [
        *("atoll", "launch", str(options.file)),
        *workers,
        *train_options(options),
        *(ranks if options.ranks > 1 else []),
        *(["--restart"] if options.restart else []),
        "--resume",
    ]


def train_options(options: LaunchOptions) -> list[str]:
    """Return the options that `atoll train` takes as they are."""
    given = {"--out": options.out, "--name": options.name, "--link": options.link}
    return [
        *(part for change in options.changes for part in ("--set", change)),
        *(part for option, value in given.items() if value is not None for part in (option, str(value))),
    ]


def environment(
    config: RunConfig, worker: int, ranks: int = 1, base: Mapping[str, str] = os.environ, cores: int | None = None
) -> dict[str, str]:
    """Return the environment of a worker, limited to its share of the cores and GPUs."""
    result = dict(base)
    if config.threads is None:
        cores = cores or count_cores()
        result["OMP_NUM_THREADS"] = str(max(1, cores // (config.sync.workers * ranks)))
    gpus = _gpus(base)
    if config.device in ("auto", "cuda") and len(gpus) >= ranks:
        mine = [gpus[(worker * ranks + rank) % len(gpus)] for rank in range(ranks)]
        result["CUDA_VISIBLE_DEVICES"] = ",".join(mine)
    if ranks > 1:
        result["PYTHONUNBUFFERED"] = ""  # unbuffered, lines of several ranks would mix
        result.setdefault("TORCH_ELASTIC_SHUTDOWN_TIMEOUT", f"{PATIENCE_S:.0f}")  # time to save; torchrun gives 30 s
    return result


def _gpus(base: Mapping[str, str]) -> list[str]:
    """Return the names of the GPUs without importing torch, which takes seconds."""
    if "CUDA_VISIBLE_DEVICES" in base:
        return [name for name in base["CUDA_VISIBLE_DEVICES"].split(",") if name]
    devices = [path for path in Path("/dev").glob("nvidia*") if re.fullmatch(r"nvidia\d+", path.name)]
    return [str(number) for number in range(len(devices))]


# ---------------------------------------------------------------------- the end


@contextmanager
def stopping_at_a_closed_pipe(resume: str) -> Iterator[None]:
    """Turn a closed standard output into an error that says how to go on."""
    try:
        yield
    except BrokenPipeError:
        why = "standard output was closed, so all workers were stopped"
        raise AtollError(f"{why}; continue with: {resume}") from None


def stopped(ended: Sequence[ProcessExit], options: LaunchOptions, resume: str) -> KeyboardInterrupt:
    """Return what to raise after all workers were asked to stop."""
    _warn_unsaved(ended, options.ranks)
    return KeyboardInterrupt(f"stopped; continue with: {resume}")


def failure(ended: ProcessExit, resume: str) -> AtollError:
    """Make the error for the first failure; status 2 means a wrong setting, for the worker and here."""
    said = ended.said.removeprefix("error: ") or "no output"
    how = f"(exit status {ended.status}): {said}"
    if ended.status < 0:  # then its last line is not the reason
        oom = ", as the system does when memory runs out" if ended.status == -signal.SIGKILL else ""
        how = f"(killed by {signal.Signals(-ended.status).name}{oom}), its last line: {said}"
    problem = f"{ended.job.name} failed first {how}; its output is in {ended.job.log}"
    if ended.status == 2:
        return ConfigError(problem)
    return AtollError(f"{problem}\nOnce it is fixed, continue with: {resume}")


def _warn_unsaved(ended: Sequence[ProcessExit], ranks: int) -> None:
    """Warn of stopped workers that did not exit as after a save; torchrun hides the status of several ranks."""
    fine = {0, 130} if ranks == 1 else {0, 1, 130}
    for one in ended:
        if one.status not in fine:
            said = printable(one.said) or "no output"
            print(f"warning: {one.job.name} may not have saved: {said}", file=sys.stderr)

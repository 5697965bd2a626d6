"""Implements `atoll launch` for elastic runs: a registry, keys for all workers, and their processes.

The registry and the keys live as long as the command. A worker that dies is reported and the others go on; with
`--restart` it is started again and joins them.
"""

import shlex
import sys
import time
from collections import defaultdict, deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from atoll.cli.launch import (
    HERE,
    TORCHRUN_AFTERMATH,
    LaunchOptions,
    by_torchrun,
    checked,
    environment,
    failure,
    folder_of,
    free_ports,
    resume_command,
    stopped,
    stopping_at_a_closed_pipe,
    train_options,
)
from atoll.cli.processes import PrefixedOutput, ProcessExit, ProcessSpec, supervise
from atoll.errors import printable
from atoll.runs.layout import LOG, MODEL, worker_folder
from atoll.settings import toml as runfile
from atoll.settings.config import RunConfig

MOST_RESTARTS = 5
"""Most restarts of one worker within a minute."""
_MINUTE_S = 60.0
_LEFT = 130  # the exit status of a worker that was asked to stop


def is_elastic(options: LaunchOptions) -> bool:
    """Return whether the workers of a run file come and go."""
    table = runfile.parse_toml(runfile.read(options.file), str(options.file))
    link = runfile.overridden(table, map(runfile.Override.parse, options.changes)).get("link")
    return isinstance(link, dict) and link.get("elastic") is True


def launch_elastic(options: LaunchOptions) -> Path:
    """Run all workers to their ends and return the folder of the run.

    Raises:
        AtollError: No worker has finished; the message names the first that failed.
        KeyboardInterrupt: Interrupted; the message says how to continue.
    """
    config = checked(options, _meeting("127.0.0.1:1", Path("keys")))  # before anything is made
    place, workers = Path(config.out).expanduser() / config.name, config.sync.workers
    with folder_of(options, config):
        done = [k for k in range(workers) if (place / worker_folder(k) / MODEL).is_dir()] if options.resume else []
        if done:
            print(f"the run is finished already: its model is in {place / worker_folder(done[0]) / MODEL}")
            return place
        with serve_registry(workers, options.port) as (address, keys):
            meeting, ports = _meeting(address, keys), free_ports(workers) if options.ranks > 1 else [None] * workers
            jobs = [_job(options, config, worker, meeting, ports[worker]) for worker in range(workers)]
            output = _Output([job.name for job in jobs], restart=options.restart)
            where = f"each writes to {place}/worker-K, its output to {LOG} there"
            greeting = (
                f"{workers} worker{'' if workers == 1 else 's'} that may come and go, registry at {address}; {where}"
            )
            resume = shlex.join(resume_command(options, config))
            with stopping_at_a_closed_pipe(resume):
                outcome = supervise(jobs, greeting, audience=output, together=False, again=output.again)
    last = {ended.job.name: ended for ended in outcome.ended}
    if outcome.interrupted and any(ended.status for ended in last.values()):
        raise stopped(outcome.ended, options, resume)
    if outcome.failed is not None and all(ended.status for ended in last.values()):
        raise failure(outcome.failed, resume)
    for ended in last.values():
        if ended.status:
            print(f"warning: {ended.job.name} did not finish: {output.how(ended)}", file=sys.stderr)
    return place


def _meeting(address: str, keys: Path) -> dict[str, str]:
    """Return the settings that say how the workers of this machine meet."""
    bundle = str(keys / "worker-{worker}")
    return {"link.registry": address, "link.keys": bundle, "link.security": "keys", "link.listen": f"{HERE}:0"}


@contextmanager
def serve_registry(workers: int, port: int | None) -> Iterator[tuple[str, Path]]:
    """Serve a registry in this process; yield its address and the folder of the workers' keys."""
    from atoll.link.net.embedded import RegistryServer
    from atoll.link.net.event_loop import event_loop
    from atoll.link.net.identity import Identity
    from atoll.link.net.run_keys import throw_away_folder

    with throw_away_folder(workers) as keys:
        identity = Identity.load(keys / "registry")
        server = event_loop().run(RegistryServer.start(keys / "journal", f"{HERE}:{port or 0}", identity))
        try:
            yield server.address, keys
        finally:
            event_loop().run(server.close())


def _job(
    options: LaunchOptions, config: RunConfig, worker: int, meeting: dict[str, str], master_port: int | None
) -> ProcessSpec:
    place = Path(config.out).expanduser() / config.name / worker_folder(worker)
    given = {**meeting, "sync.workers": str(config.sync.workers)}
    command = [
        *(by_torchrun(options.ranks, master_port, place / "torchrun") if options.ranks > 1 else []),
        *(sys.executable, "-m", "atoll", "train", str(options.file), "--worker", str(worker)),
        *train_options(options),
        *(part for key, value in given.items() for part in ("--set", f"{key}={value}")),
        *("--view", "lines"),
    ]
    return ProcessSpec(
        name=f"worker {worker}",
        command=command,
        environment=environment(config, worker, options.ranks),
        log=place / LOG,
        aftermath=TORCHRUN_AFTERMATH if options.ranks > 1 else None,
    )


class _Output(PrefixedOutput):
    """Prints what workers say, and how those end that do not finish."""

    def __init__(self, names: list[str], *, restart: bool) -> None:
        super().__init__(names)
        self._restart = restart
        self._restarts: dict[str, deque[float]] = defaultdict(deque)
        self._is_again = False
        self._is_over = False  # a worker has finished, so nobody can join any more

    def again(self, ended: ProcessExit) -> bool:
        """Return whether to start a worker again: not one that was stopped, refused, late, or dies often."""
        past, now = self._restarts[ended.job.name], time.monotonic()
        while past and now - past[0] > _MINUTE_S:
            past.popleft()
        may = self._restart and ended.status not in (2, _LEFT) and not self._is_over
        self._is_again = may and len(past) < MOST_RESTARTS
        if self._is_again:
            past.append(now)
        return self._is_again

    def end(self, ended: ProcessExit) -> None:
        """Say how a worker has ended that did not finish."""
        self._is_over |= ended.status == 0
        if ended.status and not ended.asked:
            what = "it is started again" if self._is_again else "the others go on"
            if self._is_over:
                what = "the others have finished the run"
            elif not self._is_again and self._restart and ended.status not in (2, _LEFT):
                what = f"it is not started again, after {MOST_RESTARTS} times within a minute"
            self.say(f"{ended.job.name} is gone ({self.how(ended)}): {what}")

    @staticmethod
    def how(ended: ProcessExit) -> str:
        """Return how a worker has ended."""
        if ended.status < 0:
            return f"killed by signal {-ended.status}"
        return printable(ended.said.removeprefix("error: ")) or f"exit status {ended.status}"

"""Which part of a run this process is, what links it to the others, and what it must agree on with them."""

import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from atoll import checkpoint
from atoll._util.disk import sha256_of
from atoll.errors import ConfigError, LinkError
from atoll.link.base import LEFT_OUT, Link, describe_differences
from atoll.link.local import local
from atoll.link.net.link import NetLink, connect
from atoll.link.net.seat import Seat
from atoll.link.net.torchrun import torchrun_address
from atoll.link.shaped import Outage, Shape, shaped
from atoll.plan.link import parse_link
from atoll.settings.config import RunConfig, settings_of
from atoll.settings.conflicts import given_faults
from atoll.train.data.tokenizer import FILE
from atoll.train.data.tokens import TokenData
from atoll.train.ranks.worker_ranks import Team

OWN_CHOICE = (
    *("out", "name", "device", "threads", "precision", "compile", "log.", "link.", "model.hf", "sync.offload"),
    *("data.source", "data.field", "data.cache", "data.limit"),
    *("train.keep", "train.accumulate", "train.eval_every", "train.eval_tokens", "train.log_every"),
)
"""Settings that a site may have otherwise than the others: where and how it computes and writes, and its own text."""
_ANYBODY_S = 20.0  # for others to come to a worker that has finished
_LONGEST_S = 86_400.0  # to evaluate or export at the end; who dies is noticed at once, only who is cut off is not
RESUME = "start every worker again with the same command and --resume"


def seat_of(config: RunConfig, worker: int | None, environment: Mapping[str, str] = os.environ) -> Seat | None:
    """Which process of the run this is; None if it is the only one, with all workers.

    Processes of one worker are those of a torchrun of its own; without a worker's number, one torchrun has started the
    processes of all workers.
    """
    rank, ranks = 0, 1
    workers = config.sync.workers
    under_torchrun = "TORCHELASTIC_RUN_ID" in environment
    if under_torchrun:
        rank, ranks = int(environment["RANK"]), int(environment["WORLD_SIZE"])
    if worker is not None or under_torchrun:
        _refuse_faults(config)
    if worker is not None:
        if config.link.address is None:
            raise ConfigError(
                "link.address: is left out, and a worker on its own has to know where worker 0 listens: give it with "
                "--address HOST:PORT, or in the run file"
            )
        if config.sync.method == "none":
            raise ConfigError('sync.method: "none" has no workers that could be on machines of their own')
        if not 0 <= worker < workers:
            raise ConfigError(f"--worker {worker}: must be from 0 to {workers - 1} (sync.workers = {workers})")
        return Seat(worker, workers, rank, ranks)
    if under_torchrun:
        if ranks % workers:
            raise ConfigError(
                f"sync.workers: {workers} do not divide the {ranks} processes that torchrun has started; "
                "start a multiple of them, or give each worker a torchrun of its own, with --worker"
            )
        each = ranks // workers
        return Seat(rank // each, workers, rank % each, each)
    if config.link.address is not None:
        raise ConfigError(
            f"link.address: is {config.link.address}, so say which worker this is (--worker 0 or another), or leave it "
            "out of the run file to train all workers in this process"
        )
    return None


def _refuse_faults(config: RunConfig) -> None:
    """Between processes members are fixed; `settings/conflicts.py` knows only of those that are given an address."""
    for name in given_faults(config.faults):
        raise ConfigError(f"faults.{name}: is for workers of one process; between processes, members are fixed")


def links_of(config: RunConfig, seat: Seat | None, team: Team) -> tuple[list[Link], NetLink | None]:
    """The ends of the workers in this process, in worker order, none for a worker by itself.

    And the one to other processes, if it has one, as it is without any emulation. Where the ranks of a worker hold the
    same, one link serves them all, and the worker is like one of one rank to the others.
    """
    if config.sync.method == "none":
        return [], None
    ends: list[Link] = []
    mate: NetLink | None = None
    if seat is None:
        ends += local(config.sync.workers, faults=config.faults_of_link(), timeout_s=config.link.deadline_s)
    elif team.leads or not team.whole:
        mate = connect(
            config.link.address or torchrun_address(config.link.join_s),
            worker=seat.worker,
            workers=seat.workers,
            rank=0 if team.whole else seat.rank,
            ranks=1 if team.whole else seat.ranks,
            deadline_s=config.link.deadline_s,
            join_s=config.link.join_s,
        )
        if config.log.view != "none":
            mate.on_wait = partial(print, flush=True)
        ends.append(mate)
    if config.link.emulate is not None and ends:
        ends = [*shaped(ends, shape_of(config, 1 if team.whole else team.ranks))]
    return [team.link(end) for end in ends] or [team.link(None)], mate


def shape_of(config: RunConfig, sharers: int = 1) -> Shape:
    """The slow link that a run file asks for, or the part of one of several ranks that share it."""
    settings = config.link
    assert settings.emulate is not None
    try:
        line = parse_link(settings.emulate)
    except ConfigError as fault:
        raise ConfigError(f"link.emulate: {fault}") from fault
    return Shape(
        bits_per_s=line.bits_per_s / sharers,
        latency_s=line.latency_s,
        jitter_s=settings.jitter_s,
        loss=settings.loss,
        outages=tuple(Outage(start_s=outage.start_s, length_s=outage.length_s) for outage in settings.outages),
        seed=config.seed,
    )


# ---------------------------------------------------------------------- agreement


def agree_on_settings(link: NetLink | None, config: RunConfig) -> None:
    """Compare run files before any work is done; LinkError names the differences."""
    if link is None:
        return
    settings = {key: value for key, value in settings_of(config).items() if not key.startswith(OWN_CHOICE)}
    bound = {key: LEFT_OUT if value is None else str(value) for key, value in settings.items()}
    _compare(link, "settings", bound)


def agree_on_data(link: NetLink | None, data: TokenData) -> None:
    """Compare tokenizers, which must be the same, and texts, which may differ if that is meant.

    With one question: of ranks that agree together, one that fails at a first would be waited for at a second.
    """
    if link is None:
        return
    tokenizer = sha256_of(data.folder / FILE)[:16] if (data.folder / FILE).exists() else "bytes"
    mine = {"tokenizer": tokenizer, "vocabulary": str(data.tokenizer.vocabulary), "text": data.folder.name}
    said = _compare(link, "data", mine, free=("text",))
    others = sorted({seat.worker for seat, theirs in said.items() if theirs.get("text") != mine["text"]})
    if others:
        who = f"worker{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
        print(f"note: {who} and this one (worker {link.worker}) have different text", file=sys.stderr)


def step_to_resume(team: Team, link: NetLink | None, steps: Sequence[int]) -> int | None:
    """The checkpoint to resume from, given the steps of those that are here.

    None: with several workers, there is none; else the newest good one, if any.
    """
    if team.ranks > 1:
        shared = team.common(steps)
        return team.settle(lambda: common_step(link, shared) if link else max(shared, default=None))
    return common_step(link, steps) if link else None


def common_step(link: NetLink, steps: Sequence[int]) -> int | None:
    """The newest checkpoint that every process of the run has, given those of this one; None before the first."""
    return checkpoint.common_step(link.gather("checkpoints", list(steps)))


def all_finished(link: NetLink | None, finished: bool) -> bool:
    """Whether the run has ended on every worker. If it has not, those that have finished must finish once more.

    For a worker that was killed while the others came to their end still needs their last rounds. One that has finished
    asks for the others, but not for long: mostly there is nobody.
    """
    if link is None:
        return finished
    try:
        return all(link.gather("state", finished, _ANYBODY_S if finished else None).values())
    except LinkError:
        if finished:
            return True  # nobody else is there
        raise


@contextmanager
def resumable(link: NetLink | None) -> Iterator[None]:
    """Inside, all workers have a state to come back to: whoever loses the others is told how to go on."""
    try:
        yield
    except LinkError as fault:
        if link is None or RESUME in str(fault):  # another rank has said it
            raise
        raise LinkError(f"{fault}; to go on, {RESUME}") from fault


def meet(link: NetLink | None, place: str) -> None:
    """Wait until all have come to this place of the run, however long they evaluate or export."""
    if link is not None:
        link.gather(place, True, _LONGEST_S)


def _compare(
    link: NetLink, key: str, mine: Mapping[str, str], free: Collection[str] = ()
) -> dict[Seat, Mapping[str, str]]:
    """What every process says; LinkError names what differs and is not free to."""
    mine = {"ranks that exchange": str(link.seat.ranks), **mine}
    said: dict[Seat, Mapping[str, str]] = {}
    for seat, theirs in link.collect(key, mine):  # as they come: where ranks differ, some never do
        ours, bound = ({name: text for name, text in one.items() if name not in free} for one in (mine, theirs))
        if differs := describe_differences(ours, bound):
            raise LinkError(f"{link.seat} and {seat} differ in {differs}")
        said[seat] = theirs
    return said

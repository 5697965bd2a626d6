"""Connects a worker to a run whose members come and go: its link, what it compares, and how it stops."""

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

from atoll._util.signals import Interrupts
from atoll.errors import LinkError
from atoll.link.base import Link
from atoll.link.net.elastic_link import ElasticHooks, ElasticLink, ElasticOptions
from atoll.link.net.traffic import Line
from atoll.link.seat import Seat
from atoll.settings.config import RunConfig
from atoll.train.data.token_files import TokenData
from atoll.train.progress.members import MembershipLog
from atoll.train.ranks.control import (
    RANKS_THAT_EXCHANGE,
    STOP_WAIT_S,
    ControlPlane,
    Stopped,
    settings_terms,
    tokenizer_terms,
)
from atoll.train.ranks.security import security_of
from atoll.train.ranks.worker_ranks import WorkerRanks

COME_BACK = "the same command comes back to the run"


class ElasticControl(ControlPlane):
    """Lets a worker of an elastic run decide for itself; links compare what must be alike when workers meet.

    Args:
        ranks: The worker's ranks.
        elastic: Its link, on the leader; None on the other ranks.
        interrupts: Signals that this process has received.
        members: Who takes part; on the leader.
    """

    def __init__(
        self, ranks: WorkerRanks, elastic: ElasticLink | None, interrupts: Interrupts, members: MembershipLog
    ) -> None:
        super().__init__(ranks)
        self.elastic = elastic
        self.members = members
        self._interrupts = interrupts

    def lines(self) -> Mapping[int, Line]:
        """Return worker -> what this process has exchanged with it; empty on ranks without a link."""
        return {} if self.elastic is None else self.elastic.lines()

    def agree_on_settings(self, config: RunConfig) -> None:
        """Compare run files with each worker that this one meets."""
        link = {f"link.{name}": str(getattr(config.link, name)) for name in ("min_workers", "grace")}
        exchange = 1 if self.ranks.hold_whole_model else self.ranks.count
        self._compare_later({**settings_terms(config), **link, RANKS_THAT_EXCHANGE: str(exchange)})

    def agree_on_data(self, data: TokenData) -> None:
        """Compare tokenizers with each worker that this one meets."""
        self._compare_later(tokenizer_terms(data))

    def _compare_later(self, terms: Mapping[str, str]) -> None:
        if self.elastic is not None:
            self.elastic.hooks.terms = {**self.elastic.hooks.terms, **terms}

    def step_to_resume(self, steps: Sequence[int]) -> int | None:
        """Return the newest checkpoint that every rank of this worker has; the others are asked when it joins.

        None with several ranks: there is none, as after a kill amid the first one. None with one rank: the newest.
        """
        if self.ranks.count == 1:
            return None
        return max(self.ranks.common_steps(steps, required=False), default=None)

    def leave(self, reason: str) -> None:
        """Leave a run that goes on; all ranks of the worker wait for the leader to do so."""
        self.ranks.from_leader(lambda: self.elastic.leave(reason) if self.elastic else None)

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Let a signal end a wait for other workers, such as a pause, that lasts longer than a step."""

        # Only the leader waits for other workers; what ends its wait is raised on all ranks.
        timer = threading.Timer(STOP_WAIT_S, self.elastic.interrupt if self.elastic else lambda: None)
        timer.daemon = True
        self._interrupts.on_first = timer.start
        try:
            yield
        except LinkError:
            if not self._interrupts:
                raise
            if self.ranks.is_leader:
                print(f"stopped while it waited for other workers; {COME_BACK}", flush=True)
            raise Stopped(together=False) from None
        finally:  # nothing may fail while it saves and leaves
            timer.cancel()


def connect_elastic(
    config: RunConfig, seat: Seat, ranks: WorkerRanks, interrupts: Interrupts
) -> tuple[Link, ElasticControl]:
    """Make the link of a worker; it waits for no other worker yet.

    Returns:
        This rank's end of the worker's link, and what its ranks decide together.

    Raises:
        ConfigError: The keys cannot be read, or are another worker's.
    """
    say: Callable[[str], None] = (lambda line: None) if config.log.view == "none" else partial(print, flush=True)
    members = MembershipLog(seat.worker, config.link.min_workers, say)
    link = None
    if ranks.is_leader:
        link = ElasticLink(seat.worker, seat.workers, _options(config, seat))
        link.hooks = ElasticHooks(
            on_wait=say,
            on_decision=members.decided,
            on_lost=members.lost,
            check_interrupts=interrupts.raise_pending,
        )
    return ranks.wrap_elastic(link), ElasticControl(ranks, link, interrupts, members)


def _options(config: RunConfig, seat: Seat) -> ElasticOptions:
    settings = config.link
    assert settings.registry is not None  # checked with the run file
    return ElasticOptions(
        registry=settings.registry,
        security=security_of(config, seat.worker),
        listen=settings.listen,
        min_workers=settings.min_workers,
        silent_s=settings.silent_s,
        grace_s=settings.grace,
        connections=settings.connections,
        join_s=settings.join_s,
    )

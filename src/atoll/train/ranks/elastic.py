"""Connects a worker to a run whose members come and go: its link, what it compares, and how it stops."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from atoll._util.signals import Interrupts
from atoll.errors import LinkError
from atoll.link.net.elastic import ElasticHooks, ElasticLink, ElasticOptions
from atoll.link.net.seat import Seat
from atoll.settings.config import RunConfig
from atoll.train.data.token_files import TokenData
from atoll.train.progress.members import MembershipLog
from atoll.train.ranks.control import STOP_WAIT_S, ControlPlane, Stopped, settings_terms, tokenizer_terms
from atoll.train.ranks.security import security_of
from atoll.train.ranks.worker_ranks import WorkerRanks

COME_BACK = "the same command comes back to the run"


class ElasticControl(ControlPlane):
    """Lets one process of an elastic run decide for itself; links compare what must be alike when workers meet.

    Args:
        ranks: The worker's only rank.
        elastic: Its link.
        interrupts: Signals that this process has received.
        members: Who takes part.
    """

    def __init__(
        self, ranks: WorkerRanks, elastic: ElasticLink, interrupts: Interrupts, members: MembershipLog
    ) -> None:
        super().__init__(ranks)
        self.elastic = elastic
        self.members = members
        self._interrupts = interrupts

    def agree_on_settings(self, config: RunConfig) -> None:
        """Compare run files with each worker that this one meets."""
        link = {f"link.{name}": str(getattr(config.link, name)) for name in ("min_workers", "grace")}
        own = {**settings_terms(config), **link}
        self.elastic.hooks.terms = {**self.elastic.hooks.terms, **own}

    def agree_on_data(self, data: TokenData) -> None:
        """Compare tokenizers with each worker that this one meets."""
        self.elastic.hooks.terms = {**self.elastic.hooks.terms, **tokenizer_terms(data)}

    @contextmanager
    def resumable(self) -> Iterator[None]:
        """Let a signal end a wait for other workers, such as a pause, that lasts longer than a step."""

        timer = threading.Timer(STOP_WAIT_S, self.elastic.interrupt)
        timer.daemon = True
        self._interrupts.on_first = timer.start
        try:
            yield
        except LinkError:
            if not self._interrupts:
                raise
            print(f"stopped while it waited for other workers; {COME_BACK}", flush=True)
            raise Stopped(together=False) from None
        finally:  # nothing may fail while it saves and leaves
            timer.cancel()


def connect_elastic(config: RunConfig, seat: Seat, ranks: WorkerRanks, interrupts: Interrupts) -> ElasticControl:
    """Make the link of a worker; it waits for no other worker yet.

    Raises:
        ConfigError: The keys cannot be read, or are another worker's.
    """
    settings = config.link
    assert settings.registry is not None  # checked with the run file
    say: Callable[[str], None] = (lambda line: None) if config.log.view == "none" else partial(print, flush=True)
    options = ElasticOptions(
        registry=settings.registry,
        security=security_of(config, seat.worker),
        listen=settings.listen,
        min_workers=settings.min_workers,
        silent_s=settings.silent_s,
        grace_s=settings.grace,
        connections=settings.connections,
        join_s=settings.join_s,
    )
    members = MembershipLog(seat.worker, settings.min_workers, say)
    link = ElasticLink(seat.worker, seat.workers, options)
    link.hooks = ElasticHooks(say, members.decided, members.lost, interrupts.raise_pending)
    return ElasticControl(ranks, link, interrupts, members)

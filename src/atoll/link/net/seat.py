"""Which process of a run this is, and which others there are."""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll._util.checks import check_whole
from atoll.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Seat:
    """Which process of a run this is."""

    worker: int
    workers: int
    rank: int = 0
    """Among the processes of its worker."""
    ranks: int = 1

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        check_whole("ranks", self.ranks)
        for name, number, count in (("worker", self.worker, self.workers), ("rank", self.rank, self.ranks)):
            if type(number) is not int or not 0 <= number < count:
                raise ConfigError(f"{name} must be a whole number from 0 to {count - 1}, got {number!r}")

    def __str__(self) -> str:
        return f"worker {self.worker}" if self.ranks == 1 else f"worker {self.worker} rank {self.rank}"

    @property
    def key(self) -> str:
        """What it is called in the store, the same whatever the others think of its ranks."""
        return f"{self.worker}.{self.rank}"

    @property
    def hosts(self) -> bool:
        """Whether this process keeps the store."""
        return self.worker == 0 and self.rank == 0

    def all(self) -> "Iterator[Seat]":
        """Every process of the run."""
        for worker in range(self.workers):
            for rank in range(self.ranks):
                yield Seat(worker, self.workers, rank, self.ranks)

    def peers(self) -> "list[Seat]":
        """The same rank of every worker, this one included: they exchange rounds."""
        return [seat for seat in self.all() if seat.rank == self.rank]

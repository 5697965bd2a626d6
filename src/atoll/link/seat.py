"""Names the processes of a run by worker and rank."""

from collections.abc import Iterator
from dataclasses import dataclass

from atoll._util.checks import check_whole, config_error


@dataclass(frozen=True, slots=True)
class Seat:
    """Names one process of a run: its worker's seat, and its rank in that worker."""

    worker: int
    workers: int
    rank: int = 0
    """Its number among the processes of its worker."""
    ranks: int = 1

    def __post_init__(self) -> None:
        check_whole("workers", self.workers)
        check_whole("ranks", self.ranks)
        for name, number, count in (("worker", self.worker, self.workers), ("rank", self.rank, self.ranks)):
            if type(number) is not int or not 0 <= number < count:
                raise config_error(name, number, f"a whole number from 0 to {count - 1}")

    def __str__(self) -> str:
        return f"worker {self.worker}" if self.ranks == 1 else f"worker {self.worker} rank {self.rank}"

    @property
    def key(self) -> str:
        """Its key at the meeting point, independent of the number of ranks."""
        return f"{self.worker}.{self.rank}"

    @property
    def hosts(self) -> bool:
        """Whether this process hosts the meeting point."""
        return self.worker == 0 and self.rank == 0

    def all(self) -> "Iterator[Seat]":
        """Yield every process of the run, worker by worker."""
        for worker in range(self.workers):
            for rank in range(self.ranks):
                yield Seat(worker, self.workers, rank, self.ranks)

    def peers(self) -> "list[Seat]":
        """Return the same rank of every worker, this one included: they exchange rounds."""
        return [seat for seat in self.all() if seat.rank == self.rank]

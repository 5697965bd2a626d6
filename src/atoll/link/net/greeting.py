"""Holds what processes of a run tell each other when they meet."""

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from atoll.link.net.messages import MAX_WEIGHT

Term = Annotated[str, Field(max_length=10_000)]


class Greeting(BaseModel):
    """Tells the settings of a process, for the others to compare with their own."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    terms: Annotated[dict[Term, Term], Field(max_length=10_000)]
    """What all workers must have alike."""
    start: Annotated[dict[Term, Term], Field(max_length=100)]
    """What workers that start together must have alike as well."""
    steps: Annotated[int, Field(ge=0, lt=1 << 63)] = 0
    """Inner steps that the worker has made: more than 0 if it resumes."""
    weight: Annotated[float, Field(gt=0, le=MAX_WEIGHT)]
    """The worker's share of every mean, before normalisation."""

    @classmethod
    def parse(cls, data: bytes) -> "Greeting":
        """Parse a greeting; ValueError in one short line if it is anything else."""
        try:
            return cls.model_validate_json(data)
        except ValidationError as fault:
            raise ValueError(f"something that cannot be read: {fault.errors()[0]['msg'][:200]!a}") from None

    def encode(self) -> bytes:
        """Return the greeting as JSON."""
        return self.model_dump_json().encode()

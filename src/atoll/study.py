"""Several runs side by side: a study file is a run file with a [study] section that says what varies.

[study]
title = "How much do dropped messages cost?"
[[study.runs]]
name = "none"
[[study.runs]]
name = "half"
faults.drop = 0.5
[[study.claims]]
say = "Dropping half of the messages costs little"
run = "half"
against = "none"
at_most = 0.05
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from atoll import config as run_config
from atoll import runfile
from atoll.config import RunConfig
from atoll.errors import ConfigError


class Claim(BaseModel):
    """A statement about two runs: by what share the held-out loss of one is above that of the other."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    say: str
    run: str
    against: str
    at_most: float | None = None
    """Highest difference, as a share: 0.05 is 5 % worse."""
    at_least: float | None = None
    """Lowest difference; a negative one is better."""

    @model_validator(mode="after")
    def _says_something(self) -> "Claim":
        if self.at_most is None and self.at_least is None:
            raise ValueError("needs at_most, at_least or both")
        return self

    def holds(self, difference: float) -> bool:
        """Whether a difference is within the bounds; one that is no number is not."""
        above = self.at_least is None or difference >= self.at_least
        return above and (self.at_most is None or difference <= self.at_most)


class StudySection(BaseModel):
    """What varies, and what is expected of it."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    title: str = ""
    runs: tuple[dict[str, Any], ...]
    """Each has a name and the settings in which it differs, as in a run file."""
    claims: tuple[Claim, ...] = ()


@dataclass(frozen=True, slots=True)
class Study:
    """Runs by name, each with its folder in its settings."""

    title: str
    runs: dict[str, RunConfig]
    claims: tuple[Claim, ...] = ()


def read(files: Sequence[Path], overrides: Sequence[str] = (), out: Path | None = None) -> Study:
    """The runs that study files and run files describe; their folders are out/run, by default runs/<file>/run."""
    titles: list[str] = []
    runs: dict[str, RunConfig] = {}
    claims: list[Claim] = []
    for file in files:
        table = runfile.parse_toml(runfile.read(file), str(file))
        section = _section(table.pop("study", None), file)
        base = out or Path(str(table.get("out", "runs"))) / file.stem
        titles.append(section.title)
        claims += section.claims
        for entry in section.runs:
            run = run_config.parse(_merged(table, {"name": file.stem} | entry), overrides, str(file))
            run = run.changed(out=str(base))
            if run.name in runs:
                raise ConfigError(f"{file}: two runs have the name {run.name!r}: give each its own")
            runs[run.name] = run
    for claim in claims:
        if unknown := {claim.run, claim.against} - runs.keys():
            raise ConfigError(f"study.claims: no run has the name {unknown.pop()!r}; there are {', '.join(runs)}")
    return Study("; ".join(filter(None, titles)), runs, tuple(claims))


def _section(given: Any, file: Path) -> StudySection:
    if given is None:
        return StudySection(runs=({},))
    try:
        section = StudySection.model_validate(given)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        place = ".".join(["study", *map(str, first["loc"])])
        raise ConfigError(f"{file}: {place}: {first['msg'][:1].lower()}{first['msg'][1:]}") from error
    if not section.runs:
        raise ConfigError(f"{file}: study.runs: is empty, nothing to compare")
    return section


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """A table with the values of another put into it, section by section."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged

"""Reads studies: a study file is a run file with a [study] section that says what varies.

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
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, ValidationError

from atoll.errors import ConfigError
from atoll.settings import config as run_config
from atoll.settings import toml as runfile
from atoll.settings.config import RunConfig
from atoll.settings.run_settings import Section
from atoll.settings.value_types import Allowed, Text

OUTPUTS = ("pictures", "report.html")
"""Names of files and folders that `atoll compare` writes beside the folders of the runs."""
STUDIES = Path(__file__).parents[1] / "studies"
"""Folder of the studies that come with atoll."""
Number = Annotated[float, Allowed("a number")]
Tables = Annotated[tuple[dict[str, Any], ...], Field(strict=False)]


class Claim(Section):
    """Bounds how far the held-out loss of one run may be above that of another."""

    say: Text
    """The statement, in words."""
    run: Text
    """Name of the run that it is about."""
    against: Text
    """Name of the run that this one is compared to."""
    at_most: Number | None = None
    """Highest difference, as a share: 0.05 is 5 % worse."""
    at_least: Number | None = None
    """Lowest difference; a negative one is better."""

    def holds(self, difference: float) -> bool:
        """Returns whether a difference, as a share, is within the bounds; NaN is not."""
        above = self.at_least is None or difference >= self.at_least
        return above and (self.at_most is None or difference <= self.at_most)

    def problems(self, names: Sequence[str]) -> Iterator[str]:
        """Yields what is wrong with the claim, given the names of all runs."""
        if self.at_most is None and self.at_least is None:
            yield "needs at_most, at_least or both: add a bound such as at_most = 0.05"
        elif self.at_most is not None and self.at_least is not None and self.at_least > self.at_most:
            bounds = f"at_least ({self.at_least:g}) is above at_most ({self.at_most:g})"
            yield f"{bounds}: no run can meet both, so change one"
        for key, name in (("run", self.run), ("against", self.against)):
            if names and name not in names:
                close = get_close_matches(name, names, n=1, cutoff=0.6)
                hint = f'did you mean "{close[0]}"?' if close else f"the runs are {', '.join(names)}"
                yield f"{key}: no run has the name {runfile.shown(name)}; {hint}"


class StudySection(Section):
    """Lists the runs of a study and the claims about them."""

    title: Annotated[str, Allowed("text in quotes")] = ""
    """Headline of the table."""
    runs: Annotated[Tables, Field(min_length=1), Allowed("one table or more, each under [[study.runs]]")]
    """A name for each run, and the settings in which it differs from the rest of the file."""
    claims: Annotated[Tables, Allowed("tables, each under [[study.claims]]")] = ()
    """Statements about the runs, which `atoll compare` checks."""


class _StudyFile(Section):
    study: StudySection


@dataclass(frozen=True, slots=True)
class Study:
    """Holds the settings of a study's runs by name, with the study's folder as `out` of each."""

    title: str
    runs: dict[str, RunConfig]
    claims: tuple[Claim, ...] = ()


def shipped() -> dict[str, Path]:
    """Returns the files of the studies that come with atoll, by name."""
    return {path.stem: path for path in sorted(STUDIES.glob("*.toml"))}


def titles() -> dict[str, str]:
    """Returns the titles of the studies that come with atoll, by name."""
    return {name: read([path]).title for name, path in shipped().items()}


def read(files: Sequence[Path], overrides: Sequence[str] = (), out: Path | None = None) -> Study:
    """Reads study files and run files as one study.

    Args:
        files: study files, run files and names of studies that come with atoll; all their runs must have different
            names. If there is a file of that name, it is read instead of atoll's study.
        overrides: settings like "sync.period=50" for all runs.
        out: folder of the study. None is OUT/NAME: OUT is the `out` of the first run ("runs" by default), and NAME
            joins the files' names with "-".

    Raises:
        ConfigError: lists everything that is wrong with the files.
    """
    given = [runfile.Override.parse(text) for text in overrides]
    parts = [_File.read(file, given) for file in files]
    runs: dict[str, RunConfig] = {}
    for part in parts:
        part.add_to(runs)
    names = [name for part in parts for _, table in part.runs if isinstance(name := table.get("name"), str)]
    for part in parts:
        part.problems += [(place, line) for place, claim in part.claims.items() for line in claim.problems(names)]
    if refused := [str(part.refusal(overrides)) for part in parts if part.problems]:
        raise ConfigError("\n".join(refused))
    if out is None and runs:
        out = Path(next(iter(runs.values())).out) / "-".join(file.stem for file in files)
    titles = "; ".join(part.title for part in parts if part.title)
    claims = tuple(claim for part in parts for claim in part.claims.values())
    return Study(titles, {name: run.changed(out=str(out)) for name, run in runs.items()}, claims)


# ---------------------------------------------------------------------- one file


@dataclass(slots=True)
class _File:
    """Holds the runs and claims of one file, and what is wrong with them."""

    path: Path
    title: str = ""
    runs: list[tuple[str, runfile.Table]] = field(default_factory=list)
    """Runs as written, each with its place in the file; the place is empty for a file that is one run."""
    claims: dict[str, Claim] = field(default_factory=dict)
    """Claims by their place in the file."""
    problems: list[tuple[str, str]] = field(default_factory=list)
    """Place in the file (empty: the file as a whole), and a line that begins with its key."""

    @staticmethod
    def read(path: Path, overrides: Sequence[runfile.Override]) -> "_File":
        ours = shipped()
        if not path.is_file():
            path = ours.get(str(path), path)
        close = get_close_matches(str(path), ours, n=1, cutoff=0.6)
        hint = f"; did you mean {close[0]}?" if close else ""
        missing = f"no such file, and no study of atoll has this name{hint}; its studies are {', '.join(ours)}"
        table = runfile.parse_toml(runfile.read(path, missing), str(path))
        file = _File(path)
        if "study" not in table:
            named = {"name": run_config.name_of(path)} | table
            file.runs = [("", runfile.overridden(named, overrides))]
            return file
        section, wrong = _checked_section(table.pop("study"))
        file.title, file.problems = section.title, [("", line) for line in wrong]
        for number, entry in enumerate(section.runs, start=1):
            place = f"study.runs {number}"
            if "name" not in entry:
                file.problems.append((place, "name: is missing: give each run of a study a name"))
            if "out" in entry:
                file.problems.append((place, "out: is the same for all runs of a study: set it at the top of the file"))
            file.runs.append((place, runfile.overridden(_merged(table, entry), overrides)))
        for number, entry in enumerate(section.claims, start=1):
            place = f"study.claims {number}"
            try:
                file.claims[place] = Claim.model_validate(entry)
            except ValidationError as error:
                wrong = runfile.problems(error.errors(include_url=False), Claim, entry, "a claim").values()
                file.problems += [(place, line) for line in wrong]
        return file

    def add_to(self, runs: dict[str, RunConfig]) -> None:
        """Checks the runs and adds the good ones to `runs`, by name."""
        places: dict[str, list[str]] = defaultdict(list)
        for place, table in self.runs:
            checked = run_config.validated(table)
            if isinstance(checked, list):
                problems = checked
            elif checked.name in OUTPUTS:
                problems = [f'name: "{checked.name}" is the name of a file beside the runs: choose another']
            elif checked.name in runs:
                problems = [f'name: two runs have the name "{checked.name}": give each its own']
            else:
                problems, runs[checked.name] = [], checked
            for line in problems:
                places[line].append(place)
        for line, where in places.items():
            everywhere = len(where) == len(self.runs)  # then it is a problem of the file, listed once
            self.problems += [("", line)] if everywhere else [(at, line) for at in where]

    def refusal(self, overrides: Sequence[str]) -> ConfigError:
        where = run_config.blamed(str(self.path), [line for _, line in self.problems], overrides)
        return runfile.refusal(where, [f"{place}: {line}" if place else line for place, line in self.problems])


def _checked_section(given: Any) -> tuple[StudySection, Iterable[str]]:
    """Returns the section without its invalid settings, and a line for each of those."""
    table = {"study": given}
    try:
        return _StudyFile.model_validate(table).study, ()
    except ValidationError as error:
        wrong = runfile.problems(error.errors(include_url=False), _StudyFile, table, "a study")
    right = {} if ("study",) in wrong else runfile.without(table, wrong)["study"]
    return StudySection.model_construct(**{"runs": ()} | right), wrong.values()


def _merged(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a copy of a table with the values of another merged into it, section by section."""
    merged = copy.deepcopy(dict(base))
    for key, value in changes.items():
        inner = merged.get(key)
        merged[key] = _merged(inner, value) if isinstance(inner, dict) and isinstance(value, dict) else value
    return merged

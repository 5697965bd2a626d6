"""Makes a run file one frozen, checked value.

`load` reads a file and `parse` a text or a table; both check everything once, and report all problems together, each as
one line that begins with its key. Torch is only imported where a preset is needed, so that checking a file is quick.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, cast

import tomlkit
from pydantic import Field, TypeAdapter, ValidationError

from atoll.errors import ConfigError
from atoll.settings import toml as runfile
from atoll.settings.conflicts import conflicts, given_faults
from atoll.settings.model_presets import ModelConfig, preset
from atoll.settings.run_settings import (
    DataSection,
    FaultSection,
    LinkSection,
    LogSection,
    ModelSection,
    Section,
    SyncSection,
    TrainSection,
)
from atoll.settings.value_types import Device, Name, Seed, Text, Threads

if TYPE_CHECKING:
    from atoll.core.fragments import FragmentPolicy
    from atoll.core.outer_step import OuterOptimizer
    from atoll.link.local import Absence, Faults
    from atoll.outer.presets import Gradients, Sync

_TITLE = """\
# A run of atoll, with every setting at its default: delete what you do not change.
# A setting with "#" before it is left out; remove the "#" to set it.
#
#   atoll train run.toml                           train: a tiny model, a few minutes on two cores
#   atoll train run.toml --set sync.period=50      with another value for once
#   atoll train run.toml --resume                  continue after an interruption"""


class RunConfig(Section):
    """Holds everything that decides what a run does; made and checked by `load`, `parse` or `changed`."""

    name: Name = Field(default="run", examples=["run"])
    """Folder of the run, under out; left out: the name of this file, without .toml."""
    out: Text = "runs"
    """Folder of all runs."""
    seed: Seed = 0
    """Decides starting weights, the order of the data and all else that is random."""
    device: Device = "auto"
    """Where to train: auto (a GPU if there is one), cpu, cuda or cuda:1."""
    threads: Threads | None = Field(default=None, examples=[2])
    """CPU threads of torch; 1 is often faster for a small model or on a busy machine; left out: torch's own choice."""
    precision: Literal["auto", "fp32", "bf16"] = "auto"
    """Number format of activations; auto: bf16 on a GPU, fp32 on a CPU."""
    compile: Literal["auto"] | bool = "auto"
    """Use torch.compile; auto (on a GPU), true or false."""
    model: ModelSection = ModelSection()
    data: DataSection = DataSection()
    train: TrainSection = TrainSection()
    sync: SyncSection = SyncSection()
    faults: FaultSection = FaultSection()
    link: LinkSection = LinkSection()
    log: LogSection = LogSection()

    # ------------------------------------------------------------------ as text, and with changes

    def to_toml(self) -> str:
        """Returns a run file with every setting that is not left out; `parse` gives the same value back."""
        return tomlkit.dumps(self._table())

    def changed(self, **changes: Any) -> "RunConfig":
        """Returns a checked copy with other values, like `changed(**{"train.steps": 5})`; None leaves a setting out."""
        return parse(self._table(), where="changed settings", options=changes)

    def _table(self) -> runfile.Table:
        return self.model_dump(mode="json", exclude_none=True)

    # ------------------------------------------------------------------ as the library's values

    def shape(self, vocabulary: int) -> ModelConfig:
        """Returns the shape of the decoder for a tokenizer of this size; ConfigError for a Hugging Face model."""
        if self.model.preset is None:
            raise ConfigError(f'model.hf: "{self.model.hf}" has its own shape')
        if self.model.vocabulary is not None and self.model.vocabulary < vocabulary:
            raise ConfigError(
                f"model.vocabulary: must be at least the tokenizer's ({vocabulary}), got {self.model.vocabulary}: "
                "leave it out to use that"
            )
        given = {field.name: getattr(self.model, field.name) for field in fields(ModelConfig)}
        changes = {name: value for name, value in given.items() if value is not None}
        return preset(self.model.preset, **{"vocabulary": vocabulary} | changes)

    def synchronisation(self) -> "Sync | Gradients | None":
        """Returns the preset of the method with what [sync] changes of it; None for one worker by itself."""
        from atoll.core.codec import Codec
        from atoll.core.outer_step import Blend
        from atoll.outer.presets import Gradients

        given, preset = self.sync, self.sync.preset()
        if preset is None:
            return None
        codec = Codec(given.codec or preset.codec.format, given.stochastic, given.feedback)
        if isinstance(preset, Gradients):
            return replace(preset, codec=codec)
        follows = preset.delay == preset.period  # Eager and Delayed: a round is applied one period late
        delay = given.used_period if follows else preset.delay
        return replace(
            preset,
            period=given.used_period,
            fragments=preset.fragments if given.fragments is None else _fragments_of(given.fragments),
            delay=delay if given.delay is None else given.delay,
            codec=codec,
            merge=preset.merge if given.alpha is None else Blend(given.alpha),
            outer=self.outer_optimizer(),
        )

    def outer_optimizer(self) -> "OuterOptimizer":
        """Returns the optimizer that moves the anchors: the preset's with what [sync] changes of it."""
        from atoll.core.outer_step import SGD, Adam, Momentum, Nesterov

        sync = self.sync
        given = {
            "lr": sync.outer_lr,
            "momentum": sync.outer_momentum,
            "beta1": sync.outer_betas and sync.outer_betas[0],
            "beta2": sync.outer_betas and sync.outer_betas[1],
            "eps": sync.outer_eps,
        }
        changes: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
        nesterov = getattr(sync.preset(), "outer", Nesterov())
        defaults = {"nesterov": nesterov, "momentum": Momentum(), "sgd": SGD(), "adam": Adam()}
        return cast("OuterOptimizer", replace(defaults[sync.outer], **changes))

    def unplanned(self) -> tuple[str, ...]:
        """Returns the settings, by dotted key, that make things fail on purpose and that no plan counts."""
        lines = (f"link.{name}" for name in ("jitter_s", "loss", "outages") if getattr(self.link, name))
        return (*lines, *(f"faults.{name}" for name in given_faults(self.faults)))

    def faults_of_link(self) -> "Faults":
        """Returns the faults of the link; a compute schedule becomes absences and needs train.steps."""
        from atoll.link.local import Absence, Faults

        explicit = [Absence(worker=a.worker, first=a.first, last=a.last) for a in self.faults.absences]
        return Faults(
            drop=self.faults.drop,
            seed=self.faults.seed,
            absences=(*explicit, *self._scheduled_absences()),
            speeds=dict(self.faults.speeds),
        )

    def _scheduled_absences(self) -> Iterator["Absence"]:
        """Yields the absences of a compute schedule: worker w trains while w < the scheduled number of workers.

        Every number has an equal stretch of the run, and stretches end on multiples of the period, so that a joiner
        starts with a whole one; a run of few periods follows its schedule only roughly.
        """
        from atoll.link.local import Absence

        counts = _counts(self.faults.compute, self.sync.workers)
        if len(counts) == 1:
            return
        if self.train.steps is None:
            raise ConfigError(f'train.steps: must be known for faults.compute = "{self.faults.compute}", is left out')
        for worker in range(1, self.sync.workers):
            leaves = counts[0] > worker
            stretches = sum((count > worker) == leaves for count in counts)  # until it leaves or joins
            if stretches == len(counts):
                continue
            periods = round(Fraction(stretches * self.train.steps, len(counts) * self.sync.used_period))
            if leaves:
                yield Absence(worker=worker, first=periods * self.sync.used_period + 1)
            elif periods:
                yield Absence(worker=worker, last=periods * self.sync.used_period)


def _counts(compute: str, workers: int) -> Sequence[int]:
    """Returns the number of workers in each stretch of a run, as in the DiLoCo paper."""
    half = max(1, workers // 2)
    return {
        "constant": [workers],
        "doubling": [half, workers],
        "halving": [workers, half],
        "ramp-up": range(1, workers + 1),
        "ramp-down": range(workers, 0, -1),
    }[compute]


def _fragments_of(text: str) -> "FragmentPolicy":
    from atoll.core.fragments import Balanced, Blocks, Whole

    match text.split(":"):
        case ["whole"]:
            return Whole()
        case ["balanced", count]:
            return Balanced(count=int(count))
        case ["blocks", each, "sequential"]:
            return Blocks(each=int(each), order="sequential")
        case ["blocks", each, *_]:
            return Blocks(each=int(each))
    return Blocks()


# ---------------------------------------------------------------------- reading


def load(path: str | Path, overrides: Sequence[str] = (), options: Mapping[str, Any] | None = None) -> RunConfig:
    """Reads a run file; a run without a name gets that of the file.

    Args:
        path: the run file.
        overrides: settings like "sync.period=50" that replace those of the file.
        options: settings by dotted key that replace both; a value of None does not.

    Raises:
        ConfigError: lists everything that is wrong with the file.
    """
    path = Path(path)
    table = runfile.parse_toml(runfile.read(path), str(path))
    if "study" in table:
        raise ConfigError(f"{path}: this is a study, with several runs: atoll compare {path}")
    given = {key: value for key, value in (options or {}).items() if value is not None}
    return parse({"name": name_of(path)} | table, overrides, str(path), given)


def name_of(path: Path) -> str:
    """Returns the name of a run by its file: that of the file without .toml, or "run" if it is no name."""
    try:
        return TypeAdapter[str](Name).validate_python(path.stem)
    except ValidationError:
        return "run"


def parse(
    source: str | Mapping[str, Any],
    overrides: Sequence[str] = (),
    where: str = "run.toml",
    options: Mapping[str, Any] | None = None,
) -> RunConfig:
    """Checks a TOML text or a table and returns its run.

    Args:
        source: a TOML text or a table.
        overrides: settings like "sync.period=50" that replace those of the source.
        where: the name of the source in errors.
        options: settings by dotted key that replace both; None leaves a setting out.

    Raises:
        ConfigError: lists everything that is wrong with the source.
    """
    table = runfile.parse_toml(source, where) if isinstance(source, str) else source
    given = [runfile.Override(key, value) for key, value in (options or {}).items()]
    run = validated(runfile.overridden(table, [*map(runfile.Override.parse, overrides), *given]))
    if isinstance(run, RunConfig):
        return run
    raise runfile.refusal(blamed(where, run, [*overrides, *(f"{key}={value}" for key, value in given)]), run)


def blamed(where: str, problems: Sequence[str], overrides: Sequence[str]) -> str:
    """Returns the name of a file, followed by the overrides that some of its problems are about."""
    starts = {text: tuple(text.partition("=")[0].strip() + end for end in ":.[") for text in overrides}
    if found := [text for text, start in starts.items() if any(line.startswith(start) for line in problems)]:
        return f"{where} with {runfile.shortened(', '.join(found))}"
    return where


def validated(table: runfile.Table) -> RunConfig | list[str]:
    """Returns the run of a table, or a line for every wrong setting and every conflict between right ones."""
    wrong: dict[runfile.Keys, str] = {}
    try:
        run = RunConfig.model_validate(table)
    except ValidationError as error:
        wrong = runfile.problems(error.errors(include_url=False), RunConfig, table)
        run = RunConfig.model_validate(runfile.without(table, wrong))
    bad = tuple(f"{'.'.join(map(str, place))}." for place in wrong)
    lines = list(wrong.values())
    for conflict in conflicts(run):
        if not any(f"{key}.".startswith(bad) for key in conflict.keys):
            lines.append(f"{conflict.keys[0]}: {conflict.why}")
    return lines or run


def template() -> str:
    """Returns a run file with every setting, its default and what it is for."""
    return runfile.template(RunConfig, _TITLE)


def differences(configs: Mapping[str, RunConfig]) -> list[tuple[str, list[Any]]]:
    """Returns the settings in which runs differ, name aside, with one value per run in the order given."""
    flat = [settings_of(config) for config in configs.values()]
    rows = [(key, [values[key] for values in flat]) for key in (flat[0] if flat else ())]
    return [(key, values) for key, values in rows if key != "name" and any(v != values[0] for v in values)]


def settings_of(config: RunConfig) -> dict[str, Any]:
    """Returns every setting by its dotted key."""
    flat: dict[str, Any] = {}
    for name, value in config.model_dump().items():
        flat |= {f"{name}.{inner}": v for inner, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat

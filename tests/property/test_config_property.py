"""What must hold for every run file: it is a run, or a ConfigError that names what is wrong; and text gives it back."""

import copy
import math
import re
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, get_args

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from atoll.errors import ConfigError
from atoll.link.local import local
from atoll.settings import toml as runfile
from atoll.settings.config import RunConfig, differences, load, parse
from atoll.settings.model_presets import PRESETS
from atoll.settings.value_types import CodecName, Compute, Method, Outer
from example_counts import examples

FULL = """
name = "all"
out = "runs"
seed = 1
device = "cpu"
threads = 2
precision = "fp32"
compile = false

[model]
preset = "tiny"
layers = 6
width = 48
heads = 3
head_width = 16
feedforward = 192
vocabulary = 9000
context = 128
tied = true
qk_norm = true
z_loss = 1e-4
checkpoint_activations = false
rope_base = 10000.0
hf_weights = true

[data]
source = ["stdlib", "texts/*.txt"]
field = "text"
tokenizer = "bpe"
vocabulary = 8192
held_out = 0.02
split = "clusters"
weighting = "equal"
cache = "runs/.tokens"
limit = 1000

[train]
steps = 900
batch = 8
sequence = 128
accumulate = 2
optimizer = "muon"
lr = 0.003
warmup = 100
final_lr = 0.05
weight_decay = 0.001
betas = [0.9, 0.99]
clip = 1.0
eval_every = 100
eval_tokens = 4096
log_every = 10
save_every = 300
keep = 2
parallel = "ddp"

[sync]
workers = 4
method = "streaming"
period = 30
fragments = "blocks:3"
delay = [1, 2, 3, 4]
codec = "int8"
stochastic = true
feedback = true
outlier_ratio = 5.0
offload = true
alpha = 0.5
outer = "adam"
outer_lr = 0.3
outer_betas = [0.9, 0.95]
outer_eps = 0.1

[faults]
drop = 0.1
seed = 2
compute = "ramp-up"
absences = [{worker = 1, first = 101, last = 200}]
speeds = {3 = 0.5}

[link]
deadline_s = 60
join_s = 30
elastic = false
security = "keys"
min_workers = 1
silent_s = 5.0
connections = 1
listen = "0.0.0.0:0"
emulate = "100Mbit/s,50ms"
jitter_s = 0.01
loss = 0.001
outages = [{start_s = 60, length_s = 10}]

[log]
tensorboard = true
wandb = "atoll"
trackio = "atoll"
sample = 16
alert = "https://example.org/hook"
stall_s = 60.0
lost_s = 30.0
view = "lines"
"""
ABSENT = {"model.hf", "sync.outer_momentum", "link.address", "link.registry", "link.keys", "link.grace"}
"""Settings that do not go with the others."""

WRONG: list[Any] = [
    "", " ", "3", "true", "x", "a/b", "..", "\x00", "\n", "\udcff", "[red]", "e" * 10_000, "auto ", "\u00b2",
    0, -1, 1, 3, 7, 10**9, 10**30, -(10**30), 10**400, 1 << 40_000, 0.0, -0.0, -0.5, 0.5, 1.0, 1.5, 5e-324, 1e308,
    math.nan, math.inf, -math.inf, True, False, None, [], [[]], [1], [0.5, 0.5], ["x"], [None], [0] * 99,
    {}, {"x": 1}, {"worker": 1}, [{}], [{"worker": 0}], [{"worker": -1, "first": 0}], {"0": 0.5}, {"-1": 0.5},
    {"1": 2.0}, {1: "x"}, {"99": 0.5}, (), (1, 2), b"x", object(), {1, 2}, 3 + 4j, Path("x"),
]  # fmt: skip


def keys() -> Iterator[tuple[str, ...]]:
    for name in RunConfig.model_fields:
        section = runfile.section(RunConfig, name)
        yield (name,)
        yield from ((name, inner) for inner in (section.model_fields if section else ()))


KEYS = list(keys())


def outcome(make: Callable[[], RunConfig]) -> RunConfig | str:
    """The run, or the text of the ConfigError; anything else goes through."""
    try:
        return make()
    except ConfigError as error:
        return str(error)


def check(table: Any, key: tuple[str, ...]) -> bool:
    """Whether the table is a run; if not, that the error names this key and has one clean line per problem."""
    result = outcome(lambda: parse(table))
    if isinstance(result, RunConfig):
        buildable(result)
        return True
    head, *lines = result.split("\n")
    assert ".".join(key) in result, result
    assert head.isprintable() and all(line.startswith("  ") and line.isprintable() for line in lines), result
    assert max(map(len, (head, *lines))) < 600, result
    return False


def buildable(run: RunConfig) -> None:
    """What was accepted can be written, read and made: nothing downstream needs to check it again."""
    assert parse(run.to_toml()) == run
    sync = run.synchronisation()
    assert (sync is None) == (run.sync.method == "none")
    if run.model.hf is None:
        assert run.shape(1).parameters > 0
    if run.train.steps is not None or run.faults.compute == "constant":
        local(run.sync.workers, faults=run.faults_of_link())


def test_the_file_to_corrupt_has_every_setting() -> None:
    table = tomllib.loads(FULL)
    given = {(name,) for name in table} | {(n, k) for n, v in table.items() if isinstance(v, dict) for k in v}
    assert {".".join(key) for key in set(KEYS) - given} == ABSENT and given <= set(KEYS)
    buildable(parse(FULL))


@pytest.mark.thorough_after(25)
@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_every_setting_corrupted_is_a_run_or_a_config_error_that_names_it(key: tuple[str, ...]) -> None:
    accepted = 0
    bases: list[tuple[dict[str, Any], list[Any]]] = [({}, WRONG[::3]), (tomllib.loads(FULL), WRONG)]
    for base, values in bases:
        for wrong in values:
            table = copy.deepcopy(base)
            inner = table if len(key) == 1 else table.setdefault(key[0], {})
            inner[key[-1]] = copy.deepcopy(wrong)
            accepted += check(table, key)
    assert accepted < len(WRONG), "something must be refused"


@pytest.mark.parametrize("key", KEYS, ids=".".join)
def test_every_setting_deleted_or_renamed(key: tuple[str, ...]) -> None:
    name = ".".join(key)
    if name in ABSENT:
        return
    table = tomllib.loads(FULL)
    inner = table if len(key) == 1 else table[key[0]]
    value = inner.pop(key[-1])
    result = outcome(lambda: parse(table))
    if isinstance(result, RunConfig):
        buildable(result)
    else:  # what is left may need it, and says so
        assert name in result
    for renamed in (key[-1] + "s", key[-1][:-1] or "x", key[-1].upper(), "", "\n"):
        if renamed not in inner and renamed not in RunConfig.model_fields:
            with pytest.raises(ConfigError, match="unknown key"):
                parse(tomllib.loads(FULL) | {renamed: value})


@examples(100)
@given(st.data())
def test_any_value_in_any_place(data: st.DataObject) -> None:
    scalars = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20)
    values = st.recursive(
        scalars, lambda v: st.lists(v, max_size=3) | st.dictionaries(st.text(max_size=5), v, max_size=3), max_leaves=5
    )
    key = data.draw(st.sampled_from(KEYS))
    table = tomllib.loads(data.draw(st.sampled_from(["", FULL])))
    inner = table if len(key) == 1 else table.setdefault(key[0], {})
    inner[key[-1]] = data.draw(values)
    check(table, key)


@settings(examples(200), suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.binary(max_size=40), st.integers(0, len(FULL)), st.integers(0, 40))
@example(b"\xff\xfe", 0, 0)
@example(b"\x00", 10, 0)
@example(b"[" * 40, 0, 0)
def test_garbage_in_a_file(tmp_path: Path, garbage: bytes, place: int, cut: int) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(FULL.encode()[:place] + garbage + FULL.encode()[place + cut :])
    result = outcome(lambda: load(file))
    if isinstance(result, RunConfig):
        buildable(result)
    else:
        assert result.startswith(str(file))


@given(st.lists(st.text(max_size=30) | st.sampled_from(["sync=3", "seed=1e999", "a.b.c=[1"]), min_size=1, max_size=3))
def test_any_override(overrides: list[str]) -> None:
    assert outcome(lambda: parse("", overrides))


# ---------------------------------------------------------------------- runs that are right


@st.composite
def tables(draw: st.DrawFn) -> dict[str, Any]:
    """Settings that are right on their own, of all methods together."""
    table = tomllib.loads(FULL)
    table["sync"] |= {
        "workers": draw(st.integers(1, 9)),
        "method": draw(st.sampled_from(get_args(Method))),
        "codec": draw(st.sampled_from(get_args(CodecName))),
        "outer": draw(st.sampled_from(get_args(Outer))),
        "period": draw(st.integers(1, 200)),
        "delay": draw(st.integers(0, 200)),
        "fragments": draw(st.sampled_from(["whole", "blocks", "blocks:1", "blocks:2:sequential", "balanced:3"])),
        "alpha": draw(st.floats(0, 1)),
    }
    table["faults"]["compute"] = draw(st.sampled_from(get_args(Compute)))
    table["train"]["steps"] = draw(st.integers(101, 10**6))
    table["model"]["preset"] = draw(st.sampled_from(list(PRESETS)))
    paths = st.text(st.characters(exclude_categories=("Cc", "Cs")), min_size=1, max_size=9).filter(str.strip)
    table["data"]["source"] = draw(st.lists(paths.filter(lambda p: not p.startswith("hf:")), min_size=1, max_size=2))
    for section in (value for value in table.values() if isinstance(value, dict)):
        for key in draw(st.sets(st.sampled_from(sorted(section)), max_size=8)):
            del section[key]
    return table


@examples(60)
@given(tables())
def test_leaving_out_what_is_named_makes_a_run(table: dict[str, Any]) -> None:
    """Following the messages, line by line, always ends in a run; and that one comes back from its text."""
    for _ in range(4):
        result = outcome(lambda: parse(table))
        if isinstance(result, RunConfig):
            break
        for section, name in re.findall(r"(?:^run\.toml: |^  )(\w+)\.(\w+)", result, re.MULTILINE):
            if f"{section}.{name}" == "sync.method":
                table["sync"]["workers"] = 1
            table[section].pop(name, None) if name != "method" else None
    assert isinstance(result, RunConfig), result
    buildable(result)
    assert result.changed() == result
    assert differences({"one": result, "other": parse(result.to_toml())}) == []
    rows = differences({"default": RunConfig(), "this": result})
    assert RunConfig().changed(name=result.name, **{key: values[1] for key, values in rows}) == result


@given(st.sampled_from(get_args(Compute)), st.integers(2, 12), st.integers(1, 40), st.integers(1, 2000))
def test_schedules_change_on_whole_periods_and_keep_the_first_worker(
    compute: str, workers: int, period: int, steps: int
) -> None:
    overrides = [
        f"faults.compute={compute}",
        f"sync.workers={workers}",
        f"sync.period={period}",
        f"train.steps={steps}",
    ]
    faults = parse("", [*overrides, "train.warmup=0"]).faults_of_link()
    counts = []
    for step in range(1, steps + 1, max(1, steps // 50)):
        present = [faults.present(w, step) for w in range(workers)]
        counts.append(sum(present))
        assert present == [w < counts[-1] for w in range(workers)] and present[0]
    assert counts in (sorted(counts), sorted(counts, reverse=True))
    for absence in faults.absences:
        assert (absence.first - 1) % period == 0 and (absence.last is None or absence.last % period == 0)


@given(st.integers(2, 8), st.integers(1, 6), st.integers(1, 3))
def test_a_schedule_and_its_mirror_image_do_the_same_work(workers: int, period: int, stretch: int) -> None:
    """The paper's point: final quality follows total compute, not when it was there."""
    steps = workers * 2 * period * stretch

    def work(compute: str) -> int:
        overrides = [f"faults.compute={compute}", f"sync.workers={workers}", f"sync.period={period}"]
        faults = parse("", [*overrides, f"train.steps={steps}"]).faults_of_link()
        return sum(faults.trains(w, t) for w in range(workers) for t in range(1, steps + 1))

    assert work("ramp-up") == work("ramp-down") == steps * (workers + 1) // 2
    assert work("doubling") == work("halving") == steps * (workers + workers // 2) // 2
    assert work("constant") == steps * workers

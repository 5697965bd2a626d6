"""The run file: what it becomes, and what each mistake in it is answered with."""

import re
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import ValidationError

from atoll.core.codec import Codec
from atoll.core.fragments import Balanced, Blocks, Whole
from atoll.core.outer_step import SGD, Adam, Blend, EagerMerge, Momentum, Nesterov
from atoll.errors import ConfigError
from atoll.link.local import Absence, Faults
from atoll.outer.presets import DataParallel, Delayed, DiLoCo, Eager, Streaming, Sync
from atoll.settings import toml as runfile
from atoll.settings.config import RunConfig, differences, load, parse, template
from atoll.settings.model_presets import PRESETS
from atoll.settings.value_types import CodecName


def refusal(text: str, *overrides: str) -> str:
    with pytest.raises(ConfigError) as caught:
        parse(text, overrides)
    return str(caught.value)


# ---------------------------------------------------------------------- reading


def test_an_empty_file_is_the_default_run() -> None:
    assert parse("") == RunConfig()


def test_the_template_holds_every_setting_and_is_the_default_run() -> None:
    text = template()
    assert parse(text) == RunConfig()
    for name, field in RunConfig.model_fields.items():
        section = runfile.section(RunConfig, name)
        for key in section.model_fields if section else [name]:
            assert re.search(rf"^(# )?{key} = \S.* # \S", text, re.MULTILINE), key
        assert section is None or field.annotation is section


def test_every_setting_the_template_leaves_out_can_be_switched_on() -> None:
    """By removing the "# " alone; those that need another setting as well say which."""
    needs = {"hf": "model.preset", "outer_betas": "adam", "outer_eps": "adam", "outages": "link.emulate"}
    needs |= dict.fromkeys(("registry", "grace"), "link.elastic")
    lines = template().splitlines()
    left_out = [n for n, line in enumerate(lines) if re.match(r"# \w+ = ", line)]
    assert len(left_out) > 20
    for number in left_out:
        text = "\n".join([*lines[:number], lines[number][2:], *lines[number + 1 :]])
        key = lines[number].split()[1]
        if key in needs or (key == "vocabulary" and "8192" in lines[number]):
            assert needs.get(key, "bpe") in refusal(text)
        else:
            assert parse(text) is not None


def test_overrides_are_toml_and_bare_words_are_text() -> None:
    overrides = ["sync.period=50", "sync.fragments=blocks:2", "train.betas=[0.8, 0.9]", 'name="x"', "compile=true"]
    run = parse("[sync]\nperiod = 10\ndelay = 3", [*overrides, "data.source=texts/*.txt", "faults.speeds.1=0.5"])
    assert (run.sync.period, run.sync.delay, run.sync.fragments) == (50, 3, "blocks:2")
    assert (run.train.betas, run.name, run.compile) == ((0.8, 0.9), "x", True)
    assert run.data.source == "texts/*.txt" and run.faults.speeds == {1: 0.5}


@pytest.mark.parametrize("override", ["sync.period", "sync.period=", "=3", "sync..period=3", ".=3", ""])
def test_an_override_without_key_or_value_is_refused(override: str) -> None:
    assert "must be KEY=VALUE" in refusal("", override)


def test_an_override_that_looks_like_a_list_must_be_one() -> None:
    assert refusal("", "data.source=[a, b]").startswith("data.source: not valid TOML: [a, b]")


def test_whole_numbers_are_taken_for_numbers_and_nothing_else_is_converted() -> None:
    run = parse({"train": {"lr": 1, "betas": [0, 0.5]}})
    assert type(run.train.lr) is float and run.train.betas == (0.0, 0.5)
    assert 'got "3"; write it without quotes' in refusal('[train]\nbatch = "3"')
    assert "got true" in refusal("[train]\nbatch = true")
    assert "got true" in refusal("[train]\nlr = true")
    assert "got 3.0" in refusal("[train]\nbatch = 3.0")
    assert "got nan" in refusal("[train]\nlr = nan")
    assert 'got "true"; write it without quotes' in refusal('[log]\ntensorboard = "true"')


def test_a_run_is_frozen() -> None:
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().seed = 3
    with pytest.raises(ValidationError, match="frozen"):
        RunConfig().sync.period = 3


def test_a_table_that_is_parsed_is_not_changed() -> None:
    table: dict[str, Any] = {"sync": {"period": 3}}
    parse(table, ["sync.period=4", "train.steps=3"])
    assert table == {"sync": {"period": 3}}


def test_checking_a_file_does_not_import_torch() -> None:
    script = (
        "import sys\n"
        "from atoll.settings import config\n"
        "assert config.parse(config.template()) == config.RunConfig()\n"
        "assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=60)


# ---------------------------------------------------------------------- files


def test_a_file_is_read_with_a_byte_order_mark_and_other_line_ends(tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_bytes(b"\xef\xbb\xbfseed = 3\r\n[sync]\r\nperiod = 5\r\n")
    assert (load(file).seed, load(file, ["seed=4"]).seed, load(str(file)).sync.period) == (3, 4, 5)


def test_a_run_without_a_name_has_that_of_its_file(tmp_path: Path) -> None:
    for stem, name in {"reef": "reef", "a.b": "a.b", "my run": "run", ".hidden": "run", "x" * 101: "run"}.items():
        file = tmp_path / f"{stem}.toml"
        file.write_text("")
        assert load(file).name == name
        assert load(file, ["name=other"]).name == "other"
    file.write_text('name = "given"')
    assert load(file).name == "given" and parse("", where=str(file)).name == "run"
    assert "left out: the name of this file" in template()


def test_a_study_is_no_run(tmp_path: Path) -> None:
    file = tmp_path / "drops.toml"
    file.write_text("[study]\n[[study.runs]]\nname = 'a'")
    with pytest.raises(ConfigError) as error:
        load(file)
    assert str(error.value) == f"{file}: this is a study, with several runs: atoll compare {file}"


def test_files_that_are_none(tmp_path: Path) -> None:
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(b"\x00\xff\xfe")
    cases = {
        tmp_path / "absent.toml": "no such file; `atoll init",
        tmp_path / "typo": "typo: no such run or run file",
        tmp_path: "is a folder",
        weights: "byte 1 is not UTF-8",
        Path("a\x00b"): "cannot be read",
        Path("x" * 5000): "cannot be read",
    }
    for path, words in cases.items():
        with pytest.raises(ConfigError, match=re.escape(words)):
            load(path)


def test_broken_toml_shows_the_line() -> None:
    text = refusal("seed = 1\n[sync]\nmethod = streaming\n")
    assert text == (
        "run.toml: not valid TOML at line 3, column 10: Invalid value; text needs quotes: method = streaming"
    )
    assert "nested too deeply" in refusal("x = " + "[" * 5000)
    assert "digits" in refusal("seed = " + "1" * 5000)
    assert "a number of 36000 bits" in refusal("seed = 0x" + "f" * 9000)


# ---------------------------------------------------------------------- what is wrong with one setting


@pytest.mark.parametrize(
    ("text", "line"),
    [
        ("[sync]\nperod = 3", "sync.perod: unknown key; did you mean sync.period?"),
        ("perod = 3", "perod: unknown key; did you mean sync.period?"),
        ("[train]\nperiod = 3", "train.period: unknown key; did you mean sync.period?"),
        ("[syncc]\nperiod = 3", "syncc: unknown key; did you mean sync?"),
        ("[data]\nvocab = 300", "data.vocab: unknown key; did you mean data.vocabulary?"),
        ("[model]\nvocab = 300", "model.vocab: unknown key; did you mean model.vocabulary?"),
        ("[Sync]\nperiod = 3", "Sync: unknown key; did you mean sync?"),
        (
            "[log]\nzzz = 3",
            "log.zzz: unknown key; log has tensorboard, wandb, trackio, sample, alert, stall_s, lost_s, view",
        ),
        ('"sync.period" = 3', '"sync.period": unknown key; did you mean sync.period?'),
        ('"q.q" = 3', '"q.q": unknown key; a run file has name, out'),
        ('"a\\nb" = 3', '"a\\nb": unknown key; a run file has name, out'),
        (
            '[sync]\ncodec = "e3m1"',
            "sync.codec: must be one of fp64, fp32, bf16, fp16, int8, int4, e3m0, e2m1, lloyd4, lloyd2, top64, got",
        ),
        ('[sync]\ncodec = "e3m1"', 'got "e3m1"; did you mean "e3m0"?'),
        ('[sync]\nmethod = "dilocco"', 'did you mean "diloco"?'),
        ('[model]\npreset = "35m"', 'did you mean "35M"?'),
        ('[data]\ntokenizer = "byte"', 'did you mean "bytes"?'),
        ("sync = 3", "sync: must be a table, got 3: write [sync]"),
        ("[[sync]]", "sync: must be a table, got [{}]"),
        ('name = "a/b"', "name: must be letters, digits, - _ and . only"),
        ('name = ".."', 'got ".."'),
        ('device = "gpu"', "device: must be auto, cpu, cuda (a GPU) or cuda:N"),
        ("compile = 3", "compile: must be auto or true or false, got 3: use torch.compile"),
        ("seed = -1", "seed: must be a whole number from 0 to 2^32 - 1, got -1: decides"),
        ("[train]\nbetas = [0.9, 1.0]", "train.betas: must be a pair like [0.9, 0.99], each at least 0 and below 1"),
        ("[train]\nbetas = [0.9]", "train.betas: must be a pair"),
        ("[faults]\ndrop = 1.5", "faults.drop: must be a number from 0 to 1, got 1.5: chance"),
        ("[faults]\nabsences = [{first = 3}]", "faults.absences: must be a list like [{worker = 1"),
        ("[faults]\nabsences = [{worker = 1, frist = 3}]", "faults.absences: must be a list like"),
        ("[faults]\nspeeds = {1 = 0.0}", "faults.speeds: must be a table of workers and shares like {1 = 0.5}"),
        ("[faults]\nspeeds = {01 = 0.5}", "faults.speeds: must be"),
        ('[sync]\nfragments = "blocks:0"', 'sync.fragments: must be "whole", "blocks:3", "blocks:3:sequential" or'),
        ("[data]\nheld_out = 1.0", "data.held_out: must be a number above 0 and below 1, got 1.0"),
        ('[data]\nsource = "hf:"', "data.source: must be"),
        ("[data]\nsource = []", "data.source: must be"),
        ('[data]\nsource = ["a", " "]', "data.source: must be"),
        ('[log]\nwandb = ""', "log.wandb: must be text in quotes, not empty"),
        ("[model]\nhead_width = 15", "model.head_width: must be an even whole number"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(text: str, line: str) -> None:
    assert line in refusal(text)
    assert "\n" not in refusal(text)


def test_all_problems_come_at_once_and_follow_from_nothing_else() -> None:
    text = """
        sed = 3
        [sync]
        perod = 50
        delay = 101
        codec = "e9"
        stochastic = true
        [train]
        batch = "8"
        accumulate = 3
        warmup = 9
        steps = 5
    """
    lines = refusal(text).splitlines()
    assert lines[0] == "run.toml: 6 problems"
    keys = [line.split(":")[0].strip() for line in lines[1:]]
    # Not accumulate, which only a right batch could contradict, nor stochastic, which depends on the codec.
    assert keys == ["train.batch", "sync.codec", "sync.perod", "sed", "train.warmup", "sync.delay"]


def test_an_override_is_blamed_for_what_it_did() -> None:
    assert refusal("", "sync.workers=3", "sync.perod=3").startswith("run.toml with sync.perod=3: sync.perod: unknown")
    assert refusal("[sync]\nperod = 3", "sync.workers=3").startswith("run.toml: sync.perod: unknown")
    assert refusal("[sync]\nouter_lr = 0", "sync.outer=sgd").startswith("run.toml: sync.outer_lr: must")
    assert refusal("sync = 3", "sync.period=3") == "sync.period: cannot be set, since sync must be a table and is 3"


# ---------------------------------------------------------------------- what settings cannot be together


ELASTIC = "link.elastic=true link.registry=10.0.0.1:29400 link.keys=runs/x/keys/worker-{worker}"
ELASTIC_ONLY = ("registry=h:1", "min_workers=2", "listen=h:1", "grace=1.0", "connections=2")
NOT_ELASTIC = {
    "sync.method=data-parallel": 'link.elastic: cannot be set with sync.method = "data-parallel"',
    "sync.method=none sync.workers=1": 'link.elastic: cannot be set with sync.method = "none"',
    "link.address=10.0.0.1:29500": "link.address: is for workers that stay",
    "link.security=none": "link.security: has no use for link.keys",
    "link.min_workers=3": "link.min_workers: must be from 1 to sync.workers (2), got 3",
    "link.emulate=1Gbit/s": "link.emulate: cannot be set with link.elastic",
    "faults.drop=0.1": "faults.drop: is for workers of one process",
}


@pytest.mark.parametrize(
    ("overrides", "line"),
    [
        ("sync.method=none", 'sync.method: "none" needs sync.workers = 1, got 2'),
        ("sync.method=none sync.workers=1 sync.codec=int8", 'sync.codec: cannot be set with sync.method = "none"'),
        ("sync.delay=101", "sync.delay: must be from 0 to sync.period (100), got 101"),
        ("sync.delay=[1,101]", "sync.delay: must be from 0 to sync.period (100), got 101"),
        ("sync.delay=[1,2,3]", "sync.delay: has 3 entries and sync.workers is 2"),
        ("sync.delay=[1]", "sync.delay: has 1 entries and sync.workers is 2"),
        ("sync.method=eager sync.delay=30", 'sync.delay: cannot be set with sync.method = "eager"'),
        ("sync.method=delayed sync.delay=30", 'sync.delay: cannot be set with sync.method = "delayed"'),
        ("sync.method=eager sync.alpha=0.5", 'sync.alpha: cannot be set with sync.method = "eager"'),
        ("sync.method=data-parallel sync.alpha=0.0", "sync.alpha: cannot be set"),
        ("sync.method=data-parallel sync.fragments=whole", "sync.fragments: cannot be set"),
        ("sync.method=data-parallel sync.codec=int8 sync.feedback=true", "sync.feedback: cannot be set"),
        ("sync.method=eager sync.outer=adam", 'sync.outer: cannot be "adam" with sync.method = "eager"'),
        ("sync.outer=sgd sync.outer_momentum=0.9", "sync.outer_momentum: is a setting of nesterov and momentum"),
        ("sync.outer_betas=[0.9,0.9]", "sync.outer_betas: is a setting of adam"),
        ("sync.outer_eps=0.1", "sync.outer_eps: is a setting of adam"),
        ("sync.codec=bf16 sync.stochastic=true", "sync.stochastic: rounding is for 4 and 8 bits"),
        ("sync.method=diloco sync.stochastic=true", "sync.stochastic: rounding is for"),
        ("sync.method=diloco sync.feedback=true", "sync.feedback: is for codecs that lose something, and fp32"),
        (
            "sync.method=diloco sync.codec=top64",
            "sync.codec: top64 sends one value in 64 and keeps the others for later rounds: "
            'set sync.feedback = 0.95, sync.outer = "sgd" and sync.outer_lr = 1.0 too',
        ),
        ("sync.method=data-parallel sync.codec=top64", "sync.codec: top64 is for deltas"),
        ("sync.codec=top64 sync.feedback=0.9 sync.stochastic=true", "sync.stochastic: rounding is for"),
        ("sync.method=none sync.workers=1 faults.drop=0.1", 'faults.drop: cannot be set with sync.method = "none"'),
        ("sync.method=none sync.workers=1 faults.speeds.0=0.5", "faults.speeds: cannot be set"),
        ("sync.method=data-parallel faults.absences=[{worker=1}]", "DataParallel has no anchor to come back to"),
        ("sync.method=data-parallel faults.compute=halving", "DataParallel has no anchor to come back to"),
        ("sync.method=data-parallel faults.speeds.1=0.5", "faults.speeds: cannot be set"),
        ("faults.compute=halving sync.workers=1", 'faults.compute: "halving" needs sync.workers of at least 2'),
        ("faults.absences=[{worker=2}]", "faults.absences[0].worker: names worker 2; workers are 0 to 1"),
        ("faults.absences=[{worker=1,first=5,last=4}]", "faults.absences[0].last: must be at least first (5), got 4"),
        (
            "faults.absences=[{worker=0,first=9},{worker=1,last=9}]",
            "faults.absences: at inner step 9 all workers are away",
        ),
        ("faults.speeds.2=0.5", "faults.speeds: names worker 2; workers are 0 to 1"),
        ("link.address=10.0.0.1:29500 faults.drop=0.1", "faults.drop: is for workers of one process"),
        ("link.address=10.0.0.1:29500 faults.speeds.1=0.5", "faults.speeds: is for workers of one process"),
        ("link.address=10.0.0.1:29500 sync.method=none sync.workers=1", "link.address: cannot be set with sync.method"),
        ("link.emulate=1Gbit/s sync.method=none sync.workers=1", "link.emulate: cannot be set with sync.method"),
        ("link.jitter_s=0.1", "link.jitter_s: is a detail of link.emulate"),
        ("link.loss=0.1", "link.loss: is a detail of link.emulate"),
        ("link.outages=[{start_s=1.0,length_s=1.0}]", "link.outages: is a detail of link.emulate"),
        *((f"link.{given}", "is for workers that come and go: set link.elastic") for given in ELASTIC_ONLY),
        *((f"{ELASTIC} {given}", line) for given, line in NOT_ELASTIC.items()),
        ("train.accumulate=3", "train.accumulate: must divide train.batch (8), got 3"),
        ("train.steps=10 train.warmup=10", "train.warmup: must be below train.steps (10), got 10"),
        ("train.sequence=129", "train.sequence: must be at most the model's context (128), got 129"),
        ("train.sequence=65 model.context=64", "train.sequence: must be at most the model's context (64)"),
        ("model.hf=gpt2 model.preset=tiny", "model.hf: it brings its own shape, so leave out model.preset"),
        ("model.hf=gpt2 model.layers=3 model.vocabulary=999", "leave out model.layers, model.vocabulary"),
        ("model.hf_weights=false", "model.hf_weights: false only means something with model.hf"),
        ("model.vocabulary=255", "model.vocabulary: must be at least the tokenizer's (256), got 255"),
        ("data.tokenizer=bpe model.vocabulary=256", "model.vocabulary: must be at least the tokenizer's (257)"),
        ("data.vocabulary=300", 'data.vocabulary: is for data.tokenizer = "bpe", got "bytes"'),
        ("data.split=clusters sync.workers=1", 'data.split: "clusters" needs sync.workers of at least 2'),
    ],
)
def test_settings_that_cannot_be_together_say_why(overrides: str, line: str) -> None:
    assert line in refusal("", *overrides.split(" "))


USELESS = {
    "none": "fragments=whole delay=0 alpha=0.0 codec=fp32 stochastic=true feedback=true offload=true",
    "data-parallel": "fragments=whole delay=0 alpha=0.0 feedback=true offload=true",
    "eager": "delay=0 alpha=0.0",
    "delayed": "delay=0",
}


@pytest.mark.parametrize(("method", "setting"), [(m, given) for m, texts in USELESS.items() for given in texts.split()])
def test_what_a_method_has_no_use_for_is_refused(method: str, setting: str) -> None:
    workers = 1 if method == "none" else 2
    codec = ["sync.codec=int8"] if method != "none" and setting in ("stochastic=true", "feedback=true") else []
    told = refusal("", f"sync.method={method}", f"sync.workers={workers}", f"sync.{setting}", *codec)
    assert f'sync.{setting.partition("=")[0]}: cannot be set with sync.method = "{method}"' in told


@pytest.mark.parametrize(
    "overrides",
    [
        "sync.method=none sync.workers=1 sync.period=50",
        "sync.method=data-parallel sync.codec=bf16 faults.drop=0.5 sync.outer_lr=0.5",
        "sync.delay=[0,100]",
        "sync.method=delayed sync.alpha=0.5",
        "sync.method=diloco sync.delay=500 sync.codec=e3m0 sync.feedback=true",
        "train.steps=10 train.warmup=9",
        "train.sequence=200 model.context=200",
        "train.sequence=4096 model.hf=gpt2 model.hf_weights=false",
        "data.tokenizer=bpe data.vocabulary=300 model.vocabulary=300",
        "data.tokenizer=some/tokenizer.json model.vocabulary=100",
        'data.source=["hf:wikitext:wikitext-2","a/*.txt"]',
        "faults.absences=[{worker=0,first=10},{worker=1,last=9}]",
        "faults.drop=1.0",
        "train.clip=0 train.warmup=0",
        "device=cuda:1 threads=1 train.optimizer=muon",
    ],
)
def test_what_looks_odd_and_works(overrides: str) -> None:
    run = parse("", overrides.split(" "))
    assert parse(run.to_toml()) == run
    run.synchronisation()


# ---------------------------------------------------------------------- what a run becomes


@pytest.mark.parametrize(
    ("overrides", "sync"),
    [
        ("sync.period=7", Streaming(period=7)),
        ("sync.workers=8", Streaming()),
        ("sync.method=diloco", DiLoCo()),
        ("sync.method=streaming", Streaming()),
        ("sync.method=eager", Eager()),
        ("sync.method=eager sync.period=7", Eager(period=7)),
        ("sync.method=delayed", Delayed()),
        ("sync.method=delayed sync.period=7", Delayed(period=7)),
        ("sync.method=data-parallel", DataParallel()),
        ("sync.method=data-parallel sync.codec=bf16", DataParallel(codec="bf16")),
        ("sync.outer_lr=0.5 sync.outer_momentum=0.8", Streaming(outer=Nesterov(0.5, 0.8))),
        ("sync.outer=momentum", Streaming(outer=Momentum(0.7, 0.9))),
        ("sync.outer=sgd", Streaming(outer=SGD(1.0))),
        ("sync.outer=adam sync.outer_eps=1", Streaming(outer=Adam(0.3, 0.9, 0.95, 1.0))),
        ("sync.outer=adam sync.outer_betas=[0.5,0.6]", Streaming(outer=Adam(0.3, 0.5, 0.6, 0.1))),
        (
            "sync.method=diloco sync.delay=[3,4] sync.alpha=0.25 sync.codec=int8 sync.stochastic=true",
            DiLoCo(delay=(3, 4), merge=Blend(0.25), codec=Codec("int8", stochastic=True)),
        ),
    ],
)
def test_a_method_becomes_its_sync(overrides: str, sync: Sync) -> None:
    made = parse("", overrides.split(" ")).synchronisation()
    assert made == sync and type(made) is type(sync)
    assert not isinstance(made, Sync) or type(made.outer) is type(sync.outer)


def test_no_method_is_no_sync() -> None:
    assert parse("", ["sync.method=none", "sync.workers=1"]).synchronisation() is None


def test_a_zero_is_a_value() -> None:
    sync = parse("", ["sync.alpha=0.0", "sync.delay=0"]).synchronisation()
    assert isinstance(sync, Sync) and (sync.merge, sync.delay) == (Blend(0.0), 0)


def test_eager_keeps_its_merge() -> None:
    sync = parse("", ["sync.method=eager", "sync.fragments=blocks:2:sequential"]).synchronisation()
    assert isinstance(sync, Sync)
    assert sync.merge == EagerMerge() and sync.delay == 30 and sync.fragments == Blocks(each=2, order="sequential")


def test_fragments_have_a_small_language() -> None:
    meanings = {
        "whole": Whole(),
        "blocks": Blocks(),
        "blocks:2": Blocks(each=2),
        "blocks:2:strided": Blocks(each=2),
        "blocks:2:sequential": Blocks(each=2, order="sequential"),
        "balanced:5": Balanced(count=5),
    }
    for text, policy in meanings.items():
        sync = parse("", [f"sync.fragments={text}"]).synchronisation()
        assert isinstance(sync, Sync) and sync.fragments == policy
    for text in ("Whole", "whole:1", "blocks:", "blocks:x", "blocks:2:", "blocks:2:both", "balanced", "balanced:0"):
        assert "sync.fragments" in refusal("", f"sync.fragments={text}")


def test_the_codecs_are_those_that_exist() -> None:
    for name in get_args(CodecName):
        Codec(name, feedback=0.9 if name == "top64" else False)
    with pytest.raises(ConfigError, match=f"one of {', '.join(get_args(CodecName))};"):
        Codec("none of them")


METHODS: dict[str, Callable[[], object]] = {
    "diloco": DiLoCo,
    "streaming": Streaming,
    "eager": Eager,
    "delayed": Delayed,
    "data-parallel": DataParallel,
}


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("workers", [1, 2, 8])
def test_what_a_run_file_leaves_out_is_what_the_preset_has(method: str, workers: int) -> None:
    made = parse({"sync": {"method": method, "workers": workers}}).synchronisation()
    assert made == METHODS[method]() and type(made) is type(METHODS[method]())


def test_the_template_names_settings_that_belong_together() -> None:
    text = " ".join(template().replace("#", " ").split())
    assert "muon: blocks' matrices, adamw the rest; try alpha 0.5, outer_lr 0.7, outer_momentum 0.6" in text
    assert '0.95 for top64, with outer = "sgd", outer_lr = 1.0' in text
    assert "1 is often faster for a small model or on a busy machine" in text


def test_the_template_shows_the_values_of_the_preset() -> None:
    """Removing the "# " before every setting of the method's outer loop changes nothing."""
    shown = re.sub(
        r"^# (period|fragments|delay|codec|alpha|outer_lr|outer_momentum) =", r"\1 =", template(), flags=re.M
    )
    run = parse(shown)
    assert run.sync.period == 100 and run.sync.outer_lr == 0.6
    assert run.synchronisation() == Streaming() == RunConfig().synchronisation()


def test_the_shape_is_the_preset_with_what_is_given() -> None:
    run = parse("", ["model.preset=small", "model.layers=3", "model.tied=false", "model.z_loss=0"])
    shape = run.shape(1000)
    assert (shape.layers, shape.tied, shape.z_loss, shape.vocabulary) == (3, False, 0.0, 1000)
    assert shape.width == PRESETS["small"].width
    assert parse("", ["model.vocabulary=2000"]).shape(1000).vocabulary == 2000
    with pytest.raises(ConfigError, match=r"model\.vocabulary: must be at least the tokenizer's \(1000\), got 500"):
        parse("", ["model.vocabulary=500"]).shape(1000)
    with pytest.raises(ConfigError, match=r"model\.hf"):
        parse("", ["model.hf=gpt2"]).shape(1000)


def test_faults_are_the_links() -> None:
    run = parse("[faults]\ndrop = 0.5\nseed = 3\nabsences = [{worker = 1, first = 5, last = 9}]\nspeeds = {0 = 0.5}")
    absences = (Absence(worker=1, first=5, last=9),)
    assert run.faults_of_link() == Faults(drop=0.5, seed=3, absences=absences, speeds={0: 0.5})


@pytest.mark.parametrize(
    ("compute", "workers", "counts"),
    [
        ("constant", 4, [4, 4, 4, 4, 4, 4, 4, 4]),
        ("doubling", 4, [2, 2, 2, 2, 4, 4, 4, 4]),
        ("halving", 4, [4, 4, 4, 4, 2, 2, 2, 2]),
        ("ramp-up", 4, [1, 1, 2, 2, 3, 3, 4, 4]),
        ("ramp-down", 4, [4, 4, 3, 3, 2, 2, 1, 1]),
        ("ramp-up", 8, [1, 2, 3, 4, 5, 6, 7, 8]),
        ("doubling", 3, [1, 1, 1, 1, 3, 3, 3, 3]),
    ],
)
def test_compute_schedules_are_the_papers(compute: str, workers: int, counts: list[int]) -> None:
    run = parse("", [f"faults.compute={compute}", f"sync.workers={workers}", "sync.period=10", "train.steps=80"])
    faults = run.faults_of_link()
    for step in range(1, 81):
        present = [faults.present(w, step) for w in range(workers)]
        assert present == [w < counts[(step - 1) // 10] for w in range(workers)], step


def test_a_schedule_needs_to_know_the_steps() -> None:
    run = parse("", ["faults.compute=ramp-up"])
    with pytest.raises(ConfigError, match=r"train\.steps: must be known for faults\.compute"):
        run.faults_of_link()
    assert run.changed(**{"train.steps": 200}).faults_of_link().absences == (Absence(worker=1, first=1, last=100),)


# ---------------------------------------------------------------------- changes, text, differences


def test_changed_is_checked_again() -> None:
    run = parse("", ["sync.delay=20"])
    assert run.changed(**{"train.steps": 5, "name": "other"}).train.steps == 5
    assert run.changed(**{"sync.delay": None}).sync.delay is None
    assert run.changed() == run and run.train.steps is None
    with pytest.raises(ConfigError, match=r"sync\.delay: must be from 0 to sync\.period \(10\), got 20"):
        run.changed(**{"sync.period": 10})
    with pytest.raises(ConfigError, match=r"did you mean sync\.period\?"):
        run.changed(**{"sync.perod": 10})


def test_a_hugging_face_run_has_no_preset_and_comes_back_the_same() -> None:
    run = parse("", ["model.hf=gpt2"])
    assert run.model.preset is None and parse(run.to_toml()) == run
    assert run.changed(**{"model.hf": None}).model.preset == "tiny"
    assert parse({"model": {"preset": None}}) == RunConfig()


def test_text_holds_what_is_set_and_no_more() -> None:
    table = tomllib.loads(parse("", ["sync.delay=[1,2]", "faults.speeds.1=0.5"]).to_toml())
    assert table["sync"]["delay"] == [1, 2] and table["faults"]["speeds"] == {"1": 0.5}
    assert table["train"]["batch"] == 8 and "steps" not in table["train"]


def test_differences_are_rows_of_what_differs() -> None:
    first, second = parse("", ["name=a", "sync.period=5"]), parse("", ["name=b", "train.lr=0.1", "seed=3"])
    assert differences({"a": first, "b": second, "c": second}) == [
        ("seed", [0, 3, 3]),
        ("train.lr", [None, 0.1, 0.1]),
        ("sync.period", [5, None, None]),
    ]
    assert differences({"a": first}) == [] and differences({}) == []


@pytest.mark.parametrize("given", ["link.keys=k", "link.security=none"])
def test_an_elastic_run_needs_a_registry(given: str) -> None:
    assert "link.registry: is left out" in refusal("", "link.elastic=true", given)


def test_an_elastic_run_without_keys_is_told_how_to_make_them() -> None:
    said = refusal("name = 'x'", "link.elastic=true", "link.registry=h:1", "sync.workers=3")
    assert "link.keys: is left out" in said and "`atoll keys new runs/x --workers 3`" in said


def test_keys_and_no_security_exclude_each_other() -> None:
    given = ("link.address=10.0.0.1:29500", "link.keys=k", "link.security=none")
    assert 'link.security: has no use for link.keys ("k")' in refusal("", *given)


@pytest.mark.parametrize("listen", ["0.0.0.0:0", "[::]:29401", "site-b.example.org:0", "10.0.0.2:29401"])
@pytest.mark.parametrize("registry", ["h:1", "[fd00::1]:29400", "etcd://a:2379,b:2379/run"])
def test_addresses_of_an_elastic_run(listen: str, registry: str) -> None:
    given = [f'link.listen="{listen}"', f'link.registry="{registry}"', "link.security=none", "link.min_workers=2"]
    link = parse("", ["link.elastic=true", *given]).link
    assert (link.listen, link.registry, link.min_workers, link.silent_s) == (listen, registry, 2, 5.0)
    assert (link.grace, link.connections) == (None, 1)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("link.registry", text) for text in ("h", "h:0", ":1", "etcd://a:2379", "etcd://a/run", "etcd://a:1,/x", "")),
        *(("link.listen", text) for text in ("0.0.0.0", ":0", "h:65536", "h :0", "h:x")),
        *(("link.silent_s", text) for text in ("0", "0.01", "-1", "nan")),
        *(("link.min_workers", text) for text in ("0", "1.5", "true")),
        *(("link.grace", text) for text in ("0", "-1", "nan", "inf", "true")),
        *(("link.connections", text) for text in ("0", "9", "1.5", "true")),
    ],
)
def test_what_is_no_address_is_refused(key: str, value: str) -> None:
    text = f'"{value}"' if key in ("link.registry", "link.listen") else value
    assert f"{key}: must be" in refusal("", "link.elastic=true", f"{key}={text}")

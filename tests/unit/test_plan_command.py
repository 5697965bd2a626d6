"""`atoll plan`: what it says, what it refuses, and that programs can read it."""

import json
import math
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from atoll.cli import main as cli
from atoll.cli.plan.options import PlanOptions, count, seconds
from atoll.cli.plan.request import plan_request
from atoll.errors import ConfigError
from atoll.plan import planner
from atoll.plan.line import GOODPUT, Line
from atoll.plan.method import METHODS, RUN_FILE_METHOD, Model, methods_for
from atoll.settings.config import load
from atoll.settings.study import shipped
from bandwidth_tables import PRINTED, TABLE_4

MAIN = ("--params", "10e9", "--layers", "48", "--step-time", "0.8", "--workers", "8", "--link", "1Gbit/s,40ms")
ONE = ("--params", "1e9", "--layers", "24", "--step-time", "0.1")
TINY = ("--preset", "tiny")


def plan(*arguments: str | Path) -> Result:
    return CliRunner().invoke(cli.app, ["plan", *map(str, arguments)])


def planned(*arguments: str | Path) -> Any:
    result = plan(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))


def complaint(*arguments: str | Path, code: int = 2) -> str:
    result = plan(*arguments)
    assert result.exit_code == code, result.output
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    return line


# ---------------------------------------------------------------------- for programs


def test_json_has_every_number_for_every_method() -> None:
    found = planned(*MAIN, "--steps", "1000", "--price", "20")
    assert found["workers"] == 8 and found["link"]["bits_per_s"] == 1e9 and found["link"]["latency_s"] == 0.04
    assert list(found["methods"]) == list(METHODS)
    for method in found["methods"].values():
        assert 0 < method["utilisation_with_atoll"] <= method["utilisation"] + 1e-9 <= 1 + 1e-9
        assert set(method["bandwidth_for"]) == set(method["bandwidth_needed"]) == {"50", "80", "90", "95", "99"}
        assert method["bytes_of_run"] > method["bytes_per_step"] > 0 and method["memory_bytes"] > 0
        assert method["cost"] == pytest.approx(method["run_s"] / 3600 * 8 * 20)
        assert method["run_s"] >= 1000 * 0.8
        assert method["loss_penalty"] is None or abs(method["loss_penalty"]) < 0.1
        assert method["source"]
    assert found["methods"]["data-parallel"]["loss_penalty"] == 0
    assert found["methods"]["eager"]["loss_penalty"] is None, "nobody has measured it with 8 workers"
    assert found["advice"] and found["next_level"] is not None and found["defaults"]
    for choice in found["advice"]:
        assert choice["run_s"] == pytest.approx(1000 * 0.8 / choice["utilisation_with_atoll"], rel=0.15)
        assert choice["cost"] == pytest.approx(choice["run_s"] / 3600 * 8 * 20)
        assert choice["bytes_of_run"] >= 1000 * choice["bytes_per_step"] * 0.9


def test_advice_can_be_pasted_and_is_then_the_run(run_file: Path) -> None:
    """The line is what a shell makes of it; the run file's own column is then the advice, to the byte."""
    alike = (run_file, "--step-time", "0.1", "--target", "0.9")
    words, choice = plan(*alike).stdout, planned(*alike)["advice"][0]
    (first, *_) = re.findall(r"--set(?:[^\n]+\\\n)*[^\n]+", words)
    changes = shlex.split(first.replace("\\\n", ""))
    assert changes == [part for key, value in choice["settings"].items() for part in ("--set", f"{key}={value}")]
    own = planned(*alike, *changes)["methods"][RUN_FILE_METHOD]
    told = {name for name in choice if name not in ("method", "settings", "why", "label")}
    assert {name: own[name] for name in told} == {name: choice[name] for name in told}


def test_advice_knows_that_an_embedding_is_a_fragment_of_its_own(run_file: Path) -> None:
    """A vocabulary of 32,000 is half of a small model: a sixth of it would be far less to send at once."""
    large = ("--set", "model.preset=35M", "--set", "data.tokenizer=bpe", "--set", "data.vocabulary=32000")
    alike = (run_file, *large, "--step-time", "0.3", "--link", "20Mbit/s", "--steps", "50000")
    for choice in planned(*alike)["advice"]:
        changes = [part for key, value in choice["settings"].items() for part in ("--set", f"{key}={value}")]
        own = planned(*alike, *changes)["methods"][RUN_FILE_METHOD]
        assert own["utilisation_with_atoll"] == choice["utilisation_with_atoll"] >= 0.95


@pytest.mark.parametrize("name", ["tiny", "7M"])
def test_a_preset_has_the_fragments_of_its_model(name: str) -> None:
    from atoll.core.fragments import Blocks, split
    from atoll.settings.model_presets import preset
    from atoll.train.model.decoder import Decoder

    asked = plan_request(PlanOptions(preset=name, step_time="1", methods=["streaming"]))
    counted = plan_request(PlanOptions(preset=name, step_time="1", methods=["streaming"], fragments="2"))
    for plan_, policy in ((asked, Blocks()), (counted, Blocks(count=2))):
        fragments = split(Decoder(preset(name)), policy)
        assert plan_.methods[0].values(plan_.model) == tuple(fragment.numel for fragment in fragments)


def test_memory_is_that_of_the_run_file_s_outer_optimizer(run_file: Path) -> None:
    def added(*changes: str) -> int:
        sets = [part for change in changes for part in ("--set", change)]
        return int(planned(run_file, "--step-time", "1", *sets)["methods"][RUN_FILE_METHOD]["memory_bytes"])

    vector = 4 * planned(run_file, "--step-time", "1")["model"]["parameters"]
    assert added("sync.outer=sgd") == added() - vector
    assert added("sync.outer=adam") == added() + vector
    offloaded = planned(run_file, "--step-time", "1")["methods"][RUN_FILE_METHOD]["memory_offloaded_bytes"]
    assert added("sync.offload=true") == offloaded < added()


def test_one_worker_needs_no_line_and_is_offered_nothing() -> None:
    found = planned(*ONE, "--workers", "1")
    assert found["advice"] == [] and found["methods"]["diloco"]["bandwidth_needed"]["95"] == 0
    assert set(found["methods"]["streaming"]["bandwidth_for"].values()) == {0}
    words = plan(*ONE, "--workers", "1").stdout
    assert "One worker has nothing to exchange." in words and "--set sync.method=none" in words
    assert re.search(r"bit/s for 95 % busy( +-){6}", words)


def test_the_published_comparison_is_what_json_says_of_its_model() -> None:
    found = planned("--params", "10e9", "--layers", "48", "--step-time", "0.8")["methods"]
    for name in TABLE_4:
        row = PRINTED["10B"][name]
        assert "2 workers, no latency, steps 1.2 times as long" in found[name]["bandwidth_for_assumes"]
        ours = [rate / 1e9 for rate in found[name]["bandwidth_for"].values()]
        assert ours == pytest.approx(row, rel=0.25), "one grid point apart at most"


def test_one_method_of_a_large_model_with_the_defaults_for_the_rest() -> None:
    arguments = ("--params", "405e9", "--layers", "126", "--step-time", "26", "--method", "diloco", "--period", "50")
    found = planned(*arguments)
    assert found["workers"] == 2 and found["link"]["bits_per_s"] == 1e9
    (diloco,) = found["methods"].values()
    assert diloco["period"] == 50 and diloco["bytes_per_round"] == 2 * 405 * 10**9
    wait_s = 8 * diloco["bytes_per_round"] / (GOODPUT * 1e9)
    assert diloco["wait_s_per_period"] == pytest.approx(wait_s)
    assert diloco["utilisation_with_atoll"] == pytest.approx(50 * 26 / (50 * 26 + wait_s))
    assert diloco["bytes_of_run"] is None and diloco["run_s"] is None, "the number of steps is not known"


def test_a_rate_that_latency_forbids_is_null() -> None:
    needed = planned(*MAIN, "--method", "data-parallel")["methods"]["data-parallel"]["bandwidth_needed"]
    assert needed["50"] > 1e9 and needed["99"] is None


def test_methods_can_be_chosen_and_fragments_counted() -> None:
    found = planned(*ONE, "--method", "streaming", "--method", "eager", "--fragments", "5")["methods"]
    assert list(found) == ["streaming", "eager"]
    # 24 layers in 5 fragments: the largest has five of them, in 4 bits with a byte for every 128 values.
    assert found["streaming"]["bytes_per_round"] == pytest.approx(5 / 24 * 1e9 * (4 + 8 / 128) / 8, rel=1e-6)


# ---------------------------------------------------------------------- for people


def test_the_table_fits_and_names_what_matters() -> None:
    result = plan(*MAIN, "--steps", "24000", "--price", "20")
    assert result.exit_code == 0, result.output
    assert max(map(len, result.stdout.splitlines())) <= 100
    for words in ("DiLoCo", "Eager", "busy, with atoll", "99 % busy", "with sync.offload", "8 workers"):
        assert words in result.stdout

    assert re.search(r"loss, against data-parallel +\+0.0 %( +\S+ %){4} +- ", result.stdout)
    assert re.search(r"with sync.offload +- ", result.stdout), "data-parallel has nothing to put away"
    assert re.search(r"The run takes \S+ \S+ sends \S+ [TG]B\s+and\s+costs [0-9,]+\.", result.stdout)


def test_it_says_where_the_table_is_for_another_batch_than_advised() -> None:
    advised = planned(*ONE)["defaults"]["batch_tokens"] // 2  # of one of two workers
    assert "The table is for" not in plan(*ONE, "--tokens", str(advised)).stdout
    words = " ".join(plan(*ONE, "--tokens", str(2 * advised)).stdout.split())
    assert f"The table is for another batch: {4 * advised:,} tokens in a step of all workers" in words
    assert "The table is for another batch" in " ".join(plan(*ONE, "--tokens", str(advised // 2)).stdout.split())


def test_a_plan_names_the_learning_rate_that_a_run_would_use() -> None:
    words = " ".join(plan("--preset", "tiny", "--step-time", "1").stdout.split())
    assert "inner learning rate 0.003," in words and "capped at 0.003" in words and "a guess" in words


@pytest.mark.parametrize(
    ("arguments", "words", "fits"),
    [
        (("--memory", "80GB"), "", True),
        (("--memory", "27GB"), "Too large for 27.0 GB, before activations, with DiLoCo, 16 bits; Eager", False),
        (("--memory", "10GB"), "with any of these methods: parameters, gradients and AdamW's moments take 16.0", False),
        (("--memory", "20GB", "--chips", "8"), "Too large for one chip of 8 x 20.0 GB", True),
        ((), "", None),
    ],
)
def test_too_little_memory_is_said(arguments: tuple[str, ...], words: str, fits: bool | None) -> None:
    said = " ".join(plan(*ONE, *arguments).stdout.split())
    assert words in said and ("Too large" in said) == bool(words)
    assert planned(*ONE, *arguments)["methods"]["eager"]["fits"] is fits


def test_a_chip_has_its_memory() -> None:
    found = planned("--preset", "4B", "--tokens", "1e5", "--chip", "rtx4090", "--method", "diloco")
    assert found["memory_of_a_chip_bytes"] == 24e9 and found["methods"]["diloco"]["fits"] is False
    own = planned("--preset", "4B", "--tokens", "1e5", "--chip", "rtx4090", "--memory", "1TB", "--method", "diloco")
    assert own["methods"]["diloco"]["fits"] is True


def test_what_is_not_known_is_not_shown() -> None:
    result = plan(*ONE)
    assert "time of the run" not in result.stdout and "--steps" in result.stdout


def test_whether_a_picture_can_be_written_is_tried_without_a_trace(tmp_path: Path) -> None:
    assert "target" in complaint(*ONE, "--plot", tmp_path / "plan.png", "--target", "2")
    assert not list(tmp_path.iterdir())


def test_a_picture_is_written(tmp_path: Path) -> None:
    file = tmp_path / "plan.png"
    result = plan(*ONE, "--plot", file, "--json")
    assert file.read_bytes().startswith(b"\x89PNG")
    json.loads(result.stdout)


# ---------------------------------------------------------------------- run files and presets


@pytest.fixture
def run_file(tmp_path: Path) -> Path:
    file = tmp_path / "mine.toml"
    file.write_text(
        '[model]\npreset = "tiny"\n[train]\nbatch = 4\nsteps = 200\n[sync]\nworkers = 3\nperiod = 20\n'
        '[link]\naddress = "10.0.0.1:29500"\nemulate = "2Mbit/s, 30ms"\n'
    )
    return file


def test_a_run_file_is_planned_with_its_own_fragments(run_file: Path) -> None:
    from atoll.core.fragments import Blocks, split
    from atoll.train.model.decoder import Decoder

    found = planned(run_file, "--step-time", "0.1")
    assert found["workers"] == 3 and found["steps"] == 200 and found["link"]["bits_per_s"] == 2e6
    assert found["model"]["tokens_per_step"] == 4 * 128
    config = load(run_file)
    fragments = split(Decoder(config.shape(256)), Blocks())
    sync = config.synchronisation()
    assert sync is not None
    payloads = [sync.codec.payload_bytes(fragment.numel) for fragment in fragments]
    own = found["methods"][RUN_FILE_METHOD]
    assert own["bytes_per_round"] == 2 * max(payloads)
    assert own["bytes_per_step"] == pytest.approx(2 * sum(payloads) / 20)
    assert all(method["period"] == 20 for name, method in found["methods"].items() if name != "data-parallel")


def test_an_emulated_line_carries_all_of_its_rate(run_file: Path) -> None:
    """A real one of the same rate has packet headers and pauses."""
    emulated = planned(run_file, "--step-time", "0.1", "--set", "sync.method=diloco")
    real = planned(run_file, "--step-time", "0.1", "--set", "sync.method=diloco", "--link", "2Mbit/s,30ms")
    waits = [found["methods"][RUN_FILE_METHOD]["wait_s_per_period"] - 0.03 for found in (emulated, real)]
    assert waits[0] == pytest.approx(GOODPUT * waits[1])
    sent = emulated["methods"][RUN_FILE_METHOD]["bytes_per_round"]
    assert waits[0] == pytest.approx(8 * sent / 2e6)
    needed = [found["methods"][RUN_FILE_METHOD]["bandwidth_needed"]["50"] for found in (emulated, real)]
    assert needed[0] == pytest.approx(GOODPUT * needed[1], rel=0.002)


def test_what_is_not_planned_is_said(run_file: Path) -> None:
    changes = ("link.loss=0.01", "link.jitter_s=0.1", "link.outages=[{start_s=1,length_s=2}]")
    sets = [part for change in changes for part in ("--set", change)]
    assert planned(run_file, "--step-time", "0.1", *sets)["not_in_the_figures"] == [
        "link.jitter_s",
        "link.loss",
        "link.outages",
    ]
    assert (
        "Not in the figures, and it takes longer for them: link.jitter_s, link.loss"
        in plan(run_file, "--step-time", "0.1", *sets).stdout
    )
    assert "Not in the figures" not in plan(run_file, "--step-time", "0.1").stdout


def test_a_run_file_has_as_many_layers_as_can_be_planned(run_file: Path) -> None:
    told = complaint(run_file, "--step-time", "0.1", "--set", "model.layers=1000")
    assert "model.layers: must be at most 256 to be planned, got 1000" in told


def test_a_study_is_not_planned_but_what_to_do_is_said() -> None:
    assert "this is a study, and a plan is for one run: atoll init run.toml" in complaint(
        shipped()["drops"], "--step-time", "1"
    )


def test_workers_and_periods_are_read_as_people_write_them() -> None:
    found = planned(*ONE, "--workers", "1e3", "--period", "1e2", "--method", "diloco")
    assert found["workers"] == 1000 and found["methods"]["diloco"]["period"] == 100


def test_settings_of_a_run_file_can_be_changed(run_file: Path) -> None:
    found = planned(run_file, "--step-time", "0.1", "--set", "sync.method=diloco", "--workers", "2", "--period", "5")
    assert found["workers"] == 2 and found["methods"][RUN_FILE_METHOD]["codec"] == "fp32"
    assert found["methods"][RUN_FILE_METHOD]["period"] == 5


@pytest.mark.parametrize("method", ["none", "data-parallel", "eager"])
def test_every_method_of_a_run_file_can_be_planned(method: str, tmp_path: Path) -> None:
    file = tmp_path / "run.toml"
    file.write_text(f'[sync]\nmethod = "{method}"\nworkers = {1 if method == "none" else 2}\n')
    found = planned(file, "--step-time", "0.1")
    assert (RUN_FILE_METHOD in found["methods"]) == (method != "none")


def test_a_preset_with_a_measured_step() -> None:
    found = planned("--preset", "tiny", "--tokens", "256", "--probe", "--method", "diloco")
    assert found["model"]["parameters"] > 10**5 and found["model"]["step_from"].startswith("measured")
    assert found["model"]["tokens_per_step"] == 256 and found["steps"] is not None


def test_a_step_is_estimated_from_flops() -> None:
    asked = plan_request(PlanOptions(params="1B", layers="24", tokens="500e3", chip="H100", chips="8", mfu="0.5"))
    assert asked.model.step_s == pytest.approx(6 * 1e9 * 500e3 / (8 * 989e12 * 0.5))
    assert asked.steps == math.ceil(20 * 1e9 / (2 * 500e3))
    same = plan_request(PlanOptions(params="1B", layers="24", tokens="500e3", flops="989e12", chips="8", mfu="0.5"))
    assert same.model.step_s == asked.model.step_s


def test_what_is_not_advised_for_a_short_run_although_the_table_shows_it() -> None:
    words = {steps: " ".join(plan(*ONE, "--steps", steps).stdout.split()) for steps in ("3", "40", "499", "500")}
    assert "For a run of 3 steps only data-parallel is advised: it would exchange fewer than 5 times." in words["3"]
    assert "For a run of 40 steps no period of over 5 steps is advised" in words["40"]
    assert "For a run of 499 steps no period of over 50 steps is advised" in words["499"]
    assert "is advised" not in words["500"], "five periods of 100 fit"


def test_tokens_of_the_whole_run_become_steps() -> None:
    asked = plan_request(
        PlanOptions(params="1B", layers="24", tokens="1M", step_time="1s", tokens_total="100B", workers="4")
    )
    assert asked.steps == 25_000


@pytest.mark.parametrize(("text", "value"), [("10e9", 10**10), ("10B", 10**10), ("350M", 350 * 10**6), ("7", 7)])
def test_counts_are_read_as_people_write_them(text: str, value: int) -> None:
    assert count("params", text) == value


def test_times_are_read_as_people_write_them() -> None:
    assert seconds("step-time", "800ms") == pytest.approx(seconds("step-time", "0.8")) == pytest.approx(0.8)


def test_models_of_few_layers_are_one_fragment() -> None:
    model = Model(parameters=1000, layers=2, step_s=1.0)
    (streaming,) = methods_for(model, ["streaming"], None, None)
    assert streaming.layers(model) == ((1, 2),)


def test_every_option_is_explained() -> None:
    command = typer.main.get_command(cli.app).commands["plan"]  # type: ignore[attr-defined]
    assert plan("-h").exit_code == 0
    assert [parameter.name for parameter in command.params if not getattr(parameter, "help", None)] == []


# ---------------------------------------------------------------------- nonsense


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((*ONE, "--link=-1Gbit/s"), "rate above 0"),
        ((*ONE, "--link", "10Gb"), "say Gbit/s (bits) or GB/s (bytes)"),
        ((*ONE, "--link", "10GB"), "say Gbit/s (bits) or GB/s (bytes)"),
        ((*ONE, "--link", "10 furlongs"), "unknown unit"),
        ((*ONE, "--link", "1e-300bit/s"), "rate must be from 1 to 1e+18 bit/s, got 1e-300"),
        ((*ONE, "--link", "1e-290bit/s"), "rate must be from 1 to 1e+18 bit/s"),
        ((*ONE, "--link", "1e20Gbit/s"), "rate must be from 1 to 1e+18 bit/s"),
        ((*ONE, "--link", "1e305Gbit/s"), "too large for a rate"),
        ((*ONE, "--link", "1Gbit/s,1e200s"), "latency must be from 0 to 1e+06 s"),
        ((*ONE, "--workers", "many"), "workers must be a whole number from 1 to 4,096, like 8, got 'many'"),
        ((*ONE, "--period", "x"), "period must be a whole number"),
        ((*ONE, "--fragments", "1.5"), "fragments must be a whole number"),
        ((*ONE, "--target", "x"), "target must be a share of the time above 0 and below 1, got 'x'"),
        ((*ONE, "--price", "x"), "price must be a number from 0 to 1e12, got 'x'"),
        ((*ONE[:4], "--tokens", "1e6", "--chip", "h100", "--mfu", "x"), "mfu must be a share"),
        ((*ONE[:4], "--tokens", "1e6", "--chip", "h100", "--chips", "x"), "chips must be a whole number"),
        ((*ONE, "--price", "20"), "price is for a whole run: give --steps"),
        ((*ONE, "--method", "data-parallel", "--period", "50"), "--period is for methods that have one"),
        (("--params", "5", *ONE[2:]), "params must be at least as many as layers (24), got 5"),
        ((*ONE[:4], "--step-time", "1e-25"), "time of a step must be from 1e-06"),
        ((*ONE, "--plot", "/proc/x.png"), "--plot /proc/x.png: it cannot be written"),
        ((*ONE, "--workers", "0"), "workers must be"),
        ((*ONE, "--workers", "-3"), "workers must be"),
        ((*ONE, "--fragments", "25"), "at most 24, the layers"),
        ((*ONE, "--fragments", "0"), "fragments must be"),
        ((*ONE, "--method", "dilco"), "method must be one of"),
        ((*ONE, "--period", "0"), "period must be"),
        ((*ONE, "--period", "1000000"), "period must be a whole number from 1 to 10,000"),
        ((*ONE, "--target", "95"), "target must be"),
        ((*ONE, "--target", "nan"), "target must be"),
        ((*ONE, "--price", "-1"), "price must be"),
        ((*ONE, "--steps", "0"), "steps must be"),
        ((*ONE, "--tokens-total", "1B"), "tokens-total needs --tokens"),
        ((*ONE, "--plot", "plan.jpg"), "PNG"),
        ((*ONE, "--plot", "nowhere/plan.png"), "there is no folder nowhere"),
        ((*ONE, "--workers", "1000000000"), "workers must be a whole number from 1 to 4,096"),
        ((*ONE, "--price", "1e308"), "price must be"),
        ((*ONE, "--steps", "1e18"), "steps must be"),
        ((*ONE, "--steps", "10.5"), "steps must be a whole number"),
        ((*ONE[:2], "--layers", "24.5", *ONE[4:]), "layers must be a whole number from 1 to 256"),
        ((*ONE[:4], "--step-time", "1e300"), "time of a step must be from 1e-06 to 1e+09 seconds"),
        ((*ONE[:4], "--tokens", "1e6", "--flops", ""), "flops must be a whole number"),
        ((*ONE, "--method", "diloco", "--fragments", "5"), "--fragments is for streaming"),
        (("--serve", "--probe-link", ":29600", "--json"), "nothing else"),
        (("--preset", "nope", "--step-time", "1"), "got 'nope'; for another model give --params and --layers"),
        ((*ONE, "--probe-link", "nowhere"), "HOST:PORT"),
        ((*ONE, "--set", "sync.period=3"), "none is given"),
        ((*TINY, "--step-time", "1", "--set", "sync.period=3"), "none is given"),
        ((*ONE, "--probe"), "give --step-time or --probe, not both"),
        ((*ONE, "--chip", "h100"), "give --step-time or --chip, not both"),
        ((*ONE, "--flops", "1e12"), "give --step-time or --flops, not both"),
        ((*ONE, "--mfu", "0.4"), "give --step-time or --mfu, not both"),
        ((*TINY, "--probe", "--chip", "h100"), "give --probe or --chip, not both"),
        ((*TINY, "--tokens", "128", "--chip", "h100", "--flops", "1e12"), "give --chip or --flops, not both"),
        ((*ONE, "--steps", "9", "--tokens-total", "1B"), "give --steps or --tokens-total, not both"),
        ((*ONE, "--link", "1Gbit/s", "--probe-link", "host:1"), "give --link or --probe-link, not both"),
        ((*ONE, "--chips", "8"), "--chips is for"),
        ((*ONE, "--memory", "80"), "memory must be"),
        ((*ONE, "--memory", "1.2.3GB"), "memory must be"),
        (("--params", "0", *ONE[2:]), "params must be"),
        (("--params", "nan", *ONE[2:]), "params must be"),
        (("--params", "1e400", *ONE[2:]), "params must be"),
        (("--params", "-5", *ONE[2:]), "params must be"),
        (("--params", "ten", *ONE[2:]), "params must be"),
        ((*ONE[:2], "--layers", "0", *ONE[4:]), "layers must be"),
        ((*ONE[:2], *ONE[4:]), "give --layers"),
        ((*ONE[:4], "--step-time", "0"), "step-time must be"),
        ((*ONE[:4], "--step-time", "5 parsecs"), "step-time must be"),
        (ONE[:4], "--step-time 0.8 (seconds); or --tokens"),
        ((*ONE[:4], "--chip", "h100"), "give --tokens"),
        ((*ONE[:4], "--tokens", "1e6", "--chip", "abacus"), "chip must be one of"),
        ((*ONE[:4], "--tokens", "1e6", "--chip", "h100", "--mfu", "1.5"), "mfu must be"),
        ((*ONE[:4], "--probe"), "a run file, or --preset"),
        (("--preset", "3B", "--step-time", "1"), "did you mean '4B'? For another model give --params and --layers"),
        ((), "say what is trained"),
        ((*ONE, "--preset", "1B"), "only one of them"),
        (("--serve",), "--probe-link :29600 --serve"),
        (("missing.toml",), "no such file"),
    ],
)
def test_nonsense_gets_one_clear_line(arguments: tuple[str, ...], words: str) -> None:
    assert words in complaint(*arguments)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--target", "95"), "target must be"),
        (("--method", "bogus"), "method must be one of"),
        (("--steps", "abc"), "steps must be"),
        (("--price", "-1"), "price must be"),
        (("--tokens", "100"), "multiple of the sequence of 128"),
        (("--memory", "much"), "memory must be"),
        (("--link", "fast"), "not a rate"),
    ],
)
def test_everything_is_checked_before_anything_is_measured(
    arguments: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("atoll.train.step.step_time.probe_step", lambda *_, **__: pytest.fail("a step was measured"))
    monkeypatch.setattr("atoll.link.net.bandwidth.measure", lambda *_, **__: pytest.fail("a line was measured"))
    line = () if "--link" in arguments else ("--probe-link", "127.0.0.1:1")
    assert words in complaint(*TINY, "--probe", *line, *arguments)


def test_latency_is_said_to_be_one_way() -> None:
    assert "one way" in " ".join(plan("-h").stdout.split())
    assert "half of ping" in complaint(*ONE, "--link", "1Gbit/s,40")


def test_a_plan_is_checked_without_a_command_line() -> None:
    model = Model(parameters=1000, layers=2, step_s=1.0)
    with pytest.raises(ConfigError, match="workers"):
        planner.PlanRequest(model=model, workers=0, link=Line(1e9), methods=(), step_from="")


# ---------------------------------------------------------------------- beside what was measured


def test_a_run_on_a_slow_link_ends_with_what_had_been_planned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from atoll.settings.config import parse
    from atoll.train.run import train

    settings = {"preset": "tiny", "layers": 2}, {"steps": 6, "batch": 1, "sequence": 16}
    table = {"model": settings[0], "train": settings[1], "sync": {"method": "diloco", "period": 2}, "device": "cpu"}
    here = {"out": str(tmp_path), "data": {"cache": str(tmp_path / "tokens"), "limit": 20}, "log": {"view": "lines"}}
    train(parse(table | here | {"link": {"emulate": "50Mbit/s, 20ms"}}))
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("planned for 50Mbit/s, 20ms")]
    assert len(re.findall(r"([0-9.]+) %", line)) == 2, line  # how near they come is benchmarks/predicted.py's to say
    assert len(set(re.findall(r"[0-9.]+ [kM]B", line))) == 1, "bytes are as planned, to three digits"


# ---------------------------------------------------------------------- the page about it


def tidy(text: str) -> str:
    return "\n".join(line.rstrip() for line in text.strip("\n").splitlines())


def test_the_page_shows_what_is_printed() -> None:
    page = Path(__file__).parents[2] / "docs" / "planning.md"
    shown = re.findall(r"^```text\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL)[0]
    arguments = "--preset 1B --tokens 500e3 --chip h100 --chips 8 --price 20 --link 200Mbit/s,50ms"
    assert tidy(plan(*arguments.split()).stdout) == tidy(shown)

"""What a run file leaves out: the paper's recipe, and nothing that was given is touched."""

import pytest

from atoll.errors import ConfigError
from atoll.plan.scaling_laws import defaults
from atoll.settings import config
from atoll.train.step.recipe import resolve


def test_the_recipe_of_the_scaling_laws_paper() -> None:
    run = resolve(config.parse({"device": "cpu"}), parameters=1_000_000, context=128)
    train, sync = run.train, run.sync
    assert train.steps == -(-20 * 1_000_000 // (2 * 8 * 128)) and train.sequence == 128
    assert train.warmup == train.steps // 10 and train.weight_decay == 1 / train.steps
    assert (train.betas, train.clip, train.final_lr, train.lr) == ((0.9, 0.99), 1.0, 0.05, 3e-3)
    assert (sync.period, sync.outer, sync.outer_lr, sync.outer_momentum) == (100, "nesterov", 0.6, 0.9)
    assert (sync.codec, sync.fragments, sync.delay, sync.alpha) == ("e3m0", "blocks", 1, 0.25)
    assert (run.precision, run.compile) == ("fp32", False)
    assert resolve(run, parameters=1_000_000, context=128) == run


@pytest.mark.parametrize("method", ["none", "data-parallel", "diloco", "streaming", "eager", "delayed"])
def test_what_is_filled_in_says_the_same_as_what_was_left_out(method: str) -> None:
    workers = 1 if method == "none" else 3
    given = config.parse({"device": "cpu", "sync": {"method": method, "workers": workers}, "train": {"steps": 50}})
    filled = resolve(given, parameters=1000, context=64)
    assert filled.synchronisation() == given.synchronisation()
    assert config.parse(filled.to_toml()) == filled


@pytest.mark.parametrize("workers", [1, 2, 3, 8])
@pytest.mark.parametrize("parameters", [1000, 10**6, 35 * 10**6, 10**8, 10**9, 10**10])
def test_a_run_uses_the_learning_rate_that_a_plan_names(parameters: int, workers: int) -> None:
    run = resolve(config.parse({"device": "cpu", "sync": {"workers": workers}}), parameters=parameters, context=64)
    assert run.train.lr == defaults(parameters, workers).learning_rate


def test_sequences_are_as_long_as_the_model_allows_and_no_longer() -> None:
    long = config.parse({"device": "cpu", "model": {"context": 4096}})
    assert resolve(long, parameters=1000, context=4096).train.sequence == 4096
    hub = config.parse({"device": "cpu", "model": {"hf": "folder/"}})
    assert resolve(hub, parameters=1000, context=131072).train.sequence == 1024
    with pytest.raises(ConfigError, match=r"at most the model's context of 64 tokens, got 65: shorten it$"):
        resolve(hub.changed(**{"train.sequence": 65}), parameters=1000, context=64)

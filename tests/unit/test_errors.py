"""Errors carry fields, which survive a pickle."""

import copy
import pickle
from collections.abc import Callable

import pytest

from atoll import DataParallel, DiLoCo, checkpoint, connect, local
from atoll.errors import AtollError, CheckpointError, ConfigError, DataError, LinkError
from atoll.link.base import RoundId
from atoll.link.local import Faults
from atoll.link.shaped import Shape


@pytest.mark.parametrize(
    ("make", "setting", "value"),
    [
        (lambda: local(0), "workers", 0),
        (lambda: local(2, timeout_s=-1.0), "timeout_s", -1.0),
        (lambda: Faults(drop=2.0), "drop", 2.0),
        (lambda: Shape(loss=1.0), "loss", 1.0),
        (lambda: connect("nowhere", worker=0, workers=2), "address", "nowhere"),
        (lambda: connect("127.0.0.1:29500", worker=2, workers=2), "worker", 2),
        (lambda: checkpoint.save("unused", -1, {}), "step", -1),
    ],
)
def test_a_config_error_names_the_setting_and_its_value(
    make: Callable[[], object], setting: str, value: object
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert (caught.value.setting, caught.value.value) == (setting, value)
    assert setting in str(caught.value) and repr(value) in str(caught.value)


@pytest.mark.parametrize(
    ("call", "problem", "allowed"),
    [
        (lambda: DiLoCo(20), "too many positional arguments", "DiLoCo(period=500); it takes period"),  # type: ignore[call-arg]
        (lambda: DiLoCo(perod=20), "unexpected keyword argument 'perod'", "it takes period, fragments"),  # type: ignore[call-arg]
        (lambda: DataParallel("bf16"), "too many positional arguments", "DataParallel(codec='fp32')"),  # type: ignore[call-arg]
    ],
)
def test_a_preset_called_with_wrong_arguments_says_which_it_takes(
    call: Callable[[], object], problem: str, allowed: str
) -> None:
    with pytest.raises(TypeError) as caught:
        call()
    assert problem in str(caught.value) and allowed in str(caught.value)


def test_a_checkpoint_error_has_the_path(tmp_path: object) -> None:
    with pytest.raises(CheckpointError) as caught:
        checkpoint.load(str(tmp_path))
    assert str(caught.value.path) == str(tmp_path)


@pytest.mark.parametrize(
    ("error", "fields"),
    [
        (ConfigError("no", setting="a.b", value=[1]), {"setting": "a.b", "value": [1]}),
        (LinkError("no", worker=3, round_id=RoundId(4, 1)), {"worker": 3, "round_id": RoundId(4, 1)}),
        (CheckpointError("no", path="a"), {"path": "a"}),
        (DataError("no", path="b"), {"path": "b"}),
        (LinkError(), {"worker": None, "round_id": None}),
    ],
)
def test_fields_survive_copies_and_pickles(error: AtollError, fields: dict[str, object]) -> None:
    for twin in (error, copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert type(twin) is type(error) and str(twin) == str(error)
        assert {name: getattr(twin, name) for name in fields} == fields

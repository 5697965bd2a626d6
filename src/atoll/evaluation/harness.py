"""Runs lm-evaluation-harness on local data, with the prompts, targets and metrics of its own tasks."""

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lm_eval.tasks
from datasets import Dataset
from lm_eval.api.group import Group
from lm_eval.api.model import LM
from lm_eval.api.task import ConfigurableTask
from lm_eval.config.group import GroupConfig
from lm_eval.evaluator import evaluate
from lm_eval.tasks._yaml_loader import load_yaml

from atoll.evaluation.tasks import BLIMP, TaskData
from atoll.runs.scored import Scored, Weights

TASKS = Path(lm_eval.tasks.__file__).parent
"""The harness's folder of tasks."""
_METRICS = ("acc", "acc_norm")
_SPLIT = "test"
_NONE = {"dataset_name": None, "training_split": None, "validation_split": None}


class HarnessTask(ConfigurableTask):  # type: ignore[misc]
    """Evaluates a task of the harness on documents in memory instead of a dataset of the hub."""

    def __init__(self, data: TaskData) -> None:
        self._documents = data.documents
        config = load_yaml(TASKS / data.task.config)
        config.pop("tag", None)
        metrics = [metric for metric in config["metric_list"] if metric["metric"] in _METRICS]
        super().__init__(config=config | _NONE | {"test_split": _SPLIT, "metric_list": metrics})

    def download(self, *_: Any, **__: Any) -> None:
        """Takes the documents in memory; nothing is downloaded."""
        self.dataset = {_SPLIT: Dataset.from_list(self._documents)}


def score(lm: LM, data: Sequence[TaskData], weights: Weights) -> list[Scored]:
    """Returns the scores of a model on tasks, in the order of the tasks.

    The score of a group comes before those of its tasks.
    """
    tasks = {each.task.name: HarnessTask(each) for each in data}
    groups = {BLIMP: _group(BLIMP, [tasks[each.task.name] for each in data if each.task.group == BLIMP])}
    groups = {name: group for name, group in groups.items() if len(group)}
    found = evaluate(lm=lm, task_dict={"tasks": tasks, "groups": groups}, log_samples=False)["results"]
    scores: dict[str, Scored] = {}
    for each in data:
        name, group = each.task.name, each.task.group
        if group is not None and group not in scores:
            parts = [other for other in data if other.task.group == group]
            count = sum(len(part.documents) for part in parts)
            chance = math.fsum(part.chance for part in parts) / len(parts)
            scores[group] = Scored(task=group, weights=weights, documents=count, chance=chance, **_values(found[group]))
        scores[name] = Scored(
            task=name,
            weights=weights,
            documents=len(each.documents),
            chance=each.chance,
            group=group,
            sha256=each.sha256,
            **_values(found[name]),
        )
    return list(scores.values())


def _group(name: str, members: Sequence[HarnessTask]) -> Group:
    """Returns the harness's group of this name with these tasks; its YAML file says how they are averaged."""
    config = load_yaml(TASKS / name / f"_{name}.yaml")
    group = Group.from_config(GroupConfig(**config))
    for member in members:
        group.add(member)
    return group


def _values(metrics: dict[str, Any]) -> dict[str, Any]:
    """Returns the harness's metrics of a task by the names of `Scored`."""

    def value(name: str) -> float | None:
        found = metrics.get(f"{name},none")
        return None if found is None or isinstance(found, str) else float(found)  # "N/A" for a single document

    return {
        "accuracy": value("acc"),
        "stderr": value("acc_stderr"),
        "by_length": value("acc_norm"),
        "by_length_stderr": value("acc_norm_stderr"),
    }

"""Reads the data of evaluation tasks from JSONL files, as the documents that lm-evaluation-harness expects.

A file has the shape of MosaicML's llm-foundry (scripts/eval/local_data) or of BLiMP, one JSON object a line:

    query, choices, gold                    arc_easy, arc_challenge, piqa, openbookqa, boolq
    context, continuation                   lambada_openai, lambada_standard
    context_options, continuation, gold     winogrande
    sentence_good, sentence_bad             blimp_*

Rows of llm-foundry contain parts of its own prompt ("Question: "). They are removed: the harness writes the prompt.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from json import JSONDecodeError
from pathlib import Path
from typing import Annotated, Any, ClassVar, Final

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from atoll._util.disk import lines_limited, open_plain, parse_json, sha256_of
from atoll.errors import ConfigError, DataError

MOST_LINE: Final = 2**24
"""Bytes that a line may have at most."""


def _not_blank(text: str) -> str:
    if not text.strip():
        raise ValueError("must hold more than spaces")
    return text


Text = Annotated[str, Field(min_length=1)]
Beginning = Annotated[str, AfterValidator(_not_blank)]
"""A text that a model reads first: the harness moves spaces at its end into what follows, and no token may be left."""
Index = Annotated[int, Field(ge=0)]
Document = dict[str, Any]
"""One question, in the fields that a task of the harness expects."""


class Row(BaseModel):
    """Holds one line of a data file; unknown fields are ignored."""

    model_config = ConfigDict(strict=True, frozen=True)
    WANTED: ClassVar[str]
    """The fields that a line must have, in words for an error message."""
    CHANCE: ClassVar[float] = 0.5

    def document(self) -> Document:
        """Returns the row as a document of the harness's task; raises ValueError if its values do not fit together."""
        raise NotImplementedError

    @property
    def chance(self) -> float:
        """The accuracy of a guess, 0 to 1."""
        return self.CHANCE


class MultipleChoiceRow(Row):
    """Holds a question with two or more choices, one of which is right."""

    WANTED = "query (text), choices (two or more texts) and gold (the index of the right one)"
    query: Beginning
    choices: Annotated[list[Text], Field(min_length=2, max_length=26)]
    gold: Index

    def document(self) -> Document:
        """Returns a document of ARC."""
        return {"question": self.query.removeprefix("Question: "), **self._labelled()}

    @property
    def chance(self) -> float:
        """The accuracy of a guess."""
        return 1 / len(self.choices)

    def _labelled(self) -> Document:
        labels = [chr(ord("A") + index) for index in range(len(self.choices))]
        return {"choices": {"text": self.choices, "label": labels}, "answerKey": labels[self._right(len(labels))]}

    def _right(self, count: int) -> int:
        """Returns the index of the right choice among `count`."""
        if len(self.choices) != count:
            raise ValueError(f"choices must have {count} texts, got {len(self.choices)}")
        if self.gold >= count:
            raise ValueError(f"gold must be the index of a choice, 0 to {count - 1}, got {self.gold}")
        return self.gold


class OpenBookQARow(MultipleChoiceRow):
    """Holds a question of OpenBookQA."""

    def document(self) -> Document:
        """Returns a document of OpenBookQA."""
        return {"question_stem": self.query, **self._labelled()}


class PiqaRow(MultipleChoiceRow):
    """Holds a goal of PIQA with two ways to reach it."""

    WANTED = "query (text), choices (two texts) and gold (0 or 1)"

    def document(self) -> Document:
        """Returns a document of PIQA."""
        right = self._right(2)
        goal = self.query.removeprefix("Question: ").removesuffix("\n")
        return {"goal": goal, "sol1": self.choices[0], "sol2": self.choices[1], "label": right}


class BoolQRow(MultipleChoiceRow):
    """Holds a passage of BoolQ with a question whose answer is no or yes."""

    WANTED = 'query ("Passage: ...\\nQuestion: ...?"), choices (["no", "yes"]) and gold (0 or 1)'

    def document(self) -> Document:
        """Returns a document of BoolQ."""
        if self.choices != ["no", "yes"]:
            raise ValueError(f'choices must be ["no", "yes"], got {self.choices}')
        passage, found, question = self.query.removeprefix("Passage: ").rpartition("\nQuestion: ")
        if not found:
            raise ValueError('query must have a line that begins with "Question: "')
        return {"passage": passage, "question": question.removesuffix("?"), "label": self._right(2)}


class LambadaRow(Row):
    """Holds a text of LAMBADA, whose last word is to be predicted."""

    WANTED = "context (text) and continuation (one word)"
    context: Beginning
    continuation: Text
    CHANCE = 0.0

    def document(self) -> Document:
        """Returns a document of LAMBADA."""
        if " " in self.continuation:
            raise ValueError(f"continuation must be one word, got {self.continuation!r}")
        return {"text": f"{self.context} {self.continuation}"}


class WinograndeRow(Row):
    """Holds a sentence of WinoGrande with two beginnings, one of which makes sense."""

    WANTED = "context_options (two texts), continuation (text) and gold (0 or 1)"
    context_options: Annotated[list[Beginning], Field(min_length=2, max_length=2)]
    continuation: Text
    gold: Annotated[int, Field(ge=0, le=1)]

    def document(self) -> Document:
        """Returns a document of WinoGrande, whose gap is the whole beginning."""
        first, second = self.context_options
        return {
            "sentence": f"_ {self.continuation}",
            "option1": first,
            "option2": second,
            "answer": str(self.gold + 1),
        }


class BlimpRow(Row):
    """Holds two sentences of BLiMP, one of which is grammatical."""

    WANTED = "sentence_good and sentence_bad (texts)"
    sentence_good: Text
    sentence_bad: Text

    def document(self) -> Document:
        """Returns a document of BLiMP."""
        return {"sentence_good": self.sentence_good, "sentence_bad": self.sentence_bad}


@dataclass(frozen=True, slots=True)
class LocalTask:
    """Names a task of the harness and the file that holds its data."""

    name: str
    """The harness's name."""
    config: str
    """Its YAML file, inside the harness's folder of tasks."""
    row: type[Row]
    files: tuple[str, ...]
    """Names that its file may have, without .jsonl."""
    group: str | None = None


_TASKS: Final = (
    LocalTask("arc_easy", "arc/arc_easy.yaml", MultipleChoiceRow, ("arc_easy",)),
    LocalTask("arc_challenge", "arc/arc_challenge.yaml", MultipleChoiceRow, ("arc_challenge",)),
    LocalTask("boolq", "super_glue/boolq/default.yaml", BoolQRow, ("boolq",)),
    LocalTask("lambada_openai", "lambada/lambada_openai.yaml", LambadaRow, ("lambada_openai",)),
    LocalTask("lambada_standard", "lambada/lambada_standard.yaml", LambadaRow, ("lambada_standard",)),
    LocalTask("openbookqa", "openbookqa/openbookqa.yaml", OpenBookQARow, ("openbookqa", "openbook_qa")),
    LocalTask("piqa", "piqa/piqa.yaml", PiqaRow, ("piqa",)),
    LocalTask("winogrande", "winogrande/default.yaml", WinograndeRow, ("winogrande",)),
)
BLIMP: Final = "blimp"
"""The group of all tasks of BLiMP."""


def find_tasks(names: Sequence[str], harness: Path) -> list[LocalTask]:
    """Returns the tasks of these names, each once; "blimp" stands for all its tasks.

    Args:
        names: Names of tasks.
        harness: The harness's folder of tasks, which says what BLiMP consists of.

    Raises:
        ConfigError: a name is unknown.
    """
    pairs = [path.stem for path in sorted((harness / BLIMP).glob("*.yaml")) if not path.stem.startswith("_")]
    blimp = [LocalTask(f"{BLIMP}_{pair}", f"{BLIMP}/{pair}.yaml", BlimpRow, (pair,)) for pair in pairs]
    single = {task.name: task for task in (*_TASKS, *blimp)}
    found: dict[str, LocalTask] = {}
    for name in names:
        if name == BLIMP:
            found |= {task.name: LocalTask(task.name, task.config, task.row, task.files, BLIMP) for task in blimp}
        elif name in single:
            found.setdefault(name, single[name])
        else:
            known = ", ".join([*(task.name for task in _TASKS), BLIMP, f"{BLIMP}_{pairs[0]}" if pairs else BLIMP])
            close = get_close_matches(name, [*single, BLIMP], n=1)
            hint = f"; did you mean {close[0]}?" if close else ""
            raise ConfigError(
                f"--tasks: there is no task {name!r}{hint}; the tasks are {known} and the others of BLiMP",
                setting="tasks",
                value=name,
            )
    if not found:
        raise ConfigError("--tasks must name at least one task, got none", setting="tasks", value=list(names))
    return list(found.values())


@dataclass(frozen=True, slots=True)
class TaskData:
    """Holds the documents of a task."""

    task: LocalTask
    documents: list[Document]
    chance: float
    """The accuracy of random guesses, 0 to 1: the mean over the documents."""
    sha256: str
    """The SHA-256 of the file, in hex."""


def read_tasks(tasks: Sequence[LocalTask], folder: Path) -> list[TaskData]:
    """Reads the data files of tasks from a folder or its subfolders.

    Raises:
        DataError: a file is missing, there are several for a task, or a line is malformed.
    """
    group = [f"{task.files[0]}.jsonl" for task in tasks if task.group == BLIMP]
    if group and folder.is_dir():
        there = {path.name for path in folder.rglob("*.jsonl")}
        if missing := [name for name in group if name not in there]:
            lacks = f"{folder} and its subfolders lack {len(missing)} of the {len(group)} files of BLiMP"
            source = "the folder data of https://github.com/alexwarstadt/blimp has them"
            raise DataError(f"--data: {lacks}, the first being {missing[0]}: {source}", path=folder)
    return [read_task(task, folder) for task in tasks]


def read_task(task: LocalTask, folder: Path) -> TaskData:
    """Reads the data file of a task from a folder or its subfolders.

    Raises:
        DataError: the file is missing, there are several, or a line is malformed.
    """
    path = _file_of(task, folder)
    rows = list(_rows(task, path))
    if not rows:
        raise DataError(f"{path} holds no line: {task.name} needs at least one; copy the file again", path=path)
    return TaskData(
        task=task,
        documents=[document for document, _ in rows],
        chance=sum(chance for _, chance in rows) / len(rows),
        sha256=sha256_of(path),
    )


def _file_of(task: LocalTask, folder: Path) -> Path:
    names = [f"{name}.jsonl" for name in task.files]
    if not folder.is_dir():
        raise DataError(f"--data: {folder} is not a folder: give the folder with {names[0]}", path=folder)
    found = sorted(path for name in names for path in folder.rglob(name))
    if not found:
        wanted = " or ".join(names)
        raise DataError(
            f"--data: {folder} and its subfolders have no {wanted}, which {task.name} needs: add it", path=folder
        )
    if len(found) > 1:
        raise DataError(
            f"--data: there are several files for {task.name}, {found[0]} and {found[1]}: keep one", path=found[0]
        )
    return found[0]


def _rows(task: LocalTask, path: Path) -> Iterator[tuple[Document, float]]:
    """Yields the document of each line that is not blank, and the chance of guessing its answer."""
    try:
        with open_plain(path) as file:
            for number, line in enumerate(lines_limited(path, file, MOST_LINE), 1):
                if not line.strip():
                    continue
                try:
                    row = task.row.model_validate(parse_json(line.decode()))
                    yield row.document(), row.chance
                except ValueError as error:  # pydantic's, too
                    problem = f"{path}, line {number}: {_problem(error)}"
                    wanted = f"a line must be a JSON object with {task.row.WANTED}"
                    raise DataError(f"{problem}; {wanted}", path=path) from error
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}", path=path) from error


def _problem(error: ValueError) -> str:
    """Returns what is wrong with a line, in one sentence."""
    if isinstance(error, JSONDecodeError):  # its own text counts the lines of one line
        return f"{error.msg} (column {error.colno})"
    if not isinstance(error, ValidationError):
        return " ".join(str(error).split())
    first = error.errors(include_url=False, include_input=False)[0]
    field = ".".join(map(str, first["loc"]))
    why = first["msg"].removeprefix("Value error, ")
    return f"{field}: {why[:1].lower()}{why[1:]}" if field else "it is not a JSON object"

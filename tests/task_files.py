"""Makes small files of evaluation tasks, in the shapes of llm-foundry and BLiMP and as the harness itself has them."""

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

Rows = list[dict[str, Any]]
WORDS = ["the", "a", "cat", "dog", "house", "tree", "river", "stone", "bread", "light", "runs", "sees", "old", "small"]
BLIMP = ("adjunct_island", "wh_island")


class MadeTask(NamedTuple):
    """A task as atoll reads it, and as the harness does."""

    file: str
    local: Rows
    harness: Rows


def words(chance: random.Random, least: int, most: int) -> str:
    return " ".join(chance.choice(WORDS) for _ in range(chance.randint(least, most)))


def made(count: int = 12, seed: int = 0) -> dict[str, MadeTask]:
    """Returns tasks by name, each with some documents; some are longer than a context of 32 tokens."""
    chance = random.Random(seed)
    found: dict[str, MadeTask] = {}
    for name, file in {"arc_easy": "arc_easy", "openbookqa": "openbook_qa"}.items():
        field, prompt = ("question", "Question: ") if name == "arc_easy" else ("question_stem", "")
        local: Rows = []
        harness: Rows = []
        for _ in range(count):
            text, choices = words(chance, 3, 40), [words(chance, 1, 4) for _ in range(4)]
            gold = chance.randrange(4)
            local.append({"query": prompt + text, "choices": choices, "gold": gold})
            labels = {"text": choices, "label": list("ABCD")}
            harness.append({field: text, "choices": labels, "answerKey": "ABCD"[gold]})
        found[name] = MadeTask(file, local, harness)
    local, harness = [], []
    for _ in range(count):
        text, choices, gold = words(chance, 2, 9), [words(chance, 1, 6), words(chance, 1, 6)], chance.randrange(2)
        local.append({"query": f"Question: {text}\n", "choices": choices, "gold": gold})
        harness.append({"goal": text, "sol1": choices[0], "sol2": choices[1], "label": gold})
    found["piqa"] = MadeTask("piqa", local, harness)
    local, harness = [], []
    for _ in range(count):
        passage, question, gold = words(chance, 5, 30), words(chance, 3, 6), chance.randrange(2)
        query = f"Passage: {passage}\nQuestion: {question}?"
        local.append({"query": query, "choices": ["no", "yes"], "gold": gold})
        harness.append({"passage": passage, "question": question, "label": gold})
    found["boolq"] = MadeTask("boolq", local, harness)
    local, harness = [], []
    for _ in range(count):
        text, word = words(chance, 5, 50), words(chance, 1, 1)
        local.append({"context": text, "continuation": word})
        harness.append({"text": f"{text} {word}"})
    found["lambada_openai"] = MadeTask("lambada_openai", local, harness)
    local, harness = [], []
    for _ in range(count):
        begin, end, gold = words(chance, 2, 6), words(chance, 2, 6), chance.randrange(2)
        local.append({"context_options": [f"{begin} cat", f"{begin} dog"], "continuation": end, "gold": gold})
        sentence = {"sentence": f"{begin} _ {end}", "option1": "cat", "option2": "dog"}
        harness.append(sentence | {"answer": str(gold + 1)})
    found["winogrande"] = MadeTask("winogrande", local, harness)
    for name in BLIMP:
        rows = [{"sentence_good": words(chance, 3, 9), "sentence_bad": words(chance, 3, 9)} for _ in range(count)]
        found[f"blimp_{name}"] = MadeTask(name, [row | {"UID": name} for row in rows], rows)
    return found


def write_rows(path: Path, rows: Sequence[object]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def write_data(folder: Path, tasks: dict[str, MadeTask]) -> Path:
    """Writes the tasks as llm-foundry and BLiMP do, in folders of several names."""
    for name, task in tasks.items():
        write_rows(
            folder / ("data" if name.startswith("blimp") else "some/local_data") / f"{task.file}.jsonl", task.local
        )
    return folder

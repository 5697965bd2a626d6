"""Bugs in evaluation on tasks; most turn tests red that need lm-evaluation-harness (atoll[eval])."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_evaluation.py"]
FILES = ("tests/unit/test_tasks.py",)
LM = "evaluation/causal_lm.py"
MUTANTS = [
    Mutant("continuations are scored a token late", LM, "each[len(row) - len(request[2]) : len(row)]",
           "each[len(row) - len(request[2]) - 1 : len(row) - 1]"),
    Mutant("long contexts lose their end", LM, "(context + continuation)[-self.context - 1 : -1]",
           "(context + continuation)[:-1][: self.context]"),
    Mutant("a context is cut a token short", LM, "[-self.context - 1 : -1]", "[-self.context : -1]"),
    Mutant("cut requests are not counted", LM, "len(continuation) > self.context + 1 for _", "len(continuation) > 10**9 for _"),
    Mutant("an empty context is token 1", LM, "self.prefix = tokenizer.separator", "self.prefix = tokenizer.separator + 1"),
    Mutant("special tokens of a public tokenizer are left out", LM, "add_special_tokens=special)", "add_special_tokens=False)"),
    Mutant("the last token begins texts", LM, "last if first is None else first", "first if last is None else last"),
    Mutant("dropout while evaluating", LM, "model.to(device).eval()", "model.to(device).train()"),
    Mutant("any likely token is the likeliest", LM, "(last.argmax(-1) == ids).all()", "(last.argmax(-1) == ids).any()"),
    Mutant("logits for likelihoods", LM, "functional.log_softmax(logits, dim=-1)[None]", "logits[None]"),
    Mutant("answers in the order of batches", LM, "ordered.get_original(answers)", "answers"),
    Mutant("continuations of any length", LM, "if not 0 < len(continuation) <= self.context:", "if not continuation:"),
    Mutant("the accuracy by length is left out", "evaluation/harness.py", '_METRICS = ("acc", "acc_norm")', '_METRICS = ("acc",)'),
    Mutant("the standard error is that of another metric", "evaluation/harness.py", 'value("acc_norm_stderr")', 'value("acc_stderr")'),
    Mutant("tasks of a group count once each", "evaluation/harness.py", "sum(len(part.documents) for part in parts)", "len(parts)"),
    Mutant("scores begin the metrics anew", "evaluation/evaluate.py", "Jsonl(path, at=path.stat().st_size)", "Jsonl(path)"),
    Mutant("scores are written beside a training", "evaluation/evaluate.py", "        if (folder / RUN).is_file():  # training would", "        if False:  # training would"),
    Mutant("scores of an export are said to be recorded", "evaluation/evaluate.py", "None if metrics is None else folder / METRICS", "folder / METRICS"),
    Mutant("the best is recorded as the last", "evaluation/evaluate.py", '"best" if best else "final"', '"final"'),
    Mutant("a model of NaNs is scored", "evaluation/evaluate.py", "if not all(parameter.isfinite().all() for parameter in model.parameters()):", "if False:"),
    Mutant("a beginning may be blank", "evaluation/tasks.py", "if not text.strip():", "if not text:", tests=FILES),
    Mutant("missing metrics are begun anew", "evaluation/evaluate.py", "Jsonl(path, at=path.stat().st_size)", "Jsonl(path, at=2**60)"),
    Mutant("the right choice may be past the last", "evaluation/tasks.py", "if self.gold >= count:", "if self.gold > count:", tests=FILES),
    Mutant("a prompt is there twice", "evaluation/tasks.py", '"question": self.query.removeprefix("Question: ")', '"question": self.query', tests=FILES),
    Mutant("a question ends in two marks", "evaluation/tasks.py", 'question.removesuffix("?")', "question", tests=FILES),
    Mutant("a goal ends in a newline", "evaluation/tasks.py", '.removesuffix("\\n")', "", tests=FILES),
    Mutant("yes for no", "evaluation/tasks.py", 'if self.choices != ["no", "yes"]:', "if not self.choices:", tests=FILES),
    Mutant("several words are one", "evaluation/tasks.py", 'if " " in self.continuation:', "if not self.continuation:", tests=FILES),
    Mutant("schemas are answered by the other", "evaluation/tasks.py", '"answer": str(self.gold + 1)', '"answer": str(2 - self.gold)', tests=FILES),
    Mutant("the first of two files is taken", "evaluation/tasks.py", "if len(found) > 1:", "if len(found) > 2:", tests=FILES),
    Mutant("lines are numbered from 0", "evaluation/tasks.py", "lines_limited(path, file, MOST_LINE), 1)", "lines_limited(path, file, MOST_LINE), 0)", tests=FILES),
    Mutant("a blank line is an error", "evaluation/tasks.py", "if not line.strip():", "if False:", tests=FILES),
    Mutant("a line that is no JSON has two numbers", "evaluation/tasks.py", "if isinstance(error, JSONDecodeError):", "if False:", tests=FILES),
    Mutant("all files of BLiMP are said to be missing", "evaluation/tasks.py", "for name in group if name not in there]", "for name in group if there != {*group}]", tests=FILES),
    Mutant("chance is that of the first question", "evaluation/tasks.py", "sum(chance for _, chance in rows) / len(rows)", "rows[0][1]", tests=FILES),
    Mutant("tasks of a group are shown with it", "report/tasks.py", "for score in record.scores if score.group is None}", "for score in record.scores}", tests=FILES),
    Mutant("the best is shown as the last", "report/tasks.py", 'score.weights == "final"', 'score.weights != ""', tests=FILES),
    Mutant("scores of other workers are lost", "report/record.py", "scores=tuple(score for log in logs for score in log.scores)", "scores=first.scores", tests=FILES),
]  # fmt: skip

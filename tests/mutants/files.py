"""Files of others: what is read in bounded memory, what is refused, what is kept for a worker that was killed."""

from mutants.seed import Mutant

TESTS = ["tests/unit/test_common_step.py", "tests/unit/test_hostile_files.py"]
# None of these reads without a limit: files of the tests are as long as a disk, or endless.
MUTANTS = [
    Mutant("the step that all have is dropped", "checkpoint.py",
           "if not common <= _step_of(folder) <= step]", "if folder.name != f'step-{step:09d}']"),
    Mutant("one checkpoint too few is kept", "checkpoint.py",
           "(number := _step_of(folder)) <= step - ahead", "(number := _step_of(folder)) <= step - ahead + 1"),
    Mutant("what an outer loop says of itself is not heard", "checkpoint.py",
           "        ahead = _ahead(state)\n", "        ahead = 0\n"),
    Mutant("a delay lets nobody be ahead", "outer/presets.py", "return self.period + max(self.delays)", "return self.period"),
    Mutant("the newest step of all is that of the first", "checkpoint.py", "shared = set.intersection(",
           "shared = set.union("),
    Mutant("a worker without steps is passed over", "checkpoint.py",
           "is int} for steps in saved.values())", "is int} for steps in saved.values() if steps)"),
    Mutant("a pipe is opened and waited for", "_util/disk.py",
           "if not stat.S_ISREG(kind) and not stat.S_ISDIR(kind):", "if False:"),
    Mutant("a file has no limit", "_util/disk.py", 'data = b"" if length > most else file.read(most + 1)',
           "length, data = 0, file.read(most)"),
    Mutant("a line has no limit", "_util/disk.py", "while line := file.readline(most + 1):",
           "while line := file.readline(most):"),
    Mutant("depth is not looked at", "_util/disk.py", "    if is_deeper(value, deepest):", "    if False:"),
    Mutant("one level too many", "_util/disk.py", "for _ in range(levels + 1):", "for _ in range(levels + 2):"),
    Mutant("a key said twice goes unnoticed", "_util/disk.py", "        if key in table:", "        if False:"),
    Mutant("NaN is JSON", "_util/disk.py", ", parse_constant=_refuse_constant", ""),
    Mutant("dots in keys nest without end", "settings/toml.py", "if is_deeper(table, DEEPEST):", "if False:"),
    Mutant("dots in overrides nest without end", "settings/toml.py", ' or key.count(".") > DEEPEST', ""),
    Mutant("Parquet is read by hundreds of rows", "train/data/corpus.py", "_ROWS_AT_ONCE = 8", "_ROWS_AT_ONCE = 256"),
    Mutant("a row of Parquet has no limit", "train/data/corpus.py", "if len(text) > MOST_ROW:", "if False:"),
    Mutant("memory is not asked for parameters", "train/step/recipe.py", "(needed := 4 * shape.parameters) > room",
           "(needed := 4 * shape.layers) > room"),
    Mutant("memory is not asked for a batch", "train/step/recipe.py",
           "(needed := 8 * config.train.batch * (sequence + 1)) > room", "(needed := 0) > room"),
    Mutant("a shape of any size is a shape", "settings/model_presets.py", "getattr(self, setting), most=LARGEST)",
           "getattr(self, setting))"),
    Mutant("tables of RoPE of any size", "settings/model_presets.py", "> LARGEST_TABLE:", "> 10**30:"),
    Mutant("numbers of any length in metrics", "runs/events.py", "if _LONG_NUMBER.search(line):", "if False:"),
]  # fmt: skip

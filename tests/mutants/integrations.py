"""Callbacks of other trainers: when they step, what they evaluate, save, resume from and refuse."""

from mutants.seed import Mutant

HF = "tests/unit/test_hf_trainer.py"
TESTS = [
    f"{HF}::test_a_run_has_the_bits_of_a_plain_loop",
    f"{HF}::test_a_resumed_run_has_the_bits_of_one_that_never_stopped",
    f"{HF}::test_a_run_that_has_ended_can_be_made_longer",
    f"{HF}::test_the_best_model_is_the_anchor_that_was_measured",
    f"{HF}::test_skipped_steps_count_as_in_a_plain_loop",
    f"{HF}::test_early_stopping_that_all_agree_on_ends_with_the_best_anchor",
    f"{HF}::test_settings_that_cannot_work_are_refused_on_all_workers",
    f"{HF}::test_a_refusal_of_one_worker_reaches_the_others",
    f"{HF}::test_counters_go_to_the_trainers_loggers",
]
PL = "tests/unit/test_lightning.py"
RANKS = "tests/unit/test_trainer_ranks.py"
LIGHTNING = "integrations/lightning.py"
FILE, DRIVER = "integrations/transformers.py", "integrations/driver.py"

MUTANTS = [
    Mutant("workers behind an emulated line cannot meet", "link/shaped.py", "return self._inner.gather(", "return super().gather(",
           tests=("tests/unit/test_trainer_driver.py::test_workers_behind_an_emulated_line_compare_their_settings",)),
    Mutant("skipped steps are not counted", FILE, "self._driver.step(state",
           'kwargs["optimizer"].step_was_skipped or self._driver.step(state', tests=(TESTS[4],)),
    Mutant("each worker evaluates its own parameters", FILE, "with self._driver.anchor():\n                metrics",
           "if True:\n                metrics", tests=(TESTS[0],)),
    Mutant("a checkpoint's model is the worker's own", FILE, "with self._driver.anchor():\n                save_model",
           "if True:\n                save_model", tests=(TESTS[3],)),
    Mutant("the last step is not finished before the best is loaded", DRIVER, "if made >= last:", "if False:",
           also=(FILE, "if not self._stop_agreed:", "if False:"), tests=(TESTS[0],)),
    Mutant("the best model that was loaded is finished", FILE, "if not (args.load_best_model_at_end and state.best_model_checkpoint):",
           "if True:", tests=(TESTS[5],)),
    Mutant("resumed from one's own newest step", FILE, 'said["saved"] for worker, said in told.items()}', 'saved for worker in (0,)}',
           tests=(TESTS[1],)),
    Mutant("later checkpoints stay", FILE, "if number > step:", "if False:", tests=(TESTS[1],)),
    Mutant("a checkpoint that the Trainer has not ended counts", FILE, '(folder / "trainer_state.json").is_file() and step', "step",
           tests=(TESTS[1],)),
    Mutant("the state of a run that ended is that after its end", DRIVER, "self.resumable() if keep else None", "None",
           tests=(TESTS[2],)),
    Mutant("resumed from the outer parameters", DRIVER, 'copy_(saved["live"][plain_name(name)])', "add_(0)",
           tests=(TESTS[1],)),
    Mutant("seeds that are not set are not compared", FILE, "args.seed if args.data_seed is None else args.data_seed",
           "args.data_seed", tests=(TESTS[6],)),
    Mutant("the best checkpoint does not count against the limit", FILE, " + (args.metric_for_best_model is not None)  #", "  #",
           tests=(TESTS[6],)),
    Mutant("the others are not told why", FILE, "self._driver.close(error)", "self._driver.close(KeyError())",
           tests=(TESTS[7],)),
    Mutant("counters come after the loggers", FILE, '"loss" in logs', '"eval_loss" in logs', tests=(TESTS[8],)),
    Mutant("every batch is a step", LIGHTNING, "if trainer.global_step == outer.steps:", "if False:",
           tests=(f"{PL}::test_a_run_has_the_bits_of_a_plain_loop",)),
    Mutant("each worker validates its own parameters", LIGHTNING, "self._lent.enter_context(self._driver.anchor())", "pass",
           tests=(f"{PL}::test_a_run_has_the_bits_of_a_plain_loop",)),
    Mutant("a Lightning checkpoint's model is the worker's own", LIGHTNING, "if self._driver.running:\n            with", "if False:\n            with",
           tests=(f"{PL}::test_a_checkpoint_saves_what_was_validated",)),
    Mutant("a resumed epoch begins at its beginning", LIGHTNING, "for _ in range(self.batches):", "for _ in range(0):",
           tests=(f"{PL}::test_a_resumed_run_has_the_bits_of_one_that_never_stopped",)),
    Mutant("a resumed epoch has another order", LIGHTNING, "set_rng_state(self.drawn_from)", "pass",
           tests=(f"{PL}::test_a_resumed_run_has_the_bits_of_one_that_never_stopped",)),
    Mutant("validation changes the random numbers of training", LIGHTNING, "self._place.end_validation()", "pass",
           tests=(f"{PL}::test_a_resumed_run_has_the_bits_of_one_that_never_stopped",)),
    Mutant("the order of the next epoch is drawn after a resumed validation", LIGHTNING, "if not self.batches:  # the order", "if False:  # the order",
           tests=(f"{PL}::test_a_run_is_resumed_at_the_end_of_an_epoch",)),
    Mutant("a failed validation keeps the anchor", LIGHTNING, "self._lent.close()\n        self._driver.close(exception)", "self._driver.close(exception)",
           tests=(f"{PL}::test_a_validation_that_raises_gives_the_parameters_back_and_tells_the_others_why",)),
    Mutant("nobody is asked before a worker stops", LIGHTNING, "self._stop_agreed = self._driver.agree_to_stop(trainer.global_step, stop)", "self._stop_agreed = True",
           tests=(f"{PL}::test_early_stopping_that_not_all_agree_on_is_refused",)),
    Mutant("a group over workers is not noticed", DRIVER, "if len(workers) > 1:", "if False:",
           tests=(f"{RANKS}::test_one_group_over_workers_is_refused",)),
    Mutant("what an evaluation has gathered stays", DRIVER, "module.reshard()  #", "pass  #",
           tests=("tests/unit/test_trainer_driver.py::test_a_worker_may_shard_its_model_inside",)),
]  # fmt: skip

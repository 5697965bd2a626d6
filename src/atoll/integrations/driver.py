"""Drives an outer loop for a trainer that owns the training loop; both integrations share it.

The trainer says when it starts, has made an optimizer step, evaluates, saves and ends. From that the driver keeps three
promises: what is evaluated, and saved for use, are the outer parameters (the anchor); what is saved to resume from are
the worker's own parameters and the outer state; and the last step ends with `finish()`, before anything is reloaded.
"""

import json
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, TypedDict

import torch
from torch import distributed, nn

from atoll.core.flat import local_part, plain_name, trainable
from atoll.errors import AtollError, ConfigError, LinkError
from atoll.link.base import Link
from atoll.link.ranks import RankGroup, ReplicatedLink, ShardedLink
from atoll.outer.loop import OuterLoop
from atoll.outer.presets import Gradients, Sync
from atoll.outer.roll_back import Guard
from atoll.outer.stats import Observer

AGREE_S = 7 * 24 * 3600.0
"""Seconds to wait for another worker to come to the same evaluation; a dead one is noticed at once."""


def check_alike(told: Mapping[int, Mapping[str, Any]], setting: str, advice: str) -> None:
    """Raise a ConfigError if what workers told of a setting differs between them."""
    values = {worker: said[setting] for worker, said in told.items()}
    if len(set(values.values())) > 1:
        raise ConfigError(f"{setting} differs between workers, {values}: {advice}", setting=setting, value=values)


class LoopOptions(TypedDict, total=False):
    """Options of `OuterLoop` that a callback passes on."""

    weight: float
    guard: Guard
    offload: bool
    observer: Observer | None


class Driver:
    """Runs one worker's outer loop on behalf of a trainer.

    Args:
        sync: An algorithm: `DiLoCo(...)`, `Streaming(...)`, `Eager(...)` or another preset.
        link: This worker's end of a link whose members are fixed.
        options: Options of `OuterLoop`.

    Raises:
        ConfigError: A trainer cannot drive this algorithm, or run over this link.
    """

    def __init__(self, sync: Sync, link: Link, options: LoopOptions) -> None:
        if isinstance(sync, Gradients):
            problem = "sync must be DiLoCo(...) or another preset that exchanges parameters, got DataParallel"
            advice = "trainers have no place between backward and clipping for it; use their own DDP"
            raise ConfigError(f"{problem}: {advice}", setting="sync", value=sync)
        if link.elastic:
            problem = "link must have fixed members, got an elastic one"
            advice = "a trainer cannot jump to the step that the others have come to; use atoll.connect(...)"
            raise ConfigError(f"{problem}: {advice}", setting="link", value=link)
        self.sync = sync
        self.link = link
        self.outer: OuterLoop | None = None
        self._options = options
        self._far = link
        self._rank_group: RankGroup | None = None
        self._lent = False
        self._ended = False
        self._before_end: dict[str, Any] | None = None

    @property
    def running(self) -> bool:
        """Whether the worker trains: it has started and not come to its end."""
        return self.outer is not None and not self._ended

    @property
    def lent(self) -> bool:
        """Whether the model holds the anchor."""
        return self._lent

    # ------------------------------------------------------------------ before the first step

    def meet_ranks(self) -> None:
        """Find the ranks of this worker, if it has several; ConfigError if torch's group spans workers."""
        if self.outer is not None:
            raise ConfigError("this callback has driven a run already: make a new one, with a new link", setting="link")
        if not distributed.is_available() or not distributed.is_initialized() or distributed.get_world_size() == 1:
            return
        group = RankGroup(distributed.new_group(backend="gloo"))
        workers = sorted({int(worker) for worker in group.all_gather_text(str(self._far.worker))})
        if len(workers) > 1:
            problem = f"one process group (torchrun) spans workers {', '.join(map(str, workers))}"
            why = "the trainer's DDP or FSDP would average their gradients at every step"
            advice = "start each worker by itself, or with a torchrun of its own"
            raise ConfigError(f"{problem}: {why}; {advice}", setting="link", value=workers)
        seat = getattr(self._far, "seat", None)
        ranks, world = (1 if seat is None else seat.ranks), distributed.get_world_size()
        if ranks not in (1, world):
            problem = (
                f"ranks of the link must be the {world} of this worker's process group, or 1 under DDP, got {ranks}"
            )
            raise ConfigError(problem, setting="ranks", value=ranks)
        self._rank_group = group
        if ranks == 1:  # one rank speaks for all, which hold the same bits
            far, speaker = self._far, group.rank == 0
            self.link = ReplicatedLink(group, far if speaker else None, far.worker, far.workers)
        else:
            self.link = ShardedLink(group, self._far)

    def gather(self, key: str, value: Any, within_s: float | None = None) -> dict[int, Any]:
        """Publish a JSON value under a key and return that of every worker, by worker; all ranks call it."""
        return {seat.worker: told for seat, told in self.link.gather(key, value, within_s).items()}

    def on_all_ranks(self, steps: Collection[int]) -> list[int]:
        """Return the steps that every rank of this worker has saved, ascending; all ranks call it."""
        if self._rank_group is None:
            return sorted(steps)
        lists = [json.loads(text) for text in self._rank_group.all_gather_text(json.dumps(list(steps)))]
        return sorted(set.intersection(*map(set, lists)))

    def start(self, model: nn.Module, saved: Mapping[str, Any] | None = None) -> None:
        """Make the outer loop and meet the other workers.

        Args:
            model: The model on its device, after FSDP has sharded it.
            saved: What `resumable` returned, to continue from it.
        """
        parameters = trainable(model)
        sharded = any(hasattr(parameter, "to_local") for parameter in parameters.values())
        if sharded and isinstance(self.link, ReplicatedLink):
            problem = "the model is sharded, and the link has one rank"
            advice = "give connect(..., rank=..., ranks=...) the rank and the number of ranks of this worker"
            raise ConfigError(f"{problem}: {advice}", setting="ranks", value=1)
        if saved is not None:
            with torch.no_grad():
                for name, parameter in parameters.items():
                    local_part(parameter).copy_(saved["live"][plain_name(name)])
        self.outer = OuterLoop(model, self.sync, self.link, **self._options)
        if saved is not None:
            self.outer.load_state_dict(saved["outer"])
        self.outer.join()

    # ------------------------------------------------------------------ training

    def step(self, made: int, last: int, *, keep: bool) -> None:
        """Count one optimizer step, and finish after the last.

        Args:
            made: Steps that the trainer has counted.
            last: The step after which training ends.
            keep: Whether a checkpoint may follow, from which a longer run resumes.
        """
        assert self.outer is not None
        if self.outer.steps + 1 != made:
            raise AtollError(f"the trainer is at step {made}, the outer loop at {self.outer.steps}: both count by one")
        self.outer.step()
        if made >= last:
            self.finish(keep=keep)

    @contextmanager
    def anchor(self) -> Iterator[None]:
        """Lend the anchor to the model while the worker trains; inside another such block, and later, do nothing."""
        if not self.running or self._lent:
            yield
            return
        assert self.outer is not None
        with self.outer.anchor():
            self._lent = True
            try:
                yield
            finally:
                self._lent = False
                for module in self.outer.model.modules():
                    if isinstance(module, distributed.fsdp.FSDPModule):
                        module.reshard()  # an evaluation leaves parameters whole, and they would hide those given back

    def resumable(self) -> dict[str, Any]:
        """Return a copy of the worker's own parameters and of the outer state, as before `finish()`."""
        if self._before_end is not None:
            return self._before_end
        assert self.outer is not None
        live = trainable(self.outer.model).items()
        return {
            "outer": self.outer.state_dict(),
            "live": {plain_name(name): local_part(parameter).to("cpu", copy=True) for name, parameter in live},
        }

    def counted(self) -> dict[str, float]:
        """Return the counters that a trainer's loggers show."""
        assert self.outer is not None
        counters = self.outer.counters
        return {
            "atoll_rounds": counters.rounds_applied,
            "atoll_anchor_step": self.outer.anchor_step,
            "atoll_sent_bytes": counters.wire_sent or counters.bytes_sent,
            "atoll_received_bytes": counters.wire_received or counters.bytes_received,
            "atoll_wait_s": counters.wait_s,
            "atoll_hidden_s": counters.hidden_s,
            "atoll_roll_backs": counters.roll_backs,
        }

    # ------------------------------------------------------------------ the end

    def finish(self, *, keep: bool = False) -> None:
        """Bring every worker to the same final model; `keep` what a longer run resumes from."""
        assert self.outer is not None
        self._before_end = self.resumable() if keep else None
        self.outer.finish()
        self._ended = True

    def agree_to_stop(self, step: int, stop: bool) -> bool:
        """Compare with all workers whether training ends at this step, before its last; ConfigError if they differ."""
        told = self.gather(f"stop_{step}", bool(stop), AGREE_S)
        if len(set(told.values())) > 1:
            stopping, going = ([w for w, says in told.items() if says is wish] for wish in (True, False))
            problem = f"early stopping at step {step}: workers {stopping} would stop, workers {going} would not"
            advice = "evaluate the same data with the same settings on all workers, or train without early stopping"
            raise ConfigError(f"{problem}; {advice}", setting="early stopping", value=told)
        return bool(stop)

    def refuse_early_end(self, step: int, last: int) -> None:
        """Raise a ConfigError: training has ended before its last step, and the other workers do not know of it."""
        problem = f"all workers must make the same number of steps: training ended at step {step} of {last}"
        advice = "let a loader that ends begin again, and let no callback of one worker alone stop training"
        raise ConfigError(f"{problem}; {advice}", setting="max_steps", value=last)

    def close(self, error: BaseException | None = None) -> None:
        """Leave the other workers, after an error with its reason."""
        if error is None:
            self.link.unfinished = self._far.unfinished = False
            self.link.close()
        else:
            self.link.close(f"{type(error).__name__}: {error}")
            if isinstance(error, LinkError):
                error.add_note("Start all workers again, and let them resume from a checkpoint that all have.")

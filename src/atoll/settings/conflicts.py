"""Finds settings that are right on their own and cannot be together, before anything is read, built or written."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple, cast

from atoll.settings.model_presets import PRESETS
from atoll.settings.run_settings import FaultSection, ModelSection, SyncSection
from atoll.settings.value_types import LEAST_BPE_VOCABULARY

if TYPE_CHECKING:
    from atoll.outer.presets import Sync
    from atoll.settings.config import RunConfig

_ALONE, _AT_ONCE = "nothing is exchanged", "gradients are exchanged whole, on every step, and used at once"
_LATE = "a round is applied one period after it was sent, by definition"
_USELESS = {
    "none": dict.fromkeys(("fragments", "delay", "alpha", "codec", "stochastic", "feedback", "offload"), _ALONE),
    "data-parallel": dict.fromkeys(("fragments", "delay", "alpha", "feedback", "offload"), _AT_ONCE),
    "eager": {"delay": _LATE, "alpha": "its merge adds a worker's own delta, and blends nothing"},
    "delayed": {"delay": _LATE},
}
"""Settings that a method has no use for, and why."""


class Conflict(NamedTuple):
    """Names settings that cannot be together."""

    keys: tuple[str, ...]
    """All settings that it depends on, the one to name first; if one is wrong by itself, there is no conflict."""
    why: str


def conflicts(run: "RunConfig") -> Iterator[Conflict]:
    """Yields every conflict between the settings of a run."""
    yield from _model_conflicts(run)
    yield from _data_conflicts(run)
    yield from _train_conflicts(run)
    yield from _sync_conflicts(run.sync)
    yield from _fault_conflicts(run)
    yield from _link_conflicts(run)
    yield from _elastic_conflicts(run)


def _model_conflicts(run: "RunConfig") -> Iterator[Conflict]:
    model, data, train = run.model, run.data, run.train
    if model.hf is not None:
        shape = [name for name in ModelSection.model_fields if name not in ("hf", "hf_weights")]
        if given := [f"model.{name}" for name in shape if getattr(model, name) is not None]:
            why = f"it brings its own shape, so leave out {', '.join(given)}; or leave out model.hf"
            yield Conflict(("model.hf", *given), why)
        return
    if not model.hf_weights:
        yield Conflict(("model.hf_weights", "model.hf"), "false only means something with model.hf, which is left out")
    assert model.preset is not None
    context = model.context or PRESETS[model.preset].context
    if train.sequence is not None and train.sequence > context:
        why = f"must be at most the model's context ({context}), got {train.sequence}: raise model.context or lower it"
        yield Conflict(("train.sequence", "model.context", "model.preset", "model.hf"), why)
    # A short text has fewer tokens than are asked for, so before it is read only the least is known.
    least = {"bytes": 256, "bpe": LEAST_BPE_VOCABULARY}.get(data.tokenizer, 1)
    if model.vocabulary is not None and model.vocabulary < least:
        why = f"must be at least the tokenizer's ({least}), got {model.vocabulary}: leave it out to use that"
        yield Conflict(("model.vocabulary", "data.tokenizer", "data.vocabulary", "model.hf"), why)


def _data_conflicts(run: "RunConfig") -> Iterator[Conflict]:
    data = run.data
    if data.vocabulary is not None and data.tokenizer != "bpe":
        why = f'is for data.tokenizer = "bpe", got "{data.tokenizer}", which brings its own vocabulary; leave it out'
        yield Conflict(("data.vocabulary", "data.tokenizer"), why)
    if data.split == "clusters" and run.sync.workers == 1:
        why = '"clusters" needs sync.workers of at least 2, got 1: each worker gets one group of documents'
        yield Conflict(("data.split", "sync.workers"), why)


def _train_conflicts(run: "RunConfig") -> Iterator[Conflict]:
    train = run.train
    if train.batch % train.accumulate:
        why = f"must divide train.batch ({train.batch}), got {train.accumulate}: the parts of a batch are equally large"
        yield Conflict(("train.accumulate", "train.batch"), why)
    if train.steps is not None and train.warmup is not None and train.warmup >= train.steps:
        why = f"must be below train.steps ({train.steps}), got {train.warmup}: lr would never be reached"
        yield Conflict(("train.warmup", "train.steps"), why)


def _sync_conflicts(sync: SyncSection) -> Iterator[Conflict]:
    method = sync.method
    if method == "none" and sync.workers != 1:
        why = f'"none" needs sync.workers = 1, got {sync.workers}: without exchange they would be {sync.workers} models'
        yield Conflict(("sync.method", "sync.workers"), why)
    for name, reason in _USELESS.get(method, {}).items():
        value = getattr(sync, name)
        if value is not None and value is not False:  # 0 is a value
            why = f'cannot be set with sync.method = "{method}": {reason}; leave it out'
            yield Conflict((f"sync.{name}", "sync.method"), why)
    yield from _delay_conflicts(sync)
    yield from _codec_conflicts(sync)
    yield from _outer_conflicts(sync)


def _delay_conflicts(sync: SyncSection) -> Iterator[Conflict]:
    if sync.method not in ("diloco", "streaming") or sync.delay is None:
        return
    delays = sync.delay if isinstance(sync.delay, tuple) else (sync.delay,)
    if max(delays) > sync.used_period:
        why = (
            f"must be from 0 to sync.period ({sync.used_period}), got {max(delays)}: "
            "a round must be applied no later than the next one of its fragment is sent"
        )
        yield Conflict(("sync.delay", "sync.period", "sync.method"), why)
    if isinstance(sync.delay, tuple) and len(delays) != sync.workers:
        why = f"has {len(delays)} entries and sync.workers is {sync.workers}: give one number for all, or one for each"
        yield Conflict(("sync.delay", "sync.workers", "sync.method"), why)


def _codec_conflicts(sync: SyncSection) -> Iterator[Conflict]:
    if sync.method == "none" or not (sync.stochastic or sync.feedback or sync.codec == "top64"):
        return
    codec, keys = sync.codec or cast("Sync", sync.preset()).codec.format, ("sync.codec", "sync.method")
    if codec == "top64" and sync.method == "data-parallel":
        yield Conflict(keys, "top64 is for deltas, which can wait for a later round: take another method or int8")
    elif codec == "top64" and not sync.feedback:
        why = "top64 sends one value in 64 and keeps the others for later rounds"
        why += ': set sync.feedback = 0.95, sync.outer = "sgd" and sync.outer_lr = 1.0 too'
        yield Conflict(keys, why)
    if sync.stochastic and codec in ("fp64", "fp32", "bf16", "fp16", "lloyd2", "top64"):
        why = f"rounding is for 4 and 8 bits, and the codec is {codec}: turn it off or change sync.codec"
        yield Conflict(("sync.stochastic", *keys), why)
    if sync.feedback and codec in ("fp64", "fp32") and sync.method != "data-parallel":
        why = f"is for codecs that lose something, and {codec} does not: turn it off or change sync.codec"
        yield Conflict(("sync.feedback", *keys), why)


def _outer_conflicts(sync: SyncSection) -> Iterator[Conflict]:
    if sync.outer == "adam" and sync.method == "eager":
        why = (
            'cannot be "adam" with sync.method = "eager": a worker\'s own part of a step can only be told apart '
            "when steps add up; use nesterov, momentum or sgd"
        )
        yield Conflict(("sync.outer", "sync.method"), why)
    owners = {"outer_momentum": ("nesterov", "momentum"), "outer_betas": ("adam",), "outer_eps": ("adam",)}
    for name, outers in owners.items():
        if getattr(sync, name) is not None and sync.outer not in outers:
            why = f'is a setting of {" and ".join(outers)}, and sync.outer = "{sync.outer}": leave it out'
            yield Conflict((f"sync.{name}", "sync.outer"), why)


def given_faults(faults: FaultSection) -> list[str]:
    """Returns the names of the faults that a run file asks for."""
    asked = {"drop": faults.drop > 0, "compute": faults.compute != "constant"}
    return [name for name, given in (asked | {"absences": faults.absences, "speeds": faults.speeds}).items() if given]


def _fault_conflicts(run: "RunConfig") -> Iterator[Conflict]:
    faults, sync = run.faults, run.sync
    away = [name for name in given_faults(faults) if name != "drop"]
    refused = {
        "none": (given_faults(faults), "without exchange no other worker could notice a fault"),
        "data-parallel": (away, "DataParallel has no anchor to come back to, and every step needs every worker"),
    }
    names, reason = refused.get(sync.method, ([], ""))
    for name in names:
        yield Conflict((f"faults.{name}", "sync.method"), f'cannot be set with sync.method = "{sync.method}": {reason}')
    if faults.compute != "constant" and sync.workers == 1:
        why = f'"{faults.compute}" needs sync.workers of at least 2, got 1: it changes how many take part'
        yield Conflict(("faults.compute", "sync.workers"), why)
    highest, unknown = sync.workers - 1, f"workers are 0 to {sync.workers - 1} (sync.workers = {sync.workers})"
    for number, absence in enumerate(faults.absences):
        key = f"faults.absences[{number}]"
        if absence.worker > highest:
            keys = (f"{key}.worker", "faults.absences", "sync.workers")
            yield Conflict(keys, f"names worker {absence.worker}; {unknown}")
        if absence.last is not None and absence.last < absence.first:
            why = f"must be at least first ({absence.first}), got {absence.last}: both belong to the absence"
            yield Conflict((f"{key}.last", "faults.absences"), why)
    if beyond := [worker for worker in faults.speeds if worker > highest]:
        yield Conflict(("faults.speeds", "sync.workers"), f"names worker {beyond[0]}; {unknown}")
    for step in {absence.first for absence in faults.absences}:
        gone = {a.worker for a in faults.absences if a.first <= step and (a.last is None or step <= a.last)}
        if len(gone) >= sync.workers:
            why = f"at inner step {step} all workers are away, and none would train"
            yield Conflict(("faults.absences", "sync.workers"), why)
            break


def _link_conflicts(run: "RunConfig") -> Iterator[Conflict]:
    link = run.link
    for name in ("address", "emulate"):
        if getattr(link, name) is not None and run.sync.method == "none":
            why = 'cannot be set with sync.method = "none": nothing is exchanged'
            yield Conflict((f"link.{name}", "sync.method"), why)
    if link.address is not None:
        for name in given_faults(run.faults):
            why = "is for workers of one process: between machines, members are fixed; leave out link.address"
            yield Conflict((f"faults.{name}", "link.address"), why)
    if link.security == "none" and link.keys is not None:
        why = f'has no use for link.keys ("{link.keys}"): leave one of them out'
        yield Conflict(("link.security", "link.keys"), why)
    if link.emulate is None:
        for name in ("jitter_s", "loss", "outages"):
            if getattr(link, name):
                why = "is a detail of link.emulate, which is left out: give it a rate, such as 1Gbit/s"
                yield Conflict((f"link.{name}", "link.emulate"), why)


def _elastic_conflicts(run: "RunConfig") -> Iterator[Conflict]:
    link, sync = run.link, run.sync
    if not link.elastic:
        for name in ("registry", "min_workers", "grace", "connections", "listen"):
            if getattr(link, name) != type(link).model_fields[name].default:
                why = "is for workers that come and go: set link.elastic = true, or leave it out"
                yield Conflict((f"link.{name}", "link.elastic"), why)
        return
    if sync.method in ("none", "data-parallel"):
        why = f'cannot be set with sync.method = "{sync.method}": it has no anchor that a worker could join with'
        yield Conflict(("link.elastic", "sync.method"), why)
    if link.address is not None:
        why = "is for workers that stay: leave it out, elastic workers meet at link.registry"
        yield Conflict(("link.address", "link.elastic"), why)
    if link.registry is None:
        why = "is left out, and link.elastic needs it: start `atoll registry`, and give its HOST:PORT (--registry)"
        yield Conflict(("link.registry", "link.elastic"), why)
    if link.security == "keys" and link.keys is None:
        why = (
            f"is left out: make keys with `atoll keys new {run.out}/{run.name} --workers {sync.workers}`, and give the "
            'folder of this worker\'s (--keys); on a private cable, link.security = "none"'
        )
        yield Conflict(("link.keys", "link.elastic", "link.security"), why)
    if link.min_workers > sync.workers:
        why = f"must be from 1 to sync.workers ({sync.workers}), got {link.min_workers}: they would never train"
        yield Conflict(("link.min_workers", "sync.workers"), why)
    if link.emulate is not None:
        why = "cannot be set with link.elastic yet: an emulated line carries rounds of workers that stay"
        yield Conflict(("link.emulate", "link.elastic"), why)
    for name in given_faults(run.faults):
        why = "is for workers of one process: with link.elastic, end and start worker processes instead"
        yield Conflict((f"faults.{name}", "link.elastic"), why)

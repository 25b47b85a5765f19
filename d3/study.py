"""From composed configurations to a registration: the grid's cells, resolved and without this machine's paths."""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig, OmegaConf

from d3.config import Config, EngineConfig, ModelConfig, label
from d3.errors import D3Error
from d3.record import Message
from d3.registration import (
    STUDY_FACTORS,
    CellSpec,
    Phase,
    PriorArt,
    Prompt,
    Protocol,
    ReadingSpec,
    Registration,
    block_order,
    cell_name,
    stratum_name,
)
from d3.validate import validate

WHOLE_STUDY = ("prompts", "protocol", "readings", "study")
NOT_SWEPT = (
    *WHOLE_STUDY,
    "boots",
    "seed",
    "registration",
    "tie_gap",
    "confidence",
    "test",
    "min_valid_boots",
    "max_attempts",
    "workers",
    "price",
    "dry_run",
)
NOT_REGISTERED = {*NOT_SWEPT, "boot", "allow_large", "plan_only", "hydra"}


# Keys of engines and models that came after the first certificates: left out where unchanged, so that ids stay.
ADDED = ("executable", "build_env", "body", "reads", "block_size", "convert", "url")


class Pins:
    """What is known of an engine and a model only by looking: the lock's digest and the weights' digest."""

    def __init__(self, locks: Mapping[str, str], models: Mapping[str, str]) -> None:
        self.locks = locks
        self.models = models


def axes_of(cfg: DictConfig, keys: Sequence[str]) -> dict[str, str]:
    """The level of every swept key in one composed configuration; a group's level is its name."""
    for key in keys:
        if key.split(".")[0] in NOT_SWEPT:
            raise D3Error(f"{key} holds for a whole study and cannot be swept in one", f"run one study per {key}")
    return {key: _level(cfg, key) for key in sorted({*keys, *STUDY_FACTORS})}


def _level(cfg: DictConfig, key: str) -> str:
    value = OmegaConf.select(cfg, key)
    return str(value.name) if isinstance(value, DictConfig) else label(key, value)


def register(configs: Sequence[DictConfig], keys: Sequence[str], pins: Pins) -> Registration:
    """The registration of a grid.

    `configs`: one composed configuration per cell, in the sweep's order; `keys`: the swept keys. Raises D3Error for a
    configuration that cannot be run, and for two cells of the same name.
    """
    configs = [OmegaConf.masked_copy(cfg, [str(k) for k in cfg if k != "hydra"]) for cfg in configs]
    for cfg in configs:
        validate(_typed(cfg))
    first = _typed(configs[0])
    cells = [_cell(cfg, axes_of(cfg, keys), pins) for cfg in configs]
    names = [(c.stratum, c.cell) for c in cells]
    if twice := sorted({f"{s} {c}" for s, c in names if names.count((s, c)) > 1}):
        raise D3Error(f"the sweep names a cell twice: {twice[0]}", "name every level once")
    axes = {k: tuple(dict.fromkeys(c.factors[k] for c in cells)) for k in cells[0].factors}
    return Registration(
        study=first.study.name,
        question=first.study.question,
        axes=axes,
        boots=first.boots,
        min_valid_boots=first.boots if first.min_valid_boots is None else first.min_valid_boots,
        max_attempts=first.max_attempts,
        seed=first.seed,
        protocol=Protocol(
            name=first.protocol.name,
            salted=first.protocol.salted,
            phases=tuple(Phase.model_validate(vars(p)) for p in first.protocol.phases),
        ),
        prompts=tuple(_prompt(p) for p in first.prompts.items),
        tie_gap=first.tie_gap,
        confidence=first.confidence,
        test=first.test,
        readings=tuple(ReadingSpec.model_validate(vars(r)) for r in first.readings.items),
        prior_art_searched=first.study.prior_art_searched,
        prior_art=tuple(PriorArt.model_validate(vars(s)) for s in first.study.prior_art),
        cells=tuple(cells),
        order=block_order(names, first.boots, first.seed),
    )


def _typed(cfg: DictConfig) -> Config:
    plain = OmegaConf.create(OmegaConf.to_container(cfg, resolve=True))  # plain: so that no +key slips past the schema
    typed: Any = OmegaConf.to_object(OmegaConf.merge(OmegaConf.structured(Config), plain))
    if not isinstance(typed, Config):
        raise TypeError(type(typed).__name__)
    return typed


def _prompt(prompt: Any) -> Prompt:
    messages = [Message(role=m.role, content=m.content) for m in prompt.messages]
    return Prompt(id=prompt.id, messages=tuple(messages or [Message(role="user", content=prompt.text)]))


def _cell(cfg: DictConfig, factors: dict[str, str], pins: Pins) -> CellSpec:
    plain: Any = OmegaConf.to_container(cfg, resolve=True)
    settings = {k: v for k, v in plain.items() if k not in NOT_REGISTERED}
    engine, model = dict(settings["engine"]), dict(settings["model"])
    for local in ("python", "min_memory_gb", "key_env"):
        engine.pop(local)
    model.pop("path")
    engine["lock_sha256"] = pins.locks[engine["name"]]
    model["digest"] = pins.models[model["name"]]
    engine, model = _said(engine, EngineConfig), _said(model, ModelConfig)
    settings |= {"engine": engine, "model": model, "apc": factors["apc"]}
    if settings["at_once"] is None:  # not fixed by the study, so no part of its id
        del settings["at_once"]
    if settings["start"] == "auto":
        del settings["start"]
    if settings["compile_cache"] == "off":
        del settings["compile_cache"]
    return CellSpec(cell=cell_name(factors), stratum=stratum_name(factors), factors=factors, settings=settings)


def _said(settings: dict[str, Any], schema: type[EngineConfig | ModelConfig]) -> dict[str, Any]:
    """The settings without those that came later and were left at their default."""
    unsaid: Any = OmegaConf.to_container(OmegaConf.structured(schema))
    return {k: v for k, v in settings.items() if k not in ADDED or v != unsaid[k]}

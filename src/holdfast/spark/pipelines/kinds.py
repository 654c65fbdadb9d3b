"""The kinds of pipelines: each a module of its own with a `KIND`, imported when it is first asked for."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

from holdfast.errors import BadSettings
from holdfast.spark.pipelines.spec import Options, meant

if TYPE_CHECKING:
    from holdfast.spark.pipelines.context import Context
    from holdfast.spark.pipelines.results import Plan, Summary

_MODULES: Final = {
    "land": "holdfast.spark.pipelines.land",
    "refine": "holdfast.spark.pipelines.refine",
    "aggregate": "holdfast.spark.pipelines.aggregate",
    "replay": "holdfast.spark.pipelines.replay",
    "deadletters": "holdfast.spark.pipelines.deadletters",
    "traces": "holdfast.spark.pipelines.traces",
    "reconcile": "holdfast.spark.pipelines.reconcile",
    "compact": "holdfast.spark.pipelines.compact",
    "python": "holdfast.spark.pipelines.custom",
}


@dataclass(frozen=True)
class Kind:
    """One sort of pipeline.

    `plan` writes nothing. `identity` are the options that a checkpoint is made for: with others it does not fit.
    `template` is what `holdfast pipeline new` writes, indented as an entry of `pipelines:`.
    `follows` is false for what has an end by itself, such as a report.
    """

    name: str
    says: str
    options: type[Options]
    plan: Callable[[Context], Plan]
    run: Callable[[Context], Summary]
    template: str
    identity: Callable[[Any], dict[str, Any]] = field(default=lambda options: {})
    follows: bool = True


def kind_names() -> list[str]:
    return list(_MODULES)


def kind_named(name: object) -> Kind:
    """The kind by this name."""
    if not isinstance(name, str) or name not in _MODULES:
        raise BadSettings(f"there is no kind {name!r} of pipelines{meant(str(name), _MODULES)}")
    kind = import_module(_MODULES[name]).KIND
    assert isinstance(kind, Kind)
    return kind

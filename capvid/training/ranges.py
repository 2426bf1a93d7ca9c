"""What a random search draws from: the section ``search`` of a recipe."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

from capvid.captioners import captioner_class
from capvid.errors import RecipeError, UsageError

SMALLEST = {"vocabulary_size": 4, "feature_width": 1}  # sizes that the data decide
SECTIONS = ("model", "data", "training", "decoding")


@dataclass(frozen=True, kw_only=True)
class Range:
    """Numbers to draw from, whole ones where both ends are.

    Attributes:
        low: the least.
        high: the greatest.
        log: whether their logarithm is uniform, and not they themselves.
        step: from each to the next, beginning with ``low``; None where every number in between is one.
    """

    low: float
    high: float
    log: bool = False
    step: float | None = None


Space = Mapping[str, Range | tuple[Any, ...]]  # by "section.option": a range, or choices


def checked_space(table: Mapping[str, Any], check: Callable[[str, str, Any], Any]) -> Space:
    """The section ``search`` of a recipe, if it fits.

    Args:
        table: by section and option, a list of choices or a table with ``low`` and ``high``.
        check: of a section, an option and a value, gives the value as the option takes it.

    Raises:
        RecipeError: an option that is not known, a value that it does not take, or a range that is none.
    """
    space: dict[str, Range | tuple[Any, ...]] = {}
    for section, option, value in _flat(table):
        name = f"{section}.{option}"

        def taken(item: Any, section: str = section, option: str = option) -> Any:
            return check(section, option, item)

        if isinstance(value, Mapping):
            space[name] = _range(f"search.{name}", value, taken)
        elif isinstance(value, list) and value:
            space[name] = tuple(map(taken, value))
        else:
            raise RecipeError(
                f"search.{name} = {value!r}: not what can be drawn from",
                remedy="write choices [A, B, ...] or a range { low = A, high = B }",
            )
    return space


def _flat(table: Mapping[str, Any]) -> Iterator[tuple[str, str, Any]]:
    """Section, option and value of what stands as ``section.option``, or in a table of the section."""
    for key, value in table.items():
        section, dot, option = key.partition(".")
        if section not in SECTIONS or not (dot or isinstance(value, Mapping)):
            raise RecipeError(
                f"search.{key}: not understood", remedy=f"write search.{'|'.join(SECTIONS)}.OPTION"
            )
        options = {option: value} if dot else value
        for name, item in options.items():
            yield section, name, item


def _range(name: str, table: Mapping[str, Any], check: Callable[[Any], Any]) -> Range:
    """The range of an option, ``name`` in messages; ``check`` gives a number as the option takes it."""
    known = [field.name for field in fields(Range)]
    if unknown := [key for key in table if key not in known]:
        raise RecipeError(f"{name}.{unknown[0]}: no part of a range", remedy=f"known are {', '.join(known)}")
    if not {"low", "high"} <= set(table):
        raise RecipeError(f"{name}: a range has two ends", remedy="write { low = A, high = B }")
    low, high = check(table["low"]), check(table["high"])
    log, step = table.get("log", False), table.get("step")
    if type(low) not in (int, float):
        raise RecipeError(f"{name}: only numbers have a range", remedy="write choices [A, B, ...]")
    if not low < high < math.inf:
        raise RecipeError(f"{name}: low = {low} must be below high = {high}, and both finite")
    if type(log) is not bool:
        raise RecipeError(f"{name}.log = {log!r}: expected true or false")
    if log and (low == 0 or step is not None):
        raise RecipeError(f"{name}: with log = true, low must be above 0, and there is no step")
    if step is not None:
        _check_step(f"{name}.step = {step!r}", step, low, high)
    return Range(low=low, high=high, log=log, step=step)


def _check_step(said: str, step: Any, low: float, high: float) -> None:
    if type(step) not in (int, type(low)):
        raise RecipeError(f"{said}: expected {'a whole number' if type(low) is int else 'a number'}")
    steps = (high - low) / step if step else 0.0
    if not steps >= 1 or abs(steps - round(steps)) > 1e-6:
        raise RecipeError(f"{said}: must be positive and lead from low = {low} to high = {high}")


def check_model(captioner: str, model: Mapping[str, Any], option: str, value: Any) -> Any:
    """A value as the captioner takes it beside the other options of ``model``.

    Raises:
        RecipeError: it has no such option, or does not take the value.
        UsageError: the other options do not fit.
    """
    kind: Any = captioner_class(captioner).config_class
    others = {**SMALLEST, **model}
    kind.from_dict(others)
    try:
        kind.from_dict({**others, option: value})
    except UsageError as error:
        raise RecipeError(f"search.model.{error.message}", remedy=error.remedy) from error
    wanted = {field.name: str(field.type) for field in fields(kind)}[option]
    return float(value) if wanted == "float" else value


def space_to_dict(space: Space) -> dict[str, Any]:
    """The space as plain values, by ``section.option``."""
    return {
        name: asdict(values) if isinstance(values, Range) else list(values) for name, values in space.items()
    }


def draw(space: Space, *, seed: int, number: int) -> dict[str, Any]:
    """The values of trial ``number``, by ``section.option``; they depend on ``seed`` and the number alone.

    Bergstra and Bengio, Random Search for Hyper-Parameter Optimization, JMLR 13, 2012: each value by itself.
    Numbers between which there is no step keep four significant digits.
    """
    import numpy as np
    import optuna

    spoken = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        sampler = optuna.samplers.RandomSampler(
            seed=int(np.random.SeedSequence([seed, number]).generate_state(1)[0])
        )
        wanted = {name: _distribution(space[name]) for name in sorted(space)}
        found = optuna.create_study(sampler=sampler).ask(wanted).params
    finally:
        optuna.logging.set_verbosity(spoken)
    return {name: _rounded(found[name], values) for name, values in space.items()}


def _distribution(values: Range | tuple[Any, ...]) -> Any:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if not isinstance(values, Range):
        return CategoricalDistribution(values)
    if isinstance(values.low, int):
        return IntDistribution(values.low, int(values.high), log=values.log, step=int(values.step or 1))
    return FloatDistribution(values.low, values.high, log=values.log, step=values.step)


def _rounded(value: Any, values: Range | tuple[Any, ...]) -> Any:
    if not isinstance(values, Range) or isinstance(value, int):
        return value
    digits = 4 if values.step is None else 12  # 12: 0.30000000000000004 is 0.3
    return min(max(float(f"{value:.{digits}g}"), values.low), values.high)

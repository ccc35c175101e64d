"""Reward functions with TRL's signature: found, called, and their results checked.

A reward is ``f(prompts, completions, **columns) -> list``, one number or None per sample; None says "does not apply".
``async def`` is awaited. A prompt of chat messages has completions ``[{"role": "assistant", "content": text}]``.
Functions without ``**kwargs`` get only the arguments that they name.
"""

from __future__ import annotations

import asyncio
import copy
import hashlib
import importlib
import importlib.util
import inspect
import math
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib.machinery import PathFinder
from itertools import islice
from numbers import Real
from pathlib import Path
from types import ModuleType
from typing import Any

from longtail.core.errors import ConfigError, RewardError
from longtail.rl.tasks.arguments import nearest
from longtail.rl.tasks.base import Completions, Prompts
from longtail.rl.tasks.scoring import completion_text, last_number


@dataclass(frozen=True)
class Reward:
    """A callable and the name under which the user knows it, ``module:function``."""

    name: str
    function: Callable[..., Any]

    def __call__(self, /, **arguments: Any) -> Any:
        return self.function(**arguments)


# Built-in rewards, for ``reward: longtail.rl.rewards:NAME`` -----------------------------------------------------------


def final_number(prompts: Prompts, completions: Completions, answer: list[Any], **columns: Any) -> list[float | None]:
    """1 where the completion's last number is the reference's, else 0 (GSM8K).

    The reference is the last number of the ``answer`` column, after ``####`` where that stands in it; a row whose
    reference has no number is not judged (None).
    """
    rewards: list[float | None] = []
    for completion, reference in zip(completions, answer, strict=True):
        right = last_number(str(reference).rpartition("####")[2])
        said = last_number(completion_text(completion))
        rewards.append(None if right is None else float(said == right))
    return rewards


def exact_answer(prompts: Prompts, completions: Completions, answer: list[Any], **columns: Any) -> list[float]:
    """1 where the completion is the ``answer`` column, apart from white space around it, else 0."""
    said = [completion_text(completion).strip() for completion in completions]
    return [float(text == str(right).strip()) for text, right in zip(said, answer, strict=True)]


# Finding a function -------------------------------------------------------------------------------------------------


def load_reward(spec: str, *, base: Path) -> Reward:
    """The function ``module:function``; the module is a file or package in ``base``, else an installed one.

    Runs the module's own code. Raises :class:`ConfigError`.
    """
    module_name, colon, name = spec.partition(":")
    parts = module_name.split(".")
    if not colon or not name.isidentifier() or not all(part.isidentifier() for part in parts):
        raise ConfigError(f"reward {spec!r} must have the form module:function, for example my_rewards:chain")
    module = _import(spec, module_name, base.absolute())
    function = getattr(module, name, None)
    if function is None:
        defined = [key for key, value in vars(module).items() if callable(value) and not key.startswith("_")]
        raise ConfigError(f"reward {spec}: {_place(module)} has no function {name!r}{nearest(name, defined)}")
    if not callable(function):
        raise ConfigError(f"reward {spec}: {name} in {_place(module)} is {type(function).__name__}, not a function")
    return Reward(spec, function)


def check_columns(reward: Reward, columns: Sequence[str]) -> None:
    """Raise :class:`ConfigError` if ``reward`` needs an argument that the task does not have."""
    offered = ["prompts", "completions", *columns]
    for parameter in _parameters(reward.function):
        if parameter.default is parameter.empty and parameter.kind in (
            parameter.POSITIONAL_OR_KEYWORD,
            parameter.KEYWORD_ONLY,
        ):
            if parameter.name not in offered:
                raise ConfigError(
                    f"reward {reward.name} needs a column {parameter.name!r}, but the task has "
                    f"{', '.join(columns) or 'no columns'}"
                )
        elif parameter.kind is parameter.POSITIONAL_ONLY:
            raise ConfigError(f"reward {reward.name}: {parameter.name!r} is positional-only; rewards get keywords")


def _import(spec: str, module_name: str, base: Path) -> ModuleType:
    root, _, rest = module_name.partition(".")
    beside = PathFinder.find_spec(root, [str(base)])
    if beside is not None and beside.loader is None:
        beside = None  # a plain folder without __init__.py must not hide an installed package
    try:
        if beside is None:
            return importlib.import_module(module_name)
        package = _load_file(root, Path(str(beside.origin)))
        return importlib.import_module(f"{package.__name__}.{rest}") if rest else package
    except ModuleNotFoundError as error:
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            near = [path.stem for path in base.glob("*.py")]
            raise ConfigError(
                f"reward {spec}: there is no module {error.name!r}, neither in {base} nor installed"
                f"{nearest(module_name, near) if near else ''}"
            ) from error
        raise ConfigError(f"reward {spec}: importing {module_name} failed: {describe(error)}") from error
    except (Exception, SystemExit) as error:
        raise ConfigError(f"reward {spec}: importing {module_name} failed: {describe(error)}") from error


def _load_file(name: str, file: Path) -> ModuleType:
    """Import ``file`` as the top-level module ``name``, or under another name where that one is taken.

    Its folder goes to the *end* of ``sys.path``: the module finds its neighbours, and hides no installed module.
    """
    folder = str(file.parent.parent if file.name == "__init__.py" else file.parent)
    if folder not in sys.path:
        sys.path.append(folder)
    loaded = sys.modules.get(name)
    if loaded is not None and getattr(loaded, "__file__", None) != str(file):
        name = f"{name}_{hashlib.blake2b(str(file).encode(), digest_size=6).hexdigest()}"
        loaded = sys.modules.get(name)
    if loaded is not None:
        return loaded
    spec = importlib.util.spec_from_file_location(name, file)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


def _place(module: ModuleType) -> str:
    file = getattr(module, "__file__", None)
    return Path(file).name if file else module.__name__


# Calling ------------------------------------------------------------------------------------------------------------


def call_rewards(
    functions: Sequence[Reward],
    *,
    prompts: Sequence[Any],
    completions: Sequence[str],
    columns: dict[str, list[Any]],
    where: str,
    step: int,
) -> list[float | None]:
    """The sum of all ``functions`` for each sample, None where all of them say None.

    Each function gets its own copies of the inputs. It may return a list, a tuple, an array or tensor of one
    dimension, or be a generator; numbers and bools (as 0 and 1) are rewards. Anything else, NaN, infinity, a wrong
    count or an exception is a :class:`RewardError`, whose sentence begins with ``where`` (the pipeline) and names
    the step.
    """
    spoken = [
        [{"role": "assistant", "content": text}] if isinstance(prompt, list) else text
        for prompt, text in zip(prompts, completions, strict=True)
    ]
    arguments = {"prompts": list(prompts), "completions": spoken, **columns}
    returned = [_call(reward, arguments, where, step) for reward in functions]
    if any(map(inspect.isawaitable, returned)):
        returned = asyncio.run(_finish(functions, returned, where, step))
    values = [
        _checked(reward, result, len(spoken), where, step) for reward, result in zip(functions, returned, strict=True)
    ]
    return [_total(sample) for sample in zip(*values, strict=True)]


def _call(reward: Reward, arguments: dict[str, Any], where: str, step: int) -> Any:
    """What ``reward`` returned, as a list where it is a generator, and not yet awaited where it is a coroutine."""
    with _blame(reward, where, step):
        result = reward(**copy.deepcopy(_accepted(reward.function, arguments)))
        if isinstance(result, Iterator):  # an endless generator gives a wrong count, not a full memory
            return list(islice(result, len(arguments["completions"]) + 1000))
        return result


async def _finish(functions: Sequence[Reward], results: list[Any], where: str, step: int) -> list[Any]:
    """``results`` with the coroutines among them awaited, concurrently."""

    async def finish(reward: Reward, result: Any) -> Any:
        with _blame(reward, where, step):
            return await result if inspect.isawaitable(result) else result

    return await asyncio.gather(*map(finish, functions, results))


@contextmanager
def _blame(reward: Reward, where: str, step: int) -> Iterator[None]:
    """Turns any exception of user code, also ``sys.exit``, into a :class:`RewardError`; the traceback is printed."""
    try:
        yield
    except (Exception, SystemExit) as error:
        sentence = f"{where}: reward {reward.name} raised {describe(error)} (step {step})"
        print(sentence, file=sys.stderr)
        traceback.print_exception(error)
        raise RewardError(sentence) from error


def _accepted(function: Callable[..., Any], arguments: dict[str, Any]) -> dict[str, Any]:
    parameters = _parameters(function)
    if not parameters or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return arguments
    return {p.name: arguments[p.name] for p in parameters if p.name in arguments}


def _parameters(function: Callable[..., Any]) -> list[inspect.Parameter]:
    try:
        return list(inspect.signature(function).parameters.values())
    except (TypeError, ValueError):  # some built-in functions have no signature
        return []


def _checked(reward: Reward, result: Any, count: int, where: str, step: int) -> list[float | None]:
    def refuse(what: str) -> RewardError:
        return RewardError(f"{where}: reward {reward.name} returned {what} (step {step})")

    if hasattr(result, "tolist"):
        result = result.tolist()
    if not isinstance(result, list | tuple):
        raise refuse(f"{_kind(result)} instead of a list with a number or None for each completion")
    if len(result) != count:
        raise refuse(f"{len(result)} value{'s' * (len(result) != 1)} for {count} completions")
    values: list[float | None] = []
    for i, item in enumerate(result):
        value = item.item() if hasattr(item, "item") and getattr(item, "ndim", 0) == 0 else item
        if value is not None and not isinstance(value, Real):
            raise refuse(f"{_kind(value)} for completion {i}; a reward is a number or None")
        try:
            number = None if value is None else float(value)
        except OverflowError:
            number = math.inf
        if number is not None and not math.isfinite(number):
            raise refuse(f"{number} for completion {i}; rewards must be finite")
        values.append(number)
    return values


def _total(values: Sequence[float | None]) -> float | None:
    given = [value for value in values if value is not None]
    return math.fsum(given) if given else None


def _kind(value: Any) -> str:
    if value is None:
        return "None"
    return f"{value!r:.40}" if isinstance(value, str | bytes) else f"a {type(value).__name__}"


def describe(error: BaseException) -> str:
    """``ValueError: what it says (my_rewards.py:12)``, the place being the last one that is not in a library."""
    text = " ".join(str(error).split())[:300]
    said = f"{type(error).__name__}: {text}" if text else type(error).__name__
    if isinstance(error, SyntaxError) and error.filename:
        return f"{type(error).__name__}: {error.msg} ({Path(error.filename).name}:{error.lineno})"
    frames = [f for f in traceback.extract_tb(error.__traceback__) if f.filename not in (__file__, "<string>")]
    own = [f for f in frames if "site-packages" not in f.filename and not f.filename.startswith((sys.base_prefix, "<"))]
    place = (own or frames)[-1:]
    return f"{said} ({Path(place[0].filename).name}:{place[0].lineno})" if place else said

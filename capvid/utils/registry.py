"""Registries of named plug-ins that register themselves where they are defined; suggestions for names."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from capvid.errors import UsageError

T = TypeVar("T")
P = TypeVar("P")


def _decorated(name: str, plugin: Any) -> Any:
    """Return what is decorated; it has no properties."""
    return plugin


class Registry(Mapping[str, T], Generic[T]):
    """Mapping from names to plug-ins of one kind, in the order of their modules and definitions.

    A new plug-in is one new module of ``package``. Looking up a name imports the module of that name (with
    underscores for hyphens) and, if that does not register it, every module; iteration imports every module.

    Args:
        kind: what the plug-ins are, for messages, such as "captioner".
        package: dotted name of the package whose modules register plug-ins.
        entry: function that makes the registered object of its name, the decorated one and properties; by
            default the decorated one is registered.

    Example:
        >>> METRICS = Registry("metric", "capvid.metrics", Metric)
        >>> @METRICS.register("length", paragraphs_only=True)
        ... def length(texts): ...
    """

    def __init__(self, kind: str, package: str, entry: Callable[..., T] = _decorated) -> None:
        self.kind = kind
        self._package = package
        self._entry = entry
        self._plugins: dict[str, T] = {}
        self._modules: dict[str, str] = {}  # by plug-in
        self._discovered = False

    def register(self, name: str, **properties: Any) -> Callable[[P], P]:
        """Return a decorator that registers a class or function as ``name``, with properties of its entry."""

        def decorator(plugin: P) -> P:
            if name in self._plugins:
                raise ValueError(f"{self.kind} {name} is registered twice")
            self._plugins[name] = self._entry(name, plugin, **properties)
            self._modules[name] = plugin.__module__
            return plugin

        return decorator

    def __getitem__(self, name: str) -> T:
        """Return the plug-in ``name``.

        Raises:
            UsageError: there is no such plug-in.
        """
        if name not in self:
            known = ", ".join(sorted(self._plugins))
            raise UsageError(
                f"{name}: no such {self.kind}",
                remedy=did_you_mean(name, self._plugins) or f"use one of {known}",
            )
        return self._plugins[name]

    def __contains__(self, name: object) -> bool:
        if name not in self._plugins:
            self._discover(str(name).replace("-", "_"))
        if name not in self._plugins:
            self._discover()
        return name in self._plugins

    def __iter__(self) -> Iterator[str]:
        self._discover()
        return iter(sorted(self._plugins, key=self._modules.__getitem__))  # not in order of import

    def __len__(self) -> int:
        self._discover()
        return len(self._plugins)

    def _discover(self, only: str | None = None) -> None:
        """Import the modules of the package, or ``only`` one of them if it exists."""
        if self._discovered:
            return
        import pkgutil

        self._discovered = only is None  # before the imports: a module may look at its own registry
        package = importlib.import_module(self._package)
        for module in sorted([info.name for info in pkgutil.iter_modules(package.__path__)]):
            if only in (None, module):
                importlib.import_module(f"{self._package}.{module}")


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a question naming up to three of the ``known`` names close to ``name``, else an empty string."""
    from difflib import SequenceMatcher

    def folded(text: str) -> str:
        return text.casefold().replace("_", "-")

    wanted, similarity = folded(name), {}
    for item in known:
        if folded(item) == wanted:
            return f"did you mean {item}?"
        ratio = SequenceMatcher(None, wanted, folded(item)).ratio()
        is_prefix = len(wanted) > 1 and folded(item).startswith(wanted)
        if is_prefix or ratio >= (0.5 if len(wanted) < 4 else 0.6):
            similarity[item] = ratio
    closest = sorted(similarity, key=lambda item: -similarity[item])[:3]
    if not closest:
        return ""
    *others, last = closest
    return f"did you mean {', '.join(others)} or {last}?" if others else f"did you mean {last}?"

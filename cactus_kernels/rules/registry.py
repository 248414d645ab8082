"""Rules by name. A rule's file registers its names; everything that lists rules (messages, the command's help, README's
table, the frontier, fuzzing, vLLM's plugin) reads them here.
"""

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, cast

from .base import Rule


@dataclass(frozen=True)
class Named:
    """A rule as it is known by one name.

    make: makes the rule from its strengths, each with a default; the first is what is meant by "the strength".
    frontier: strengths at which the frontier measures it; without any it is not measured, unless it has no strength. None:
        it is not measured.
    fuzzed: strengths that fuzzing chooses from, the odd ones among them, by their names.
    default: the rule at its default strength.
    """

    name: str
    make: Callable[..., Rule]
    frontier: tuple[float, ...] | None
    fuzzed: Mapping[str, tuple]
    default: Rule

    @property
    def strength(self) -> str | None:
        """What the strength is called, such as "delta"; None: there is none."""
        return next(iter(inspect.signature(self.make).parameters), None)

    @property
    def default_strength(self) -> Any:
        return inspect.signature(self.make).parameters[self.strength].default if self.strength else None

    @property
    def measured(self) -> list[Rule]:
        """The rule at the strengths of the frontier."""
        if self.frontier is None:
            return []
        return [self.default] if self.strength is None else [self.make(x) for x in self.frontier]


RULES: dict[str, Named] = {}


def register(name: str, make: Callable[..., Rule], frontier=(), fuzzed: Mapping[str, tuple] | None = None) -> None:
    """Let a rule be known by a name; see `Named`. Raises ValueError where another has it."""
    if name in RULES:
        raise ValueError(f"a rule is named {name!r} already")
    RULES[name] = Named(name, make, None if frontier is None else tuple(frontier), fuzzed or {}, make())


def resolve_rule(rule) -> Rule:
    """A rule from a `Rule` or its name (default strength). Raises ValueError or TypeError, naming it."""
    if isinstance(rule, Rule):
        return rule
    if isinstance(rule, str):
        if rule in RULES:
            return RULES[rule].make()
        raise ValueError(
            f"unknown rule {rule!r}: use one of {', '.join(map(repr, RULES))} or a Rule such as Cactus(0.5)"
        )
    raise TypeError(f"rule must be a Rule or its name, got {type(rule).__name__}")


def given(rule: Rule) -> dict:
    """The fields of a rule of the package that were given, name -> value: its strength, and what differs from defaults."""
    values = [(f, getattr(rule, f.name)) for f in fields(cast(Any, rule)) if getattr(rule, f.name) is not None]
    return {f.name: value for i, (f, value) in enumerate(values) if i == 0 or value != f.default}


def passed_on(rule: Rule) -> str:
    """The name from which, with its strengths, `rebuild` makes the rule again; of a rule that is not the package's own,
    one that `rebuild` refuses."""
    own = rule.name in RULES and type(RULES[rule.name].default) is type(rule)
    return rule.name if own else f"{rule.name} of the class {type(rule).__name__}"


def rebuild(name: str, strengths) -> Rule:
    """A rule of the package from what `passed_on` gave and its strengths. Raises ValueError for another one."""
    if name not in RULES:
        raise ValueError(
            f"torch.compile takes the rules {', '.join(RULES)} of the package, got {name}: call verify outside of it"
        )
    return RULES[name].make(*strengths)


def strengths() -> str:
    """What the strength of each rule is, with its default: the help of the command holds it."""
    names: dict[tuple, list[str]] = {}
    for rule in RULES.values():
        if rule.strength:
            names.setdefault((rule.strength, rule.default_strength), []).append(rule.name)
    return "; ".join(f"{what} of {', '.join(of)} ({default:g})" for (what, default), of in names.items())


def table() -> str:
    """The rules as a table in Markdown, from their signatures and docstrings: README.md holds it."""
    lines = ["| rule | by name | what it does | reads |", "|---|---|---|---|"]
    names: dict[type[Rule], list[str]] = {}
    for rule in sorted(RULES.values(), key=lambda rule: (rule.name != "sps", not rule.default.lossless)):
        names.setdefault(type(rule.default), []).append(f'`"{rule.name}"`')
    for cls, of in names.items():
        written = ", ".join(map(str, inspect.signature(cls).parameters.values()))
        written = re.sub(r": [^=,]+ = ", "=", written)
        what, *rest = (inspect.getdoc(cls) or "").split("\n\n")
        reads = next(part.removeprefix("Reads ").rstrip(".") for part in rest if part.startswith("Reads "))
        what, reads = (" ".join(x.split()).replace("|", "\\|") for x in (what, reads))
        lines.append(f"| `{cls.__name__}({written})` | {', '.join(of)} | {what} | {reads} |")
    return "\n".join(lines)

"""Warnings about a call that is right and may surprise."""

import warnings

from ..rules import Rule
from .arguments import Arguments
from .cache.kinds import is_tried
from .cache.support import without_wrapper

USERS_LINE = 4  # frames from here to who called `speculative_generate`, with `check_call` between


def warn_of_rule(arguments: Arguments, rule: Rule) -> None:
    """A `UserWarning` where a lossy rule samples that nobody named, or was named for nothing."""
    samples = arguments.setting("do_sample")
    if samples and arguments.rule is None:
        warnings.warn(
            'no rule was given, and sampling goes by Cactus(1.0), which is lossy: rule="sps" is lossless, so that tokens '
            'follow the target; rule="cactus" says that this one is meant',
            UserWarning,
            stacklevel=USERS_LINE,
        )
    if not samples and arguments.rule is not None and not rule.lossless:
        warnings.warn(
            f"the rule {rule.name} was given and do_sample is not set: tokens are the target's own greedy ones, whatever the "
            "rule; pass do_sample=True, or leave the rule out",
            UserWarning,
            stacklevel=USERS_LINE,
        )


def warn_of_untried(arguments: Arguments) -> None:
    """One `UserWarning` for all models of kinds that nobody has compared."""
    models = [arguments.model] if arguments.looks_up else [arguments.model, arguments.assistant_model]
    models = [without_wrapper(model) for model in models]
    names = sorted({type(model).__name__ for model in models if not is_tried(model)})
    if names:
        warnings.warn(
            f"{' and '.join(names)}: not compared with plain `generate` by this package. Compare before you rely on it: "
            "cactus-kernels check --model ID [--draft ID]",
            UserWarning,
            stacklevel=USERS_LINE,
        )

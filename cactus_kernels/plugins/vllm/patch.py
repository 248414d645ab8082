"""Which function of vLLM verifies, what it must look like, and how it is replaced."""

import functools
import importlib
import inspect
import logging
import re
import sys
from dataclasses import dataclass

import torch

from ... import rules
from ...definition import MAX_DRAFT_TOKENS
from .verifier import Verifier

KEY = "cactus"  # of vLLM's additional_config
# Releases of vLLM whose tensors mean what `Verifier` takes them for; names do not tell.
OLDEST, NEWEST = (0, 28), (0, 33)
ADVICE = "use a release that docs/vllm.md names"
logger = logging.getLogger("vllm.cactus_kernels")  # below vLLM's own, for its format and level


@dataclass(frozen=True)
class Place:
    """Where one of vLLM's model runners verifies.

    Attributes:
        runner: vLLM's name for the runner.
        module: whose `rejection_sample` the methods of its `RejectionSampler` look up at each call.
        reads: the leading parameters of `rejection_sample`, those that verification reads.
        ignored: further ones that mean nothing here.
        handed: further ones that ask for another verification where they are set: such a call is handed to stock.
    """

    runner: str
    module: str
    reads: tuple
    ignored: tuple
    handed: tuple


V1 = Place(
    "V1",
    "vllm.v1.sample.rejection_sampler",
    reads=(
        "draft_token_ids", "num_draft_tokens", "max_spec_len", "cu_num_draft_tokens", "draft_probs", "target_logits",
        "bonus_token_ids", "sampling_metadata",
    ),
    ignored=("use_fp64_gumbel", "fly_entropy_threshold", "fly_entropy_top_k"),
    handed=("synthetic_mode", "synthetic_conditional_rates", "fly_window_size"),
)  # fmt: skip
V2 = Place(
    "V2",
    "vllm.v1.worker.gpu.spec_decode.rejection_sampler",
    reads=(
        "target_logits", "draft_logits", "draft_sampled", "cu_num_logits", "pos", "idx_mapping", "expanded_idx_mapping",
        "expanded_local_pos", "temperature", "seed", "num_speculative_steps",
    ),
    ignored=("use_fp64", "fly_entropy_threshold", "fly_entropy_top_k"),
    handed=(
        "synthetic_conditional_rates", "use_block_verification", "contexts", "watermarking", "watermarking_skip_mask",
        "watermark_key", "fly_window_size",
    ),
)  # fmt: skip


def activate(vllm_config):
    """Make this process verify as `vllm_config.additional_config["cactus"]` says, or by vLLM itself where it is not there.

    Returns:
        The `Verifier`; None where it is not switched on.

    Raises:
        ValueError, TypeError: a rule, a strength or another setting that cannot be had.
        RuntimeError: a vLLM whose verification is not known here.
    """
    from vllm.envs import VLLM_LOG_STATS_INTERVAL

    for place in (V1, V2):
        restore(place)
    config = vllm_config.additional_config
    settings = config.get(KEY) if isinstance(config, dict) else None
    if settings is None:
        return None
    check_release()
    rule = parse_rule(settings)
    spec = vllm_config.speculative_config
    if spec is None:
        raise ValueError(f"additional_config has {KEY!r} but there is no speculative_config: nothing would be verified")
    if spec.num_speculative_tokens > MAX_DRAFT_TOKENS:
        raise ValueError(
            f"num_speculative_tokens may be at most {MAX_DRAFT_TOKENS} with {KEY!r}, got {spec.num_speculative_tokens}"
        )
    place = V2 if vllm_config.use_v2_model_runner else V1
    verifier = Verifier(rule, VLLM_LOG_STATS_INTERVAL)
    replace(place, verifier)
    if spec.rejection_sample_method == "standard" and getattr(vllm_config, "watermark_config", None) is None:
        logger.info("cactus_kernels: model runner %s verifies by %r", place.runner, rule)
    else:
        logger.warning(
            "cactus_kernels: watermarks and rejection_sample_method %r are left to vLLM's own verification",
            spec.rejection_sample_method,
        )
    return verifier


def parse_rule(settings):
    """The rule of {"rule": name, its strength: a number}. Raises ValueError or TypeError, naming what came."""
    if not isinstance(settings, dict):
        raise TypeError(f'{KEY} must be an object such as {{"rule": "cactus", "delta": 1.0}}, got {settings!r}')
    name, strengths = settings.get("rule", "cactus"), {k: v for k, v in settings.items() if k != "rule"}
    known = {name: rule for name, rule in rules.RULES.items() if not rule.default.reads_rows}
    if not isinstance(name, str) or name not in known:
        raise ValueError(f"{KEY}: vLLM's drafts are verified by one of the rules {', '.join(known)}, got {name!r}")
    strength = known[name].strength
    if not strengths.keys() <= {strength}:
        raise ValueError(f"{KEY}: the rule {name} takes {strength or 'no strength'}, got {', '.join(strengths)}")
    return known[name].make(**strengths)


def replace(place, verifier):
    """Let a verifier verify at a place. Raises RuntimeError where the function there is not the one known here."""
    module = importlib.import_module(place.module)
    stock = module.rejection_sample
    signature = inspect.signature(stock)
    names = tuple(signature.parameters)
    n = len(place.reads)
    if names[:n] != place.reads or not set(names[n:]) <= {*place.ignored, *place.handed}:
        known = f"({', '.join(place.reads)}) and any of {', '.join((*place.ignored, *place.handed))}"
        raise RuntimeError(differs(f"{place.module}.rejection_sample", stock, known))
    methods = (inspect.unwrap(m) for m in vars(module.RejectionSampler).values() if inspect.isfunction(m))
    if not any("rejection_sample" in m.__code__.co_names for m in methods):
        raise RuntimeError(f"{place.module}.RejectionSampler of {release()} does not call rejection_sample: {ADVICE}")
    verify = {"V1": verifier.v1, "V2": verifier.v2}[place.runner]

    @functools.wraps(stock)
    def rejection_sample(*args, **kwargs):
        given = signature.bind(*args, **kwargs).arguments
        if any(isinstance(v, torch.Tensor) or v for v in map(given.get, place.handed)):
            return stock(*args, **kwargs)
        return verify(*(given[name] for name in place.reads))

    rejection_sample.verifier = verifier
    module.rejection_sample = rejection_sample


def restore(place):
    """Let vLLM verify at a place again."""
    module = sys.modules.get(place.module)
    if module is not None and hasattr(module.rejection_sample, "verifier"):
        module.rejection_sample = module.rejection_sample.__wrapped__


def differs(name, function, known):
    """What to say where a function of vLLM is not the one known here."""
    return f"{name} of {release()} takes {inspect.signature(function)}; cactus_kernels knows {known}: {ADVICE}"


def check_release():
    """Raise RuntimeError for a vLLM that is not known here."""
    numbers = re.match(r"(\d+)\.(\d+)\b", release().split()[1])
    if numbers is None or not OLDEST <= tuple(map(int, numbers.groups())) <= NEWEST:
        oldest, newest = (".".join(map(str, x)) for x in (OLDEST, NEWEST))
        raise RuntimeError(f"cactus_kernels knows vLLM {oldest} to {newest}, got {release()}: {ADVICE}")


def release():
    from vllm import __version__

    return f"vLLM {__version__}"

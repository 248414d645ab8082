"""A delta for each request, by the custom logits processors of vLLM's model runner V2."""

import importlib

import torch
from vllm.v1.worker.gpu.sample.logits_processor import LogitsProcessor

from ...rules import Cactus
from .patch import V2

ARGUMENT = "cactus_delta"


class RequestDelta(LogitsProcessor):
    """For vLLM's `logits_processors`: `extra_args={"cactus_delta": 0.5}` of a request's sampling parameters is its delta.

    Others have the delta that the engine has. Logits are not changed.
    """

    def __init__(self, vllm_config, req_states):
        """Raises ValueError where vLLM was not told to verify by a rule with a delta."""
        from vllm.v1.worker.gpu.buffer_utils import UvaBackedTensor  # here: vLLM's front end imports this file too

        verifier = getattr(importlib.import_module(V2.module).rejection_sample, "verifier", None)
        if verifier is None or not isinstance(verifier.rule, Cactus):
            raise ValueError(
                f"a {ARGUMENT} for each request needs Cactus in additional_config, got {verifier and verifier.rule!r}"
            )
        self.deltas = verifier.deltas = UvaBackedTensor(req_states.max_num_reqs, dtype=torch.float32)

    @classmethod
    def validate_params(cls, sampling_params):
        """Raises ValueError for a delta that cannot be had, which vLLM answers to the request."""
        if (delta := _delta(sampling_params)) is None:
            return
        try:
            Cactus(delta)
        except (TypeError, ValueError) as error:
            raise ValueError(f"{ARGUMENT} must be a finite number of at least 0, got {delta!r}") from error

    def add_request(self, req_idx, sampling_params):
        delta = _delta(sampling_params)
        self.deltas.np[req_idx] = torch.nan if delta is None else delta  # NaN: the engine's
        return False

    def apply_staged_writes(self):
        self.deltas.copy_to_uva()

    def apply(self, logits, ctx):
        return logits


def _delta(sampling_params):
    return (sampling_params.extra_args or {}).get(ARGUMENT)

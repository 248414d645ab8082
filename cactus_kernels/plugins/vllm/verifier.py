"""vLLM's tensors to `verify_from_logits` and back."""

import logging
import time
from dataclasses import replace

import torch

from ...rules import Cactus
from ...sampling import Sampling
from ...verification import verify_from_logits
from .fallback import fill_invalid

logger = logging.getLogger("vllm.cactus_kernels")


class Verifier:
    """Verifies for one worker of vLLM by a rule, and counts the requests whose values were bad.

    T drafted tokens of B requests, at most K each; V the vocabulary. It never waits for the device.
    """

    def __init__(self, rule, interval=10.0, backend=None):
        """rule: a `Rule`. interval: seconds between two lines of the log. backend: as in `verify`."""
        self.rule, self.interval, self.backend = rule, interval, backend
        self.deltas = None  # of V2's slots, where requests may have their own: see `request`
        self.calls = 0
        self.invalid = None  # InvalidCount, once the device is known

    def status(self):
        """The rule, how often it has verified, and how many requests' steps had bad values. Waits for the device."""
        return {
            "rule": repr(self.rule),
            "calls": self.calls,
            "invalid": 0 if self.invalid is None else int(self.invalid.total),
        }

    def v1(
        self, draft_token_ids, num_draft_tokens, max_spec_len, cu_num_draft_tokens, draft_probs, target_logits,
        bonus_token_ids, sampling_metadata,
    ):  # fmt: skip
        """In place of `rejection_sample` of model runner V1.

        Args:
            draft_token_ids: int32 [T].
            num_draft_tokens: list of B ints, K their largest at most.
            max_spec_len: K.
            cu_num_draft_tokens: int32 [B], prefix sums without the leading 0.
            draft_probs: fp32 [T, V], or None: one-hot drafts.
            target_logits: fp32 [T, V], temperature, top-k and top-p applied.
            bonus_token_ids: int32 or int64 [B, 1].
            sampling_metadata: vLLM's; the temperatures (0 is greedy) and generators of requests are read.

        Returns:
            int32 [B, K + 1]: the tokens emitted, then -1.
        """
        cu_draft_tokens = torch.nn.functional.pad(cu_num_draft_tokens, (1, 0))
        meta = sampling_metadata
        if meta.all_greedy:
            sampling, seed = Sampling(temperature=0.0), 0
        else:
            sampling = Sampling(1.0 if meta.all_random else (meta.temperature != 0).float())
            seed = new_seeds(num_draft_tokens, meta.generators, target_logits.device)
        out = verify_from_logits(
            target_logits, None, draft_token_ids, self.rule, seed=seed, offset=0, sampling=sampling,
            draft_probs=draft_probs, bonus_token_ids=bonus_token_ids.squeeze(1), cu_draft_tokens=cu_draft_tokens,
            max_draft_tokens=max_spec_len, backend=self.backend,
        )  # fmt: skip
        self._fill(out, target_logits, cu_draft_tokens, has_bonus=False)
        return out.token_ids

    def v2(
        self, target_logits, draft_logits, draft_sampled, cu_num_logits, pos, idx_mapping, expanded_idx_mapping,
        expanded_local_pos, temperature, seed, num_speculative_steps,
    ):  # fmt: skip
        """In place of `rejection_sample` of model runner V2.

        Args:
            target_logits: [T + B, V], all sampling parameters applied; not written to.
            draft_logits: [slots, K, V], before temperature, or None: one-hot drafts.
            draft_sampled: [T + B]: the token fed at each row, so that of drafted position j in row j + 1; -1: none.
            cu_num_logits: int32 [B + 1].
            pos: int64 [T + B], the place of each row in its text.
            idx_mapping: int32 [B], the slot of each request.
            temperature, seed: fp32 and int64 [slots].
            num_speculative_steps: K.
            expanded_idx_mapping, expanded_local_pos: not read.

        Returns:
            int64 [B, K + 1], the tokens emitted, then -1; int32 [B], how many.
        """
        B, K = len(idx_mapping), num_speculative_steps
        cu_draft_tokens = cu_num_logits - torch.arange(B + 1, dtype=cu_num_logits.dtype, device=cu_num_logits.device)
        # Request b has b rows of bonus tokens before it, and its first draft is in its second row.
        n = torch.arange(len(draft_sampled) - B, dtype=cu_draft_tokens.dtype, device=cu_draft_tokens.device)
        request = torch.searchsorted(cu_draft_tokens[1:-1], n, right=True)
        temperature = temperature[idx_mapping]
        out = verify_from_logits(
            target_logits, draft_logits, draft_sampled[n + request + 1].long(), self._rule_of(idx_mapping),
            seed=seed[idx_mapping],
            # A step at position x uses rows x (K + 1) to x (K + 1) + K, and the next one is at x + 1 at least: no row is
            # used twice, and a seed gives the same text whatever else the server does.
            offset=pos[cu_num_logits[:-1]] * (K + 1),
            sampling=Sampling(temperature=(temperature != 0).float()),
            draft_sampling=None if draft_logits is None else Sampling(temperature=temperature),
            row_map=None if draft_logits is None else idx_mapping, cu_draft_tokens=cu_draft_tokens, max_draft_tokens=K,
            backend=self.backend,
        )  # fmt: skip
        self._fill(out, target_logits, cu_draft_tokens, has_bonus=True)
        return out.token_ids, out.num_accepted + 1

    def _rule_of(self, idx_mapping):
        """The rule with the deltas of requests, where they have their own."""
        if self.deltas is None or not isinstance(self.rule, Cactus):
            return self.rule
        own = self.deltas.gpu[idx_mapping]
        return replace(self.rule, delta=torch.where(own.isnan(), self.rule.delta, own))

    def _fill(self, out, target_logits, cu_draft_tokens, has_bonus):
        """Tokens for invalid requests; what every step ends with."""
        self.calls += 1
        if self.invalid is None:
            self.invalid = InvalidCount(target_logits.device, self.interval)
        fill_invalid(out, target_logits, cu_draft_tokens, has_bonus, self.invalid.total, self.backend)
        self.invalid.log()


def new_seeds(num_draft_tokens, generators, device):
    """int64 [B], new ones for each call, so that an offset of 0 is never used twice.

    num_draft_tokens: list of B ints. generators: {request: torch.Generator} of requests that have their own.
    """
    seeds = torch.empty(len(num_draft_tokens), dtype=torch.int64, device=device).random_()
    for request, generator in generators.items():
        if num_draft_tokens[request]:  # as vLLM: what happens between drafts does not move a request's generator
            seeds[request : request + 1].random_(generator=generator)
    return seeds


class InvalidCount:
    """Requests with bad values: counted on the device, and logged now and then."""

    def __init__(self, device, interval):
        self.interval = interval
        self.total = torch.zeros(1, dtype=torch.int64, device=device)
        self.seen = torch.zeros(1, dtype=torch.int64, device="cpu", pin_memory=device.type == "cuda")
        self.logged, self.due = 0, time.monotonic() + interval

    def log(self):
        """Log what was counted an interval ago, whose copy has long arrived, and begin to copy what is counted now."""
        if time.monotonic() < self.due:
            return
        self.due = time.monotonic() + self.interval
        total = int(self.seen)
        if total > self.logged:
            logger.warning(
                "cactus_kernels: bad logits or ids in %d requests' steps, %d of them new", total, total - self.logged
            )
            self.logged = total
        self.seen.copy_(self.total, non_blocking=True)

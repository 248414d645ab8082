"""The kernels on a device against the torch reference on the host and against plain accounts: the cases of gpu_check.

From probabilities every bit must be the same (`cactus_kernels.testing.parity`). From logits every decision must be that of a
float64 account, near-ties excepted (tests/support/logit_cases.py). Most of the time goes into compiling: nearly every case is
another specialisation of a kernel. So cases are shared out among processes.
"""

import multiprocessing
import random
import sys
import time
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import torch

ROOT = Path(__file__).parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests")]

from support.logit_cases import (  # noqa: E402 (where it is found is said above)
    account,
    difference_of_a_draw,
    difference_of_statistics,
    differences_of_a_batch,
    fuzzed_batch,
    fuzzed_row,
    near_cut,
    warped,
)

from cactus_kernels import Cactus, Sampling, draw  # noqa: E402
from cactus_kernels.rules import RULES, resolve_rule  # noqa: E402
from cactus_kernels.testing import fuzz, parity  # noqa: E402

BUDGETED = ("sps", "cactus", "adaptive", "capped", "interpolation")
LARGE = (151_936, 50_257, 128_256)
NEAR_SHARE = 0.75  # of a kind's cases; where more are near-ties it shows little
PATIENCE = 60  # seconds that cases may take after the end of the time


@dataclass
class Tally:
    """What became of the cases of one kind: how many there are, how many were done, near-ties among those, what differed."""

    name: str
    planned: int
    done: int = 0
    near_ties: int = 0
    differences: list[str] = field(default_factory=list)

    @property
    def failure(self) -> str | None:
        """What is wrong, in words."""
        if self.differences:
            return f"{len(self.differences)} differ; {self.differences[0]}"
        if not self.done:
            return "no case was done in time"
        few = self.done >= 8 and self.near_ties > NEAR_SHARE * self.done
        return "nearly all are near-ties" if few else None


# -- cases: from a number and a device, what differs, in words or None, and whether it was a near-tie


def from_probabilities(number, device):
    return parity.difference(fuzz.fuzz_case(number), second=("triton", device)), False


def by_rule(number, device):
    """Each rule in turn, with its default strength."""
    names = list(RULES)
    name = names[5 * number % len(names)]
    case = fuzz.fuzz_case(3 + number // len(names)) | {"rule": resolve_rule(name)}
    case.pop("budget", None)
    return parity.difference(case, second=("triton", device)), False


def with_budget(number, device):
    case = fuzz.fuzz_case(number) | {"rule": resolve_rule(BUDGETED[number % len(BUDGETED)])}
    cu = case.get("cu_draft_tokens")
    B = len(case["draft_token_ids"]) if cu is None else len(cu) - 1
    case["budget"] = torch.rand(B, generator=torch.Generator().manual_seed(number), dtype=torch.float64)
    return parity.difference(case, second=("triton", device)), False


def large(number, device):
    """From probabilities, whole vocabularies: many chunks in a split and, for few requests, many splits."""
    V, B, m = LARGE[number % 3], (1, 40, 3)[number // 3 % 3], 4
    dtype = fuzz.DTYPES[number % len(fuzz.DTYPES)]
    generator = torch.Generator().manual_seed(number)
    logits = 3 * torch.randn(B, m + 1, V, generator=generator)
    p = (logits[:, :m] + torch.randn(B, m, V, generator=generator)).softmax(-1)
    case = {
        "target_probs": logits.softmax(-1).to(dtype), "draft_probs": p.to(dtype), "rule": Cactus(0.05),
        "draft_token_ids": torch.multinomial(p.view(-1, V), 1, generator=generator).view(B, m), "seed": number, "offset": 7,
    }  # fmt: skip
    return parity.difference(case, second=("triton", device)), False


def drawn_from_probabilities(number, device):
    rng, generator = random.Random(number), torch.Generator().manual_seed(number)
    probs = torch.rand(6, rng.choice((1, 7, 1025, 3000, 9000)), generator=generator) ** 8
    probs[4], probs[5, -1] = 0, float("nan")
    probs = probs.to(rng.choice(fuzz.DTYPES))
    seed, offset = torch.tensor(rng.choices(fuzz.STREAMS, k=6)), torch.tensor(rng.choices(fuzz.OFFSETS, k=6))
    expected = draw(probs, seed=seed, offset=offset, backend="torch")
    got = draw(probs.to(device), seed=seed.to(device), offset=offset.to(device), backend="triton")
    if torch.equal(expected.token_ids, got.token_ids.cpu()) and torch.equal(expected.valid, got.valid.cpu()):
        return None, False
    return (
        f"{got.token_ids[:, 0].tolist()} for {expected.token_ids[:, 0].tolist()} of {probs.dtype} {probs.shape}",
        False,
    )


def from_logits(number, device, truncated=False):
    case, requests = fuzzed_batch(np.random.default_rng([number, truncated]), truncated)
    found = [x for x in differences_of_a_batch(case, requests, "triton", device) if x]
    return (found[0] if found else None), all(near for _, near in requests)


def from_truncated_logits(number, device):
    return from_logits(number, device, truncated=True)


def from_large_logits(number, device):
    V, m, generator = LARGE[number % 3], 3, torch.Generator().manual_seed(number)
    settings = {"temperature": 0.8, "top_k": 20, "top_p": 0.95, "min_p": 0.0} if number % 2 else {"temperature": 1.0}
    x = (3 * torch.randn(1, m + 1, V, generator=generator)).bfloat16()
    d = (x[:, :m].float() + torch.randn(1, m, V, generator=generator)).bfloat16()
    q, p = warped(x[0], **settings), warped(d[0], **settings)
    ids = torch.multinomial(p, 1, generator=generator).view(1, m)
    tokens, near = account(q.numpy(), p.numpy(), ids[0].tolist(), 0.3, number, 11, None)
    if number % 2:
        near |= any(near_cut(row, settings) for row in (*x[0], *d[0]))
    case = {
        "target_logits": x, "draft_logits": d, "draft_token_ids": ids, "rule": Cactus(0.3),
        "seed": torch.tensor([number]), "offset": torch.tensor([11]), "sampling": Sampling(**settings),
    }  # fmt: skip
    return differences_of_a_batch(case, [(tokens, near)], "triton", device)[0], near


def statistics(number, device):
    x, settings = fuzzed_row(np.random.default_rng([number, 2]))
    difference, _ = difference_of_statistics(x, settings, "triton", device)
    near = near_cut(x, settings)
    return (None if near else difference), near


def drawn_from_logits(number, device):
    x, settings = fuzzed_row(np.random.default_rng([number, 3]))
    return difference_of_a_draw(x, settings, number, 2**32 - 9 + number, "triton", device)


@dataclass(frozen=True)
class Kind:
    """Cases of one kind: what they are called, how many there are on a GPU and in a rehearsal, and the case of a number."""

    name: str
    count: int
    rehearsed: int
    case: Callable


KINDS = (
    Kind("verify, fuzzed", 240, 2, from_probabilities),
    Kind("verify, every rule", 6 * len(RULES), 4, by_rule),
    Kind("verify with a budget", 30, 1, with_budget),
    Kind("verify, whole vocabularies", 9, 0, large),
    Kind("draw", 24, 1, drawn_from_probabilities),
    Kind("verify_from_logits", 80, 1, from_logits),
    Kind("verify_from_logits, top-k and top-p", 60, 1, from_truncated_logits),
    Kind("verify_from_logits, whole vocabularies", 6, 0, from_large_logits),
    Kind("row_stats", 48, 2, statistics),
    Kind("sample", 32, 2, drawn_from_logits),
)


def outcome(job):
    """(kind, what differs, near-tie), or None where the time was over. job: (kind, number, device, end of the time)."""
    kind, number, device, end = job
    if time.time() > end:
        return None
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", RuntimeWarning)  # cases hold NaN on purpose
            difference, near = KINDS[kind].case(number, device)
    except Exception:  # a kernel that breaks off fails the check, and the other cases are worth knowing
        difference, near = f"broke off: {traceback.format_exc(limit=-3)}", False
    return kind, difference and f"case {number}: {difference}", near


def run(device, seconds, workers, rehearse=False) -> list[Tally]:
    """Run the cases of every kind, as many as the time allows, all kinds alike, in as many processes as `workers`."""
    tallies = [Tally(kind.name, kind.rehearsed if rehearse else kind.count) for kind in KINDS]
    end = time.time() + seconds
    jobs = [(i, number, device, end) for i, tally in enumerate(tallies) for number in range(tally.planned)]
    jobs.sort(key=lambda job: (job[1] + 0.5) / tallies[job[0]].planned)
    outcomes = map(outcome, jobs) if workers == 1 else _shared_out(jobs, workers, end)
    for kind, difference, near in filter(None, outcomes):
        tallies[kind].done += 1
        tallies[kind].near_ties += near
        tallies[kind].differences += [difference] * bool(difference)
    return [tally for tally in tallies if tally.planned]


def _shared_out(jobs, workers, end):
    """Outcomes of jobs by several processes, as they come. Raises RuntimeError where a case hangs or ends its process."""
    context = multiprocessing.get_context("spawn")
    with context.Pool(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        outcomes = pool.imap_unordered(outcome, jobs)
        for done in range(len(jobs)):
            try:
                yield outcomes.next(timeout=max(1.0, end + PATIENCE - time.time()))
            except multiprocessing.TimeoutError:
                raise RuntimeError(f"{len(jobs) - done} cases of {len(jobs)} hang, or ended their process") from None

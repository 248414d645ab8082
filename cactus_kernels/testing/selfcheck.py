"""The safety net for devices never seen: a backend against torch on the CPU bit for bit, and its tokens against their law."""

import math
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from .. import law
from ..backends import choose_backend
from ..drawing import draw
from ..rules import Cactus, Rule, SpS
from ..verification import verify
from .fuzz import fuzz_case
from .parity import difference

LAW_SIZES = (7, 37, 1025)
LAW_RULES = (SpS(), Cactus(0.5), None)  # None: drawing a token from a row, as drafts are
LAW_BATCH = 2048
SMALLEST_CELL = 25  # tokens expected less often are counted together, so that the approximation holds far out
# Of one law test. There are 9, and so far out the approximation is a few times off: a right backend fails a whole check
# with a chance below 1e-6.
FALSE_ALARM = 1e-8


class LawTest:
    """Counts of what one position emits, against its exact law.

    Args:
        rule: of verification, or None to draw from the draft's row.
        vocab_size, seed: make the rows and the random streams.
        device, backend: where to verify.
    """

    def __init__(self, rule: Rule | None, vocab_size: int, seed: int, device: torch.device, backend: str):
        self.rule, self.vocab_size, self.seed, self.backend = rule, vocab_size, seed, backend
        self.generator = torch.Generator().manual_seed(seed)
        self.p, self.q = _law_rows(vocab_size, self.generator)
        self.rows = [x.to(device).expand(LAW_BATCH, 1, vocab_size) for x in (self.p, self.q)]
        self.counts = torch.zeros(vocab_size, dtype=torch.int64, device="cpu")
        self.batches = 0

    def __str__(self) -> str:
        rule = "draw" if self.rule is None else " ".join([self.rule.name, *(f"{s:g}" for s in self.rule.strengths)])
        return f"law of {rule}, V = {self.vocab_size}"

    @property
    def draws(self) -> int:
        return self.batches * LAW_BATCH

    def draw(self) -> None:
        """Count the tokens of another batch."""
        p, q = self.rows
        stream = {"seed": self.seed, "offset": 2 * self.batches, "backend": self.backend}
        if self.rule is None:
            out = draw(p[:, 0], **stream)
        else:
            ids = torch.multinomial(self.p.double(), LAW_BATCH, replacement=True, generator=self.generator)
            out = verify(q.expand(-1, 2, -1), p, ids[:, None].to(p.device), self.rule, **stream)
        out.raise_if_invalid()
        self.counts += out.token_ids[:, 0].cpu().bincount(minlength=self.vocab_size)
        self.batches += 1

    def p_value(self) -> float:
        """The chance of counts at least this far from the law, by chi-square."""
        expected = self.p.double() if self.rule is None else law.emitted(self.p, self.q, self.rule)
        expected = expected / expected.sum() * self.draws
        rare = expected < SMALLEST_CELL
        observed, expected = (
            torch.cat([x[~rare], x[rare].sum(0, keepdim=True)]) for x in (self.counts.double(), expected)
        )
        cells = expected > 0
        if observed[~cells].any():
            return 0.0
        statistic = ((observed - expected) ** 2 / expected)[cells].sum()
        freedom = cells.sum().double() - 1
        return float(torch.special.gammaincc(freedom / 2, statistic / 2)) if freedom > 0 else 1.0


def _law_rows(vocab_size: int, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
    """Draft and target, fp32 [V]. They agree roughly, but for token 0: the draft gives it more than half and the target a
    twentieth, so that every rule here rejects it often, with an h far from q."""
    logits = 1.5 * torch.randn(vocab_size, generator=generator, dtype=torch.float32, device="cpu")
    noise = torch.randn(vocab_size, generator=generator, dtype=torch.float32, device="cpu")
    p, q = 0.45 * (logits + noise).softmax(0), 0.95 * logits[1:].softmax(0)
    p[0] += 0.55
    return p, torch.cat([q.new_tensor([0.05]), q])


@dataclass(frozen=True)
class Plan:
    """What to check and for how long.

    Args:
        minutes: half of them for parity where there is something to compare, the rest for the laws.
        device: where.
        backend: "triton" or "torch".
        seed: parity case i is that of seed + i, so that a case that fails is the first of a check with its own seed.

    Raises:
        ValueError, RuntimeError: no time, or a backend that is not to be had.
    """

    minutes: float
    device: torch.device
    backend: str
    seed: int

    def __post_init__(self):
        if not (self.minutes > 0 and math.isfinite(self.minutes)):
            raise ValueError(f"minutes must be above 0 and finite, got {self.minutes}")
        if not -(2**62) <= self.seed < 2**62:
            raise ValueError(f"seed must be within 2^62 of 0, got {self.seed}")
        choose_backend(self.backend, self.device)

    @property
    def compares(self) -> bool:
        """Whether there are bits to compare: torch on the CPU is what all others are compared with."""
        return (self.backend, self.device.type) != ("torch", "cpu")

    def __str__(self) -> str:
        text = f"Checking {self.backend} on {self.device} for {self.minutes:g} min, seed {self.seed}."
        if self.compares:
            return text
        return (
            f"{text}\nThe Triton kernel is not checked: it needs a GPU. In its interpreter, slowly: TRITON_INTERPRET=1 "
            "cactus-kernels check"
        )


@dataclass
class Report:
    """What a check did: lines of a table (test, size, result), how to read them, and what failed, in words."""

    rows: list[tuple[str, str, str]] = field(default_factory=list)
    note: str = (
        f"p is the chance of counts this far from the law; a p below {FALSE_ALARM:.0e} fails. A right backend fails less "
        "than once in a million checks."
    )
    failures: list[str] = field(default_factory=list)


def run(plan: Plan, progress: Callable[[str, float], None] = lambda what, share: None) -> Report:
    """Compare a backend on a device with torch on the CPU, bit for bit, and what it emits with the exact law.

    Whatever the time, every kind of test runs at least once. `progress` is called with the kind and the share of the time
    that is over.
    """
    report, start, seconds = Report(), time.perf_counter(), 60 * plan.minutes

    def over():
        return (time.perf_counter() - start) / seconds

    if plan.compares:
        cases = 0
        while not report.failures and (not cases or over() < 0.5):
            progress("parity", over())
            seed = plan.seed + cases
            found = _difference(seed, plan.device, plan.backend)
            cases += 1
            if found:
                report.failures.append(f"parity: {found}; again with --seed {seed}")
        result = "a difference" if report.failures else "every bit equal"
        report.rows.append((f"{plan.backend} on {plan.device} against torch on cpu", f"{cases} cases", result))

    # In the interpreter draws are slow, and those of torch are the same: that is what parity has found.
    backend = "torch" if plan.device.type == "cpu" else plan.backend
    tests = [LawTest(r, V, plan.seed, plan.device, backend) for V in LAW_SIZES for r in LAW_RULES]
    spent = [0.0] * len(tests)
    while not all(spent) or over() < 1:
        progress("laws", over())
        least = spent.index(min(spent))
        before = time.perf_counter()
        tests[least].draw()
        spent[least] += time.perf_counter() - before
    for test in tests:
        p_value = test.p_value()
        report.rows.append((str(test), f"{test.draws} draws", f"p = {p_value:.2g}"))
        if p_value < FALSE_ALARM:
            report.failures.append(
                f"{test}: {test.draws} draws are off with p = {p_value:.1e}; again with --seed {plan.seed}"
            )
    return report


def _difference(seed: int, device: torch.device, backend: str) -> str | None:
    """What differs in the fuzz case of that seed, in words; None: nothing."""
    try:
        with warnings.catch_warnings():
            # Cases hold NaN on purpose, which the interpreter's numpy remarks on.
            warnings.simplefilter("ignore", RuntimeWarning)
            return difference(fuzz_case(seed), ("torch", "cpu"), (backend, str(device)))
    except Exception as error:
        raise RuntimeError(f"the fuzz case of seed {seed} broke off: again with --seed {seed}") from error

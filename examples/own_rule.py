"""An acceptance rule of one's own, the exact law of what it emits, and a sample that follows that law."""

import torch

from cactus_kernels import Cactus, SpS, law, verify
from cactus_kernels.rules import Rule, m
from cactus_kernels.testing.rule import check_rule


def boosted_accept(q_n, p_n, stat, boost):
    return q_n + boost * q_n * (1.0 - q_n)  # at most 1 while boost <= 1


def boosted_recover(q, q_n, h_n, stat, boost):
    return q * m.div_rn(1.0 - h_n, m.where(q_n < 1.0, 1.0 - q_n, 1.0))


class Boosted(Rule):
    name = "boosted"
    accept = staticmethod(boosted_accept)
    recover = staticmethod(boosted_recover)

    def __init__(self, boost=0.5):
        self.strengths = (boost,)


check_rule(Boosted(), cases=3)  # its functions make sense; backends agree, where there are two to compare
p = torch.tensor([0.50, 0.20, 0.15, 0.10, 0.05])  # the draft's distribution
q = torch.tensor([0.30, 0.25, 0.05, 0.30, 0.10])  # the target's
for rule in (SpS(), Boosted(), Cactus(0.1)):
    distance = law.total_variation(law.emitted(p, q, rule), q)
    print(f"{rule.name:8} accepts {law.acceptance(p, q, rule):.3f}, total variation from the target {distance:.3f}")

N = 100_000  # requests of one drafted token each
ids = torch.multinomial(p, N, replacement=True, generator=torch.Generator().manual_seed(0))[:, None]
out = verify(q.expand(N, 2, -1), p.expand(N, 1, -1), ids, Boosted(), seed=1, offset=0)
print("exact law:", *(f"{x:.3f}" for x in law.emitted(p, q, Boosted())))
print("sampled:  ", *(f"{x:.3f}" for x in out.token_ids[:, 0].bincount(minlength=5) / N))

"""Draft and target rows with their tokens sorted by p/q, in float64: what the exact laws are computed from.

For any s, the tokens of the residual (s q - p)+ are those with p/q < s, a head of the sorted row, and the sums of p and q
over it are looked up.
"""

import torch
from torch.nn.functional import pad

STEPS = 64  # of a bisection, enough for float64


class ByRatio:
    """p, q: float64 [..., V], no row of q all 0. Numbers of a row are [..., 1]."""

    def __init__(self, p, q):
        ratio, order = torch.where(q > 0, p / q, torch.inf).sort(-1)
        some = int((q > 0).sum(-1).max())  # of a truncated row few tokens can be recovered
        self.ratio, self.order = ratio[..., :some].contiguous(), order[..., :some]
        q_sorted = q.gather(-1, self.order)
        p_sorted = torch.where(q_sorted > 0, p.gather(-1, self.order), 0.0)
        logs = torch.where((p_sorted > 0) & (q_sorted > 0), self.ratio.log(), 0.0)
        self.sorted = p_sorted, q_sorted, q_sorted * logs
        # Sums of p, q and q ln(p/q) over heads of 0, 1, ... tokens, and over the tails that are left. Tails have sums of their
        # own: beside a head they may be too small to survive a subtraction.
        self.heads = [pad(x.cumsum(-1), (1, 0)) for x in self.sorted]
        self.tails = [pad(x.flip(-1).cumsum(-1).flip(-1), (0, 1)) for x in self.sorted]
        self.tails[0] += torch.where(q > 0, 0.0, p).sum(-1, keepdim=True)

    def _place(self, x, right=False):
        """How many tokens have p/q < x (with `right`, p/q <= x)."""
        return torch.searchsorted(self.ratio, x.contiguous(), right=right)

    def recovered(self, reject, s):
        """The sum over n of reject_n norm((s_n q - p)+), [..., V], and for which n there is such a residual, bool [..., V].

        reject: [..., V], the mass of n drafted and rejected. s: [..., V].
        """
        k = self._place(s)
        z = s * self.heads[1].gather(-1, k) - self.heads[0].gather(-1, k)
        weight = torch.where((reject > 0) & (z > 0), reject / z, 0.0)

        def beyond(x):
            """At each place, the sum of x over the n whose head goes beyond it."""
            return torch.zeros_like(self.heads[0]).scatter_add(-1, k, x)[..., 1:].flip(-1).cumsum(-1).flip(-1)

        p, q, _ = self.sorted
        recovered = (q * beyond(weight * s) - p * beyond(weight)).clamp(min=0)
        return torch.zeros_like(reject).scatter(-1, self.order, recovered), z > 0

    def clip(self, form: str, strength: float):
        """b and c, [..., 1] each, of the law P = clip(p, b q, c q): with c = strength (form "cap"), c / b = strength ("price"),
        or KL(q || P) = strength or less, where nothing that q can emit is rejected ("kl"), or b would be below 2^-1022."""
        solve = {"cap": self._at_cap, "price": self._at_price, "kl": self._at_kl}[form]
        return solve(strength)

    def _at_cap(self, cap):
        c = torch.full_like(self.ratio[..., :1], cap)
        return self._lower(c), c

    def _at_price(self, price):
        def excess(b):
            at_b, at_c = self._place(b), self._place(b * price)
            (p_below, q_below, _), (p_above, q_above, _) = _at(self.heads, at_b), _at(self.tails, at_c)
            return b * (q_below + price * q_above) - (p_below + p_above)

        one = torch.ones_like(self.ratio[..., :1])
        b = _bisect(excess, one / price, one)
        return b, b * price

    def _at_kl(self, kl):
        # For b, of which c follows: of a b of 1e-20 there is nothing left in its c.
        def within(b):
            c = self._upper(b, largest)
            at_b, at_c = self._place(b, right=True), self._place(c)
            (_, q_below, log_below), (_, q_above, log_above) = _at(self.heads, at_b), _at(self.tails, at_c)
            between = self.heads[2][..., -1:] - log_below - log_above
            return kl + (q_below * b.log() + between + q_above * c.log())

        largest = torch.where(self.ratio < torch.inf, self.ratio, 1.0).amax(-1, keepdim=True).clamp(min=1)
        # At the largest c what q cannot emit is rejected, and nothing else.
        least = self._recovering(self.tails[0][..., -1:].contiguous()).clamp(min=torch.finfo(largest.dtype).tiny)
        b = _bisect(within, least, self._lower(torch.ones_like(largest)))
        return b, self._upper(b, largest)

    def _lower(self, c):
        """The b that goes with c: what is rejected, the sum of (p - c q)+, is what recovery adds, that of (b q - p)+."""
        p_above, q_above, _ = _at(self.tails, self._place(c))
        return self._recovering((p_above - c * q_above).clamp(min=0))

    def _recovering(self, rejected):
        """The b at which recovery adds what was rejected, [..., 1]."""
        # It rises from one ratio to the next, and is linear in between.
        p_below, q_below, _ = self.heads
        k = torch.searchsorted(self.ratio * q_below[..., :-1] - p_below[..., :-1], rejected)
        b = (rejected + p_below.gather(-1, k)) / q_below.gather(-1, k)
        return torch.where(k > 0, b, self.ratio[..., :1])

    def _upper(self, b, largest):
        """The c in [1, largest] that goes with b: the inverse of `_lower`."""
        p_below, q_below, _ = _at(self.heads, self._place(b))
        added = b * q_below - p_below
        # What is rejected falls from one ratio to the next, and is linear in between.
        p_above, q_above, _ = self.tails
        rejected = p_above[..., :-1] - self.ratio * q_above[..., :-1]
        k = torch.searchsorted(-rejected, -added)
        c = torch.where(q_above > 0, p_above, torch.inf).gather(-1, k) - added
        return (c / q_above.gather(-1, k)).clamp(min=1).minimum(largest)


def _at(sums, k):
    return [x.gather(-1, k) for x in sums]


def _bisect(rising, low, high):
    """Where a rising function of row numbers crosses 0, between low > 0 and high (high if it does not reach it)."""
    for _ in range(STEPS):
        middle = low.sqrt() * high.sqrt()  # the numbers may span hundreds of orders of magnitude
        above = rising(middle) > 0
        low, high = torch.where(above, low, middle), torch.where(above, middle, high)
    return high

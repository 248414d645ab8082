"""What `frontier` measured, as rows of a table, a picture and a recommendation."""

import math
from dataclasses import dataclass
from pathlib import Path
from typing import IO

from .frontier import Frontier, Point

DRAFTED = (4, 16)  # of the columns of the table
FEW = 200  # positions: with fewer, what is recommended may well be another rule at the next text
ROUNDING = 1e-12  # of float64: a lossless rule has a KL of 0
STYLES = ("o-", "s-", "^-", "v-", "D-", "P-", "X-")
SUFFIXES = (".png", ".svg")
COLUMNS = ("rule", "", "accept", "KL", *(f"m = {m}" for m in DRAFTED), "loss", "gain", "same KL")


@dataclass(frozen=True)
class Goal:
    """What to recommend: the most acceptance within max_kl nats (0.1 if neither is given), or the least KL that accepts at
    least a share of min_acceptance. Raises ValueError."""

    max_kl: float | None = None
    min_acceptance: float | None = None

    def __post_init__(self):
        if self.max_kl is not None and not self.max_kl >= 0:
            raise ValueError(f"max-kl must be at least 0, got {self.max_kl}")
        if self.min_acceptance is not None and not 0 <= self.min_acceptance <= 1:
            raise ValueError(f"min-accept must be in [0, 1], got {self.min_acceptance}")

    def best(self, found: Frontier) -> Point | None:
        """The point of a frontier that serves it best, None if none does."""
        if self.min_acceptance is not None:
            points = [p for p in found.points if p.acceptance >= self.min_acceptance - ROUNDING]
            return min(points, key=lambda p: p.kl, default=None)
        points = [p for p in found.points if p.kl <= self._max_kl + ROUNDING]
        return max(points, key=lambda p: p.acceptance, default=None)

    def answer(self, found: Frontier) -> str:
        """One line, and a caveat where it rests on few positions."""
        if self.min_acceptance is not None:
            wanted = f"acceptance of at least {self.min_acceptance:g}"
        else:
            wanted = f"KL of at most {self._max_kl:g}"
        best = self.best(found)
        caveat = _caveat(found, best) if found.positions < FEW else ""
        if best is None:
            return f"For a mean {wanted}: none of these rules and strengths{caveat}"
        options = f"--rule {best.name}" + ("" if best.strength is None else f" --strength {best.strength}")
        return (
            f"For a mean {wanted}: {best.rule}, which accepts {best.acceptance:.3f} at a KL of {best.kl:.4f}; "
            f"in generate: {options}{caveat}"
        )

    @property
    def _max_kl(self) -> float:
        return 0.1 if self.max_kl is None else self.max_kl


def rows(found: Frontier) -> list[tuple[str, ...]]:
    """The rows of a table with `COLUMNS`, one a point, the name of a curve on the first of its points."""
    table, curve = [], None
    for p in found.points:
        name, curve = "" if p.curve == curve else p.curve, p.curve
        strength = "" if p.strength is None else f"{p.strength:g}"
        forwards = [_fixed(p.tokens_per_forward[m - 1], 2) for m in DRAFTED]
        losses = _fixed(p.nll), f"{round(p.nll_gain, 3) + 0.0:+.3f}", _fixed(p.nll_interpolation)
        table.append((name, strength, _fixed(p.acceptance), _fixed(p.kl), *forwards, *losses))
    return table


def notes(found: Frontier) -> str:
    """What the columns mean, and the figures that are the same for all rules."""
    errors = [p.nll_gain_error for p in found.points if math.isfinite(p.nll_gain_error)]
    interrupted = "" if found.complete else ", interrupted"
    return (
        f"Means over {found.positions} positions of {found.documents} documents{interrupted}. KL: of the emitted law from the "
        "target. m: tokens a forward pass of the target with so many drafted. loss: nats a token of the text under the emitted "
        "law; gain: how far below the target's loss that is, give or take a standard error of at most "
        f"{_fixed(max(errors, default=None))}; same KL: the loss under the mixture of target and draft that "
        f"has the rule's KL; these over the {found.scored} positions where both models can emit the text's token. Loss of the "
        f"target {_fixed(found.target_nll)}, of the draft {_fixed(found.draft_nll)}; KL of the draft {_fixed(found.draft_kl)}."
    )


def _caveat(found: Frontier, best: Point | None) -> str:
    """How uncertain it is what is best, by the standard errors of what was measured of it."""
    if best is None or not math.isfinite(best.acceptance_error + best.kl_error):
        known = "how far off the means are is not known"
    else:
        known = f"give or take a standard error, {best.acceptance_error:.3f} of the acceptance and {best.kl_error:.4f} of the KL"
    count = f"{found.positions} position{'s' * (found.positions > 1)}"
    return f"\nUncertain, from {count}: {known}. Measure at {FEW} or more (--positions, a longer --text)."


def check_plot(path: str) -> None:
    """Raises ValueError for a name that does not end in .png or .svg, ImportError without matplotlib."""
    if Path(path).suffix.lower() not in SUFFIXES:
        raise ValueError(f"a plot is a .png or .svg file, got {path!r}")
    try:
        import matplotlib  # noqa: F401, PLC0415 (optional)
    except ImportError as error:
        raise ImportError("a plot needs matplotlib: pip install matplotlib") from error


def plot(found: Frontier, title: str, file: IO[bytes], name: str) -> None:
    """Write a picture of acceptance against KL, one curve a rule, to a binary file, in the format of the name's suffix."""
    from matplotlib import rc_context  # noqa: PLC0415 (optional)
    from matplotlib.figure import Figure  # noqa: PLC0415 (optional)

    curves: dict[str, list[tuple[float, float]]] = {}
    for point in found.points:
        if math.isfinite(point.kl):
            curves.setdefault(point.curve, []).append((max(point.kl, 0.0), point.acceptance))
    # Text stays text, and equal figures give equal files.
    with rc_context({"svg.fonttype": "none", "svg.hashsalt": "frontier"}):
        figure = Figure(figsize=(8, 5.5), layout="constrained")
        axes = figure.add_subplot()
        for i, (curve, points) in enumerate(curves.items()):
            style = "*" if len(points) == 1 else STYLES[i % len(STYLES)]
            axes.plot(
                *zip(*points, strict=True), style, label=curve, color=f"C{i % 10}", markersize=4 + 5 * (style == "*")
            )
        # Lossless rules stand at 0: the scale is linear up to a thousandth of a nat.
        axes.set_xscale("symlog", linthresh=1e-3)
        axes.set_xlim(left=0)
        axes.set_xlabel("KL(P‖q), nats, mean over positions")
        axes.set_ylabel("probability that a drafted token is accepted")
        axes.set_title(title, fontsize="medium")
        axes.grid(alpha=0.3)
        axes.legend(fontsize="small", ncols=2)
        suffix = Path(name).suffix.lower()
        metadata = {"Date": None} if suffix == ".svg" else None
        figure.savefig(file, format=suffix.removeprefix("."), dpi=120, metadata=metadata)


def _fixed(value: float | None, digits: int = 3) -> str:
    return "-" if value is None else f"{round(value, digits) + 0.0:.{digits}f}"  # not -0.000

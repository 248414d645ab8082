"""Verification of a batch, from probabilities and from logits: ours beside every peer that is installed (benchmarks/peers.py).

    python benchmarks/bench_verify.py                      # a handful of sizes, on a GPU where there is one
    python benchmarks/bench_verify.py --full --plot FILE   # all sizes that fit in memory

Microbenchmarks by pytest-benchmark, also of truncated rows and of draws, are in test_kernels.py.

On a GPU the time of a call is that between device events around calls in a row, each with other inputs so that the cache
does not help, and beside it the host's time to issue one; launches are counted by the profiler. On a CPU there is one wall
clock, calls are measured in turn, and memory and launches are not measured. "Needed" are the bytes that have to be read: one
row pair a request from probabilities, 2 V elements, whatever the number m of drafted tokens; from logits (m + 3) V, every target
row once and a row pair again; V less where a draft is accepted whole, which is counted. Beside them stands how close that comes
to the speed of a large copy, measured in the same run.

From probabilities we verify by Cactus, from logits by SpS with the draft's statistics given, as `sample` leaves them. Likewise
peers find fp32 probabilities of the draft ready, and of the target where probabilities are what is verified; from logits the
softmax of the target is theirs to do. Ends in one JSON line.
"""

import argparse
import itertools
import json
import sys
from dataclasses import asdict, dataclass, is_dataclass, replace

import measure
import torch
from peers import LOGITS, PEERS, PROBS, truncate
from rich.console import Console
from verify_report import notes, plot, table

from cactus_kernels import Cactus, RowStats, SpS, VerifyOutput, new_scratch, row_stats, verify, verify_from_logits
from cactus_kernels.tools.environment import describe_environment
from cactus_kernels.tools.files import check_writable, replacing
from cactus_kernels.tools.frontier_report import check_plot

DELTA = 0.05
OURS = {PROBS: "verify", LOGITS: "verify_from_logits"}
VOCAB_SIZES, BATCH_SIZES, DRAFTED = (32_000, 128_256, 151_936, 262_144), (1, 8, 64, 256), (1, 4, 8)
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


@dataclass(frozen=True)
class Case:
    """Requests, drafted tokens of each, vocabulary; rows are PROBS or LOGITS."""

    rows: str
    B: int
    m: int
    V: int

    def needed(self, dtype, whole=0.0) -> int:
        """Bytes to be read. whole: the share of requests whose drafts are accepted whole, which read the bonus row alone."""
        rows = 2 if self.rows == PROBS else self.m + 3
        return round(self.B * self.V * dtype.itemsize * (rows - whole))

    def size(self, dtype) -> int:
        """Bytes of the rows."""
        return self.B * self.V * dtype.itemsize * (2 * self.m + 1)

    def fits(self, dtype, device) -> bool:
        """Whether there is room for the rows, in fp32 while they are made, and for what the dense way makes of them."""
        return self.size(dtype) + 4 * self.size(torch.float32) < measure.memory(device)

    def __str__(self):
        return f"{self.rows}, B={self.B}, m={self.m}, V={self.V:,}"


SHORT = [
    *(Case(PROBS, *size) for size in ((8, 4, 32_000), (1, 4, 151_936), (8, 4, 151_936))),
    *(Case(LOGITS, *size) for size in ((1, 5, 32_000), (1, 5, 151_936), (8, 5, 151_936))),
]
SHORT_ON_GPU = [Case(rows, B, 4, 151_936) for rows in (PROBS, LOGITS) for B in (64, 256)]
FULL = [Case(*size) for size in itertools.product((PROBS, LOGITS), BATCH_SIZES, DRAFTED, VOCAB_SIZES)]


def batch(case, dtype=torch.float32, device="cpu", sampling=None):
    """Rows of a target and of a draft that resembles it, [B, m + 1, V] and [B, m, V], and ids [B, m] drawn from the draft.

    sampling: a `Sampling` of numbers by which the ids are drawn; the rows are the same.
    """
    B, m, V = case.B, case.m, case.V
    generator = torch.Generator(device).manual_seed(0)
    target = 3 * torch.randn(B, m + 1, V, generator=generator, device=device)
    draft = target[:, :m] + torch.randn(B, m, V, generator=generator, device=device)
    probs = (draft if sampling is None else truncate(draft, sampling)).softmax(-1)
    ids = torch.multinomial(probs.view(-1, V), 1, generator=generator).view(B, m)
    if case.rows == PROBS:
        target, draft = target.softmax(-1), probs
    return target.to(dtype), draft.to(dtype), ids


def ways(case, dtype=torch.float32, device="cpu", rotate=False, sampling=None) -> dict:
    """The calls to be timed, by name: ours, then the peers that are installed and take such rows.

    rotate: whether each call gets other inputs, enough of them to be out of the GPU's cache by their next turn.
    sampling: with rows of logits, a `Sampling` of numbers. Peers get the draft's rows truncated, and the target's are truncated
        by transformers' processors as a part of their calls.
    """
    device = torch.device(device)
    target, draft, ids = batch(case, dtype, device, sampling)
    copies = measure.rotations(case.needed(dtype), case.size(dtype), device) if rotate else 1

    def rotated(call, *tensors):
        rows = [tensors]
        if copies > 1:
            rows = list(zip(*(x.expand(copies, *x.shape).clone() for x in tensors), strict=True))
        turn = itertools.count()
        return lambda: call(*rows[next(turn) % copies])

    calls = {OURS[case.rows]: rotated(_ours(case, ids, draft, sampling), target, draft)}
    if sampling is not None:
        draft = truncate(draft, sampling)
    for peer in PEERS:
        if not peer.is_installed or (case.rows == PROBS and peer.target == LOGITS):
            continue
        call, of_draft, of_target = peer.make(ids, DELTA if case.rows == PROBS else 0.0), draft, target
        if case.rows == PROBS:
            of_target, of_draft = target.float(), draft.float()
        else:
            of_draft = draft.softmax(-1, dtype=torch.float32) if peer.draft == PROBS else draft
            call = _after_softmax(call) if peer.target == PROBS else call
            call = call if sampling is None else _after_truncation(call, sampling)
        calls[peer.name] = rotated(call, of_target, of_draft)
    return calls


def _after_softmax(call):
    return lambda target, draft: call(target.softmax(-1, dtype=torch.float32), draft)


def _after_truncation(call, sampling):
    return lambda target, draft: call(truncate(target, sampling), draft)


def _ours(case, ids, draft, sampling=None):
    """Our call, of target and draft rows. On a GPU as engines make it, with memory of its own (docs/engine.md)."""
    offset = itertools.count(0, case.m + 1)
    own = _own(case, ids.device) if ids.device.type == "cuda" else {}
    if case.rows == PROBS:
        return lambda target, draft: verify(target, draft, ids, Cactus(DELTA), seed=0, offset=next(offset), **own)
    stats = RowStats(row_stats(draft.flatten(0, 1), sampling=sampling).packed.view(case.B, case.m, -1))
    return lambda target, draft: verify_from_logits(
        target, draft, ids, SpS(), seed=0, offset=next(offset), sampling=sampling, draft_stats=stats, **own
    )


def _own(case, device):
    """`out` and `scratch` of a call."""

    B, m = case.B, case.m
    out = VerifyOutput(
        torch.empty(B, m + 1, dtype=torch.int64, device=device), torch.empty(B, dtype=torch.int32, device=device),
        torch.empty(B, dtype=torch.bool, device=device),
    )  # fmt: skip
    if case.rows == PROBS:
        return {"out": out, "scratch": new_scratch(B, case.V, device)}
    return {"out": out, "scratch": new_scratch(B, case.V, device, rows=2 * m + 1)}


def _own_bytes(case) -> int:
    held = [
        x for owner in _own(case, "meta").values() for x in (vars(owner).values() if is_dataclass(owner) else [owner])
    ]
    return sum(x.nbytes for x in held if x is not None)


def run(cases, dtype, device, rounds=11, progress=lambda text: None) -> dict:
    """Measure; a report for `table`, ready for JSON."""
    on_gpu = device.type == "cuda"
    lines, skipped = [], [case for case in cases if not case.fits(dtype, device)]
    cases = [case for case in cases if case not in skipped]
    report = {
        "benchmark": "verify", "environment": describe_environment(), "device": str(device), "threads": torch.get_num_threads(),
        "dtype": str(dtype).removeprefix("torch."), "delta": DELTA, "copy_bytes_a_second": measure.copy_bandwidth(device),
        "two_empty_launches_seconds": measure.two_empty_launches() if on_gpu else None,
        "not_installed": [peer.name for peer in PEERS if not peer.is_installed], "do_not_fit": [str(c) for c in skipped],
    }  # fmt: skip
    for case in cases:
        progress(str(case))
        calls, errors = _working(case, ways(case, dtype, device, rotate=on_gpu))
        if on_gpu:
            costs = {name: measure.on_gpu(call) for name, call in calls.items()}
            ours = costs[OURS[case.rows]]
            costs[OURS[case.rows]] = replace(ours, temporaries=ours.temporaries + _own_bytes(case))
        else:
            costs = {name: measure.Cost(seconds) for name, seconds in measure.medians(calls, rounds).items()}
        needed = case.needed(dtype, _accepted_whole(case, calls[OURS[case.rows]]))
        for name in (*calls, *errors):
            lines.append(_line(case, name, needed, report, costs.get(name), costs[OURS[case.rows]], errors.get(name)))
        del calls
    for case in cases if on_gpu else ():
        calls, _ = _working(case, ways(case, dtype, device))
        for line in lines:
            if line["case"] == asdict(case) and line["way"] in calls:
                line["launches"] = measure.launches(calls[line["way"]])
    return report | {"results": lines}


def _working(case, calls):
    """The calls that run, and of the peers among the others what they raised, by name."""
    errors = {}
    for name, call in calls.items():
        try:
            call()
        except Exception as error:  # a peer's release may not be the one that its call was written for
            if name == OURS[case.rows]:
                raise
            errors[name] = f"{type(error).__name__}: {error}"
    return {name: call for name, call in calls.items() if name not in errors}, errors


def _accepted_whole(case, call, calls=16) -> float:
    """The share of requests whose drafts our call accepts whole."""
    return sum((call().num_accepted == case.m).float().mean().item() for _ in range(calls)) / calls


def _line(case, way, needed, report, cost, ours, error):
    """What was measured of one way in one case: a dict for JSON."""
    line = {"case": asdict(case), "way": way, "error": error, "launches": None, "needed_bytes": needed}
    if cost is None:
        return line
    share = needed / cost.seconds / report["copy_bytes_a_second"]
    return line | asdict(cost) | {"of_ours": cost.seconds / ours.seconds, "of_copy_bandwidth": share}


def main(arguments=None):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--short", action="store_true", help="a handful of sizes (the default)")
    which.add_argument("--full", action="store_true", help="all sizes that fit in memory")
    parser.add_argument("--device", help="cuda or cpu; cuda where there is a GPU")
    parser.add_argument("--dtype", choices=DTYPES, help="of the rows; bf16 on a GPU, fp32 on a CPU")
    parser.add_argument("--rounds", type=int, default=11, help="on a CPU, after one to warm up")
    parser.add_argument("--plot", metavar="FILE", help=".png or .svg (needs the plot extra)")
    parser.add_argument("--json", metavar="FILE", help="for the last line, too")
    args = parser.parse_args(arguments)
    device = torch.device(args.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    try:
        if args.plot:
            check_plot(args.plot)
        for file in filter(None, (args.plot, args.json)):
            check_writable(file)
        if device.type == "cuda" and not torch.cuda.is_available():
            raise ValueError("there is no GPU: leave --device out")
    except (ValueError, ImportError) as error:
        parser.error(str(error))
    on_gpu = device.type == "cuda"
    cases = FULL if args.full else SHORT + SHORT_ON_GPU * on_gpu
    dtype = DTYPES[args.dtype or ("bf16" if on_gpu else "fp32")]
    report = run(cases, dtype, device, args.rounds, lambda text: print(text, file=sys.stderr, flush=True))
    console = Console(width=None if sys.stdout.isatty() else 150)
    console.print(table(report), *notes(report), sep="\n")
    line = json.dumps(report)
    if args.json:
        with replacing(args.json) as file:
            file.write(line.encode() + b"\n")
    if args.plot:
        with replacing(args.plot) as file:
            plot(report, file, args.plot)
    print(line)


if __name__ == "__main__":
    main()

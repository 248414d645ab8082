"""On a GPU: every kernel held to the torch reference, calls in a CUDA graph, and the short benchmark of verification.

    python benchmarks/gpu_check.py                                   # on the current GPU, within five minutes
    TRITON_INTERPRET=1 python benchmarks/gpu_check.py --rehearse     # the same code in the interpreter, a few small cases

What is compared with what is said in gpu_parity, what is measured and how in bench_verify. Writes what it prints to
benchmarks/results/gpu-DEVICE.txt and everything to .json beside it. Exit status: 0, 1 if anything differs, 2 if it cannot run.
"""

import argparse
import io
import json
import os
import re
import shutil
import subprocess
import sys
import time
from dataclasses import asdict
from functools import partial
from pathlib import Path

import gpu_parity  # finds the package beside this folder, so before it
import torch
from bench_verify import PROBS, SHORT, SHORT_ON_GPU, Case
from bench_verify import run as benchmark
from peers import LOGITS
from rich.console import Console
from rich.table import Table
from verify_report import notes, table

from cactus_kernels import Cactus, SampleOutput, Sampling, VerifyOutput, new_scratch, sample, verify, verify_from_logits
from cactus_kernels.tools.environment import describe_environment
from cactus_kernels.tools.files import check_writable, replacing

RESULTS = Path(__file__).parent / "results"
REHEARSED = [Case(PROBS, 2, 2, 1500), Case(LOGITS, 2, 2, 1500)]
WIDTH = 150


def driver() -> str:
    """Version of the GPU's driver."""
    if shutil.which("nvidia-smi") is None:
        return "unknown"
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split("\n")[0].strip()


def captured(call):
    """What replays a call as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    return graph.replay


def replayed(device, capture, V, rounds) -> list[str]:
    """What differs, in words, between calls with `out` and scratch of their own as `capture` makes them, replayed on inputs that
    change in place, and the same calls made anew."""

    B, m = 3, 2
    generator = torch.Generator(device).manual_seed(0)
    logits = 3 * torch.randn(B, m + 1, V, generator=generator, device=device)
    draft = logits[:, :m] + torch.randn(B, m, V, generator=generator, device=device)
    ids = torch.multinomial(draft.softmax(-1).view(-1, V), 1, generator=generator).view(B, m)
    q, p = logits.softmax(-1), draft.softmax(-1)
    seed, offset = torch.arange(B, device=device), torch.zeros(B, dtype=torch.int64, device=device)
    settings = Sampling(
        torch.tensor([0.7, 1.0, 0.0], device=device), torch.tensor([20, 0, 0], dtype=torch.int32, device=device),
        torch.tensor([0.95, 1.0, 1.0], device=device), torch.tensor([0.0, 0.05, 0.0], device=device),
    )  # fmt: skip
    stream = {"seed": seed, "offset": offset, "backend": "triton"}
    calls = {
        "verify": (lambda **own: verify(q, p, ids, Cactus(0.5), **stream, **own), new_scratch(B, V, device)),
        "verify_from_logits": (
            lambda **own: verify_from_logits(
                logits, draft, ids, Cactus(0.5), sampling=settings, draft_sampling=Sampling(), **stream, **own
            ),
            new_scratch(B, V, device, rows=2 * m + 1),
        ),
        "sample": (
            lambda **own: sample(logits[:, 0], sampling=settings, **stream, **own),
            new_scratch(B, V, device),
        ),
    }
    found = []
    for name, (call, scratch) in calls.items():
        out = call()  # compiles
        replay = capture(partial(call, out=out, scratch=scratch))
        for i in range(rounds):
            offset += m + 1
            for rows in (logits, draft, q, p, ids):
                rows.copy_(rows.roll(1, 0))
            _poison(out)
            replay()
            found += [f"{name} in round {i}"] * (_tokens(out) != _tokens(call()))
    return found


def _poison(out):
    out.token_ids.fill_(-77)
    if isinstance(out, VerifyOutput):
        out.num_accepted.fill_(-77)
        out.valid.fill_(False)


def _tokens(out):
    kept = [out.probs] if isinstance(out, SampleOutput) else [out.num_accepted, out.valid]
    return [x.tolist() for x in (out.token_ids, *kept)]


def parity_table(tallies) -> Table:
    shown = Table("against the reference or a plain account", "cases", "near-ties", "result")
    for tally in tallies:
        cases = (
            f"{tally.done}" if tally.done == tally.planned else f"{tally.done} of {tally.planned}, the time was over"
        )
        shown.add_row(tally.name, cases, str(tally.near_ties), "FAILED" if tally.failure else "as it should be")
    return shown


class Results:
    """What is printed goes to a text file, too, and the figures to a JSON file, whole each time."""

    def __init__(self, path):
        self.path, self.text, self.figures = path, io.StringIO(), {}
        self.consoles = Console(width=WIDTH), Console(width=WIDTH, file=self.text)

    def add(self, name, figures, *shown):
        for console in self.consoles:
            console.print(*shown, sep="\n", highlight=False, markup=False)
        self.figures[name] = figures
        text = "".join(f"{line.rstrip()}\n" for line in self.text.getvalue().splitlines())
        for suffix, content in ((".txt", text), (".json", json.dumps(self.figures, indent=1) + "\n")):
            with replacing(f"{self.path}{suffix}") as file:
                file.write(content.encode())


def main(arguments=None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", help="path of the results without .txt and .json; default benchmarks/results/gpu-DEVICE"
    )
    parser.add_argument("--rehearse", action="store_true", help="in Triton's interpreter, on the CPU")
    parser.add_argument(
        "--seconds", type=float, default=120, help="for parity: no case is begun after that (default 120)"
    )
    parser.add_argument(
        "--workers", type=int, help="processes that compile and compare (default: one a core, at most 16)"
    )
    args = parser.parse_args(arguments)
    interpreted = os.environ.get("TRITON_INTERPRET") == "1"
    if not args.rehearse and (interpreted or not torch.cuda.is_available()):
        why = "TRITON_INTERPRET=1 is set: unset it" if interpreted else "there is no GPU that torch can use"
        print(f"{why}. To rehearse without a GPU: TRITON_INTERPRET=1 python {sys.argv[0]} --rehearse", file=sys.stderr)
        return 2
    if args.rehearse and not interpreted:
        print("--rehearse needs Triton's interpreter: set TRITON_INTERPRET=1", file=sys.stderr)
        return 2
    device = torch.device("cpu" if args.rehearse else "cuda")
    workers = args.workers or (1 if args.rehearse else min(os.cpu_count(), 16))
    name = "rehearsal" if args.rehearse else torch.cuda.get_device_name()
    out = args.out or str(RESULTS / f"gpu-{re.sub(r'[^a-z0-9]+', '-', name.lower())}")
    try:
        check_writable(f"{out}.txt")
    except ValueError as error:
        parser.error(str(error))
    results, start = Results(out), time.perf_counter()

    found = describe_environment() | {"device": name, "driver": "none" if args.rehearse else driver()}
    versions = ", ".join(f"{key} {found[key]}" for key in ("driver", "torch", "triton", "transformers", "python"))
    results.add("environment", found, f"{name}: {versions}", f"cactus_kernels {found['cactus_kernels']}")

    tallies = gpu_parity.run(str(device), args.seconds, workers, args.rehearse)
    failures = [f"{tally.name}: {tally.failure}" for tally in tallies if tally.failure]
    seconds = f"Parity took {time.perf_counter() - start:.0f} s with {workers} processes."
    results.add("parity", [asdict(tally) for tally in tallies], parity_table(tallies), *failures, seconds)

    way = (lambda call: call, 300, 1) if args.rehearse else (captured, 9000, 4)
    differences = replayed(device, *way)
    failures += differences
    verdict = f"are not the same as others: {', '.join(differences)}" if differences else "are the same as others"
    graph = "Called again" if args.rehearse else "In a CUDA graph"
    results.add("graph", differences, f"{graph}, with memory of their own: calls {verdict}.")

    cases, dtype = (REHEARSED, torch.float32) if args.rehearse else (SHORT + SHORT_ON_GPU, torch.bfloat16)
    report = benchmark(cases, dtype, device, rounds=1)
    results.add("benchmark", report, table(report), *notes(report))
    seconds = time.perf_counter() - start
    results.add("seconds", seconds, f"{'FAILED' if failures else 'Passed'}; {seconds:.0f} s.")
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())

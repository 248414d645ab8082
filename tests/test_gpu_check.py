"""The check for GPUs, rehearsed in the interpreter, and the benchmark that it ends with."""

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

race_triton = pytest.importorskip("cactus_kernels.kernels.race")
sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))

import bench_verify  # noqa: E402 (found on the path above)
import gpu_check  # noqa: E402
import gpu_parity  # noqa: E402
import measure  # noqa: E402
import peers  # noqa: E402

pytestmark = [
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
    pytest.mark.skipif(not race_triton.INTERPRETED, reason="rehearses in the interpreter"),
]


@pytest.fixture
def rehearse(tmp_path, monkeypatch):
    """A function: exit status, text and figures of a rehearsal."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)

    def run():
        status = gpu_check.main(["--rehearse", "--out", str(tmp_path / "found")])
        assert {file.name for file in tmp_path.iterdir()} == {"found.txt", "found.json"}
        return status, (tmp_path / "found.txt").read_text(), json.loads((tmp_path / "found.json").read_text())

    return run


def test_a_rehearsal_passes_and_is_written_down(rehearse):
    status, text, figures = rehearse()
    assert status == 0 and "Passed" in text
    assert {t["name"]: t["done"] for t in figures["parity"]} == {
        k.name: k.rehearsed for k in gpu_parity.KINDS if k.rehearsed
    }
    assert figures["graph"] == []
    ways = {line["way"] for line in figures["benchmark"]["results"] if line["error"] is None}
    assert ways >= {"verify", "verify_from_logits", "dense torch", "transformers"}


def breaks(number, device):
    raise ZeroDivisionError("as meant")


@pytest.mark.parametrize(
    ("case", "says"),
    [
        (lambda number, device: ("other bits", False), "3 differ; case 0: other bits"),
        (breaks, "ZeroDivisionError: as meant"),
        (lambda number, device: (None, True), "nearly all are near-ties"),
    ],
    ids=["differs", "raises", "shows nothing"],
)
def test_what_is_wrong_fails_the_check(case, says, rehearse, monkeypatch):
    monkeypatch.setattr(gpu_parity, "KINDS", (gpu_parity.Kind("a kind", 3, 12 if "near" in says else 3, case),))
    monkeypatch.setattr(gpu_check, "replayed", lambda *args: [])
    status, text, _ = rehearse()
    assert status == 1 and "FAILED" in text and says in text


def test_a_replay_that_does_nothing_is_seen():
    found = gpu_check.replayed(torch.device("cpu"), lambda call: lambda: None, 300, 1)
    assert found == [f"{name} in round 0" for name in ("verify", "verify_from_logits", "sample")]


def test_without_a_gpu_or_an_interpreter_it_says_so(monkeypatch, capsys):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert gpu_check.main([]) == 2 and "unset it" in capsys.readouterr().err
    monkeypatch.delenv("TRITON_INTERPRET")
    assert gpu_check.main([]) == 2 and "there is no GPU" in capsys.readouterr().err
    assert gpu_check.main(["--rehearse"]) == 2 and "set TRITON_INTERPRET=1" in capsys.readouterr().err


@pytest.mark.parametrize("peer", [peer for peer in peers.PEERS if peer.is_installed], ids=lambda peer: peer.name)
def test_peers_make_their_tensors_where_the_rows_are(peer):
    """A tensor made without a device would land on "meta" here, as it would on the CPU beside a GPU."""
    target, draft, ids = bench_verify.batch(bench_verify.Case(peers.LOGITS, 2, 3, 40))
    target = target.softmax(-1) if peer.target == peers.PROBS else target
    draft = draft.softmax(-1) if peer.draft == peers.PROBS else draft
    with torch.device("meta"):
        peer.make(ids, 0.05)(target, draft)


def test_bytes_needed_and_held():
    probs, logits = bench_verify.Case(peers.PROBS, 8, 4, 1000), bench_verify.Case(peers.LOGITS, 8, 4, 1000)
    assert probs.needed(torch.bfloat16) == 8 * 2 * 1000 * 2
    assert logits.needed(torch.float32) == 8 * (4 + 3) * 1000 * 4
    outputs = 8 * (5 * 8 + 4 + 1)
    assert bench_verify._own_bytes(probs) == outputs + (2 * 8 + 8) * 8 + 8 * 2 * 4 + 8 * 8 * 4
    assert bench_verify._own_bytes(logits) == outputs + (2 * 8 + 72) * 8 + 72 * 2 * 4 + 72 * 8 * 4


def test_calls_in_a_row_get_other_inputs(monkeypatch):
    """A cache of 12 kB, 1.6 kB to be read by every call: 23 copies outlast three caches."""
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(L2_cache_size=12_000))
    monkeypatch.setattr(measure, "memory", lambda device: 2**30)
    case = bench_verify.Case(peers.PROBS, 2, 1, 100)
    copies = measure.rotations(case.needed(torch.float32), case.size(torch.float32), torch.device("cuda"))
    assert copies == 23
    monkeypatch.setattr(measure, "rotations", lambda *args: copies)
    seen = []
    recorder = peers.Peer(
        "recorder", "torch", peers.PROBS, peers.PROBS, lambda ids, delta: lambda *rows: seen.append(rows)
    )
    monkeypatch.setattr(bench_verify, "PEERS", (recorder,))
    call = bench_verify.ways(case, rotate=True)["recorder"]
    for _ in range(copies + 1):
        call()
    places = [tuple(x.data_ptr() for x in rows) for rows in seen]
    assert len(set(places)) == copies and places[0] == places[copies]
    assert all(torch.equal(a, b) for a, b in zip(seen[0], seen[1], strict=True))


def test_a_peer_that_raises_is_a_line_of_its_own(monkeypatch):
    monkeypatch.setattr(measure, "copy_bandwidth", lambda device: 1e10)
    broken = peers.Peer("broken", "torch", peers.PROBS, peers.PROBS, lambda ids, delta: breaks)
    monkeypatch.setattr(bench_verify, "PEERS", (broken,))
    report = bench_verify.run([bench_verify.Case(peers.PROBS, 1, 1, 9)], torch.float32, torch.device("cpu"), rounds=1)
    assert [(x["way"], x["error"]) for x in report["results"]] == [
        ("verify", None), ("broken", "ZeroDivisionError: as meant")
    ]  # fmt: skip


def test_a_plot_without_matplotlib_is_refused(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit):
        bench_verify.main(["--plot", "times.png"])
    assert "a plot needs matplotlib: pip install matplotlib" in capsys.readouterr().err

"""What bench_verify.py and bench_generate.py measure, as tables by pytest-benchmark: `pytest benchmarks/bench_tables.py`.

It needs the extra `bench` (`pip install ".[bench]"`), which they do not.
"""

import bench_generate
import bench_verify
import peers
import pytest


@pytest.mark.parametrize("case", bench_verify.SHORT, ids=str)
@pytest.mark.parametrize("way", [*bench_verify.OURS.values(), *(peer.name for peer in peers.PEERS)])
def test_verify(benchmark, way, case):
    calls = bench_verify.ways(case)
    if way not in calls:
        pytest.skip("not for such rows, or not installed")
    benchmark.group = str(case)
    benchmark(calls[way])


@pytest.fixture(scope="module")
def models():
    target, draft = bench_generate.pair()
    return target, draft, [bench_generate.ForwardTimer(target), bench_generate.ForwardTimer(draft)]


@pytest.mark.parametrize("way", bench_generate.WAYS)
def test_generate(benchmark, models, way):
    benchmark.group = f"whole generation, V={bench_generate.V}, m={bench_generate.M}, forward passes included"
    benchmark.pedantic(bench_generate.outside_forwards, args=(way, *models, 0), rounds=5, warmup_rounds=1)

"""What bench_generate.py measures, as a table by pytest-benchmark: `pytest benchmarks/bench_tables.py`.

It needs the extra `bench` (`pip install ".[bench]"`), which bench_generate.py does not. Microbenchmarks are in test_kernels.py.
"""

import bench_generate
import pytest


@pytest.fixture(scope="module")
def models():
    target, draft = bench_generate.pair()
    return target, draft, [bench_generate.ForwardTimer(target), bench_generate.ForwardTimer(draft)]


@pytest.mark.parametrize("way", bench_generate.WAYS)
def test_generate(benchmark, models, way):
    benchmark.group = f"whole generation, V={bench_generate.V}, m={bench_generate.M}, forward passes included"
    benchmark.pedantic(bench_generate.outside_forwards, args=(way, *models, 0), rounds=5, warmup_rounds=1)

"""Options of the microbenchmarks in `test_kernels.py`."""

import argparse

import torch
from bench_verify import DTYPES

ON_GPU = torch.cuda.is_available()


def positive(text):
    values = [int(x) if x.isdecimal() else 0 for x in text.split(",")]
    if not all(values):
        raise argparse.ArgumentTypeError(f"takes positive integers with commas between them, got {text!r}")
    return values


def dtypes(text):
    if not set(text.split(",")) <= set(DTYPES):
        raise argparse.ArgumentTypeError(f"takes {', '.join(DTYPES)} with commas between them, got {text!r}")
    return text.split(",")


SIZES = {  # the last varies fastest
    "dtype": (dtypes, "bf16" if ON_GPU else "fp32", f"of the rows: {', '.join(DTYPES)}"),
    "V": (positive, "151936" if ON_GPU else "32000", "sizes of the vocabulary"),
    "m": (positive, "4", "drafted tokens of each request"),
    "B": (positive, "1,64" if ON_GPU else "1,8", "requests"),
}


def pytest_addoption(parser):
    group = parser.getgroup("cactus_kernels", "microbenchmarks: lists with commas, of which each is taken with each")
    for name, (values, default, meaning) in SIZES.items():
        group.addoption(f"--{name}", type=values, default=default, metavar="LIST", help=f"{meaning} ({default})")


def pytest_generate_tests(metafunc):
    for name in SIZES:
        if name in metafunc.fixturenames:
            metafunc.parametrize(name, metafunc.config.getoption(f"--{name}"), ids=lambda x, name=name: f"{name}={x}")
    if hasattr(metafunc.module, "WAYS"):
        metafunc.parametrize("way", metafunc.module.WAYS[metafunc.function.__name__])

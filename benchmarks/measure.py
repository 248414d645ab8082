"""What a call costs: its time on the device and on the host, its launches, its temporaries; and how fast the device copies."""

import os
import statistics
import time
from dataclasses import dataclass

import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

REPEATS = 5
MOST_CALLS = 32  # in a row: a stream takes about a thousand launches before the host has to wait
LONGEST = 0.05  # seconds of calls in a row
CLOCK = 3e9  # cycles a second, at least the device's


@dataclass(frozen=True)
class Cost:
    """Medians for one call.

    Attributes:
        seconds: on a GPU between device events, on a CPU by the wall clock.
        host_seconds: until the call has been issued; None on a CPU.
        temporaries: most bytes that the call allocated and had at once, what it returned among them; None on a CPU.
    """

    seconds: float
    host_seconds: float | None = None
    temporaries: int | None = None


def medians(calls, rounds) -> dict:
    """Median seconds on the wall clock of each of a dict of calls, measured in turn after one warm-up."""
    seconds = {name: [] for name in calls}
    for i in range(rounds + 1):
        for name, call in calls.items():
            start = time.perf_counter()
            call()
            if i:
                seconds[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in seconds.items()}


def on_gpu(call) -> Cost:
    """The cost of a call on the current GPU. It should take other inputs each time, else the cache has them.

    The device's time is that of calls one after another, all issued while the device is kept waiting, so that it does not
    wait for the host; of a call that itself waits for the device it holds the host's time too.
    """
    for _ in range(3):
        call()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    call()
    torch.cuda.synchronize()
    temporaries = torch.cuda.max_memory_allocated() - before
    start = time.perf_counter()
    call()
    torch.cuda.synchronize()
    count = max(1, min(MOST_CALLS, int(LONGEST / (time.perf_counter() - start))))
    host = statistics.median(_host_seconds(call, count) for _ in range(REPEATS))
    seconds = statistics.median(_device_seconds(call, count, host) for _ in range(REPEATS))
    return Cost(seconds, host, temporaries)


def _host_seconds(call, count):
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(count):
        call()
    return (time.perf_counter() - start) / count


def _device_seconds(call, count, host):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    torch.cuda._sleep(int(CLOCK * (1.5 * host * count + 1e-4)))
    start.record()
    for _ in range(count):
        call()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / count


def launches(call) -> int | None:
    """Kernels, copies and fills of a call on the GPU, as the profiler saw them; None if it saw none.

    Count after all that is timed: once the profiler has run, the host takes longer to launch.
    """
    call()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return sum(event.device_type == DeviceType.CUDA for event in profiler.events()) or None


def two_empty_launches() -> float:
    """Seconds on the device of two launches that do nothing: what a call of two launches cannot be faster than."""

    def call():
        torch.cuda._sleep(0)
        torch.cuda._sleep(0)

    return on_gpu(call).seconds


def copy_bandwidth(device) -> float:
    """Bytes a second, read and written, of a copy far larger than any cache."""
    size = 2**30 if device.type == "cuda" else 2**28
    source = torch.rand(size // 4, device=device)
    target = torch.empty_like(source)

    def call():
        target.copy_(source)

    seconds = on_gpu(call).seconds if device.type == "cuda" else medians({"copy": call}, REPEATS)["copy"]
    return 2 * size / seconds


def memory(device) -> int:
    """Bytes that a benchmark may take: what is free on a GPU, half of what the machine has on a CPU."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def rotations(needed, size, device) -> int:
    """How many copies of inputs of `size` bytes, `needed` of which are read, let none be read from the GPU's cache."""
    if device.type != "cuda":
        return 1
    cache = torch.cuda.get_device_properties(device).L2_cache_size
    return max(1, min(-(-3 * cache // needed), memory(device) // 8 // size))

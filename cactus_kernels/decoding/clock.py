"""How long the parts of a round take."""

import time
from contextlib import contextmanager

import torch


class Clock:
    """Seconds spent under each name, without waiting for the device until they are asked for."""

    def __init__(self, device):
        self.cuda = device.type == "cuda"
        self.spans = {}

    def _now(self):
        if not self.cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    @contextmanager
    def time(self, name):
        start = self._now()
        yield
        self.spans.setdefault(name, []).append((start, self._now()))

    def seconds(self, name):
        if not self.cuda:
            return sum(end - start for start, end in self.spans.get(name, ()))
        torch.cuda.synchronize()
        return sum(start.elapsed_time(end) for start, end in self.spans.get(name, ())) / 1000

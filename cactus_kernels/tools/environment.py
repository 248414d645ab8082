"""What the package finds here: versions, devices, and the backend that verification takes on each."""

import platform
from importlib import import_module

import torch
import transformers

from . import __version__
from .inputs import choose_backend


def environment() -> dict:
    """Versions (triton's None if it is not installed) and, for each device, its name, backend and why; ready for JSON."""
    try:
        triton = import_module("triton").__version__
    except ImportError:
        triton = None
    return {
        "cactus_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "transformers": transformers.__version__,
        "devices": [_describe(device, triton) for device in _devices()],
    }


def default_backend(device: torch.device) -> str | None:
    """The backend that verification takes on a device; None where it would raise."""
    try:
        return choose_backend(None, device)
    except RuntimeError:
        return None


def is_triton_usable(device: torch.device) -> bool:
    """Whether `backend="triton"` can be had on a device: a GPU, or the CPU in the interpreter."""
    try:
        choose_backend("triton", device)
    except RuntimeError:
        return False
    return True


def _devices():
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _describe(device, triton):
    if device.type == "cpu":
        threads = torch.get_num_threads()
        name = f"{platform.machine()}, {threads} thread{'s' * (threads > 1)}"
        if triton is None:
            why = "triton is not installed"
        elif is_triton_usable(device):
            why = f"triton {triton} runs here in the interpreter, where backend='triton' asks for it: slow, for tests"
        else:
            why = f"triton {triton} is installed and would run here in the interpreter only, with TRITON_INTERPRET=1"
        if not torch.cuda.is_available():
            why = f"no GPU; {why}"
    else:
        properties = torch.cuda.get_device_properties(device)
        name = f"{properties.name}, {properties.total_memory / 2**30:.0f} GiB"
        why = f"a GPU, and triton {triton}" if triton else "a GPU, but triton is not installed: pass backend='torch'"
    return {"device": str(device), "name": name, "backend": default_backend(device), "why": why}

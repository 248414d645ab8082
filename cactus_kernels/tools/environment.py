"""What the package finds here: versions, devices, and the backend that verification takes on each."""

import platform
from importlib import import_module, metadata

import torch

from .. import __version__
from ..backends import choose_backend


def describe_environment() -> dict:
    """Versions (None for triton or transformers where it is not installed) and, for each device, its name, backend and why;
    ready for JSON."""
    try:
        triton = import_module("triton").__version__  # its distribution is not called triton everywhere
    except ImportError:
        triton = None
    return {
        "cactus_kernels": __version__,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "transformers": _transformers_version(),
        "devices": [_describe(device, triton) for device in _devices()],
    }


def find_device(name: str | None) -> torch.device:
    """The device of that name; None: a GPU where there is one. Raises ValueError where it cannot be had."""
    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, _, index = name.partition(":")
    if kind == "mps":
        raise ValueError(f"device {name} is not supported: use --device cpu")
    if kind not in ("cpu", "cuda") or (index and not index.isdecimal()):
        raise ValueError(f"device must be cpu, cuda or cuda:0, cuda:1, ..., got {name!r}")
    if kind == "cuda" and int(index or 0) >= torch.cuda.device_count():
        raise ValueError(f"device {name} is not there: torch sees {torch.cuda.device_count()} GPUs; use --device cpu")
    return torch.device(name)


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


def _transformers_version() -> str | None:
    # Read, not imported: that takes seconds.
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return None


def _devices() -> list[torch.device]:
    return [torch.device("cpu"), *(torch.device("cuda", i) for i in range(torch.cuda.device_count()))]


def _describe(device: torch.device, triton: str | None) -> dict[str, str | None]:
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

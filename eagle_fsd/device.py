"""Devices: the only file that names accelerators."""

from __future__ import annotations

import platform
from pathlib import Path

import psutil
import torch

_GROUP = Path("/sys/fs/cgroup")


def resolve_device(device: str | torch.device = "auto") -> torch.device:
    """Turns "auto" or a device name into a device that is there.

    Raises:
        ValueError: for a name that torch does not know.
        RuntimeError: for a device that this machine does not have.
    """
    if device == "auto":
        if torch.cuda.is_available():
            return torch.device("cuda")
        return torch.device("mps" if torch.backends.mps.is_available() else "cpu")
    try:
        resolved = torch.device(device)
    except (RuntimeError, TypeError) as error:
        raise ValueError(
            f"unknown device {device!r}; use auto, cpu, cuda, cuda:N or mps"
        ) from error
    if resolved.type == "cuda" and (resolved.index or 0) >= torch.cuda.device_count():
        count = torch.cuda.device_count()
        raise RuntimeError(
            f"device {str(device)!r} requested but torch sees {count} CUDA devices; use cpu or auto"
        )
    if resolved.type == "mps" and not torch.backends.mps.is_available():
        raise RuntimeError("device 'mps' requested but torch sees none; use cpu or auto")
    if resolved.type not in ("cpu", "cuda", "mps"):
        raise ValueError(f"unsupported device {str(device)!r}; use auto, cpu, cuda, cuda:N or mps")
    return resolved


def synchronize(device: torch.device) -> None:
    """Waits until the device is done, so that a clock read means something."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    elif device.type == "mps":
        torch.mps.synchronize()


def supports_float64(device: torch.device) -> bool:
    """Whether tensors of float64 exist there."""
    return device.type != "mps"


def peak_memory_bytes(device: torch.device) -> int:
    """The most memory held so far: on the accelerator, or by the process on a CPU."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    import resource
    import sys

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def available_bytes() -> int:
    """Memory that the process can still take: the machine's, or what its control group leaves."""
    machine = int(psutil.virtual_memory().available)
    try:  # of a container, whose own group is mounted there
        limit = int(_GROUP.joinpath("memory.max").read_text(encoding="ascii"))
        used = int(_GROUP.joinpath("memory.current").read_text(encoding="ascii"))
    except (OSError, ValueError):  # no such group, or no limit: "max"
        return machine
    return min(machine, max(0, limit - used))


def device_name(device: torch.device) -> str:
    """What the processor or the accelerator is called."""
    if device.type == "cpu":
        facts = Path("/proc/cpuinfo")  # Linux tells the model there, other systems to `platform`
        lines = facts.read_text(encoding="utf-8").splitlines() if facts.is_file() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        return names[0] if names else platform.processor() or platform.machine()
    name = getattr(torch.get_device_module(device), "get_device_name", None)
    return device.type if name is None else str(name(device))

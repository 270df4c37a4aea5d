"""What a figure was measured with: machine, versions, commit. Kept beside every result."""

from __future__ import annotations

import os
import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import transformers

import eagle_fsd
from eagle_fsd.device import device_name
from eagle_fsd.target import Target, TargetModel

_PACKAGE = Path(eagle_fsd.__file__).resolve().parent
_GIT_TIMEOUT_S = 10


def environment(target: Target | None = None) -> dict[str, Any]:
    """The machine and the software, ready for JSON.

    Args:
        target: adds its device, the device's name and, of a transformers model, dtype,
            attention and whether weights are packed or passes compiled; without it they are None.

    Returns:
        "machine" {"system", "cpu", "num_cores", "num_threads" (torch's), "accelerator"}, "device",
        "dtype", "attention", "packed_weights", "compiled", "versions" {"python", "torch",
        "transformers", "eagle_fsd"} and "git_commit" (see `git_commit`).
    """
    device = None if target is None else target.output_device
    has_accelerator = device is not None and device.type != "cpu"
    model = target if isinstance(target, TargetModel) else None
    return {
        "machine": {
            "system": f"{platform.system()} {platform.machine()}",
            "cpu": device_name(torch.device("cpu")),
            "num_cores": os.cpu_count(),
            "num_threads": torch.get_num_threads(),
            "accelerator": device_name(device) if device and has_accelerator else None,
        },
        "device": None if device is None else str(device),
        "dtype": None if model is None else str(model.dtype).removeprefix("torch."),
        "attention": None if model is None else model.config._attn_implementation,
        "packed_weights": None if model is None else model.has_packed_weights,
        "compiled": None if model is None else model.is_compiled,
        "versions": {
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
            "eagle_fsd": eagle_fsd.__version__,
        },
        "git_commit": git_commit(),
    }


def git_commit(folder: Path = _PACKAGE) -> str | None:
    """The commit that a folder of code is checked out at, None where it is in no checkout.

    Args:
        folder: of tracked files; by default the package's own. An installed package inside another
            project's checkout is not tracked there and gives None.

    Returns:
        40 hexadecimal digits; "-dirty" is appended where tracked files differ from the commit.
    """
    if not _git(folder, "ls-files"):
        return None
    return _git(folder, "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*")


def _git(folder: Path, *arguments: str) -> str | None:
    """What git says, None where there is no git, no checkout or nothing to say."""
    try:
        answer = subprocess.run(
            ["git", *arguments],
            cwd=folder,
            capture_output=True,
            text=True,
            check=True,
            timeout=_GIT_TIMEOUT_S,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return answer.stdout.strip() or None

"""Profiles of machines, kept between runs."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

from offload.planning.profile import _FORMAT, _FORMATS, MachineProfile


def machine_key(device: torch.device, num_threads: int) -> dict[str, Any]:
    """What a profile of this machine must be for."""
    from cpu_ops.native import isa_name
    from offload.system.machine import cpu_model, nvidia_driver
    from offload.system.version import __version__

    gpu = driver = None
    if device.type == "cuda":
        import torch

        gpu, driver = torch.cuda.get_device_name(device), nvidia_driver()
    return {
        "cpu": cpu_model(),
        "isa": isa_name(),
        "num_threads": num_threads,
        "gpu": gpu,
        "driver": driver,
        "version": __version__,
    }


def profile_path(key: dict[str, Any]) -> Path:
    """Where the profile of a machine is kept."""
    from offload.system.cache_folder import cache_folder

    described = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    return cache_folder() / "profiles" / f"{key['num_threads']}-threads-{digest}.json"


def cached_profile(device: torch.device, num_threads: int) -> MachineProfile | None:
    """The profile of this machine that was measured before; None if there is none, or only one of
    a format that this version does not write any more.

    Raises:
        ValueError: a damaged file, or one that says that it is for another machine.
    """
    key = machine_key(device, num_threads)
    path = profile_path(key)
    if not path.is_file():
        return None
    if _is_of_other_format(path):
        return None
    profile = MachineProfile.load(path)
    if profile.key != key:
        different = ", ".join(
            f"{name} {value!r} instead of {key[name]!r}"
            for name, value in profile.key.items()
            if value != key[name]
        )
        raise ValueError(
            f"machine profile {path} is for another machine: {different}; measure again with "
            "`offload plan --remeasure`"
        )
    return profile


def _is_of_other_format(path: Path) -> bool:
    """Whether a file is a profile that another version of this module wrote."""
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return False  # damaged: loading says so
    found = document.get("format") if isinstance(document, dict) else None
    return isinstance(found, str) and found.startswith(_FORMATS) and found != _FORMAT


def store_profile(profile: MachineProfile) -> Path:
    """Keep a profile for `cached_profile`.

    Raises:
        PermissionError: the cache folder cannot be written to.
    """
    path = profile_path(profile.key)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        profile.save(path)
    except OSError as error:
        raise PermissionError(
            f"cannot write the machine profile to {path.parent} ({error.strerror}); "
            "set OFFLOAD_CACHE to a folder that can be written to"
        ) from error
    return path

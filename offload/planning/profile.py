"""What a machine was measured to do: the numbers that plans and predictions are made from.

`offload.measuring.machine` measures them in some seconds; here is what they are, and where they are
kept: a JSON file per machine in the cache folder, with a profile for each number of threads that
was measured. The file's name says which processor, instruction set, GPU, driver and version of ours
it is for, so that a machine that has changed has no profile instead of a wrong one. For a number of
threads that was not measured, the nearest stands (`MachineProfile.for_threads`).
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from cpu_ops.native import isa_name
from offload.models.shape import ModelShape
from offload.planning.cost_table import CostTable
from offload.system.cache_folder import cache_folder
from offload.system.json_file import read_json
from offload.system.machine import cpu_model, nvidia_driver
from offload.system.version import __version__

_FORMATS = "offload-profile-"
_FORMAT = _FORMATS + "6"
_KEPT_FORMAT = "offload-profiles-1"  # of a machine's profiles together
# Of the typical machine: from 4 to 15 threads, what the CPU does of a layer of lychee_cluster falls
# from 500 us to 215, and with hot rows from 399 to 167 (perf/results/hot-rows.json).
_TYPICAL_GAIN = 0.65
MAX_SPREAD = 0.1  # beyond, a profile is not kept
OnProgress = Callable[[str, int, int], None]


class OtherFormatError(ValueError):
    """A profile that another version of this module wrote."""


@dataclass(frozen=True)
class DeviceProfile:
    """What a GPU was measured to do. Bandwidths are bytes per second, costs microseconds.

    Attributes:
        name, driver: of the GPU.
        capability: compute capability, as (9, 0).
        num_multiprocessors: decides the scratch of attention.
        memory_bytes: of the GPU in all.
        read_bandwidth: of its own memory.
        to_host_bandwidth, from_host_bandwidth: of copies over PCIe.
        gemv: by bytes of a weight matrix that one row is multiplied with.
        layer_linear_us: of a layer's linear layers, norms and rotation, by `shape_key` and then
            number of rows; of shapes that were measured.
        lm_head_us: of the last projection, alike.
        attention: by bytes of keys and values in GPU pages.
        retrieval: the same of heads that also leave their scores, for a top-k.
        top_k: by number of scores, one per query head and token: the top-k that follows, beside
            the linear layers.
        gather: by bytes of rows that the GPU fetches from host pages.
        gather_measured: whether the gather kernel was there, or PCIe copies stand for it.
        gather_beside: by bytes of rows of a layer: what a layer takes longer in which they are
            attended to and the next layer's are fetched beside everything else, than one of linear
            layers, window and merge alone.
        top_k_beside: by number of scores: what a layer takes longer if a top-k runs beside it.
        window_us, merge_us, sampling_us: of those kernels, per layer and step.
        round_trip_us: from a request to its reply when the CPU has nothing to attend to.
        step_us: of a step without its kernels: bookkeeping, launch, state, the token to the host.
        burst_step_us: the same of one of several steps that the host does not wait for.
    """

    name: str
    driver: str | None
    capability: tuple[int, int]
    num_multiprocessors: int
    memory_bytes: int
    read_bandwidth: float
    to_host_bandwidth: float
    from_host_bandwidth: float
    gemv: CostTable
    layer_linear_us: dict[str, dict[int, float]]
    lm_head_us: dict[str, dict[int, float]]
    attention: CostTable
    retrieval: CostTable
    top_k: CostTable
    gather: CostTable
    gather_measured: bool
    gather_beside: CostTable
    top_k_beside: CostTable
    window_us: float
    merge_us: float
    sampling_us: float
    round_trip_us: float
    step_us: float
    burst_step_us: float


@dataclass(frozen=True)
class MachineProfile:
    """What a machine was measured to do.

    Attributes:
        cpu, isa, num_threads: of the host, and of its worker pool.
        version: of this program.
        attention_heads: (num_qo_heads, num_kv_heads, head_dim) that attention was measured with.
        read_bandwidth: bytes per second of reading host memory in order, on all threads.
        attend_cold: microseconds of attending to selected rows, by their bytes (keys and values of
            all heads), when no cache holds them.
        attend_warm: the same of rows that the same threads have just read.
        scan_dense: microseconds of attending to all tokens, by the bytes of their keys and values.
        scan_retrieve: the same of heads that also choose their heaviest tokens.
        layer_linear_us: without a GPU: of a layer without its attention, by `shape_key` and then
            number of rows; of shapes that were measured.
        lm_head_us: the last projection, alike.
        step_us: without a GPU: of a step without its layers and the last projection.
        select_scale: by `workload.policy_key`, what its units that select took, as a multiple
            of what `StepModel` says of the bytes they look at; by a policy's name, whatever its
            options are; "*" of any other; else 1.
        select_hidden: likewise, the share of that time in which the policy prepares, before the
            query, or learns, after the answer: a GPU does not wait while it has work itself.
        select_ahead: likewise, what choosing a layer ahead took in all, as a multiple of attending
            cold to the bytes that they look at: nothing reads these before, or attends afterwards.
        prefill_token_us: of a layer while a prompt is read: by token, without its attention; by
            `prefill_key`, of models that were measured.
        prefill_pair_us: alike, by pair of a token and one that it attends to.
        prefill_least_us: alike, of a layer for however few tokens.
        spread: half of the timings lay within such a share of their median, where they lay widest.
        device: the GPU, or None.
        measured_threads: None, or how many threads it was measured with where they are not
            num_threads.
    """

    cpu: str
    isa: str
    num_threads: int
    version: str
    attention_heads: tuple[int, int, int]
    read_bandwidth: float
    attend_cold: CostTable
    attend_warm: CostTable
    scan_dense: CostTable
    scan_retrieve: CostTable
    layer_linear_us: dict[str, dict[int, float]]
    lm_head_us: dict[str, dict[int, float]]
    step_us: float
    select_scale: dict[str, float]
    select_hidden: dict[str, float]
    select_ahead: dict[str, float]
    prefill_token_us: dict[str, float] = field(default_factory=dict)
    prefill_pair_us: dict[str, float] = field(default_factory=dict)
    prefill_least_us: dict[str, float] = field(default_factory=dict)
    spread: float = 0.0
    device: DeviceProfile | None = None
    measured_threads: int | None = None

    def __post_init__(self) -> None:
        if self.num_threads < 1 or not self.read_bandwidth > 0:
            raise ValueError(
                "num_threads must be at least 1 and read_bandwidth positive, "
                f"got {self.num_threads} and {self.read_bandwidth}"
            )

    @property
    def is_steady(self) -> bool:
        """Whether nothing else kept the machine busy while it was measured."""
        return self.spread <= MAX_SPREAD

    @property
    def key(self) -> dict[str, Any]:
        """What `machine_key` says of the machine that it was measured on."""
        return {
            "cpu": self.cpu,
            "isa": self.isa,
            "gpu": None if self.device is None else self.device.name,
            "driver": None if self.device is None else self.device.driver,
            "version": self.version,
        }

    def for_threads(self, num_threads: int, *, gain: float = 1.0) -> MachineProfile:
        """What is known of the same machine with another number of threads.

        With fewer threads, what they do takes longer in proportion, as if memory could never be
        read faster by more of them; with more, it takes as long as was measured, as if it were
        always busy. So nothing is predicted to be faster than what was measured. What policies take
        is a multiple of that (`select_scale`) and stays, and so does the GPU's part.

        Args:
            gain: twice as many threads are 2 ** gain times as fast; 1: in proportion.
        """
        if num_threads == self.num_threads:
            return self
        slower = max(1.0, (self.num_threads / num_threads) ** gain)
        tables = ("attend_cold", "attend_warm", "scan_dense", "scan_retrieve")
        changes: dict[str, Any] = {name: getattr(self, name).times(slower) for name in tables}
        for name in ("layer_linear_us", "lm_head_us"):
            changes[name] = {
                key: {rows: slower * us for rows, us in of_rows.items()}
                for key, of_rows in getattr(self, name).items()
            }
        for name in ("prefill_token_us", "prefill_pair_us", "prefill_least_us"):
            changes[name] = {  # a GPU reads prompts as fast
                key: us * (slower if key.startswith("cpu:") else 1.0)
                for key, us in getattr(self, name).items()
            }
        return dataclasses.replace(
            self,
            num_threads=num_threads,
            measured_threads=self.measured_threads or self.num_threads,
            read_bandwidth=self.read_bandwidth / slower,
            **changes,
        )

    def as_json(self) -> dict[str, Any]:
        """Plain values."""
        return {"format": _FORMAT, **dataclasses.asdict(self)}

    @classmethod
    def from_json(cls, document: Any, source: str = "") -> MachineProfile:
        """What `as_json` returned.

        Raises:
            ValueError: something else; names the source.
        """
        name = f"machine profile {source}" if source else "machine profile"
        found = document.get("format") if isinstance(document, dict) else None
        if found != _FORMAT:
            kind = OtherFormatError if str(found).startswith(_FORMATS) else ValueError
            raise kind(
                f"{name} is of another format than {_FORMAT!r}; measure again with "
                "`offload plan --remeasure`"
            )
        fields = {key: value for key, value in document.items() if key != "format"}
        # A file from before prompts were measured lacks their fields: nothing is known of them.
        try:
            device = fields.pop("device")
            return cls(
                **_tables(cls, fields),
                device=None if device is None else DeviceProfile(**_tables(DeviceProfile, device)),
            )
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            raise ValueError(
                f"{name} is damaged ({error}); measure again with `offload plan --remeasure`"
            ) from error

    def save(self, path: str | Path) -> None:
        """Write it as JSON: the whole file or nothing, also where two processes write at once."""
        _write(self.as_json(), Path(path))

    @classmethod
    def load(cls, path: str | Path) -> MachineProfile:
        """Read a profile.

        Raises:
            FileNotFoundError: there is none.
            ValueError: damaged, or of another format; names the file.
        """
        return cls.from_json(_read(path), str(path))


def shape_key(shape: ModelShape, item_bytes: int) -> str:
    """Names the linear layers of a shape: equal keys take equally long."""
    return (
        f"{shape.hidden_size}x{shape.qkv_width}x{shape.intermediate_size}x{shape.vocab_size}"
        f"x{item_bytes}"
    )


def machine_key(device: torch.device) -> dict[str, Any]:
    """What a profile of this machine must be for."""
    gpu = driver = None
    if device.type == "cuda":
        gpu, driver = torch.cuda.get_device_name(device), nvidia_driver()
    return {
        "cpu": cpu_model(),
        "isa": isa_name(),
        "gpu": gpu,
        "driver": driver,
        "version": __version__,
    }


def profiles_path(key: dict[str, Any]) -> Path:
    """Where the profiles of a machine are kept."""
    described = json.dumps(key, sort_keys=True)
    digest = hashlib.sha256(described.encode()).hexdigest()[:12]
    return cache_folder() / "profiles" / f"machine-{digest}.json"


def cached_profile(device: torch.device, num_threads: int) -> MachineProfile | None:
    """What was measured before of this machine, for so many threads: with as many, or as
    `MachineProfile.for_threads` has it of the nearest number; None if nothing was, or only in
    a format that this version does not write any more.

    Raises:
        ValueError: a damaged file, or one that says that it is for another machine.
    """
    measured = measured_profile(device, num_threads)
    return None if measured is None else measured.for_threads(num_threads)


def measured_profile(device: torch.device, num_threads: int) -> MachineProfile | None:
    """The same with the number of threads that it was measured with: the nearest by their ratio.

    Raises:
        ValueError: as `cached_profile`.
    """
    key = machine_key(device)
    profiles = _kept(profiles_path(key), key)
    return min(
        profiles,
        key=lambda profile: abs(math.log(profile.num_threads / num_threads)),
        default=None,
    )


def typical_profile(num_threads: int) -> MachineProfile:
    """What stands for a machine with a GPU that was never measured: an H100, and its host's CPU.

    Which side is faster at something differs less between machines than how fast both are.
    """
    path = Path(__file__).with_name("typical_profile.json")
    return MachineProfile.load(path).for_threads(num_threads, gain=_TYPICAL_GAIN)


def store_profile(profile: MachineProfile) -> Path:
    """Keep a profile for `cached_profile`, beside those for other numbers of threads.

    Raises:
        PermissionError: the cache folder cannot be written to.
        ValueError: it was measured with another number of threads than it is for.
    """
    if profile.measured_threads is not None:
        raise ValueError(
            f"a profile for {profile.num_threads} threads that was measured with "
            f"{profile.measured_threads} is not kept; measure with `offload plan --remeasure`"
        )
    path = profiles_path(profile.key)
    try:
        profiles = [x for x in _kept(path, profile.key) if x.num_threads != profile.num_threads]
    except ValueError:  # damaged: only what was measured now is sure
        profiles = []
    profiles = sorted([*profiles, profile], key=lambda x: x.num_threads)
    document = {"format": _KEPT_FORMAT, "profiles": [x.as_json() for x in profiles]}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _write(document, path)
    except OSError as error:
        raise PermissionError(
            f"cannot write the machine profile to {path.parent} ({error.strerror}); "
            "set OFFLOAD_CACHE to a folder that can be written to"
        ) from error
    return path


def _kept(path: Path, key: dict[str, Any]) -> list[MachineProfile]:
    """The profiles of a machine that lie there, in the order of their threads."""
    if not path.is_file():
        return []
    document = _read(path)
    of_machine = document.get("profiles") if isinstance(document, dict) else None
    if not isinstance(of_machine, list) or document.get("format") != _KEPT_FORMAT:
        raise ValueError(
            f"machine profile {path} is damaged, its format is not {_KEPT_FORMAT!r}; measure again "
            "with `offload plan --remeasure`"
        )
    profiles = []
    for of_threads in of_machine:
        try:
            profile = MachineProfile.from_json(of_threads, str(path))
        except OtherFormatError:
            continue
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
        profiles.append(profile)
    return profiles


def _read(path: str | Path) -> Any:
    damaged = "is damaged, it is not JSON ({}); measure again with `offload plan --remeasure`"
    return read_json(path, "machine profile", damaged=damaged)


def _write(document: dict[str, Any], path: Path) -> None:
    with tempfile.TemporaryDirectory(prefix=".profile-", dir=path.parent) as temporary:
        whole = Path(temporary) / path.name
        whole.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
        whole.replace(path)


def _tables(cls: Any, fields: dict[str, Any]) -> dict[str, Any]:
    """JSON's lists and strings as the types of the fields of `cls`."""
    types = {field.name: str(field.type) for field in dataclasses.fields(cls)}
    unknown = sorted(set(fields) - set(types))
    if unknown:
        raise ValueError(f"unknown field {unknown[0]!r}")
    made: dict[str, Any] = {}
    for name, value in fields.items():
        kind = types[name]
        if kind == "CostTable":
            points = ((float(size), float(us)) for size, us in value["points"])
            made[name] = CostTable(tuple(points))
        elif kind == "float":
            made[name] = float(value)
            if not math.isfinite(made[name]) or made[name] < 0:
                raise ValueError(f"{name} must be finite and at least 0, got {value!r}")
        elif kind.startswith("tuple"):
            made[name] = tuple(value)
        elif kind == "dict[str, dict[int, float]]":
            made[name] = {
                key: {int(n): float(us) for n, us in of_rows.items()}
                for key, of_rows in value.items()
            }
        else:
            made[name] = value
    return made

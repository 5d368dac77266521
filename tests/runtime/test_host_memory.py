"""`env`, `plan` and a loaded model agree on the host memory, and keep to it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = """
import contextlib, importlib, io, json, sys
import offload.system.memory as memory

GIB = 2**30
own = lambda: (held := memory.psutil.Process().memory_info()).rss - held.shared
# A cgroup of 3 GiB with one other process, of 300 MiB, in it.
memory._bounds = lambda proc_self: iter([(3 * GIB, True, 3 * GIB - 300 * 2**20 - own())])

from offload import OffloadedModel
from offload.cli import app
from offload.kv.store import HostBudgetError
from offload.runtime.model_loading import logger

def printed(*arguments):
    out = io.StringIO()
    with contextlib.redirect_stdout(out), contextlib.suppress(SystemExit):
        app([*arguments, "--json"], standalone_mode=False)
    return json.loads(out.getvalue())

folder, profile = sys.argv[1:]
command = importlib.import_module("offload.cli.plan")
measured = importlib.import_module("offload.planning.profile").MachineProfile.load(profile)
command._measured = lambda *_: (measured, 15)
for name in [name for name in vars(command) if name.startswith("_with_")]:
    setattr(command, name, lambda found, *_: found)
env = printed("env")
plan = printed("plan", folder, "--device", "cpu", "--context", "256")
said = []
logger.setLevel("INFO")
logger.info = lambda text, *values: said.append(text % values)
model = OffloadedModel.from_pretrained(folder, dtype="float32", num_threads=1)
store, seqs = model.kv_store, []
weights = sum(weight.nbytes for weight in model.parameters())
budget = store.host_budget_bytes
with contextlib.suppress(HostBudgetError):
    while True:  # as a server's cache comes to be full
        seqs.append(store.new_sequence())
        store.reserve([seqs[-1]], [65536])
filled = store.host_bytes_reserved
print(json.dumps({
    "env": env["memory_usable_bytes"],
    "explained": env["memory_explained"],
    "plan": plan["host_limit_bytes"],
    "program": plan["host_bytes"].get("the program itself", 0),
    "model": weights + budget,
    "filled": filled / budget,
    "resident": memory.psutil.Process().memory_info().rss,
    "own": own(),
    "said": said,
}))
"""


@pytest.mark.slow
def test_env_plan_and_a_filled_cache_agree(tiny_folders: dict[str, Path], tmp_path: Path) -> None:
    from cases.profile_cases import machine_profile

    profile = tmp_path / "profile.json"
    machine_profile(device=None).save(profile)
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, str(tiny_folders["llama"]), str(profile)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout.splitlines()[-1])
    expected = 3 * 2**30 - 300 * 2**20 - 3 * 2**30 // 16
    assert found["env"] == pytest.approx(expected, rel=0.01)
    assert found["plan"] == pytest.approx(found["env"], rel=0.01)
    assert found["program"] == 3 * 2**30 // 4
    assert found["model"] + 3 * 2**30 // 4 == pytest.approx(found["env"], rel=0.01)
    assert found["filled"] > 0.95
    assert found["own"] < found["env"]
    assert found["resident"] < found["env"]
    (line, *slow) = found["said"]
    assert "usable of 3.00 GiB that its cgroup allows" in found["explained"]
    assert "usable of 3.00 GiB that its cgroup allows" in line
    assert all(text.startswith("slow here: ") for text in slow)

"""The files that a reader opens from one token to the next are those that docs/architecture.md
lists: what Python runs there, but for kernels' calls and the helpers of `offload/system`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cases.tiny_models import random_tokens

from offload import OffloadedModel
from offload.decode.gpu.prepared_steps import BurstLength
from offload.policies.registry import make_policy

ROOT = Path(__file__).parents[1]
PACKAGES = ("offload", "cpu_ops")
MOST = {"CPU": 16, "GPU": 22}


class Steps:
    """A streamer that has files noted in the steps after the first ones."""

    def __init__(self) -> None:
        self.files = {"offload/runtime/token_loop.py"}  # whose call goes on from token to token
        self._count = 0

    def put(self, tokens: torch.Tensor) -> None:
        self._count += 1
        sys.setprofile(self._note if 4 <= self._count < 7 else None)

    def end(self) -> None:
        sys.setprofile(None)

    def _note(self, frame: FrameType, event: str, _: Any) -> None:
        path = Path(frame.f_code.co_filename)
        if event == "call" and path.is_relative_to(ROOT):
            name = path.relative_to(ROOT).as_posix()
            if name.split("/")[0] in PACKAGES and not name.startswith("offload/system/"):
                self.files.add(name)


def listed(where: str) -> set[str]:
    """The files of the list in docs/architecture.md that begins with `where`."""
    text = (ROOT / "docs" / "architecture.md").read_text("utf-8")
    found = re.search(rf"^{where}, from one token to the next:\n\n((?:- .*\n)+)", text, re.M)
    assert found is not None
    return set(re.findall(r"`([\w/]+\.py)`", found[1]))


@pytest.mark.parametrize(
    ("where", "name", "backend"),
    [("On a CPU", "lychee_cluster", None), ("With a GPU", "tidal_decode", "inline")],
)
def test_the_walk_of_a_token(
    tiny_folders: dict[str, Path],
    where: str,
    name: str,
    backend: str | None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(BurstLength, "num_steps", property(lambda self: 2))  # a streamer hears
    policy = make_policy(name, budget_tokens=96)
    model = OffloadedModel.from_pretrained(tiny_folders["llama"], policy=policy, backend=backend)
    steps = Steps()
    try:
        model.generate(
            random_tokens(1, 200), max_new_tokens=10, do_sample=False, eos_token_id=None,
            streamer=steps,
        )  # fmt: skip
    finally:
        sys.setprofile(None)
    ours = {file for file in steps.files if not file.startswith("offload/policies/" + name)}
    assert ours == listed(where)
    assert len(ours) <= MOST[where.split()[-1]]

"""What the first prompt and the first token would wait for, done when a model is loaded.

That is above all triton, which compiles some twenty kernels for a model and its placement. A small
prefill and a step are launched for that without running anything (`compile_ahead`): a step's
kernels depend on neither lengths nor more of the batch than whether there are several rows.

What cannot be known yet, such as the graph of a step for so many rows, is made with the first such
step and counts as `OffloadStats.setup_seconds`.
"""

from __future__ import annotations

import logging
from dataclasses import replace

import torch

from gpu_ops.compile_ahead import compile_ahead
from gpu_ops.flags import await_flag, raise_flag
from offload.decode.decoder import Decoder
from offload.decode.gpu.buffers import HostLink
from offload.decode.gpu.decoder import DeviceDecoder
from offload.decode.gpu.gpu_sync import GraphSync, InlineSync
from offload.models import LeanModel
from offload.models.batch import pack
from offload.policies import Policy
from offload.prefill.attention import begin_cudnn, warm_up_attention
from offload.prefill.forward import prefill
from offload.system.autocast import without_autocast
from offload.system.captures import CAPTURING
from offload.system.errors import DeviceMemoryError
from offload.system.memory import available_cpus
from offload.system.progress import Progress

logger = logging.getLogger(__name__)

_SLICE_TOKENS = 16
_PREFILL_TOKENS = 256  # a product of so many rows takes the kernels of longer prompts
_LINKS = ((1, 1), (2, 1), (2, 2))  # rows and micro-batches of steps that launch different kernels


@torch.no_grad()
def warm_up(lean: LeanModel, decoder: Decoder, policy: Policy, dtype: torch.dtype) -> None:
    """Compile, or load, what a model on a GPU launches, and run a small prompt.

    Afterwards the decoder has no slots, as before. Where the GPU has no room for that, nothing is
    done, and the first prompt tells, or waits.
    """
    assert isinstance(decoder, DeviceDecoder)  # as on any GPU
    device, ranks = decoder.device, lean.ranks
    of_head = lean.shape.head_dim, dtype, device
    progress = compiling_progress(is_shown=ranks is None or ranks.rank == 0)
    # A seed is for the user's draws; kernels are launched on the current device.
    with torch.random.fork_rng([device]), torch.cuda.device(device), without_autocast(device):
        try:
            with progress.shown():
                compile_ahead(
                    lambda: warm_up_kernels(lean, decoder, policy, dtype),
                    num_threads=available_cpus() if ranks is None else ranks.num_cpus,
                    on_progress=progress,
                )
            _prefill(lean, _PREFILL_TOKENS, _PREFILL_TOKENS, dtype, device)
            begin_cudnn(lean.shape.num_qo_heads, lean.shape.num_kv_heads, *of_head)
            with CAPTURING:  # steps of another model
                torch.cuda.synchronize()
                torch.cuda.empty_cache()
        except (DeviceMemoryError, torch.OutOfMemoryError) as error:
            if ranks is not None:  # the others are in the middle of it
                raise
            logger.debug("no room to warm up: %s", error)


def compiling_progress(*, is_shown: bool) -> Progress:
    """The progress that `compile_ahead` shows."""
    return Progress(
        logger,
        title="compiling GPU kernels",
        begins="compiling %d GPU kernels, once",
        ended="compiled them in %.1f s",
        is_shown=is_shown,
    )


def warm_up_kernels(
    lean: LeanModel, decoder: DeviceDecoder, policy: Policy, dtype: torch.dtype
) -> None:
    """Launch every kernel of a prefill, of what `policy` builds beside it, and of steps."""
    shape, device = lean.shape, decoder.device
    # Sizes that are multiples of 16, and one that is not.
    _prefill(lean, _SLICE_TOKENS + 1, _SLICE_TOKENS, dtype, device)
    warm_up_attention(shape.num_qo_heads, shape.head_dim, dtype, device)
    keys = torch.zeros(64, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device)
    policy.device.warm_up_kernels(keys.transpose(0, 1))
    warm_up_steps(decoder)


def _prefill(
    lean: LeanModel, num_tokens: int, slice_tokens: int, dtype: torch.dtype, device: torch.device
) -> None:
    """A prompt of any tokens, which is not kept."""
    num_tokens = min(num_tokens, lean.shape.max_context)
    hidden = torch.zeros(num_tokens, lean.shape.hidden_size, dtype=dtype, device=device)
    batch = pack((1, num_tokens), None, torch.arange(num_tokens)[None])
    prefill(lean, hidden, batch, store=None, seqs=[], slice_tokens=slice_tokens)
    lean.lm_head(lean.final_norm(hidden[-1:]))


def warm_up_steps(decoder: DeviceDecoder) -> None:
    """Launch what steps of one and of several rows launch, with no row in use and no host.

    Nothing where the GPU, or that of another rank, has no room for their buffers.
    """
    ranks, has_room = decoder.model.ranks, True
    try:
        try:
            steps = decoder.slots.steps_for(max(num_rows for num_rows, _ in _LINKS), 1)
        except DeviceMemoryError as error:
            logger.debug("no room to warm up steps: %s", error)
            has_room = False
        if not has_room if ranks is None else ranks.total(int(not has_room))[0]:
            return
        for num_rows, num_micro_batches in _LINKS:
            link = steps.make_link(num_rows, num_micro_batches)
            warmed_up = replace(link, gpu_sync=_WarmUpSync(link, decoder))
            steps.step.run_tokens(warmed_up, samples=False)
            if steps.bursts is not None:
                steps.step.run_resident(warmed_up, samples=False)
            link.gpu_sync.close()
        buffers = steps.step.buffers
        for num_rows in (1, 2):  # greedy tokens come from the same buffers
            logits = decoder.logits(buffers.hidden[:num_rows])
            buffers.chooser.choose(logits, buffers.positions[:num_rows])
    finally:
        decoder.place(decoder.placement)  # without slots


class _WarmUpSync(InlineSync):
    """Launches what the decoder's `GpuSync` does, to no effect."""

    def __init__(self, link: HostLink, decoder: DeviceDecoder) -> None:
        super().__init__(link.coprocessor)
        self._has_flags = isinstance(link.gpu_sync, GraphSync)
        self._mailbox, self._device = link.mailbox, decoder.device

    def request_attention(self, request: int) -> None:
        if self._has_flags:
            raise_flag(self._mailbox.requests[request, :1], self._device)

    def await_reply(self, request: int) -> None:
        if self._has_flags:
            await_flag(self._mailbox.replies[request, :1], self._device)

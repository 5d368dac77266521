"""What runs decode steps: the native kernels (`cpu`), or a GPU beside them (`gpu`)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from torch import Tensor

from cpu_ops.worker_pool import WorkerPool
from offload.decode.attention import DecodeAttention
from offload.decode.sampling import Draws
from offload.kv.sequence_part import SequencePart
from offload.models.batch import RaggedBatch
from offload.system.errors import DeviceMemoryError


class Decoder(SequencePart, Protocol):
    """Decode steps of one model over one store, and what a device has of its sequences.

    Attributes:
        attention: what the CPU attends with, and the policy's state of each sequence.
        pool: the threads that it attends on.
    """

    attention: DecodeAttention
    pool: WorkerPool

    @property
    def max_step_tokens(self) -> int | None:
        """New tokens of one sequence in a `decode`; None: any number."""

    @property
    def samples(self) -> bool:
        """Whether a token can be chosen by temperatures above 0, too."""

    @property
    def device_bytes(self) -> int:
        """Bytes of the KV cache that is on a device."""

    @property
    def setup_seconds(self) -> float:
        """Spent so far on what steps of a new kind or size need."""

    def decode(self, hidden: Tensor, batch: RaggedBatch, seqs: Sequence[int]) -> Tensor:
        """Run all layers over the new tokens of `batch`, for which room is reserved in the store.

        Args:
            hidden: [num_tokens, hidden_size], the embeddings; may be overwritten.
            seqs: the store's sequence of each sequence of `batch`.

        Returns:
            [num_tokens, hidden_size], before the final norm.

        Raises:
            RuntimeError: NaN or inf in queries, keys or values; names the layer.
            CoprocessorError, DeviceMemoryError: with a GPU that waits in vain, or is full.
        """

    def choose_tokens(
        self,
        seqs: Sequence[int],
        tokens: Tensor,
        position_ids: Tensor,
        draws: Draws | None = None,
        *,
        ahead: bool = False,
        beside: Callable[[], None] | None = None,
    ) -> Tensor:
        """One whole step, from the last tokens to the next.

        Args:
            tokens, position_ids: int64 [num_sequences], of the last token of each, on the host.
            draws: for this step, and those behind it before `end_steps`, which are given the same;
                None: the likeliest tokens are chosen. Only where it `samples`.
            ahead: the next step is of the same sequences, from the tokens that this one chooses,
                before `end_steps`.
            beside: called once, while a GPU is at work on the step. It lets it have other work.

        Returns:
            int64 [num_sequences], on the host; -1 where the logits were not finite.

        Raises:
            As `decode`.
        """

    def tokens_at_once(self, seqs: Sequence[int], most: int) -> int:
        """How many tokens of each, up to `most`, `choose_several` had best choose at once.

        Raises:
            DeviceMemoryError: as `decode`.
        """

    def begin_steps(self, seqs: Sequence[int], most: int) -> int:
        """How many steps, up to `most`, had best follow each other with nothing in between. Until
        `end_steps` there is room for them, and `choose_tokens` is called for `seqs` alone.

        Raises:
            DeviceMemoryError: as `decode`.
        """

    def end_steps(self) -> None:
        """They are over, or their last ones do not come."""

    def choose_several(
        self,
        seqs: Sequence[int],
        tokens: Tensor,
        position_ids: Tensor,
        draws: Draws | None,
        count: int,
    ) -> Tensor:
        """As `choose_tokens`, `count` steps: int64 [num_sequences, count]."""

    def first_tokens(self, logits: Tensor, draws: Draws | None = None) -> Tensor:
        """The choice after a prompt, of logits [n, vocab_size]: as `choose_tokens` returns it."""

    def logits(self, hidden: Tensor) -> Tensor:
        """[n, hidden_size] before the final norm -> [n, vocab_size]."""

    def trim(self) -> None:
        """Give back device memory that no sequence uses: a prefill comes, which needs some."""

    def check_usable(self) -> None:
        """Raise CoprocessorError where an earlier fault was for good, or after a fork."""

    def begin_generation(
        self, num_sequences: int, kv_len: int, read_tokens: int | None = None
    ) -> None:
        """So many sequences of up to so many tokens come next.

        Args:
            read_tokens: of prompts that a prefill reads at most; None: all of them at once.

        Raises:
            DeviceMemoryError: the step that comes to so many would.
        """

    def most_together(self, most: int, kv_len: int, read_tokens: int | None = None) -> int:
        """Sequences of up to `kv_len` tokens, `most` at most, that had best be decoded in the same
        steps: more would take longer than one after the other. Arguments as of `begin_generation`.
        """

    def end_generation(self) -> None:
        """What `begin_generation` has said is over."""

    def finish_captures(self) -> None:
        """Nothing is captured beside the generation to its end: transformers' code and the
        caller's run in between, and may draw on the GPU."""

    def give_heads_back(self, why: DeviceMemoryError) -> bool:
        """Leave fewer heads on the device, where a prefill found no room; whether any went."""

    def close(self) -> None:
        """End the threads."""

"""Codes of keys on the GPU, of the sequences that are bound to slots, and the lists made by them.

What the codes are is the policy's (`DeviceSupport.codes`). It has them on the host, too, and makes
each step's there, so that binding is only copying, as for what else stays on the GPU
(`resident_kv`). A sequence has codes from the step that makes it longer than the policy's budget.

In a step of a layer with such heads the GPU lists the tokens whose codes score most, when the query
is known and before the host is asked; the host scores their keys exactly, chooses and attends.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields

import numpy as np
import torch
from torch import Tensor

from cpu_ops.mailbox import Mailbox
from gpu_ops.append_codes import append_codes
from gpu_ops.code_scores import CodeQuery, code_page_bytes
from gpu_ops.layout import Layout, allocate
from gpu_ops.top_k_candidates import TopKBuffers, TopKLaunch
from gpu_ops.top_k_codes import top_k_codes
from gpu_ops.top_k_lists import TopKLists
from offload.decode.gpu.buffers import StepBuffers
from offload.decode.gpu.layer_heads import LayerHeads, most_heads
from offload.decode.gpu.pages import DevicePages, PageBudget, whole_slabs
from offload.models import ModelShape
from offload.policies import Policy
from offload.selection.device_support import DeviceCodes
from offload.selection.layer_state import State
from offload.system.errors import DeviceMemoryError
from offload.system.interrupts import shielded
from offload.system.map_in_threads import map_in_threads
from offload.system.memory import available_cpus
from offload.system.torch_threads import torch_threads

_Staged = dict[str, Tensor]

# Of a sequence and a layer, which hold the codes of so many tokens.
CodesOf = Callable[[int, int, int], State]


@dataclass(frozen=True)
class CodeShape:
    """What the sizes of everything here depend on.

    Attributes:
        budget_tokens: the policy's; shorter sequences have no codes.
        window: sink tokens and recent tokens.
    """

    model: ModelShape
    codes: DeviceCodes
    budget_tokens: int
    window: tuple[int, int]
    page_tokens: int

    @classmethod
    def of(cls, policy: Policy, model: ModelShape, page_tokens: int) -> CodeShape | None:
        """None: the policy has no codes that a GPU could use."""
        if not policy.selects or policy.per_query_head:
            return None
        codes = policy.device.codes(model.num_layers, model.num_kv_heads)
        if codes is None:
            return None
        window = (policy.sink_tokens, policy.recent_tokens)
        return cls(model, codes, policy.budget_tokens, window, page_tokens)

    def list_tokens(self, layers: Sequence[LayerHeads]) -> int:
        """The most tokens of a list: sinks, candidates, recent tokens; where the GPU attends to
        what it finds, the budget."""
        if all(layer.finds for layer in layers if layer.coded):
            return self.budget_tokens
        return sum(self.window) + self.codes.num_candidates

    def page_bytes(self, num_heads: int) -> int:
        return code_page_bytes(num_heads, self.page_tokens, self.model.head_dim, self.codes.bits)

    def pages_layout(self, layers: Sequence[LayerHeads], num_pages: int) -> Layout:
        """Slabs of `ResidentCodes` when each layer with codes has `num_pages` pages."""
        counts = [len(layer.coded) for layer in layers if layer.coded]
        return {
            f"pages of {n} heads": (
                (whole_slabs(counts.count(n) * num_pages), self.page_bytes(n)),
                torch.uint8,
            )
            for n in sorted(set(counts))
        }

    def slots_layout(
        self, layers: Sequence[LayerHeads], *, num_slots: int, max_tokens: int
    ) -> Layout:
        """What `ResidentCodes` has for its slots, all layers together."""
        coded = [len(layer.coded) for layer in layers if layer.coded]
        max_pages = -(-max_tokens // self.page_tokens)
        return {
            "means": ((num_slots * sum(coded), self.model.head_dim), torch.float32),
            "code_tables": ((len(coded), num_slots, max_pages), torch.int64),
        }

    def lists_layout(
        self, layers: Sequence[LayerHeads], *, num_rows: int, max_tokens: int
    ) -> Layout:
        """Buffers of `CodeLists`."""
        model, num_heads = self.model, most_heads(layers, "coded")
        if not num_heads:
            return {}
        list_tokens = self.list_tokens(layers)
        launch = TopKLaunch.default(list_tokens, max_tokens)
        heads = (num_heads, model.num_qo_heads, model.group_size)
        # A view for each number of heads with codes: all start with the same memory.
        scratch = CodeQuery.layout(num_rows, *heads, model.head_dim, self.codes.bits)
        return {
            "selection": ((num_rows, model.num_kv_heads, list_tokens), torch.int32),
            "counts": ((num_rows, model.num_kv_heads), torch.int32),
            "rotation": ((model.head_dim, model.head_dim), torch.float32),
            "coded_heads": ((sum(len(layer.coded) for layer in layers),), torch.int32),
            **{f"query_{name}": declared for name, declared in scratch.items()},
            **TopKBuffers.layout(num_rows * num_heads, max_tokens, launch),
        }


class ResidentCodes:
    """Codes in pages of the layers' heads that have some, for up to `num_slots` sequences.

    Args:
        codes_of: (sequence, layer, kv_len) to what `DeviceSupport.code_state` returns.
        max_tokens: of a sequence.
        budget: shared with other pages.

    Attributes:
        page_tables: int64 [num_slots, max_pages] of each layer that has codes.
        means: float32 [num_slots, H, head_dim] likewise.
    """

    def __init__(
        self,
        shape: CodeShape,
        layers: Sequence[LayerHeads],
        codes_of: CodesOf,
        *,
        num_slots: int,
        max_tokens: int,
        device: torch.device,
        budget: PageBudget,
    ) -> None:
        self.shape, self._codes_of, self._device = shape, codes_of, device
        self.heads = {i: layer.coded for i, layer in enumerate(layers) if layer.coded}
        self._pages = {
            count: DevicePages(
                (shape.page_bytes(count),),
                torch.uint8,
                device,
                budget,
                what="the codes of keys that stay on the GPU",
            )
            for count in sorted({len(heads) for heads in self.heads.values()})
        }
        # Of a layer's heads, which of those that have codes on the host.
        coded = shape.codes.heads
        self._places = {
            i: np.searchsorted(np.flatnonzero(coded[i]), heads) for i, heads in self.heads.items()
        }
        layout = shape.slots_layout(layers, num_slots=num_slots, max_tokens=max_tokens)
        (_, *table), _ = layout["code_tables"]
        self.page_tables = {
            i: torch.zeros(table, dtype=torch.int64, device=device) for i in self.heads
        }
        self.means = {
            i: torch.zeros(num_slots, len(heads), shape.model.head_dim, device=device)
            for i, heads in self.heads.items()
        }
        self._addresses: list[dict[int, list[int]]] = [{} for _ in range(num_slots)]

    @property
    def table_bytes(self) -> int:
        """Device bytes beside the pages."""
        tensors = [*self.page_tables.values(), *self.means.values()]
        return sum(tensor.nbytes for tensor in tensors)

    def holds(self, slot: int) -> bool:
        """Whether the slot has any pages."""
        return bool(self._addresses[slot])

    def load(self, slot: int, seq: int, kv_len: int) -> None:
        """Copy the codes of a sequence, if the next step needs them.

        Raises:
            DeviceMemoryError: no room; the slot holds nothing then.
        """
        if kv_len < self.shape.budget_tokens:
            return
        self.reserve(slot, kv_len + 1)
        self._codes_of(seq, next(iter(self.heads)), kv_len)  # all are built, once

        def encode(layer_idx: int) -> None:
            with torch_threads(1):  # or each of these threads would have its own of OpenMP's
                self._codes_of(seq, layer_idx, kv_len)

        map_in_threads(encode, self.heads, min(len(self.heads), available_cpus()))
        for layer_idx in self.heads:
            state = self._codes_of(seq, layer_idx, kv_len)
            self._load_layer(slot, layer_idx, self._stage(layer_idx, state, kv_len), kv_len)

    def reserve(self, slot: int, kv_len: int) -> None:
        """Pages for a step that ends with `kv_len` tokens.

        Raises:
            DeviceMemoryError: before anything changes.
        """
        if kv_len <= self.shape.budget_tokens:
            return
        needed, held = -(-kv_len // self.shape.page_tokens), self._addresses[slot]
        missing = {i: needed - len(held.get(i, ())) for i in self.heads}
        if max(missing.values()) <= 0:
            return
        with shielded():
            new: dict[int, list[int]] = {}
            try:
                for layer_idx, count in missing.items():
                    new[layer_idx] = self._pages_of(layer_idx).allocate(count)
            except BaseException:
                for layer_idx, taken in new.items():
                    self._pages_of(layer_idx).release(taken)
                raise
            for layer_idx, taken in new.items():
                addresses = held.setdefault(layer_idx, [])
                table = self.page_tables[layer_idx]
                table[slot, len(addresses) : needed] = torch.tensor(taken).to(table.device)
                addresses += taken

    def clear(self, slot: int) -> None:
        """Give the slot's pages back; others may use their memory at once."""
        for layer_idx, addresses in self._addresses[slot].items():
            self._pages_of(layer_idx).release(addresses)
        self._addresses[slot] = {}

    def trim(self) -> None:
        """Give back the memory of pages that no sequence uses."""
        for pages in self._pages.values():
            pages.trim()

    def _pages_of(self, layer_idx: int) -> DevicePages:
        return self._pages[len(self.heads[layer_idx])]

    def _stage(self, layer_idx: int, state: State, kv_len: int) -> _Staged:
        """A layer's codes where the GPU can fetch them: a head at a time, since what is kept for
        tokens to come lies between them."""
        num_blocks = -(-kv_len // state["codes"].shape[-1])
        sizes = {"codes": num_blocks, "scales": kv_len, "mean": None}
        staged: _Staged = {}
        for name, size in sizes.items():
            heads = [torch.from_numpy(state[name][i, :size]) for i in self._places[layer_idx]]
            shape, dtype = (len(heads), *heads[0].shape), heads[0].dtype
            out = torch.empty(shape, dtype=dtype, pin_memory=self._device.type == "cuda")
            staged[name] = torch.stack(heads, out=out)
        return staged

    def _load_layer(self, slot: int, layer_idx: int, staged: _Staged, kv_len: int) -> None:
        try:
            self._copy_layer(slot, layer_idx, staged, kv_len)
        except torch.OutOfMemoryError as error:
            raise DeviceMemoryError(
                f"the GPU has no memory left to bring the codes of {kv_len:,} keys there; place "
                "fewer heads there, lower the batch size or the context"
            ) from error

    def _copy_layer(self, slot: int, layer_idx: int, staged: _Staged, kv_len: int) -> None:
        num_heads, page_tokens = len(self.heads[layer_idx]), self.shape.page_tokens
        num_pages = -(-kv_len // page_tokens)
        codes, scales, mean = (
            staged[name].to(self._device, non_blocking=True) for name in ("codes", "scales", "mean")
        )
        self.means[layer_idx][slot] = mean

        def to_pages(x: Tensor) -> Tensor:
            """uint8 [num_pages, ..] of [num_heads, at least kv_len, ..]."""
            pages = x.new_zeros(num_heads, num_pages * page_tokens, *x.shape[2:])
            pages[:, :kv_len] = x[:, :kv_len]
            of_pages = pages.view(num_heads, num_pages, -1).transpose(0, 1).contiguous()
            return of_pages.flatten(1).view(torch.uint8)

        by_token = codes.mT.flatten(1, 2)
        loaded = torch.cat((to_pages(by_token), to_pages(scales)), dim=1)
        addresses = self._addresses[slot][layer_idx][:num_pages]
        for first, stop, run in self._pages_of(layer_idx).runs(addresses):
            run.copy_(loaded[first:stop])


class CodeLists:
    """Launches of one set of static buffers.

    Args:
        layers: those of `resident`.

    Attributes:
        selection, counts: int32 [num_rows, num_kv_heads, list_tokens] and [num_rows, num_kv_heads],
            what was last listed.
    """

    def __init__(
        self,
        resident: ResidentCodes,
        layers: Sequence[LayerHeads],
        *,
        sm_scales: Sequence[float],
        num_rows: int,
        max_tokens: int,
        device: torch.device,
    ) -> None:
        self._resident, self._shape, self._sm_scales = resident, resident.shape, sm_scales
        self._finding = {i for i, layer in enumerate(layers) if layer.finds}
        layout = self._shape.lists_layout(layers, num_rows=num_rows, max_tokens=max_tokens)
        del layout["coded_heads"]
        buffers = allocate(layout, device)
        self.selection, self.counts = buffers.pop("selection"), buffers.pop("counts")
        matrix = torch.from_numpy(self._shape.codes.rotation(self._shape.model.head_dim))
        self._rotation = buffers.pop("rotation").copy_(matrix)
        scratch = {field.name: buffers.pop(f"query_{field.name}") for field in fields(CodeQuery)}
        self._scratch = CodeQuery(**scratch)
        launch = TopKLaunch.default(self.selection.shape[2], max_tokens)
        self._top_k = TopKBuffers(launch, **buffers)
        self._heads = {
            i: torch.tensor(heads, dtype=torch.int32, device=device)
            for i, heads in resident.heads.items()
        }

    def find(
        self, layer_idx: int, rows: slice, b: StepBuffers, mailbox: Mailbox | None = None
    ) -> None:
        """The tokens of the layer's heads whose codes score most, here and in the mailbox."""
        shape, resident, heads = self._shape, self._resident, self._heads[layer_idx]
        selection = self.selection_of(layer_idx)[rows]
        lists = TopKLists(
            *shape.window,
            selection.shape[2],
            selection,
            self.counts[rows],
            None if mailbox is None else mailbox.selection[rows],
            None if mailbox is None else mailbox.counts[rows],
        )
        top_k_codes(
            b.queries[layer_idx, rows],
            self._rotation,
            resident.means[layer_idx][rows],
            resident.page_tables[layer_idx][rows],
            b.positions[rows],
            heads,
            group_size=shape.model.group_size,
            bits=shape.codes.bits,
            page_tokens=shape.page_tokens,
            sm_scale=self._sm_scales[layer_idx],
            level=shape.codes.levels[-1],
            scratch=self._scratch_of(len(heads)),
            buffers=self._top_k,
            lists=lists,
        )

    def selection_of(self, layer_idx: int) -> Tensor:
        """Lists of a layer: where the GPU attends to what it finds, of the budget."""
        if layer_idx not in self._finding:
            return self.selection
        num_rows, num_heads, _ = self.selection.shape
        shape = (num_rows, num_heads, self._shape.budget_tokens)
        return self.selection.view(-1)[: torch.Size(shape).numel()].view(shape)

    def append(self, layer_idx: int, rows: slice, b: StepBuffers, window: Tensor) -> None:
        """The code of the step's key, which the next step is the first to score."""
        shape, resident = self._shape, self._resident
        append_codes(
            window[rows],
            self._rotation,
            resident.means[layer_idx][rows],
            resident.page_tables[layer_idx][rows],
            b.positions[rows],
            self._heads[layer_idx],
            first_token=shape.budget_tokens,
            sink_tokens=shape.window[0],
            levels=shape.codes.levels,
            outer=shape.codes.outer,
            page_tokens=shape.page_tokens,
        )

    def _scratch_of(self, num_heads: int) -> CodeQuery:
        """For layers with fewer heads the start of the same memory."""

        def first(x: Tensor) -> Tensor:
            num_rows, _, *of_head = x.shape
            return x.view(-1)[: x[:, :num_heads].numel()].view(num_rows, num_heads, *of_head)

        x = self._scratch
        return CodeQuery(first(x.bytes), x.steps, x.offsets, first(x.bins), first(x.arrivals))

"""What the GPU has of sequences goes over to steps of another placement, or of more rows."""

from __future__ import annotations

import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases.device_cases import FLAGS, GRAPH, SLOW_INLINE, STREAM, each_of, load
from cases.inside import allow_device_bytes, decoder_of, resident_of, steps_of
from cases.slowly import combinations, slow_but
from cases.tiny_models import random_tokens

from offload.decode.gpu.placement import HeadPlacement, Place
from offload.decode.gpu.prepared_steps import PreparedSteps
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.selection.policy import DENSE, RETRIEVE, REUSE, SELECT
from offload.system.errors import DeviceMemoryError

WINDOW = {"sink_tokens": 4, "recent_tokens": 16}


def policies() -> dict[str, Policy]:
    return {
        "full": make_policy("full"),
        "lychee_decode": make_policy("lychee_decode", budget_tokens=64, **WINDOW),
        "tidal_decode": make_policy(
            "tidal_decode", budget_tokens=64, dense_layers=1, select_layers=(1,), **WINDOW
        ),
        "lychee_cluster": make_policy(
            "lychee_cluster", budget_tokens=512, dense_layers=1, **WINDOW
        ),
    }


backend = each_of(SLOW_INLINE, FLAGS, STREAM, GRAPH)


def random_places(model: Any, chance: random.Random) -> HeadPlacement:
    """Places that do not change what heads attend to: hot rows only within the budget."""
    decoder = decoder_of(model)
    roles, places = decoder.attention.roles, np.array(decoder.placed.least.places)
    if decoder.attention.policy.name == "lychee_cluster":
        for layer_idx in (1, 2):
            heads = chance.choice([[Place.HOT] * 2, [Place.CPU] * 2, [Place.GPU] * 2])
            places[layer_idx] = heads
        return HeadPlacement(places)
    for at in np.ndindex(places.shape):
        role = DENSE if roles is None else roles[at]
        if role in (DENSE, RETRIEVE) and places[at] != Place.GPU:
            places[at] = chance.choice([Place.CPU, Place.GPU])
    if decoder.attention.policy.shares_selection:  # all heads of a layer publish, or none
        for of_layer in places:
            of_layer[:] = of_layer[0]
    if roles is not None and (places[roles == RETRIEVE] == Place.GPU).all():
        for at in zip(*np.nonzero(roles == REUSE), strict=True):
            places[at] = chance.choice([Place.CPU, Place.GATHER])
    assert roles is None or not (places[roles == SELECT] == Place.GPU).any()
    return HeadPlacement(places)


class Life:
    """Sequences that begin, decode together, fork, lose tokens and end, as `seed` says.

    Args:
        places: heads change their places; `aside`: while steps for that are made beside others.
    """

    def __init__(self, model: Any, seed: int, *, places: bool, aside: bool = False) -> None:
        self.model, self.places, self.aside = model, places, aside
        self._chance, self._placing = random.Random(seed), random.Random(seed)
        self.said: list[list[int]] = []
        self._caches: list[tuple[Any, torch.Tensor]] = []

    @torch.no_grad()
    def run(self, num_steps: int) -> list[list[int]]:
        self._begin(2)
        for _ in range(num_steps):
            self._chance.choice([self._decode, self._decode, self._decode, self._change])()
            if self.places and self._placing.random() < 0.3:
                self._place(random_places(self.model, self._placing))
        return self.said

    def _place(self, placement: HeadPlacement) -> None:
        decoder = decoder_of(self.model)
        if not self.aside:
            return decoder.place(placement)
        decoder.slots.captures_aside, decoder.placed.choose = True, lambda *_: placement
        decoder.begin_generation(self._placing.choice([1, 2, 4]), 200, 64)
        if decoder.slots.aside is not None and self._placing.random() < 0.5:
            decoder.slots.aside.wait()
        return None

    def _begin(self, num_sequences: int) -> None:
        tokens = random_tokens(num_sequences, self._chance.randrange(10, 150))
        cache = self.model.new_cache()
        logits = self.model(tokens.to(self.model.device), past_key_values=cache).logits
        self._say(cache, logits)

    def _say(self, cache: Any, logits: torch.Tensor) -> None:
        token = logits[:, -1:].argmax(-1)
        self.said.append(token.flatten().tolist())
        self._caches.append((cache, token))

    def _decode(self) -> None:
        """Decode with one cache: what others have on the GPU stays in other slots, or gives way."""
        if not self._caches:
            self._begin(self._chance.choice([1, 3]))
        cache, token = self._caches.pop(self._chance.randrange(len(self._caches)))
        for _ in range(self._chance.randrange(1, 4)):
            logits = self.model(token, past_key_values=cache).logits
            token = logits[:, -1:].argmax(-1)
        self._say(cache, logits)

    def _change(self) -> None:
        what = self._chance.choice(["begin", "fork", "crop", "end"])
        if what == "begin":
            return self._begin(self._chance.choice([1, 1, 2, 4]))
        if not self._caches:
            return None
        cache, token = self._caches.pop(self._chance.randrange(len(self._caches)))
        rows = len(cache.seqs)
        if what == "fork":  # and some of them end
            chosen = torch.tensor([self._chance.randrange(rows) for _ in range(rows)])
            cache.reorder_cache(chosen.to(token.device))
            self._caches.append((cache, token[chosen]))
        elif what == "crop":
            cache.crop(-self._chance.randrange(1, 8))
            self._caches.append((cache, token))
        return None


@pytest.mark.parametrize("seed", slow_but(range(8), 1))
@pytest.mark.parametrize(("name", "aside"), combinations(policies(), [False, True]))
def test_tokens_are_those_of_the_cpu(
    backend: tuple[str, str], name: str, seed: int, aside: bool, tiny_folders: dict[str, Path]
) -> None:
    policy = policies()[name]
    plain = load(tiny_folders["llama"], policy, ("cpu", None))
    model = load(tiny_folders["llama"], policy, backend)
    wanted = Life(plain, seed, places=False).run(60)
    assert len(wanted) > 20
    assert Life(model, seed, places=True, aside=aside).run(60) == wanted


class HostReads:
    """Layers of which KV comes from the host, and how often."""

    def __init__(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        store = model.kv_store
        self.windows: Counter[int] = Counter()
        self.pages: Counter[int] = Counter()
        gather, page_views = store.gather, store.page_views

        def counted_gather(seq: int, layer_idx: int, *args: Any, **options: Any) -> Any:
            self.windows[layer_idx] += 1
            return gather(seq, layer_idx, *args, **options)

        def counted_views(seq: int, layer_idx: int) -> Any:
            for first, last, views in page_views(seq, layer_idx):
                self.pages[layer_idx] += views.nbytes
                yield first, last, views

        monkeypatch.setattr(store, "gather", counted_gather)
        monkeypatch.setattr(store, "page_views", counted_views)

    def take(self) -> tuple[set[int], set[int]]:
        """Layers whose windows, and whose pages, were read since the last call."""
        taken = set(self.windows), set(self.pages)
        self.windows.clear()
        self.pages.clear()
        return taken


def placed(text: str) -> HeadPlacement:
    return HeadPlacement.from_text(text)


@torch.no_grad()
def test_only_layers_that_change_are_read_from_the_host(
    backend: tuple[str, str], tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = load(tiny_folders["llama"], "full", backend)
    decoder = decoder_of(model)
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)

    def began(num_sequences: int) -> Any:
        cache = model.new_cache()
        tokens = random_tokens(num_sequences, 50).to(model.device)
        model(tokens, past_key_values=cache)
        return cache

    first, second = began(1), began(3)
    decoder.place(placed("GG G. .."))
    model(token, past_key_values=first)
    reads = HostReads(model, monkeypatch)
    model(token, past_key_values=first)
    assert reads.take() == (set(), set())
    decoder.place(placed("GG G. G."))
    model(token, past_key_values=first)
    assert reads.take() == (set(), {2})
    decoder.place(placed("G. G. G."))
    model(token, past_key_values=first)
    assert reads.take() == ({0}, {0})
    decoder.place(placed("G. .. GG"))
    model(token, past_key_values=first)
    assert reads.take() == (set(), {2})
    decoder.place(placed("G. .G GG"))
    decoder.place(placed("G. GG GG"))
    model(token, past_key_values=first)
    assert reads.take() == (set(), {1})
    rows = steps_of(model).num_slots
    model(token.expand(3, 1), past_key_values=second)  # more rows
    assert steps_of(model).num_slots > rows
    assert reads.take() == ({0}, {0, 1, 2})
    model(token, past_key_values=first)
    assert reads.take() == (set(), set())
    decoder.begin_generation(5, 100)
    if decoder.slots.aside is not None:  # else those that there are go on until they are made
        decoder.slots.aside.wait()
    model(token, past_key_values=first)
    model(token.expand(3, 1), past_key_values=second)
    assert steps_of(model).num_slots == 8
    assert reads.take() == (set(), set())


@torch.no_grad()
def test_memory_goes_over(backend: tuple[str, str], tiny_folders: dict[str, Path]) -> None:
    """What no layer has any more is given back at once, and all of it in the end."""
    model = load(tiny_folders["llama"], "full", backend)
    decoder = decoder_of(model)
    token = torch.ones(1, 1, dtype=torch.long, device=model.device)
    cache = model.new_cache()
    model(random_tokens(1, 500).to(model.device), past_key_values=cache)
    sizes = []
    for text in ("GG GG GG", "GG .. ..", "GG GG GG", "G. G. G.", "GG GG GG"):
        decoder.place(placed(text))
        kept = decoder.device_bytes
        model(token, past_key_values=cache)
        assert kept <= decoder.device_bytes
        sizes.append(resident_of(model).budget.reserved_bytes)
    assert sizes[0] == sizes[2] == sizes[4]
    assert max(sizes[1], sizes[3]) < sizes[0]
    decoder.place(placed("GG GG .."))
    cache.crop(-490)
    decoder.forget(cache.seqs[0])
    assert decoder.device_bytes == 0


@torch.no_grad()
def test_without_room_beside_the_old_all_is_loaded_anew(
    backend: tuple[str, str], tiny_folders: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """New buffers and pages are filled, the pages where other layers had theirs."""
    plain = load(tiny_folders["llama"], "full", ("cpu", None))
    model = load(tiny_folders["llama"], "full", backend)
    decoder, tokens = decoder_of(model), random_tokens(1, 200)

    def run(of: Any, cache: Any, token: torch.Tensor) -> torch.Tensor:
        return of(token.to(of.device), past_key_values=cache).logits[:, -1:].argmax(-1).cpu()

    caches = plain.new_cache(), model.new_cache()
    token = run(plain, caches[0], tokens)
    assert torch.equal(run(model, caches[1], tokens), token)
    allow_device_bytes(model, 4 * 14 * model.kv_store.page_bytes // 2)
    make, failed = PreparedSteps._make_step, []

    def fail_once(self: PreparedSteps) -> Any:
        if decoder.slots.kept is not None and not failed:
            failed.append(decoder.slots.kept)
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return make(self)

    monkeypatch.setattr(PreparedSteps, "_make_step", fail_once)
    for text in ("GG GG ..", "GG .. ..", "GG G. G.", "G. G. GG", "GG .. GG"):
        decoder.place(placed(text))
        wanted = run(plain, caches[0], token)
        assert torch.equal(run(model, caches[1], token), wanted)
        assert decoder.placement == placed(text)
        token = wanted
    assert len(failed) == 1
    decoder.placed.keeps = True
    decoder.place(placed("GG GG G."))
    with pytest.raises(DeviceMemoryError, match="place fewer heads"):
        run(model, caches[1], token)

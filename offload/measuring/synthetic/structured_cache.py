"""Keys, values and decode-step queries that attention treats like those of a real model.

On independent noise every selection method is meaningless: attention there is diffuse, nothing
repeats from one step to the next, and neighbours have nothing in common. Here the score of a query
of position t with the key of token i is a sum of what attention maps of real models show:

    sink       every key but the first tokens' has a common direction, from which queries point
               away, so that the first token takes the share of attention drawn for the head
    local      rotary pairs: cos(w_j (t - i)) over frequencies w_j, highest at t = i and falling
               with the logarithm of the distance
    slash      the same pairs with a phase shift: a second, narrower peak at a fixed distance
    vertical   heavy hitters: runs of tokens with a heavy-tailed strength along one of three
               directions that every query has some of
    topics     contiguous spans share a direction; the queries follow the text's own topic and one
               other, which they leave for another after `residence` steps on average
    content    tokens are drawn from a Zipf vocabulary: a key is its token's vector, the preceding
               token's and its phrase's (a few neighbours); a query is a fixed vector, one that
               drifts and one that is new in every step

Heads differ in the weight of each, in the sink's share and in their slashes. The query heads of
one KV head share a part of their content, and so do the layers of one sequence: hitters, topics and
vocabulary are the sequence's, and adjacent layers keep some of the same tokens, as TidalDecode
relies on.

The constants of `Structure` were fitted, by random search, to the statistics of
SmolLM2-135M-Instruct (layers 2 to 29) on 8K tokens of prose (tests/cases/attention_statistics.py).
Heavy hitters grow in number like kv_len ** hitter_growth only. In shorter and in longer contexts
scores are flatter (by the power `flattening` of the ratio to 8K, local ones by half of it): shorter
ones as measured, longer ones so that LFPS's candidates for alpha 0.2 fall to 1.4 % of 128K tokens
before expansion (the paper's Table 4: 1.7 % with it), which is all that is known of attention
there.
Values are vectors of the vocabulary: only keys and queries decide what is selected.

These keys are for times and for how they grow. How good a selection is, real text has to tell
(docs/notes/quality-on-real-text.md): pages and clusters of keys are less alike here than in the
real model, where Quest with 1,024 of 6K to 7K tokens keeps 0.93 of the attention (here 0.82 of 8K).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Generator, Tensor

from offload.models.shape import ModelShape

_KINDS = 3  # directions of heavy hitters
_VOCABULARY = 4096
_MAX_PAIRS = 32
_SINK_TOKENS = 4
_FITTED_KV_LEN = 8192
PROMPT_QUERIES = 32  # of the prompt's last tokens, which policies may learn from


@dataclass(frozen=True)
class Structure:
    """How strong each part is, in units of the score (the exponent of the softmax).

    Attributes:
        local, local_spread: score at distance 0 above that far away; its sigma (of the logarithm)
            over heads.
        slash, num_slashes: the same for each phase-shifted peak.
        hitter, hitter_spread, hitter_tail: strength of a heavy hitter; its sigma over heads; share
            of it that is exponentially distributed.
        hitter_rate, hitter_run: share of tokens at which a run starts (times 1 - hitter_run);
            probability that it goes on.
        topic, topic_rate, topic_tail: as for hitters, inside spans of a queried topic.
        span_tokens, residence: mean length of a span in tokens, and of a query's stay in steps.
        content: standard deviation of the content's score.
        phrase, phrase_tokens: share of a key's content that its phrase has in common; mean length.
        fixed, drifting: shares of a query's content that stay, and that change slowly.
        head_spread: lognormal sigma over heads of `topic` and `content`.
        group_share: share of a query's content that its KV head's group has in common.
        layer_share: share of the content that all layers have in common.
        no_sink, max_sink: share of heads that ignore the sink; the largest share of others.
    """

    local: float = 16.6
    local_spread: float = 0.375
    slash: float = 2.32
    num_slashes: int = 3
    hitter: float = 2.2
    hitter_spread: float = 0.196
    hitter_tail: float = 0.248
    hitter_rate: float = 0.045
    hitter_run: float = 0.304
    topic: float = 1.22
    topic_rate: float = 0.05
    topic_tail: float = 0.487
    span_tokens: float = 300.0
    residence: float = 41.1
    content: float = 1.9
    phrase: float = 0.734
    phrase_tokens: float = 5.88
    fixed: float = 0.55
    drifting: float = 0.319
    drift: float = 0.995
    head_spread: float = 0.504
    group_share: float = 0.57
    layer_share: float = 0.6
    no_sink: float = 0.127
    max_sink: float = 0.58
    sink_wobble: float = 0.7
    hitter_growth: float = 0.9
    flattening: float = 0.06
    theta: float = 500000.0


@dataclass(frozen=True)
class StructuredLayer:
    """One layer of one sequence.

    Attributes:
        keys, values: [num_kv_heads, kv_len + num_steps, head_dim].
        queries: [num_qo_heads, prompt_queries + num_steps, head_dim], rotated like the keys; the
            last belongs to the last token.
    """

    keys: Tensor
    values: Tensor
    queries: Tensor


def structured_layer(
    shape: ModelShape,
    *,
    kv_len: int,
    num_steps: int,
    dtype: torch.dtype,
    seed: int,
    layer_idx: int = 0,
    prompt_queries: int = PROMPT_QUERIES,
    device: torch.device | None = None,
) -> StructuredLayer:
    """Make the keys and values of a prompt and of the steps after it, and their queries.

    Args:
        shape: whose heads are made.
        kv_len, num_steps: tokens of the prompt, and decode steps after it.
        seed: of the sequence; `layer_idx` is one of its layers. Equal arguments, equal tensors.
        prompt_queries: queries of the prompt's last tokens that are wanted too.
        device: where it is made, and stays; default the CPU. 8 heads of 128K tokens take some
            seconds there, and a fraction of one on a GPU.

    Raises:
        ValueError: numbers out of range.
    """
    num_qo_heads, num_kv_heads, head_dim = shape.num_qo_heads, shape.num_kv_heads, shape.head_dim
    if head_dim < 32 or head_dim % 8:
        raise ValueError(f"head_dim must be a multiple of 8 and at least 32, got {head_dim}")
    if num_kv_heads < 1 or num_qo_heads % num_kv_heads:
        raise ValueError(
            f"num_qo_heads must be a multiple of num_kv_heads={num_kv_heads}, got {num_qo_heads}"
        )
    num_queries = prompt_queries + num_steps
    if kv_len < 256 or not 1 <= num_queries <= kv_len // 2:
        raise ValueError(
            f"kv_len must be at least 256 and hold twice the {num_queries} queries, got {kv_len}"
        )
    group_size, num_tokens = shape.group_size, kv_len + num_steps
    device = device or torch.device("cpu")
    with device:  # of everything that is made below
        maker = _LayerMaker(head_dim, num_tokens, num_queries)
        layer = StructuredLayer(
            keys=torch.empty(num_kv_heads, num_tokens, head_dim, dtype=dtype),
            values=torch.empty(num_kv_heads, num_tokens, head_dim, dtype=dtype),
            queries=torch.empty(num_qo_heads, num_queries, head_dim, dtype=dtype),
        )
        # Heads differ evenly: few of them still cover what the model's many do.
        of_all = _generator(seed, num_kv_heads, layer_idx + 1, device)
        local = torch.special.ndtri(_even(num_kv_heads, of_all)).tolist()
        sinks = _even(num_qo_heads, of_all).view(num_kv_heads, group_size).tolist()
        for kv_head in range(num_kv_heads):
            streams = _Streams(
                _generator(seed, kv_head, 0, device),
                _generator(seed, kv_head, layer_idx + 1, device),
            )
            keys, values, queries = maker.make_head(streams, local[kv_head], sinks[kv_head], dtype)
            layer.keys[kv_head].copy_(keys)
            layer.values[kv_head].copy_(values)
            layer.queries[kv_head * group_size : (kv_head + 1) * group_size].copy_(queries)
    return layer


class _Streams(NamedTuple):
    """Random numbers of one KV head, on one device: its sequence's, and its layer's own."""

    of_sequence: Generator
    of_layer: Generator

    def mixed(self, share: float, *shape: int) -> Tensor:
        """Normal; a `share` of the variance is the same in all layers."""
        common = torch.randn(shape, generator=self.of_sequence).mul_(math.sqrt(share))
        own = torch.randn(shape, generator=self.of_layer).mul_(math.sqrt(1 - share))
        return common.add_(own)


class _LayerMaker:
    """Makes KV heads one at a time, so that only one is ever held in float32.

    A key is [1 | heavy hitters | rotary pairs | content], times head_dim ** 0.25; a query too, so
    that the scaled dot product is the sum of the parts' scores.
    """

    def __init__(self, head_dim: int, num_tokens: int, num_queries: int) -> None:
        self._structure = structure = Structure()
        self._head_dim = head_dim
        self._num_tokens, self._num_queries = num_tokens, num_queries
        # With fewer, far tokens now and then score like near ones; the content needs room, too.
        self._num_pairs = min(_MAX_PAIRS, 3 * head_dim // 8)
        self._hitters = slice(1, 1 + _KINDS)
        self._rotary = slice(1 + _KINDS, 1 + _KINDS + 2 * self._num_pairs)
        self._content = slice(self._rotary.stop, head_dim)
        self._content_dim = head_dim - self._rotary.stop
        self._unit = head_dim**0.25
        growth = num_tokens / _FITTED_KV_LEN
        self._rarity = growth ** (structure.hitter_growth - 1)
        self._sharpness = min(growth, 1 / growth) ** structure.flattening
        exponents = torch.arange(self._num_pairs, dtype=torch.float64) / self._num_pairs
        self._frequencies = structure.theta**-exponents
        # The same for all heads; float64, since float32 phases are wrong after 100,000 tokens.
        self._rotations = torch.empty(num_tokens, 2 * self._num_pairs)
        for start in range(0, num_tokens, 16384):
            rows = slice(start, min(start + 16384, num_tokens))
            positions = torch.arange(rows.start, rows.stop, dtype=torch.float64)
            phases = positions[:, None] * self._frequencies
            self._rotations[rows, 0::2] = phases.cos()
            self._rotations[rows, 1::2] = phases.sin()
        self._rotations *= self._unit

    def make_head(
        self, streams: _Streams, local: float, sinks: list[float], dtype: torch.dtype
    ) -> tuple[Tensor, Tensor, Tensor]:
        """keys float32 and values [num_tokens, head_dim], queries [group_size, n, head_dim].

        Args:
            local: how local the head is, in standard deviations.
            sinks: of each query head, in (0, 1), where it stands among all by share of sink.
        """
        structure, n = self._structure, self._num_tokens
        of_sequence, of_layer = streams
        ranks = torch.arange(_VOCABULARY, dtype=torch.float32)
        tokens = torch.multinomial(1 / (ranks + 20), n, replacement=True, generator=of_sequence)
        num_topics = min(200, max(4, round(n / structure.span_tokens / 3)))
        spans = _pieces(n, structure.span_tokens, 8, of_sequence)
        topic_of_span = torch.randint(num_topics, (int(spans[-1]) + 1,), generator=of_sequence)
        topics = topic_of_span[spans]
        directions = torch.randn(num_topics, self._content_dim, generator=of_sequence)
        directions /= directions.norm(dim=1, keepdim=True)

        keys = torch.empty(n, self._head_dim)
        keys[:, 0] = self._unit
        keys[:, self._hitters] = 0
        strengths = self._strengths(structure.hitter_rate, structure.hitter_tail, of_sequence)
        kinds = torch.randint(_KINDS, (n,), generator=of_sequence)
        keys[torch.arange(n), 1 + kinds] = strengths * self._unit
        keys[:, self._rotary] = self._rotations
        keys[:, self._content] = self._key_content(tokens, streams)
        strengths = self._strengths(structure.topic_rate, structure.topic_tail, of_sequence)
        chosen = strengths.nonzero().flatten()
        keys[chosen, self._content.start :] += (
            strengths[chosen, None] * self._unit * directions[topics[chosen]]
        )
        keys[:_SINK_TOKENS] *= 0.1
        keys[1:_SINK_TOKENS, 0] = 0.3 * self._unit
        keys[0, 0] = 0

        value_of_token = torch.randn(_VOCABULARY, self._head_dim, generator=of_layer)
        values = value_of_token.to(dtype)[tokens]
        values[:_SINK_TOKENS] *= 0.1
        paths = self._topic_paths(topics, num_topics, of_sequence)
        return keys, values, self._queries(keys, directions[paths], local, sinks, streams)

    def _strengths(self, rate: float, tail: float, generator: Generator) -> Tensor:
        """[num_tokens]: mean 1 at tokens of a run, 0 elsewhere."""
        n, run = self._num_tokens, self._structure.hitter_run
        starts = torch.rand(n, generator=generator) < rate * self._rarity * (1 - run)
        goes_on, goes_further = (torch.rand(n, generator=generator) < run for _ in range(2))
        hits = starts.clone()
        hits[1:] |= starts[:-1] & goes_on[1:]
        hits[2:] |= starts[:-2] & goes_on[1:-1] & goes_further[2:]
        sizes = torch.empty(n).exponential_(1.0, generator=generator)
        return (sizes.mul_(tail).add_(1 - tail)).mul_(hits)

    def _key_content(self, tokens: Tensor, streams: _Streams) -> Tensor:
        """[num_tokens, content_dim], half a unit in each dimension."""
        structure, dim = self._structure, self._content_dim
        phrases = _pieces(self._num_tokens, structure.phrase_tokens, 3, streams.of_sequence)
        rest = 1 - structure.phrase
        content: Tensor | None = None
        previous = tokens.roll(1)
        for ids, count, share in (
            (tokens, _VOCABULARY, 0.7 * rest),
            (previous, _VOCABULARY, 0.3 * rest),
            (phrases, int(phrases[-1]) + 1, structure.phrase),
        ):
            vectors = streams.mixed(structure.layer_share, count, dim)
            vectors *= 0.5 * self._unit * math.sqrt(share)
            part = vectors[ids]
            content = part if content is None else content.add_(part)
        assert content is not None
        return content

    def _topic_paths(self, topics: Tensor, num_topics: int, generator: Generator) -> Tensor:
        """int64 [num_queries, 2]: the text's own topic, and the other one that queries are on."""
        own = topics[-self._num_queries :]
        others = torch.randint(num_topics, (self._num_queries,), generator=generator)
        leaves = torch.rand(self._num_queries, generator=generator) < 1 / self._structure.residence
        stays = leaves.long().cumsum(0)
        return torch.stack([own, others[stays.clamp(max=self._num_queries - 1)]], 1)

    def _queries(
        self,
        keys: Tensor,
        directions: Tensor,
        locality: float,
        sinks: list[float],
        streams: _Streams,
    ) -> Tensor:
        """[group_size, num_queries, head_dim]; `directions` [num_queries, 2, content_dim] are those
        of the queries' topics."""
        structure, n = self._structure, self._num_queries
        of_layer = streams.of_layer
        group_parts = self._content_parts(streams)
        queries = torch.empty(len(sinks), n, self._head_dim)
        for query, sink in zip(queries, sinks, strict=True):
            own_parts = self._content_parts(streams)
            content = torch.zeros(n, self._content_dim)
            for group_part, own_part in zip(group_parts, own_parts, strict=True):
                content += math.sqrt(structure.group_share) * group_part
                content += math.sqrt(1 - structure.group_share) * own_part
            # Keys have half a unit in each of the content's dimensions.
            weight = 2 * structure.content * _lognormal(structure.head_spread, of_layer)
            content *= weight / math.sqrt(self._content_dim)
            weights = 1 + 0.25 * _drift(n, (2,), 0.9, of_layer)
            weights *= structure.topic * _lognormal(structure.head_spread, of_layer)
            content += (weights[:, :, None] * directions).sum(1)
            query[:, self._content] = content
            spreads = (structure.hitter_spread * torch.randn(_KINDS, generator=of_layer)).exp()
            hitters = structure.hitter * spreads * (1 + 0.2 * _drift(n, (_KINDS,), 0.95, of_layer))
            query[:, self._hitters] = hitters
            spread = structure.local_spread * math.sqrt(0.5)
            local = structure.local * math.exp(spread * (locality + _normal(of_layer)))
            query *= self._sharpness
            query[:, self._rotary] = self._rotary_part(local, of_layer) * self._sharpness**0.5
            query[:, 0] = 0
            query *= self._unit
            query[:, 0] = -self._sink_advantage(query, keys, sink, of_layer) * self._unit
        return queries

    def _content_parts(self, streams: _Streams) -> list[Tensor]:
        """What stays, drifts and is new in every step: [num_queries or 1, content_dim] each."""
        structure, n, dim = self._structure, self._num_queries, self._content_dim
        share = structure.layer_share
        new = 1 - structure.fixed - structure.drifting
        fixed = streams.mixed(share, 1, dim)
        drifts = [_drift(n, (dim,), structure.drift, g) for g in streams]
        drifting = math.sqrt(share) * drifts[0] + math.sqrt(1 - share) * drifts[1]
        fresh = streams.mixed(share, n, dim)
        return [
            math.sqrt(structure.fixed) * fixed,
            math.sqrt(structure.drifting) * drifting,
            math.sqrt(new) * fresh,
        ]

    def _rotary_part(self, local: float, generator: Generator) -> Tensor:
        structure, n, pairs = self._structure, self._num_queries, self._num_pairs
        positions = torch.arange(self._num_tokens - n, self._num_tokens, dtype=torch.float64)
        part = torch.zeros(n, pairs, 2, dtype=torch.float64)
        # A slash is narrow: it has the high frequencies only.
        narrow = (torch.arange(pairs) < pairs // 2) / (pairs // 2)
        amplitudes = [torch.full((pairs,), local / pairs)]
        distances = [0.0]
        furthest = math.log(0.6 * self._num_tokens)
        for _ in range(structure.num_slashes):
            place, size = torch.rand(2, generator=generator).tolist()
            distances.append(round(math.exp(math.log(80) + place * (furthest - math.log(80)))))
            amplitudes.append(narrow * structure.slash * (0.5 + size))
        for distance, amplitude in zip(distances, amplitudes, strict=True):
            phases = (positions[:, None] - distance) * self._frequencies
            part[..., 0] += phases.cos() * amplitude
            part[..., 1] += phases.sin() * amplitude
        return part.flatten(1).float()

    def _sink_advantage(
        self, query: Tensor, keys: Tensor, place: float, generator: Generator
    ) -> Tensor:
        """[num_queries]: how much less every other token scores, for the head's share of sink."""
        structure, n = self._structure, self._num_queries
        ignores = structure.no_sink
        share = 5e-4
        if place >= ignores:
            share = 0.02 + structure.max_sink * (place - ignores) / (1 - ignores)
        # The log-sum-exp of all tokens, estimated from every 8th and all recent ones.
        near = self._num_tokens - n - 128
        near_keys, far_keys = keys[near : self._num_tokens - n], keys[_SINK_TOKENS:near:8]
        scale = self._head_dim**-0.5
        first = query[: min(8, n)]
        scores = torch.cat(
            [first @ near_keys.T * scale, first @ far_keys.T * scale + math.log(8)], 1
        )
        others = float(scores.logsumexp(1).mean())
        advantage = others + math.log(share / (1 - share))
        return advantage + structure.sink_wobble * _drift(n, (), 0.8, generator)


def _generator(
    seed: int, kv_head: int, stream: int, device: torch.device | None = None
) -> Generator:
    """The generator of one stream of one KV head of one sequence; a device has its own numbers."""
    number = (seed * 1009 + kv_head) * 1009 + stream
    # Torch takes 64 bits. The modulus is a prime, so that seeds of powers of 2 stay apart.
    return Generator(device or "cpu").manual_seed(number % (2**63 - 25))


def _even(n: int, generator: Generator) -> Tensor:
    """A permutation of n numbers spread evenly over (0, 1)."""
    return (torch.randperm(n, generator=generator, device=generator.device) + 0.5) / n


def _pieces(n: int, mean_tokens: float, min_tokens: int, generator: Generator) -> Tensor:
    """int64 [n]: which piece of contiguous tokens each token is in; at least min_tokens long."""
    count = n // min_tokens + 1
    lengths = torch.empty(count, device=generator.device).exponential_(
        1 / max(1.0, mean_tokens - min_tokens), generator=generator
    )
    starts = (lengths.long() + min_tokens).cumsum(0)
    of_token = torch.zeros(n, dtype=torch.int64, device=generator.device)
    of_token[starts[starts < n]] = 1
    return of_token.cumsum(0)


def _drift(n: int, shape: tuple[int, ...], correlation: float, generator: Generator) -> Tensor:
    """[n, *shape]: normal in every step, with that correlation to the step before."""
    noise = torch.randn(n, *shape, generator=generator, device=generator.device)
    # One product instead of a loop over steps, each of which would be some launches on a GPU.
    ages = torch.arange(n, device=generator.device, dtype=torch.float64)
    ages = ages[:, None] - ages
    weights = torch.where(ages < 0, 0.0, correlation ** ages.clamp_min(0))
    weights[:, 1:] *= math.sqrt(1 - correlation**2)
    return (weights.float() @ noise.view(n, -1)).view(noise.shape)


def _normal(generator: Generator) -> float:
    """One number."""
    return float(torch.randn((), generator=generator, device=generator.device))


def _lognormal(sigma: float, generator: Generator) -> float:
    """One number; of mean 1."""
    return math.exp(sigma * _normal(generator) - sigma * sigma / 2)

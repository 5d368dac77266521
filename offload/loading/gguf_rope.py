"""The rotary embedding of a GGUF file, as transformers' rope_parameters; both ways to scale it.

llama.cpp's converter writes linear and YaRN scaling as metadata, and Llama 3's as the divisors of
each frequency, a tensor without the parameters that it was made from.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from offload.loading.gguf_header import GgufHeader

ROPE_FREQS = "rope_freqs.weight"
_STANDS_STILL = 1e30  # divides a frequency that does not rotate
_LOW, _HIGH = 1.0, 4.0  # low_freq_factor and high_freq_factor of every Llama so far
_SCALING_KEYS = {"type", "factor", "original_context_length", "finetuned"}
# YaRN's key in GGUF -> in rope_parameters.
_YARN = {
    "yarn_attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}
# What transformers has no parameter for -> the value with which it does nothing.
_NEUTRAL = {"attn_factor": 1.0, "yarn_ext_factor": 1.0, "yarn_log_multiplier": 0.0, "alpha": 0.0}


def rope_parameters(
    header: GgufHeader, architecture: str, head_dim: int, max_context: int
) -> dict[str, Any]:
    """rope_parameters of the model in a GGUF file.

    Raises:
        ValueError: a scaling that transformers does not know, or whose numbers make no sense.
    """
    theta = positive_number(header.metadata, f"{architecture}.rope.freq_base", 10000.0)
    if theta <= 1.0:
        raise ValueError(f"{architecture}.rope.freq_base must be above 1, got {theta}")
    scaling = _scaling(header.metadata, architecture, max_context)
    if ROPE_FREQS in header.tensors:
        divisors = _divisors(header, head_dim)
        if scaling and not np.all(divisors == 1.0):
            raise ValueError(f"{ROPE_FREQS} beside {architecture}.rope.scaling is not supported")
        scaling = scaling or _scaling_of(divisors, theta, max_context)
    return {"rope_type": "default", "rope_theta": theta, **scaling}


def _scaling(metadata: dict[str, Any], architecture: str, max_context: int) -> dict[str, Any]:
    """What the metadata says; nothing where it does not scale."""
    prefix = f"{architecture}.rope.scaling."
    found = {key.removeprefix(prefix) for key in metadata if key.startswith(prefix)}
    for key in sorted(found - _SCALING_KEYS - _YARN.keys()):
        if metadata[prefix + key] != _NEUTRAL.get(key):
            raise ValueError(f"{prefix}{key}={metadata[prefix + key]!r} is not supported")
    kind = metadata.get(f"{prefix}type", "linear")  # as llama.cpp has it
    if kind not in ("none", "linear", "yarn"):
        raise ValueError(f"unknown {prefix}type {kind!r:.60}; available: linear, none, yarn")
    old_key = f"{architecture}.rope.scale_linear"
    key = f"{prefix}factor" if "factor" in found else old_key
    factor = positive_number(metadata, key, 1.0) if metadata.get(key) != 0 else 1.0
    scales_attention = kind == "yarn" and "yarn_attn_factor" in found
    if kind == "none" or (factor == 1.0 and not scales_attention):
        return {}
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    original = metadata.get(f"{prefix}original_context_length", max_context)
    if type(original) is not int or not 0 < original <= max(max_context, 1):
        raise ValueError(
            f"{prefix}original_context_length must be in 1..{max_context}, got {original!r:.60}"
        )
    optional = {
        name: positive_number(metadata, prefix + key, 1.0)
        for key, name in _YARN.items()
        if key in found
    }
    return {
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": original,
        **optional,
    }


def _divisors(header: GgufHeader, head_dim: int) -> np.ndarray[Any, np.dtype[np.float64]]:
    """What each frequency is divided by: float64 [head_dim / 2]."""
    tensor = header.tensors[ROPE_FREQS]
    if tensor.shape != (head_dim // 2,) or tensor.type_name != "F32":
        raise ValueError(
            f"{ROPE_FREQS} must be F32 [{head_dim // 2}], got {tensor.type_name} "
            f"{list(tensor.shape)}"
        )
    divisors = header.float32(ROPE_FREQS).astype(np.float64)
    if not np.all(np.isfinite(divisors)) or not np.all(divisors > 0.0):
        raise ValueError(f"{ROPE_FREQS} must hold positive numbers")
    return divisors


def _scaling_of(
    divisors: np.ndarray[Any, np.dtype[np.float64]], theta: float, max_context: int
) -> dict[str, Any]:
    """Gemma 4's or Llama 3's parameters if they explain the divisors, or else these as they are.

    Between the wavelengths that stay and those that are divided by `factor`, Llama 3 divides by
    1 / ((1 - s) / factor + s), where s = (original / wavelength - low) / (high - low): one such
    frequency tells the original context.
    """
    if np.all(divisors == 1.0):
        return {}
    num_frequencies = len(divisors)
    num_rotated = int((divisors == 1.0).sum())
    if np.all(divisors[num_rotated:] >= _STANDS_STILL * (1 - 1e-6)):
        part = num_rotated / num_frequencies
        if int(part * 2 * num_frequencies // 2) < num_rotated:  # as transformers counts
            part = math.nextafter(part, 1.0)
        return {"rope_type": "proportional", "partial_rotary_factor": part}
    factor = float(divisors.max())
    wavelengths = 2 * math.pi * theta ** (np.arange(num_frequencies) / num_frequencies)
    between = (divisors > 1.0) & (divisors < factor)
    if between.any():
        s = (1 / divisors[between] - 1 / factor) / (1 - 1 / factor)
        original = round(float(np.mean((s * (_HIGH - _LOW) + _LOW) * wavelengths[between])))
        s = np.clip((original / wavelengths - _LOW) / (_HIGH - _LOW), 0.0, 1.0)
        if np.allclose(1 / ((1 - s) / factor + s), divisors, rtol=1e-5, atol=0.0):
            return {
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": _LOW,
                "high_freq_factor": _HIGH,
                "original_max_position_embeddings": original,
            }
    # LongRoPE with one set of divisors for short and for long contexts.
    return {
        "rope_type": "longrope",
        "short_factor": divisors.tolist(),
        "long_factor": divisors.tolist(),
        "factor": 1.0,
        "attention_factor": 1.0,
        "original_max_position_embeddings": max_context,
    }


def positive_number(metadata: dict[str, Any], key: str, default: float) -> float:
    """A number of the metadata; ValueError if it is no positive float."""
    value = metadata.get(key, default)
    if not isinstance(value, float) or not 0.0 < value < math.inf:
        raise ValueError(f"{key} must be a positive number, got {value!r:.60}")
    return value

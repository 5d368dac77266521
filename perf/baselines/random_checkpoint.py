"""A checkpoint of a known shape with random weights, which servers read as any other.

Successive queries are alike, as those of real models are (`_make_alike`).

    python -m perf.baselines.random_checkpoint llama-3.1-8b FOLDER

Its vocabulary is the embedded model's, or that of a tokenizer which is in the folder already.
"""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM

from offload.loading.embedded_package import EMBEDDED_MODEL
from offload.loading.names import load_tokenizer
from offload.models.shape import MODEL_SHAPES

# The common part of embeddings against the other. Of a choice of a 32nd of 4,096 tokens 82 % are
# among three times as many that were chosen last, of smollm2-135m-instruct 84 %, without it 12 %
# (a layer of 8 heads of 128, 24 steps).
_ALIKE = 1.65
_SMALL = 1e-3  # what layers add, against what such weights would


def write_checkpoint(shape_name: str, folder: Path, max_positions: int = 262144) -> None:
    """In bfloat16; made on a GPU where there is one.

    Raises:
        KeyError: no shape has this name.
    """
    shape, has_one = MODEL_SHAPES[shape_name], (folder / "tokenizer.json").exists()
    if has_one:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    else:
        tokenizer = load_tokenizer(EMBEDDED_MODEL)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=shape.hidden_size,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=shape.num_layers,
        num_attention_heads=shape.num_qo_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        max_position_embeddings=max_positions,
        rope_parameters={"rope_type": "default", "rope_theta": shape.rope_theta},
        dtype=torch.bfloat16,
    )
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("cuda" if torch.cuda.is_available() else "cpu"), torch.no_grad():
            model = LlamaForCausalLM(config)
            _make_alike(model)
            model.save_pretrained(folder)
    finally:
        torch.set_default_dtype(before)
    tokenizer.save_pretrained(folder)


def _make_alike(model: LlamaForCausalLM) -> None:
    """Give all embeddings a part in common, which keys do not see, and have hidden states stay near
    them: heads choose many of the tokens that they chose in the steps before."""
    common = torch.randn(model.config.hidden_size) * model.model.embed_tokens.weight.std()
    model.model.embed_tokens.weight += _ALIKE * common
    direction = (common / common.norm()).float()
    for layer in model.model.layers:
        keys = layer.self_attn.k_proj.weight
        keys -= ((keys.float() @ direction)[:, None] * direction).to(keys.dtype)
        layer.self_attn.o_proj.weight *= _SMALL
        layer.mlp.down_proj.weight *= _SMALL


if __name__ == "__main__":
    write_checkpoint(sys.argv[1], Path(sys.argv[2]))

"""Tiny shapes that stand for those of other layers than Llama's."""

from offload.models.shape import ModelShape

TINY_WINDOWED = {
    "gemma-3-12b": ModelShape(
        4, 128, 4, 2, 32, 256, 512, 8192, 1000000.0, True, windows=(300, 300, 0, 300)
    ),
    "gpt-oss-20b": ModelShape(
        4,
        128,
        4,
        2,
        32,
        64,
        512,
        8192,
        150000.0,
        windows=(128, 0, 128, 0),
        num_experts=4,
        experts_per_token=2,
        expert_size=64,
    ),
}

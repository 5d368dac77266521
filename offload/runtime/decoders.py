"""What decodes a model that was opened."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from offload.decode.cpu import NativeDecoder
from offload.decode.decoder import Decoder
from offload.kv.store import KVStore
from offload.runtime.compressing import compression_for
from offload.runtime.model_loading import LoadedModel


def make_decoder(opened: LoadedModel, store: KVStore, make_room: Callable[[], bool]) -> Decoder:
    """Native kernels decode without a GPU, the pipeline with one.

    Args:
        make_room: as of `DeviceDecoder`.
    """
    config = opened.config
    make_compression = partial(compression_for, config, opened.lean)
    if opened.backend is None:
        of_model = opened.lean, store, config.policy, opened.num_threads
        return NativeDecoder(*of_model, make_compression)
    from offload.decode.gpu.decoder import DeviceDecoder

    return DeviceDecoder(
        opened.lean,
        store,
        config.policy,
        device=opened.device,
        backend=opened.backend,
        num_threads=opened.num_threads,
        deadline_seconds=config.deadline_seconds,
        device_budget_bytes=opened.device_kv_bytes,
        device_limit_bytes=config.max_memory.get(opened.device.index or 0),
        placement=opened.placement,
        keeps_placement=config.placement is not None,
        choose=opened.choose,
        most_together=None if opened.choose is None else opened.choose.most_together,
        make_room=make_room,
        make_compression=make_compression,
    )

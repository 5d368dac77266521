"""Progress bars of transformers that leave nothing on stderr."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


@contextlib.contextmanager
def passing_bars() -> Iterator[None]:
    """transformers' bars go away when they are done, and show on a terminal only.

    Its bar over the tensors of a GGUF file, too, which ignores transformers' own settings.
    """
    from transformers import modeling_gguf_pytorch_utils
    from transformers.utils import logging

    gguf_loading: Any = modeling_gguf_pytorch_utils
    before: Any = None

    def make(factory: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any]) -> Any:
        options = {"leave": False, "disable": None, **options}
        return factory(*args, **options) if before is None else before(factory, args, options)

    before, gguf_bar = logging.set_tqdm_hook(make), gguf_loading.tqdm
    gguf_loading.tqdm = logging.tqdm
    try:
        yield
    finally:
        gguf_loading.tqdm = gguf_bar
        logging.set_tqdm_hook(before)

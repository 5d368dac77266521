"""Train the adapter of smollm2-135m-instruct-32k on one GPU.

    python -m perf.train_long_context --model FOLDER --corpus corpus.xz --out FOLDER --minutes 8

FOLDER of --model is the stock model converted to safetensors, corpus.xz is what
`perf.long_context.text` packed. A run that was cut off goes on with the same command.
"""

from __future__ import annotations

from perf.long_context.train import main

if __name__ == "__main__":
    main()

"""How smollm2-135m-instruct-32k was made: text, tasks, training and evaluation.

`text` packs token ids of Debian packages, `tasks` generates documents with questions from them,
`lora` is the adapter, `train` trains it on one GPU, `evaluate` compares it with the stock model.
"""

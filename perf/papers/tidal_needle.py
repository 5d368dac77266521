"""TidalDecode's select layers by one needle: `python -m perf.papers.tidal_needle --device cuda`.

"noise": RULER's niah_single_1, a number among repeated sentences. "telephone": needles like the
demo's in the demo's text, each of another place, number and depth. "magic": those of `offload eval
needle`, each with another text, too. Of the latter two a model of 135M finds about half with full
attention. And the demo's own. Each prompt is read once, and answered by full
attention and by the policy with each choice of layers and each budget.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from offload import load_tokenizer
from offload.bench.eval.answers import answer_sample
from offload.bench.eval.haystack import prose_words
from offload.bench.eval.labels import windows_of
from offload.bench.eval.needle import depth_samples
from offload.bench.eval.prompt import prompt_counter, text_counter
from offload.bench.eval.ruler import ruler_samples
from offload.bench.eval.sample import Sample
from offload.loading.gguf import EMBEDDED_MODEL
from offload.loading.names import checkpoint_name, resolve_folder
from offload.loading.planned_model import planned_model
from offload.policies import Policy
from offload.policies.registry import make_policy
from offload.policies.tidal_decode import SelectLayers, parse_layers
from offload.policies.tidal_decode.kept_layers import kept_layers
from offload.runtime.config import runtime_config
from offload.runtime.shared_model import SharedModel
from offload.system.stdlib_text import DEMO_ANSWER, DEMO_NEEDLE, DEMO_QUESTION, filler_prompt
from perf.results_file import Run, hide_loading_bars, script_options

SWEPT = "swept"
DENSE_LAYERS = 2
_ANSWER_TOKENS = 24
_DEMO_PLACE = "Fairhaven lighthouse"
_PLACES = ("Ashby", "Calder", "Dunmore", "Elstow", "Harwick", "Kelso", "Marlow", "Penrith")
_KINDS_OF_PLACE = ("library", "ferry", "bakery", "museum", "harbour", "theatre", "mill", "school")
Row = dict[str, Any]


def layers_named(name: str, model: str) -> tuple[int, ...]:
    """Layers by numbers, a layers file, or SWEPT: those that the policy finds for the model.

    Raises:
        ValueError: nobody has swept this model's.
    """
    if name != SWEPT:
        layers = parse_layers(name)
    else:
        planned, checkpoint = planned_model(model), checkpoint_name(resolve_folder(model))
        shape = planned.shape.kv_heads
        layers = kept_layers(checkpoint, DENSE_LAYERS, **shape, model_type=planned.model_type)
        if layers is None:
            raise ValueError(
                f"no swept layers of {model}: run `offload calibrate {model} --policy "
                "tidal_decode`, or give --layers"
            )
    return layers.select_layers if isinstance(layers, SelectLayers) else layers or ()


def noise_needles(tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """At any depth."""
    count_tokens = text_counter(tokenizer)
    samples = ruler_samples(
        "niah_single_1", length, count, prose=[], seed=seed, count_tokens=count_tokens
    )
    return [replace(sample, max_new_tokens=_ANSWER_TOKENS) for sample in samples]


def magic_needles(tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """From the beginning of the text to its end."""
    prose, count_prompt = prose_words(None), prompt_counter(tokenizer, chat=True)
    common: Row = {"count_prompt": count_prompt, "prose": prose}
    samples = [
        depth_samples(depth, length, 1, seed=seed * 1000 + i, **common)[0]
        for i, depth in enumerate(_depths(count))
    ]
    return [replace(sample, max_new_tokens=_ANSWER_TOKENS) for sample in samples]


def telephone_needles(tokenizer: Any, length: int, count: int, seed: int) -> list[Sample]:
    """From the beginning of the text to its end."""
    rng = random.Random(seed)
    places = [f"{name} {kind}" for name in _PLACES for kind in _KINDS_OF_PLACE]
    samples = []
    for depth, place in zip(_depths(count), rng.sample(places, count), strict=True):
        number = f"555-{rng.randint(0, 9999):04}"
        needle, question = (
            text.replace(_DEMO_PLACE, place).replace(DEMO_ANSWER, number)
            for text in (DEMO_NEEDLE, DEMO_QUESTION)
        )
        samples.append(_filled(tokenizer, length, depth, needle, question, number))
    return samples


def demo_sample(tokenizer: Any, length: int) -> Sample:
    """What `offload generate --demo --context LENGTH` asks."""
    return _filled(tokenizer, length, None, DEMO_NEEDLE, DEMO_QUESTION, DEMO_ANSWER)


def _filled(
    tokenizer: Any, length: int, depth: int | None, needle: str, question: str, answer: str
) -> Sample:
    """In the demo's text, framed already.

    Args:
        depth: in per cent of the paragraphs; None: where the demo has it.
    """

    def framed(message: str) -> str:
        turns = [{"role": "user", "content": message}]
        text: str = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
        return text

    def count_tokens(text: str) -> int:
        return len(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    room = length - count_tokens(framed(""))
    message = filler_prompt(count_tokens, num_tokens=room, question=question, needle=needle)
    if depth is not None:
        opening, *paragraphs, asked = message.split("\n\n")
        paragraphs.remove(needle)
        paragraphs.insert(round(len(paragraphs) * depth / 100), needle)
        message = "\n\n".join([opening, *paragraphs, asked])
    task = "demo" if depth is None else f"depth {depth} %"
    return Sample(task, length, 0, framed(message), "", (answer,), _ANSWER_TOKENS, delimiter="")


def _depths(count: int) -> list[int]:
    return [round(100 * i / max(1, count - 1)) for i in range(count)]


def rows_of(
    kind: str,
    answered: Sequence[Mapping[str, Any]],
    demo: Mapping[str, Any],
    about: Mapping[str, Row],
) -> list[Row]:
    """One of each policy.

    Args:
        answered: records of `answer_sample`, of the needles of this kind.
        demo: the same of the demo's.
        about: by label, what else a row says.
    """
    rows = []
    for label, settings in about.items():
        said = [record["answers"][label] for record in answered]
        by_full = [record["answers"]["full"]["score"] == 1 for record in answered]
        wrong = [
            {"wanted": record["outputs"][0], "said": answer["answer"]}
            for record, answer in zip(answered, said, strict=True)
            if answer["score"] < 1
        ]
        rows.append(
            {"kind": kind, "policy": label, **settings}
            | {
                "needles": len(said),
                "right": len(said) - len(wrong),
                "lost": sum(
                    full and answer["score"] < 1 for full, answer in zip(by_full, said, strict=True)
                ),
                "demo_right": demo["answers"][label]["score"] == 1,
                "demo": demo["answers"][label]["answer"],
                "wrong": wrong,
            }
        )
    return rows


KINDS: dict[str, Callable[[Any, int, int, int], list[Sample]]] = {
    "noise": noise_needles,
    "telephone": telephone_needles,
    "magic": magic_needles,
}


def main() -> None:
    parser = script_options(__doc__, "tidal-needle")
    parser.add_argument("--model", default=EMBEDDED_MODEL)
    parser.add_argument("--length", type=int, default=6400, help="tokens of prompt and answer")
    parser.add_argument("--needles", type=int, default=32, help="of each kind, 64 at most")
    parser.add_argument("--kinds", nargs="+", default=[*KINDS], choices=KINDS)
    parser.add_argument("--budgets", type=int, nargs="+", default=[1024, 320])
    parser.add_argument("--layers", nargs="+", default=[SWEPT, "2,6,17,21"], metavar="LAYERS")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    options = parser.parse_args()
    try:
        named = {Path(name).name: layers_named(name, options.model) for name in options.layers}
    except (ValueError, OSError) as error:
        parser.error(str(error))

    hide_loading_bars()
    run = Run(options)
    policies: dict[str, Policy] = {"full": make_policy("full")}
    about: dict[str, Row] = {"full": {"layers": [], "budget_tokens": None}}
    for budget in options.budgets:
        for name, layers in named.items():
            label = f"{name}, {budget}"
            policies[label] = make_policy(
                "tidal_decode",
                select_layers=layers,
                budget_tokens=budget,
                dense_layers=DENSE_LAYERS,
                **windows_of(budget),
            )
            about[label] = {"choice": name, "layers": list(layers), "budget_tokens": budget}
    config = runtime_config(device=options.device, dtype="bfloat16", num_threads=options.threads)
    model = SharedModel(options.model, list(policies.values()), config)
    tokenizer = load_tokenizer(options.model)
    demo = answer_sample(
        model, list(policies), tokenizer, demo_sample(tokenizer, options.length), chat=False
    )
    run.say(f"the demo: { {label: x['answer'] for label, x in demo['answers'].items()} }")
    settings = run.named("model", "length", "seed", "device")
    rows: list[Row] = []
    for kind in options.kinds:
        answered: list[Row] = []
        of_kind: list[Row] = []
        for sample in KINDS[kind](tokenizer, options.length, options.needles, options.seed):
            chat = bool(sample.answer_prefix)  # else it is framed
            answered.append(answer_sample(model, list(policies), tokenizer, sample, chat=chat))
            of_kind = rows_of(kind, answered, demo, about)
            right = {row["policy"]: row["right"] for row in of_kind}
            run.say(f"{kind}, {sample.task}; right so far: {right}")
        rows += of_kind
        run.write(settings, rows)


if __name__ == "__main__":
    main()

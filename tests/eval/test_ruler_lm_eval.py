"""Prompts and scores are lm-eval's, sample by sample, where both have the same prose."""

from __future__ import annotations

import importlib
import random
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cases.slowly import slow_but

from offload.bench.eval import words
from offload.bench.eval.prompt import prompt_text
from offload.bench.eval.ruler import RULER_TASKS, ruler_samples
from offload.bench.eval.ruler.niah import sentences_of
from offload.bench.eval.sample import Sample, string_match_all

PROSE = ("It was a dark night. The rain fell in torrents! Who was there? " * 400).split()
NUM_SAMPLES = 3
SEED = 5
CHAT = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


class WordTokenizer:
    """A token for each word, so that long prompts are made at once."""

    name_or_path = "words"

    def __call__(self, text: str) -> Any:
        return SimpleNamespace(input_ids=text.split())


@pytest.fixture(scope="module")
def lm_eval() -> Any:
    """lm-eval's own modules and ours over some of the words, as all of them take lm-eval seconds;
    sentences are split by our rule, because NLTK's data is a download."""
    pytest.importorskip("lm_eval", reason="lm-eval is not installed (pip install lm-eval)")
    nltk = pytest.importorskip("nltk", reason="lm-eval's RULER wants nltk (pip install nltk)")
    some = {
        "nouns": words.word_list("nouns")[::5],
        "adjectives": [*words.word_list("adjectives")[::20], "old", "old-fashioned"],
        "verbs": words.word_list("verbs")[::5],
    }
    patch = pytest.MonkeyPatch()
    patch.setattr(nltk.data, "find", lambda name: None)
    patch.setattr(words, "word_list", some.__getitem__)
    module: Any = ModuleType("wonderwords")
    module.RandomWord = lambda: SimpleNamespace(
        _categories=some | {name[:-1]: of_kind for name, of_kind in some.items()}
    )
    patch.setitem(sys.modules, "wonderwords", module)
    names = ("common_utils", "prepare_niah", "niah_utils", "vt_utils", "cwe_utils", "fwe_utils")
    modules = [f"lm_eval.tasks.ruler.{name}" for name in names]
    words.needle_words.cache_clear()
    theirs = SimpleNamespace(
        **{
            name: importlib.import_module(module)
            for name, module in zip(names, modules, strict=True)
        }
    )
    # lm-eval downloads the data that splits sentences.
    patch.setattr(theirs.prepare_niah, "cached_sent_tokenize", sentences_of)
    yield theirs
    patch.undo()
    words.needle_words.cache_clear()
    for name in modules:
        sys.modules.pop(name)


def theirs(lm_eval: Any, task: str, length: int, tokenizer: Any) -> list[dict[str, Any]]:
    """The first documents that lm-eval makes after it was seeded."""
    random.seed(SEED)
    np.random.seed(SEED)  # noqa: NPY002 - which it draws from
    if task == "vt":
        utils = lm_eval.vt_utils
        example = utils.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=1, max_seq_length=500, incremental=5
        )[0]
        return utils.sys_vartrack_w_noise_random(
            tokenizer=tokenizer, num_samples=NUM_SAMPLES, max_seq_length=length, icl_example=example
        )
    if task == "cwe":
        importlib.reload(lm_eval.cwe_utils)  # it has a generator that goes on from call to call
        random.seed(SEED)
        return lm_eval.cwe_utils.sys_word_pair_random(NUM_SAMPLES, length, tokenizer=tokenizer)
    if task == "fwe":
        return lm_eval.fwe_utils.sys_kwext(tokenizer, length, num_samples=NUM_SAMPLES)
    kinds: dict[str, tuple[str, str, str, dict[str, int]]] = {
        "niah_single_1": ("repeat", "words", "numbers", {}),
        "niah_single_2": ("essay", "words", "numbers", {}),
        "niah_single_3": ("essay", "words", "uuids", {}),
        "niah_multikey_1": ("essay", "words", "numbers", {"num_needle_k": 4}),
        "niah_multikey_2": ("needle", "words", "numbers", {}),
        "niah_multikey_3": ("needle", "uuids", "uuids", {}),
        "niah_multivalue": ("essay", "words", "numbers", {"num_needle_v": 4}),
        "niah_multiquery": ("essay", "words", "numbers", {"num_needle_q": 4}),
    }
    haystack, keys, values, numbers = kinds[task]
    is_prose = haystack == "essay"
    return lm_eval.prepare_niah.generate_samples(
        PROSE if is_prose else lm_eval.prepare_niah.get_haystack(haystack),
        tokenizer,
        max_seq_length=length,
        template=lm_eval.niah_utils.TEMPLATE,
        type_haystack=haystack,
        type_needle_k=keys,
        type_needle_v=values,
        num_samples=NUM_SAMPLES,
        **numbers,
    )


def lm_eval_prompt(doc: dict[str, Any], delimiter: str, tokenizer: Any, chat: bool) -> str:
    """As `fewshot_context` of lm-eval makes it of a document."""
    from lm_eval.api.task import ConfigurableTask
    from lm_eval.api.utils import multiturn_to_singleturn

    turns = ConfigurableTask.build_qa_turn(
        SimpleNamespace(),  # type: ignore[arg-type]
        q=doc["input"],
        gen_prefix=doc["gen_prefix"],
        tgt_delim=delimiter,
        few_delim="",
    )
    if not chat:
        return "".join(turn.to_text() for turn in turns)
    return tokenizer.apply_chat_template(
        multiturn_to_singleturn(turns),
        tokenize=False,
        add_generation_prompt=False,
        continue_final_message=True,
    )


@pytest.mark.parametrize("length", slow_but([2048, 4500], 2048))
@pytest.mark.parametrize("task", RULER_TASKS)
def test_prompts_are_those_of_lm_eval(
    task: str, length: int, lm_eval: Any, tokenizer: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    expected = theirs(lm_eval, task, length, WordTokenizer())
    capsys.readouterr()  # it prints
    got = ruler_samples(
        task,
        length,
        NUM_SAMPLES,
        seed=SEED,
        count_tokens=lambda text: len(text.split()),
        prose=PROSE,
    )
    assert len(got) == len(expected) == NUM_SAMPLES
    tokenizer.chat_template = CHAT
    for sample, doc in zip(got, expected, strict=True):
        assert list(sample.outputs) == doc["outputs"]
        for chat in (False, True):
            delimiter = "\n\n" if task == "cwe" else " "
            wanted = lm_eval_prompt(doc, delimiter, tokenizer, chat)
            assert prompt_text(sample, tokenizer, chat=chat) == wanted
    tokenizer.chat_template = None


def test_scores_are_those_of_lm_eval(lm_eval: Any) -> None:
    outputs = ["4711", "AbC", "x\ty"]
    for answer in (
        "",
        " 4711 and abc.",
        "47\n11",
        "ABC X\nY 4711",
        "\x0047\x0111 x\x09y",
        "4711" * 3,
    ):
        doc = {"max_length": 4096, "outputs": outputs}
        wanted = lm_eval.common_utils.process_results(doc, [answer])["4096"]
        assert string_match_all(answer, outputs) == wanted


def test_tokens_to_generate_are_those_of_lm_eval(lm_eval: Any) -> None:
    from pathlib import Path

    import yaml

    class Loader(yaml.SafeLoader):
        pass

    Loader.add_constructor("!function", lambda loader, node: node.value)
    folder = Path(lm_eval.common_utils.__file__).parent
    base = yaml.load((folder / "niah_single_1.yaml").read_text(), Loader)
    count = lambda text: len(text.split())  # noqa: E731
    prose = ["word."] * 3000
    for task in ("niah_single_1", "niah_multivalue", "vt", "cwe", "fwe"):
        config = base | yaml.load((folder / f"{task}.yaml").read_text(), Loader)
        (sample,) = ruler_samples(task, 1200, 1, seed=0, count_tokens=count, prose=prose)
        assert sample.max_new_tokens == config["generation_kwargs"]["max_gen_toks"]
        assert sample.delimiter == config["target_delimiter"]
        assert isinstance(sample, Sample)

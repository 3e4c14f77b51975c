"""Answers whose first tokens spell the end of the prompt, on every backend, with drafts, and beside other requests."""

import threading

import numpy as np
import pytest

import laneformer
from laneformer import custom_calls
from laneformer.errors import InputError
from laneformer.infer import Engine, Grammar, Sampling
from laneformer.infer.engine.xla import XlaBackend
from tests.support.checkpoints import save_checkpoint

pytestmark = pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
WORDS = ("\n    ", "\n        ", '"""\n', "    ", "):\n", "(a", "日!")
PROMPTS = ["def add(a, b):\n", 'x = """Text."""', "def add(", "a 日", "a\n    "]
DRAWS = [Sampling(), Sampling(1.0, seed=3, top_p=0.9), Sampling(1.2, seed=5, repetition_penalty=1.3, top_k=20)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", "<|im_end|>", words=WORDS, lanes=2)


@pytest.fixture(scope="module")
def engine(folder):
    made = Engine.load(folder, "cpu", parallel=3, speculation=5)
    made.session.speculate(5, [1.0] * 16)  # fixed prices with which calls share passes
    return made


@pytest.fixture(scope="module")
def reference(folder):
    return Engine.load(folder, "xla")


def ask(engine, prompt, sampling=DRAWS[0], tokens=24, **more):
    return engine.generate(prompt, max_new_tokens=tokens, sampling=sampling, stop_tokens=(), token_healing=True, **more)


def by_hand(folder, engine, prompt, count):
    """The greedy tokens of the whole model, the first ones among those that fit the end of the prompt."""
    model, tokenizer = laneformer.load(folder), engine.tokenizer
    texts = [tokenizer.token_bytes(token) for token in range(engine.config.vocab_size)]
    ids, raw = tokenizer.encode(prompt), prompt.encode()
    ends = [raw[n:] for n in range(1, len(raw) + 1)]
    size = max(len(end) for end in ends if any(text.startswith(end) and text != end for text in texts))
    kept = max(n for n in range(len(ids)) if sum(len(texts[token]) for token in ids[n:]) >= size)
    rest, drawn = b"".join(texts[token] for token in ids[kept:]), []
    while len(drawn) < count:
        padded = np.zeros((1, 32), np.int32)
        padded[0, : kept + len(drawn)] = [*ids[:kept], *drawn]
        logits = np.asarray(model(padded))[0, kept + len(drawn) - 1]
        fits = [(bool(text) and (text.startswith(rest) or rest.startswith(text))) or not rest for text in texts]
        drawn.append(int(np.where(fits, logits, -np.inf).argmax()))
        rest = rest[len(texts[drawn[-1]]) :]
    return tuple(drawn)


@pytest.mark.parametrize("prompt", PROMPTS)
def test_first_tokens_spell_the_end_of_the_prompt(engine, reference, folder, prompt):
    for sampling in DRAWS:
        ours, theirs = (ask(each, prompt, sampling).result for each in (engine, reference))
        assert (ours.tokens, ours.text, ours.finish_reason) == (theirs.tokens, theirs.text, "length")
        assert len(ours.tokens) == 24 and ours.prompt_tokens == theirs.prompt_tokens
        ids = engine.encode(prompt)
        assert ours.prompt_tokens < len(ids)
        whole = engine.tokenizer.decode([*ids[: ours.prompt_tokens], *ours.tokens])
        assert whole == prompt + ours.text
        stream = ask(engine, prompt, sampling)
        assert "".join(stream.texts()) == ours.text
    greedy = ask(engine, prompt).result
    assert greedy.tokens[:6] == by_hand(folder, engine, prompt, 6)


def test_stable_prompts_are_generated_as_always(engine):
    stable = "def add(a, b): x"
    healed = ask(engine, stable).result
    assert healed.prompt_tokens == len(engine.encode(stable))
    assert healed.tokens == engine.generate(stable, max_new_tokens=24, stop_tokens=()).result.tokens
    ids = engine.encode(PROMPTS[0])
    assert ask(engine, ids.tolist()).result.tokens == ask(engine, PROMPTS[0]).result.tokens


def test_healed_answers_make_drafts_and_reuse_the_prompt(engine):
    again = ask(engine, PROMPTS[0], tokens=60).result
    drafted = ask(engine, PROMPTS[0], tokens=60, prediction=again.text).result
    assert drafted.tokens == again.tokens and drafted.drafting.drafted > 0 and sum(drafted.drafting.accepted) > 0
    assert ask(engine, PROMPTS[0], tokens=60, draft_max=0).result.tokens == again.tokens
    assert ask(engine, PROMPTS[0], tokens=60, cache_prompt=False).result.tokens == again.tokens


def test_answers_do_not_depend_on_other_requests(engine):
    asked = [(prompt, sampling) for prompt in PROMPTS for sampling in DRAWS]
    alone = [ask(engine, *each).result.tokens for each in asked]
    found = [None] * len(asked)

    def run(numbers):
        for n in numbers:
            found[n] = ask(engine, *asked[n]).result.tokens

    threads = [threading.Thread(target=run, args=(range(n, len(asked), 3),)) for n in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == alone


def test_limits_stops_and_cancellation(engine, reference):
    for each in (engine, reference):
        whole = ask(each, PROMPTS[0]).result
        for tokens in (1, 2, 3):
            cut = ask(each, PROMPTS[0], tokens=tokens).result
            assert cut.tokens == whole.tokens[:tokens] and cut.finish_reason == "length"
            assert whole.text.startswith(cut.text.rstrip("\ufffd"))
        stop = next(part for part in whole.text if part != "\ufffd")
        stopped = ask(each, PROMPTS[0], stop_strings=(stop,)).result
        assert (stopped.finish_reason, stopped.stop_reason) == ("stop", stop)
        assert stopped.text == whole.text[: whole.text.index(stop)]
        with ask(each, PROMPTS[0], tokens=200) as generation:
            next(generation)
            generation.cancel()
        assert generation.result.finish_reason == "cancelled"
        assert ask(each, PROMPTS[0]).result.tokens == whole.tokens


def test_what_cannot_be_healed_is_refused(engine, reference, folder, monkeypatch):
    with pytest.raises(InputError, match="token_healing cannot be used together with constraint"):
        ask(engine, PROMPTS[0], constraint=Grammar.regex("a"))
    with pytest.raises(InputError, match="token_healing excludes channels and forced tokens"):
        ask(engine, PROMPTS[0], forced=[1])
    with pytest.raises(InputError, match="the model has no tokenizer"):
        ask(Engine(laneformer.load(folder), "xla"), [1, 2])
    monkeypatch.setattr(XlaBackend, "masks", False)
    assert not reference.heals
    with pytest.raises(InputError, match="backend xla has no masks"):
        ask(reference, PROMPTS[0])

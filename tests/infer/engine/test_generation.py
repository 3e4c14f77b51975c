"""The iterator, its texts, ends and timings, with a backend that plays back given tokens."""

import pickle
import threading
import time

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from laneformer.errors import CheckpointError
from laneformer.infer.engine.backend import Chunk, Request
from laneformer.infer.engine.generation import Generation, Token
from laneformer.infer.sampling import Sampling
from laneformer.infer.text.channels import Channels, Harmony, Part
from laneformer.infer.text.tokenizer import Tokenizer
from tests.support.checkpoints import HARMONY

END = 256


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory):
    """A tokenizer with a token for every byte, and END."""
    alphabet = {character: byte for byte, character in enumerate(_bytes_in_order())}
    made = tokenizers.Tokenizer(models.BPE(alphabet, []))
    made.pre_tokenizer, made.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    made.add_special_tokens(["<end>", *HARMONY])
    file = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    made.save(str(file))
    return Tokenizer(file)


def _bytes_in_order():
    from laneformer.infer.text.tokenizer import BYTE_LEVEL

    return [character for character, _ in sorted(BYTE_LEVEL.items(), key=lambda item: item[1])]


class Player:
    """A backend that plays back chunks. An exception in place of a chunk is raised, a callable is called."""

    def __init__(self, *chunks):
        self.chunks, self.closed = chunks, False

    def start(self, request):
        try:
            for chunk in self.chunks:
                if isinstance(chunk, BaseException):
                    raise chunk
                if callable(chunk):
                    chunk()
                    continue
                tokens = list(chunk.encode() if isinstance(chunk, str) else chunk)
                yield Chunk(
                    tokens,
                    [-1.0] * len(tokens),
                    [[(token, -1.0), (0, -2.0)][: request.top_logprobs] for token in tokens],
                )
        finally:
            self.closed = True


def play(*chunks, tokenizer=None, stops=(), limit=100, prompt=(1,), top_logprobs=0, channels=None):
    player = Player(*chunks)
    request = Request(np.array(prompt, np.int32), limit, Sampling(), (END,), top_logprobs=top_logprobs)
    return Generation(player, request, tokenizer, tuple(stops), time.perf_counter(), channels), player


def test_tokens_have_text_logprob_and_time(tokenizer):
    generation, _ = play("h", "ey", [END], tokenizer=tokenizer)
    tokens = list(generation)
    assert tokens == list(b"hey") and [token.text for token in tokens] == ["h", "e", "y"]
    assert all(isinstance(token, Token) and token.logprob == -1 for token in tokens)
    assert tokens[0].time <= tokens[1].time == tokens[2].time
    result = generation.result
    assert (result.tokens, result.text, result.finish_reason, result.stop_reason) == (tuple(b"hey"), "hey", "stop", END)
    assert result.tokens_per_dispatch == (1, 2, 1) and result.prompt_tokens == 1 and result.logprobs == (-1.0,) * 3
    assert result.token_times == tuple(token.time for token in tokens)
    assert result.time_to_first_token == tokens[0].time >= result.prefill_time > 0
    assert result.time_per_token == pytest.approx((result.total_time - tokens[0].time) / 3)  # END was drawn, too
    again = pickle.loads(pickle.dumps(tokens[0]))
    assert (again, again.text, again.logprob, again.time) == (tokens[0], "h", -1.0, tokens[0].time)


def test_top_logprobs_are_in_tokens_and_result():
    generation, _ = play([5], [6, 7, END], top_logprobs=2)
    tokens = list(generation)
    assert [token.top_logprobs for token in tokens] == [((n, -1.0), (0, -2.0)) for n in (5, 6, 7)]
    assert generation.result.top_logprobs == tuple(token.top_logprobs for token in tokens)
    assert pickle.loads(pickle.dumps(tokens[0])).top_logprobs == tokens[0].top_logprobs
    generation, _ = play([5], [END])
    assert next(generation).top_logprobs == () and generation.result.top_logprobs == ()


def test_stop_iteration_has_the_result():
    generation, _ = play([5], [END])

    def delegate():
        return (yield from generation)

    outer = delegate()
    assert next(outer) == 5
    with pytest.raises(StopIteration) as stopped:
        next(outer)
    assert stopped.value.value is generation.result
    with pytest.raises(StopIteration):
        next(generation)


def test_result_runs_to_the_end():
    generation, _ = play([5], [6, 7], limit=3)
    assert next(generation) == 5
    assert generation.result.tokens == (5, 6, 7) and generation.result.finish_reason == "length"


def test_first_stop_token_gives_no_tokens():
    result = play([END])[0].result
    assert (result.tokens, result.finish_reason, result.time_per_token) == ((), "stop", None)
    assert result.time_to_first_token is not None


def test_stop_string_across_tokens_and_chunks_is_found(tokenizer):
    generation, player = play("a", "b\nd", "ef", " x more", tokenizer=tokenizer, stops=["\ndef "])
    tokens = list(generation)
    assert [token.text for token in tokens] == ["a", "b", "", "", "", "", ""]
    result = generation.result
    assert result.text == "ab" and result.finish_reason == "stop" and result.stop_reason == "\ndef " and player.closed
    assert bytes(result.tokens) == b"ab\ndef "  # tokens after the stop string are not yielded
    assert sum(result.tokens_per_dispatch) == 1 + 3 + 2 + 7


def test_incomplete_stop_string_is_in_the_text(tokenizer):
    generation, _ = play("a", "\nde", [END], tokenizer=tokenizer, stops=["\ndef "])
    assert list(generation.texts()) == ["a", "\nde"]  # the last token was yielded before the end
    assert generation.result.text == "a\nde" and generation.result.stop_reason == END
    generation, _ = play("a", [*b"\nde", END], tokenizer=tokenizer, stops=["\ndef "])
    assert [token.text for token in generation] == ["a", "", "", "\nde"]  # here the end is found in time


def test_incomplete_characters_are_held_back(tokenizer):
    euro = "€".encode()
    generation, _ = play([euro[0]], [euro[1]], [euro[2], euro[0]], tokenizer=tokenizer, limit=4)
    assert [token.text for token in generation] == ["", "", "€", "�"]


def test_texts_continues_after_tokens(tokenizer):
    generation, _ = play("a", "bc", [END], tokenizer=tokenizer)
    assert next(generation).text == "a"
    assert list(generation.texts()) == ["b", "c"]


def test_cancel_drops_pending_tokens(tokenizer):
    generation, player = play("a", "bcd", "e", tokenizer=tokenizer)
    assert [next(generation), next(generation)] == list(b"ab")
    generation.cancel()
    assert generation.finished and player.closed
    assert list(generation) == [] and generation.result.text == "ab" and generation.result.finish_reason == "cancelled"
    generation.cancel()  # again, and after the end: nothing happens
    assert generation.result.tokens == tuple(b"ab")


def test_cancel_after_the_end_has_no_effect():
    generation, _ = play([5], [END])
    result = generation.result
    generation.cancel()
    assert generation.result is result and result.finish_reason == "stop"


def test_leaving_a_with_block_cancels():
    with play([5], [6])[0] as generation:
        next(generation)
    assert generation.result.finish_reason == "cancelled"


def test_cancel_from_another_thread_ends_after_the_dispatch():
    waiting, go_on = threading.Event(), threading.Event()

    def dispatch():
        waiting.set()
        assert go_on.wait(10)

    generation, player = play([5], dispatch, [6], [7])
    results = []
    taker = threading.Thread(target=lambda: results.append(generation.result))
    taker.start()
    assert waiting.wait(10)
    generation.cancel()
    assert generation.cancelled and not generation.finished
    go_on.set()
    taker.join(10)
    assert results[0].tokens == (5,) and results[0].finish_reason == "cancelled" and player.closed


def test_keyboard_interrupt_cancels_and_is_raised():
    generation, player = play([5], KeyboardInterrupt(), [6])
    assert next(generation) == 5
    with pytest.raises(KeyboardInterrupt):
        next(generation)
    assert player.closed and generation.result.finish_reason == "cancelled" and generation.result.tokens == (5,)


def test_backend_error_ends_the_generation():
    generation, _ = play([5], RuntimeError("out of memory"))
    next(generation)
    for _ in range(2):
        with pytest.raises(RuntimeError, match="out of memory"):
            next(generation)
    assert generation.finished


def test_nan_logits_are_an_error_with_their_position():
    generation, player = play([5], prompt=(1, 2, 3))
    player.start = None
    generation._chunks = iter_with_close([Chunk([5], [-1.0], [[]]), Chunk([0], [float("nan")], [[]])])
    assert next(generation) == 5
    with pytest.raises(CheckpointError, match="position 4 is not a number"):
        next(generation)


def iter_with_close(chunks):
    yield from chunks


START, CHANNEL, MESSAGE, CLOSE = range(END + 1, END + 5)
OPEN = [START, *b"assistant", CHANNEL, *b"final", MESSAGE]


def with_channels(tokenizer, *chunks, **options):
    library = tokenizers.Tokenizer.from_str(tokenizer._tokenizer.to_str())
    channels = Channels(Harmony.find(library), library, [1])
    chunks = [[CHANNEL, *b"analysis", MESSAGE], *chunks]
    return play(*chunks, tokenizer=tokenizer, channels=channels, **options)[0]


def texts(generation):
    return [(token.text, token.part) for token in generation if token.text]


def test_reasoning_is_separate_from_content(tokenizer):
    generation = with_channels(tokenizer, "ab", [CLOSE, *OPEN], "c", "d", [END])
    assert texts(generation) == [(text, Part.REASONING) for text in "ab"] + [(text, Part.CONTENT) for text in "cd"]
    result = generation.result
    assert (result.reasoning, result.text, result.stop_reason) == ("ab", "cd", END)
    assert len(result.tokens) == 10 + 2 + 1 + len(OPEN) + 2, "marks count as tokens"
    assert list(with_channels(tokenizer, "ab", [CLOSE, *OPEN], "cd", [END]).texts()) == ["c", "d"]
    assert pickle.loads(pickle.dumps(next(generation_of_reasoning(tokenizer)))).part is Part.REASONING


def generation_of_reasoning(tokenizer):
    return (token for token in with_channels(tokenizer, "ab", [END]) if token.text)


def test_stop_strings_end_only_content(tokenizer):
    generation = with_channels(tokenizer, "a stop", [CLOSE, *OPEN], "b st", [CLOSE, *OPEN], "op stop c", stops=["stop"])
    result = generation.result
    assert (result.reasoning, result.text, result.stop_reason) == ("a stop", "b stop ", "stop")


@pytest.mark.parametrize("limit", [100, 12])
def test_incomplete_characters_stay_in_their_message(tokenizer, limit):
    """Incomplete characters at the end of a message, of an answer, and of an answer that its limit cuts off."""
    generation = with_channels(tokenizer, [ord("a"), 0xC3], [CLOSE, *OPEN, 0xA9, ord("b"), 0xC3], [END], limit=limit)
    result = generation.result
    assert (result.reasoning, result.text) == ("a\ufffd", "\ufffdb\ufffd" if limit == 100 else "")


def test_without_channels_all_text_is_content(tokenizer):
    generation, _ = play([CHANNEL, *b"final", MESSAGE, *b"a", END], tokenizer=tokenizer)
    assert (generation.result.text, generation.result.reasoning) == ("finala", "")

"""Passes of several rows on emulated GPUs (or real ones, see tests/support/emulated.py): right or wrong drafts, and
prompts read several tokens at a time, give the bits of passes of one row.
"""

import dataclasses
import threading

import numpy as np
import pytest

from laneformer.custom_calls import ENDS, NativeError
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.custom_calls.gpu.layout import MOST_ROWS
from laneformer.custom_calls.plan import make_plan
from laneformer.decoder import decoder_ops
from laneformer.mesh import make_mesh
from laneformer.quantized.rounding import round_to
from tests.support import emulated, small
from tests.support.decode_cases import CONFIGS, LAYOUTS, MODELS, NORMED_SUMS
from tests.support.gpu_cases import AMD, mixed_plan, of_config, plan_of_normed_sums, some, state_of, weights_of
from tests.support.several_rows import EQUAL, ROOM, Model

pytestmark = [small.needs_library, emulated.needs_gpu]


def make(config, *dtypes, **options):
    return Model(*of_config(config, *dtypes), **options)


@pytest.fixture(scope="module")
def model():
    return make(small.windowed_model()[0])


SETTINGS = {
    "greedy with a penalty": {"penalty": 1.5},
    "all tokens": {"temperature": 1.0},
    "all filters and a penalty": {"temperature": 2.0, "top_k": 8, "top_p": 0.5, "min_p": 0.02, "penalty": 1.3},
}


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name == "all tokens" else ()) for name in SETTINGS]
)
def test_samplings_have_the_same_bits(name, model):
    tokens = model.check([*range(9), *range(9)], 20, **SETTINGS[name])
    assert len(tokens) == 20


@pytest.mark.slow
def test_prompts_read_several_tokens_at_a_time_have_the_same_bits(model):
    for length in range(1, 11):
        prompt = [(7 * i + length) % 40 for i in range(length)]
        model.check(prompt, 5, temperature=1.0)
    model.check([3, 1, 4], 6, cache=float("nan"))  # the cache beyond the text is never read


@pytest.mark.slow
def test_answer_may_end_inside_a_run(model):
    prompt, options = [5, 8, 13], {"temperature": 1.0}
    tokens = model.answer(prompt, 20, rows=0, **options)[0][0].tolist()
    for limit in range(1, 9):
        model.check(prompt, limit, **options)
    for place in (1, 4, 6, 7):
        assert model.check(prompt, 20, stops=[tokens[place]], **options)[-1] == tokens[place]
    place = tokens.index(tokens[9])
    ended = model.answer(prompt, 20, rows=1, stops=[tokens[9]], most=3, drafts=tokens, **options)
    assert ended[1].tolist() == [place + 1, ENDS.index("stop"), len(prompt) + place + 1]


def test_drafts_are_counted(model):
    session, prompt = model.sessions[1], [5, 8, 13]
    tokens = model.answer(prompt, 17, rows=1)[0][0].tolist()
    assert session.drafting.rows == (16, 0, 0, 0) and session.drafting.drafted == 0
    model.answer(prompt, 17, rows=1, most=3, drafts=tokens)  # the first pass also reads the prompt's last token
    assert session.drafting.rows[1:] == (0, 0, 3) and session.drafting.accepted == (3, 3, 3)
    wrong = [(token + 1) % 40 for token in tokens]
    model.answer(prompt, 17, rows=1, most=2, drafts=wrong)
    assert session.drafting.rows == (1, 1, 14, 0) and session.drafting.accepted == (0, 0, 0)


def test_drafts_are_copied_from_texts(model):
    """Drafts are copied from the prompt and the answer, from the text before the prompt, and from another text."""
    text, session = [*range(3, 23)], model.sessions[1]
    plain = model.answer(text, 20, rows=1, forced=text)
    found = model.answer(text, 20, rows=1, forced=text, most=3)
    assert small.same(found, plain) and found[0][0].tolist() == text
    assert session.drafting.predicted == 0 and session.drafting.tokens_per_pass > 1.8
    for before, predicted in (([*text, -1], True), (text, False)):
        found = model.answer([30, 31], 20, rows=1, forced=text, most=3, before=before)
        assert small.same(found, model.answer([30, 31], 20, rows=1, forced=text))
        model.answer([30, 31], 20, rows=1, forced=text, most=3, before=before)
        counts = session.drafting
        assert counts.tokens_per_pass > 1.8 and (counts.predicted_accepted > 8) is predicted
    answer = model.answer([7, 9], 20, rows=1, temperature=1.0)
    predicted = [*answer[0][0].tolist(), -1]
    assert small.same(model.answer([7, 9], 20, rows=1, temperature=1.0, most=3, before=predicted), answer)


def test_running_call_can_be_cancelled(model):
    session = model.sessions[1]
    tokens = model.answer([3], 40, rows=1)[0][0].tolist()
    session.speculate(3, EQUAL[:4])
    for wanted in (0, 4, 9):
        session.begin()
        waiting = threading.Thread(target=lambda wanted=wanted: [session.wait(wanted, 10_000), session.cancel()])
        waiting.start()
        outputs, _ = model.calls[1](small.make_inputs([3], 40, room=ROOM, given=tokens), state_of(model.plan, 64))
        waiting.join()
        count = int(outputs.status[0])
        assert session.failure is None and outputs.tokens[:count].tolist() == tokens[:count] and count > wanted
        assert outputs.status[1] == ENDS.index("cancelled" if count < 40 else "length")
    session.begin()


def test_invalid_arguments_are_refused(model):
    one, several = model.sessions
    with pytest.raises(NativeError, match="compiled without drafts"):
        small.make_inputs([1], 2, forced=(1,)).inputs(one)
    for texts in ({"before": [40]}, {"forced": [-1]}, {"given": [-2]}):
        with pytest.raises(NativeError, match="outside the vocabulary"):
            small.make_inputs([1], 2, **texts).inputs(several)
    for most, prices in ((4, EQUAL[:4]), (-1, EQUAL[:4]), (3, EQUAL[:3])):
        with pytest.raises(NativeError, match="at most 4 rows"):
            several.speculate(most, prices)
    for options in ({"rows": 0}, {"rows": MOST_ROWS + 1}, {"rows": 2, "launch": "graph"}):
        with pytest.raises(NativeError, match="rows"):
            emulated.open_session(model.plan, {}, **options)


@pytest.mark.slow
def test_layers_of_several_kinds_have_the_same_bits():
    plan = mixed_plan(weight_dtype="float16", cache_dtype="bfloat16")
    Model(plan, weights_of(plan, "float16"), rows=3, chaos_us=20).check([3, 1, 4, 1, 5, 9, 2], 12, temperature=0.8)


GATES = {"shared_expert_intermediate_size": 2 * 24, "shared_expert_gate": True}
GROUPS = {"scoring_func": "sigmoid", "router_correction": True, "num_experts": 12, "n_group": 4, "topk_group": 2}
ROOTS = {"scoring_func": "sqrtsoftplus", "router_correction": True, "routed_scaling_factor": 1.5}
MIXTURES = {  # changes of the config, and options of the sessions
    "as gpt-oss": ({"attention_sinks": True, "sliding_window": 4, "swa_layers": (0,), "num_experts_per_tok": 4}, {}),
    "as Qwen3-MoE": ({"qk_norm": True, "num_experts_per_tok": 3, "hidden_size": 33}, {"rows": 3}),
    "as Qwen3-Next": ({**GATES, "norm_after": "lane", "num_experts_per_tok": 5}, {"rows": 2}),
    "as DeepSeek-V3": ({**GROUPS, "num_experts_per_tok": 3, "layout": "dtp(1)"}, {"chaos_us": 20}),
    "as DeepSeek-V4": ({**ROOTS, "hash_layers": 1, "num_experts_per_tok": 3}, {"rows": 3}),
    "warps of 64": ({**GATES, "num_experts_per_tok": 3}, {"machine": AMD}),
    "few slots": (
        {"moe_intermediate_size": 2 * 160},
        {"machine": dataclasses.replace(emulated.SMALL, shared_bytes=90_000)},
    ),
}


@emulated.only_emulated
@pytest.mark.parametrize("name", some(MIXTURES, {"as gpt-oss"}))
def test_experts_of_each_row_have_the_same_bits(name):
    changes, options = MIXTURES[name]
    sizes = {"hidden_size": 64, "head_dim": 8, "num_experts": 8, "num_experts_per_tok": 2, "layout": "tp"}
    config = small.make_config(**sizes | {"moe_intermediate_size": 2 * 40, "num_hidden_layers": 2} | changes)
    plan = make_plan(decoder_ops(config), config.schedule)
    if name == "as gpt-oss":
        plan = small.with_expert_biases(plan)
    Model(plan, weights_of(plan), **options).check(small.prompt_of(config, 9), 12, temperature=0.8)


@emulated.only_emulated
@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["mxfp4", "fp8", "int8"])
def test_quantized_experts_have_the_same_bits(kind):
    config = small.make_config(
        hidden_size=96, head_dim=8, layout="tp", num_experts=8, num_experts_per_tok=4, moe_intermediate_size=2 * 64
    )
    plan = small.with_expert_biases(make_plan(decoder_ops(config), config.schedule, weight_dtype="bfloat16"))
    weights = {
        path: round_to(w.astype(np.float32), kind, search=False) if w.ndim == 4 else w
        for path, w in weights_of(plan, "bfloat16").items()
    }
    model = Model(plan, weights, codes=CodesChoice.of(plan, weights.items()))
    model.check(small.prompt_of(config, 9), 12, temperature=0.8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("name", CONFIGS | MODELS)
def test_configs_have_the_same_bits(name):
    config = small.make_config(**(CONFIGS | MODELS)[name])
    make(config, rows=2).check(small.prompt_of(config, 9), 12, temperature=0.8)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("layout", "lanes"), LAYOUTS)
def test_layouts_have_the_same_bits(layout, lanes):
    config = small.make_config(layout=layout, lanes=lanes)
    make(config).check(small.prompt_of(config, 9), 12, temperature=0.8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("layout", NORMED_SUMS)
def test_norms_of_sums_have_the_same_bits(layout):
    plan = plan_of_normed_sums(layout)
    Model(plan, weights_of(plan), chaos_us=20).check([3, 1, 4, 1, 5, 9, 2], 12, temperature=0.8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("head", ["vocab_parallel", "replicate", "lane"])
def test_several_devices_have_the_same_bits(head):
    config = small.make_config(lanes=4, layout="dtp(1)", lm_head_type=head)
    mesh = make_mesh(4, lane=2)
    make(config, mesh=mesh, chaos_us=20).check(small.prompt_of(config, 9), 12, temperature=0.8)


@emulated.only_emulated
@pytest.mark.exhaustive
@pytest.mark.parametrize(("dtype", "compute"), [("bfloat16", "bfloat16"), ("float16", "float32")])
def test_amd_has_the_same_bits(dtype, compute):
    config = small.make_config(layout="dtp(1)", hidden_size=40)
    make(config, dtype, compute, machine=AMD).check(small.prompt_of(config, 9), 12, temperature=0.8)


@pytest.mark.exhaustive
@pytest.mark.parametrize("kind", ["int8", "fp8", "int4", "mxfp4"])
def test_quantized_weights_have_the_same_bits(kind):
    config = small.make_config(layout="dtp(1)", hidden_size=96, ff=64, vocab_size=64, num_hidden_layers=2)
    plan, weights = of_config(config, "bfloat16")
    weights = {path: round_to(w, kind, search=False) if path in plan.matrices else w for path, w in weights.items()}
    model = Model(plan, weights, codes=CodesChoice.of(plan, weights.items()))
    model.check(small.prompt_of(config, 9), 12, temperature=0.8)

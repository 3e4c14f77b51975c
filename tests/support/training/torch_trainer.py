"""A trainer in PyTorch that shares no code with this project's trainer: a Llama, AdamW of torch.optim, and Muon as
Keller Jordan published it (kellerjordan.github.io/posts/muon, 2024).

    python -m tests.support.training.torch_trainer  # needs torch (2.13.0); records tests/train/golden/convergence.json

This project's Muon differs from the article in four choices. The first three are arguments of `Muon`:
 - lookahead "debiased": the mean and the gradient in Nesterov's step are corrected for the bias of their start, as in
   NAdam (optax). The article's is "plain".
 - size "rms": 0.2 sqrt(max(rows, columns)), the size of an AdamW update (Liu et al., arXiv 2502.16982). "spectral" is
   sqrt(max(1, rows / columns)).
 - lanes: each lane's share of a matrix is orthogonalized as a separate matrix.
 - Newton-Schulz runs in the dtype of the weights. The article's runs in bfloat16.
"""

import json
import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy, silu

from tests.support.paths import ROOT
from tests.support.training.convergence import CONFIG, STEPS, Recipe, batch, initial_weights

FILE = ROOT / "tests" / "train" / "golden" / "convergence.json"
Weights = dict[str, Tensor]


# ------------------------------------------------------------------------------------------------------------- model


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + CONFIG["rms_norm_eps"]) * gain


def rotate(x: Tensor) -> Tensor:
    """Rotates x [b, h, s, e] by its positions. Channel i of a head pairs with channel i + e / 2."""
    half = x.shape[-1] // 2
    frequencies = CONFIG["rope_theta"] ** (-torch.arange(half, dtype=x.dtype) / half)
    angles = torch.outer(torch.arange(x.shape[2], dtype=x.dtype), frequencies)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def attention(w: Weights, at: str, x: Tensor) -> Tensor:
    b, s, d = x.shape
    heads, size = CONFIG["num_attention_heads"], d // CONFIG["num_attention_heads"]
    q, k, v = ((x @ w[f"{at}.{name}_proj.weight"].T).view(b, s, -1, size).transpose(1, 2) for name in ("q", "k", "v"))
    k, v = (t.repeat_interleave(heads // CONFIG["num_key_value_heads"], dim=1) for t in (rotate(k), v))
    scores = rotate(q) @ k.transpose(2, 3) / math.sqrt(size)
    visible = torch.ones(s, s, dtype=torch.bool).tril()
    found = scores.masked_fill(~visible, -math.inf).softmax(-1) @ v
    return found.transpose(1, 2).reshape(b, s, d) @ w[f"{at}.o_proj.weight"].T


def loss_of(w: Weights, ids: Tensor) -> Tensor:
    x = w["model.embed_tokens.weight"][ids[:, :-1]]
    for n in range(CONFIG["num_hidden_layers"]):
        at = f"model.layers.{n}"
        x = x + attention(w, f"{at}.self_attn", norm(x, w[f"{at}.input_layernorm.weight"]))
        h = norm(x, w[f"{at}.post_attention_layernorm.weight"])
        gate, up, down = (w[f"{at}.mlp.{name}_proj.weight"] for name in ("gate", "up", "down"))
        x = x + (silu(h @ gate.T) * (h @ up.T)) @ down.T
    logits = norm(x, w["model.norm.weight"]) @ w["lm_head.weight"].T
    return cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten().long())


# --------------------------------------------------------------------------------------------------------- optimizers


def newton_schulz(g: Tensor) -> Tensor:
    """Five Newton-Schulz steps with the article's quintic, on the matrix or its transpose, whichever has fewer rows."""
    x = g.T if g.shape[0] > g.shape[1] else g
    x = x / (x.norm() + 1e-8)
    for _ in range(5):
        a = x @ x.T
        x = 3.4445 * x + (-4.7750 * a + 2.0315 * a @ a) @ x
    return x.T if g.shape[0] > g.shape[1] else x


class Muon(torch.optim.Optimizer):
    """Muon with decoupled weight decay, as in AdamW. params: {name: matrix}. The file's docstring explains lanes,
    lookahead and size.
    """

    def __init__(self, params, lr=0.0, momentum=0.95, weight_decay=0.0, lanes=1, lookahead="debiased", size="rms"):
        self.names, self.lanes, self.lookahead, self.size = [*params], lanes, lookahead, size
        super().__init__(params.values(), {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self):
        (group,) = self.param_groups
        beta = group["momentum"]
        for name, p in zip(self.names, group["params"], strict=True):
            state = self.state[p]
            n = state["step"] = state.get("step", 0) + 1
            mean = state["mean"] = beta * state.get("mean", 0) + (1 - beta) * p.grad
            ahead, now = (1 - beta ** (n + 1), 1 - beta**n) if self.lookahead == "debiased" else (1, 1)
            direction = beta * mean / ahead + (1 - beta) * p.grad / now
            axis = 1 if "o_proj" in name or "down_proj" in name else 0  # along which lanes share the matrix
            update = torch.cat([self._sized(g) for g in direction.chunk(self.lanes, axis)], axis)
            p.mul_(1 - group["lr"] * group["weight_decay"]).add_(update, alpha=-group["lr"])

    def _sized(self, g: Tensor) -> Tensor:
        rows, columns = g.shape
        factor = 0.2 * math.sqrt(max(rows, columns)) if self.size == "rms" else math.sqrt(max(1, rows / columns))
        return factor * newton_schulz(g)


def rate(recipe: Recipe, step: int) -> float:
    """Learning rate of a step; steps count from 0."""
    decay = math.ceil(recipe.decay_fraction * STEPS)
    left = (STEPS - step) / decay
    end = recipe.final_fraction
    return recipe.learning_rate * min((step + 1) / recipe.warmup_steps, 1.0, end + (1 - end) * left)


# -------------------------------------------------------------------------------------------------------------- runs


def losses(recipe: Recipe, *, dtype=torch.float64, late: int = 0, decays=(2,), **muon) -> Iterator:
    """Loss of each step and norm of its gradient before clipping. late: steps by which the learning rate's schedule is
    late, a mistake for tests. decays: numbers of dimensions of the weights that decay.
    """
    w = {name: torch.tensor(t, dtype=dtype, requires_grad=True) for name, t in initial_weights().items()}
    matrices = {name: t for name, t in w.items() if recipe.kind == "muon" and "_proj" in name}
    rest = [t for name, t in w.items() if name not in matrices]
    groups = [
        {"params": [t for t in rest if t.dim() in decays], "weight_decay": recipe.weight_decay},
        {"params": [t for t in rest if t.dim() not in decays], "weight_decay": 0.0},
    ]
    groups = [group for group in groups if group["params"]]
    optimizers = [torch.optim.AdamW(groups, lr=0.0, betas=(recipe.beta1, recipe.beta2), eps=recipe.eps)]
    if matrices:
        optimizers.append(Muon(matrices, momentum=recipe.momentum, weight_decay=recipe.weight_decay, **muon))
    for step in range(STEPS):
        loss = loss_of(w, torch.tensor(batch(step)))
        for optimizer in optimizers:
            optimizer.zero_grad()
        loss.backward()
        total = torch.sqrt(sum(t.grad.square().sum() for t in w.values()))
        for t in w.values():
            t.grad *= min(1.0, recipe.clip_norm / float(total))
        for optimizer in optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate(recipe, max(step - late, 0))
            optimizer.step()
        yield loss.item(), float(total)


def curves() -> dict[str, Iterator]:
    """Curves by name: those that this project's trainer must reproduce, the same in float32, curves with one mistake
    each ("wrong"), and curves with one of the article's choices each ("published").
    """
    adamw, muon, single = Recipe(), Recipe(kind="muon"), {"dtype": torch.float32}
    return {
        "adamw": losses(adamw),
        "muon": losses(muon),
        "muon, 2 lanes": losses(muon, lanes=2),
        "float32: adamw": losses(adamw, **single),
        "float32: muon": losses(muon, **single),
        "float32: muon, 2 lanes": losses(muon, lanes=2, **single),
        "wrong: schedule a step late": losses(adamw, late=1),
        "wrong: norms decay": losses(adamw, decays=(1, 2)),
        "wrong: nothing decays": losses(adamw, decays=()),
        "wrong: no clipping": losses(replace(adamw, clip_norm=math.inf)),
        "wrong: eps of 1e-6": losses(replace(adamw, eps=1e-6)),
        "wrong: beta2 of 0.96": losses(replace(adamw, beta2=0.96)),
        "wrong: momentum of 0.94": losses(replace(muon, momentum=0.94)),
        "published: plain lookahead": losses(muon, lookahead="plain"),
        "published: spectral size": losses(muon, size="spectral"),
    }


if __name__ == "__main__":
    torch.set_num_threads(1)
    found = {name: [float(f"{loss:.9g}") for loss, _ in curve] for name, curve in curves().items()}
    lines = [f" {json.dumps(name)}: {json.dumps(curve)}" for name, curve in found.items()]
    Path(FILE).write_text("{\n" + ",\n".join(lines) + "\n}\n", encoding="utf-8")

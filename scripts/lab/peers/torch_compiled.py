"""PyTorch: a plain Llama with a cache of fixed size, compiled by inductor with frozen weights; prompts run eagerly.

A frozen program for each length of a prompt would hold a copy of all weights.
"""

import time

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from laneformer.commands.lab.peers.protocol import CPP_WRAPPER, Shape, Task, serve


def normal(outputs: int, inputs: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(outputs, inputs).normal_(std=0.02), requires_grad=False)


class Norm(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.ones(shape.hidden), requires_grad=False), shape.norm_eps

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        return (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.eps)).to(x.dtype) * self.weight


class Layer(nn.Module):
    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        q, kv = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
        self.attention_norm, self.mlp_norm = Norm(shape), Norm(shape)
        self.qkv, self.out = normal(q + 2 * kv, shape.hidden), normal(shape.hidden, q)
        self.gate_up, self.down = normal(2 * shape.ff, shape.hidden), normal(shape.hidden, shape.ff)

    def forward(
        self, x: Tensor, position: Tensor, mask: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor
    ) -> Tensor:
        """One token: x [1, d], mask [1, 1, 1, t], cos, sin [e]. Writes keys and values [1, n, t, e] at `position`."""
        s = self.shape
        q, k, v = (
            F.linear(self.attention_norm(x), self.qkv).view(-1, s.head_dim).split([s.heads, s.kv_heads, s.kv_heads])
        )
        keys.index_copy_(2, position, rotate(k, cos, sin).view(1, s.kv_heads, 1, s.head_dim))
        values.index_copy_(2, position, v.view(1, s.kv_heads, 1, s.head_dim))
        # Query heads that share keys are passed as query positions, so that no key is repeated.
        grouped = rotate(q, cos, sin).view(1, s.kv_heads, s.heads // s.kv_heads, s.head_dim)
        x = x + F.linear(F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask).reshape(1, -1), self.out)
        return self._mlp(x)

    def prompt(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """A prompt x [t, d] from position 0; cos and sin [t, 1, e]. Keys and values are computed and dropped."""
        s, t = self.shape, len(x)
        q, k, v = (
            part.transpose(0, 1).unsqueeze(0)
            for part in F.linear(self.attention_norm(x), self.qkv)
            .view(t, -1, s.head_dim)
            .split([s.heads, s.kv_heads, s.kv_heads], 1)
        )
        cos, sin = cos.transpose(0, 1), sin.transpose(0, 1)
        keys, values = (part.repeat_interleave(s.heads // s.kv_heads, 1) for part in (rotate(k, cos, sin), v))
        attended = F.scaled_dot_product_attention(rotate(q, cos, sin), keys, values, is_causal=True)
        return self._mlp(x + F.linear(attended.squeeze(0).transpose(0, 1).reshape(t, -1), self.out))

    def _mlp(self, x: Tensor) -> Tensor:
        gate, up = F.linear(self.mlp_norm(x), self.gate_up).chunk(2, -1)
        return x + F.linear(F.silu(gate) * up, self.down)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    a, b = x.chunk(2, -1)
    return x * cos + torch.cat((-b, a), -1) * sin


class Llama(nn.Module):
    def __init__(self, shape: Shape, positions: int, rotations: int):
        """positions: positions in the cache. rotations: length of the longest sequence, at least `positions`."""
        super().__init__()
        self.embedding = normal(shape.vocab, shape.hidden)
        self.layers = nn.ModuleList(Layer(shape) for _ in range(shape.layers))
        self.norm = Norm(shape)
        self.head = self.embedding if shape.tied else normal(shape.vocab, shape.hidden)
        frequencies = shape.rope_theta ** (-torch.arange(0, shape.head_dim, 2, dtype=torch.float32) / shape.head_dim)
        angles = torch.outer(torch.arange(rotations, dtype=torch.float32), frequencies).repeat(1, 2)
        self.positions = positions
        self.register_buffer("cos", angles.cos().to(self.embedding.dtype))
        self.register_buffer("sin", angles.sin().to(self.embedding.dtype))

    def forward(self, token: Tensor, position: Tensor, keys: list[Tensor], values: list[Tensor]) -> Tensor:
        """token and position int64 [1] -> the next token."""
        x = F.embedding(token, self.embedding)
        cos, sin = self.cos[position], self.sin[position]
        mask = (torch.arange(self.positions) <= position).view(1, 1, 1, -1)
        for layer, k, v in zip(self.layers, keys, values, strict=True):
            x = layer(x, position, mask, cos, sin, k, v)
        return F.linear(self.norm(x), self.head).argmax(-1)

    def first(self, tokens: Tensor) -> Tensor:
        """tokens int64 [t], a prompt -> the next token."""
        x, rotation = F.embedding(tokens, self.embedding), (self.cos, self.sin)
        cos, sin = (part[: len(tokens)].unsqueeze(1) for part in rotation)
        for layer in self.layers:
            x = layer.prompt(x, cos, sin)
        return F.linear(self.norm(x[-1:]), self.head).argmax(-1)


class Compiled:
    def __init__(self, task: Task):
        torch.set_num_threads(task.threads)
        torch.set_default_dtype(torch.bfloat16)
        torch.manual_seed(0)
        wrapper = task.option == CPP_WRAPPER  # C++ also for the code around the kernels
        torch._inductor.config.freezing = True
        torch._inductor.config.cpp_wrapper = wrapper
        self._plain = Llama(task.shape, task.positions, max(task.positions, task.longest_prompt)).eval()
        self._model, self._vocab = torch.compile(self._plain), task.shape.vocab
        size = (1, task.shape.kv_heads, task.positions, task.shape.head_dim)
        # A cache of full length with random contents, since computing a prompt would need a second compiled program.
        self._keys, self._values = ([torch.randn(size) for _ in range(task.shape.layers)] for _ in "kv")
        self.decode(1, 2)  # compiles
        self.conditions = {
            "versions": {"torch": torch.__version__},
            "weights": "bfloat16",
            "compute": "bfloat16",
            "kv": "bfloat16",
            "threads": torch.get_num_threads(),
            "load": (
                f"inductor, frozen{', cpp_wrapper' if wrapper else ''}, cache filled with random numbers; prompts eager"
            ),
            "system": (
                f"{torch.backends.cpu.get_cpu_capability()}, oneDNN bfloat16"
                f" {torch.ops.mkldnn._is_mkldnn_bf16_supported()}"
            ),
        }

    def decode(self, prompt: int, tokens: int) -> list[float]:
        times, token = [], torch.tensor([1])
        with torch.no_grad():
            for position in range(prompt - 1, prompt - 1 + tokens):
                token = self._model(token, torch.tensor([position]), self._keys, self._values)
                token = torch.tensor([token.item()])
                times.append(time.perf_counter())
        return times

    def first(self, prompt: int) -> float:
        tokens = torch.randint(self._vocab, (prompt,))
        start = time.perf_counter()
        with torch.no_grad():
            self._plain.first(tokens).item()
        return time.perf_counter() - start


if __name__ == "__main__":
    serve(Compiled)

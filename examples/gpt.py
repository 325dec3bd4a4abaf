"""A GPT in plain PyTorch: pre-norm blocks, rotary positions, causal attention, a GELU MLP four times as wide.

The code does not depend on how it is trained: in memory, or with parameters, gradients and optimizer state on a disk.
The module may be built under ``torch.device("meta")``; `GPT.init_weights` initialises it once it has memory.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HEAD_WIDTH = 64  # GPT-2 and GPT-3 both use heads of 64 at these sizes; models narrower than that have one head
LAYER_ASPECT = 64  # hidden / layers of GPT-2 small (768 / 12)
# How tensor-parallel ranks divide its layers, as in Megatron: heads, the MLP's hidden units, the vocabulary.
TP_PLAN = {
    "embed": "vocabulary",
    "blocks.*.attention.qkv": "colwise",
    "blocks.*.attention.out": "rowwise",
    "blocks.*.mlp.up": "colwise",
    "blocks.*.mlp.down": "rowwise",
    "head": "vocabulary",
}


@dataclass(frozen=True)
class GPTConfig:
    """The shape of a model; ``seq`` is the longest context, in tokens."""

    vocab_size: int
    layers: int
    hidden: int
    heads: int
    seq: int


class Attention(nn.Module):
    """Causal self-attention, [batch, seq, hidden] -> the same."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.hidden // config.heads  # so that a rank may have only some of the heads
        self.qkv = nn.Linear(config.hidden, 3 * config.hidden, bias=False)
        self.out = nn.Linear(config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        q, k, v = self.qkv(x).unflatten(-1, (3, -1, self.head_width)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(rotate(q, cos, sin), rotate(k, cos, sin), v, is_causal=True)
        return self.out(y.transpose(1, 2).flatten(2))


class MLP(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = nn.Linear(config.hidden, 4 * config.hidden, bias=False)
        self.down = nn.Linear(4 * config.hidden, config.hidden, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.gelu(self.up(x)))


class Block(nn.Module):
    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden)
        self.mlp = MLP(config)

    def forward(self, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        x = x + self.attention(self.attention_norm(x), cos, sin)
        return x + self.mlp(self.mlp_norm(x))


class GPT(nn.Module):
    """``model(tokens)`` is the logits [batch, seq, vocab]; ``model(tokens, targets)`` the mean loss in nats, fp32."""

    tp_plan = TP_PLAN

    def __init__(self, config: GPTConfig, *, tied: bool = False, seed: int = 0) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab_size, config.hidden)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.RMSNorm(config.hidden)
        self.head = nn.Linear(config.hidden, config.vocab_size, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.init_weights(seed)

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        x = F.rms_norm(self.embed(tokens), (self.config.hidden,))  # embeddings of scale 0.02 are too small
        cos, sin = rotary_angles(tokens.shape[1], self.config.hidden // self.config.heads, x)
        for block in self.blocks:
            x = block(x, cos, sin)
        logits = self.head(self.norm(x))
        if targets is None:
            return logits
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    @torch.no_grad()
    def init_weights(self, seed: int) -> None:
        """Ones for norms, normal(0, 0.02) for the rest; projections into the residual are scaled by 1/sqrt(2 layers), as
        in GPT-2. Values are drawn on the CPU, so they are the same on every device. Does nothing on meta."""
        generator = torch.Generator().manual_seed(seed)
        for name, parameter in self.named_parameters():
            if parameter.is_meta:
                continue
            if parameter.dim() == 1:
                parameter.fill_(1.0)
                continue
            residual = name.endswith(("attention.out.weight", "mlp.down.weight"))
            std = 0.02 / math.sqrt(2 * self.config.layers) if residual else 0.02
            parameter.copy_(torch.empty(parameter.shape, device="cpu").normal_(0.0, std, generator=generator))


def rotary_angles(seq: int, width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """Cosines and sines [seq, width / 2] of RoFormer's rotary positions (base 10000), in the dtype of ``like``."""
    frequencies = 10000.0 ** -(torch.arange(0, width, 2, device=like.device) / width)
    angles = torch.outer(torch.arange(seq, device=like.device), frequencies)
    return angles.cos().to(like.dtype), angles.sin().to(like.dtype)


def rotate(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate each pair (i, i + width / 2) of the last dimension by the angle of its position."""
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def num_parameters(config: GPTConfig, *, tied: bool = False) -> int:
    """How many parameters `GPT` with this config has. Creates no tensors."""
    block = 12 * config.hidden**2 + 2 * config.hidden
    tables = (1 if tied else 2) * config.vocab_size * config.hidden
    return tables + config.layers * block + config.hidden


def config_for(num_wanted: int, vocab_size: int, seq: int) -> GPTConfig:
    """The config within 10 % of a parameter count whose depth and width are best balanced; ValueError if none is."""
    widest = max(2 * HEAD_WIDTH, 2 * round((num_wanted * LAYER_ASPECT / 12) ** (1 / 3)))
    best: tuple[float, GPTConfig] | None = None
    for hidden in (HEAD_WIDTH // 2, *range(HEAD_WIDTH, widest, HEAD_WIDTH)):
        heads = max(1, hidden // HEAD_WIDTH)
        rest = num_wanted - 2 * vocab_size * hidden
        config = GPTConfig(vocab_size, max(1, round(rest / (12 * hidden**2))), hidden, heads, seq)
        error = abs(num_parameters(config) / num_wanted - 1)
        imbalance = abs(math.log(hidden / config.layers / LAYER_ASPECT))
        cost = imbalance + 10 * error  # 10 % off the count weighs as much as a depth off by e
        if error <= 0.1 and (best is None or cost < best[0]):
            best = cost, config
    if best is None:
        raise ValueError(f"no GPT with a vocabulary of {vocab_size} has about {num_wanted} parameters")
    return best[1]


@torch.no_grad()
def generate(
    model: GPT, tokens: Tensor, num_new: int, *, temperature: float = 1.0, generator: torch.Generator | None = None
) -> Tensor:
    """Continue ``tokens`` [batch, n] by ``num_new`` sampled tokens; temperature 0 takes the likeliest.

    Every call of the model has the same shape [batch, config.seq], padded on the right (attention is causal, so padding
    does not affect earlier positions), so a compiled model is compiled once. There is no key-value cache.
    """
    seq = model.config.seq
    for _ in range(num_new):
        window = tokens[:, -seq:]
        logits = model(F.pad(window, (0, seq - window.shape[1])))[:, window.shape[1] - 1].float()
        if temperature == 0:
            new = logits.argmax(dim=-1, keepdim=True)
        else:
            new = torch.multinomial((logits / temperature).softmax(dim=-1), 1, generator=generator)
        tokens = torch.cat((tokens, new), dim=1)
    return tokens

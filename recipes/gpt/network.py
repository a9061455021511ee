"""A GPT in plain torch: RMSNorm, rotary or learned positions, causal attention with grouped heads, SwiGLU or GELU.

The invariant: a module that owns parameters or buffers fills them in its own ``reset_parameters()``, so that the
network can be built on the meta device and given memory later, module by module, wherever each shard belongs.

Shapes end the names of tensors::

    B batch   T tokens   D width   H query heads   K key and value heads   N width of a head   V vocabulary
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional

from ls_strategy.inference.cache import KVCache, LayerCache
from ls_strategy.inference.few_rows import few_rows_linear
from ls_strategy.inference.generate import generate
from ls_strategy.inference.sampling import SamplingConfig, Uniforms
from ls_strategy.parallel.styles import Column, Divide, Row, Vocab

INIT_STD = 0.02
"""Standard deviation of initial weights, as in the published code of GPT-2 (Radford et al., 2019)."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the network."""

    vocab_size: int = 256
    """Rows of the embedding. The command line takes it from the tokenizer, rounded up to a multiple of 64."""

    block_size: int = 256
    """Longest sequence, tokens. The command line takes it from the data."""

    num_layers: int = 4
    """Transformer blocks."""

    num_heads: int = 4
    """Query heads."""

    num_kv_heads: int | None = None
    """Key and value heads, each shared by ``num_heads / num_kv_heads`` query heads. None: as many as query heads."""

    width: int = 128
    """Width of the residual stream, a multiple of ``num_heads``."""

    mlp: Literal["swiglu", "gelu"] = "swiglu"
    """``swiglu``: three matrices of 8/3 times the width, rounded up to a multiple of 64; ``gelu``: two of 4 times."""

    positions: Literal["rotary", "learned"] = "rotary"
    """``rotary`` turns queries and keys by an angle per position; ``learned`` adds a trained vector per position."""

    rotary_base: float = 10000.0
    """Base of the rotary wavelengths."""

    tied_embeddings: bool = True
    """Use the token embedding as the output layer, too."""

    dropout: float = 0.0
    """Probability of dropout after attention, the MLP and the embedding."""

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.block_size, self.num_layers, self.num_heads, self.width) < 1:
            raise ValueError(f"{self}: sizes must be at least 1.")
        if self.width % self.num_heads:
            raise ValueError(f"width={self.width} is not a multiple of num_heads={self.num_heads}: choose them so.")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"width={self.width} over num_heads={self.num_heads} is {self.head_width} per head; rotary positions "
                "turn pairs of elements and need an even number. Change either, or set positions: learned."
            )
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"num_kv_heads={self.num_kv_heads} must divide num_heads={self.num_heads}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"dropout={self.dropout} must be in [0, 1).")

    @property
    def head_width(self) -> int:
        """Width of one head."""
        return self.width // self.num_heads

    @property
    def kv_heads(self) -> int:
        """Key and value heads."""
        return self.num_heads if self.num_kv_heads is None else self.num_kv_heads

    @property
    def residual_std(self) -> float:
        """Initial deviation of layers that add to the residual stream: 2 * num_layers such terms sum to that of one."""
        return INIT_STD / math.sqrt(2 * self.num_layers)


class Linear(nn.Linear):
    """A linear layer without bias whose weights start normal with deviation ``std``."""

    def __init__(self, in_features: int, out_features: int, *, std: float = INIT_STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Fill the weight anew."""
        nn.init.normal_(self.weight, std=self.std)


class Head(Linear):
    """The output layer, which in a step of generation is the largest product by far."""

    def forward(self, input: Tensor) -> Tensor:
        """The product; without gradients by a faster way where there are few rows: a step of generation."""
        if torch.is_grad_enabled():
            return super().forward(input)
        return few_rows_linear(input, self.weight)


class Embedding(nn.Embedding):
    """A table of vectors that start normal."""

    def reset_parameters(self) -> None:
        """Fill the table anew."""
        nn.init.normal_(self.weight, std=INIT_STD)


Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, ``(T, N/2)``, or ``(B, 1, T, N/2)`` where rows of the batch differ in their positions."""


def rows_of(rotation: Rotation, positions: Tensor) -> Rotation:
    """Those of a table's rows that ``positions``, ``(T,)`` or ``(B, T)``, name."""
    if positions.dim() == 1:
        return rotation[0].index_select(0, positions), rotation[1].index_select(0, positions)
    return rotation[0][positions].unsqueeze(1), rotation[1][positions].unsqueeze(1)


class Rotary(nn.Module):
    """Cosines and sines of the rotary position embedding (Su et al., "RoFormer", arXiv:2104.09864)."""

    cos: Tensor
    sin: Tensor

    def __init__(self, block_size: int, head_width: int, base: float) -> None:
        super().__init__()
        self.base = base
        shape = (block_size, head_width // 2)
        # The dtype is given because Lightning builds models under another default in its 16-bit modes.
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Fill the tables from integers in fp32, whatever dtype they are kept in: 16 bit cannot count to 257."""
        length, half = self.cos.shape
        device = self.cos.device
        exponent_N = torch.arange(half, dtype=torch.float32, device=device) / half
        position_T = torch.arange(length, dtype=torch.float32, device=device)
        angle_TN = torch.outer(position_T, self.base**-exponent_N)
        self.cos.copy_(angle_TN.cos())
        self.sin.copy_(angle_TN.sin())

    def forward(self, positions: int | Tensor) -> Rotation:
        """Cosines and sines of so many first positions, or of those in a tensor ``(T,)`` or ``(B, T)``."""
        if isinstance(positions, int):
            return self.cos[:positions], self.sin[:positions]
        return rows_of((self.cos, self.sin), positions)


def rotate(x_BHTN: Tensor, rotation: Rotation) -> Tensor:
    """Turn the pair (i, i + N/2) of every head by its position's i-th angle; in the dtype of ``x``."""
    cos_TN, sin_TN = (table.to(x_BHTN.dtype) for table in rotation)
    left, right = x_BHTN.chunk(2, dim=-1)
    return torch.cat((left * cos_TN - right * sin_TN, right * cos_TN + left * sin_TN), dim=-1)


def doubled(rotation: Rotation) -> Rotation:
    """Tables for `rotate_doubled`: as wide as a head."""
    cos, sin = rotation
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_doubled(x_BHTN: Tensor, rotation: Rotation) -> Tensor:
    """The numbers of `rotate`, bit for bit, by half as many kernels, which for a single token is what takes time."""
    cos_TN, sin_TN = (table.to(x_BHTN.dtype) for table in rotation)
    return (x_BHTN * cos_TN).add_(x_BHTN.roll(x_BHTN.shape[-1] // 2, -1).mul_(sin_TN))


class Attention(nn.Module):
    """Causal self-attention; ``num_kv_heads < num_heads`` shares keys and values (Ainslie et al., arXiv:2305.13245)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.heads, self.kv_heads, self.head_width = config.num_heads, config.kv_heads, config.head_width
        self.query_key_value = Linear(config.width, (self.heads + 2 * self.kv_heads) * self.head_width)
        self.out = Linear(config.width, config.width, std=config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        *,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """Mix the tokens, each with those before it. Arguments as `Block.forward`'s."""
        B, T, _ = x_BTD.shape
        heads = self.query_key_value(x_BTD).view(B, T, -1, self.head_width).transpose(1, 2)
        if rotation is not None and positions is not None:
            rotation = rows_of(rotation, positions)
        if cache is not None:
            return self.out(self._cached(heads, rotation, cache).transpose(1, 2).reshape(B, T, -1))
        q_BHTN, k_BKTN, v_BKTN = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if rotation is not None:
            q_BHTN, k_BKTN = rotate(q_BHTN, rotation), rotate(k_BKTN, rotation)
        y_BHTN = functional.scaled_dot_product_attention(
            q_BHTN, k_BKTN, v_BKTN, is_causal=True, enable_gqa=self.kv_heads != self.heads
        )
        return self.dropout(self.out(y_BHTN.transpose(1, 2).reshape(B, T, -1)))

    def _cached(self, heads: Tensor, rotation: Rotation | None, cache: LayerCache) -> Tensor:
        """Attention of new tokens to all in the cache, which queries and keys enter together, by `doubled` tables."""
        if rotation is None:
            q_BHTN, k_BKTN, v_BKTN = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        else:
            turning, v_BKTN = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
            q_BHTN, k_BKTN = rotate_doubled(turning, rotation).split((self.heads, self.kv_heads), dim=1)
        return cache.attend(q_BHTN, k_BKTN, v_BKTN)


class GeluMLP(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width, std=config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform every token by itself. Shapes: ``x`` and result (B, T, D)."""
        return self.dropout(self.down(functional.gelu(self.up(x_BTD), approximate="tanh")))


class SwiGLU(nn.Module):
    """A gated MLP of about as many parameters as `GeluMLP` (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = -(-8 * config.width // (3 * 64)) * 64
        self.gate_up = Linear(config.width, 2 * hidden)
        self.down = Linear(hidden, config.width, std=config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform every token by itself. Shapes: ``x`` and result (B, T, D)."""
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.dropout(self.down(functional.silu(gate) * up))


class Block(nn.Module):
    """Attention and MLP, each on a normalised copy of the residual stream it adds to."""

    def __init__(self, config: GPTConfig, mlp: Callable[[], nn.Module] | None = None) -> None:
        """``mlp`` builds another layer in the place of the MLP."""
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.width, eps=1e-5)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.width, eps=1e-5)
        own = SwiGLU if config.mlp == "swiglu" else GeluMLP
        self.mlp = own(config) if mlp is None else mlp()

    def forward(
        self,
        x_BTD: Tensor,
        rotation: Rotation | None,
        *,
        positions: Tensor | None = None,
        cache: LayerCache | None = None,
    ) -> Tensor:
        """One layer.

        Args:
            x_BTD: the residual stream (B, T, D), as is the result.
            rotation: of rotary positions, a row per token, `doubled` with a cache; None with learned ones.
            positions: rows of ``rotation`` that the tokens have, (T,) or (B, T), ascending: where some tokens were left
                out. Without, the tokens have its rows one after the other.
            cache: keys and values of earlier tokens, to which those of ``x`` are added.
        """
        x_BTD = x_BTD + self.attention(self.attention_norm(x_BTD), rotation, positions=positions, cache=cache)
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """Tokens in, logits of each next token out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.position_embedding = Embedding(config.block_size, config.width) if learned else None
        self.rotary = None if learned else Rotary(config.block_size, config.head_width, config.rotary_base)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block(layer) for layer in range(config.num_layers))
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = Head(config.width, config.vocab_size)
        if config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def block(self, layer: int) -> Block:
        """Block number ``layer``, built in its turn: initial weights are drawn in the order of registration."""
        return Block(self.config)

    def forward(self, tokens_BT: Tensor, *, positions: Tensor | None = None, cache: KVCache | None = None) -> Tensor:
        """Logits (B, T, V) of the token after each one of ``tokens`` (B, T); with a cache of the last alone, (B, 1, V).

        Args:
            tokens_BT: what the network reads.
            positions: of the tokens, (T,) or (B, T). None: from 0 on, or from the cache's last on.
            cache: what it has read already; the tokens follow it, and are added to it.

        Raises:
            ValueError: there are more tokens than ``block_size``, or than the cache has room for.
        """
        T = tokens_BT.shape[1]
        if self.config.block_size < T:
            raise ValueError(f"{T} tokens do not fit into block_size={self.config.block_size}: crop them.")
        if cache is not None:
            following = cache.open(tokens_BT)
            positions = following if positions is None else positions
        x_BTD = self.token_embedding(tokens_BT)
        if self.position_embedding is not None:
            at = torch.arange(T, device=tokens_BT.device) if positions is None else positions
            x_BTD = x_BTD + self.position_embedding(at)
        rotation = None if self.rotary is None else self.rotary(T if positions is None else positions)
        x_BTD = self.dropout(x_BTD)
        if cache is not None:
            return self.head(self.norm(self.cached_blocks(x_BTD, rotation, cache)[:, -1:]))
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation)
        return self.head(self.norm(x_BTD))

    def cached_blocks(self, x_BTD: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        """All layers, each with its part of the cache. Shapes: ``x`` and result (B, T, D)."""
        tables = None if rotation is None else doubled(rotation)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            # By name: a strategy that shards sequences knows by it that these tokens are no whole sequence.
            x_BTD = block(x_BTD, tables, cache=layer)
        return x_BTD

    def make_cache(self) -> KVCache:
        """A cache for sequences of up to ``block_size`` tokens, which takes memory when it is first used."""
        return KVCache(len(self.blocks), self.config.block_size)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """How layers are divided over tensor-parallel ranks: heads, hidden units of the MLP, words.

        Key and value heads must divide by the ranks, as query heads must: they are rows of one matrix.
        """
        c = self.config
        rows = tuple(heads * c.head_width for heads in (c.num_heads, c.kv_heads, c.kv_heads))
        plan: dict[str, Any] = {
            "token_embedding": Vocab(),
            "head": Vocab(),
            "blocks.*.attention": Divide(("heads", "kv_heads")),
            "blocks.*.attention.query_key_value": Column(sections=rows, granule=c.head_width),
            "blocks.*.attention.out": Row(granule=c.head_width),
            "blocks.*.mlp.down": Row(),
        }
        if c.mlp == "swiglu":
            plan["blocks.*.mlp.gate_up"] = Column(sections=(-1, -1))
        else:
            plan["blocks.*.mlp.up"] = Column()
        return plan

    def generate(
        self,
        tokens_BT: Tensor,
        max_new_tokens: int,
        *,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        generator: torch.Generator | None = None,
    ) -> Tensor:
        """``tokens`` (B, T) followed by ``max_new_tokens`` sampled ones.

        Rows of other lengths, stop tokens and streaming: see `ls_strategy.inference.generate.stream`. Makes exactly
        ``max_new_tokens`` forwards, whatever is sampled. All but the first read one token per row, until there are
        ``block_size``; from then on each reads the last ``block_size``.

        Args:
            tokens_BT: the prompt, at least one token.
            max_new_tokens: how many to add.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample among this many most likely tokens. None: among all.
            top_p: sample among the most likely tokens that together have this probability. None: among all.
            generator: of random numbers, on the CPU, so that every device samples alike. None: torch's own.
        """
        uniforms = Uniforms([generator or torch.default_generator], len(tokens_BT))
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        added = generate(self, tokens_BT, max_new_tokens, sampling=sampling, seed=uniforms)
        return torch.cat((tokens_BT, torch.tensor(added, dtype=tokens_BT.dtype, device=tokens_BT.device)), dim=1)

    def flops_per_token(self) -> int:
        """FLOPs of forward and backward per token: 6 N + 12 L H Q T, N the weights that multiply (not the tables).

        Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B. Recomputed activations do not count.
        """
        c = self.config
        in_blocks = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        weights = in_blocks + c.width * c.vocab_size
        return 6 * weights + 12 * c.num_layers * c.num_heads * c.head_width * c.block_size

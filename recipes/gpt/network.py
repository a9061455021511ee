"""A GPT in plain torch: RMSNorm, rotary or learned positions, grouped-query attention, SwiGLU or GELU.

Invariant: a module with parameters or buffers initializes them in its own ``reset_parameters()``. The network can so be
built on the meta device, and allocated later, module by module, also by programs without this package's strategy.

Shape suffixes of tensor names::

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

from ls_strategy.extras.data_efficiency.documents import document_attention
from ls_strategy.extras.inference.cache import KVCache, LayerCache
from ls_strategy.extras.inference.few_rows import few_rows_linear
from ls_strategy.extras.inference.generate import generate
from ls_strategy.extras.inference.sampling import SamplingConfig, Uniforms
from ls_strategy.parallel.styles import Column, Divide, Row, Vocab

INIT_STD = 0.02
"""Standard deviation of initial weights, as in the published code of GPT-2 (Radford et al., 2019)."""


@dataclass(frozen=True, kw_only=True)
class GPTConfig:
    """Shape of the network."""

    vocab_size: int = 256
    """Rows of the embedding. The command line sets it from the tokenizer, rounded up to a multiple of 64."""

    block_size: int = 256
    """Maximum sequence length, tokens. The command line sets it from the data."""

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
    """``rotary`` rotates queries and keys by an angle per position; ``learned`` adds a trained vector per position."""

    rotary_base: float = 10000.0
    """Base of the rotary wavelengths."""

    tied_embeddings: bool = True
    """Use the token embedding as output layer."""

    dropout: float = 0.0
    """Dropout probability after attention, MLP and embedding."""

    def __post_init__(self) -> None:
        if min(self.vocab_size, self.block_size, self.num_layers, self.num_heads, self.width) < 1:
            raise ValueError(f"{self}: sizes must be at least 1.")
        if self.width % self.num_heads:
            raise ValueError(f"Got width={self.width}, but it must be a multiple of num_heads={self.num_heads}.")
        if self.positions == "rotary" and self.head_width % 2:
            raise ValueError(
                f"Got width={self.width} and num_heads={self.num_heads}, so {self.head_width} per head, but rotary "
                "positions need an even number. Change one of them, or set positions: learned."
            )
        if self.kv_heads < 1 or self.num_heads % self.kv_heads:
            raise ValueError(f"Got num_kv_heads={self.num_kv_heads}, but it must divide num_heads={self.num_heads}.")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"Got dropout={self.dropout}, but it must be in [0, 1).")

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
        """Initial deviation of the 2 * num_layers layers that add to the residual stream: their sum has that of one."""
        return INIT_STD / math.sqrt(2 * self.num_layers)


class Linear(nn.Linear):
    """A linear layer without bias; initial weights are normal with deviation ``std``."""

    def __init__(self, in_features: int, out_features: int, *, std: float = INIT_STD) -> None:
        self.std = std  # before super().__init__, which calls reset_parameters
        super().__init__(in_features, out_features, bias=False)

    def reset_parameters(self) -> None:
        """Initialize the weight."""
        nn.init.normal_(self.weight, std=self.std)


class Head(Linear):
    """The output layer, the largest matrix product in a generation step."""

    def forward(self, input: Tensor) -> Tensor:
        """Compute the product; without gradients, with a faster kernel for few rows."""
        if torch.is_grad_enabled():
            return super().forward(input)
        return few_rows_linear(input, self.weight)


class Embedding(nn.Embedding):
    """An embedding with normal initial vectors."""

    def reset_parameters(self) -> None:
        """Initialize the table."""
        nn.init.normal_(self.weight, std=INIT_STD)


Rotation: TypeAlias = tuple[Tensor, Tensor]
"""Cosines and sines, ``(T, N/2)``, or ``(B, 1, T, N/2)`` if the rows of the batch have different positions."""


def rows_of(rotation: Rotation, positions: Tensor) -> Rotation:
    """Return the rows of a table at ``positions``, ``(T,)`` or ``(B, T)``."""
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
        # Explicit dtype: Lightning sets another default dtype in its 16-bit modes.
        self.register_buffer("cos", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.register_buffer("sin", torch.empty(shape, dtype=torch.float32), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Compute the tables from integers in fp32, because 16-bit formats cannot represent 257."""
        length, half = self.cos.shape
        device = self.cos.device
        exponent_N = torch.arange(half, dtype=torch.float32, device=device) / half
        position_T = torch.arange(length, dtype=torch.float32, device=device)
        angle_TN = torch.outer(position_T, self.base**-exponent_N)
        self.cos.copy_(angle_TN.cos())
        self.sin.copy_(angle_TN.sin())

    def forward(self, positions: int | Tensor) -> Rotation:
        """Return cosines and sines of the first ``positions`` positions, or of a tensor ``(T,)``, ``(B, T)``."""
        if isinstance(positions, int):
            return self.cos[:positions], self.sin[:positions]
        return rows_of((self.cos, self.sin), positions)


def rotate(x_BHTN: Tensor, rotation: Rotation) -> Tensor:
    """Rotate the pair (i, i + N/2) of every head by its position's i-th angle, in the dtype of ``x``."""
    cos_TN, sin_TN = (table.to(x_BHTN.dtype) for table in rotation)
    left, right = x_BHTN.chunk(2, dim=-1)
    return torch.cat((left * cos_TN - right * sin_TN, right * cos_TN + left * sin_TN), dim=-1)


def doubled(rotation: Rotation) -> Rotation:
    """Return tables for `rotate_doubled`, as wide as a head."""
    cos, sin = rotation
    return torch.cat((cos, cos), dim=-1), torch.cat((-sin, sin), dim=-1)


def rotate_doubled(x_BHTN: Tensor, rotation: Rotation) -> Tensor:
    """Compute `rotate` bit for bit with half as many kernels, which dominate the time for a single token."""
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
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Attend to each token's predecessors. For the arguments see `Block.forward`."""
        B, T, _ = x_BTD.shape
        heads = self.query_key_value(x_BTD).view(B, T, -1, self.head_width).transpose(1, 2)
        if rotation is not None and positions is not None:
            rotation = rows_of(rotation, positions)
        if cache is not None:
            return self.out(self._cached(heads, rotation, cache).transpose(1, 2).reshape(B, T, -1))
        q_BHTN, k_BKTN, v_BKTN = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        if rotation is not None:
            q_BHTN, k_BKTN = rotate(q_BHTN, rotation), rotate(k_BKTN, rotation)
        grouped = self.kv_heads != self.heads
        if documents is not None:
            y_BHTN = document_attention(q_BHTN, k_BKTN, v_BKTN, documents, enable_gqa=grouped)
        else:
            y_BHTN = functional.scaled_dot_product_attention(
                q_BHTN, k_BKTN, v_BKTN, mask, is_causal=mask is None, enable_gqa=grouped
            )
        return self.dropout(self.out(y_BHTN.transpose(1, 2).reshape(B, T, -1)))

    def _cached(self, heads: Tensor, rotation: Rotation | None, cache: LayerCache) -> Tensor:
        """Attention of the new tokens to all tokens in the cache, with `doubled` tables for queries and keys."""
        if rotation is None:
            q_BHTN, k_BKTN, v_BKTN = heads.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        else:
            qk, v_BKTN = heads.split((self.heads + self.kv_heads, self.kv_heads), dim=1)
            q_BHTN, k_BKTN = rotate_doubled(qk, rotation).split((self.heads, self.kv_heads), dim=1)
        return cache.attend(q_BHTN, k_BKTN, v_BKTN)


class GeluMLP(nn.Module):
    """Two matrices with GELU between them."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.up = Linear(config.width, 4 * config.width)
        self.down = Linear(4 * config.width, config.width, std=config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token. Shapes: ``x`` and result (B, T, D)."""
        return self.dropout(self.down(functional.gelu(self.up(x_BTD), approximate="tanh")))


class SwiGLU(nn.Module):
    """A gated MLP with about as many parameters as `GeluMLP` (Shazeer, "GLU Variants Improve Transformer", 2020)."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = -(-8 * config.width // (3 * 64)) * 64
        self.gate_up = Linear(config.width, 2 * hidden)
        self.down = Linear(hidden, config.width, std=config.residual_std)
        self.dropout = nn.Dropout(config.dropout)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Transform each token. Shapes: ``x`` and result (B, T, D)."""
        gate, up = self.gate_up(x_BTD).chunk(2, dim=-1)
        return self.dropout(self.down(functional.silu(gate) * up))


class Block(nn.Module):
    """Attention and MLP with pre-normalization and residual connections."""

    def __init__(self, config: GPTConfig, mlp: Callable[[], nn.Module] | None = None) -> None:
        """``mlp`` builds a replacement for the MLP."""
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
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Run one layer.

        Args:
            x_BTD: the residual stream (B, T, D), like the result.
            rotation: rotary tables, one row per token, `doubled` with a cache; None with learned positions.
            positions: the tokens' rows of ``rotation``, (T,) or (B, T), ascending, if tokens were dropped. None:
                consecutive.
            cache: keys and values of earlier tokens, to which those of ``x`` are added.
            mask: which tokens attend to which, bool (B, 1, T, T), without a cache. None: all to their predecessors.
            documents: number of each token's document, (B, T), outside of which it does not attend; instead of a mask.
        """
        x_BTD = x_BTD + self.attention(
            self.attention_norm(x_BTD), rotation, positions=positions, cache=cache, mask=mask, documents=documents
        )
        return x_BTD + self.mlp(self.mlp_norm(x_BTD))


class GPT(nn.Module):
    """Tokens in, next-token logits out."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.token_embedding = Embedding(config.vocab_size, config.width)
        learned = config.positions == "learned"
        self.position_embedding = Embedding(config.block_size, config.width) if learned else None
        self.rotary = None if learned else Rotary(config.block_size, config.head_width, config.rotary_base)
        self.dropout = nn.Dropout(config.dropout)
        self.blocks = nn.ModuleList(self.block(layer) for layer in range(config.num_layers))
        # Counted now, because tensor parallelism leaves each rank a part of them.
        self._weights_in_blocks = sum(p.numel() for p in self.blocks.parameters() if p.dim() == 2)
        self.norm = nn.RMSNorm(config.width, eps=1e-5)
        self.head = Head(config.width, config.vocab_size)
        if config.tied_embeddings:
            self.head.weight = self.token_embedding.weight

    def block(self, layer: int) -> Block:
        """Build block ``layer``. Called in order, because initial weights are drawn in the order of registration."""
        return Block(self.config)

    def forward(
        self,
        tokens_BT: Tensor,
        *,
        positions: Tensor | None = None,
        cache: KVCache | None = None,
        mask: Tensor | None = None,
        documents: Tensor | None = None,
    ) -> Tensor:
        """Return the logits (B, T, V) of the token after each of ``tokens`` (B, T); with a cache, of the last one.

        With a cache, the result is (B, 1, V).

        Args:
            tokens_BT: the tokens.
            positions: their positions, (T,) or (B, T). None: from 0, or after those in the cache.
            cache: keys and values of earlier tokens; the tokens follow and are added.
            mask: which tokens attend to which, bool (B, 1, T, T), without a cache. None: all to their predecessors.
            documents: with ``positions``, for several documents in one sequence: the number of each token's, (B, T),
                without a cache; see `document_attention`.

        Raises:
            ValueError: there are more tokens than ``block_size``, or than the cache has room for; or arguments that
                exclude each other.
        """
        T = tokens_BT.shape[1]
        if self.config.block_size < T:
            raise ValueError(
                f"Got {T} tokens, but they do not fit into block_size={self.config.block_size}. Crop them."
            )
        if sum(given is not None for given in (cache, mask, documents)) > 1:
            raise ValueError("Got several of cache, mask and documents, but they exclude each other. Pass one of them.")
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
        limits = {name: x for name, x in (("mask", mask), ("documents", documents)) if x is not None}
        for block in self.blocks:
            x_BTD = block(x_BTD, rotation, **limits)
        return self.head(self.norm(x_BTD))

    def cached_blocks(self, x_BTD: Tensor, rotation: Rotation | None, cache: KVCache) -> Tensor:
        """Run all layers with their caches. Shapes: ``x`` and result (B, T, D)."""
        tables = None if rotation is None else doubled(rotation)
        for block, layer in zip(self.blocks, cache.layers, strict=True):
            # By keyword: it tells sequence parallelism that these tokens are not a full sequence.
            x_BTD = block(x_BTD, tables, cache=layer)
        return x_BTD

    def make_cache(self) -> KVCache:
        """Return a cache for ``block_size`` tokens, which allocates memory at its first use."""
        return KVCache(len(self.blocks), self.config.block_size)

    def tensor_parallel_plan(self) -> dict[str, Any]:
        """Return how layers are sharded: by heads, hidden units of the MLP, and vocabulary.

        The number of query heads, and that of key and value heads, must be a multiple of the tensor-parallel ranks.
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
        """Return ``tokens`` (B, T) followed by ``max_new_tokens`` sampled ones.

        For rows of different lengths, stop tokens and streaming see `ls_strategy.extras.inference.generate.stream`.
        Runs exactly ``max_new_tokens`` forwards. All but the first read one token per row, up to ``block_size`` tokens;
        later ones read the last ``block_size`` tokens.

        Args:
            tokens_BT: the prompt, at least one token.
            max_new_tokens: tokens to add.
            temperature: divides the logits; 0 takes the most likely token.
            top_k: sample from this many most likely tokens. None: from all.
            top_p: sample from the most likely tokens that together have this probability. None: from all.
            generator: random generator on the CPU, so that results do not depend on the device. None: torch's default.
        """
        uniforms = Uniforms([generator or torch.default_generator], len(tokens_BT))
        sampling = SamplingConfig(temperature=temperature, top_k=top_k, top_p=top_p)
        added = generate(self, tokens_BT, max_new_tokens, sampling=sampling, seed=uniforms)
        return torch.cat((tokens_BT, torch.tensor(added, dtype=tokens_BT.dtype, device=tokens_BT.device)), dim=1)

    def flops_per_token(self) -> int:
        """Return the FLOPs of forward and backward per token: 6 N + 12 L H Q T, where N are the multiplied weights.

        Source: Chowdhery et al., "PaLM", arXiv:2204.02311, appendix B. Recomputation is not counted.
        """
        c = self.config
        weights = self._weights_in_blocks + c.width * c.vocab_size
        return 6 * weights + 12 * c.num_layers * c.num_heads * c.head_width * c.block_size

"""Continue texts from a checkpoint, on one device: ``python -m recipes.gpt generate --ckpt PATH --prompt "def "``.

Several prompts are computed as one batch. They are shown one after the other: the first as it is written, what the
others have by then when their turn comes.
"""

from __future__ import annotations

import codecs
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, TextIO, cast

import torch
from jsonargparse import ArgumentParser, set_parsing_settings

from ls_strategy import load_from_checkpoint
from ls_strategy.checkpoint.source import read_checkpoint
from ls_strategy.errors import ConfigError, LSError
from ls_strategy.inference.generate import stream
from ls_strategy.inference.sampling import SamplingConfig
from recipes.gpt.corpus import TOKENS, Tokenizer, TokenizerName, make_tokenizer, vocab_size
from recipes.gpt.model import GPTModule

# The docstring under a field is its help text.
set_parsing_settings(docstring_parse_attribute_docstrings=True)


@dataclass(frozen=True, kw_only=True)
class GenerateConfig:
    """What to continue, and how."""

    ckpt: str
    """A checkpoint of the recipe: a folder saved on any number of ranks and at any stage, or a single file."""

    max_new_tokens: int = 200
    """How long each text goes on, tokens."""

    temperature: float = 0.8
    """Divides the logits: below 1 prefers likely tokens, 0 takes the most likely one."""

    top_k: int | None = 50
    """Sample among this many most likely tokens; null: among all."""

    top_p: float | None = None
    """Sample among the most likely tokens that together have this probability; null: among all."""

    seed: int = 1
    """Of the sampling. The first prompt uses this one, the others use seeds that follow from it."""

    tokenizer: TokenizerName | None = None
    """Null: the one that the checkpoint was trained with."""

    device: str = "auto"
    """Such as cpu or cuda:1; auto: a GPU if there is one."""

    prompt: list[str] = field(default_factory=list)
    """What to continue."""

    stop: list[str] = field(default_factory=list)
    """A text ends before the first of these."""

    @property
    def sampling(self) -> SamplingConfig:
        """How tokens are chosen.

        Raises:
            ConfigError: a number is out of its range.
        """
        return SamplingConfig(temperature=self.temperature, top_k=self.top_k, top_p=self.top_p)

    @property
    def torch_device(self) -> torch.device:
        """Where the network runs.

        Raises:
            ConfigError: there is no such device.
        """
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        try:
            return torch.empty(0, device=automatic if self.device == "auto" else self.device).device
        except (RuntimeError, AssertionError) as error:  # as torch says that it is built without CUDA
            reason = str(error).split("\n")[0]
            raise ConfigError(f"device={self.device!r} cannot be used: {reason}. Give cpu, or leave it out.") from error


class TextStream:
    """From tokens to text, as they come: only whole characters, and nothing that may turn out to begin a stop text."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str] = ()) -> None:
        """Nothing was written. ``stop``: texts before which it ends."""
        self._tokenizer, self._stop = tokenizer, [text for text in stop if text]
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._held = ""
        self.ended = False
        """Whether a stop text was found: nothing comes after."""

    def add(self, token: int) -> str:
        """What can be shown now that ``token`` is known."""
        return "" if self.ended else self._take(self._decoder.decode(self._tokenizer.to_bytes([token])))

    def end(self) -> str:
        """What was held back, when no token follows."""
        if self.ended:
            return ""
        text = self._take(self._decoder.decode(b"", final=True))
        text, self._held = text + self._held, ""
        return text

    def _take(self, more: str) -> str:
        text = self._held + more
        first = min((found for stop in self._stop if (found := text.find(stop)) >= 0), default=None)
        if first is not None:
            self.ended, self._held = True, ""
            return text[:first]
        held = max((_overlap(text, stop) for stop in self._stop), default=0)
        self._held = text[len(text) - held :]
        return text[: len(text) - held]


def _overlap(text: str, stop: str) -> int:
    """How many of the last characters of ``text`` are the first of ``stop``."""
    return next((n for n in range(min(len(text), len(stop) - 1), 0, -1) if text.endswith(stop[:n])), 0)


class InTurn:
    """Several texts that grow together, shown one after the other."""

    def __init__(self, prompts: Sequence[str], texts: Sequence[TextStream], out: TextIO) -> None:
        """Show the first prompt."""
        self._prompts, self._texts, self._out = prompts, texts, out
        self._waiting = ["" for _ in prompts]
        self._shown = -1
        self._next()

    def add(self, row: int, text: str) -> None:
        """More of a row's text."""
        if row == self._shown:
            self._write(text)
        else:
            self._waiting[row] += text

    def advance(self) -> None:
        """Go on to the next text that has not ended, over those that have."""
        while self._shown < len(self._prompts) and self._texts[self._shown].ended:
            self._next()

    def end(self) -> None:
        """No more will come: show all."""
        for row, text in enumerate(self._texts):
            self.add(row, text.end())
        while self._shown < len(self._prompts):
            self._next()

    def _next(self) -> None:
        if self._shown >= 0:
            self._write("\n")
        self._shown += 1
        if self._shown < len(self._prompts):
            rule = "-" * 20
            if len(self._prompts) > 1:
                self._write(f"{rule} {self._shown + 1} of {len(self._prompts)} {rule}\n")
            self._write(self._prompts[self._shown] + self._waiting[self._shown])

    def _write(self, text: str) -> None:
        if text:
            self._out.write(text)
            self._out.flush()


# --- from a checkpoint ------------------------------------------------------------------------------------------------


def tokenizer_of(checkpoint: dict[str, Any], vocabulary: int) -> str:
    """Name of the tokenizer that a checkpoint was trained with.

    Raises:
        ConfigError: it does not say, and the vocabulary is none of a known tokenizer.
    """
    saved = checkpoint.get("TextData", {}).get("tokenizer")
    if saved is not None:
        return saved
    # Earlier checkpoints do not say. No two tokenizers have vocabularies of one size.
    found = next((name for name in TOKENS if vocab_size(name) == vocabulary), None)
    if found is None:
        raise ConfigError(
            "the checkpoint does not say which tokenizer it was trained with, and a vocabulary of "
            f"{vocabulary} is none of {', '.join(TOKENS)}. Give --tokenizer."
        )
    return found


def load(
    module_class: type[GPTModule], path: str, tokenizer: str | None, device: torch.device
) -> tuple[GPTModule, Tokenizer]:
    """A trained module in evaluation, and its tokenizer.

    Raises:
        ConfigError: it is no checkpoint of the recipe, or the tokenizer is unknown or does not fit.
        CheckpointError: it does not exist, or is not whole.
    """
    checkpoint = read_checkpoint(path, weights_only=True)
    hyperparameters = checkpoint.get(module_class.CHECKPOINT_HYPER_PARAMS_KEY, {})
    if not isinstance(hyperparameters.get("config"), dict):
        raise ConfigError(f"{path} has no hyperparameter 'config': it was not saved by {module_class.__name__}.")
    expected = set(module_class().hparams)
    if set(hyperparameters) & {"config", "moe"} != expected & {"config", "moe"}:
        raise ConfigError(
            f"{path} has the hyperparameters {', '.join(sorted(hyperparameters))}, and {module_class.__name__} has "
            f"{', '.join(sorted(expected))}. Checkpoints with 'moe' are those of recipes.moe, others of recipes.gpt."
        )
    name = tokenizer or tokenizer_of(checkpoint, hyperparameters["config"]["vocab_size"])
    module = load_from_checkpoint(module_class, path, map_location=device, weights_only=True)
    if TOKENS.get(name, 0) > module.config.vocab_size:
        raise ConfigError(
            f"tokenizer {name!r} has {TOKENS[name]} tokens, and the checkpoint's network knows "
            f"{module.config.vocab_size}. Give --tokenizer as in the training."
        )
    return module.eval(), make_tokenizer(name)


def encode(prompts: Sequence[str], tokenizer: Tokenizer, block_size: int) -> list[list[int]]:
    """Tokens of the prompts.

    Raises:
        ConfigError: there is none, or one is empty or longer than the network reads.
    """
    if not prompts:
        raise ConfigError('there is nothing to continue: give --prompt "...", once for every text.')
    rows = [tokenizer.encode(prompt) for prompt in prompts]
    wrong = next((i for i, row in enumerate(rows) if not 1 <= len(row) <= block_size), None)
    if wrong is not None:
        raise ConfigError(
            f"prompt {wrong + 1} has {len(rows[wrong])} tokens, and must have between 1 and block_size={block_size}, "
            "which the network reads at once. Shorten it, or train with a longer data.block_size."
        )
    return rows


def write(config: GenerateConfig, module_class: type[GPTModule], out: TextIO) -> None:
    """Continue the prompts and write them to ``out`` as they come.

    Raises:
        ConfigError: an option is wrong, or does not fit the checkpoint.
        CheckpointError: the checkpoint cannot be read.
    """
    sampling, device = config.sampling, config.torch_device
    module, tokenizer = load(module_class, config.ckpt, config.tokenizer, device)
    rows = encode(config.prompt, tokenizer, module.config.block_size)
    texts = [TextStream(tokenizer, config.stop) for _ in rows]
    shown = InTurn(config.prompt, texts, out)
    steps = stream(module.network, rows, config.max_new_tokens, sampling=sampling, seed=config.seed, device=device)
    for tokens in steps:
        for row, token in enumerate(tokens):
            if token is not None:
                shown.add(row, texts[row].add(token))
        shown.advance()
        if all(text.ended for text in texts):
            break
    shown.end()


def make_parser(prog: str) -> ArgumentParser:
    """The command's options."""
    parser = ArgumentParser(prog=prog, description="Continue texts from a checkpoint, on one device.")
    parser.add_argument("--prompt", action="append", default=[], help="What to continue; once for every text.")
    parser.add_argument("--stop", action="append", default=[], help="A text ends before the first of these.")
    parser.add_class_arguments(GenerateConfig, None, skip={"prompt", "stop"}, as_group=False)
    return parser


def _underscored(arg: str) -> str:
    """The option as the parser spells it.

    >>> _underscored("--top-k=3"), _underscored("a-b"), _underscored("--stop=a-b")
    ('--top_k=3', 'a-b', '--stop=a-b')
    """
    name, equals, value = arg.partition("=")
    return f"--{name[2:].replace('-', '_')}{equals}{value}" if name.startswith("--") else arg


def main(module_class: type[GPTModule], args: Sequence[str], prog: str) -> int:
    """The command; returns the exit status. Options may be spelt ``--top-k`` as well."""
    given = make_parser(prog).parse_args([_underscored(arg) for arg in args])
    try:
        write(cast("Any", GenerateConfig)(**given.as_dict()), module_class, sys.stdout)
    except (LSError, ModuleNotFoundError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print()
        return 130
    except BrokenPipeError:  # who read along has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0

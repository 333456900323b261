"""The examples at the public faces run as they stand (with a small model for `demo`)."""

from __future__ import annotations

import asyncio
import doctest
import inspect
import pathlib
from typing import Any

import pytest
import tiny_model

from jaxengine import LLM, AsyncLLM, EngineConfig, SamplingParams

FACES = [LLM.generate, LLM.chat, AsyncLLM.generate, SamplingParams, EngineConfig]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder: pathlib.Path = tmp_path_factory.mktemp("tiny")
    return tiny_model.build(folder)


@pytest.mark.parametrize("face", FACES, ids=lambda face: face.__qualname__)
def test_examples_run(face: Any, model: str) -> None:
    text = (inspect.getdoc(face) or "").replace('"demo"', f'{model!r}, warmup="greedy"')
    names = {x.__name__: x for x in (LLM, AsyncLLM, EngineConfig, SamplingParams)}
    example = doctest.DocTestParser().get_doctest(
        text, names | {"asyncio": asyncio}, face.__qualname__, "", 0
    )
    assert example.examples, "there is none"
    said: list[str] = []
    failed = doctest.DocTestRunner(optionflags=doctest.NORMALIZE_WHITESPACE).run(
        example, out=said.append
    )
    assert not failed.failed, "".join(said)
    if isinstance(llm := example.globs.get("llm"), LLM):
        llm.close()

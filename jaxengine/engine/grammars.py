"""Structured output in the engine: a matcher for each constrained request, masks for each step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from jaxengine.config import EngineConfig
from jaxengine.sched.plan import Int32, StepPlan
from jaxengine.sched.request import Request
from jaxengine.wire.messages import EngineRequest

if TYPE_CHECKING:
    from jaxengine.structured.compiler import GrammarCompiler
    from jaxengine.structured.matcher import Matcher
    from jaxengine.structured.thinking import ThoughtLimit
    from jaxengine.text.tokenizer import Tokenizer


class Grammars:
    """Compiles off the loop. The tokenizer is read when the first constrained request comes."""

    def __init__(self, config: EngineConfig, vocab_size: int) -> None:
        self._config = config
        self._vocab_size = vocab_size
        self._compiler: GrammarCompiler | None = None
        self._tokenizer: Tokenizer | None = None
        self._waiting: list[Request] = []  # their grammars are being compiled

    def with_thought(
        self, wire: EngineRequest, matcher: Matcher | None
    ) -> Matcher | ThoughtLimit | None:
        """The request's grammar with the limit of its thought, if it has one."""
        if wire.thinking is None:
            return matcher
        from jaxengine.structured.thinking import ThoughtLimit

        tokenizer = self._get_tokenizer()
        return ThoughtLimit(
            wire.thinking, lambda ids: tokenizer.decode(ids, skip_special_tokens=False), matcher
        )

    def matcher(self, wire: EngineRequest) -> Matcher | None:
        """The request's grammar; None without a constraint. Raises ValueError when it cannot be
        enforced as written (what compiling finds comes later, by `failed`)."""
        asked = wire.params.structured_outputs
        if asked is None:
            return None
        return self._get_compiler().matcher_of(asked, wire.eos_token_ids or None)

    def watch(self, request: Request) -> None:
        """The request waits for its grammar."""
        self._waiting.append(request)

    @property
    def num_waiting(self) -> int:
        """Requests whose grammar is being compiled. One that was aborted is none of them, though
        `failed` forgets it only with the next step."""
        return sum(not request.is_finished for request in self._waiting)

    def failed(self) -> list[tuple[Request, str]]:
        """Requests whose grammar did not compile, each once, with the reason."""
        if not self._waiting:
            return []
        still, failed = [], []
        for request in self._waiting:
            matcher: Matcher | ThoughtLimit = request.grammar  # type: ignore[assignment]
            if matcher.failure is not None:
                failed.append((request, matcher.failure))
            elif not matcher.ready and not request.is_finished:
                still.append(request)
        self._waiting = still
        return failed

    def masks(self, plans: Sequence[StepPlan | None], num_rows: int) -> Int32:
        """[shards * num_rows, ceil(V / 32)] legal tokens of every row; rows without a grammar
        allow all. `num_rows` are one shard's."""
        from jaxengine.structured.matcher import fill_bitmasks

        out = np.full((len(plans) * num_rows, -(-self._vocab_size // 32)), -1, np.int32)
        for shard, plan in enumerate(plans):
            if plan is not None and plan.has_grammar:
                matchers = [
                    request.grammar if samples else None
                    for request, samples in zip(plan.requests, plan.samples.tolist(), strict=True)
                ]
                part = out[shard * num_rows : (shard + 1) * num_rows]
                fill_bitmasks(matchers, part)
        return out

    def shutdown(self) -> None:
        if self._compiler is not None:
            self._compiler.close()

    def _get_compiler(self) -> GrammarCompiler:
        if self._compiler is None:
            from jaxengine.structured.compiler import GrammarCompiler

            tokenizer = self._get_tokenizer()
            self._compiler = GrammarCompiler(
                tokenizer.tk.to_str(), self._vocab_size, tokenizer.eos_ids
            )
        return self._compiler

    def _get_tokenizer(self) -> Tokenizer:
        if self._tokenizer is None:
            from jaxengine.text.tokenizer import load_tokenizer
            from jaxengine.weights.resolve import resolve_model

            model = self._config.model
            files = resolve_model(model.model, model.revision, model.download_dir)
            self._tokenizer = load_tokenizer(files, model.tokenizer)
        return self._tokenizer

"""Replies of the OpenAI API: whole ones, and the pieces of a stream."""

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from tokenizers import Tokenizer

from specrun.runner.logprobs import TokenLogprobs
from specrun.runner.runner import Event, Request
from specrun.runner.statistics import Statistics


@dataclass
class Choice:
    """One completion as far as it has come."""

    request: Request
    statistics: Statistics
    text: list[str] = field(default_factory=list)
    logprobs: list[dict[str, Any]] = field(default_factory=list)
    finish_reason: str | None = None


class Replies:
    """Of one HTTP request. `chat`: chat completions, otherwise text completions."""

    def __init__(self, chat: bool, model: str, tokenizer: Tokenizer, requests: Sequence[Request]) -> None:
        self._chat, self._model, self._tokenizer = chat, model, tokenizer
        self.choices = [Choice(request, Statistics()) for request in requests]
        self.id = f"{'chatcmpl' if chat else 'cmpl'}-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def take(self, index: int, event: Event) -> dict[str, Any]:
        """Add one more token to a choice; returns the piece of a stream that says so."""
        choice = self.choices[index]
        choice.text.append(event.text)
        logprobs = None
        if event.logprobs is not None:
            logprobs = self._logprobs(event.token.id, event.logprobs)
            choice.logprobs.append(logprobs)
        choice.finish_reason = event.finish_reason
        content: dict[str, Any] = {"delta": {"content": event.text}} if self._chat else {"text": event.text}
        return self._piece(
            {
                "index": index,
                **content,
                "logprobs": None if logprobs is None else self._list_of([logprobs]),
                "finish_reason": event.finish_reason,
            },
            specrun={"origin": event.token.origin, "token_id": event.token.id},
        )

    def first(self, index: int) -> dict[str, Any] | None:
        """What a stream of chat begins with."""
        if not self._chat:
            return None
        delta = {"role": "assistant", "content": ""}
        return self._piece({"index": index, "delta": delta, "logprobs": None, "finish_reason": None})

    def last(self) -> dict[str, Any]:
        """What a stream ends with, where the client asked for usage."""
        return {**self._head(streamed=True), "choices": [], "usage": self.usage(), "specrun": self._statistics()}

    def whole(self) -> dict[str, Any]:
        choices = []
        for index, choice in enumerate(self.choices):
            text = "".join(choice.text)
            content: dict[str, Any]
            content = {"message": {"role": "assistant", "content": text}} if self._chat else {"text": text}
            logprobs = self._list_of(choice.logprobs) if choice.request.logprobs is not None else None
            choices.append({"index": index, **content, "logprobs": logprobs, "finish_reason": choice.finish_reason})
        head = self._head(streamed=False)
        return {**head, "choices": choices, "usage": self.usage(), "specrun": self._statistics()}

    def usage(self) -> dict[str, Any]:
        prompt = len(self.choices[0].request.prompt_ids)
        written = sum(choice.statistics.emitted for choice in self.choices)
        accepted = sum(choice.statistics.accepted_of["prediction"] for choice in self.choices)
        predicted = sum(len(choice.request.prediction) for choice in self.choices)
        return {
            "prompt_tokens": prompt,
            "completion_tokens": written,
            "total_tokens": prompt + written,
            "prompt_tokens_details": {"cached_tokens": self.choices[0].statistics.reused_tokens},
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": max(0, predicted - accepted),
            },
        }

    def _statistics(self) -> list[dict[str, Any]]:
        """What speculation did, by choice."""
        return [{"seed": choice.request.sampling.seed, **choice.statistics.to_json()} for choice in self.choices]

    def _head(self, streamed: bool) -> dict[str, Any]:
        kind = ("chat.completion.chunk" if streamed else "chat.completion") if self._chat else "text_completion"
        return {"id": self.id, "object": kind, "created": self._created, "model": self._model}

    def _piece(self, choice: dict[str, Any], **more: Any) -> dict[str, Any]:
        return {**self._head(streamed=True), "choices": [choice], **more}

    def _logprobs(self, token: int, found: TokenLogprobs) -> dict[str, Any]:
        top = [{**self._named(other), "logprob": value} for other, value in found.top]
        return {**self._named(token), "logprob": found.logprob, "top_logprobs": top}

    def _named(self, token: int) -> dict[str, Any]:
        text = self._tokenizer.decode([token], skip_special_tokens=False)
        return {"token": text, "bytes": list(text.encode())}

    def _list_of(self, logprobs: Sequence[dict[str, Any]]) -> dict[str, Any]:
        if self._chat:
            return {"content": list(logprobs), "refusal": None}
        return {
            "tokens": [each["token"] for each in logprobs],
            "token_logprobs": [each["logprob"] for each in logprobs],
            "top_logprobs": [{other["token"]: other["logprob"] for other in each["top_logprobs"]} for each in logprobs],
        }

"""Requests of the OpenAI API, as far as they are supported; any other field is refused."""

import json
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints

from specrun.engines.errors import RequestError
from specrun.runner.grammar import Grammar
from specrun.runner.processors import Processing
from specrun.runner.runner import Request, Runner
from specrun.runner.sampling import Sampling

MAX_TEXT = 1_000_000  # characters of one text
MAX_SEED = 2**63 - 1
DEFAULT_COMPLETION_TOKENS = 16  # of /v1/completions, as OpenAI's

Text = Annotated[str, StringConstraints(max_length=MAX_TEXT)]
Stop = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
TokenId = Annotated[int, Field(ge=0, le=2**31 - 1)]


class Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


class TextPart(Strict):
    type: Literal["text"]
    text: Text


class Message(Strict):
    role: Literal["system", "developer", "user", "assistant"]
    content: Text | list[TextPart]

    def rendered(self) -> dict[str, str]:
        """As chat templates take it."""
        role = "system" if self.role == "developer" else self.role
        return {"role": role, "content": text_of(self.content)}


class StreamOptions(Strict):
    include_usage: bool = False


class Prediction(Strict):
    """The client's own guess of the output."""

    type: Literal["content"]
    content: Text | list[TextPart]


class TextFormat(Strict):
    type: Literal["text"]


class JsonObjectFormat(Strict):
    type: Literal["json_object"]


class JsonSchema(Strict):
    name: Annotated[str, StringConstraints(max_length=64)]
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class JsonSchemaFormat(Strict):
    type: Literal["json_schema"]
    json_schema: JsonSchema


class Generation(Strict):
    """What both kinds of requests have."""

    model: Annotated[str, StringConstraints(max_length=1000)]
    temperature: float | None = Field(None, ge=0, le=100, description="1 if not given; 0: greedy")
    top_p: float | None = Field(None, gt=0, le=1)
    top_k: int | None = Field(None, ge=0, le=2**31 - 1, description="0: off")
    min_p: float | None = Field(None, ge=0, lt=1)
    seed: int | None = Field(None, ge=0, le=MAX_SEED)
    max_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    min_tokens: int | None = Field(None, ge=0, le=2**31 - 1)
    stop: Stop | Annotated[list[Stop], Field(max_length=16)] | None = None
    stop_token_ids: Annotated[list[TokenId], Field(max_length=1000)] | None = None
    n: int | None = Field(None, ge=1)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    presence_penalty: float | None = Field(None, ge=-2, le=2)
    frequency_penalty: float | None = Field(None, ge=-2, le=2)
    repetition_penalty: float | None = Field(None, gt=0, le=100)
    logit_bias: dict[str, float] | None = None
    user: Annotated[str, StringConstraints(max_length=1000)] | None = None
    proposer: Annotated[str, StringConstraints(max_length=100)] | None = Field(
        None, description="one that the bundle has, or none; by default the server decides each round"
    )
    k: int | None = Field(None, ge=1, le=10_000, description="positions ahead, fixed")
    cache_prompt: bool | None = Field(
        None, description="false: take no KV rows of earlier requests, and leave none; the output is the same"
    )

    def sampling(self, choice: int) -> Sampling:
        """Of choice number `choice`: each has a seed of its own."""
        seed = None if self.seed is None else (self.seed + choice) % (MAX_SEED + 1)
        return Sampling(
            temperature=1.0 if self.temperature is None else self.temperature,
            top_k=self.top_k or 0,
            top_p=1.0 if self.top_p is None else self.top_p,
            min_p=self.min_p or 0.0,
            seed=seed,
        ).with_seed()

    def processing(self, grammar: Grammar | None) -> Processing:
        """Raises RequestError."""
        return Processing(
            logit_bias={_token_id(token): bias for token, bias in (self.logit_bias or {}).items()},
            repetition_penalty=1.0 if self.repetition_penalty is None else self.repetition_penalty,
            frequency_penalty=self.frequency_penalty or 0.0,
            presence_penalty=self.presence_penalty or 0.0,
            min_tokens=self.min_tokens or 0,
            grammar=grammar,
        )

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def choices(self) -> int:
        return self.n or 1

    def _request(
        self,
        runner: Runner,
        prompt_ids: tuple[int, ...],
        max_tokens: int | None,
        choice: int,
        logprobs: int | None,
        grammar: Grammar | None = None,
        prediction: tuple[int, ...] = (),
        most_tokens: int | None = None,
    ) -> Request:
        """`most_tokens`: that the server allows."""
        room = max(1, runner.bundle.manifest.capacity - len(prompt_ids))
        most = room if most_tokens is None else min(room, most_tokens)
        if max_tokens is not None and most_tokens is not None and max_tokens > most_tokens:
            raise RequestError(f"got max_tokens {max_tokens}, expected at most {most_tokens}")
        return Request(
            prompt_ids=prompt_ids,
            max_tokens=most if max_tokens is None else max_tokens,
            sampling=self.sampling(choice),
            processing=self.processing(grammar),
            logprobs=logprobs,
            stop=self.stops,
            stop_token_ids=frozenset(self.stop_token_ids or ()),
            prediction=prediction,
            proposer=self.proposer,
            k=self.k,
            cache_prompt=self.cache_prompt is not False,
        )


class ChatCompletion(Generation):
    """POST /v1/chat/completions"""

    messages: Annotated[list[Message], Field(min_length=1, max_length=10_000)]
    max_completion_tokens: int | None = Field(None, ge=1, le=2**31 - 1)
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=20)
    response_format: TextFormat | JsonObjectFormat | JsonSchemaFormat | None = Field(None, discriminator="type")
    prediction: Prediction | None = None

    def requests(self, runner: Runner, most_tokens: int | None) -> list[Request]:
        """One for each choice. `most_tokens`: that the server allows. Raises RequestError."""
        prompt = runner.encode_messages([message.rendered() for message in self.messages])
        predicted = () if self.prediction is None else runner.encode_text(text_of(self.prediction.content))
        logprobs = (self.top_logprobs or 0) if self.logprobs else None
        limit = self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens
        return [
            self._request(runner, prompt, limit, choice, logprobs, self._grammar(), predicted, most_tokens)
            for choice in range(self.choices)
        ]

    def _grammar(self) -> Grammar | None:
        if isinstance(self.response_format, JsonObjectFormat):
            return Grammar("json_schema", '{"type": "object"}')
        if isinstance(self.response_format, JsonSchemaFormat):
            return Grammar("json_schema", json.dumps(self.response_format.json_schema.schema_))
        return None


class Completion(Generation):
    """POST /v1/completions"""

    prompt: Text | Annotated[list[TokenId], Field(min_length=1)]
    logprobs: int | None = Field(None, ge=0, le=5)
    echo: Literal[False] | None = None
    best_of: Literal[1] | None = None
    suffix: None = None

    def requests(self, runner: Runner, most_tokens: int | None) -> list[Request]:
        """One for each choice. `most_tokens`: that the server allows. Raises RequestError."""
        prompt = runner.encode(self.prompt) if isinstance(self.prompt, str) else tuple(self.prompt)
        limit = DEFAULT_COMPLETION_TOKENS if self.max_tokens is None else self.max_tokens
        return [
            self._request(runner, prompt, limit, choice, self.logprobs, most_tokens=most_tokens)
            for choice in range(self.choices)
        ]


def text_of(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "".join(part.text for part in content)


def _token_id(token: str) -> int:
    if not token.isascii() or not token.isdigit() or len(token) > 9:
        raise RequestError(f"got logit_bias for {token[:20]!r}, expected a token id")
    return int(token)

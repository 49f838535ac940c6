"""transformers: PyTorch, eager. Speculates by prompt lookup."""

import time
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoModelForCausalLM, DynamicCache, GenerationConfig

from benchmarks.workers.worker import Description, Generation, Settings, Worker, main

TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


class Transformers(Worker):
    def __init__(self, model: Path, precision: str, threads: int, stop: int | None) -> None:
        torch.set_num_threads(threads)
        self._model: Any = AutoModelForCausalLM.from_pretrained(model, dtype=TYPES[precision]).eval()
        self._model.generation_config = GenerationConfig()
        self._options = {"do_sample": False, "pad_token_id": 0, "eos_token_id": stop}
        self._calls: list[float] = []  # when each call of the model ended
        self._model.register_forward_hook(lambda *_: self._calls.append(time.perf_counter()))
        self._cache: Any = None

    def describe(self) -> Description:
        size = sum(each.numel() * each.element_size() for each in self._model.parameters())
        notes = {"attention": str(self._model.config._attn_implementation)}
        return Description(f"{transformers.__version__}, torch {torch.__version__}", size, notes)

    @torch.inference_mode()
    def generate(self, ids: list[int], max_tokens: int, settings: Settings) -> Generation:
        self._calls.clear()
        begin = time.perf_counter()
        prompt = torch.tensor([ids])
        output = self._model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            generation_config=GenerationConfig(max_new_tokens=max_tokens, **self._options, **settings),
        )
        found = output[0, len(ids) :].tolist()
        end = time.perf_counter()
        return Generation(found, end - begin, self._calls[0] - begin, len(self._calls))

    @torch.inference_mode()
    def start(self, ids: list[int]) -> None:
        self._cache = DynamicCache(config=self._model.config)
        self._model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True, logits_to_keep=1)

    @torch.inference_mode()
    def call(self, ids: list[int]) -> None:
        self._model(torch.tensor([ids]), past_key_values=self._cache, use_cache=True)


if __name__ == "__main__":
    main(Transformers)

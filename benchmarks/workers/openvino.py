"""OpenVINO GenAI on the CPU. Speculates by prompt lookup."""

import time
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov
import openvino_genai as genai

from benchmarks.workers.worker import Description, Generation, Settings, Worker, main

# Nothing in 16 or 8 bits, for "fp32". All other precisions run with what OpenVINO chooses on this CPU.
EXACT = {"INFERENCE_PRECISION_HINT": "f32", "KV_CACHE_PRECISION": "f32"}
CHOSEN = ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION", "DYNAMIC_QUANTIZATION_GROUP_SIZE")


class Openvino(Worker):
    def __init__(self, model: Path, precision: str, threads: int, stop: int | None) -> None:
        properties: dict[str, Any] = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        properties |= EXACT if precision == "fp32" else {}
        self._path = model
        self._ending = {"ignore_eos": True} if stop is None else {"eos_token_id": stop, "stop_token_ids": {stop}}
        self._plain = genai.LLMPipeline(model, "CPU", scheduler_config=_scheduler(), **properties)
        self._lookup = genai.LLMPipeline(model, "CPU", scheduler_config=_scheduler(), prompt_lookup=True, **properties)
        self._compiled = ov.Core().compile_model(model / "openvino_model.xml", "CPU", properties)
        self._request = self._compiled.create_infer_request()
        self._read = 0

    def describe(self) -> Description:
        size = (self._path / "openvino_model.bin").stat().st_size
        chosen = {name.lower(): self._compiled.get_property(name) for name in CHOSEN}
        notes = {
            name: value.to_string() if isinstance(value, ov.Type) else str(value) for name, value in chosen.items()
        }
        return Description(f"{version('openvino-genai')}, openvino {version('openvino')}", size, notes)

    def generate(self, ids: list[int], max_tokens: int, settings: Settings) -> Generation:
        config = genai.GenerationConfig(
            max_new_tokens=max_tokens, do_sample=False, apply_chat_template=False, **self._ending, **settings
        )
        pipeline = self._lookup if settings else self._plain
        begin = time.perf_counter()
        output = pipeline.generate(ov.Tensor(np.array([ids], np.int64)), config)
        seconds = time.perf_counter() - begin
        first = output.perf_metrics.get_ttft().mean / 1000
        steps = len(output.perf_metrics.raw_metrics.m_batch_sizes)
        return Generation(list(output.tokens[0]), seconds, first, steps)

    def prefill_seconds(self, ids: list[int]) -> float:
        return self.generate(ids, 1, {}).seconds

    def start(self, ids: list[int]) -> None:
        self._request.reset_state()
        self._read = 0
        self.call(ids)

    def call(self, ids: list[int]) -> None:
        end = self._read + len(ids)
        self._request.infer(
            {
                "input_ids": np.array([ids], np.int64),
                "attention_mask": np.ones((1, end), np.int64),
                "position_ids": np.arange(self._read, end, dtype=np.int64)[None],
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        self._read = end


def _scheduler() -> Any:
    """A prompt in one call, and nothing of it kept for the next request."""
    scheduler = genai.SchedulerConfig()
    scheduler.enable_prefix_caching = False
    scheduler.max_num_batched_tokens = 1 << 20
    return scheduler


if __name__ == "__main__":
    main(Openvino)

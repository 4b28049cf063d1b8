"""A vLLM engine as a child process that takes commands: one JSON line in, one JSON line out (see ``engine.py``).

Started with two inherited pipe descriptors; standard output stays vLLM's.
"""

from __future__ import annotations

import json
import os
import random
import sys
import time
from typing import Any

from e2e import worker_probe


class Engine:
    """One ``LLM`` and the commands on it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        from vllm import LLM

        self.llm = LLM(
            skip_tokenizer_init=True,
            enforce_eager=True,
            max_model_len=settings.pop("max_model_len", 8192),
            enable_prefix_caching=settings.pop("enable_prefix_caching", False),
            dtype=settings.pop("dtype", "float32"),
            disable_log_stats=False,
            **settings,
        )

    def generate(
        self, prompts: list[list[int]], max_tokens: int = 8, salts: Any = None, lora: Any = None
    ) -> Any:
        """Greedy tokens, cached tokens, finish reason of each prompt, all at once, and the seconds it took."""
        from vllm import SamplingParams
        from vllm.lora.request import LoRARequest

        params = SamplingParams(detokenize=False, ignore_eos=True, temperature=0, max_tokens=max_tokens)
        inputs = []
        for i, prompt in enumerate(prompts):
            one: dict[str, Any] = {"prompt_token_ids": prompt}
            if salts is not None and salts[i]:
                one["cache_salt"] = salts[i]
            inputs.append(one)
        began = time.monotonic()
        outputs = self.llm.generate(
            inputs, params, use_tqdm=False, lora_request=LoRARequest(*lora) if lora is not None else None
        )
        return {
            "seconds": time.monotonic() - began,
            "results": [
                {
                    "tokens": list(o.outputs[0].token_ids),
                    "cached": o.num_cached_tokens or 0,
                    "finish": o.outputs[0].finish_reason,
                }
                for o in outputs
            ],
        }

    def abort_storm(self, prompts: list[list[int]], count: int, seed: int) -> int:
        """Start ``count`` requests and abort each at a random step; returns how many ended by themselves."""
        from vllm import SamplingParams

        rng, engine = random.Random(seed), self.llm.llm_engine
        params = SamplingParams(detokenize=False, ignore_eos=True, temperature=0, max_tokens=16)
        waiting, alive, ended = list(range(count)), {}, 0
        while waiting or alive:
            while waiting and len(alive) < 6:
                ident = f"storm-{seed}-{waiting.pop()}"
                engine.add_request(ident, {"prompt_token_ids": rng.choice(prompts)}, params)
                alive[ident] = rng.randrange(0, 5)
            for output in engine.step():
                if output.finished:
                    ended += alive.pop(output.request_id, None) is not None
            for ident in [i for i, left in alive.items() if left <= 0]:
                engine.abort_request([ident], internal=False)
                del alive[ident]
            alive = {i: left - 1 for i, left in alive.items()}
        while engine.has_unfinished_requests():
            engine.step()
        return ended

    def reset(self) -> bool:
        """As after a change of weights: forget every prefix, here and in the cache."""
        return bool(self.llm.reset_prefix_cache(reset_connector=True))

    def preemptions(self) -> int:
        """Requests preempted so far, by vLLM's own count."""
        return sum(int(x.value) for x in self.llm.get_metrics() if x.name == "vllm:num_preemptions")

    def worker(self, name: str, *args: Any) -> Any:
        """Run a function of ``worker_probe`` in the worker process."""
        return self.llm.collective_rpc(getattr(worker_probe, name), args=args)[0]


def main() -> None:
    serve(int(sys.argv[1]), int(sys.argv[2]))


def serve(commands_fd: int, answers_fd: int) -> None:
    """Make the engine of the first line, then answer one line after the other until there is no more."""
    commands, answers = os.fdopen(commands_fd), os.fdopen(answers_fd, "w")

    def answer(value: Any) -> None:
        answers.write(json.dumps(value) + "\n")
        answers.flush()

    engine = Engine(json.loads(commands.readline()))
    answer({"ok": None})
    for line in commands:
        command = json.loads(line)
        try:
            answer({"ok": getattr(engine, command["op"])(*command["args"], **command["kwargs"])})
        except Exception as exc:
            answer({"error": f"{type(exc).__name__}: {exc}"})


if __name__ == "__main__":
    main()

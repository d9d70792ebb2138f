"""transformers `generate` in bf16 on a folder; answers loads, a line of JSON each. A load of many
streams is one batch: it has no continuous batching. `FOLDER THREADS`."""

import json
import sys
import time

import torch
import transformers


class Clock(transformers.StoppingCriteria):
    """Sees every new token; keeps the time of the first."""

    def __init__(self) -> None:
        self.first_s = 0.0

    def __call__(
        self, input_ids: torch.LongTensor, scores: torch.FloatTensor, **kwargs: object
    ) -> torch.BoolTensor:
        self.first_s = self.first_s or time.perf_counter()
        return torch.zeros(len(input_ids), dtype=torch.bool)


@torch.inference_mode()
def measure(model: transformers.PreTrainedModel, load: dict[str, int]) -> dict[str, float]:
    """One `generate` call over `streams` random prompts, sampling greedily, EOS held back."""
    shape = (load["streams"], load["prompt_len"])
    ids = torch.randint(256, model.config.vocab_size, shape)
    clock = Clock()
    started_s = time.perf_counter()
    whole = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=load["output_len"],
        max_new_tokens=load["output_len"],
        do_sample=False,
        pad_token_id=0,
        stopping_criteria=[clock],
    )
    seconds = time.perf_counter() - started_s
    return {
        "seconds": seconds,
        "ttft_s": clock.first_s - started_s,
        "prompt_tokens": ids.numel(),
        "output_tokens": whole.numel() - ids.numel(),
    }


def main(path: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path, dtype=torch.bfloat16, local_files_only=True
    ).eval()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(model, json.loads(line))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

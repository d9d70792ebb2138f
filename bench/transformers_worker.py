"""transformers `generate` in bf16 on a GGUF file or folder; answers loads, a line of JSON each."""

import json
import pathlib
import sys
import time

import torch
import transformers


def load(path: pathlib.Path) -> transformers.PreTrainedModel:
    where = {"gguf_file": path.name} if path.suffix == ".gguf" else {}
    folder = path.parent if where else path
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.bfloat16, local_files_only=True, **where
    )
    return model.eval()


@torch.inference_mode()
def seconds(model: transformers.PreTrainedModel, load: dict[str, int]) -> float:
    """Of one `generate` call over `streams` random prompts, sampling greedily, EOS held back."""
    shape = (load["streams"], load["prompt_len"])
    ids = torch.randint(256, model.config.vocab_size, shape)
    started_s = time.perf_counter()
    model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        min_new_tokens=load["output_len"],
        max_new_tokens=load["output_len"],
        do_sample=False,
        pad_token_id=0,
    )
    return time.perf_counter() - started_s


def main(path: str, threads: str) -> None:
    torch.set_num_threads(int(threads))
    model = load(pathlib.Path(path))
    for line in sys.stdin:
        print(json.dumps({"seconds": seconds(model, json.loads(line))}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Runs in OpenVINO's environment: continuous batching over an IR folder, without HTTP before it,
which is in its favour. Answers loads, a line of JSON each. `FOLDER THREADS KV_TOKENS VOCAB`.
"""

import itertools
import json
import sys
import time

import numpy
import openvino
import openvino_genai

BLOCK_TOKENS = 32  # of its KV cache on a processor


def pipeline(folder, threads, kv_tokens):
    scheduler = openvino_genai.SchedulerConfig()
    scheduler.num_kv_blocks = kv_tokens // BLOCK_TOKENS
    scheduler.max_num_batched_tokens = 2048  # whole prompts in a step: its default of 256 is slower
    scheduler.max_num_seqs = 64
    scheduler.enable_prefix_caching = False
    hints = {"INFERENCE_NUM_THREADS": threads}
    return openvino_genai.ContinuousBatchingPipeline(folder, scheduler, "CPU", hints)


def measure(pipe, load, numbers, vocab):
    """Requests are added at once and stepped until none is left."""
    config = openvino_genai.GenerationConfig()
    config.max_new_tokens = load["output_len"]
    config.ignore_eos = True
    config.do_sample = False
    shape = (load["streams"], 1, load["prompt_len"])
    prompts = numpy.random.default_rng().integers(256, vocab, shape, dtype=numpy.int64)
    started_s = time.perf_counter()
    handles = [pipe.add_request(next(numbers), openvino.Tensor(ids), config) for ids in prompts]
    ttft_s = None
    while pipe.has_non_finished_requests():
        pipe.step()
        if ttft_s is None and handles[0].can_read():
            ttft_s = time.perf_counter() - started_s
    seconds = time.perf_counter() - started_s
    outputs = [out for handle in handles for out in handle.read_all()]
    return {
        "seconds": seconds,
        "ttft_s": ttft_s,
        "prompt_tokens": prompts.size,
        "output_tokens": sum(len(out.generated_ids) for out in outputs),
    }


def main(folder, threads, kv_tokens, vocab):
    pipe = pipeline(folder, int(threads), int(kv_tokens))
    numbers = itertools.count()
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(pipe, json.loads(line), numbers, int(vocab))), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])

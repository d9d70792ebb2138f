"""Runs in OpenVINO's environment: a safetensors folder into IR. `SOURCE FOLDER fp16|int8|int4`."""

import sys

import openvino
import openvino_tokenizers
import transformers
from optimum.intel import OVModelForCausalLM, OVWeightQuantizationConfig

# Groups of 32 with a minimum each, every layer: the form of the GGUF's own Q4_1 blocks.
QUANTISED = {
    "fp16": None,
    "int8": {"bits": 8, "sym": False},
    "int4": {"bits": 4, "sym": False, "group_size": 32, "ratio": 1.0},
}


def main(source: str, folder: str, kind: str) -> None:
    given = QUANTISED[kind]
    how = {"load_in_8bit": False} if given is None else {}
    if given is not None:
        how["quantization_config"] = OVWeightQuantizationConfig(**given)
    model = OVModelForCausalLM.from_pretrained(source, export=True, compile=False, **how)
    model.save_pretrained(folder)
    tokenizer = transformers.AutoTokenizer.from_pretrained(source)
    tokenizer.save_pretrained(folder)
    made = openvino_tokenizers.convert_tokenizer(tokenizer, with_detokenizer=True)
    for name, part in zip(("tokenizer", "detokenizer"), made, strict=True):
        openvino.save_model(part, f"{folder}/openvino_{name}.xml")


if __name__ == "__main__":
    main(*sys.argv[1:])

"""The same weights for engines that read no GGUF: dequantised once into bfloat16 safetensors with
config and tokenizer, in the cache folder; and from those OpenVINO's own form.

`python -m bench.weights FILE.gguf FOLDER` writes the folder; `safetensors` calls it where missing.
"""

import hashlib
import pathlib
import shutil
import sys

from bench import install
from bench.install import Say


def safetensors(gguf: pathlib.Path, say: Say) -> pathlib.Path:
    """The folder made of a GGUF file; of a folder, itself."""
    if gguf.is_dir():
        return gguf
    folder = install.peers_folder() / f"weights-{_key(gguf)}"
    with install.once(folder, say) as is_new:
        if is_new:
            say(f"writing {gguf.name} as bfloat16 safetensors in {folder}")
            command = (sys.executable, "-m", "bench.weights", str(gguf), str(folder))
            install.step(command, folder, say)
    return folder


def openvino(folder: pathlib.Path, kind: str, say: Say) -> pathlib.Path:
    """The same as OpenVINO's IR, its weights fp16, int8 or int4."""
    made = install.peers_folder() / f"openvino-{folder.name}-{kind}"
    with install.once(made, say) as is_new:
        if is_new:
            python = install.python_of(install.ready("openvino", say))
            worker = pathlib.Path(__file__).with_name("openvino_convert.py")
            say(f"converting {folder.name} to OpenVINO {kind} in {made}")
            install.step((python, str(worker), str(folder), str(made), kind), made, say)
    return made


def _key(path: pathlib.Path) -> str:
    """Of the file's place, size and time: another file is another folder."""
    stat = path.stat()
    facts = f"{path.resolve()} {stat.st_size} {stat.st_mtime_ns}"
    return f"{path.stem}-{hashlib.sha256(facts.encode()).hexdigest()[:8]}"


def write(gguf: pathlib.Path, folder: pathlib.Path) -> None:
    """transformers reads the GGUF and writes its own layout."""
    import torch
    import transformers

    given = {"gguf_file": gguf.name, "local_files_only": True}
    model = transformers.AutoModelForCausalLM.from_pretrained(
        gguf.parent, dtype=torch.bfloat16, **given
    )
    tokenizer = transformers.AutoTokenizer.from_pretrained(gguf.parent, **given)
    partial = folder / "partial"
    # It is dequantised: nobody is to take it for GGUF any more, transformers included.
    model.hf_quantizer = None
    del model.config.quantization_config
    model.save_pretrained(partial)
    tokenizer.save_pretrained(partial)
    for path in partial.iterdir():
        path.replace(folder / path.name)
    shutil.rmtree(partial)


if __name__ == "__main__":
    write(pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]))

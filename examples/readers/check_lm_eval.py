"""lm-evaluation-harness: its command computes the bits per byte of the texts, by a task file of our own.

python check_lm_eval.py WEIGHTS REFERENCE.json
"""

import json
import math
import os
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

TASK = """\
task: own_texts
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: loglikelihood_rolling
doc_to_text: ""
doc_to_target: "{{{{text}}}}"
metric_list: [{{metric: bits_per_byte}}]
"""

reference = json.loads(Path(sys.argv[2]).read_text("utf-8"))
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    rows = [json.dumps({"text": row["text"]}) + "\n" for row in reference["prompts"]]
    (folder / "texts.jsonl").write_text("".join(rows))
    (folder / "own_texts.yaml").write_text(TASK.format(file=folder / "texts.jsonl"))
    # its windows begin with BOS by themselves; with the tokenizer's, BOS would count as a part of the text
    model_args = f"pretrained={sys.argv[1]},dtype=float32,add_bos_token=False"
    subprocess.run(
        [
            *(sys.executable, "-m", "lm_eval", "--model", "hf", "--model_args", model_args),
            *("--device", "cpu", "--tasks", "own_texts", "--include_path", name, "--output_path", name),
        ],
        env=os.environ | {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"},
        check=True,
    )
    (results,) = folder.rglob("results*.json")
    theirs = json.loads(results.read_text())["results"]["own_texts"]["bits_per_byte,none"]
agrees = math.isclose(theirs, reference["bits_per_byte"], rel_tol=1e-4)
print(
    f"{'ok' if agrees else 'DIFFERS'}  lm_eval {version('lm_eval')}: {theirs:.6f} bits per byte, "
    f"{reference['bits_per_byte']:.6f} in the reference"
)
sys.exit(0 if agrees else 1)

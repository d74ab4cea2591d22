"""lm-evaluation-harness: a multiple-choice task of four lines, written here, on the weights.

python check_lm_eval.py WEIGHTS
"""

import json
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

ROWS = [
    {"text": "The function returns a", "choices": [" list", " zzz"], "answer": 0},
    {"text": "import", "choices": ["鸟鸟鸟鸟", " os"], "answer": 1},
    {"text": "春眠不觉", "choices": ["晓", " XQ##"], "answer": 0},
    {"text": "See the", "choices": [" documentation", "}}}}}}}}"], "answer": 0},
]
TASK = """\
task: four_lines
dataset_path: json
dataset_kwargs: {{data_files: {{test: {file}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{text}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: answer
target_delimiter: ""
metric_list: [{{metric: acc}}]
"""

with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    (folder / "four_lines.yaml").write_text(TASK.format(file=folder / "rows.jsonl"))
    results = lm_eval.simple_evaluate(
        model="hf",
        model_args={"pretrained": sys.argv[1], "dtype": "float32", "device": "cpu"},
        tasks=["four_lines"],
        task_manager=TaskManager(include_path=name, include_defaults=False),
        bootstrap_iters=0,
    )
accuracy = results["results"]["four_lines"]["acc,none"]
print(f"ok  lm_eval {version('lm_eval')}: accuracy {accuracy:.2f} of {len(ROWS)} lines")

"""CTranslate2, on a folder of `ct2-transformers-converter --model WEIGHTS --output_dir FOLDER`.

python check_ctranslate2.py FOLDER REFERENCE.json WEIGHTS
"""

import sys

import ctranslate2
from comparison import Comparison
from transformers import AutoTokenizer

generator = ctranslate2.Generator(sys.argv[1], device="cpu", compute_type="float32")
tokenizer = AutoTokenizer.from_pretrained(sys.argv[3], trust_remote_code=False)
comparison = Comparison(f"ctranslate2 {ctranslate2.__version__}")
comparison.ids(lambda text: tokenizer(text, add_special_tokens=False)["input_ids"])
for row in comparison.prompts:
    whole = tokenizer.convert_ids_to_tokens(row["ids"] + row["greedy"])
    scores = generator.forward_batch([whole], return_log_probs=True)
    import numpy as np

    table = np.array(scores.to(ctranslate2.DataType.float32))[0][len(row["ids"]) - 1 : -1]
    comparison.greedy(row, table.argmax(-1).tolist(), table.max(-1).tolist())
comparison.finish()

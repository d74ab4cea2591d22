"""`transformers serve WEIGHTS`: a chat completion over HTTP on this machine.

python check_serve.py WEIGHTS
"""

import json
import subprocess
import sys
import time
import urllib.error
import urllib.request

import transformers

PORT = 8765
server = subprocess.Popen(["transformers", "serve", sys.argv[1], "--port", str(PORT), "--device", "cpu"])
try:
    messages = [{"role": "user", "content": "Hello"}]
    body = {"model": sys.argv[1], "messages": messages, "max_tokens": 8, "stream": False}
    request = urllib.request.Request(
        f"http://127.0.0.1:{PORT}/v1/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json"},
    )
    for _ in range(120):
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                message = json.loads(answer.read())["choices"][0]["message"]
            break
        except (urllib.error.URLError, ConnectionError) as error:
            if isinstance(error, urllib.error.HTTPError):
                raise SystemExit(f"DIFFERS  transformers serve: {error.code} {error.read()!r}") from error
            time.sleep(1)
    else:
        raise SystemExit("DIFFERS  transformers serve: no answer within two minutes")
    print(f"ok  transformers {transformers.__version__} serve: {message['role']} said {message['content']!r}")
finally:
    server.terminate()
    server.wait()

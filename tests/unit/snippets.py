"""Runs snippets of Python, each in a process forked from one that has imported vLLM and its models, no plugin.

Read from standard input, a JSON object a line: `code`, `env`, `out` (file that takes the output), answered by a line
with the exit status.
"""

import json
import os
import sys
from contextlib import suppress
from importlib import import_module

import vllm.plugins
from vllm import ModelRegistry

from vllm_pp_fixes.registry import MODELS

for module in MODELS:
    with suppress(ModuleNotFoundError):  # an older release
        import_module(f"vllm.model_executor.models.{module}")
for module in [module for module in sys.modules if module.split(".")[0] == "vllm_pp_fixes"]:
    del sys.modules[module]

print("ready", flush=True)
for line in sys.stdin:
    request = json.loads(line)
    pid = os.fork()
    if pid == 0:
        out = os.open(request["out"], os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(out, 1)
        os.dup2(out, 2)
        os.environ.update(request["env"])
        status = 1
        try:
            exec(request["code"], {"ModelRegistry": ModelRegistry, "vllm": vllm})
            status = 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(status)
    print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)

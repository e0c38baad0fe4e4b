"""`python -m tests.plan_table`: write the table of docs/plan.md, each row of it as `plan --json` answers."""

from __future__ import annotations

import json
import tempfile
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

from tests.checkpoints import published, write_checkpoint
from vllm_pp_fixes.cli import main

PAGE = Path(__file__).parents[1] / "docs" / "plan.md"
BEGIN, END = "<!-- written by `python -m tests.plan_table` -->", "<!-- end of what is written -->"
ROWS = (
    ("Qwen/Qwen3-VL-4B-Instruct", "8GiB,8GiB"),
    ("Qwen/Qwen3-VL-8B-Instruct", "16GiB,16GiB"),
    ("Qwen/Qwen3-VL-8B-Instruct", "16GiB,32GiB"),
    ("Qwen/Qwen3-VL-8B-Instruct", "9GiB,22GiB"),
    ("Qwen/Qwen3-VL-8B-Instruct", "32GiB,10GiB,10GiB"),
    ("Qwen/Qwen3-VL-32B-Instruct", "48GiB,48GiB"),
    ("Qwen/Qwen3-VL-32B-Instruct", "24GiB,24GiB,24GiB,24GiB"),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", "48GiB,48GiB"),
    ("Qwen/Qwen3-VL-30B-A3B-Instruct", "24GiB,24GiB,48GiB"),
    ("Qwen/Qwen3-VL-235B-A22B-Instruct", ",".join(["80GiB"] * 8)),
    ("Qwen/Qwen3-Omni-30B-A3B-Instruct", "48GiB,48GiB"),
    ("OpenMOSS-Team/MOSS-Audio-4B-Instruct", "8GiB,8GiB"),
    ("OpenMOSS-Team/MOSS-Audio-8B-Instruct", "16GiB,16GiB"),
    ("OpenMOSS-Team/MOSS-Audio-8B-Instruct", "12GiB,24GiB"),
)


def table() -> str:
    """Return the table as Markdown."""
    lines = [
        "| model, bfloat16 | GPUs | vLLM's own split | tokens | best split | tokens |",
        "|---|---|---|---|---|---|",
    ]
    with tempfile.TemporaryDirectory() as root:
        for model, memory in ROWS:
            folder = write_checkpoint(Path(root) / model, *published(model))
            with redirect_stdout(StringIO()) as out:
                assert main(["plan", str(folder), "--memory", memory, "--json"]) == 0
            answer = json.loads(out.getvalue())
            cells = [
                model.split("/")[1].removesuffix("-Instruct"),
                memory.replace("GiB", "").replace(",", " + ") + " GiB",
            ]
            for name in ("own", "best"):
                judged = answer[name]
                fits = "does not fit" if judged["lacks"] or not judged["tokens"] else f"{judged['tokens']:,}"
                cells += ["+".join(map(str, judged["split"])), fits]
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def written(page: str) -> str:
    """Return the page with the table in its place."""
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    return f"{before}{BEGIN}\n{table()}\n{END}{after}"


if __name__ == "__main__":
    PAGE.write_text(written(PAGE.read_text()))

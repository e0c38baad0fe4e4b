"""README says what the catalogue says."""

from pathlib import Path

from vllm_pp_fixes.catalog import FAULTS, MODELS, UNTOUCHED, Fault

ROOT = Path(__file__).parents[2]


def row(fault: Fault) -> str:
    cells = (fault.id, ", ".join(fault.models), fault.releases, fault.symptom, fault.upstream, fault.cure)
    return f"| {' | '.join(cells)} |"


def model_row(model: str) -> str:
    served = MODELS[model]
    return f"| {model} | {', '.join(served)} | `vllm_pp_fixes.models.{model}.{next(iter(served.values()))}` |"


def untouched_row(architecture: str) -> str:
    return f"| {architecture} | {UNTOUCHED[architecture]} |"


def test_the_tables_are_the_catalogues() -> None:
    rows = [line for line in (ROOT / "README.md").read_text().splitlines() if line.startswith("| ")]
    for expected in ([*map(row, FAULTS)], [*map(model_row, MODELS)], [*map(untouched_row, UNTOUCHED)]):
        names = {line.split(" ")[1] for line in expected}
        assert [line for line in rows if line.split(" ")[1] in names and line.count("|") == expected[0].count("|")] == (
            expected
        )


def test_the_catalogue_names_known_models_and_no_fault_twice() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert {model for fault in FAULTS for model in fault.models} == set(MODELS)
    for model in MODELS:
        assert (ROOT / "vllm_pp_fixes" / "models" / f"{model}.py").is_file()

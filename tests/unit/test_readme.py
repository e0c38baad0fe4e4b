"""README says what the catalogue says, and holds nothing that it should not."""

from pathlib import Path

from vllm_pp_fixes.catalog import FAULTS, MODELS

ROOT = Path(__file__).parents[2]


def row(fault) -> str:
    cells = (fault.id, ", ".join(fault.models), fault.releases, fault.symptom, fault.upstream, fault.cure)
    return f"| {' | '.join(cells)} |"


def test_the_table_of_faults_is_the_catalogues() -> None:
    readme = (ROOT / "README.md").read_text()
    rows = [
        line for line in readme.splitlines() if line.startswith("| ") and line.split(" ")[1] in {f.id for f in FAULTS}
    ]
    assert rows == [row(fault) for fault in FAULTS]


def test_the_catalogue_names_known_models_and_no_fault_twice() -> None:
    assert len({fault.id for fault in FAULTS}) == len(FAULTS)
    assert {model for fault in FAULTS for model in fault.models} == set(MODELS)
    for model in MODELS:
        assert (ROOT / "vllm_pp_fixes" / "models" / f"{model}.py").is_file()

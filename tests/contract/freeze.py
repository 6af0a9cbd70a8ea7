"""Writes the JSON Schemas and golden files of messages that have none yet: `python -m tests.contract.freeze`.

A golden file is never rewritten: it is what was really sent at that version. `--schemas` renews the schemas after a field
was added; `tests/contract/test_frozen.py` says whether that was a compatible change.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from berth.contracts.envelope import registered
from berth.decisions.policy.schema import schema_text as policy_schema_text
from tests.contract.samples import sample_envelope

HERE = Path(__file__).parent
SCHEMAS = HERE / "schemas"
GOLDEN = HERE / "golden"
POLICY_SCHEMA = HERE.parents[1] / "policies" / "schema.json"


def schema_text(type_: str) -> str:
    """The schema of a type's data, as it is kept."""
    return json.dumps(registered()[type_].model_json_schema(), indent=1, sort_keys=True, ensure_ascii=False) + "\n"


def main() -> None:
    """Write what is missing."""
    renew = "--schemas" in sys.argv
    for type_ in sorted(registered()):
        schema = SCHEMAS / f"{type_}.json"
        if renew or not schema.exists():
            schema.write_text(schema_text(type_))
        golden = GOLDEN / f"{type_}.json"
        if not golden.exists():
            golden.write_bytes(sample_envelope(type_).to_json() + b"\n")
    if renew or not POLICY_SCHEMA.exists():
        POLICY_SCHEMA.write_text(policy_schema_text())


if __name__ == "__main__":
    main()

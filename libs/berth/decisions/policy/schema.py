"""The JSON Schema of the policy document, for editors and other programs.

It says what a document may look like; what makes sense only `berth policy check` knows. Made from the models, with the
meaning of each knob, so that an editor shows it.
"""

from __future__ import annotations

import json
from typing import Any

from berth.decisions.policy.document import Policy

ID = "https://berth.dev/schemas/policy.json"

_MEANINGS: dict[str, dict[str, str]] = {
    "Policy": {
        "card_types": "Kinds of GPU that one can ask for.",
        "tenants": "Who owns quota, by name.",
        "cohorts": "Groups of tenants that may lend to each other, by name.",
        "defaults": "Settings of every class.",
        "classes": "What single classes set otherwise.",
        "class_order": "Classes from highest to lowest; a lower class never preempts a higher one.",
        "protection": "Capacity of a class or tenant that others may not touch, and what the class may take.",
        "reservations": "GPUs for a tenant from-to.",
        "approval": "Which changes a second operator has to approve.",
    },
    "QueueSettings": {
        "discipline": "strict: nobody overtakes within a card type. backfill: the first job that does not fit gets a "
        "planned start, others start only if they do not delay it. best_effort: whatever fits starts.",
        "reserve_after": "Waiting time after which a job that does not fit gets a planned start.",
    },
    "FairShareSettings": {
        "basis": "none, current (GPUs held), or history (GPU time held, halved every half_life); divided by weight, "
        "smaller first.",
        "half_life": "Under defaults only: what a tenant has had fades alike for all classes.",
    },
    "PreemptionSettings": {
        "by_priority": "Lower priorities may be stopped: off, same_tenant or any_tenant.",
        "reclaim": "borrowed: a tenant within its quota takes back what others hold beyond theirs.",
        "fair": "final_share: take from another tenant of the cohort if afterwards the own share is not the larger.",
        "trim_elastic": "Workers above min_workers are taken one by one instead of whole jobs.",
        "victim_order": "How to choose among sufficient sets, first criterion first.",
        "grace": "Longest time to stop after notice.",
        "min_runtime": "No notice before so much running since the latest start.",
    },
    "PlacementSettings": {
        "strategy": "pack: fullest node that fits, for each worker; spread: emptiest.",
        "keep_links_whole": "Single GPUs come from link groups that are broken already.",
    },
    "TypesSettings": {
        "when_full": "next_type_first: a free later type before preempting on an earlier one; preempt_first: the reverse."
    },
    "IdleSettings": {
        "timeout": "Time since the last counted activity ended.",
        "warn_before": "How long before the end its owner is told.",
        "counts": "Signs of work. Connections and keep-alive traffic never count.",
        "gpu_util_at_least": "Use of a GPU, 0 to 1, from which gpu_util counts.",
    },
    "LifetimeSettings": {
        "max": "Time since the first start, busy or not.",
        "extend_by": "Length of one extension.",
        "extensions": "How many are granted.",
    },
    "RecoverySettings": {
        "suspect_after": "Silence after which a node gets no new work. Under defaults only.",
        "lost_after": "Silence after which a node's jobs are tried elsewhere, at least 60s. Under defaults only.",
        "gang_grace": "How long a gang short of a worker is kept.",
        "max_restarts": "Restarts after failures of the job's own.",
        "backoff": "Pause after such a failure: first, first x factor, ... up to max.",
        "quarantine": "So many failed starts within so long take a node out. Under defaults only.",
        "charge_job_for_node_faults": "Whether restarts that a node caused count against max_restarts.",
        "ready_timeout": "A replica that is not ready by then is withdrawn.",
    },
    "ClassSettings": {
        "quota_cut": "drain: running jobs finish; preempt: stop in victim order until it fits.",
        "never_fits": "refuse or wait, for what no emptying of the installed cluster could fit.",
    },
    "TenantSettings": {
        "quota": "GPUs owned, by card type; a type that is missing has no limit.",
        "borrow_limit": "How far beyond the quota; a type that is missing has no limit.",
        "lend_limit": "How much of the own quota others may use; a type that is missing: all of it.",
        "weight": "Divides the share in fair order; 0 comes last.",
    },
    "ProtectionLine": {
        "reserved": "Kept for the class.",
        "floor": "What preemption must leave the class.",
        "lend_when_idle": "Others may use the reserve until it is wanted.",
        "windows": "When the line holds; none: always.",
        "clear_before": "Notice before a window opens.",
        "may_preempt": "Classes that this one may stop.",
        "max_preempt_share": "Of the GPUs those classes held when share_window began, rounded down.",
        "when_unmet": "preempt_lower_class: what is missing to reserved is taken from lower classes, lowest first.",
    },
    "Window": {
        "days": "Days on which it begins; all if left out.",
        "from": "HH:MM in the window's own zone.",
        "to": "HH:MM; earlier than from: over midnight. 24:00 is the end of the day.",
        "zone": "As Asia/Shanghai, Europe/Berlin or UTC.",
    },
    "Reservation": {"running": "What happens to jobs in the way.", "announced": "From when on it is planned for."},
}


def policy_schema() -> dict[str, Any]:
    """The schema, JSON Schema draft 2020-12."""
    schema = Policy.model_json_schema(by_alias=True, mode="validation")
    definitions: dict[str, Any] = schema.get("$defs", {})
    for name, meanings in _MEANINGS.items():
        model = schema if name == "Policy" else definitions[name]
        for key, meaning in meanings.items():
            model["properties"][key]["description"] = meaning
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "$id": ID,
        **schema,
        "title": "Berth policy",
        "description": "The rules of one pool. `berth policy check FILE` says whether they make sense.",
    }


def schema_text() -> str:
    """The schema as it is kept in `policies/schema.json`."""
    return json.dumps(policy_schema(), indent=1, ensure_ascii=False) + "\n"
